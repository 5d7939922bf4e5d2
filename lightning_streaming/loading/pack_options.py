"""What a user asks of packing: which columns of documents are brought together, into packs of how many tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.document_lengths import LengthsRequest
from lightning_streaming.order.packing import PackSettings
from lightning_streaming.replaced_names import tells_unknown_arguments

MADE = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")
"""What is made of the documents' lengths alone."""


@tells_unknown_arguments
@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Documents brought together into packs of equally many tokens; a batch is then of packs.

    Args:
        column: The tokens of a document: a column of one-dimensional arrays, or of bytes with ``dtype``.
        capacity: Tokens in a pack.
        method: "best_fit" brings whole documents together, in windows of the epoch's order; "concat" takes one document
            after another and cuts them where a pack is full.
        window: Documents among which "best_fit" looks for those that fit together.
        longer: What "best_fit" does with documents longer than a pack: "split" them, "truncate" or "drop" them, or
            "error".
        lengths: Where the lengths of documents are known from: a column of numbers, or a function whose parameters are
            named like columns. None: from where ``column`` lies in the shards. Needed where a transform makes the
            tokens.
        dtype: Type of the tokens, where the column is of bytes, like "uint16".
        along: Other columns of as many values as tokens, such as labels or a mask of the loss, packed in the same way.
        pad: What a pack is filled up with that is not full: a number, or one for each column.
        as_dtype: Type of the packed values, like "int64" or "int32". None: as they are stored.
        without: Of "position_ids", "document_ids", "cu_seqlens" and "max_seqlen", those that are not needed.

    Raises:
        ConfigError: An argument cannot be.
    """

    column: str
    capacity: int
    method: Literal["best_fit", "concat"] = "best_fit"
    window: int = 4096
    longer: Literal["split", "truncate", "drop", "error"] = "split"
    lengths: str | Callable[..., Any] | None = None
    dtype: str | None = None
    along: Sequence[str] = ()
    pad: int | float | Mapping[str, Any] = 0
    as_dtype: str | None = "int64"
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.column, str) or not self.column:
            raise ConfigError(f"pack.column must be the name of the column of tokens, but is {self.column!r}")
        self.settings()
        self.request()
        for name in ("along", "without"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) for one in given):
                raise ConfigError(f"pack.{name} must be a list of names, but is {given!r}")
            object.__setattr__(self, name, tuple(given))
        unknown = [one for one in self.without if one not in MADE]
        if unknown:
            raise ConfigError(f"pack.without may name {', '.join(MADE)}, but names {unknown[0]!r}")
        if self.column in self.along or len(set(self.along)) < len(self.along):
            raise ConfigError(f"pack.along names each other column once, but is {list(self.along)}")
        if isinstance(self.pad, Mapping) and (more := sorted({*self.pad} - {*self.columns})):
            raise ConfigError(f"pack.pad may name {', '.join(self.columns)}, but names {more[0]!r}")
        for name in ("dtype", "as_dtype"):
            _check_dtype(name, getattr(self, name))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are packed, that of the tokens first."""
        return (self.column, *self.along)

    def settings(self) -> PackSettings:
        """How documents are brought together, for order."""
        return PackSettings(capacity=self.capacity, method=self.method, window=self.window, longer=self.longer)

    def request(self) -> LengthsRequest:
        """Where lengths are known from."""
        if self.lengths is not None:
            return LengthsRequest(lengths=self.lengths)
        return LengthsRequest(column=self.column, dtype=self.dtype)

    def pad_of(self, column: str) -> Any:
        """What a column is filled up with."""
        return self.pad.get(column, 0) if isinstance(self.pad, Mapping) else self.pad

    def described(self) -> dict[str, Any]:
        """The arguments by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is None:
        return
    try:
        is_number = isinstance(dtype, str) and np.dtype(dtype).kind in "iuf"
    except TypeError:
        is_number = False
    if not is_number:
        raise ConfigError(f'pack.{name} must name a type of numbers, like "int64", but is {dtype!r}')


def parse_pack(pack: Pack | Mapping[str, Any] | None) -> Pack | None:
    """What a user wrote, as :class:`Pack` or as its arguments.

    Raises:
        ConfigError: It is something else.
    """
    if pack is None or isinstance(pack, Pack):
        return pack
    if not isinstance(pack, Mapping) or not all(isinstance(name, str) for name in pack):
        raise ConfigError(
            f"pack must be what Pack takes, like {{'column': 'tokens', 'capacity': 8192}}, but is a "
            f"{type(pack).__name__}"
        )
    missing = [name for name in ("column", "capacity") if name not in pack]
    if missing:
        raise ConfigError(f"pack needs {missing[0]}=, like {{'column': 'tokens', 'capacity': 8192}}")
    return Pack(**pack)
