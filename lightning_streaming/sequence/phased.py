"""An epoch of a schedule: its mixture steps in order, each drawn, shuffled and batched separately.

StepDraws   draws a mixture step from the streams of a run
Cuts        the samples that a phase that was ended early has drawn and not read
Mixture     the streams of a run with a schedule
Phased      an epoch of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.base import check_entries, digest_of
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Draw, Shuffled, drawn_here
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phases import (
    LONGEST_STEP,
    MixtureSchedule,
    ResolvedPhase,
    Step,
    WeightChange,
    end_after,
    planned,
)
from lightning_streaming.sequence.settings import ResolvedOrder
from lightning_streaming.sequence.steps import SequenceStep, with_steps
from lightning_streaming.sequence.stream_slices import (
    RequeuedSamples,
    StreamPasses,
    StreamSlice,
    TruncatedEpochs,
    requeued_in_pass_order,
)
from lightning_streaming.sequence.tokens import TokenLengths, TokenPasses
from lightning_streaming.sequence.weights import DatasetShape, ResolvedWeights

_STEPS_KEPT = 2
"""Steps whose order is cached: batches that cross a border need two."""
_PLANS_KEPT = 3
"""Epochs whose plan is cached, but the first: the one under way, those before and after it."""
_MOST_EPOCHS = 1 << 16
"""Epochs that can depend on those before them: planning each takes milliseconds."""


class StepDraws:
    """Draws any mixture step of a schedule from the streams of a run.

    Args:
        settings: How each step is ordered.
        shard_sizes: Samples in each shard, of each stream by name.
        first_ids: Sample id at which each of these begins.
        shorter: Of streams that have grown, by name, the passes that read less.
        tokens: The tokens of samples, if weights count them.
    """

    def __init__(
        self,
        settings: ResolvedOrder,
        shard_sizes: Mapping[str, NDArray[np.int64]],
        first_ids: Mapping[str, int],
        shorter: Mapping[str, tuple[TruncatedEpochs, ...]],
        tokens: TokenLengths | None = None,
    ) -> None:
        self._settings, self._shorter, self._tokens = settings, shorter, tokens
        self._shard_sizes, self._first_ids = shard_sizes, first_ids

    def passes(self, stream: str) -> StreamPasses:
        """Return how the samples of a present stream are divided into passes."""
        return StreamPasses(self._shard_sizes[stream], self._shorter.get(stream, ()))

    def token_passes(self, stream: str) -> TokenPasses:
        """Return the tokens of a present stream along its passes, where weights count them."""
        assert self._tokens is not None, "weights count tokens"
        settings, passes = self._settings, self.passes(stream)
        return TokenPasses(
            stream,
            self._first_ids[stream],
            passes,
            self._tokens,
            settings.shuffle_seed,
            is_shuffled=settings.shuffle,
        )

    def ids_of(self, stream: str) -> range:
        """Return the sample ids of a present stream."""
        first = self._first_ids[stream]
        return range(first, first + int(self._shard_sizes[stream].sum()))

    def missing(self, plan: MixtureSchedule, step: Step) -> str | None:
        """Return the first missing stream of a step; None if all are present."""
        return next((name for name in plan.names_of(step) if name not in self._shard_sizes), None)

    def check(self, plan: MixtureSchedule, step: Step) -> None:
        """Check that a step can be drawn.

        Raises:
            ConfigError: It reads a stream that is not here.
        """
        missing = self.missing(plan, step)
        if missing is not None:
            raise self.missing_error(plan.phases[step.phase], missing)

    def missing_error(self, phase: ResolvedPhase, stream: str) -> ConfigError:
        """Return the error of a phase whose stream is missing, and needed."""
        why = "add it again to read this part of the run"
        if phase.cut is not None:
            why = "the phase was cut, and to know what it left its streams must stay: add it again"
        elif self._tokens is not None:
            why = "weights count tokens, so the streams of earlier phases must stay: add it again"
        return ConfigError(
            f"phase {phase.name!r} reads stream {stream!r}, which is not among the streams",
            hint=why,
            option=f"schedule.{phase.name}.mix",
            stream=stream,
        )

    def shuffled(
        self,
        plan: MixtureSchedule,
        step: Step,
        requeued: Mapping[str, RequeuedSamples],
        epoch: int,
        draw: Draw = drawn_here,
    ) -> Shuffled:
        """Return the shuffled draw of a step that was checked.

        Args:
            plan: All steps of an epoch, at least up to this one.
            step: One of them.
            requeued: Samples that earlier cuts have left, by stream.
            epoch: Counts from 0.
            draw: Draws it when ids are first requested.
        """
        names = plan.names_of(step)
        before = plan.drawn_before(epoch)[step.streams] + step.starts
        return Shuffled(
            self._settings,
            DatasetShape(shard_sizes=tuple(self._shard_sizes[name] for name in names), weights=weights_of(step)),
            epoch,
            draw,
            stream_slices=tuple(
                StreamSlice(
                    stream=name,
                    first_id=self._first_ids[name],
                    start=start,
                    shorter=self._shorter.get(name, ()),
                    requeued=requeued.get(name),
                )
                for name, start in zip(names, before.tolist(), strict=True)
            ),
            step=step.number,
            tokens=self._tokens,
        )

    def by_stream(self, ids: NDArray[np.int64], names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """Return the sample ids of some streams separately, each in order."""
        by_id = sorted(names, key=self._first_ids.__getitem__)
        streams = np.searchsorted([self._first_ids[name] for name in by_id], ids, side="right")
        order = np.argsort(streams, kind="stable")
        stops = np.searchsorted(streams[order], np.arange(len(by_id)) + 1, side="right")
        return dict(zip(by_id, np.split(ids[order], stops[:-1]), strict=True))

    def in_order(self, left: NDArray[np.int64], stream: str, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples of a stream that a cut leaves, pass by pass and shard by shard.

        Args:
            left: Sample ids, in the order in which they would have been read.
            stream: Its name.
            start: Where they begin in its passes.
            stop: Where they end in them.
        """
        first, stops = self._first_ids[stream], np.cumsum(self._shard_sizes[stream])
        passes = self.passes(stream).numbers(np.arange(start, stop))
        return first + requeued_in_pass_order(left - first, passes, stops)


