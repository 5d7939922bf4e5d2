"""The datasets that ``lightning-streaming view`` shows, each read on first use, and statistics of their columns."""

from __future__ import annotations

import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.tools.console import counted, is_image, printable_name, render
from lightning_streaming.tools.report.charts import LARGEST, Axis, Bar, bars, binned, histogram
from lightning_streaming.tools.report.media import audio_type, image_type
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.stored.stored_dataset import StoredDataset
from lightning_streaming.tools.stored.summary import summarize
from lightning_streaming.tools.viewing.shown_values import as_floats, format_number, spread_of
from lightning_streaming.units import format_bytes

if TYPE_CHECKING:
    from lightning_streaming.selection.bitmap import Selection

_SELECTION_CHUNK = 1 << 16
"""Samples that are looked up in a selection at once."""
_ATTEMPTS, _TIMEOUT = 2, 20.0
"""Limits of transfers from stores: a user waits for the page."""
_MAX_SAMPLES, _MAX_SHARDS = 64, 8
"""Limits of what column statistics read."""
_MAX_RANGES = 16
"""Ranges of adjacent samples that statistics read from a store, where each is a request."""
_MAX_BARS, _MAX_BINS = 8, 16
_MAX_ARRAY_VALUES = 4096
"""Values of an array that a chart includes."""
_FEW_VALUES = 0.5
"""Most different values per sample for which a text column shows the most frequent values and not lengths."""


class ViewedStream:
    """One dataset, and its role in a run.

    Args:
        dataset: Its location.
        label: Its name on pages.
        allow_unsafe_types: Whether columns may be decoded that can run code of the author of the data.
        stage: The stage that reads it; empty for a single dataset.
        name: Name of the stream.
        selection: Description of the samples that the run reads; empty for all.
    """

    def __init__(
        self,
        dataset: StoredDataset,
        label: str,
        allow_unsafe_types: bool,
        stage: str = "",
        name: str = "",
        selection: str = "",
    ) -> None:
        self.dataset = replace(dataset, attempts=_ATTEMPTS, timeout=_TIMEOUT)
        self.label, self.stage, self.name, self.selection = label, stage, name, selection
        self._allows_unsafe = allow_unsafe_types
        self._lock = threading.Lock()
        self._reader: SampleReader | None = None
        self._summary: Mapping[str, Any] | None = None
        self._statistics: Statistics | None = None

    @property
    def title(self) -> str:
        """Title of its pages."""
        return f"{self.stage}: {self.label}" if self.stage else self.label

    @property
    def reader(self) -> SampleReader:
        """Reader of its samples; the first access reads the index.

        Raises:
            StreamingError: As for ``StoredDataset.read_index``.
        """
        with self._lock:
            if self._reader is None:
                cache = self.dataset.cache()
                index = self.dataset.read_index() if self.dataset.format is None else cache.read_index()
                self._reader = SampleReader(self.dataset, cache, index, self._allows_unsafe)
            return self._reader

    def summary(self) -> Mapping[str, Any]:
        """Return the summary of its index, computed once: it reads each shard's entry, maybe a million.

        Raises:
            StreamingError: As for :attr:`reader`.
        """
        if self._summary is None:
            self._summary = summarize(self.reader.index)
        return self._summary

    def statistics(self, *, force: bool) -> Statistics:
        """Return statistics of its columns; samples that could not be read are tried again.

        Args:
            force: Whether to read samples regardless of the cost.

        Raises:
            StreamingError: As for :attr:`reader`.
        """
        reader, cached = self.reader, self._statistics
        if cached is not None and not (force and cached.skipped):
            return cached
        encodings = {column["name"]: column["encoding"] for column in self.summary()["columns"]}
        statistics = statistics_of(reader, encodings, force=force)
        if all(skipped.can_force for skipped in statistics.skipped):
            self._statistics = statistics
        return statistics

    def filtered(self, selection: Selection | None, first: int, limit: int, *, is_selected: bool) -> list[int]:
        """Return the numbers of samples that a run reads, or does not read.

        Args:
            selection: The samples that the run reads; None for all.
            first: Number of the first candidate.
            limit: Maximum number of samples to return.
            is_selected: Whether to return samples that are read, or the others.
        """
        total, chosen = self.reader.index.num_samples, list[int]()
        for start in range(first, total, _SELECTION_CHUNK):
            numbers = np.arange(start, min(start + _SELECTION_CHUNK, total))
            is_read = np.ones(len(numbers), np.bool_) if selection is None else selection.has(numbers)
            chosen += numbers[is_read == is_selected][: limit - len(chosen)].tolist()
            if len(chosen) >= limit:
                break
        return chosen

    def close(self) -> None:
        """Release the open shard."""
        if self._reader is not None:
            self._reader.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStatistics:
    """Statistics of one column in some samples."""

    name: str
    encoding: str
    kind: str
    """Kind of its values."""
    facts: Sequence[tuple[str, str]] = ()
    chart: Any = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSamples:
    """Samples that were not read, for one reason."""

    reason: str
    samples: int
    can_force: bool
    """Whether the user can request to read them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of all columns."""

    samples: int
    """Number of samples that were read."""
    taken: str
    """Description of the samples, and of how many they are taken."""
    columns: Sequence[ColumnStatistics]
    skipped: Sequence[SkippedSamples]


def statistics_of(reader: SampleReader, encodings: Mapping[str, str], *, force: bool = False) -> Statistics:
    """Read some samples, spread evenly over the dataset, and summarize their columns.

    Args:
        reader: Reader of the samples.
        encodings: Encoding of each column, by name.
        force: Whether to read samples regardless of the cost.
    """
    numbers, shards, taken = _spread_over(reader)
    samples, skipped = list[Mapping[str, Any]](), Counter[tuple[str, bool]]()
    for sample in reader.read(numbers, force=force):
        if isinstance(sample, (TooMuch, Unreadable)):
            skipped[sample.reason, isinstance(sample, TooMuch)] += 1
        else:
            samples.append(sample)
    unpickled = {name for shard in shards for name in unsafe_columns(reader.index.shards[shard])}
    columns = []
    for name, encoding in encodings.items():
        values = [sample[name] for sample in samples if name in sample]
        try:
            kind, facts, chart = _describe_column(printable_name(name), values, len(samples))
        except Exception as error:
            if name not in unpickled:
                raise
            message = traceback.format_exception_only(error)[-1].strip()  # raised by the code of the values' classes
            kind, facts, chart = "unknown", [("failed with", message)], None
        columns.append(ColumnStatistics(name=name, encoding=encoding, kind=kind, facts=facts, chart=chart))
    return Statistics(
        samples=len(samples),
        taken=taken,
        columns=columns,
        skipped=[
            SkippedSamples(reason=reason, samples=count, can_force=can_force)
            for (reason, can_force), count in skipped.items()
        ],
    )


