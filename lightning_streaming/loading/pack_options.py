"""What a user asks of packing: documents of which columns are brought together, into packs of how many tokens.

Packing   what both have: which columns, how long documents are, and what fills them up
Pack      packs of equally many tokens: the rows of a batch
Budget    groups of whole documents, padded to their longest: each a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.document_lengths import LengthsRequest
from lightning_streaming.order.packing import LARGEST_WINDOW, AnyPackSettings, BudgetSettings, PackSettings
from lightning_streaming.replaced_names import tells_unknown_arguments
from lightning_streaming.signatures import explains_options_of
from lightning_streaming.units import plain_number

MADE = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")
"""What is made of the lengths of packed documents alone."""
_Asked = TypeVar("_Asked", bound="Packing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Documents that are brought together, and what of them.

    Args:
        column: The tokens of a document: a column of one-dimensional arrays, or of bytes with ``dtype``.
        lengths: Where the lengths of documents are known from: a column of numbers, or a function whose parameters are
            named like columns. None: from where ``column`` lies in the shards. Needed where a transform makes the
            tokens.
        lengths_version: With a function in ``lengths``, a name of what it depends on, like "gpt2" or a digest of the
            tokenizer's file: lengths are counted again where it is another one. Needed where the function is an object,
            a method or a partial, or names an object.
        dtype: Type of the values of columns of bytes, like "uint16"; or one for each such column, like
            ``{"tokens": "uint16", "mask": "uint8"}``.
        along: Other columns of as many values as tokens, such as labels or a mask of the loss, treated like the tokens.
        pad: What is filled in where there are no tokens: a number, or one for each column.
        as_dtype: Type of the values in a batch, like "int64" or "int32"; one of whole numbers leaves values of floating
            point as they are. None: all as they are stored. Or one for each column, like ``{"weights": "float32"}``;
            of columns that it does not name "int64". Values that the type does not hold are refused.

    Raises:
        ConfigError: An argument cannot be.
    """

    option: ClassVar[str]
    """What a dataset calls it."""

    column: str | None = None
    lengths: str | Callable[..., Any] | None = None
    lengths_version: str | None = None
    dtype: str | Mapping[str, str] | None = None
    along: Sequence[str] = ()
    pad: int | float | Mapping[str, Any] = 0
    as_dtype: str | Mapping[str, str | None] | None = "int64"

    def __post_init__(self) -> None:
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            raise ConfigError(f"{self.option}.column must be the name of the column of tokens, but is {self.column!r}")
        self.settings()
        self._take_names("along")
        if self.column in self.along or len(set(self.along)) < len(self.along):
            raise ConfigError(f"{self.option}.along names each other column once, but is {list(self.along)}")
        for name in ("dtype", "as_dtype"):
            self._check_dtypes(name, getattr(self, name))
        self.request()
        self._check_pad()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are brought together, that of the tokens first."""
        return (*(() if self.column is None else (self.column,)), *self.along)

    def settings(self) -> AnyPackSettings:
        """How documents are brought together, for order."""
        raise NotImplementedError

    def request(self) -> LengthsRequest:
        """Where lengths are known from."""
        if self.lengths is not None:
            return LengthsRequest(lengths=self.lengths, version=self.lengths_version)
        dtype = None if self.column is None else self.dtype_of(self.column)
        return LengthsRequest(column=self.column, dtype=dtype, version=self.lengths_version)

    def pad_of(self, column: str) -> Any:
        """What a column is filled up with."""
        return self.pad.get(column, 0) if isinstance(self.pad, Mapping) else self.pad

    def dtype_of(self, column: str) -> str | None:
        """Return the type of the values of a column of bytes."""
        return self.dtype.get(column) if isinstance(self.dtype, Mapping) else self.dtype

    def name_of(self, column: str) -> str:
        """Return the name of a column in a batch."""
        return "input_ids" if column == self.column else column

    def wanted(self, column: str, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type in a batch of values of a column that are stored in a type."""
        is_named = isinstance(self.as_dtype, Mapping) and column in self.as_dtype
        given = self.as_dtype.get(column, "int64") if isinstance(self.as_dtype, Mapping) else self.as_dtype
        if given is None:
            return stored
        wanted = np.dtype(given)
        return stored if stored.kind == "f" and wanted.kind != "f" and not is_named else wanted

    def described(self) -> dict[str, Any]:
        """The arguments by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def _take_names(self, name: str) -> None:
        given = getattr(self, name)
        is_list = isinstance(given, Iterable) and not isinstance(given, str)
        if not is_list or not all(isinstance(one, str) for one in given):
            raise ConfigError(f"{self.option}.{name} must be a list of names, but is {given!r}")
        object.__setattr__(self, name, tuple(given))

    def _check_dtypes(self, name: str, given: object) -> None:
        if not isinstance(given, Mapping):
            self._check_dtype(name, given)
            return
        if more := sorted({*given} - {*self.columns}):
            raise ConfigError(f"{self.option}.{name} may name {', '.join(self.columns)}, but names {more[0]!r}")
        for column, dtype in given.items():
            self._check_dtype(f"{name}[{column!r}]", dtype)

    def _check_dtype(self, name: str, dtype: object) -> None:
        if dtype is None:
            return
        try:
            is_number = isinstance(dtype, str) and np.dtype(dtype).kind in "iuf"
        except TypeError:
            is_number = False
        if not is_number:
            raise ConfigError(f'{self.option}.{name} must name a type of numbers, like "int64", but is {dtype!r}')

    def _check_pad(self) -> None:
        if isinstance(self.pad, Mapping) and (more := sorted({*self.pad} - {*self.columns})):
            raise ConfigError(f"{self.option}.pad may name {', '.join(self.columns)}, but names {more[0]!r}")
        for pad in self.pad.values() if isinstance(self.pad, Mapping) else (self.pad,):
            if plain_number(pad) is None and not isinstance(pad, float | np.floating):
                raise ConfigError(f"{self.option}.pad must be a number, or one for each column, but is {self.pad!r}")


def fits(pad: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a type holds a number as it is; numbers of floating point are rounded."""
    if dtype.kind == "f":
        return not math.isfinite(pad) or abs(pad) <= float(np.finfo(dtype).max)
    if dtype.kind not in "iu":
        return pad in (0, 1)
    limits = np.iinfo(dtype)
    return math.isfinite(pad) and int(pad) == pad and limits.min <= pad <= limits.max


