"""Rows of text or of conversations to tokens, the same when they are converted and when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, StateMismatchError
from lightning_streaming.tokenizing.messages import Message, read_messages, read_tools
from lightning_streaming.tokenizing.template import ChatTemplate, read_template
from lightning_streaming.tokenizing.tokenizer import (
    Tokenizer,
    Tokens,
    file_of,
    find_token,
    fingerprint,
    load_tokenizer,
    read_tokenizer,
    with_ends,
)

TOKENS, LOSS_MASK = "tokens", "loss_mask"
"""Columns of tokens, and of a conversation's mask: 1 for tokens of the assistant, 0 for others."""
_AT_ONCE = 256
"""Texts that are tokenized together, by all cores."""
_VERSION = 2
"""Incremented when the same rows give other tokens."""


class Document(NamedTuple):
    """The tokens of a row."""

    tokens: Tokens
    loss_mask: NDArray[np.uint8] | None
    """Of the same shape; None for text."""


class JoinedDocuments(NamedTuple):
    """The tokens of several rows, one after another."""

    columns: dict[str, NDArray[Any]]
    """``tokens`` as int64, and ``loss_mask`` of conversations as uint8; of shape (tokens,)."""
    counts: NDArray[np.int64]
    """Tokens of each row."""


class _Files(NamedTuple):
    """The contents of the files of a tokenizer."""

    tokenizer: bytes | None
    """None for bytes."""
    template: tuple[str, dict[str, str]] | None
    """The chat template and the special tokens that it may name; None for texts."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFields:
    """What tokens of rows depend on, apart from the rows. ``TokenizeConfig`` explains and checks the fields."""

    __slots__ = ()

    tokenizer: str
    text: str | None = None
    chat: str | None = None
    tools: str | None = None
    template: str | None = None
    variables: Mapping[str, Any] | None = None
    bos: int | str | None = None
    eos: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class DocumentTokenizer(TokenizerFields):
    """Tokenizes rows. Its files are read at first use, once in each process.

    A copy in another process checks that its files are those of the original, if that had read them.
    """

    def __call__(self, **row: Any) -> int:
        """Return the number of tokens of a row, as a function of columns."""
        return len(self.encode(row).tokens)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(self.columns_by_field.values())

    @property
    def columns_by_field(self) -> dict[str, str]:
        """The columns that are read, by the field that names each."""
        named = {"text": self.text, "chat": self.chat, "tools": self.tools}
        return {field: column for field, column in named.items() if column is not None}

    @property
    def results(self) -> tuple[str, ...]:
        """The columns that tokenized samples have in their place."""
        return (TOKENS,) if self.chat is None else (TOKENS, LOSS_MASK)

    @cached_property
    def digest(self) -> str:
        """Digest of all that tokens depend on, apart from the rows: 32 hexadecimal digits."""
        return self._digest_of(self._files)

    @property
    def fingerprint(self) -> str:
        """Digest of the tokenizer's file."""
        return fingerprint(self._files.tokenizer)

    @cached_property
    def ends(self) -> tuple[int | None, int | None]:
        """The tokens that begin and end a text."""
        named = (("bos", self.bos), ("eos", self.eos))
        bos, eos = (None if of is None else find_token(self.loaded, of, name) for name, of in named)
        return bos, eos

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest token."""
        return max(self.loaded.num_ids, *(token + 1 for token in self.ends if token is not None), 0)

    @cached_property
    def loaded(self) -> Tokenizer:
        """The tokenizer."""
        return load_tokenizer(self.tokenizer, self._files.tokenizer)

    def check(self) -> None:
        """Load all files, to find errors in them before rows are read.

        Raises:
            ConfigError: A file is missing or damaged, or the tokenizer lacks a token.
            StateMismatchError: A file is another one than in the process that this is a copy of.
            MissingDependencyError: A package is not installed.
        """
        _ = self.num_ids, self.digest
        if self.chat is not None:
            _ = self._compiled

    def encode(self, row: Mapping[str, Any]) -> Document:
        """Return the tokens of a row.

        Raises:
            EncodingError: It lacks a column, or has something else in it; or it cannot be tokenized.
        """
        if self.chat is None:
            return Document(with_ends(self.loaded.encode(self._text(row)), *self.ends), None)
        return Document(*self.loaded.encode_spans(*self._compiled.trained(*self._messages(row))))

    def tokenized(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample with tokens, and the mask of a conversation, instead of the columns that they are of.

        Raises:
            EncodingError: As :meth:`encode`.
            ConfigError: It has another column of the name of one of these.
        """
        self._check_names(sample)
        document, columns = self.encode(sample), self.columns
        tokenized = {name: value for name, value in sample.items() if name not in columns}
        tokenized[TOKENS] = document.tokens.astype(np.int64)
        if document.loss_mask is not None:
            tokenized[LOSS_MASK] = document.loss_mask
        return tokenized

    def joined(self, rows: Sequence[Mapping[str, Any]]) -> JoinedDocuments:
        """Return the tokens of several rows, tokenized together: the same as those of :meth:`tokenized`.

        Raises:
            EncodingError: One of the rows cannot be tokenized; :meth:`tokenized` finds out which.
            ConfigError: As :meth:`tokenized`.
        """
        for row in rows:
            self._check_names(row)
        if self.chat is None:
            parts, counts = self._with_ends(self.loaded.encode_some([self._text(row) for row in rows]))
            columns: dict[str, NDArray[Any]] = {TOKENS: np.concatenate(parts, dtype=np.int64)}
        else:
            texts = [self._compiled.trained(*self._messages(row)) for row in rows]
            documents = self.loaded.encode_spans_some(texts)
            columns = {
                TOKENS: np.concatenate([tokens for tokens, _ in documents], dtype=np.int64),
                LOSS_MASK: np.concatenate([mask for _, mask in documents]),
            }
            counts = [len(tokens) for tokens, _ in documents]
        return JoinedDocuments(columns, np.array(counts, np.int64))

    def lengths(self, columns: Mapping[str, Sequence[Any]]) -> list[int]:
        """Return the number of tokens of each row.

        Raises:
            EncodingError: A row cannot be tokenized; its field ``sample`` has the number of the row.
        """
        names = self.columns
        rows = [dict(zip(names, values, strict=True)) for values in zip(*map(columns.get, names), strict=True)]
        lengths = list[int]()
        for first in range(0, len(rows), _AT_ONCE):
            some = rows[first : first + _AT_ONCE]
            try:
                lengths += self._lengths_of(some)
            except EncodingError:
                lengths += [self._length_of(number, row) for number, row in enumerate(some, first)]
        return lengths

    def _length_of(self, number: int, row: Mapping[str, Any]) -> int:
        try:
            return self._lengths_of([row])[0]
        except EncodingError as error:
            raise error.with_context(f"sample {number}", sample=number) from error

    def _lengths_of(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.chat is None:
            return self._with_ends(self.loaded.encode_some([self._text(row) for row in rows]))[1]
        # Without the parts to train on, which take more renderings.
        texts = [self._compiled.text(*self._messages(row)) for row in rows]
        return list(map(len, self.loaded.encode_some(texts)))

    def _with_ends(self, documents: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
        """Return parts of the documents with their ends, and the length of each document, as of ``with_ends``."""
        counts, (bos, eos) = list(map(len, documents)), self.ends
        if bos is None and eos is None:
            return [*documents], counts
        parts, first, last = list[Tokens](), *(np.array([] if of is None else [of], np.int64) for of in (bos, eos))
        for number, tokens in enumerate(documents):
            before = len(parts)
            has_tokens = counts[number] > 0
            if bos is not None and not (has_tokens and tokens[0] == bos):
                parts.append(first)
            parts.append(tokens)
            if eos is not None and not (has_tokens and tokens[-1] == eos):
                parts.append(last)
            counts[number] += len(parts) - before - 1
        return parts, counts

    def _check_names(self, sample: Mapping[str, Any]) -> None:
        for name in self.results:
            if name in sample and name not in self.columns:
                raise ConfigError(
                    f"samples have a column {name!r} already, which tokenize would replace",
                    hint="read the stored tokens without tokenize, or leave out the column by columns=",
                    option="tokenize",
                )

    def _text(self, row: Mapping[str, Any]) -> str:
        text = row.get(self.text) if self.text is not None else None
        if isinstance(text, str):
            return text
        actual = type(text).__name__ if self.text in row else "missing"
        raise EncodingError(f"the column {self.text!r} must be text to be tokenized, but is {actual}", option="text")

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[Message], list[Any] | None]:
        if self.chat is None or self.chat not in row:
            raise EncodingError(f"the column {self.chat!r} is missing; the columns are {', '.join(row)}", option="chat")
        return read_messages(row[self.chat]), None if self.tools is None else read_tools(row.get(self.tools))

    @cached_property
    def _compiled(self) -> ChatTemplate:
        assert self._files.template is not None, "or there are no conversations"
        source, special = self._files.template
        return ChatTemplate(source, {**special, **(self.variables or {})})

    @cached_property
    def _files(self) -> _Files:
        tokenizer, template = read_tokenizer(self.tokenizer), None
        if self.chat is not None:
            folder = None if tokenizer is None else file_of(self.tokenizer).parent
            template = read_template(folder, self.template, has_tools=self.tools is not None)
        files = _Files(tokenizer, template)
        copied = self.__dict__.get("digest")
        if copied not in (None, self._digest_of(files)):
            raise StateMismatchError(
                f"a file of the tokenizer {self.tokenizer} was replaced after another process of this run had read it",
                hint="start the run again; lengths are counted again, and a saved position of other tokens is refused",
                path=self.tokenizer,
            )
        first: _Files = self.__dict__.setdefault("_files", files)  # of several threads
        return first

    def _digest_of(self, files: _Files) -> str:
        chat = None if files.template is None else [self.tools, *files.template, self.variables]
        facts = [_VERSION, fingerprint(files.tokenizer), self.text, self.chat, chat, self.bos, self.eos]
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        names = [item.name for item in fields(self)] + ["digest"] * ("digest" in self.__dict__)
        return {name: getattr(self, name) for name in names}
