"""An epoch of phases: its steps one after another, each drawn, shuffled and batched by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.base import check_entries, digest_of
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Draw, Shuffled, drawn_here
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phases import LONGEST_STEP, ResolvedPhase, planned
from lightning_streaming.sequence.settings import ResolvedOrder
from lightning_streaming.sequence.step_draws import Cuts, StepDraws, weights_of
from lightning_streaming.sequence.steps import SequenceStep, with_steps
from lightning_streaming.sequence.stream_slices import StreamPasses, StreamSlice, TruncatedEpochs
from lightning_streaming.sequence.weights import DatasetShape

_STEPS_KEPT = 2
"""Steps whose order is kept: batches that straddle a border need two."""


class Mixture:
    """The streams of a run with phases, and what the steps of any epoch draw of them.

    Args:
        settings: How each step is ordered.
        phases: One after another.
        shard_sizes: Samples in each shard, of each stream by name; of some streams that phases have read before they
            may be missing.
        first_ids: Sample id at which each of these begins.
        longest_step: Samples that are drawn together at most. None: as many as are mixed with each other.
        shorter: Of streams that have grown, by name, the passes that read less.
        draw: Draws steps that are cut, at once: what a cut leaves is known by what was read.

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
        self._draws = StepDraws(settings, shard_sizes, first_ids, shorter)
        self._cuts = Cuts(self._draws, draw)
        self.plan = planned(phases, settings.num_canonical_nodes, longest_step or longest, self._cuts)
        """What each step takes of each stream."""

    def passes(self, stream: str) -> StreamPasses:
        """How the samples of a stream that is here are counted off in passes."""
        return self._draws.passes(stream)

    def drawn_until(self, epoch: int, begun: int) -> dict[str, int]:
        """How far the passes of each stream have been drawn by the steps of which something was read.

        Args:
            epoch: Counts from 0.
            begun: How many steps of it these are.
        """
        plan = self.plan
        drawn = epoch * plan.drawn[-1] + plan.drawn[begun]
        requeued = self._cuts.requeued_before(begun)
        return {
            name: max(count, requeued[name].stop if name in requeued else 0)
            for name, count in zip(plan.streams, drawn.tolist(), strict=True)
        }

    def can_draw(self, epoch: int, step: int) -> bool:
        """Whether a step can be drawn: some streams may have gone since."""
        if step >= len(self.plan) or (epoch and self.is_cut):
            return False
        return self._draws.missing(self.plan, self.plan.step(step)) is None

    def check_epoch(self, epoch: int) -> None:
        """Refuse to read phases again of which one was cut.

        Raises:
            ConfigError: One was, and this is not the first epoch.
        """
        if epoch and self.is_cut:
            raise self.read_again_error(epoch)

    def read_again_error(self, epoch: int) -> ConfigError:
        """Return the error of an epoch that would read phases again of which one was cut."""
        cut = next(phase for phase in self.plan.phases if phase.cut is not None)
        return ConfigError(
            f"epoch {epoch} would read phases again of which one was ended (schedule.{cut.name}.ended_at={cut.cut})",
            hint="end the run with its first epoch (max_epochs=1)",
            option=f"schedule.{cut.name}.ended_at",
        )

    def shuffled(self, epoch: int, step: int, draw: Draw = drawn_here) -> Shuffled:
        """What a step draws, shuffled.

        Args:
            epoch: Counts from 0; streams go on in it where they stood at the end of the one before.
            step: Counts from 0.
            draw: Draws it, when ids are first asked for.

        Raises:
            ConfigError: It is of a stream that is not here any more, or of phases that cannot be read again.
        """
        taken = self.plan.step(step)
        self._draws.check(self.plan, taken)
        self.check_epoch(epoch)
        return self._draws.shuffled(self.plan, taken, self._cuts.requeued_before(step), epoch, draw)

    def counted(self, step: int) -> Shuffled:
        """A step to count with and not to read, whatever its epoch: also of streams that are not here any more."""
        taken = self.plan.step(step)
        sizes = tuple(np.asarray([count]) for count in taken.counts.tolist())
        named = tuple(StreamSlice(stream=name, first_id=0, start=0) for name in self.plan.names_of(taken))
        shape = DatasetShape(shard_sizes=sizes, weights=weights_of(taken))
        return Shuffled(self.settings, shape, 0, stream_slices=named, step=step)


