"""Documents to tokens: one document per sample, or blocks packed end to end, each one full.

    documents   aaaa|bb|ccccccccc|d|         | is the token that ends a document
    blocks of 5 aaaa| bb|cc ccccc cc|d|

The rest at the end fills no block, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError
from lightning_streaming.tokenizing.documents import LOSS_MASK, TOKENS, Document, DocumentTokenizer
from lightning_streaming.tokenizing.tokenizer import Tokens
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSettings:
    """Options of tokens."""

    documents: DocumentTokenizer
    """Tokenizes rows."""
    block_length: int | None
    """Tokens in a block, at least 1; None for samples that are documents."""
    dtype: str
    """Type of stored tokens; holds every token."""

    @property
    def columns(self) -> dict[str, str]:
        """The columns of samples, with their encodings."""
        length = "" if self.block_length is None else f":{self.block_length}"
        mask = {} if self.documents.chat is None else {LOSS_MASK: "ndarray:uint8"}
        return {TOKENS: f"ndarray:{self.dtype}{length}", **mask}


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


def documents(source: RowSource, part: InputPart, tokenizer: DocumentTokenizer) -> Iterator[Document]:
    """Yield the tokens of each row of a part.

    Raises:
        EncodingError: A row has no text or conversation; the message names file and position.
        FormatError: A file is damaged or not of the source's kind.
    """
    for piece in part.pieces:
        for number, row in source.rows(piece, tokenizer.columns):
            try:
                document = tokenizer.encode(row)
            except EncodingError as error:
                raise error.with_context(source.place(piece, number), path=piece.path) from error
            yield document
