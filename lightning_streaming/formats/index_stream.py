"""Reads ``index.json`` piece by piece: memory holds its table, and of its text a few megabytes at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_streaming.errors import IndexFormatError
from lightning_streaming.formats.checks import brief, shortened
from lightning_streaming.formats.index_builder import TableBuilder
from lightning_streaming.formats.index_fields import take
from lightning_streaming.formats.index_json import check_version, parse_shard
from lightning_streaming.formats.index_table import ShardTable
from lightning_streaming.formats.index_template import Template, add_rows, template_of

_AT_ONCE = 4 * 2**20
"""Bytes read at a time."""
_ENOUGH = 4
"""Bytes from which the encoding of a JSON text can be told."""
_SPACE = re.compile(r"[ \t\n\r]*")

Read = Callable[[int], bytes]
"""Gives up to so many bytes of a file, none at its end."""


class _Text:
    """JSON that is read as far as it is needed."""

    def __init__(self, read: Read) -> None:
        first = b""
        while len(first) < _ENOUGH and (piece := read(_AT_ONCE)):
            first += piece
        self._read = read
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(first))("surrogatepass")
        self._decode = json.JSONDecoder().raw_decode
        self._dropped = self._began = 0
        self.is_whole = False
        """Whether everything was read."""
        self.text = ""
        """What was read and not dropped yet."""
        self.place = 0
        """How far in ``text`` it was looked at."""
        self._take(first)

    @property
    def offset(self) -> int:
        """How many characters of the file were looked at."""
        return self._dropped + self.place

    def latest(self) -> str:
        """The text of the value that was just read."""
        return self.text[self._began : self.place]

    def more(self) -> None:
        """Drop what is behind, and read at least as much as is left."""
        self._dropped += self.place
        self.text, self.place = self.text[self.place :], 0
        self._take(self._read(max(_AT_ONCE, len(self.text))))

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self.place = _SPACE.match(self.text, self.place).end()  # type: ignore[union-attr]  # it always matches
            if self.place < len(self.text) or self.is_whole:
                return self.text[self.place : self.place + 1]
            self.more()

    def expect(self, character: str) -> None:
        """Step over a character.

        Raises:
            IndexFormatError: Another comes next.
        """
        if self.peek() != character:
            self.refuse(f"expecting {character!r}", self.place)
        self.place += 1

    def value(self) -> Any:
        """Read a value whole.

        Raises:
            IndexFormatError: It is not JSON.
        """
        self.peek()
        while True:
            try:
                value, end = self._decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                if self.is_whole or isinstance(error, RecursionError):
                    self.refuse(getattr(error, "msg", str(error)), getattr(error, "pos", self.place))
            else:
                # A number at the end of what is here may go on.
                if end < len(self.text) or self.is_whole:
                    self._began, self.place = self.place, end
                    return value
            self.more()

    def refuse(self, words: str, place: int) -> NoReturn:
        """Refuse a text that is not JSON, where it is not."""
        raise IndexFormatError(f"an index must be JSON, but {words} at character {self._dropped + place}")

    def _take(self, data: bytes) -> None:
        self.is_whole = not data
        try:
            self.text += self._decoder.decode(data, self.is_whole)
        except UnicodeDecodeError as error:
            raise IndexFormatError(f"an index must be JSON, but {error}") from None


class _Shards:
    """The list of shards, which is nearly all of an index."""

    def __init__(self) -> None:
        self.builder = TableBuilder()
        self.refusal: IndexFormatError | None = None
        """Of the first shard that cannot be; told only if the file is sound as a whole."""
        self._template: Template | None = None
        self._seen: Template | None = None
        self._pattern: re.Pattern[str] | None = None
        self._one_by_one = 0  # characters of the file up to which the template is of no use

    def read(self, text: _Text) -> None:
        """Read the list, from its opening bracket to its closing one."""
        text.expect("[")
        if text.peek() == "]":
            text.place += 1
            return
        while True:
            if self._pattern is not None and text.offset >= self._one_by_one:
                self._add_alike(text, self._pattern)
            entry = text.value()
            if self.refusal is None:
                self._add(entry, text)
            if text.peek() == "]":
                text.place += 1
                return
            text.expect(",")
            text.peek()

    def _add_alike(self, text: _Text, pattern: re.Pattern[str]) -> None:
        """Add the shards that are like one before, as many as there are whole in what was read."""
        assert self._template is not None, "the pattern is its"
        rows, match, content, place = [], pattern.match, text.text, text.place
        while (found := match(content, place)) is not None:
            rows.append(found.groups())
            place = found.end()
        if not rows:
            return
        if add_rows(self.builder, self._template, self.builder.kind(self._template.kind), rows):
            text.place = place
        else:
            self._one_by_one = text.offset + place - text.place

    def _add(self, entry: Any, text: _Text) -> None:
        """Add the shard that was just read."""
        try:
            shard = parse_shard(entry, self.builder.schema_before())
        except IndexFormatError as error:
            self.refusal, self._pattern = error, None
            return
        number = self.builder.add(shard)
        template = template_of(text.latest(), number, self.builder.kind(number))
        # Made for the second shard alike: of a text that never comes again, it would be made in vain.
        if template is not None and template == self._seen and template != self._template:
            self._template, self._pattern = template, re.compile(template.pattern)
        self._seen = template


def read_table(read: Read, source: str) -> ShardTable:
    """Read an index.

    Args:
        read: Gives the file's bytes from its beginning.
        source: Its path or URL, for errors.

    Raises:
        IndexFormatError: As for :func:`~lightning_streaming.formats.index.parse_index`.
    """
    try:
        shards = _read_root(_Text(read))
    except IndexFormatError as error:
        raise IndexFormatError(f"{source}: {shortened(str(error))}") from None
    if shards.refusal is not None:
        raise IndexFormatError(f"{source}, shard {len(shards.builder)}: {shortened(str(shards.refusal))}")
    return shards.builder.table()


def _read_root(text: _Text) -> _Shards:
    shards = _Shards()
    if text.peek() != "{":
        root = text.value()
        _expect_end(text)
        raise IndexFormatError(f"an index must be a JSON object, but is {brief(root)}")
    root = {}
    text.expect("{")
    if text.peek() != "}":
        while True:
            if text.peek() != '"':
                text.refuse("expecting a key in double quotes", text.place)
            key = text.value()
            text.expect(":")
            if key == "shards" and text.peek() == "[":
                shards = _Shards()  # of two keys alike the last counts
                shards.read(text)
                root[key] = []
            else:
                root[key] = text.value()
            if text.peek() == "}":
                break
            text.expect(",")
    text.expect("}")
    _expect_end(text)
    check_version(root)
    take(root, "shards", list)
    return shards


def _expect_end(text: _Text) -> None:
    if text.peek():
        text.refuse("extra data", text.place)
