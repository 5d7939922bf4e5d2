"""What the columns of a dataset hold, told from some samples of it: types, sizes, ranges, and how values are spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_streaming.tools.console import counted, is_image, render
from lightning_streaming.tools.drawing.charts import Axis, Bar, bars, binned, histogram
from lightning_streaming.tools.drawing.media import picture_type, sound_type
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.units import format_bytes

_SHARDS, _OF_EACH = 8, 8
"""Shards that are looked at, and samples of each."""
_MOST_BARS, _MOST_BINS = 8, 16
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
class Statistics:
    """All columns."""

    samples: int
    """That were read."""
    shards: int
    """In which they lie."""
    columns: Sequence[ColumnStatistics]
    left_out: Mapping[str, int]
    """Samples that were not read, by the reason."""


def statistics_of(reader: SampleReader, encodings: Mapping[str, str], *, is_asked: bool = False) -> Statistics:
    """Read some samples, spread over the dataset, and tell what is in their columns.

    Args:
        reader: Reads them.
        encodings: Of each column, by name.
        is_asked: Whether to read them whatever that takes.
    """
    samples, left_out, shards = list[Mapping[str, Any]](), Counter[str](), 0
    for numbers in _spread(reader):
        found = reader.read(numbers, is_asked=is_asked)
        shards += any(not isinstance(one, (TooMuch, Unreadable)) for one in found)
        for one in found:
            if isinstance(one, (TooMuch, Unreadable)):
                left_out[one.words] += 1
            else:
                samples.append(one)
    columns = [
        _of_column(name, encoding, [one[name] for one in samples if name in one], len(samples))
        for name, encoding in encodings.items()
    ]
    return Statistics(samples=len(samples), shards=shards, columns=columns, left_out=left_out)


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
    more, chart = _TOLD[kind](name, present)
    return ColumnStatistics(name=name, encoding=encoding, kind=kind, facts=[*facts, *more], chart=chart)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, (bool, np.bool_)):
        return "truth value"
    if isinstance(value, (int, float, np.number)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes):
        return "picture" if picture_type(value) else "sound" if sound_type(value) else "bytes"
    if is_image(value):
        return "picture"
    return "list" if isinstance(value, (list, tuple)) else "mapping" if isinstance(value, Mapping) else "other"


_Told = tuple[list[tuple[str, str]], Any]


def _numbers(name: str, values: Sequence[Any], counted_as: str = "samples") -> _Told:
    numbers = np.array([float(value) for value in values])
    finite = numbers[np.isfinite(numbers)]
    facts = [] if len(finite) == len(numbers) else [("not finite", f"{len(numbers) - len(finite):,}")]
    if not len(finite):
        return facts, None
    told = (("least", finite.min()), ("mean", finite.mean()), ("most", finite.max()))
    facts += [(what, f"{value:,.6g}") for what, value in told]
    return [*facts, ("different", f"{len(np.unique(numbers)):,}")], _spread_chart(
        f"Values of {name}", "value", finite, counted_as
    )


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
    flat = np.concatenate([value.reshape(-1)[:4096] for value in values if value.dtype.kind in "iufb"] or [np.zeros(0)])
    if not flat.size:
        return facts, None
    found, chart = _numbers(name, flat.astype(np.float64).tolist(), "values")
    return facts + [one for one in found if one[0] != "different"], chart


def _sizes(name: str, values: Sequence[Any]) -> _Told:
    facts, chart = _lengths(name, [len(value) for value in values], "items", lambda number: f"{number:,}")
    keys = Counter(str(key)[:40] for value in values if isinstance(value, Mapping) for key in value)
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
    bins = binned(numbers, _MOST_BINS)
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
