"""Mixtures that change within an epoch: the samples that each mixture step takes of each stream.

A phase is a part of the epoch with one mixture, or with a ramp from one to another. It is read in steps: a ramp has at
least the configured number, each with one mixture; and no step is much longer than the window of a shuffle, so that an
order that has to be drawn is drawn step by step.

Each stream has a cursor that continues from step to step: the number of its samples that were drawn before. So a sample
is repeated only after its whole stream has been read. A step depends on the steps before it and on itself alone: later
phases may be changed when a run resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.stream_slices import MOST_STEPS, StreamPasses
from lightning_streaming.sequence.tokens import TokenPasses
from lightning_streaming.sequence.weights import ResolvedWeights
from lightning_streaming.signatures import public

LONGEST_STEP = 1 << 22
"""Samples, unless a shuffle mixes more: 16 MB of ids, drawn in less than a second."""
_GRID = 1 << 20
"""Parts of a sample in which shares are counted, so that rounding errors of floats stay without effect."""

_MOST_COUNTED = 1 << 42
"""Samples of a step whose shares can be counted so."""
_NO_LIMIT = np.iinfo(np.int64).max
_ROUNDING = 1e-11
"""How much shares may differ from exact ones, so that a stream may be read exactly as often as it may."""

Mix = tuple[tuple[str, float], ...]
"""Names of streams and their weights, by name."""


@public("logs")
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightChange:
    """Weights that a run has set, from a mixture step on, instead of those of its phases."""

    epoch: int
    """The epoch from which on they hold."""
    step: int
    """The first mixture step of the epoch that has these weights."""
    mix: Mix
    """Names of the streams that are read, and their weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPhase:
    """A phase with its position in the epoch."""

    name: str
    planned_stop: int
    """The requested end, in samples from the epoch's beginning; in tokens where weights count these."""
    begin: Mix
    """The weights at its beginning; all above 0, except those of streams that a ramp only ends with."""
    end: Mix
    """The weights at its end, of the same streams; equal to ``begin`` without a ramp."""
    steps: int = 1
    """The least number of mixture steps."""
    max_repeats: Mix = ()
    """The most times that streams may have been read by its end."""
    cut: int | None = None
    """The sample at which it was ended early: it had begun as a phase up to its planned stop."""
    written: str | None = field(default=None, compare=False)
    """The text of a planned stop that is a part of the epoch's size, like "90%"."""


class EpochEnd(NamedTuple):
    """The facts of an epoch's end that the next epoch depends on."""

    drawn: NDArray[np.int64]
    """Samples drawn of each stream in all epochs so far."""
    owed: NDArray[np.int64]
    """The tokens, or parts of samples, that each stream is owed."""


