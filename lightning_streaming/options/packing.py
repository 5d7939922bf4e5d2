"""Options of packing and of token budgets, and their base: columns, lengths and padding of documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np

from lightning_streaming.errors import ConfigError, MissingArgumentError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import OptionGroup, as_plain, fields_of, store_group, store_plain
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.options.tokenize import TokenizeConfig
from lightning_streaming.sequence.packing.settings import (
    LARGEST_WINDOW,
    AnyPackSettings,
    BudgetSettings,
    PackSettings,
)
from lightning_streaming.sequence.settings import require_known
from lightning_streaming.signatures import explains_options_of, public, suggests_names
from lightning_streaming.tokenizing.documents import LOSS_MASK, TOKENS, DocumentTokenizer
from lightning_streaming.units import check_truth, plain_number, store_whole

MADE = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")
"""Entries of a batch that are computed from the lengths of packed documents."""
ENTRIES = ("input_ids", "labels", "lengths")
"""Further entries of batches."""
_OTHER_NAMES = {"cu_seqlens_padded", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Entries of batches with ``multiple`` or other ``names``."""
IGNORED = -100
"""Label that torch's losses ignore by default."""
LARGEST_TOKEN = 2**63 - 1
"""Of int64."""
MOST_BYTES = 8
"""Size of the largest number of torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing(OptionGroup):
    """Options of documents that are packed, or grouped by a token budget.

    Args:
        column: The tokens of a document: a column of one-dimensional arrays, or of bytes with ``dtype``. Default:
            "tokens" with ``tokenize``, and required without.
        tokenize: Tokenizing of texts or conversations as they are read, to ``tokens`` and a ``loss_mask``: fields of
            :class:`~lightning_streaming.TokenizeConfig`, like ``{"tokenizer": "tokenizer.json", "text": "text"}``.
        lengths: Lengths of documents: a column of numbers, or a function whose parameters are named like columns. None:
            the lengths of ``column`` as stored, or the tokens that ``tokenize`` creates. Required if a transform
            creates the tokens.
        lengths_version: With a function in ``lengths``, a name of what it depends on, like "gpt2" or a digest of the
            tokenizer's file: lengths are counted again if it changes. Required if the function is an object, a method
            or a partial, or names an object.
        dtype: Type of the values of columns of bytes, like "uint16"; or one for each such column, like
            ``{"tokens": "uint16", "mask": "uint8"}``.
        along: Other columns of as many values as tokens, such as labels or a mask of the loss, treated like the tokens.
            Values of several dimensions need their shape, with -1 for the tokens, first or last: like
            ``{"labels": [-1], "boxes": [-1, 4], "position_ids": [3, -1]}``, of shape (packs, capacity, 4) and
            (3, packs, capacity) in a batch.
        concatenate: Columns with values for a document as a whole, like ``["pixel_values", "image_grid_thw"]``: arrays
            that a batch has one after another, in the order of its documents, in their stored type. A document has
            None, or an array without values, for nothing; a batch with nothing lacks the entry. Documents must stay
            whole: ``longer`` is "drop" or "error", and ``method`` is not "concat".
        bos: Number of a token that is inserted before each stored document, also if it begins with it, so that lengths
            are one more. Columns of ``along`` have their padding value there. None: no token.
        eos: Number of a token that is inserted after each stored document; ``labels`` have it. None: no token.
        pad: Padding value: a number, or one for each column.
        as_dtype: Type of the values in a batch, like "int64" or "int32"; an integer type does not change floating
            point values. None: the stored types. Or one for each column, like ``{"weights": "float32"}``, with "int64"
            for the others. Values that do not fit the type are an error.

    Raises:
        ConfigError: An argument cannot be.
    """

    column: str | None = None
    tokenize: TokenizeConfig | Mapping[str, Any] | None = None
    lengths: str | Callable[..., Any] | None = None
    lengths_version: str | None = None
    dtype: str | Mapping[str, str] | None = None
    along: Sequence[str] | Mapping[str, Sequence[int]] = ()
    concatenate: Sequence[str] = ()
    bos: int | None = None
    eos: int | None = None
    pad: int | float | Mapping[str, Any] = 0
    as_dtype: str | Mapping[str, str | None] | None = "int64"
    tokenizer: DocumentTokenizer | None = field(init=False, default=None, repr=False, compare=False)
    """What tokenizes samples as they are read; None if they have tokens."""

    def __post_init__(self) -> None:
        with fields_of(self.option):
            store_group(self, TokenizeConfig)
        if isinstance(self.tokenize, TokenizeConfig):
            object.__setattr__(self, "tokenizer", self.tokenize.documents())
            object.__setattr__(self, "column", TOKENS if self.column is None else self.column)
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            self._refuse("column", f"must be the name of the column of tokens, but is {short_repr(self.column)}")
        with fields_of(self.option):
            self.settings()
        if isinstance(self.along, Mapping):
            self._check_shapes(self.along)
        else:
            self._take_names("along")
        if self.column in self.along or len(set(self.along)) < len(self.along):
            self._refuse("along", f"names each other column once, but is {list(self.along)}")
        self._take_names("concatenate")
        named = {self.column, *self.along, *MADE, *ENTRIES}
        if len({*self.concatenate} - named) < len(self.concatenate):
            self._refuse("concatenate", f"names each column once, and none that a batch has, but is {self.concatenate}")
        if self.concatenate and self.column is None:
            self._refuse("concatenate", f"needs {self.option}.column, the tokens of documents; a collate_fn may do it")
        if self.concatenate and self.settings().longer not in ("drop", "error"):
            self._refuse("concatenate", f"needs whole documents; set {self.option}.longer to 'drop' or 'error'")
        for name in ("dtype", "as_dtype"):
            self._check_dtypes(name, getattr(self, name))
        with fields_of(self.option):
            self.request()
            for name in self.ends:
                store_whole(self, name, 0, LARGEST_TOKEN)
        for name in self.ends:
            if self.tokenizer is not None or self.column is None:
                instead = "set token_budget.column" if self.column is None else f"set {self.option}.tokenize.{name}"
                self._refuse(name, f"is for stored tokens; {instead} instead")
        self._check_pad()

    @property
    def ends(self) -> dict[str, int]:
        """The tokens that are inserted before and after each document, by the names of their options."""
        ends = {"bos": self.bos, "eos": self.eos}
        return {name: token for name, token in ends.items() if token is not None}

    @property
    def facts(self) -> dict[str, str | int]:
        """The settings that a saved position depends on, by the names of their options."""
        facts: dict[str, str | int] = {**self.settings().named, **self.ends}
        if self.tokenizer is not None and self.request().lengths is not self.tokenizer:
            facts["tokenize"] = self.tokenizer.digest[:16]
        return facts

    @property
    def columns(self) -> tuple[str, ...]:
        """All packed columns, that of the tokens first."""
        return (*(() if self.column is None else (self.column,)), *self.along)

    @property
    def is_flat(self) -> bool:
        """True if stored bytes are joined to batches: columns have one dimension, and nothing else is read."""
        return not self.concatenate and all(len(self.shape_of(name)) == 1 for name in self.columns)

    def shape_of(self, column: str) -> tuple[int, ...]:
        """Return the shape of a document's values, with -1 for its tokens."""
        return tuple(self.along.get(column, (-1,))) if isinstance(self.along, Mapping) else (-1,)

    def settings(self) -> AnyPackSettings:
        """Return the settings of the plan."""
        raise NotImplementedError

    def request(self) -> LengthsRequest:
        """Return the request for lengths."""
        lengths, column, dtype = self.lengths, None, None
        if lengths is None and self.tokenizer is not None and self.column == TOKENS:
            lengths = self.tokenizer
        elif lengths is None:
            column, dtype = self.column, None if self.column is None else self.dtype_of(self.column)
        return LengthsRequest(
            column=column,
            dtype=dtype,
            lengths=lengths,
            version=self.lengths_version,
            inserted=len(self.ends),
            group=self.option,
        )

    def inserted(self, column: str) -> tuple[Any, Any]:
        """Return the values of a column at the tokens that are inserted before and after a document."""
        pad = self.pad_of(column)
        return (self.bos, self.eos) if column == self.column else (pad, pad)

    def pad_of(self, column: str) -> Any:
        """Return the padding value of a column."""
        return self.pad.get(column, 0) if isinstance(self.pad, Mapping) else self.pad

    def dtype_of(self, column: str) -> str | None:
        """Return the type of the values of a column of bytes."""
        return self.dtype.get(column) if isinstance(self.dtype, Mapping) else self.dtype

    def name_of(self, column: str) -> str:
        """Return the name of a column in a batch."""
        return "input_ids" if column == self.column else column

    def wanted(self, column: str, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type of a column's values in a batch.

        Args:
            column: Name of the column.
            stored: Type of its values in the shards.
        """
        is_named = isinstance(self.as_dtype, Mapping) and column in self.as_dtype
        name = self.as_dtype.get(column, "int64") if isinstance(self.as_dtype, Mapping) else self.as_dtype
        if name is None:
            return stored
        wanted = np.dtype(name)
        return stored if stored.kind == "f" and wanted.kind != "f" and not is_named else wanted

    def _refuse(self, name: str, words: str) -> NoReturn:
        raise ConfigError(f"{self.option}.{name} {words}", option=f"{self.option}.{name}")

    def _take_names(self, name: str) -> None:
        value = getattr(self, name)
        is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) == 1
        names = tuple(map(as_plain, value)) if is_list else ()  # read once: it may be a generator
        if not is_list or not all(isinstance(item, str) for item in names):
            self._refuse(name, f"must be a list of names, but is {short_repr(value)}")
        object.__setattr__(self, name, names)

    def _check_shapes(self, shapes: Mapping[Any, Any]) -> None:
        for name, shape in shapes.items():
            sizes = [plain_number(size) for size in shape] if isinstance(shape, list | tuple) else []
            others = sizes[1:] if sizes[:1] == [-1] else sizes[:-1] if sizes[-1:] == [-1] else [0]
            if not isinstance(name, str) or not all(isinstance(size, int) and size > 0 for size in others):
                words = "must map columns to shapes with -1, the tokens, first or last, like [-1, 4] or [3, -1]"
                self._refuse("along", f"{words}, but maps {short_repr(name)} to {short_repr(shape)}")

    def _check_dtypes(self, name: str, dtypes: object) -> None:
        if not isinstance(dtypes, Mapping):
            self._check_dtype(name, dtypes)
            return
        if more := sorted({*dtypes} - {*self.columns}):
            self._refuse(name, f"may name {', '.join(self.columns)}, but names {short_repr(more[0])}")
        for column, dtype in dtypes.items():
            self._check_dtype(f"{name}.{column}", dtype)

    def _check_dtype(self, name: str, dtype: object) -> None:
        if dtype is None:
            return
        try:
            known = np.dtype(dtype) if isinstance(dtype, str) else None
        except (TypeError, ValueError):
            known = None
        is_number = known is not None and known.kind in "iuf" and known.itemsize <= MOST_BYTES and known.isnative
        if not is_number:
            self._refuse(name, f'must name a type of numbers, like "int64", but is {short_repr(dtype)}')

    def _check_pad(self) -> None:
        if isinstance(self.pad, Mapping) and (more := sorted({*self.pad} - {*self.columns})):
            self._refuse("pad", f"may name {', '.join(self.columns)}, but names {short_repr(more[0])}")
        for pad in self.pad.values() if isinstance(self.pad, Mapping) else (self.pad,):
            if plain_number(pad) is None and not isinstance(pad, float | np.floating):
                self._refuse("pad", f"must be a number, or one for each column, but is {short_repr(self.pad)}")


def fits(pad: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether a type can hold a number; floating point types may round it."""
    if dtype.kind == "f":
        return not math.isfinite(pad) or abs(pad) <= float(np.finfo(dtype).max)
    if dtype.kind not in "iu":
        return pad in (0, 1)
    limits = np.iinfo(dtype)
    return math.isfinite(pad) and int(pad) == pad and limits.min <= pad <= limits.max


@public()
@suggests_names
@explains_options_of(Packing)
@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig(Packing):
    """Packing of documents into rows (packs) of ``capacity`` tokens each.

    ``batch_size`` then counts packs. A batch is a dict: ``input_ids`` (the values of ``column``), the columns of
    ``along``, ``position_ids`` and ``document_ids``, each of shape (batch_size, capacity), and ``cu_seqlens`` and
    ``max_seqlen`` for attention kernels for variable lengths. ``document_ids`` is -1 for padding. Other columns are
    dropped.

    Args:
        capacity: Tokens in a pack.
        method: "best_fit" packs whole documents, within windows of the epoch's order; "concat" concatenates documents
            in order and cuts them where a pack is full.
        window: Documents in a window of "best_fit".
        longer: What "best_fit" does with documents longer than a pack: "split" them, "truncate" or "drop" them, or
            "error".
        without: Entries of a batch that are left out: "position_ids", "document_ids", "cu_seqlens" or "max_seqlen".
        labels: Add ``labels``, int64: the tokens, but -100 for padding, for the first token of each document, which no
            token precedes, and where ``loss_mask`` is 0. They are not shifted: models of transformers do that.
        loss_mask: Column of as many values as tokens, 0 where ``labels`` are -100. Default: "loss_mask" of
            conversations with ``tokenize``.
        multiple: Each document is padded to a multiple of this many tokens, for context parallelism or FP8.
            ``cu_seqlens`` then counts documents without their padding, and ``cu_seqlens_padded`` with it.
        max_documents: Most documents of a pack, with "best_fit". ``cu_seqlens`` then has max_documents + 1 entries for
            each pack, whose last end is repeated, and ``max_seqlen`` is ``capacity``, so that no shape changes.
        continue_positions: ``position_ids`` of a document that is cut continue in its next pack, instead of starting
            over at 0.
        names: "huggingface" for ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, as models
            of transformers take them, instead of ``cu_seqlens`` and ``max_seqlen``.

    Raises:
        ConfigError: An argument cannot be.
    """

    option: ClassVar[str] = "packing"
    example: ClassVar[str] = "{column: tokens, capacity: 8192}"

    capacity: int
    method: Literal["best_fit", "concat"] = "best_fit"
    window: int = 4096
    longer: Literal["split", "truncate", "drop", "error"] = "split"
    without: Sequence[str] = ()
    labels: bool = False
    loss_mask: str | None = None
    multiple: int = 1
    max_documents: int | None = None
    continue_positions: bool = False
    names: Literal["plain", "huggingface"] = "plain"

    def __post_init__(self) -> None:
        store_plain(self, leave=("tokenizer",))
        if self.column is None and self.tokenize is None:
            raise MissingArgumentError(f"PackingConfig needs column=, like {self.example}", option="packing.column")
        Packing.__post_init__(self)
        self._take_names("without")
        unknown = [name for name in self.without if name not in MADE]
        if unknown:
            self._refuse("without", f"may name {', '.join(MADE)}, but names {short_repr(unknown[0])}")
        with fields_of(self.option):
            for name in ("labels", "continue_positions"):
                check_truth(name, getattr(self, name))
            require_known("names", self.names, ("plain", "huggingface"))
        if self.loss_mask is not None and (not self.labels or not isinstance(self.loss_mask, str)):
            self._refuse("loss_mask", f"must be a column, and needs labels: true, but is {short_repr(self.loss_mask)}")
        if self.mask is not None and self.mask in (self.column, *self.concatenate):
            self._refuse("loss_mask", f"has one value for each token, so it is not the column {self.mask!r}")
        for name in ("along", "concatenate"):
            if taken := _OTHER_NAMES & {*getattr(self, name)}:
                self._refuse(name, f"names {min(taken)!r}, which batches use for ends of documents; rename the column")
        if self.mask is not None and len(self.shape_of(self.mask)) > 1:
            self._refuse("loss_mask", f"has one value for a token, but shape {list(self.shape_of(self.mask))} in along")
        if taken := {"input_ids", *MADE} - {*self.without} & {*self.along}:
            self._refuse("along", f"names {min(taken)!r}, which a batch has already; name it in without, or rename it")
        if self.labels and "labels" in (self.mask, *self.along):
            self._refuse("labels", "makes an entry of this name, which along or loss_mask names")

    @property
    def mask(self) -> str | None:
        """The column of the mask of labels; None for none."""
        is_chat = self.tokenizer is not None and self.tokenizer.chat is not None
        return LOSS_MASK if self.loss_mask is None and self.labels and is_chat else self.loss_mask

    @property
    def columns(self) -> tuple[str, ...]:
        """All packed columns, that of the tokens first."""
        columns = Packing.columns.fget(self)  # type: ignore[attr-defined]  # super() fails in dataclasses with slots
        return columns if self.mask is None or self.mask in columns else (*columns, self.mask)

    def inserted(self, column: str) -> tuple[Any, Any]:
        """Return the values of a column at inserted tokens; the last one is learnt, so a mask of labels is 1 there."""
        bos, eos = Packing.inserted(self, column)
        return bos, 1 if column == self.mask else eos

    def settings(self) -> PackSettings:
        """Return the settings of the plan."""
        return PackSettings(
            capacity=self.capacity,
            method=self.method,
            window=self.window,
            longer=self.longer,
            max_documents=self.max_documents,
            multiple=self.multiple,
        )


@public()
@suggests_names
@explains_options_of(Packing)
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget(Packing):
    """Batches of whole documents of similar length, as many as a token budget allows.

    A batch is a dict: ``input_ids`` (the values of ``column``) and the columns of ``along``, of shape
    (documents, longest document), and ``lengths``, the tokens of each document. Other columns are dropped.

    A document may be anything that has a length, such as audio with a number of frames; frames then count as tokens.

    Args:
        column: The tokens of a document: a column of one-dimensional arrays, or of bytes with ``dtype``. Default:
            "tokens" with ``tokenize``. None, with ``lengths`` and a ``collate_fn``: documents have no such column.
        tokens: Most tokens of a batch, with padding: the number of its documents times the longest of them.
        buckets: Ranges of lengths into which the documents of a window are sorted; a batch has documents of one range.
            More buckets pad less, and mix less.
        window: Documents of the epoch's order that are grouped together.
        longer: What to do with documents longer than ``tokens``: "truncate" or "drop" them, or "error".

    Raises:
        ConfigError: An argument cannot be.
    """

    option: ClassVar[str] = "token_budget"
    example: ClassVar[str] = "{column: tokens, tokens: 65536}"

    tokens: int
    buckets: int = 12
    window: int = LARGEST_WINDOW
    longer: Literal["truncate", "drop", "error"] = "error"

    def __post_init__(self) -> None:
        store_plain(self, leave=("tokenizer",))
        if self.column is None and self.lengths is None and self.tokenize is None:
            raise ConfigError(
                "token_budget needs column=, the tokens of a document, or lengths=, the length of a document",
                hint="like {column: tokens, tokens: 65536} or {lengths: num_frames, tokens: 65536}",
                option="token_budget.column",
            )
        if self.column is None and self.tokenize is None and (self.along or self.longer == "truncate"):
            raise ConfigError(
                "token_budget.along and token_budget.longer='truncate' need token_budget.column, which is not given",
                hint="set token_budget.column, or remove them",
                option="token_budget.column",
            )
        Packing.__post_init__(self)
        if taken := {"input_ids", "lengths"} & {*self.along}:
            self._refuse("along", f"names {min(taken)!r}, which a batch has already; rename that column")

    def settings(self) -> BudgetSettings:
        """Return the settings of the plan."""
        return BudgetSettings(tokens=self.tokens, buckets=self.buckets, window=self.window, longer=self.longer)