class Cuts:
    """The samples of each stream that phases which were ended early have left; the ``StepCutter`` of a plan.

    Args:
        draws: Draws the steps that are cut.
        draw: Draws the order of each of them, at once.
    """

    def __init__(self, draws: StepDraws, draw: Draw = drawn_here) -> None:
        self._draws, self._draw = draws, draw
        self._requeued: list[tuple[int, dict[str, RequeuedSamples]]] = []

    def requeued_before(self, step: int) -> Mapping[str, RequeuedSamples]:
        """Return the samples that cuts have left before a step, by stream."""
        return next((requeued for first, requeued in reversed(self._requeued) if first <= step), {})

    def cut_last_step(self, plan: MixtureSchedule, read: int) -> NDArray[np.int64]:
        """Return the samples read of each stream in the last step of a plan, if it is cut after ``read`` samples.

        The rest of the step is kept for later steps.

        Raises:
            ConfigError: It reads a stream that is not here.
        """
        step = plan.step(len(plan) - 1)
        self._draws.check(plan, step)
        before = self.requeued_before(step.number)
        geometry = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=1)
        drawn = batched(self._draws.shuffled(plan, step, before, epoch=0, draw=self._draw), geometry)
        left_of = self._draws.by_stream(drawn.ids_between(read, len(drawn)), plan.names_of(step))
        counts, requeued = np.zeros(len(plan.streams), np.int64), dict(before)
        for stream, name, start, count in zip(
            step.streams.tolist(), plan.names_of(step), step.starts.tolist(), step.counts.tolist(), strict=True
        ):
            stop, counts[stream] = start + count, count - len(left_of[name])
            left = self._draws.in_order(left_of[name], name, start + int(counts[stream]), stop)
            known = before.get(name)
            if known is not None and known.stop > stop:  # not all of what an earlier cut returned was drawn again
                left, stop = np.concatenate([left, known.ids[len(known.ids) - (known.stop - stop) :]]), known.stop
            requeued[name] = RequeuedSamples(left, stop)
        self._requeued.append((step.number + 1, requeued))
        return counts


def weights_of(step: Step) -> ResolvedWeights:
    """Return the weights of a step's streams, as :class:`~lightning_streaming.sequence.draw.Shuffled` takes them."""
    counts = step.counts.tolist()
    size = sum(counts)
    return ResolvedWeights(
        proportion=tuple(count / size for count in counts),
        repeat=(0.0,) * len(counts),
        choose=tuple(counts),
        epoch_size=size,
    )


