"""What was measured, as pictures: rates, times and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.reading.report import title
from benchmarks.reading.rounds import Result
from benchmarks.reading.systems import SYSTEMS

COLOURS = dict(zip(SYSTEMS, plt.colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
ROW_HEIGHT = 0.5
BAR_HEIGHT = 0.8


def draw(results: Sequence[Result], directory: Path) -> list[Path]:
    """Draw a picture for each kind of value that was measured; gives the files."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = [
        (_bars([one for one in results if one.value == "rate"], "samples/s"), "rates"),
        (_bars([one for one in results if one.value == "seconds"], "seconds"), "times"),
        (_memory([one for one in results if one.value == "rss"]), "memory"),
    ]
    paths = []
    for figure, name in drawn:
        if figure is not None:
            paths.append(directory / f"reading_{name}.png")
            figure.savefig(paths[-1], dpi=110)
            plt.close(figure)
    return paths


def _bars(results: Sequence[Result], unit: str) -> Any:
    """A group of bars for each result, a bar for each system, on a logarithmic axis."""
    if not results:
        return None
    figure, axis = plt.subplots(figsize=(11, 1.5 + ROW_HEIGHT * len(results)), layout="constrained")
    seen: set[str] = set()
    for place, one in enumerate(results):
        height = BAR_HEIGHT / len(one.turns)
        for number, system in enumerate(one.turns):
            label = None if system in seen else _name(system)
            seen.add(system)
            axis.barh(place + (number + 0.5) * height, one.median(system), height, color=COLOURS[system], label=label)
    axis.set_yticks([place + BAR_HEIGHT / 2 for place in range(len(results))], [_label(one) for one in results])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel(f"{unit}, medians")
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(seen))
    return figure


def _label(one: Result) -> str:
    return _without_marks(f"{title(one)}\n{one.case.num_workers} workers, batch {one.case.batch_size}")


def _name(system: str) -> str:
    return _without_marks(SYSTEMS[system].title)


def _without_marks(markdown: str) -> str:
    return markdown.replace("`", "")


def _memory(results: Sequence[Result]) -> Any:
    """A line for each system, from epoch to epoch."""
    if not results:
        return None
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for system, turns in results[-1].turns.items():
        epochs = range(1, len(turns) + 1)
        axis.plot(epochs, [turn["rss"] for turn in turns], "o-", color=COLOURS[system], label=_name(system))
    axis.set_xlabel("epoch")
    axis.set_ylabel("resident memory of a worker, MiB")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure
