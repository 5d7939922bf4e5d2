"""Documents to blocks of tokens: packed end to end, each block full.

    documents   aaaa|bb|ccccccccc|d|         | is the token that ends a document
    blocks of 5 aaaa| bb|cc ccccc cc|d|

What is left at the end fills no block, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError
from lightning_streaming.tools.sources.source import Part, Source
from lightning_streaming.tools.tokens import Tokenizer, Tokens

COLUMN = "tokens"
"""The one column of a dataset of blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSettings:
    """What blocks are made of."""

    tokenizer: str
    """Name of the tokenizer, for :func:`~lightning_streaming.tools.tokens.load_tokenizer`."""
    text_column: str
    """The column that holds the documents."""
    block_length: int
    """Tokens in a block, at least 1."""
    dtype: str
    """What they are stored as; holds every token."""
    end: int | None
    """The token put after each document; None for none."""

    @property
    def encoding(self) -> str:
        """The encoding of the blocks."""
        return f"ndarray:{self.dtype}:{self.block_length}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What became of the documents."""

    documents: int = 0
    tokens: int = 0
    """With those that end documents."""
    dropped: int = 0
    """How many of the tokens are in no block."""

    def __add__(self, other: Tally) -> Tally:
        mine, theirs = asdict(self), asdict(other)
        return Tally(**{name: mine[name] + theirs[name] for name in mine})


class Packer:
    """Cuts a stream of tokens into blocks."""

    def __init__(self, block_length: int, dtype: str) -> None:
        """Begin with no tokens.

        Args:
            block_length: Tokens in a block.
            dtype: Of the blocks; holds every token.
        """
        self._length = block_length
        self._dtype = np.dtype(dtype)
        self._pending: list[Tokens] = []
        self.num_pending = 0
        """Tokens that are in no block yet; fewer than a block."""

    def add(self, tokens: Tokens) -> NDArray[Any]:
        """Add tokens, and give the blocks that are full now, of shape (blocks, block_length)."""
        self._pending.append(tokens)
        self.num_pending += len(tokens)
        num_blocks, left = divmod(self.num_pending, self._length)
        if not num_blocks:
            return np.empty((0, self._length), self._dtype)
        joined = np.concatenate(self._pending).astype(self._dtype)
        cut = num_blocks * self._length
        self._pending, self.num_pending = [joined[cut:].copy()], left
        return joined[:cut].reshape(num_blocks, self._length)


def documents(source: Source, part: Part, settings: PackingSettings, tokenizer: Tokenizer) -> Iterator[Tokens]:
    """The tokens of each document of a part, with the token that ends it.

    Raises:
        EncodingError: A row has no text; the message names file and place.
        FormatError: A file is damaged or not of the source's kind.
    """
    end = np.array([] if settings.end is None else [settings.end], np.uint32)
    for piece in part.pieces:
        for number, row in source.rows(piece, [settings.text_column]):
            try:
                tokens = tokenizer.encode(_text(row, settings.text_column))
            except EncodingError as error:
                raise EncodingError(f"{source.place(piece, number)}: {error}") from error
            yield np.concatenate([tokens, end]) if len(end) else tokens


def _text(row: Mapping[str, Any], column: str) -> str:
    text = row.get(column)
    if isinstance(text, str):
        return text
    found = type(text).__name__ if column in row else "missing"
    raise EncodingError(f"the column {column!r} must be text to be tokenized, but is {found}")