class _Added(NamedTuple):
    """The tokens that the steps of an epoch add to the sums of the streams' weights."""

    total: NDArray[np.int64]
    """Tokens of each stream in the epoch."""
    least: NDArray[np.int64]
    """Least tokens of each stream in a step that mixes it; the highest number for streams that none mixes."""
    last: NDArray[np.float64]
    """Share of each stream in the last step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """A mixture step, which is drawn as a whole: the samples it takes of each stream."""

    number: int
    """Its number among all steps of the epoch."""
    phase: int
    """The number of its phase."""
    streams: NDArray[np.int64]
    """The streams, as indexes into :attr:`MixtureSchedule.streams`."""
    starts: NDArray[np.int64]
    """Samples of each stream that were drawn before, in this epoch."""
    counts: NDArray[np.int64]
    """Samples that are drawn of each stream, none 0, including those that a cut leaves unread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureSchedule:
    """The samples that each mixture step of an epoch takes of each stream."""

    phases: tuple[ResolvedPhase, ...]
    streams: tuple[str, ...]
    """Names of all streams that are read, in alphabetical order."""
    phase_of_step: NDArray[np.int64]
    stops: NDArray[np.int64]
    """The end of each step, in samples."""
    drawn: NDArray[np.int64]
    """Samples read of each stream before each step, and before the epoch's end, of shape (steps + 1, streams)."""
    uncut: Mapping[int, NDArray[np.int64]]
    """For steps that are cut: the samples of each stream without the cut."""
    planned_stops: tuple[int, ...]
    """The planned end of each phase, in whole canonical nodes, or in tokens; phases that are cut end earlier."""
    earlier: NDArray[np.int64] | None = None
    """Samples drawn of each stream in earlier epochs; None if each epoch draws as many as this one."""
    owed: NDArray[np.int64] | None = None
    """The tokens, or parts of samples, that each stream is owed at the end."""
    added: _Added | None = None
    """The tokens that its steps add; None if weights do not count them."""

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.stops)

    @property
    def epoch_size(self) -> int:
        """Number of samples of the epoch."""
        return int(self.stops[-1])

    def step(self, number: int) -> Step:
        """Return a step."""
        read = self.drawn[number + 1] - self.drawn[number]
        counts = self.uncut.get(number, read)
        streams = np.flatnonzero(counts)
        return Step(
            number=number,
            phase=int(self.phase_of_step[number]),
            streams=streams,
            starts=self.drawn[number, streams],
            counts=counts[streams],
        )

    @property
    def end(self) -> EpochEnd:
        """The end of the epoch, if epochs differ."""
        return EpochEnd(_known(self.earlier) + self.drawn[-1], _known(self.owed))

    @cached_property
    def phase_stops(self) -> NDArray[np.int64]:
        """The end of each phase, in samples."""
        return self.stops[self.last_steps]

    @property
    def last_steps(self) -> NDArray[np.int64]:
        """The last step of each phase."""
        return np.searchsorted(self.phase_of_step, np.arange(len(self.phases)), side="right") - 1

    def drawn_before(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples drawn of each stream in the epochs before one, whose schedule this is."""
        return epoch * self.drawn[-1] if self.earlier is None else self.earlier

    def num_begun(self, names: Collection[str]) -> int:
        """Return how many of these phases a saved state is compared with.

        For example with phases "web", "ramp" and "end", a state with "web" and "ramp" is compared with the first two,
        and so is a state with "ramp" alone, which reports that "web" was added. If no saved name exists, all phases
        were renamed, and as many are compared as were saved.

        Args:
            names: Names of the saved phases, which had begun.
        """
        last = max((number for number, phase in enumerate(self.phases, 1) if phase.name in names), default=0)
        return last or min(len(names), len(self.phases))

    def names_of(self, step: Step) -> list[str]:
        """Return the streams that a step reads."""
        return [self.streams[stream] for stream in step.streams.tolist()]

    def drawn_by(self, phase: int) -> dict[str, int]:
        """Return the samples of each stream that are drawn by the end of a phase, without streams that are not."""
        drawn = self.drawn[self.last_steps[phase] + 1].tolist()
        return {name: count for name, count in zip(self.streams, drawn, strict=True) if count}

    def check_streams(self, names: Collection[str], from_phase: int = 0) -> None:
        """Check that phases read existing streams only.

        Args:
            names: The existing streams.
            from_phase: The first phase to check: earlier ones have been read, of streams that may have been removed.

        Raises:
            ConfigError: A stream is missing; the message names it and its phase.
        """
        for phase in self.phases[from_phase:]:
            for name, _ in phase.begin:
                if name not in names:
                    raise ConfigError(
                        f"schedule.{phase.name}.mix reads stream {name!r}, and the streams are "
                        f"{', '.join(map(repr, names))}",
                        hint="add it to streams, or leave it out of the mix",
                        option=f"schedule.{phase.name}.mix",
                        stream=name,
                    )

    def check_repeats(self, passes: PassesOf, repeats: RepeatsOf, from_phase: int = 0) -> None:
        """Check that no phase reads a stream more often than ``max_repeats`` allows.

        Args:
            passes: Returns the passes of a stream.
            repeats: Returns the number of passes that some samples of a stream are.
            from_phase: The first phase to check.

        Raises:
            ConfigError: A phase would.
        """
        for number, phase in enumerate(self.phases[from_phase:], from_phase):
            drawn = self.drawn_by(number) if phase.max_repeats else {}
            for name, most in phase.max_repeats:
                times = repeats(name, drawn.get(name, 0))
                if times > most:
                    raise ConfigError(
                        f"by the end of phase {phase.name!r}, stream {name!r} would have been read {times:.4g} times "
                        f"({drawn[name]} of its {passes(name).size} samples), and max_repeats allows {most:g}",
                        hint="lower its weight, end the phase earlier, add data, or allow more",
                        option=f"schedule.{phase.name}.max_repeats",
                        stream=name,
                    )

    def weights(self, names: Sequence[str], repeats: RepeatsOf) -> ResolvedWeights:
        """Return the weights of the streams over all phases.

        Args:
            names: The streams, in stream order.
            repeats: Returns the number of passes that some samples of a stream are.
        """
        drawn = dict(zip(self.streams, self.drawn[-1].tolist(), strict=True))
        choose = np.asarray([drawn.get(name, 0) for name in names])
        return ResolvedWeights(
            proportion=tuple((choose / self.epoch_size).tolist()),
            repeat=tuple(repeats(name, drawn.get(name, 0)) for name in names),
            choose=tuple(choose.tolist()),
            epoch_size=self.epoch_size,
        )


PassesOf = Callable[[str], StreamPasses]
"""Returns the division of a stream's samples into passes."""
RepeatsOf = Callable[[str, int], float]
"""Returns the number of passes that the first samples of a stream are."""


class StepCutter(Protocol):
    """Ends the last step of a plan early, and keeps the rest."""

    def cut_last_step(self, plan: MixtureSchedule, read: int) -> NDArray[np.int64]:
        """Return the samples read of each stream in the last step of a plan, if it is cut after ``read`` samples."""


def planned(
    phases: Sequence[ResolvedPhase],
    num_canonical_nodes: int,
    longest_step: int = LONGEST_STEP,
    cutter: StepCutter | None = None,
    tokens: Mapping[str, TokenPasses] | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
    redistributes: bool = True,
    changes: Sequence[WeightChange] = (),
    longest_tokens: int | None = None,
    epoch: int = 0,
    before: EpochEnd | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> MixtureSchedule:
    """Return the samples that each step of some phases takes of each stream.

    Borders between phases are rounded up to a multiple of the canonical nodes, and those between steps to the nearest
    one, so that each canonical node has as many samples of a step as the others. Counts follow from largest remainders:
    the samples owed to a stream, by a step and by those before it, rounded down, and one more where the remainder is
    largest. So at any border a stream has the samples of its weights, to within about one. Only if each phase reads the
    streams with the fewest samples so far, n of them can be owed up to 1/2 + 1/3 + ... + 1/n of a sample, as under any
    rule that does not know the next phases.

    Args:
        phases: Phases, one after another, with ascending ends.
        num_canonical_nodes: Canonical nodes of the epoch's order.
        longest_step: Most samples of a step.
        cutter: Ends steps; needed where a phase is cut within a step.
        tokens: The tokens of each stream, if weights and ends count them.
        limits: The most samples that may be read of some streams, in all epochs.
        redistributes: Other streams take over what is beyond the limits; otherwise it is an error.
        changes: Weights that the run has set, in order.
        longest_tokens: Most tokens of a step, if weights count these.
        epoch: The epoch, from 0, if epochs differ.
        before: The end of the epoch before it, if epochs differ.
        sizes: Samples, or tokens, of streams with limits, for errors.

    With tokens, a step takes so many samples of each stream that the tokens drawn from the beginning are nearest to
    those of its weights. Samples that are needed for whole canonical nodes are taken in the same proportion, and count
    towards the next step.

    Raises:
        ConfigError: A phase is shorter than a step can be, a cut lies outside its phase, there are too many steps, or
            all streams of a step have been read as often as they may be.
    """
    planner = _Planner(
        phases,
        num_canonical_nodes,
        longest_step,
        tokens,
        longest_tokens,
        limits,
        redistributes,
        changes,
        epoch,
        before,
        sizes,
    )
    for number, phase in enumerate(phases):
        planner.add(number, phase, cutter)
    return planner.plan()


class _Planner:
    """Builds a schedule phase by phase."""

    def __init__(
        self,
        phases: Sequence[ResolvedPhase],
        num_canonical_nodes: int,
        longest_step: int,
        tokens: Mapping[str, TokenPasses] | None,
        longest_tokens: int | None,
        limits: Mapping[str, int],
        redistributes: bool,
        changes: Sequence[WeightChange],
        epoch: int,
        before: EpochEnd | None,
        sizes: Mapping[str, int],
    ) -> None:
        self._sizes = sizes
        self._phases, self._nodes, self._longest_step = tuple(phases), num_canonical_nodes, longest_step
        mixes = [*(phase.begin for phase in phases), *(change.mix for change in changes)]
        self._streams = tuple(sorted({name for mix in mixes for name, _ in mix}))
        self._place_of = {name: place for place, name in enumerate(self._streams)}
        self._stops, self._of_phase = [0], list[int]()
        self._drawn = [np.zeros(len(self._streams), np.int64)]
        self._tokens, self._longest_tokens, self._redistributes = tokens, longest_tokens, redistributes
        self._has_changes = bool(changes)
        continues = tokens is not None or bool(limits)
        self._owed = np.zeros(len(self._streams), np.int64)
        if before is not None and continues:
            self._owed = before.owed.copy()
        self._earlier = np.zeros_like(self._owed) if before is None else before.drawn
        self._changes = {
            change.step: _shares(change.mix, self._place_of) for change in changes if change.epoch == epoch
        }
        earlier = [change.mix for change in changes if change.epoch < epoch]
        self._set_by_run = _shares(earlier[-1], self._place_of) if earlier else None
        self._limits = np.asarray([limits.get(name, _NO_LIMIT) for name in self._streams], np.int64)
        self._tokens_drawn = dict[int, int]()
        self._tokens_allowed = {
            stream: tokens[name].before(limits[name])
            for stream, name in enumerate(self._streams)
            if tokens is not None and name in limits
        }
        no_streams = np.zeros_like(self._owed)
        self._added = _Added(no_streams, np.full_like(self._owed, _NO_LIMIT), no_streams.astype(np.float64))
        self._uncut: dict[int, NDArray[np.int64]] = {}
        self._planned_stops: list[int] = []

    def plan(self) -> MixtureSchedule:
        """Return the schedule so far."""
        return MixtureSchedule(
            phases=self._phases,
            streams=self._streams,
            phase_of_step=np.asarray(self._of_phase, np.int64),
            stops=np.asarray(self._stops[1:], np.int64),
            drawn=np.stack(self._drawn),
            uncut=dict(self._uncut),
            planned_stops=tuple(self._planned_stops),
            **({"earlier": self._earlier, "owed": self._owed.copy()} if self._differs_by_epoch else {}),
            added=None if self._tokens is None else self._added,
        )

    @property
    def _differs_by_epoch(self) -> bool:
        """True if an epoch depends on those before it."""
        return self._tokens is not None or self._has_changes or bool((self._limits < _NO_LIMIT).any())

    def add(self, number: int, phase: ResolvedPhase, cutter: StepCutter | None) -> None:
        """Add the steps of a phase, up to its end or cut."""
        begin, end = (_shares(mix, self._place_of) for mix in (phase.begin, phase.end))
        longest = min(self._longest_step, _MOST_COUNTED)
        if self._tokens is None:
            borders = _step_borders(phase, self._stops[-1], self._nodes, longest)
        else:
            first = self._planned_stops[-1] if self._planned_stops else 0
            samples_per_token = self._samples_per_token((begin + end) / 2)
            borders = _token_borders(phase, first, self._nodes, longest, samples_per_token, self._longest_tokens)
        self._planned_stops.append(borders[-1])
        cut = phase.cut
        if cut is not None and not borders[0] < cut <= borders[-1]:
            raise ConfigError(
                f"schedule.{phase.name}.ended_at is {cut}, and the phase reads the samples from {borders[0]} up to "
                f"{borders[-1]}",
                hint="cut it where it was read, or leave the cut out",
                option=f"schedule.{phase.name}.ended_at",
            )
        count = len(borders) - 1
        if len(self._of_phase) + count > MOST_STEPS:
            raise ConfigError(
                f"schedule.{phase.name}.steps: {count} are needed after {len(self._of_phase)} of earlier phases, and "
                f"an epoch can have {MOST_STEPS}",
                hint="set it lower",
                option=f"schedule.{phase.name}.steps",
            )
        for place, (start, stop) in enumerate(pairwise(borders)):
            # The weights at the middle of the step.
            part = (2 * place + 1) / (2 * count)
            before = self._owed.copy()
            shares = begin * (1 - part) + end * part
            self._set_by_run = self._changes.get(len(self._of_phase), self._set_by_run)
            shares = shares if self._set_by_run is None else self._set_by_run
            counts = self._counts_of(number, shares, stop - start)
            self._drawn.append(self._drawn[-1] + counts)
            self._stops.append(self._stops[-1] + int(counts.sum()))
            self._of_phase.append(number)
            if cut is not None and cut <= stop:
                if cut < stop:  # end the step after some of its samples
                    assert cutter is not None, "as a phase is cut within a step"
                    counts = cutter.cut_last_step(self.plan(), cut - start)
                    self._uncut[len(self._of_phase) - 1] = self._drawn[-1] - self._drawn[-2]
                    self._drawn[-1] = self._drawn[-2] + counts
                    self._stops[-1] = cut
                    self._owed = before + _parts(shares, cut - start) - counts * _GRID
                return

    def _counts_of(self, phase: int, shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
        """Return how many samples a step takes of each stream.

        Args:
            phase: Number of its phase.
            shares: Share of each stream; streams with 0 get no sample.
            size: Samples of the step, or its tokens.
        """
        drawn = self._earlier + self._drawn[-1]
        if self._tokens is None:
            if not self._differs_by_epoch:
                return _counts(shares, size, self._owed)
            left = (self._limits - drawn).astype(np.float64)
            return _counts(self._within(phase, shares, size, self._owed / _GRID, left), size, self._owed)
        mixed = np.flatnonzero(shares).tolist()
        tokens = np.zeros(len(shares), np.int64)
        left = np.full(len(shares), np.inf)
        for stream in mixed:
            if stream not in self._tokens_drawn:
                self._tokens_drawn[stream] = self._tokens[self._streams[stream]].before(int(drawn[stream]))
            tokens[stream] = self._tokens_drawn[stream]
            if stream in self._tokens_allowed:
                left[stream] = max(self._tokens_allowed[stream] - int(tokens[stream]), 0)
        shares = self._within(phase, shares, size, self._owed, left)
        added = np.rint(size * shares).astype(np.int64)
        self._owed += added
        total, least, _ = self._added
        self._added = _Added(total + added, np.where(shares > 0, np.minimum(least, added), least), shares)
        counts = np.zeros(len(shares), np.int64)
        for stream in mixed:
            nearest = self._tokens[self._streams[stream]].position(max(int(tokens[stream] + self._owed[stream]), 0))
            counts[stream] = max(min(nearest, int(self._limits[stream])) - int(drawn[stream]), 0)
        missing = -int(counts.sum()) % self._nodes or (0 if counts.any() else self._nodes)
        if missing:
            counts += self._filling(phase, shares, drawn + counts, missing)
        for stream in mixed:
            after = self._tokens[self._streams[stream]].before(int(drawn[stream] + counts[stream]))
            self._owed[stream] -= after - tokens[stream]
            self._tokens_drawn[stream] = after
        return counts

    def _filling(
        self, phase: int, shares: NDArray[np.float64], drawn: NDArray[np.int64], missing: int
    ) -> NDArray[np.int64]:
        """Return samples for whole canonical nodes, in the proportions of a step; first of streams without limit.

        Args:
            phase: Number of its phase.
            shares: Share of each stream in its tokens.
            drawn: Samples of each stream that are drawn by its end, without these.
            missing: Samples that are needed.

        Raises:
            ConfigError: All streams have limits, and fewer samples are left.
        """
        assert self._tokens is not None, "tokens are counted"
        of_samples, counts = _shares_of_samples(shares, self._streams, self._tokens), np.zeros_like(self._owed)
        more = of_samples * (self._limits == _NO_LIMIT)
        if more.any():
            return _counts(more / sum(more.tolist()), missing, counts)
        left = np.where(of_samples > 0, np.maximum(self._limits - drawn, 0), 0)
        if int(left.sum()) < missing:
            full = self._streams[int(np.flatnonzero(of_samples)[0])]
            raise ConfigError(
                f"phase {self._phases[phase].name!r} needs {missing} more samples, to have as many for each of the "
                f"{self._nodes} canonical nodes, and mixing.max_repeats allows {int(left.sum())}",
                hint="end the epoch earlier, set num_canonical_nodes lower, or allow more",
                option="mixing.max_repeats",
                stream=full,
            )
        while missing:  # what is beyond a limit is taken of the others
            more = np.where(counts < left, of_samples, 0)
            taken = np.minimum(_counts(more / sum(more.tolist()), missing, np.zeros_like(self._owed)), left - counts)
            counts += taken
            missing -= int(taken.sum())
        return counts

    def _within(
        self,
        phase: int,
        shares: NDArray[np.float64],
        size: int,
        owed: NDArray[np.float64] | NDArray[np.int64],
        left: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the shares of a step with which no stream gets more than is left of it; others take over the rest.

        Raises:
            ConfigError: Nothing is left of any stream, or a stream would get more and nothing is redistributed.
        """
        within: NDArray[np.float64] = shares.copy()
        rounding = max(_ROUNDING * size, 1 / _GRID)
        are_full = np.zeros(len(shares), np.bool_)
        while True:
            over = ~are_full & (shares > 0) & (owed + within * size > left + rounding)
            if not over.any():
                return within
            are_full |= over
            within[over] = np.maximum(left - owed, 0)[over] / size
            others = np.where(are_full, 0, shares)
            if not others.any() or not self._redistributes:
                raise self._limit_error(phase, int(np.flatnonzero(over)[0]), is_last=not others.any())
            rest = max(1 - sum(within[are_full].tolist()), 0)
            within[:] = np.where(are_full, within, others / sum(others.tolist()) * rest)

    def _limit_error(self, number: int, stream: int, *, is_last: bool) -> ConfigError:
        """Return the error of a stream that a phase would read more often than it may be.

        Args:
            number: Number of the phase.
            stream: The stream.
            is_last: Whether no other stream of the mix can take over.
        """
        phase, name = self._phases[number], self._streams[stream]
        unit = "samples" if self._tokens is None else "tokens"
        first = self._of_phase.index(number) if number in self._of_phase else len(self._of_phase)
        begins = self._earlier + self._drawn[first]

        def of_stream(place: int) -> tuple[int, int]:
            """Return what was drawn of a stream before the phase, and what may be in all."""
            drawn, limit, stream = int(begins[place]), int(self._limits[place]), self._streams[place]
            if self._tokens is None:
                return drawn, limit
            return self._tokens[stream].before(drawn), self._tokens[stream].before(limit)

        size = phase.planned_stop - (self._planned_stops[number - 1] if number else 0)
        if is_last:
            left = {self._streams[place]: of_stream(place) for place in np.flatnonzero(self._shares_of(phase)).tolist()}
            counts = ", ".join(f"{most - drawn:,} of {other!r}" for other, (drawn, most) in left.items())
            message = f"phase {phase.name!r} needs {size:,} {unit}, and mixing.max_repeats leaves {counts}"
        else:
            drawn, most = of_stream(stream)
            requested, once = drawn + round(self._shares_of(phase)[stream] * size), self._sizes[name]
            message = (
                f"phase {phase.name!r} would read stream {name!r} up to {requested:,} {unit}, and mixing.max_repeats "
            )
            message += f"allows {most:,} in the whole run ({most / once:.4g} times its {once:,})"
        return ConfigError(
            message,
            hint="lower its weight, end the epoch earlier, or allow more"
            + ("" if is_last else ", or set mixing.beyond: redistribute"),
            option="mixing.max_repeats",
            stream=name,
        )

    def _shares_of(self, phase: ResolvedPhase) -> NDArray[np.float64]:
        """Return the mean share of each stream in a phase, or the share that the run has set."""
        if self._set_by_run is not None:
            return self._set_by_run
        shares: NDArray[np.float64] = (_shares(phase.begin, self._place_of) + _shares(phase.end, self._place_of)) / 2
        return shares

    def _samples_per_token(self, shares: NDArray[np.float64]) -> float:
        """Return the samples that a token is, on average, under a mixture of tokens."""
        assert self._tokens is not None, "tokens are counted"
        mixed = np.flatnonzero(shares).tolist()
        return float(sum(shares[stream] / self._tokens[self._streams[stream]].mean for stream in mixed))


def end_after(
    plan: MixtureSchedule,
    epochs: int,
    num_canonical_nodes: int,
    tokens: Mapping[str, TokenPasses] | None,
    limits: Mapping[str, int],
) -> tuple[int, EpochEnd]:
    """Return the end of further epochs with the steps and weights of a planned one, without planning them.

    Weights in tokens have exact sums, so the samples up to a border follow from these, and not from the samples drawn
    before, unless a step had more samples for whole canonical nodes than the next one takes. Every step is long enough
    to exclude that, or none is skipped.

    Args:
        plan: The planned epoch.
        epochs: Number of further epochs.
        num_canonical_nodes: As for :func:`planned`.
        tokens: As for :func:`planned`.
        limits: As for :func:`planned`.

    Returns:
        How many of the epochs are skipped, and the end of the last of these.
    """
    end, added, nodes = plan.end, plan.added, num_canonical_nodes
    if added is None or tokens is None:
        return (0, end) if limits else (epochs, EpochEnd(end.drawn + epochs * plan.drawn[-1], end.owed))
    streams = np.flatnonzero(added.last).tolist()
    if not np.array_equal(added.last > 0, added.least < _NO_LIMIT):
        return 0, end
    sums, drawn, owed = np.zeros_like(end.owed), end.drawn.copy(), end.owed.copy()
    for stream in streams:
        name = plan.streams[stream]
        of, room = tokens[name], (nodes + 1) * tokens[name].longest
        sums[stream] = of.before(int(drawn[stream])) + owed[stream]
        if added.least[stream] < room or drawn[stream] > of.position(max(int(sums[stream]), 0)) + nodes:
            return 0, end
        if name in limits:
            left = of.before(limits[name]) - room - int(sums[stream])
            epochs = min(epochs, max(left // int(added.total[stream]), 0))
    if not epochs:
        return 0, end
    sums += epochs * added.total
    for stream in streams:
        drawn[stream] = tokens[plan.streams[stream]].position(int(sums[stream]))
    of_samples = _shares_of_samples(added.last, plan.streams, tokens)
    more = of_samples * np.asarray([name not in limits for name in plan.streams])
    more = more if more.any() else of_samples
    drawn += _counts(more / sum(more.tolist()), -int(drawn.sum()) % nodes, np.zeros_like(owed))
    for stream in streams:
        owed[stream] = sums[stream] - tokens[plan.streams[stream]].before(int(drawn[stream]))
    return epochs, EpochEnd(drawn, owed)


def _shares_of_samples(
    shares: NDArray[np.float64], streams: Sequence[str], tokens: Mapping[str, TokenPasses]
) -> NDArray[np.float64]:
    """Return the relation of samples of streams in a mixture of their tokens."""
    of_samples: NDArray[np.float64] = shares / np.asarray([tokens[name].mean for name in streams])
    return of_samples


def _known(of_before: NDArray[np.int64] | None) -> NDArray[np.int64]:
    assert of_before is not None, "epochs differ"
    return np.array(of_before)


def _shares(mix: Mix, place_of: dict[str, int]) -> NDArray[np.float64]:
    shares = np.zeros(len(place_of))
    for name, weight in mix:
        shares[place_of[name]] = weight
    # Added one after another: the sum is the same on every machine.
    of_all: NDArray[np.float64] = shares / sum(shares.tolist())
    return of_all


def _step_borders(phase: ResolvedPhase, start: int, nodes: int, longest_step: int) -> list[int]:
    """Return the beginnings of the steps of a phase, and the end of the last one."""
    stop = start - (start - phase.planned_stop) // nodes * nodes
    if stop <= start:
        raise ConfigError(
            f"schedule.{phase.name}.end is {phase.planned_stop}, and the phase before it ends at {start}: a phase "
            f"needs a sample for each of the {nodes} canonical nodes",
            hint="end it later, or set num_canonical_nodes lower",
            option=f"schedule.{phase.name}.end",
        )
    most = (stop - start) // nodes
    count = min(max(phase.steps, -(-(stop - start) // longest_step)), most)
    if count > MOST_STEPS:
        raise ConfigError(
            f"schedule.{phase.name}.steps: {count} are needed, and an epoch can have {MOST_STEPS}",
            hint="set it lower, or end the phase earlier",
            option=f"schedule.{phase.name}.steps",
        )
    inner = [(2 * ((stop - start) * place // count) + nodes) // (2 * nodes) * nodes for place in range(1, count)]
    return [start, *(start + size for size in inner), stop]


def _token_borders(
    phase: ResolvedPhase,
    start: int,
    nodes: int,
    longest_step: int,
    samples_per_token: float,
    longest_tokens: int | None,
) -> list[int]:
    """Return the beginnings of the steps of a phase in tokens, and the end of the last one."""
    size = phase.planned_stop - start
    samples = size * samples_per_token
    count = max(phase.steps, math.ceil(samples / longest_step), -(-size // (longest_tokens or size)))
    if round(samples) < nodes:
        raise ConfigError(
            f"schedule.{phase.name}.end is {phase.planned_stop} tokens, and the phase before it ends at {start}: with "
            f"{1 / samples_per_token:.0f} tokens per sample, it would have {samples:.1f} samples, and a phase needs "
            f"one for each of the {nodes} canonical nodes",
            hint="end it later, or set num_canonical_nodes lower",
            option=f"schedule.{phase.name}.end",
        )
    count = min(count, max(int(samples / nodes), 1))
    return [start + size * place // count for place in range(count + 1)]


def _parts(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Return the share of each stream in some samples, in fractions of a sample."""
    return np.rint(size * shares * _GRID).astype(np.int64)


def _counts(shares: NDArray[np.float64], size: int, owed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many samples a step takes of each stream.

    Args:
        shares: Share of each stream; streams with 0 get no sample.
        size: Samples of the step.
        owed: Samples that each stream is owed from before, in fractions of a sample; changed in place.
    """
    mixed = np.flatnonzero(shares)
    owed += _parts(shares, size)
    counts = np.maximum(owed[mixed] // _GRID, 0)
    rest = owed[mixed] - counts * _GRID
    by_rest = np.argsort(-rest, kind="stable")
    missing = size - int(counts.sum())
    if missing >= 0:
        more, once_more = divmod(missing, len(mixed))
        counts += more
        counts[by_rest[:once_more]] += 1
    while missing < 0:  # other streams had too many samples before, and get none now
        least = by_rest[counts[by_rest] > 0][missing:]
        counts[least] -= 1
        missing += len(least)
    owed[mixed] -= counts * _GRID
    of_all = np.zeros_like(owed)
    of_all[mixed] = counts
    return of_all
