"""What the columns of a dataset hold, told from some samples of it: types, sizes, ranges, and how values are spread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from lightning_streaming.tools.console import counted, is_image, printable_name, render
from lightning_streaming.tools.drawing.charts import LARGEST, Axis, Bar, bars, binned, histogram
from lightning_streaming.tools.drawing.media import picture_type, sound_type
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.viewing.shown_values import as_floats, number_words, spread_of
from lightning_streaming.units import format_bytes

_SHARDS, _OF_EACH = 8, 8
"""Shards that are looked at, and samples of each."""
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
    shards: int
    """In which they lie."""
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
    samples, left_out, shards = list[Mapping[str, Any]](), Counter[tuple[str, bool]](), 0
    for numbers in _spread(reader):
        found = reader.read(numbers, is_asked=is_asked)
        shards += any(not isinstance(one, (TooMuch, Unreadable)) for one in found)
        for one in found:
            if isinstance(one, (TooMuch, Unreadable)):
                left_out[one.words, isinstance(one, TooMuch)] += 1
            else:
                samples.append(one)
    columns = [
        _of_column(name, encoding, [one[name] for one in samples if name in one], len(samples))
        for name, encoding in encodings.items()
    ]
    told = [LeftOut(words=words, samples=count, may_be_asked=may) for (words, may), count in left_out.items()]
    return Statistics(samples=len(samples), shards=shards, columns=columns, left_out=told)


def _spread(reader: SampleReader) -> list[list[int]]:
    """Some samples beside each other, of each of some shards."""
    sizes = reader.index.samples_per_shard()
    there = np.flatnonzero(sizes)
    chosen = there[np.unique(np.linspace(0, len(there) - 1, _SHARDS).astype(int))] if len(there) else there
    found = []
    for shard in chosen.tolist():
        first, size = reader.first_of(shard), int(sizes[shard])
        wanted = min(size, _OF_EACH * _SHARDS // len(chosen))
        start = first + (size - wanted) // 2
        found.append(list(range(start, start + wanted)))
    return found


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
    told: tuple[tuple[str, Any], ...] = (("least", min(finite)), ("mean", mean), ("most", max(finite)))
    facts += [(what, number_words(value)) for what, value in told]
    different = len({value if value == value else None for value in numbers})  # nan differs from itself
    facts.append(("different", f"{different:,}"))
    drawn = [float(value) for value in finite if abs(value) <= LARGEST]
    if len(drawn) < len(finite):
        facts.append(("too large for the chart", f"{len(finite) - len(drawn):,}"))
    return facts, _spread_chart(f"Values of {name}", "value", np.array(drawn))


def _lengths(name: str, sizes: Sequence[int], unit: str, show: Callable[[float], str]) -> _Told:
    low, middle, high = min(sizes), int(np.median(sizes)), max(sizes)
    facts = [(f"least {unit}", show(low)), (f"median {unit}", show(middle)), (f"most {unit}", show(high))]
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
    facts.append(("least, mean, most", spread.in_words()))
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
