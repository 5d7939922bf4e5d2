"""Mixtures that change in the course of an epoch: what each step of each phase takes of each stream.

A phase is a stretch of the epoch with one mixture, or with a ramp from one to another. It is read in steps: a ramp has
at least so many as were asked for, each of one mixture; and no step is longer than ``LONGEST_STEP``, so that an order
that has to be drawn is drawn a step at a time.

A stream has a cursor of its own, which runs on from step to step: how many of its samples were drawn before. So a
sample comes again only when its whole stream has been read. What a step takes follows from the steps before it and from
itself alone: what comes later may be changed when a run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.sequence import digest_of
from lightning_streaming.order.stretches import MOST_STEPS
from lightning_streaming.order.weights import ResolvedWeights

LONGEST_STEP = 1 << 24
"""Samples: several times what a shuffle mixes, and 64 MB of ids."""
_GRID = 1 << 20
"""Parts of a sample in which shares are counted, so that rounding errors of floats stay without effect."""

_MOST_COUNTED = 1 << 42
"""Samples of a step whose shares can be counted so."""

_LONGEST_MIX = 200
"""Characters."""

Mix = tuple[tuple[str, float], ...]
"""Names of streams and their weights, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMix:
    """One phase, with its place in the epoch."""

    name: str
    stop: int
    """Where it ends, counted in samples from the epoch's beginning."""
    begin: Mix
    """The weights at its beginning; all above 0, but for those of streams that a ramp ends with."""
    end: Mix
    """Those at its end, of the same streams; the same as ``begin`` where there is no ramp."""
    steps: int = 1
    """Steps of one mixture each, at least."""
    max_repeats: Mix = ()
    """How often streams may have been read by its end, at most."""

    @property
    def told_mix(self) -> str:
        """The weights in one line, without names of streams where these are many: different where the weights are."""
        told = ", ".join(
            f"{name} {begin!r}" + ("" if begin == end else f" to {end!r}")
            for (name, begin), (_, end) in zip(self.begin, self.end, strict=True)
        )
        return told if len(told) <= _LONGEST_MIX else f"of {len(self.begin)} streams, {digest_of(self.begin, self.end)}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """A part of a phase that is drawn as a whole: what it takes of each stream that it reads."""

    number: int
    """Among all steps of the epoch."""
    phase: int
    """Of which phase it is."""
    streams: NDArray[np.int64]
    """The streams, by their place in :attr:`MixturePlan.streams`."""
    starts: NDArray[np.int64]
    """How many samples of each were drawn before, in this epoch."""
    counts: NDArray[np.int64]
    """How many samples it takes of each, none 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixturePlan:
    """What each step of an epoch takes of each stream."""

    phases: tuple[PhaseMix, ...]
    streams: tuple[str, ...]
    """Names of all streams that are read, in order of the alphabet."""
    phase_of_step: NDArray[np.int64]
    stops: NDArray[np.int64]
    """Where each step ends, in samples."""
    drawn: NDArray[np.int64]
    """Of shape (steps + 1, streams): samples drawn of each stream before each step, and before the epoch's end."""

    def __len__(self) -> int:
        """Steps."""
        return len(self.stops)

    @property
    def epoch_size(self) -> int:
        """Samples of the epoch."""
        return int(self.stops[-1])

    def step(self, number: int) -> Step:
        """One step."""
        counts = self.drawn[number + 1] - self.drawn[number]
        streams = np.flatnonzero(counts)
        return Step(
            number=number,
            phase=int(self.phase_of_step[number]),
            streams=streams,
            starts=self.drawn[number, streams],
            counts=counts[streams],
        )

    @cached_property
    def phase_stops(self) -> NDArray[np.int64]:
        """Where each phase ends, in samples."""
        return self.stops[self.last_steps]

    @property
    def last_steps(self) -> NDArray[np.int64]:
        """The last step of each phase."""
        return np.searchsorted(self.phase_of_step, np.arange(len(self.phases)), side="right") - 1

    def drawn_by(self, phase: int) -> dict[str, int]:
        """Samples of each stream that are drawn by the end of a phase, of those that are."""
        drawn = self.drawn[self.last_steps[phase] + 1].tolist()
        return {name: count for name, count in zip(self.streams, drawn, strict=True) if count}

    def check_repeats(self, sizes: dict[str, int], from_phase: int = 0) -> None:
        """Refuse phases that would read a stream more often than they may.

        Args:
            sizes: Samples of each stream.
            from_phase: The first phase to look at.

        Raises:
            ConfigError: One would.
        """
        for number, phase in enumerate(self.phases[from_phase:], from_phase):
            drawn = self.drawn_by(number) if phase.max_repeats else {}
            for name, most in phase.max_repeats:
                repeats = drawn.get(name, 0) / sizes[name]
                if repeats > most:
                    raise ConfigError(
                        f"by the end of phase {phase.name!r}, stream {name!r} would have been read {repeats:.4g} times "
                        f"({drawn[name]} of its {sizes[name]} samples), and max_repeats allows {most:g}; lower its "
                        "weight, end the phase earlier, add data, or allow more"
                    )

    def weights(self, names: Sequence[str], sizes: Sequence[int]) -> ResolvedWeights:
        """What the epoch takes of each stream, over all phases.

        Args:
            names: The streams, in stream order.
            sizes: Samples of each.
        """
        drawn = dict(zip(self.streams, self.drawn[-1].tolist(), strict=True))
        choose = np.asarray([drawn.get(name, 0) for name in names])
        return ResolvedWeights(
            proportion=tuple((choose / self.epoch_size).tolist()),
            repeat=tuple((choose / np.asarray(sizes)).tolist()),
            choose=tuple(choose.tolist()),
            epoch_size=self.epoch_size,
        )