class Mixture:
    """The streams of a run with a schedule, and the mixture steps of any epoch over them.

    Args:
        settings: How each step is ordered.
        phases: One after another.
        shard_sizes: Samples in each shard, of each stream by name; of some streams that phases have read before they
            may be missing.
        first_ids: Sample id at which each of these begins.
        longest_step: Samples that are drawn together at most. None: as many as are mixed with each other.
        shorter: Of streams that have grown, by name, the passes that read less.
        draw: Draws steps that are cut, at once: the samples that a cut leaves follow from those that were read.
        tokens: The tokens of samples, if weights and ends of phases count these.
        limits: How often some streams may be read, over all epochs.
        redistributes: The other streams of a mix take over what is beyond; otherwise it is an error.
        changes: Weights that the run has set, in order.
        most_per_step: Most samples, or tokens, of a step. None: no such limit.

    Raises:
        ConfigError: The phases cannot be read so.
    """

    def __init__(
        self,
        settings: ResolvedOrder,
        phases: Sequence[ResolvedPhase],
        shard_sizes: Mapping[str, NDArray[np.int64]],
        first_ids: Mapping[str, int],
        longest_step: int | None = None,
        shorter: Mapping[str, tuple[TruncatedEpochs, ...]] = MappingProxyType({}),
        draw: Draw = drawn_here,
        tokens: TokenLengths | None = None,
        limits: Mapping[str, float] = MappingProxyType({}),
        redistributes: bool = True,
        changes: Sequence[WeightChange] = (),
        most_per_step: int | None = None,
    ) -> None:
        self.settings = settings
        is_composed = settings.batching_method != "random"
        self.is_cut = any(phase.cut is not None for phase in phases)
        if is_composed and self.is_cut:
            raise ConfigError(
                f"batching_method={settings.batching_method!r} composes the batches of a phase as a whole, so none can "
                "be cut",
                hint="use batching_method='random'",
                option="batching_method",
            )
        mixed = settings.num_canonical_nodes * settings.shuffle_block_size
        # To compose batches, steps are as long as they can be: what fills none is left out at the end of each.
        longest = phases[-1].planned_stop + settings.num_canonical_nodes if is_composed else max(mixed, LONGEST_STEP)
        self._draws = StepDraws(settings, shard_sizes, first_ids, shorter, tokens)
        self._cuts = Cuts(self._draws, draw)
        self._tokens: dict[str, TokenPasses] | None = None
        self.changes = tuple(changes)
        """Weights that the run has set."""
        if tokens is not None:
            mixes = [*((phase, phase.begin) for phase in phases), *((phases[-1], change.mix) for change in changes)]
            names = {name: phase for phase, mix in mixes for name, _ in mix}
            for name, phase in names.items():
                if name not in shard_sizes:
                    raise self._draws.missing_error(phase, name)
            self._tokens = {name: self._draws.token_passes(name) for name in names}
        most = {name: self._sample_at(name, repeats) for name, repeats in limits.items() if name in shard_sizes}
        self._planned = partial(
            planned,
            phases,
            settings.num_canonical_nodes,
            min(longest_step or longest, most_per_step or longest) if tokens is None else longest_step or longest,
            self._cuts,
            self._tokens,
            most,
            redistributes,
            self.changes,
            most_per_step,
            sizes={name: self._size_of(name) for name in most},
        )
        self._end_after = partial(
            end_after, num_canonical_nodes=settings.num_canonical_nodes, tokens=self._tokens, limits=most
        )
        self.plan = self._planned()
        """The samples that each step of the first epoch takes of each stream."""
        self._plans = {0: self.plan}

    @property
    def num_parts(self) -> int:
        """Number of mixture steps of an epoch."""
        return len(self.plan)

    @property
    def differs_by_epoch(self) -> bool:
        """True if epochs take different numbers of samples of each stream."""
        return self.plan.earlier is not None

    def plan_of(self, epoch: int) -> MixtureSchedule:
        """Return the samples that each step of an epoch takes of each stream.

        Raises:
            ConfigError: All streams of a step have been read as often as they may be, or the number is too high.
        """
        if not self.differs_by_epoch:
            return self.plan
        if epoch > _MOST_EPOCHS:
            raise ConfigError(
                f"epoch {epoch} follows from all epochs before it, as weights count tokens, have limits or were set by "
                f"the run, and at most {_MOST_EPOCHS} can be planned",
                hint="set epoch_size higher, so that there are fewer",
                option="epoch",
            )
        known = self._plans
        latest = max(number for number in known if number <= epoch)
        number, plan = latest, known[latest]
        while number < epoch:
            changed = [change.epoch for change in self.changes if change.epoch >= number]
            skipped, end = self._end_after(plan, 0 if number in changed else min([epoch, *changed]) - 1 - number)
            number += skipped + 1
            plan = self._planned(epoch=number, before=end)
            # Replaced, rather than changed: several threads may read.
            known = {0: self.plan, **dict(list(known.items())[1:][1 - _PLANS_KEPT :]), number: plan}
        self._plans = known
        return plan

    def passes(self, stream: str) -> StreamPasses:
        """Return how the samples of a present stream are divided into passes."""
        return self._draws.passes(stream)

    def tokens_of(self, stream: str) -> TokenPasses | None:
        """Return the tokens of a stream along its passes; None if weights count samples, or no phase mixes it."""
        return None if self._tokens is None else self._tokens.get(stream)

    def repeats(self, stream: str, samples: int) -> float:
        """Return the number of passes that the first samples of a stream are, by tokens if weights count them."""
        tokens = self.tokens_of(stream)
        return self.passes(stream).count(samples) if tokens is None else tokens.repeats(samples)

    def _size_of(self, stream: str) -> int:
        """Return the samples of the first pass over a stream, or its tokens if weights count these."""
        tokens = self.tokens_of(stream)
        return self.passes(stream).position(0)[1] if tokens is None else tokens.tokens_of_pass(0)

    def _sample_at(self, stream: str, repeats: float) -> int:
        """Return the samples of a stream that are a number of passes."""
        tokens = self.tokens_of(stream)
        if tokens is not None:
            return tokens.sample_at(repeats)
        first, size = self.passes(stream).position(int(repeats))
        return first + int((repeats - int(repeats)) * size)

    def batched(
        self,
        geometry: BatchGeometry,
        epoch: int,
        draw: Draw = drawn_here,
        will_follow: Callable[[Shuffled], None] | None = None,
        steps: Sequence[SequenceStep] = (),
    ) -> Phased:
        """Return an epoch in batches."""
        return Phased(self, geometry, epoch, draw, will_follow, steps)

    def drawn_until(self, epoch: int, begun: int) -> dict[str, int]:
        """Return how far the passes of each stream have been drawn by the steps that have begun.

        Args:
            epoch: Counts from 0.
            begun: How many steps of it these are.
        """
        plan = self.plan_of(epoch)
        drawn = plan.drawn_before(epoch) + plan.drawn[begun]
        requeued = self._cuts.requeued_before(begun)
        return {
            name: max(count, requeued[name].stop if name in requeued else 0)
            for name, count in zip(plan.streams, drawn.tolist(), strict=True)
        }

    def can_draw(self, epoch: int, step: int) -> bool:
        """Return whether a step can be drawn: streams may have been removed, or read as often as they may be."""
        if step >= len(self.plan) or (epoch and self.is_cut) or not self.has_epoch(epoch):
            return False
        plan = self.plan_of(epoch)
        return self._draws.missing(plan, plan.step(step)) is None

    def has_epoch(self, epoch: int) -> bool:
        """Return whether streams may be read as often as an epoch needs; if not, :meth:`check_epoch` raises."""
        try:
            self.plan_of(epoch)
        except ConfigError:
            return False
        return True

    def check_epoch(self, epoch: int) -> None:
        """Check that an epoch can be read.

        Raises:
            ConfigError: A phase was ended early, and this is not the first epoch; or the epoch would read all streams
                of a step more often than they may be.
        """
        if epoch and self.is_cut:
            raise self.read_again_error(epoch)
        self.plan_of(epoch)

    def read_again_error(self, epoch: int) -> ConfigError:
        """Return the error of an epoch that would read phases again of which one was cut."""
        cut = next(phase for phase in self.plan.phases if phase.cut is not None)
        return ConfigError(
            f"epoch {epoch} would read phases again of which one was ended (schedule.{cut.name}.ended_at={cut.cut})",
            hint="end the run with its first epoch (max_epochs=1)",
            option=f"schedule.{cut.name}.ended_at",
        )

    def shuffled(self, epoch: int, step: int, draw: Draw = drawn_here) -> Shuffled:
        """Return the shuffled draw of a step.

        Args:
            epoch: Counts from 0; streams continue where the epoch before ended.
            step: Counts from 0.
            draw: Draws it when ids are first requested.

        Raises:
            ConfigError: Its stream was removed, or its phases cannot be read again.
        """
        self.check_epoch(epoch)
        plan = self.plan_of(epoch)
        taken = plan.step(step)
        self._draws.check(plan, taken)
        return self._draws.shuffled(plan, taken, self._cuts.requeued_before(step), epoch, draw)

    def counted(self, epoch: int, step: int) -> Shuffled:
        """Return a step to count with and not to read, also of streams that were removed."""
        taken = self.plan_of(epoch).step(step)
        sizes = tuple(np.asarray([count]) for count in taken.counts.tolist())
        named = tuple(StreamSlice(stream=name, first_id=0, start=0) for name in self.plan.names_of(taken))
        shape = DatasetShape(shard_sizes=sizes, weights=weights_of(taken))
        return Shuffled(self.settings, shape, 0, stream_slices=named, step=step)


