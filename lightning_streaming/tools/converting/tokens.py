"""Documents to blocks of tokens: tokenizers, and blocks packed end to end, each one full.

    documents   aaaa|bb|ccccccccc|d|         | is the token that ends a document
    blocks of 5 aaaa| bb|cc ccccc cc|d|

The rest at the end fills no block, and is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource

COLUMN = "tokens"
"""The only column of a dataset of blocks."""
BYTES = "bytes"
"""Name of the tokenizer whose tokens are the bytes of UTF-8."""
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""Types of stored tokens; the default is the smallest unsigned one that holds them."""
_LARGEST = np.iinfo(np.uint64).max

Tokens = NDArray[np.integer[Any]]


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of a text in UTF-8."""

    num_ids = 256
    """One more than the largest token."""

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a document, of shape (tokens,), without special tokens, truncation or padding.

        Raises:
            EncodingError: The text cannot be tokenized.
        """
        try:
            return np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError as error:
            raise EncodingError(f"the text is not Unicode: {error}") from error

    def find(self, token: str) -> int | None:  # noqa: ARG002
        """Return None: bytes have no names."""
        return None


class FileTokenizer:
    """A tokenizer that the ``tokenizers`` package saved as JSON."""

    def __init__(self, path: str) -> None:
        """Load it.

        Raises:
            ConfigError: The file is missing or no tokenizer.
            MissingDependencyError: The package is not installed.
        """
        try:
            import tokenizers
        except ImportError:
            raise MissingDependencyError(
                "a tokenizer's file needs the tokenizers package",
                hint="run: pip install 'lightning-streaming[tokenizers]'",
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"the tokenizer must be {BYTES} or a JSON file, but {path}: {error.strerror}",
                option="--tokenize",
                path=path,
            ) from error
        except Exception as error:  # the package raises plain ones
            raise ConfigError(
                f"{path} is no file of the tokenizers package: {error}", option="--tokenize", path=path
            ) from error
        # The file of a model may enable them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a document, as :class:`ByteTokenizer` does."""
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError as error:  # raised for a text that has no UTF-8
            raise EncodingError(f"the text is not Unicode: {error}") from error
        except Exception as error:  # the package raises plain ones, for example for unknown words
            raise EncodingError(f"the tokenizer cannot encode {text!r:.60}: {error}") from error
        return np.array(encoding.ids, np.uint32)

    def find(self, token: str) -> int | None:
        """Return the number of a token, for example of ``"<|endoftext|>"``; None if it is unknown."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number


Tokenizer = ByteTokenizer | FileTokenizer
"""Converts documents to tokens."""


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer.

    Args:
        name: ``bytes``, or the path of a JSON file of the ``tokenizers`` package.

    Raises:
        ConfigError: The file is missing or no tokenizer.
        MissingDependencyError: The package is not installed.
    """
    return ByteTokenizer() if name == BYTES else FileTokenizer(name)


def fingerprint(name: str) -> str:
    """Return a text that differs for any change of the tokenizer."""
    return BYTES if name == BYTES else hashlib.sha256(Path(name).read_bytes()).hexdigest()


def find_end(tokenizer: Tokenizer, end: str) -> int:
    """Return the token that ends a document, from its number or its name.

    Raises:
        ConfigError: The tokenizer has no token of this name.
    """
    if end.isdecimal():
        return int(end)
    number = tokenizer.find(end)
    if number is None:
        raise ConfigError(
            f"--eot must be a number or a token of the tokenizer, but it has no token {end!r}", option="--eot"
        )
    return number


def choose_dtype(num_ids: int, dtype: str | None) -> str:
    """Return the dtype of stored tokens.

    Args:
        num_ids: One more than the largest token.
        dtype: The requested dtype; None for the smallest unsigned one.

    Raises:
        ConfigError: It does not hold the largest token, or none does.
    """
    if num_ids - 1 > _LARGEST:
        raise ConfigError(
            f"tokens must be at most {_LARGEST}, the maximum of uint64, but one is {num_ids - 1}", option="--tokenize"
        )
    if dtype is None:
        return next(name for name in DTYPES if num_ids - 1 <= np.iinfo(name).max)
    if num_ids - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            f"--dtype must hold tokens up to {num_ids - 1}, but {dtype} ends at {np.iinfo(dtype).max}",
            hint=f"{choose_dtype(num_ids, None)} is enough",
            option="--dtype",
        )
    return dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSettings:
    """Options of the blocks."""

    tokenizer: str
    """Name of the tokenizer, for :func:`~lightning_streaming.tools.converting.tokens.load_tokenizer`."""
    text_column: str
    """The column of the documents."""
    block_length: int
    """Tokens in a block, at least 1."""
    dtype: str
    """Type of stored tokens; holds every token."""
    end: int | None
    """The token after each document; None for none."""

    @property
    def encoding(self) -> str:
        """The encoding of the blocks."""
        return f"ndarray:{self.dtype}:{self.block_length}"


class Packer:
    """Cuts a stream of tokens into blocks."""

    def __init__(self, block_length: int, dtype: str) -> None:
        """Start without tokens.

        Args:
            block_length: Tokens in a block.
            dtype: Type of the blocks; holds every token.
        """
        self._length = block_length
        self._dtype = np.dtype(dtype)
        self._pending: list[Tokens] = []
        self.num_pending = 0
        """Number of tokens that are in no block yet; fewer than a block."""

    def add(self, tokens: Tokens) -> NDArray[Any]:
        """Add tokens, and return the blocks that are full now, of shape (blocks, block_length)."""
        self._pending.append(tokens)
        self.num_pending += len(tokens)
        num_blocks, left = divmod(self.num_pending, self._length)
        if not num_blocks:
            return np.empty((0, self._length), self._dtype)
        joined = np.concatenate(self._pending).astype(self._dtype)
        cut = num_blocks * self._length
        self._pending, self.num_pending = [joined[cut:].copy()], left
        return joined[:cut].reshape(num_blocks, self._length)


def documents(source: RowSource, part: InputPart, settings: PackingSettings, tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of each document of a part, with the token that ends it.

    Raises:
        EncodingError: A row has no text; the message names file and position.
        FormatError: A file is damaged or not of the source's kind.
    """
    end = np.array([] if settings.end is None else [settings.end], np.uint32)
    column = settings.text_column
    for piece in part.pieces:
        for number, row in source.rows(piece, [column]):
            try:
                tokens = tokenizer.encode(_text(row, column))
            except EncodingError as error:
                raise error.with_context(source.place(piece, number), path=piece.path) from error
            yield np.concatenate([tokens, end]) if len(end) else tokens


def _text(row: Mapping[str, Any], column: str) -> str:
    text = row.get(column)
    if isinstance(text, str):
        return text
    actual = type(text).__name__ if column in row else "missing"
    raise EncodingError(f"the column {column!r} must be text to be tokenized, but is {actual}", option="--text-column")