def planned(phases: Sequence[PhaseMix], num_canonical_nodes: int, longest_step: int = LONGEST_STEP) -> MixturePlan:
    """Work out what each step of some phases takes of each stream.

    Borders between phases are rounded up to a multiple of the canonical nodes, and those between steps to the nearest
    one, so that each canonical node has as many samples of a step as the others. Counts are those of the largest
    remainder: what is owed to a stream, by a step and by those before it, rounded down, and one sample more where most
    is left over. So a stream has at any border what its weights ask for, to within about a sample; only where each
    phase reads the streams that were given least before, n of them can come to be owed 1/2 + 1/3 + ... + 1/n of one, as
    under any rule that does not know what follows.

    Args:
        phases: One after another; their ``stop`` rises.
        num_canonical_nodes: Of the epoch's order.
        longest_step: Samples.

    Raises:
        ConfigError: A phase is shorter than a step can be, or there are too many steps.
    """
    streams = tuple(sorted({name for phase in phases for name, _ in phase.begin}))
    place_of = {name: place for place, name in enumerate(streams)}
    stops: list[int] = []
    of_phase: list[int] = []
    drawn = [np.zeros(len(streams), np.int64)]
    owed = np.zeros(len(streams), np.int64)
    for number, phase in enumerate(phases):
        start = stops[-1] if stops else 0
        stop = -(-phase.stop // num_canonical_nodes) * num_canonical_nodes
        borders = _step_borders(phase, start, stop, num_canonical_nodes, min(longest_step, _MOST_COUNTED))
        begin, end = (_shares(mix, place_of) for mix in (phase.begin, phase.end))
        count = len(borders) - 1
        if len(stops) + count > MOST_STEPS:
            raise ConfigError(
                f"phases.{phase.name}.steps: {count} are needed besides the {len(stops)} of the phases before it, and "
                f"an epoch can have {MOST_STEPS}; ask for fewer"
            )
        for place in range(count):
            # The middle of the step stands for all of it.
            part = (2 * place + 1) / (2 * count)
            size = borders[place + 1] - borders[place]
            counts = _counts(begin * (1 - part) + end * part, size, owed)
            drawn.append(drawn[-1] + counts)
        stops += borders[1:]
        of_phase += [number] * count
    return MixturePlan(
        phases=tuple(phases),
        streams=streams,
        phase_of_step=np.asarray(of_phase, np.int64),
        stops=np.asarray(stops, np.int64),
        drawn=np.stack(drawn),
    )


def _shares(mix: Mix, place_of: dict[str, int]) -> NDArray[np.float64]:
    shares = np.zeros(len(place_of))
    for name, weight in mix:
        shares[place_of[name]] = weight
    # One after another, as every machine adds them up.
    of_all: NDArray[np.float64] = shares / sum(shares.tolist())
    return of_all


def _step_borders(phase: PhaseMix, start: int, stop: int, nodes: int, longest_step: int) -> list[int]:
    """Where the steps of a phase begin, and where the last one ends."""
    if stop == start:
        raise ConfigError(
            f"phases.{phase.name}.until is {phase.stop}, and the phase before it ends at {start}: a phase needs a "
            f"sample for each of the {nodes} canonical nodes; end it later, or set num_canonical_nodes lower"
        )
    most = (stop - start) // nodes
    count = min(max(phase.steps, -(-(stop - start) // longest_step)), most)
    if count > MOST_STEPS:
        raise ConfigError(
            f"phases.{phase.name}.steps: {count} are needed, and an epoch can have {MOST_STEPS}; ask for fewer, or end "
            "the phase earlier"
        )
    inner = [start + _to_multiple((stop - start) * place // count, nodes) for place in range(1, count)]
    return [start, *inner, stop]


def _to_multiple(number: int, of: int) -> int:
    return (2 * number + of) // (2 * of) * of


def _counts(shares: NDArray[np.float64], size: int, owed: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many samples a step takes of each stream.

    Args:
        shares: Of each stream; those of 0 get none.
        size: Samples of the step.
        owed: What was given too little to each stream before, in parts of a sample; changed in place.
    """
    mixed = np.flatnonzero(shares)
    owed[mixed] += np.rint(size * shares[mixed] * _GRID).astype(np.int64)
    counts = np.maximum(owed[mixed] // _GRID, 0)
    rest = owed[mixed] - counts * _GRID
    by_rest = np.argsort(-rest, kind="stable")
    missing = size - int(counts.sum())
    if missing >= 0:
        more, once_more = divmod(missing, len(mixed))
        counts += more
        counts[by_rest[:once_more]] += 1
    while missing < 0:  # others were given too much before, and get nothing now
        least = by_rest[counts[by_rest] > 0][missing:]
        counts[least] -= 1
        missing += len(least)
    owed[mixed] -= counts * _GRID
    found = np.zeros_like(owed)
    found[mixed] = counts
    return found