class Phased(Batched):
    """The mixture steps of an epoch in order; batches cross their borders, except composed ones.

    Composed batches end at each border: samples that fill no whole batch there are left out.

    Args:
        mixture: The streams of the run.
        geometry: The geometry of global batches.
        epoch: Counts from 0.
        draw: Draws a step when its ids are first requested.
        will_follow: Called with the next step when ids of a step are first requested.
        steps: The user's, which change each mixture step.

    Raises:
        ConfigError: Batches cannot be composed so of a step.
    """

    def __init__(
        self,
        mixture: Mixture,
        geometry: BatchGeometry,
        epoch: int,
        draw: Draw = drawn_here,
        will_follow: Callable[[Shuffled], None] | None = None,
        steps: Sequence[SequenceStep] = (),
    ) -> None:
        self._steps = steps
        self._mixture, self._epoch, self._draw, self._will_follow = mixture, epoch, draw, will_follow
        self._is_composed = mixture.settings.batching_method != "random"
        if not self._is_composed:
            # Steps have whole canonical nodes, so none needs more entries for nodes that share one.
            nodes = min(geometry.num_nodes, mixture.settings.num_canonical_nodes)
            geometry = BatchGeometry(
                num_nodes=nodes, ranks_per_node=geometry.ranks_per_node, batch_size=geometry.batch_size
            )
        self._geometry = geometry
        self._kept: dict[int, Batched] = {}

    def __len__(self) -> int:
        """Return the number of positions of the epoch."""
        return int(self._stops[-1])

    @property
    def num_samples(self) -> int:
        """Samples of all mixture steps."""
        return int(self._sample_stops[-1])

    @property
    def _plan(self) -> MixtureSchedule:
        return self._mixture.plan_of(self._epoch)

    @cached_property
    def _stops(self) -> NDArray[np.int64]:
        """The position at which each step ends."""
        plan = self._plan
        if self._is_composed or self._steps:
            return np.cumsum([len(self._step(step)) for step in range(len(plan))])
        return plan.stops

    @cached_property
    def _sample_stops(self) -> NDArray[np.int64]:
        """The number of samples up to the end of each mixture step."""
        plan = self._plan
        if self._steps:
            return np.cumsum([self._step(step).num_samples for step in range(len(plan))])
        return plan.stops

    def part_stops(self) -> NDArray[np.int64]:
        """Return the position at which each mixture step ends."""
        return self._stops

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.sequence.batching.Batched`: those of each step after those before it."""
        starts = self._sample_stops
        return self._by_step(
            positions, lambda step, at: (int(starts[step - 1]) if step else 0) + self._step(step).places(at)
        )

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at positions in ``[0, len(self))``, of any shape.

        Raises:
            ConfigError: Their stream was removed.
            SampleIndexError: A position lies outside the epoch.
        """
        return self._by_step(positions, lambda step, at: self._drawn(step).ids(at))

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`."""
        steps = range(len(self._plan))
        orders = (with_steps(self._mixture.shuffled(self._epoch, step), self._steps) for step in steps)
        return digest_of(self._geometry.facts, [order.digest for order in orders])

    def _by_step(
        self, positions: NDArray[np.int64], answer: Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        check_entries(positions, len(self))
        steps = np.searchsorted(self._stops, positions, side="right")
        answers = np.empty_like(positions)
        for step in np.unique(steps).tolist():
            here = steps == step
            first = int(self._stops[step - 1]) if step else 0
            answers[here] = answer(step, positions[here] - first)
        return answers

    def _step(self, number: int) -> Batched:
        """Return a step, to count with."""
        try:
            order = self._mixture.counted(self._epoch, number)
            if self._steps:
                order = replace(order, epoch=self._epoch)
            return batched(with_steps(order, self._steps), self._geometry)
        except ConfigError as error:
            plan = self._plan
            name = plan.phases[plan.phase_of_step[number]].name
            raise error.with_context(f"phase {name!r}") from error

    def _drawn(self, number: int) -> Batched:
        """Return a step, drawn."""
        known = self._kept.get(number)
        if known is None:
            order = with_steps(self._mixture.shuffled(self._epoch, number, self._draw), self._steps)
            known = batched(order, self._geometry)
            # Replaced, rather than changed: several threads may read.
            kept = list(self._kept.items())[1 - _STEPS_KEPT :]
            self._kept = {**dict(kept), number: known}
            if self._will_follow is not None and self._mixture.can_draw(self._epoch, number + 1):
                self._will_follow(self._mixture.shuffled(self._epoch, number + 1))
        return known