class Phased(Batched):
    """The steps of all phases, one after another; batches straddle their borders, but for composed ones.

    Composed batches begin anew at each border: what fills no whole batch there is left out.

    Args:
        mixture: What is read.
        geometry: What global batches are made for.
        epoch: Counts from 0.
        draw: Draws a step, when ids of it are first asked for.
        will_follow: Told which step follows, when ids of a step are first asked for.
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
            # Steps are of whole canonical nodes, so none needs more entries for nodes that share one.
            nodes = min(geometry.num_nodes, mixture.settings.num_canonical_nodes)
            geometry = BatchGeometry(
                num_nodes=nodes, ranks_per_node=geometry.ranks_per_node, batch_size=geometry.batch_size
            )
        self._geometry = geometry
        self._kept: dict[int, Batched] = {}

    def __len__(self) -> int:
        """Positions of the epoch."""
        return int(self._stops[-1])

    @property
    def num_samples(self) -> int:
        """Samples of all mixture steps."""
        return int(self._sample_stops[-1])

    @cached_property
    def _stops(self) -> NDArray[np.int64]:
        """Position at which each step ends."""
        plan = self._mixture.plan
        if self._is_composed or self._steps:
            return np.cumsum([len(self._step(step)) for step in range(len(plan))])
        return plan.stops

    @cached_property
    def _sample_stops(self) -> NDArray[np.int64]:
        """Samples of each mixture step and those before it."""
        plan = self._mixture.plan
        if self._steps:
            return np.cumsum([self._step(step).num_samples for step in range(len(plan))])
        return plan.stops

    def phase_stops(self) -> NDArray[np.int64]:
        """Position at which each phase ends."""
        return self._stops[self._mixture.plan.last_steps]

    def step_stops(self) -> NDArray[np.int64]:
        """Position at which each step ends."""
        return self._stops

    def steps_begun(self, position: int) -> int:
        """How many steps a reader has read something of, who has come to a position."""
        return min(int(np.searchsorted(self._stops, position, side="left")) + bool(position), len(self._stops))

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.sequence.batching.Batched`: those of each step after those before it."""
        starts = self._sample_stops
        return self._by_step(
            positions, lambda step, at: (int(starts[step - 1]) if step else 0) + self._step(step).places(at)
        )

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at positions in ``[0, len(self))``, of any shape.

        Raises:
            ConfigError: They are of a stream that is not here any more.
            SampleIndexError: A position lies outside the epoch.
        """
        return self._by_step(positions, lambda step, at: self._drawn(step).ids(at))

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`."""
        steps = range(len(self._mixture.plan))
        orders = (with_steps(self._mixture.shuffled(self._epoch, step), self._steps) for step in steps)
        return digest_of(self._geometry.facts, [order.digest for order in orders])

    def _by_step(
        self, positions: NDArray[np.int64], answer: Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        check_entries(positions, len(self))
        steps = np.searchsorted(self._stops, positions, side="right")
        found = np.empty_like(positions)
        for step in np.unique(steps).tolist():
            here = steps == step
            first = int(self._stops[step - 1]) if step else 0
            found[here] = answer(step, positions[here] - first)
        return found

    def _step(self, number: int) -> Batched:
        """A step, to count with."""
        try:
            order = self._mixture.counted(number)
            if self._steps:
                order = replace(order, epoch=self._epoch)
            return batched(with_steps(order, self._steps), self._geometry)
        except ConfigError as error:
            plan = self._mixture.plan
            name = plan.phases[plan.phase_of_step[number]].name
            raise error.with_context(f"phase {name!r}") from error

    def _drawn(self, number: int) -> Batched:
        """A step, drawn."""
        known = self._kept.get(number)
        if known is None:
            order = with_steps(self._mixture.shuffled(self._epoch, number, self._draw), self._steps)
            known = batched(order, self._geometry)
            # Anew, rather than changed: several threads may ask.
            kept = list(self._kept.items())[1 - _STEPS_KEPT :]
            self._kept = {**dict(kept), number: known}
            if self._will_follow is not None and self._mixture.can_draw(self._epoch, number + 1):
                self._will_follow(self._mixture.shuffled(self._epoch, number + 1))
        return known
