"""Documents to tokens: one document per sample, or blocks packed end to end, each one full.

    documents   aaaa|bb|ccccccccc|d|         | is the token that ends a document
    blocks of 5 aaaa| bb|cc ccccc cc|d|

The rest at the end fills no block, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError
from lightning_streaming.tokenizing.tokenizer import Tokenizer, Tokens, with_ends
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource

COLUMN = "tokens"
"""The column of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSettings:
    """Options of tokens."""

    tokenizer: str
    """Name of the tokenizer, for :func:`~lightning_streaming.tokenizing.tokenizer.load_tokenizer`."""
    text_column: str
    """The column of the documents."""
    block_length: int | None
    """Tokens in a block, at least 1; None for samples that are documents."""
    dtype: str
    """Type of stored tokens; holds every token."""
    begin: int | None
    """The token before each document; None for none."""
    end: int | None
    """The token after each document; None for none."""

    @property
    def encoding(self) -> str:
        """The encoding of the tokens of a sample."""
        return f"ndarray:{self.dtype}" + ("" if self.block_length is None else f":{self.block_length}")


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


def documents(source: RowSource, part: InputPart, settings: TokenSettings, tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of each document of a part, with those that begin and end it.

    Raises:
        EncodingError: A row has no text; the message names file and position.
        FormatError: A file is damaged or not of the source's kind.
    """
    column = settings.text_column
    for piece in part.pieces:
        for number, row in source.rows(piece, [column]):
            try:
                tokens = tokenizer.encode(_text(row, column))
            except EncodingError as error:
                raise error.with_context(source.place(piece, number), path=piece.path) from error
            yield with_ends(tokens, settings.begin, settings.end)


def _text(row: Mapping[str, Any], column: str) -> str:
    text = row.get(column)
    if isinstance(text, str):
        return text
    actual = type(text).__name__ if column in row else "missing"
    raise EncodingError(f"the column {column!r} must be text to be tokenized, but is {actual}", option="--text-column")
