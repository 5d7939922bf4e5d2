"""Draw phases.png: what a mixture that changes reads of each stream, step by step. Run: python docs/img/phases.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from lightning_streaming import MixturePhase
from lightning_streaming.options.schedule import resolved_phases
from lightning_streaming.sequence.phases import planned

MILLION = 1_000_000
EPOCH_SIZE = 1000 * MILLION
SIZES = {"web": 1500 * MILLION, "code": 120 * MILLION, "math": 25 * MILLION}
"""Samples of each stream."""
COLOURS = {"web": "tab:blue", "code": "tab:orange", "math": "tab:green"}
PHASES = {
    "broad": MixturePhase(end="800m", mix={"web": 0.9, "code": 0.1}),
    "ramp": MixturePhase(end="950m", mix={"web": [0.9, 0.5], "code": [0.1, 0.3], "math": [0, 0.2]}),
    "anneal": MixturePhase(mix={"math": 0.6, "code": 0.4}, max_repeats={"math": 4}),
}


def main() -> None:
    """Write the picture beside this file."""
    plan = planned(resolved_phases(PHASES, EPOCH_SIZE), num_canonical_nodes=1)
    places = [plan.streams.index(name) for name in SIZES]
    drawn = plan.drawn[:, places]
    borders = np.concatenate([[0], plan.stops])
    shares = np.diff(drawn, axis=0) / np.diff(borders)[:, None]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10, 5.6), height_ratios=(3, 2), sharex=True, layout="constrained"
    )
    top.stackplot(
        np.repeat(borders, 2)[1:-1] / MILLION,
        np.repeat(shares.T, 2, axis=1),
        labels=list(SIZES),
        colors=list(COLOURS.values()),
        alpha=0.75,
        linewidth=0,
    )
    top.set(ylabel="share of what is read", ylim=(0, 1), xlim=(0, EPOCH_SIZE / MILLION))
    for number, name in enumerate(SIZES):
        bottom.plot(borders / MILLION, drawn[:, number] / SIZES[name], color=COLOURS[name])
        bottom.annotate(
            name, (EPOCH_SIZE / MILLION, drawn[-1, number] / SIZES[name]), (4, -3), textcoords="offset points"
        )
    bottom.set(ylabel="passes over the stream", xlabel="million samples read, over all ranks", ylim=(0, None))
    begins = 0
    for phase, stop in zip(plan.phases, plan.phase_stops.tolist(), strict=True):
        top.annotate(phase.name, ((begins + stop) / 2 / MILLION, 1.02), ha="center", annotation_clip=False)
        for axis in (top, bottom):
            axis.axvline(stop / MILLION, color="black", linewidth=0.8, linestyle=":")
        begins = stop
    top.legend(loc="lower left")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
