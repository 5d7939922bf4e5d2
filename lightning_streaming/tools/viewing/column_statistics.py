"""What the columns of a dataset hold, told from some samples of it: types, sizes, ranges, and how values are spread."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.tools.console import counted, is_image, printable_name, render
from lightning_streaming.tools.drawing.charts import LARGEST, Axis, Bar, bars, binned, histogram
from lightning_streaming.tools.drawing.media import picture_type, sound_type
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.viewing.shown_values import as_floats, number_words, spread_of
from lightning_streaming.units import format_bytes

_SAMPLES, _SHARDS = 64, 8
"""That are looked at, at most."""
_PLACES = 16
"""Of a store, where each is a request: places at which samples beside each other are read."""
_MOST_BARS, _MOST_BINS = 8, 16
_OF_ARRAY = 4096
"""Values of an array that are drawn."""
_FEW_KINDS = 0.5
"""A text column is told by its commonest values where there are at most this many different ones for each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStatistics:
    """One column, in some samples."""

    name: str
    encoding: str
    kind: str
    """What its values are."""
    facts: Sequence[tuple[str, str]] = ()
    chart: Any = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Samples that were not read, for one reason."""

    words: str
    samples: int
    may_be_asked: bool
    """Whether they are read where that is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """All columns."""

    samples: int
    """That were read."""
    taken: str
    """Which they are, of how many, in words."""
    columns: Sequence[ColumnStatistics]
    left_out: Sequence[LeftOut]
    """Samples that were not read."""


