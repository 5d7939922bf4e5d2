"""Reads shards whose JSON text differs from that of a shard before in a few numbers and texts only.

A writer's shards differ in names, sizes and hashes alone. From the text of one that was read and checked, a regular
expression is made that has groups for these, and every other character as it is. What it matches has the same keys and
the same remaining values, so only the groups are looked at. That is several times faster than reading each as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_streaming.formats.index_builder import TableBuilder
from lightning_streaming.formats.index_entries import MAX_RAW_BYTES
from lightning_streaming.formats.index_table import Kind

_TOKEN = re.compile(r'[ \t\n\r]*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^ \t\n\r{}\[\]:,"]+)', re.DOTALL)
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})")
# Names that surely stay inside their directory and have a sound length; others are read one by one.
_NAME = re.compile(
    r'"(?=[^"]{1,255}")((?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*(?!index\.json")[A-Za-z0-9_-][A-Za-z0-9._-]*)"'
)
_TEXT = re.compile(r'"([ !#-\[\]-~]*)"')
_NEXT = r"[ \t\n\r]*,[ \t\n\r]*"

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    """What the text of one shard has in common with those of its kind."""

    kind: int
    """Number of the kind in its builder."""
    pattern: str
    """Of a shard and the comma after it, with a group for each value that differs."""
    groups: tuple[Path, ...]
    """What each group holds, like ``("raw_data", "bytes")``."""


def template_of(text: str, number: int, kind: Kind) -> Template | None:
    """The template of a shard's text; None where there is something about it that only a JSON parser may judge.

    Args:
        text: The JSON object, without space around it.
        number: Of its kind.
        kind: Its kind.
    """
    wanted = dict(_wanted(kind))
    pieces: list[str] = []
    groups: list[Path] = []
    done = 0
    for path, start, stop in _values(text):
        group = wanted.pop(path, None)
        if path in groups or any("\\" in key for key in path):  # a key that is there twice, or may be
            return None
        if group is None:
            continue
        if group.fullmatch(text[start:stop]) is None:
            return None
        pieces += re.escape(text[done:start]), group.pattern
        groups.append(path)
        done = stop
    if wanted:
        return None
    pattern = "".join(pieces) + re.escape(text[done:]) + _NEXT
    return Template(kind=number, pattern=pattern, groups=tuple(groups))


def add_rows(builder: TableBuilder, template: Template, kind: Kind, rows: Sequence[Sequence[str]]) -> bool:
    """Add the shards that a template matched, unless one of them has to be refused.

    Args:
        builder: Where to.
        template: What matched.
        kind: Its kind.
        rows: The groups of each shard.

    Returns:
        Whether they were added; False if they must be read one by one, to say which of them is wrong.
    """
    columns = dict(zip(template.groups, zip(*rows, strict=True), strict=True))
    samples = list(map(int, columns["samples",]))
    sizes = [list(map(int, columns[name, "bytes"])) for name in _file_names(kind)]
    raw = sizes[:: 2 if kind.example.zip_data else 1]
    if max(map(max, raw)) > MAX_RAW_BYTES or max(samples) > MAX_RAW_BYTES:
        return False
    # The offsets of the samples are in the last raw file: the meta file, or the only one.
    if any(4 * (count + 2) > size for count, size in zip(samples, raw[-1], strict=True)):
        return False
    builder.add_many(template.kind, samples, sizes, [columns[path] for path in _text_paths(kind)])
    return True


def _file_names(kind: Kind) -> list[str]:
    shard = kind.example
    files = {
        "raw_data": shard.raw_data,
        "zip_data": shard.zip_data,
        "raw_meta": shard.raw_meta,
        "zip_meta": shard.zip_meta,
    }
    return [name for name, file in files.items() if file is not None]


def _text_paths(kind: Kind) -> Iterator[Path]:
    """Where the texts of a shard are, in the order of its table."""
    for name, hashes in zip(_file_names(kind), kind.hash_names, strict=True):
        yield name, "basename"
        for one in hashes:
            yield name, "hashes", one


def _wanted(kind: Kind) -> Iterator[tuple[Path, re.Pattern[str]]]:
    yield ("samples",), _NUMBER
    for name in _file_names(kind):
        yield (name, "bytes"), _NUMBER
    for path in _text_paths(kind):
        yield path, _NAME if path[-1] == "basename" and len(path) == 2 else _TEXT


def _values(text: str) -> Iterator[tuple[Path, int, int]]:
    """Each value in a JSON object that is no object or list itself: its keys from the outside in, and where it is.

    Lists count as having the key "[]". Escapes in keys are left as they are.
    """
    path: list[str] = []
    around: list[str] = []
    key_next = False
    for match in _TOKEN.finditer(text):
        piece = match[1]
        if piece in "{[":
            path.append("[]")
            around.append(piece)
            key_next = piece == "{"
        elif piece in "}]":
            path.pop()
            around.pop()
        elif piece in ",:":
            key_next = piece == "," and around[-1] == "{"
        elif key_next:
            path[-1] = piece[1:-1]
        else:
            yield tuple(path), match.start(1), match.end(1)
