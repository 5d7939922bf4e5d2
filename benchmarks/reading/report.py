"""What was measured, as JSON and as the Markdown tables of docs/internals/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reading.rounds import Result
from benchmarks.reading.systems import SYSTEMS

AT_BEGINNING = "from_beginning"
"""What turns of a resume have beside: the same measured of a start."""


@dataclass(frozen=True)
class Run:
    """What a command measured, and where."""

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Mapping[str, str]]
    """Of each system's packages."""
    results: Sequence[Result]


def as_json(run: Run) -> dict[str, Any]:
    """All turns, and what they say."""
    return {
        "command": run.command,
        "machine": dict(run.machine),
        "versions": {SYSTEMS[system].title: dict(versions) for system, versions in run.versions.items()},
        "results": [_result(one) for one in run.results],
    }


def save(run: Run, path: Path) -> None:
    """Write the JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(run), indent=1) + "\n")


def _result(one: Result) -> dict[str, Any]:
    return {
        "name": one.measurement.name,
        "what": title(one),
        "work": one.case.work,
        "samples": one.case.samples,
        "size": one.case.size,
        "batch_size": one.case.batch_size,
        "num_workers": one.case.num_workers,
        "persistent_workers": one.case.persistent,
        "wanted": one.measurement.wanted,
        "value": one.value,
        "medians": {SYSTEMS[system].title: one.median(system) for system in one.turns},
        "ours_is_better_by": {SYSTEMS[system].title: one.times(system) for system in one.turns if system != "ours"},
        "turns": {SYSTEMS[system].title: turns for system, turns in one.turns.items()},
        "failed": {SYSTEMS[system].title: reason for system, reason in one.failed.items()},
    }


def title(one: Result) -> str:
    """What a result is of."""
    kind = one.case.kind.what(one.case.size)
    return f"{one.measurement.what}: {kind}" if one.measurement.what else kind


def tables(results: Sequence[Result]) -> str:
    """A Markdown table for rates, one for times and one for memory, where there are any."""
    parts = [
        _compared([one for one in results if one.value == "rate"], "samples/s", _rate),
        _compared([one for one in results if one.value == "seconds"], "ms", _milliseconds),
        _memory([one for one in results if one.value == "rss"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _compared(results: Sequence[Result], unit: str, shown: Any) -> str:
    if not results:
        return ""
    seen = {system for one in results for system in (*one.turns, *one.failed)}
    others = [system for system in SYSTEMS if system in seen - {"ours"}]
    resumes = any(AT_BEGINNING in turn for one in results for turn in one.turns["ours"])
    head = ["", "workers", "batch", f"ours, {unit}", *map(_heading, others)]
    head += (["at 0 %"] if resumes else []) + ["wanted"]
    lines = [head, ["---", *["--:"] * (len(head) - 2), "---"]]
    for one in results:
        cells = [title(one), str(one.case.num_workers), str(one.case.batch_size), shown(one.median("ours"))]
        cells += [_times(one, other) for other in others] + ([_beside_start(one)] if resumes else [])
        lines.append([*cells, one.measurement.wanted])
    return _table(lines)


def _heading(other: str) -> str:
    """Beside ours, a system shows how many times better ours is; a limit, how much of it ours reaches."""
    return f"of {SYSTEMS[other].title}" if SYSTEMS[other].is_limit else SYSTEMS[other].title


def _times(one: Result, other: str) -> str:
    if other not in one.turns:
        return "failed" if other in one.failed else "–"
    times = one.times(other)
    return f"{100 * times:.0f} %" if SYSTEMS[other].is_limit else f"{times:.2f} ×"


def _beside_start(one: Result) -> str:
    turns = one.turns["ours"]
    if AT_BEGINNING not in turns[0]:
        return "–"
    return f"{np.median([turn[AT_BEGINNING] / turn['seconds'] for turn in turns]):.2f} ×"


def growth(mebibytes: Sequence[float]) -> float:
    """By what share of the first value a straight line through all grows from the first to the last.

    For [100, 101, 102] it is 0.02.
    """
    if len(mebibytes) < 2:
        return 0.0
    slope = float(np.polyfit(range(len(mebibytes)), mebibytes, 1)[0])
    return slope * (len(mebibytes) - 1) / mebibytes[0]


def _memory(results: Iterable[Result]) -> str:
    return "\n\n".join(_table([*_memory_lines(one)]) for one in results)


def _memory_lines(one: Result) -> Iterator[list[str]]:
    epochs = len(one.turns["ours"])
    grows = f"growth, epochs 2 to {epochs}"
    yield [f"memory of each of {one.case.num_workers} workers, MiB", "resident", "its share", "its own", grows]
    yield ["---", "--:", "--:", "--:", "--:"]
    for system, turns in one.turns.items():
        values = [f"{one.median(system, kind):,.0f}" for kind in ("rss", "pss", "uss")]
        grown = growth([turn["rss"] for turn in turns[1:]])
        yield [SYSTEMS[system].title, *values, f"{100 * grown:+.1f} %"]
    yield from ([SYSTEMS[system].title, "failed", "", "", ""] for system in one.failed)


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines)
