"""``trace --spike``: find the steps at which a logged value jumped, and what their samples have in common."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lightning_streaming.dataset.sample_access import find_sample
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.dataset.step_lines import LoggedBatch, PartKey, StepLines, read_step_lines
from lightning_streaming.errors import ConfigError
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.skips import BatchRange
from lightning_streaming.tools import console
from lightning_streaming.tools.console import counted, printable_name
from lightning_streaming.tools.runs.describe import EpochDescription
from lightning_streaming.tools.runs.trace_run import fields_in_words, fields_of
from lightning_streaming.tools.runs.training_run import TracedRun, run_on, written_run

WINDOW = 100
"""Steps that a value is compared with."""
FEWEST = 10
"""Steps before the first that is compared, and the last of them, whose median is the least that is expected."""
LONGEST = 50
"""Steps up to which a spike continues while values are above the bound of its first step."""
_SPREAD = 1.4826
"""Standard deviation of normal values per median deviation."""
_LEAST_SPREAD = 0.001
"""Least deviation, as a part of the median."""
_EVIDENCE = 10.8
"""Log-likelihood ratio, doubled, from which a fact is shown: by chance one in 1000 has more."""
_SAMPLES_SHOWN = 20
_ROWS_AT_ONCE = 1 << 14
_STEP_LOG = "StepLog"


class LoggedStep(NamedTuple):
    """An optimizer step in a log."""

    step: int
    """The trainer's ``global_step``."""
    batches: Sequence[LoggedBatch]
    """Its batches on all ranks."""
    value: float
    """The mean over its batches and ranks; NaN if one is no finite number."""


class Bound(NamedTuple):
    """What the value of a step is compared with."""

    expected: float
    """The value by the trend of the steps before; infinite if these are too few."""
    spread: float
    """Deviation of these steps from their trend."""

    def above(self, value: float) -> float:
        """Return by how many spreads a value is above the expected one; less than any number if that is not known."""
        if not math.isfinite(self.expected):
            return -math.inf
        rise = value - self.expected
        return rise / self.spread if self.spread else math.inf * rise if rise else 0.0

    def most(self, threshold: float, batches: int = 1) -> float:
        """Return the largest value that is no jump.

        Args:
            threshold: Spreads above the expected value.
            batches: Batches of a step, for the value of one of them: it varies more than their mean.
        """
        return self.expected + math.sqrt(batches) * threshold * self.spread


@dataclass(frozen=True, kw_only=True)
class Spike:
    """Consecutive steps at which a value jumped; of those without finite values up to the end of a log, the first."""

    first: int
    """Place of the first step among the logged ones."""
    peak: int
    """Place of the step with the largest value."""
    last: int
    bound: Bound
    """What the first step is compared with."""


def logged_steps(lines: StepLines, name: str) -> list[LoggedStep]:
    """Return the steps of a log that have a value, in order."""
    ends = {run: sorted(of_run) for run, of_run in lines.ends.items()}
    steps: dict[tuple[int, int], list[LoggedBatch]] = {}
    for line in sorted(lines.batches, key=lambda line: (line.run, line.batch, line.rank)):
        steps.setdefault((line.run, bisect_right(ends.get(line.run, []), line.batch)), []).append(line)
    logged = []
    for batches in steps.values():
        values = [value for line in batches if (value := lines.value(line, name)) is not None]
        if values:
            mean = float(np.mean(values)) if np.isfinite(values).all() else math.nan
            logged.append(LoggedStep(batches[0].step, batches, mean))
    return logged


def find_bounds(values: Sequence[float]) -> list[Bound]:
    """Return what each value is compared with, by the rule that ``trace --help`` describes."""
    finite = np.array([value if math.isfinite(value) else math.nan for value in values])
    padded = np.r_[np.full(WINDOW, math.nan), finite]
    windows = sliding_window_view(padded, WINDOW)[:-1]
    bounds = np.stack([np.full(len(finite), math.inf), np.zeros(len(finite))], axis=1)
    places = np.arange(-WINDOW, 0.0)
    for first in range(0, len(finite), _ROWS_AT_ONCE):
        some = windows[first : first + _ROWS_AT_ONCE]
        numbers = np.isfinite(some).sum(axis=1)
        full = np.flatnonzero(numbers == WINDOW)
        if len(full):
            bounds[first + full] = _bounds_of(some[full], places)
        for row in np.flatnonzero((numbers >= FEWEST) & (numbers < WINDOW)).tolist():
            is_known = np.isfinite(some[row])
            bounds[first + row] = _bounds_of(some[row][None, is_known], places[is_known])[0]
    return [Bound(expected, spread) for expected, spread in bounds.tolist()]