def statistics_of(reader: SampleReader, encodings: Mapping[str, str], *, is_asked: bool = False) -> Statistics:
    """Read some samples, spread over the dataset, and tell what is in their columns.

    Args:
        reader: Reads them.
        encodings: Of each column, by name.
        is_asked: Whether to read them whatever that takes.
    """
    spread = _Spread.of(reader)
    samples, left_out = list[Mapping[str, Any]](), Counter[tuple[str, bool]]()
    for one in reader.read(spread.numbers, is_asked=is_asked):
        if isinstance(one, (TooMuch, Unreadable)):
            left_out[one.words, isinstance(one, TooMuch)] += 1
        else:
            samples.append(one)
    foreign = {name for shard in spread.shards for name in unsafe_columns(reader.index.shards[shard])}
    columns = []
    for name, encoding in encodings.items():
        values = [one[name] for one in samples if name in one]
        try:
            column = _of_column(name, encoding, values, len(samples))
        except Exception as error:
            if name not in foreign:
                raise
            words = traceback.format_exception_only(error)[-1].strip()  # code of the values' own classes
            column = ColumnStatistics(name=name, encoding=encoding, kind="unknown", facts=[("failed with", words)])
        columns.append(column)
    told = [LeftOut(words=words, samples=count, may_be_asked=may) for (words, may), count in left_out.items()]
    return Statistics(samples=len(samples), taken=spread.in_words(), columns=columns, left_out=told)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spread:
    """Some samples of a dataset, in even steps."""

    numbers: Sequence[int]
    shards: Sequence[int]
    """In which they lie."""
    of_shards: int
    """How many there are."""
    total: int
    """Samples that there are."""
    together: int
    """Of those beside each other how many are taken at a place, at most."""

    @classmethod
    def of(cls, reader: SampleReader) -> _Spread:
        """As far over the dataset as is quick: of a store at few places, but samples beside each other there."""
        sizes = reader.index.samples_per_shard()
        there = np.flatnonzero(sizes)
        shards = _evenly(len(there), _SHARDS)
        numbers, together = list[int](), 1
        for shard in there[shards].tolist():
            first, size = reader.first_of(shard), int(sizes[shard])
            of_shard = min(size, _SAMPLES // len(shards))
            places = of_shard if reader.place.directory is not None else min(of_shard, _PLACES // len(shards))
            if of_shard == size and places < size:
                places = 1
            beside = of_shard // places
            together = max(together, beside)
            numbers += [first + start + at for start in _evenly(size - beside + 1, places) for at in range(beside)]
        found = sorted(set(numbers))
        chosen = there[shards].tolist()
        return cls(numbers=found, shards=chosen, of_shards=len(there), total=int(sizes.sum()), together=together)

    def in_words(self) -> str:
        """Which samples they are."""
        if len(self.numbers) == self.total:
            return f"all {counted(self.total, 'sample')}" if self.total else "no samples: there are none"
        beside = "" if self.together == 1 else f"up to {self.together} beside each other, "
        many = counted(self.of_shards, "shard")
        where = many if len(self.shards) == self.of_shards else f"{len(self.shards)} of {many}"
        return f"{len(self.numbers)} of {counted(self.total, 'sample')}: {beside}in even steps over {where}"


def _evenly(number: int, most: int) -> list[int]:
    """So many of the first natural numbers, in even steps: the first, the last, and those between."""
    if not number or not most:
        return []
    return np.unique(np.linspace(0, number - 1, min(number, most)).astype(int)).tolist()  # type: ignore[no-any-return]


def _of_column(name: str, encoding: str, values: Sequence[Any], samples: int) -> ColumnStatistics:
    present = [value for value in values if value is not None]
    missing = samples - len(present)
    facts = [("missing", f"{missing:,} of {samples:,}")] if missing and present else []
    kinds = {_kind(value) for value in present}
    if len(kinds) != 1:
        told = ", ".join(sorted(kinds)) or ("not read" if not samples or not values else "nothing but null")
        return ColumnStatistics(name=name, encoding=encoding, kind=told, facts=facts)
    kind = kinds.pop()
    more, chart = _TOLD[kind](printable_name(name), present)
    return ColumnStatistics(name=name, encoding=encoding, kind=kind, facts=[*facts, *more], chart=chart)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, (bool, np.bool_)):
        return "truth value"
    if isinstance(value, (int, float, np.integer, np.floating)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes):
        return "picture" if picture_type(value) else "sound" if sound_type(value) else "bytes"
    if is_image(value):
        return "picture"
    return "list" if isinstance(value, (list, tuple)) else "mapping" if isinstance(value, Mapping) else "other"


_Told = tuple[list[tuple[str, str]], Any]


def _numbers(name: str, values: Sequence[Any]) -> _Told:
    numbers = [int(value) if isinstance(value, (int, np.integer)) else float(value) for value in values]
    finite = [value for value in numbers if isinstance(value, int) or math.isfinite(value)]
    facts = [] if len(finite) == len(numbers) else [("not finite", f"{len(numbers) - len(finite):,}")]
    if not finite:
        return facts, None
    mean = sum(map(Fraction, finite), Fraction()) / len(finite)
    told: tuple[tuple[str, Any], ...] = (("min", min(finite)), ("mean", mean), ("max", max(finite)))
    facts += [(what, number_words(value)) for what, value in told]
    different = len({value if value == value else None for value in numbers})  # nan differs from itself
    facts.append(("different", f"{different:,}"))
    drawn = [float(value) for value in finite if abs(value) <= LARGEST]
    if len(drawn) < len(finite):
        facts.append(("too large for the chart", f"{len(finite) - len(drawn):,}"))
    return facts, _spread_chart(f"Values of {name}", "value", np.array(drawn))


def _lengths(name: str, sizes: Sequence[int], unit: str, show: Callable[[float], str]) -> _Told:
    low, middle, high = min(sizes), int(np.median(sizes)), max(sizes)
    facts = [(f"min {unit}", show(low)), (f"median {unit}", show(middle)), (f"max {unit}", show(high))]
    return facts, _spread_chart(f"{unit.capitalize()} of {name}", unit, np.array(sizes, np.float64))


def _texts(name: str, values: Sequence[str]) -> _Told:
    facts, chart = _lengths(name, [len(value) for value in values], "characters", lambda number: f"{number:,}")
    counts = Counter(values)
    facts.append(("different", f"{len(counts):,}"))
    if len(counts) <= _FEW_KINDS * len(values):
        chart = _commonest(name, counts)
    return facts, chart


def _bytes(name: str, values: Sequence[bytes]) -> _Told:
    facts, chart = _lengths(name, [len(value) for value in values], "bytes", lambda number: format_bytes(int(number)))
    formats = Counter(picture_type(value) or sound_type(value) for value in values)
    told = ", ".join(str(kind) for kind in formats if kind)
    return ([("files", told)] if told else []) + facts, chart


def _pictures(name: str, values: Sequence[Any]) -> _Told:
    if all(isinstance(value, bytes) for value in values):
        return _bytes(name, values)
    drawn = [value for value in values if not isinstance(value, bytes)]
    sizes = [(one.width, one.height) for one in drawn]
    small, large = min(sizes, key=lambda one: one[0] * one[1]), max(sizes, key=lambda one: one[0] * one[1])
    told = f"{small[0]}×{small[1]}" if small == large else f"{small[0]}×{small[1]} to {large[0]}×{large[1]}"
    return [("modes", ", ".join(sorted({one.mode for one in drawn}))), ("pixels", told)], None


def _arrays(name: str, values: Sequence[Any]) -> _Told:
    dtypes, shapes = sorted({str(value.dtype) for value in values}), Counter(value.shape for value in values)
    told = ["×".join(map(str, shape)) or "one number" for shape, _ in shapes.most_common(3)]
    more = f" and {len(shapes) - len(told):,} more" if len(shapes) > len(told) else ""
    facts = [("dtype", ", ".join(dtypes)), ("shape", ", ".join(told) + more)]
    spread = spread_of(values)
    if spread is None:
        return facts, None
    size, most = sum(value.size for value in values), max(value.size for value in values)
    if spread.finite < size:
        facts.append(("not finite", f"{size - spread.finite:,} of {size:,}"))
    facts.append(("min, mean, max", spread.in_words()))
    if most > _OF_ARRAY:
        facts.append(("in the chart", f"up to {_OF_ARRAY:,} values of each sample, evenly"))
    parts = [as_floats(value.reshape(-1)[:: math.ceil(value.size / _OF_ARRAY)]) for value in values if value.size]
    flat = np.concatenate(parts)
    return facts, _spread_chart(f"Values of {name}", "value", flat[np.isfinite(flat)], "values")


def _sizes(name: str, values: Sequence[Any]) -> _Told:
    facts, chart = _lengths(name, [len(value) for value in values], "items", lambda number: f"{number:,}")
    keys = Counter(printable_name(str(key)[:40]) for value in values if isinstance(value, Mapping) for key in value)
    return ([("fields", ", ".join(key for key, _ in keys.most_common(8)))] if keys else []) + facts, chart


def _truths(name: str, values: Sequence[Any]) -> _Told:
    return [("true", f"{sum(map(bool, values)) / len(values):.1%}")], _commonest(name, Counter(map(str, values)))


def _others(_: str, values: Sequence[Any]) -> _Told:
    return [("like", render(values[0])[:120])], None


_TOLD: Mapping[str, Callable[[str, Any], _Told]] = {
    "array": _arrays,
    "truth value": _truths,
    "number": _numbers,
    "text": _texts,
    "bytes": _bytes,
    "sound": _bytes,
    "picture": _pictures,
    "list": _sizes,
    "mapping": _sizes,
    "other": _others,
}


def _spread_chart(title: str, label: str, numbers: Any, counted_as: str = "samples") -> Any:
    bins = binned(numbers, _MOST_BINS) if len(numbers) else None
    if bins is None:
        return None
    words = f"A histogram of {counted(len(numbers), 'number')} from {numbers.min():.6g} to {numbers.max():.6g}."
    axes = Axis(label=label, low=None), Axis(label=counted_as)
    return histogram(title, words, *axes, *bins)


def _commonest(name: str, counts: Counter[str]) -> Any:
    of = [
        Bar(name=(value[:40] or "(empty)"), value=count, told=f"{count:,}")
        for value, count in counts.most_common(_MOST_BARS)
    ]
    more = f", of {len(counts):,}" if len(counts) > len(of) else ""
    return bars(f"Commonest values of {name}{more}", "Bars, one for each value.", Axis(label="samples"), of)
