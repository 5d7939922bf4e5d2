"""The types of packed values: one for each column in all batches of a run, and conversions that change no value.

ColumnTypes   the type of each column
converted     values in another type; refused where it does not hold one of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, MissingDependencyError, SampleError
from lightning_streaming.formats.columns import encodings_of
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.values import NdarrayEncoding
from lightning_streaming.options.packing import Packing
from lightning_streaming.selection.catalog import Catalog

DType = np.dtype[Any]
_Measures = TypeVar("_Measures")
StoredTypes = Mapping[str, Sequence[DType]]
"""Of columns, by name, the types in which shards store their values."""


class ColumnTypes:
    """The type of each column in batches: it follows from ``as_dtype`` and the stored types, or the first values.

    Where shards or streams store a column in several types, its batches have one that holds all of them. Values that a
    transform returns may be of any type; the first decide, and others of another type are refused.

    Args:
        packing: Options.
        stored: Returns the types in which columns are stored.
        settled: The types of columns that this process has read, by name; is added to, and kept from pass to pass.
    """

    def __init__(
        self, packing: Packing, stored: Callable[[], StoredTypes], settled: MutableMapping[str, DType] | None = None
    ) -> None:
        self._packing, self._stored = packing, stored
        self._settled = {} if settled is None else settled

    def of(self, name: str, dtype: DType) -> DType:
        """Return the type in batches of a column whose next values are of some type.

        Raises:
            SampleError: Values before were of a type that is another one in batches.
        """
        wanted = self._wanted(name, dtype)
        settled = self._settled.setdefault(name, wanted)
        if settled != wanted:
            common = _common_type([settled, wanted]) or "int64"
            raise SampleError(
                f"column {name!r} is {dtype} here, so {wanted} in a batch, and {settled} in batches before",
                hint="a column has one type in a run. Make all values alike in transform=, or name their type, like "
                f"{self._packing.option}.as_dtype={{{name!r}: '{common}'}}",
                option=f"{self._packing.option}.as_dtype",
            )
        return settled

    def unseen(self, name: str) -> DType:
        """Return the type of a column in a batch that has none of its values."""
        if name in self._settled:
            return self._settled[name]
        kinds = self._kinds.get(name)
        return self._wanted(name, kinds[0] if kinds else np.dtype(self._packing.dtype_of(name) or np.int64))

    def check_stored(self) -> None:
        """Refuse columns whose stored types have none in common that holds all of their values.

        Raises:
            ConfigError: There is one; names it.
        """
        for name, kinds in self._kinds.items():
            if kinds and self._common(name, kinds) is None:
                raise ConfigError(
                    f"column {name!r} is stored as {', '.join(map(str, kinds))}",
                    hint="no type of whole numbers holds the values of all. Name the type of a batch, like "
                    f"{self._packing.option}.as_dtype='int64'; values that it does not hold are refused",
                    option=f"{self._packing.option}.as_dtype",
                )

    @cached_property
    def _kinds(self) -> StoredTypes:
        return self._stored()

    def _wanted(self, name: str, dtype: DType) -> DType:
        kinds = self._kinds.get(name, ())
        common = self._common(name, kinds) if len(kinds) > 1 and dtype in kinds else None
        return self._packing.wanted(name, dtype) if common is None else common

    def _common(self, name: str, kinds: Sequence[DType]) -> DType | None:
        return _common_type([self._packing.wanted(name, kind) for kind in kinds])


def _common_type(kinds: Sequence[DType]) -> DType | None:
    """Return the type that holds all values of some types; None where only floats would, and round whole numbers."""
    common = np.result_type(*kinds)
    return None if common.kind == "f" and all(kind.kind in "iu" for kind in kinds) else common


def stored_types(packing: Packing, catalog: Catalog) -> StoredTypes:
    """Return the types in which columns are stored, as far as the indexes say them."""
    stored: dict[str, dict[DType, None]] = {name: {} for name in packing.columns}
    for _, info in catalog.examples():
        known = encodings_of(info)
        for name, kinds in stored.items():
            encoding_name = known.get(name)
            kind: str | None = None
            if encoding_name == "bytes":
                kind = packing.dtype_of(name)
            elif encoding_name is not None:
                with suppress(ConfigError, MissingDependencyError):
                    column = encoding(encoding_name)
                    kind = column.dtype if isinstance(column, NdarrayEncoding) else None
            if kind is not None:
                kinds[np.dtype(kind)] = None
    return {name: tuple(kinds) for name, kinds in stored.items()}


def converted(
    packing: Packing, name: str, values: NDArray[Any], dtype: DType, sample_of: Callable[[int], object]
) -> NDArray[Any]:
    """Return the values of a column in another type; the same array if they are of it.

    Args:
        packing: Options, for the message.
        name: The column.
        values: Of any shape.
        dtype: The type.
        sample_of: Returns the name of the sample of a value, by its place among all.

    Raises:
        SampleError: The type does not hold one of them; says which, and of which sample. Floats may be rounded to
            another type of floats.
    """
    if values.dtype == dtype:
        return values
    place = first_lost(values, dtype)
    if place is not None:
        raise SampleError(
            f"column {name!r} has the value {values.reshape(-1)[place]}, which {dtype} does not hold (sample "
            f"{sample_of(place)})",
            hint=f"name a type that holds all values, like {packing.option}.as_dtype={{{name!r}: '{values.dtype}'}}",
            option=f"{packing.option}.as_dtype",
        )
    return values.astype(dtype)


def first_lost(values: NDArray[Any], dtype: DType) -> int | None:
    """Return the place of the first value that another type does not hold; None if it holds all.

    Whole numbers must stay what they are, also as floats. Floats may be rounded, but not become infinite; as whole
    numbers they must be whole.
    """
    kind = values.dtype.kind
    if kind == "b" or not values.size:
        return None
    # To numpy, floats hold whole numbers of 64 bits.
    if np.can_cast(values.dtype, dtype, "safe") and (kind == dtype.kind or dtype.kind != "f"):
        return None
    if kind == "f" and dtype.kind == "f":
        with np.errstate(over="ignore"):
            is_lost = np.isfinite(values) & ~np.isfinite(values.astype(dtype))
    elif kind == "f":
        least, most = _whole_numbers(dtype)
        values = values.astype(np.result_type(values, np.float64), copy=False)  # float16 does not hold the limits
        is_lost = ~((values == np.trunc(values)) & (values >= float(least)) & (values < float(most + 1)))
    else:
        least, most = _whole_numbers(dtype)
        if least <= int(values.min()) and int(values.max()) <= most:
            return None
        is_lost = (values < least) | (values > most)
    return int(is_lost.reshape(-1).argmax()) if is_lost.any() else None


def _whole_numbers(dtype: DType) -> tuple[int, int]:
    """Return the least and the greatest of the whole numbers that a type holds with all between them."""
    if dtype.kind == "f":
        most = 1 << (np.finfo(dtype).nmant + 1)
        return -most, most
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


class BarePack(dict[str, Any]):
    """A batch of which all documents are missing, so the types of its columns may be a guess."""


def alike_batches(
    packing: Packing, known: MutableMapping[str, torch.dtype], batches: Iterator[tuple[Any, _Measures]]
) -> Iterator[tuple[Any, _Measures]]:
    """Yield collated batches; refuse one in which a column has another type than before, whichever worker it is from.

    A :class:`BarePack` decides no type: its columns are converted to the known types.

    Args:
        packing: Options.
        known: The types of columns in the batches before, by name; is added to.
        batches: Each with what was measured of it.

    Raises:
        SampleError: A column has another type; names both.
    """
    names = {packing.name_of(column): column for column in packing.columns}
    for batch, measures in batches:
        if isinstance(batch, BarePack):
            columns = {name: batch[name].to(known[name]) for name in names if name in known}
            yield {**batch, **columns}, measures
            continue
        for name, column in names.items():
            dtype = batch[name].dtype if isinstance(batch, Mapping) and name in batch else None
            before = dtype if dtype is None else known.setdefault(name, dtype)
            if dtype is None or before is None or before == dtype:
                continue
            wider = max(dtype, before, key=lambda of: (of.is_floating_point, of.itemsize))
            raise SampleError(
                f"column {column!r} is {dtype} in this batch and {before} in those before",
                hint="a column has one type in a run. Make all values alike in transform=, or name their type, like "
                f"{packing.option}.as_dtype={{{column!r}: {str(wider).removeprefix('torch.')!r}}}",
                option=f"{packing.option}.as_dtype",
            )
        yield batch, measures