@tells_unknown_arguments
@explains_options_of(Packing)
@dataclass(frozen=True, kw_only=True, slots=True)
class Pack(Packing):
    """Documents brought together into packs of equally many tokens; a batch is then of packs.

    Args:
        capacity: Tokens in a pack.
        method: "best_fit" brings whole documents together, in windows of the epoch's order; "concat" takes one document
            after another and cuts them where a pack is full.
        window: Documents among which "best_fit" looks for those that fit together.
        longer: What "best_fit" does with documents longer than a pack: "split" them, "truncate" or "drop" them, or
            "error".
        without: Of "position_ids", "document_ids", "cu_seqlens" and "max_seqlen", those that are not needed.

    Raises:
        ConfigError: An argument cannot be.
    """

    option: ClassVar[str] = "pack"

    column: str
    capacity: int
    method: Literal["best_fit", "concat"] = "best_fit"
    window: int = 4096
    longer: Literal["split", "truncate", "drop", "error"] = "split"
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.column is None:
            raise ConfigError("pack.column must be the name of the column of tokens, but is None")
        Packing.__post_init__(self)
        self._take_names("without")
        unknown = [one for one in self.without if one not in MADE]
        if unknown:
            raise ConfigError(f"pack.without may name {', '.join(MADE)}, but names {unknown[0]!r}")

    def settings(self) -> PackSettings:
        """How documents are brought together, for order."""
        return PackSettings(capacity=self.capacity, method=self.method, window=self.window, longer=self.longer)


@tells_unknown_arguments
@explains_options_of(Packing)
@dataclass(frozen=True, kw_only=True, slots=True)
class Budget(Packing):
    """Groups of whole documents of about one length, as many as a number of tokens allows; a batch is then one group.

    A document may be anything that has a length, such as audio of so many frames: what is said of tokens then holds for
    these.

    Args:
        column: The tokens of a document: a column of one-dimensional arrays, or of bytes with ``dtype``. None, with
            ``lengths`` and a ``collate_fn``: documents have no such column.
        tokens: Of a group at most, padding included: the number of its documents times the longest of them.
        buckets: Ranges of lengths into which the documents of a window are sorted, and which are grouped each by
            itself. More of them pad less, and mix less.
        window: Documents of the epoch's order that are grouped together.
        longer: What becomes of documents longer than ``tokens``: "truncate" or "drop" them, or "error".

    Raises:
        ConfigError: An argument cannot be.
    """

    option: ClassVar[str] = "budget"

    tokens: int
    buckets: int = 12
    window: int = LARGEST_WINDOW
    longer: Literal["truncate", "drop", "error"] = "error"

    def __post_init__(self) -> None:
        if self.column is None and self.lengths is None:
            raise ConfigError(
                "budget needs column=, the tokens of a document, or lengths=, what tells how long it is; like "
                "{'column': 'tokens', 'tokens': 65536} or {'lengths': 'num_frames', 'tokens': 65536}"
            )
        if self.column is None and (self.along or self.longer == "truncate"):
            raise ConfigError(
                "budget.along and budget.longer='truncate' are of documents with budget.column=, which is not given; "
                "name it, or leave them out"
            )
        Packing.__post_init__(self)
        if taken := {"input_ids", "lengths"} & {*self.along}:
            raise ConfigError(f"budget.along names {min(taken)!r}, which a batch has already; rename that column")

    def settings(self) -> BudgetSettings:
        """How documents are brought together, for order."""
        return BudgetSettings(tokens=self.tokens, buckets=self.buckets, window=self.window, longer=self.longer)


_EXAMPLES = {
    "pack": "{'column': 'tokens', 'capacity': 8192}",
    "budget": "{'column': 'tokens', 'tokens': 65536}",
}


def parse_packing(kind: type[_Asked], given: _Asked | Mapping[str, Any] | None) -> _Asked | None:
    """What a user wrote, as an object or as its arguments.

    Args:
        kind: What it is to be.
        given: What was written.

    Raises:
        ConfigError: It is something else.
    """
    if given is None or isinstance(given, kind):
        return given
    example = _EXAMPLES[kind.option]
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{kind.option} must be what {kind.__name__} takes, like {example}, but got {given!r}")
    missing = [one for one in _needed(kind) if one not in given]
    if missing:
        raise ConfigError(f"{kind.option} needs {missing[0]}=, like {example}")
    return kind(**given)


def _needed(kind: type[Packing]) -> list[str]:
    return [one.name for one in fields(kind) if one.default is MISSING]
