"""Compare the samples of two runs: one that was killed and resumed, and one that was not; examples/demo.py calls it.

    python examples/compare_runs.py INTERRUPTED UNINTERRUPTED --plot losses.png

Both are directories with a steps.jsonl of examples/loss_log.py. Where the step number in it jumps back, the run was
resumed, and the weights do not include the steps that were repeated. Takes a second; prints the differences as tables,
and exits with 1 if the weights of the two runs include other samples, or in another order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STREAMS = {"code": (range(1_000_000), 0.7), "docs": (range(1_000_000, 2_000_000), 0.3)}
"""Ids of each stream in examples/write_dataset.py, and its share in configs/demo.yaml."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of the log: one optimizer step."""

    step: int
    epoch: int
    ids: list[int]
    loss: float


@dataclass(frozen=True, kw_only=True)
class History:
    """The steps of a run, read from its log."""

    kept: list[Step]
    """Steps that the final weights include, in order."""
    lost: list[Step]
    """Steps that were trained and lost with the process, because no checkpoint followed."""

    @property
    def samples(self) -> list[tuple[int, int]]:
        """Return (epoch, sample id) in the order of training."""
        return [(step.epoch, sample) for step in self.kept for sample in step.ids]


def read_history(directory: Path) -> History:
    """Read a run's log; a repeated step replaces the earlier one and all steps after that."""
    kept: list[Step] = []
    lost: list[Step] = []
    for line in (directory / "steps.jsonl").read_text().splitlines():
        step = Step(**json.loads(line))
        while kept and kept[-1].step >= step.step:
            lost.insert(0, kept.pop())
        kept.append(step)
    return History(kept=kept, lost=lost)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between the samples of an interrupted run and an uninterrupted one."""

    repeated: int
    skipped: int
    same_order: bool
    loss_difference: float

    @property
    def is_exact(self) -> bool:
        """Return whether the weights include the same samples in the same order."""
        return self.repeated == 0 and self.skipped == 0 and self.same_order


def compare(interrupted: History, whole: History) -> Comparison:
    """Compare two runs by (epoch, sample)."""
    counted, expected = Counter(interrupted.samples), Counter(whole.samples)
    pairs = zip(interrupted.kept, whole.kept, strict=False)
    return Comparison(
        repeated=(counted - expected).total(),
        skipped=(expected - counted).total(),
        same_order=interrupted.samples == whole.samples,
        loss_difference=max((abs(mine.loss - theirs.loss) for mine, theirs in pairs), default=float("nan")),
    )


def print_report(interrupted: History, whole: History, result: Comparison) -> None:
    """Print the comparison as tables."""
    runs = (interrupted, whole)
    rows: list[list[object]] = [
        ["steps in the weights", "", *(len(run.kept) for run in runs)],
        ["samples in the weights", "", *(len(run.samples) for run in runs)],
    ]
    for stream, (ids, configured) in STREAMS.items():
        rows.append([f"... share of {stream}", f"{configured:.3f}", *(f"{share(run, ids):.3f}" for run in runs)])
    rows.append(["last loss", "", *(f"{run.kept[-1].loss:.6f}" for run in runs)])
    print_table(["", "configured", "killed and resumed", "uninterrupted"], rows)
    if interrupted.lost:
        print("\nSteps lost with the killed process; the resumed run repeats them:\n")
        again = {step.step: step for step in interrupted.kept}
        rows = [[step.step, first_ids(step), first_ids(again.get(step.step))] for step in interrupted.lost]
        print_table(["step", "ids before the kill", "ids after the resume"], rows)
    print("\nThe resumed run compared with the uninterrupted one:\n")
    rows = [
        ["samples repeated", result.repeated],
        ["samples skipped", result.skipped],
        ["order of samples", "identical" if result.same_order else "DIFFERENT"],
        ["largest difference of a step's loss", f"{result.loss_difference:g}"],
    ]
    print_table(["", ""], rows)


def share(history: History, ids: range) -> float:
    """Return the share of samples from one stream."""
    return sum(sample in ids for _, sample in history.samples) / len(history.samples)


def first_ids(step: Step | None) -> str:
    """Return the first ids of a step's batch."""
    return "none" if step is None else " ".join(str(sample) for sample in step.ids[:4]) + " ..."


def print_table(head: list[str], rows: list[list[object]]) -> None:
    """Print rows in aligned columns."""
    texts = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    if any(head):
        print(f"  {lines[0].rstrip()}\n  {'   '.join('-' * width for width in widths)}")
    for line in lines[1:]:
        print(f"  {line.rstrip()}")


def plot(interrupted: History, whole: History, path: Path) -> None:
    """Draw the losses of both runs: all steps, and those around the kill enlarged."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws without a screen
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(10, 8), height_ratios=(1, 1.4), layout="constrained")
    killed = interrupted.lost[-1].step if interrupted.lost else len(whole.kept) // 2
    around = range(killed - 20, killed + 10)
    draw_losses(axes[0], interrupted, whole)
    axes[0].axvspan(around[0], around[-1], color="0.92", label="enlarged below")
    axes[0].set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss, with and without an interruption")
    draw_losses(axes[1], within(interrupted, around), within(whole, around), with_steps=True)
    meaning = "ring: uninterrupted, dot: killed and resumed, cross: lost with the process"
    axes[1].set(xlabel="step", ylabel="loss (nats per byte)", title=f"{len(around)} steps around the kill ({meaning})")
    axes[0].legend(ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_losses(axes: Any, interrupted: History, whole: History, *, with_steps: bool = False) -> None:
    """Draw the steps of both runs, the lost ones, and the kill."""
    ring, dot, cross = ("o", "o", "x") if with_steps else ("", "", "")
    hollow: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2}
    axes.plot(*curve(whole.kept), marker=ring, color="tab:blue", lw=4, alpha=0.35, label="uninterrupted", **hollow)
    axes.plot(*curve(interrupted.kept), marker=dot, color="tab:orange", lw=1, ms=5, label="killed and resumed")
    if interrupted.lost:
        lost = curve(interrupted.lost)
        axes.plot(*lost, marker=cross, ls=":", color="black", lw=1, label="lost with the killed process")
        axes.axvline(interrupted.lost[-1].step + 0.5, color="tab:red", linestyle="--", label="SIGKILL")
        axes.axvline(interrupted.lost[0].step - 0.5, color="tab:green", linestyle="--", label="resumed from here")


def within(history: History, steps: range) -> History:
    """Return some steps of a run."""
    kept, lost = ([step for step in part if step.step in steps] for part in (history.kept, history.lost))
    return History(kept=kept, lost=lost)


def curve(steps: list[Step]) -> tuple[list[int], list[float]]:
    """Return step numbers and losses."""
    return [step.step for step in steps], [step.loss for step in steps]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interrupted", type=Path, help="directory of the run that was killed and resumed")
    parser.add_argument("uninterrupted", type=Path, help="directory of the run that was not")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the losses of both runs into this file")
    arguments = parser.parse_args()
    interrupted, whole = read_history(arguments.interrupted), read_history(arguments.uninterrupted)
    result = compare(interrupted, whole)
    print_report(interrupted, whole, result)
    if arguments.plot is not None:
        plot(interrupted, whole, arguments.plot)
    sys.exit(0 if result.is_exact else 1)


if __name__ == "__main__":
    main()