def _bounds_of(windows: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expected value after each window, and the spread within it, of shape (windows, 2).

    Args:
        windows: Values, of shape (windows, values).
        places: Place of each value, counted from the step after the window: negative.
    """
    half = windows.shape[1] // 2
    rise = np.median(windows[:, half:], axis=1) - np.median(windows[:, :half], axis=1)
    slopes = rise / (places[half:].mean() - places[:half].mean())
    level = windows - slopes[:, None] * places
    medians = np.median(level, axis=1)
    spreads = _SPREAD * np.median(np.abs(level - medians[:, None]), axis=1)
    spreads = np.maximum(spreads, _LEAST_SPREAD * np.abs(np.median(windows, axis=1)))
    # A loss that falls ever slower is above its trend.
    return np.stack([np.maximum(medians, np.median(windows[:, -FEWEST:], axis=1)), spreads], axis=1)


def find_spikes(values: Sequence[float], bounds: Sequence[Bound], threshold: float) -> list[Spike]:
    """Return the jumps of a value, by the rule that ``trace --help`` describes.

    Args:
        values: The value of each step.
        bounds: What each is compared with, from :func:`find_bounds`.
        threshold: Least jump, in spreads.
    """
    finite = np.array([value if math.isfinite(value) else math.nan for value in values])
    most = np.array([bound.most(threshold) for bound in bounds])
    jumps, spikes, stop = np.isnan(finite) | (finite > most), list[Spike](), 0
    for first in np.flatnonzero(jumps).tolist():
        if first < stop:
            continue
        stop = first + 1
        # The steps before include more and more of the spike.
        while stop < len(finite) and (jumps[stop] or (stop - first < LONGEST and finite[stop] > most[first])):
            stop += 1
        here = finite[first:stop]
        if stop == len(finite) and np.isnan(here[-1]):  # the weights are lost
            here = here[: int(np.flatnonzero(np.r_[True, np.isfinite(here)])[-1]) + 1]
        peak, last = first + int(here.argmax()), first + len(here) - 1  # NaN is the largest
        spikes.append(Spike(first=first, peak=peak, last=last, bound=bounds[first]))
    return spikes


class Shared(NamedTuple):
    """A fact that samples have in common, more often than those of the steps before."""

    fact: str
    """Kind of the fact: "stream", "shard", "phase" or "length"."""
    value: str
    samples: int
    share: float
    """Share of the samples."""
    share_before: float
    """Share of the samples of the steps before."""

    @property
    def lift(self) -> float | None:
        """How many times as often as before; None if never before."""
        return self.share / self.share_before if self.share_before else None


def shared_facts(
    samples: Sequence[Mapping[str, str]], before: Sequence[Mapping[str, str]], evidence: float = _EVIDENCE
) -> list[Shared]:
    """Return the facts that samples share beyond chance, the strongest evidence first.

    Args:
        samples: Facts of each sample, by kind.
        before: Facts of each sample of the steps before.
        evidence: Least log-likelihood ratio, doubled, of the share here and that before.
    """
    here, there = (Counter(fact for facts in some for fact in facts.items()) for some in (samples, before))
    shared = []
    for (kind, value), count in here.items():
        share, expected = count / len(samples), there[kind, value] / max(1, len(before))
        smoothed = (there[kind, value] + 1) / (len(before) + 2)
        ratio = 2 * count * math.log(share / smoothed)
        if ratio > evidence and share > expected:
            shared.append((ratio, Shared(kind, value, count, share, expected)))
    return [fact for _, fact in sorted(shared, key=lambda pair: -pair[0])]


def skip_ranges(
    batches: Sequence[tuple[int, int]], skipped: Sequence[BatchRange], configured: Sequence[BatchRange]
) -> list[BatchRange]:
    """Return the ranges for ``skip`` that leave out batches, and those configured, merged where they touch.

    Args:
        batches: First and last batch of each range, as the trainer counts those that it has trained.
        skipped: Ranges that the run skipped; their batches keep their numbers.
        configured: Ranges to keep.
    """
    ranges = list(configured)
    for first, last in batches:
        numbers = []
        for number in (first, last):
            for passed in sorted(skipped):
                number += len(passed) if passed.first <= number else 0
            numbers.append(number)
        ranges.append(BatchRange(*numbers))
    merged: list[BatchRange] = []
    for batch_range in sorted(ranges):
        if merged and batch_range.first <= merged[-1].last + 1:
            merged[-1] = BatchRange(merged[-1].first, max(merged[-1].last, batch_range.last))
        else:
            merged.append(batch_range)
    return merged


def log_directory(trainer: Mapping[str, Any]) -> str:
    """Return the directory of the ``StepLog`` among the callbacks of a configuration.

    Raises:
        ConfigError: There is none, or it has no directory.
    """
    callbacks = trainer.get("callbacks") or ()
    for callback in [callbacks] if isinstance(callbacks, Mapping) else callbacks:
        if isinstance(callback, Mapping) and str(callback.get("class_path")).rpartition(".")[2] == _STEP_LOG:
            directory = (callback.get("init_args") or {}).get("dirpath")
            if directory is not None:
                return str(directory)
    raise ConfigError(
        "the configuration has no StepLog among trainer.callbacks with a dirpath",
        hint="name the directory of the log, as --spike LOG",
        option="--spike",
    )


def trace_spikes(args: Namespace) -> int:
    """Print where a logged value jumped, the samples read there, and how to leave them out."""
    written = written_run(args)
    directory = args.spike or log_directory(written.trainer)
    traced = run_on(written.datamodule, written.trainer, args)
    try:
        _print_spikes(traced, directory, args)
    finally:
        traced.loader.close()
    return console.FINE


def _print_spikes(traced: TracedRun, directory: str, args: Namespace) -> None:
    lines = read_step_lines(directory, args.loader or "train")
    names = list(dict.fromkeys(name for values in lines.values.values() for name in values))
    name = args.value or (names[0] if names else "loss")
    if name not in names:
        raise ConfigError(
            f"{directory} has no values of {name!r}",
            hint=f"it has {', '.join(names) or 'none'}; StepLog(values=...) names what is logged",
            option="--value",
            path=directory,
        )
    steps = logged_steps(lines, name)
    values = [step.value for step in steps]
    bounds = find_bounds(values)
    spikes = find_spikes(values, bounds, args.threshold)
    facts = _Facts(traced)
    reports = [_report(spike, steps, lines, name, facts, args) for spike in spikes]
    begins = traced.steps.first_step if args.checkpoint is not None else 0
    spiking = [[step for step in steps[spike.first : spike.last + 1] if step.step >= begins] for spike in spikes]
    to_skip = [(some[0].batches[0].batch, some[-1].batches[-1].batch) for some in spiking if some]
    passed = _skipped_by_the_log(traced, lines) if to_skip else []
    skip = list(map(str, skip_ranges(to_skip, passed, traced.order.skip))) if to_skip else []
    early = sum(report["steps"][0] < begins for report in reports)
    if early:
        words = f"{counted(early, 'spike')} began before step {begins}, where {args.checkpoint} was saved"
        console.print_note("trace", f"{words}: its weights have seen these steps, so they are not in skip")
    if args.yaml:
        settings = {"data": {"init_args": {"train": {"skip": skip}}}} if skip else {}
        for line in yaml.safe_dump(settings).splitlines():
            console.print_line(line)
    elif args.json:
        highest = _highest(steps, bounds)
        report = {"log": directory, "value": name, "steps": len(steps), "threshold": args.threshold}
        console.print_json({**report, "highest": highest, "spikes": reports, "skip": skip})
    else:
        console.print_line(f"{directory}: {name} of {counted(len(steps), 'step')}, {counted(len(reports), 'spike')}")
        if not reports:
            _print_highest(_highest(steps, bounds), name, args.threshold)
        console.print_line("")
        for report in reports:
            _print_spike(report, name)
        if skip:
            first = min(some[0].step for some in spiking if some)
            console.print_line(
                f"to leave them out, resume from a checkpoint saved before step {first} was trained, with train.skip ="
            )
            console.print_line(f"  {json.dumps(skip)}\n")


def _highest(steps: Sequence[LoggedStep], bounds: Sequence[Bound]) -> dict[str, Any] | None:
    """Return the step whose value is the most spreads above the expected one; None if none is compared."""
    above = [bound.above(step.value) for step, bound in zip(steps, bounds, strict=True)]
    known = [place for place, spreads in enumerate(above) if math.isfinite(spreads)]
    if not known:
        return None
    place = max(known, key=above.__getitem__)
    return {
        "step": steps[place].step,
        "value": steps[place].value,
        "expected": bounds[place].expected,
        "spreads": above[place],
    }


def _print_highest(highest: Mapping[str, Any] | None, name: str, threshold: float) -> None:
    """Print how near the value came to a spike."""
    if highest is None:
        console.print_line(f"no step has {FEWEST} finite values before it, with which it could be compared")
        return
    value, expected = _in_words(highest["value"]), _in_words(highest["expected"])
    words = f"the highest is step {highest['step']}: {name} {value}, expected {expected}, is {highest['spreads']:.3g} "
    console.print_line(f"{words}spreads above; a spike is more than {threshold:g}, see --threshold")


def _skipped_by_the_log(traced: TracedRun, lines: StepLines) -> list[BatchRange]:
    """Return the configured ranges that the logged run skipped; others were configured since."""
    skipped = list[BatchRange]()
    for batches, ((epoch, position), stop) in sorted(traced.order.skipped_ranges.items()):
        # Without the range, a batch of this number has its first sample.
        number = batches.first - sum(map(len, skipped))
        keys = [key for line in lines.batches if line.batch == number for key in line.sample_keys()]
        logged = {(key.epoch, key.position, key.first_token if isinstance(key, PartKey) else 0) for key in keys}
        if (epoch, position) < stop:
            rows = traced.described.epoch(Cursor(epoch, 0)).rows(np.array([position]))
            if (epoch, int(rows.positions[0]), int(rows.starts[0])) not in logged:
                skipped.append(batches)
    return skipped


class _Facts:
    """Facts of samples by key, which spikes have in common."""

    def __init__(self, traced: TracedRun) -> None:
        self.traced = traced
        self._epochs: dict[int, EpochDescription] = {}

    def phase(self, key: SampleKey) -> str | None:
        """Return the phase that read a sample."""
        described = self.traced.described
        if key.epoch not in self._epochs:
            self._epochs[key.epoch] = described.epoch(self.traced.order.normalise(Cursor(key.epoch, 0)))
        return self._epochs[key.epoch].phase_of_row(key.position)

    def of(self, key: SampleKey) -> dict[str, str]:
        """Return the facts of a sample, by kind."""
        facts = {"stream": key.stream, "shard": f"{key.stream}:{key.shard}"}
        phase, lengths = self.phase(key), self.traced.catalog.lengths
        if phase is not None:
            facts["phase"] = phase
        if lengths is not None:
            tokens = int(lengths(np.array([find_sample(self.traced.catalog, key)]))[0])
            power = max(0, tokens.bit_length() - 1)
            facts["length"] = f"{1 << power:,} to {(2 << power) - 1:,} tokens"
        return facts


def _report(
    spike: Spike, steps: Sequence[LoggedStep], lines: StepLines, name: str, facts: _Facts, args: Namespace
) -> dict[str, Any]:
    """Return what is known of a spike as plain values."""
    first = spike.first
    batches = [batch for step in steps[first : spike.last + 1] for batch in step.batches]
    rising = steps[spike.peak].batches[-1].batch  # what follows may be the effect
    values = {batch: lines.value(batch, name) for batch in batches}

    def is_high(batch: LoggedBatch, step: LoggedStep) -> bool:
        value = values[batch]
        return value is not None and not value <= spike.bound.most(args.threshold, len(step.batches))  # NaN is high

    of_steps = [(batch, step) for step in steps[first : spike.last + 1] for batch in step.batches]
    high = [batch for batch, step in of_steps if is_high(batch, step) and batch.batch <= rising] or batches
    neighbours = (step for step in steps[max(0, first - WINDOW) : first])
    keys_before = {key for step in neighbours for batch in step.batches for key in batch.sample_keys()}
    shared = shared_facts([facts.of(key) for key in dict.fromkeys(_keys(high))], [facts.of(key) for key in keys_before])
    rows, keys = [], list[SampleKey]()
    for batch in sorted(batches, key=lambda batch: (batch not in high, -_for_order(values[batch]), batch.batch)):
        for key in batch.sample_keys() if args.rank in (None, batch.rank) else ():
            of_batch = {"step": batch.step, "batch": batch.batch, "rank": batch.rank, "value": _plain(values[batch])}
            rows.append({**of_batch, "phase": facts.phase(key), "key": key.as_dict(), "fields": None})
            keys.append(key)
    some = rows if args.json else rows[:_SAMPLES_SHOWN]
    ids = [find_sample(facts.traced.catalog, key) for key in keys[: len(some)]]
    shown = fields_of(facts.traced, ids, fetch=args.fields)
    for row, sample in zip(some, ids, strict=True):
        row["fields"] = shown.get(sample)
    return {
        "steps": [steps[first].step, steps[spike.last].step],
        "batches": [batches[0].batch, batches[-1].batch],
        "value": _plain(steps[spike.peak].value),
        "expected": _plain(spike.bound.expected),
        "spreads": _plain(spike.bound.above(steps[spike.peak].value)),
        "bound": _plain(spike.bound.most(args.threshold)),
        "shared": [{**fact._asdict(), "lift": fact.lift} for fact in shared],
        "samples": rows,
    }


def _keys(batches: Sequence[LoggedBatch]) -> Iterator[SampleKey]:
    for batch in batches:
        yield from batch.sample_keys()


def _plain(value: float | None) -> float | None:
    """Return a value for JSON, which has no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else value


def _in_words(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4g}"


def _for_order(value: float | None) -> float:
    return -math.inf if value is None else math.inf if math.isnan(value) else value


def _print_spike(report: Mapping[str, Any], name: str) -> None:
    first, last = report["steps"]
    words = f"step {first}" if first == last else f"steps {first} to {last}"
    title = f"{words}: {name} {_in_words(report['value'])}, expected {_in_words(report['expected'])}"
    records = [
        {
            "shared": f"{shared['fact']} {printable_name(shared['value'])}",
            "samples": f"{shared['samples']:,}",
            "here": f"{shared['share']:.1%}",
            "before": f"{shared['share_before']:.1%}",
            "lift": "new" if shared["lift"] is None else f"{shared['lift']:.3g}",
        }
        for shared in report["shared"]
    ]
    if records:
        console.print_records(title, records, left=("shared",))
    else:
        console.print_line(f"{title}\n\n  its samples have nothing in common that those before have not\n")
    rows = report["samples"]
    records = [
        {
            **{head: str(row[head]) for head in ("step", "batch", "rank")},
            "value": _in_words(row["value"]),
            "sample": f"{printable_name(row['key']['stream'])}:{row['key']['shard']}:{row['key']['sample_index']}",
            "phase": "" if row["phase"] is None else printable_name(row["phase"]),
            "fields": fields_in_words(row["fields"]) if any(other["fields"] for other in rows) else "",
        }
        for row in rows[:_SAMPLES_SHOWN]
    ]
    if records:
        of = f"; {len(records)} of {len(rows):,} are shown, --json prints all" if len(rows) > len(records) else ""
        console.print_records(f"samples of {words}{of}", records, left=("sample", "phase", "fields"))