def _spread_over(reader: SampleReader) -> tuple[list[int], list[int], str]:
    """Return numbers of samples at even distances over the dataset, their shards, and a description.

    From a store few ranges of adjacent samples are read, since each is a request.
    """
    sizes = reader.index.samples_per_shard()
    nonempty = np.flatnonzero(sizes)
    shards = nonempty[_evenly(len(nonempty), _MAX_SHARDS)].tolist()
    chosen, max_adjacent = set[int](), 1
    for shard in shards:
        first, size = reader.first_of(shard), int(sizes[shard])
        count = min(size, _MAX_SAMPLES // len(shards))
        ranges = count if reader.dataset.directory is not None else min(count, _MAX_RANGES // len(shards))
        if count == size and ranges < size:
            ranges = 1
        adjacent = count // ranges
        max_adjacent = max(max_adjacent, adjacent)
        chosen.update(first + start + at for start in _evenly(size - adjacent + 1, ranges) for at in range(adjacent))
    numbers, total = sorted(chosen), int(sizes.sum())
    if len(numbers) == total:
        return numbers, shards, f"all {counted(total, 'sample')}" if total else "no samples: there are none"
    together = "" if max_adjacent == 1 else f"up to {max_adjacent} adjacent ones, "
    where = counted(len(nonempty), "shard")
    where = where if len(shards) == len(nonempty) else f"{len(shards)} of {where}"
    return numbers, shards, f"{len(numbers)} of {counted(total, 'sample')}: {together}in even steps over {where}"


def _evenly(number: int, limit: int) -> list[int]:
    """Return at most ``limit`` of the first natural numbers, evenly spaced, with the first and the last."""
    if not number or not limit:
        return []
    return np.unique(np.linspace(0, number - 1, min(number, limit)).astype(int)).tolist()  # type: ignore[no-any-return]


_Facts = list[tuple[str, str]]


def _describe_column(name: str, values: Sequence[Any], samples: int) -> tuple[str, _Facts, Any]:
    """Return the kind of a column's values, facts about them, and a chart or None."""
    present = [value for value in values if value is not None]
    missing = samples - len(present)
    facts = [("missing", f"{missing:,} of {samples:,}")] if missing and present else []
    kinds = {_kind_of(value) for value in present}
    if len(kinds) != 1:
        words = ", ".join(sorted(kinds)) or ("not read" if not samples or not values else "nothing but null")
        return words, facts, None
    kind = kinds.pop()
    more, chart = _DESCRIBE[kind](name, present)
    return kind, [*facts, *more], chart


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if isinstance(value, (int, float, np.integer, np.floating)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes):
        return "image" if image_type(value) else "audio" if audio_type(value) else "bytes"
    if is_image(value):
        return "image"
    return "list" if isinstance(value, (list, tuple)) else "mapping" if isinstance(value, Mapping) else "other"


def _describe_numbers(name: str, values: Sequence[Any]) -> tuple[_Facts, Any]:
    numbers = [int(value) if isinstance(value, (int, np.integer)) else float(value) for value in values]
    finite = [value for value in numbers if isinstance(value, int) or math.isfinite(value)]
    facts = [] if len(finite) == len(numbers) else [("not finite", f"{len(numbers) - len(finite):,}")]
    if not finite:
        return facts, None
    mean = sum(map(Fraction, finite), Fraction()) / len(finite)
    facts += [("min", format_number(min(finite))), ("mean", format_number(mean)), ("max", format_number(max(finite)))]
    counts = Counter(value if value == value else None for value in numbers)  # nan differs from itself
    facts.append(("different", f"{len(counts):,}"))
    if len(counts) <= _FEW_VALUES * len(numbers) and all(
        isinstance(value, int) and abs(value) <= LARGEST for value in counts
    ):
        return facts, _most_frequent(name, Counter({str(value): count for value, count in counts.items()}))
    drawn = [float(value) for value in finite if abs(value) <= LARGEST]
    if len(drawn) < len(finite):
        facts.append(("too large for the chart", f"{len(finite) - len(drawn):,}"))
    return facts, _distribution(f"Values of {name}", "value", np.array(drawn))


def _describe_lengths(
    name: str, values: Sequence[Any], unit: str, show: Callable[[int], str] = "{:,}".format
) -> tuple[_Facts, Any]:
    sizes = [len(value) for value in values]
    facts = [
        (f"min {unit}", show(min(sizes))),
        (f"median {unit}", show(int(np.median(sizes)))),
        (f"max {unit}", show(max(sizes))),
    ]
    return facts, _distribution(f"{unit.capitalize()} of {name}", unit, np.array(sizes, np.float64))


def _describe_texts(name: str, values: Sequence[str]) -> tuple[_Facts, Any]:
    facts, chart = _describe_lengths(name, values, "characters")
    counts = Counter(values)
    facts.append(("different", f"{len(counts):,}"))
    return facts, _most_frequent(name, counts) if len(counts) <= _FEW_VALUES * len(values) else chart


def _describe_bytes(name: str, values: Sequence[bytes]) -> tuple[_Facts, Any]:
    facts, chart = _describe_lengths(name, values, "bytes", format_bytes)
    types = dict.fromkeys(image_type(value) or audio_type(value) for value in values)
    files = ", ".join(content_type for content_type in types if content_type)
    return ([("files", files)] if files else []) + facts, chart


def _describe_images(name: str, values: Sequence[Any]) -> tuple[_Facts, Any]:
    if all(isinstance(value, bytes) for value in values):
        return _describe_bytes(name, values)
    images = [value for value in values if not isinstance(value, bytes)]
    sizes = sorted(((image.width, image.height) for image in images), key=math.prod)
    pixels = " to ".join(dict.fromkeys(f"{width}×{height}" for width, height in (sizes[0], sizes[-1])))
    return [("modes", ", ".join(sorted({image.mode for image in images}))), ("pixels", pixels)], None


def _describe_arrays(name: str, values: Sequence[Any]) -> tuple[_Facts, Any]:
    dtypes, shapes = sorted({str(value.dtype) for value in values}), Counter(value.shape for value in values)
    first = ["×".join(map(str, shape)) or "scalar" for shape, _ in shapes.most_common(3)]
    more = f" and {len(shapes) - len(first):,} more" if len(shapes) > len(first) else ""
    facts = [("dtype", ", ".join(dtypes)), ("shape", ", ".join(first) + more)]
    spread = spread_of(values)
    if spread is None:
        return facts, None
    size = sum(value.size for value in values)
    if spread.finite < size:
        facts.append(("not finite", f"{size - spread.finite:,} of {size:,}"))
    facts.append(("min, mean, max", str(spread)))
    if max(value.size for value in values) > _MAX_ARRAY_VALUES:
        facts.append(("in the chart", f"up to {_MAX_ARRAY_VALUES:,} values of each sample, evenly"))
    parts = [
        as_floats(value.reshape(-1)[:: math.ceil(value.size / _MAX_ARRAY_VALUES)]) for value in values if value.size
    ]
    flat = np.concatenate(parts)
    return facts, _distribution(f"Values of {name}", "value", flat[np.isfinite(flat)], "values")


def _describe_items(name: str, values: Sequence[Any]) -> tuple[_Facts, Any]:
    facts, chart = _describe_lengths(name, values, "items")
    keys = Counter(printable_name(str(key)[:40]) for value in values if isinstance(value, Mapping) for key in value)
    return ([("fields", ", ".join(key for key, _ in keys.most_common(8)))] if keys else []) + facts, chart


_DESCRIBE: Mapping[str, Callable[[str, Any], tuple[_Facts, Any]]] = {
    "array": _describe_arrays,
    "boolean": lambda name, values: (
        [("true", f"{sum(map(bool, values)) / len(values):.1%}")],
        _most_frequent(name, Counter(map(str, values))),
    ),
    "number": _describe_numbers,
    "text": _describe_texts,
    "bytes": _describe_bytes,
    "audio": _describe_bytes,
    "image": _describe_images,
    "list": _describe_items,
    "mapping": _describe_items,
    "other": lambda _, values: ([("for example", render(values[0])[:120])], None),
}
"""Function of each kind of values that returns facts and a chart."""


def _distribution(title: str, label: str, numbers: Any, unit: str = "samples") -> Any:
    """Draw a histogram; None if the numbers have none."""
    bins = binned(numbers, _MAX_BINS) if len(numbers) else None
    if bins is None:
        return None
    words = f"A histogram of {counted(len(numbers), 'number')} from {numbers.min():.6g} to {numbers.max():.6g}."
    return histogram(title, words, Axis(label=label, low=None), Axis(label=unit), *bins)


def _most_frequent(name: str, counts: Counter[str]) -> Any:
    items = [
        Bar(name=(value[:40] or "(empty)"), value=count, label=f"{count:,}")
        for value, count in counts.most_common(_MAX_BARS)
    ]
    more = f", of {len(counts):,}" if len(counts) > len(items) else ""
    return bars(f"Most frequent values of {name}{more}", "Bars, one for each value.", Axis(label="samples"), items)
