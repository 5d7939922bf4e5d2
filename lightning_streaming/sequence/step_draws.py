"""A step of a phase, drawn from the streams of a run; and what a step that is cut leaves of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.batching import batched
from lightning_streaming.sequence.draw import Draw, Shuffled, drawn_here
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phases import MixtureSchedule, Step
from lightning_streaming.sequence.settings import ResolvedOrder
from lightning_streaming.sequence.stream_slices import (
    RequeuedSamples,
    StreamPasses,
    StreamSlice,
    TruncatedEpochs,
    requeued_in_pass_order,
)
from lightning_streaming.sequence.weights import DatasetShape, ResolvedWeights


class StepDraws:
    """Draws any step of any plan from the streams that are here.

    Args:
        settings: How each step is ordered.
        shard_sizes: Samples in each shard, of each stream by name.
        first_ids: Sample id at which each of these begins.
        shorter: Of streams that have grown, by name, the passes that read less.
    """

    def __init__(
        self,
        settings: ResolvedOrder,
        shard_sizes: Mapping[str, NDArray[np.int64]],
        first_ids: Mapping[str, int],
        shorter: Mapping[str, tuple[TruncatedEpochs, ...]],
    ) -> None:
        self._settings, self._shorter = settings, shorter
        self._shard_sizes, self._first_ids = shard_sizes, first_ids

    def passes(self, stream: str) -> StreamPasses:
        """How the samples of a stream that is here are counted off in passes."""
        return StreamPasses(self._shard_sizes[stream], self._shorter.get(stream, ()))

    def ids_of(self, stream: str) -> range:
        """The sample ids of a stream that is here."""
        first = self._first_ids[stream]
        return range(first, first + int(self._shard_sizes[stream].sum()))

    def missing(self, plan: MixtureSchedule, step: Step) -> str | None:
        """The first stream of a step that is not here, if there is one."""
        return next((name for name in plan.names_of(step) if name not in self._shard_sizes), None)

    def check(self, plan: MixtureSchedule, step: Step) -> None:
        """Refuse a step that cannot be drawn.

        Raises:
            ConfigError: It reads a stream that is not here.
        """
        missing, phase = self.missing(plan, step), plan.phases[step.phase]
        if missing is None:
            return
        why = "add it again to read this part of the run"
        if phase.cut is not None:
            why = "the phase was cut, and to know what it left its streams must stay: add it again"
        raise ConfigError(
            f"phase {phase.name!r} reads stream {missing!r}, which is not among the streams",
            hint=why,
            option=f"schedule.{phase.name}.mix",
            stream=missing,
        )

    def shuffled(
        self,
        plan: MixtureSchedule,
        step: Step,
        requeued: Mapping[str, RequeuedSamples],
        epoch: int,
        draw: Draw = drawn_here,
    ) -> Shuffled:
        """What a step that was checked draws, shuffled.

        Args:
            plan: All steps of an epoch, at least up to this one.
            step: One of them.
            requeued: What cuts before it have left, by stream.
            epoch: Counts from 0.
            draw: Draws it, when ids are first asked for.
        """
        names = plan.names_of(step)
        before = epoch * plan.drawn[-1][step.streams] + step.starts
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
        )

    def by_stream(self, ids: NDArray[np.int64], names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """Sample ids of some streams apart, each in their order."""
        by_id = sorted(names, key=self._first_ids.__getitem__)
        streams = np.searchsorted([self._first_ids[name] for name in by_id], ids, side="right")
        order = np.argsort(streams, kind="stable")
        stops = np.searchsorted(streams[order], np.arange(len(by_id)) + 1, side="right")
        return dict(zip(by_id, np.split(ids[order], stops[:-1]), strict=True))

    def in_order(self, left: NDArray[np.int64], stream: str, start: int, stop: int) -> NDArray[np.int64]:
        """What a cut leaves of a stream, pass by pass and shard by shard.

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
    """What the cuts of an epoch leave of each stream, one cut after another; a ``StepCutter`` for who plans.

    Args:
        draws: Makes the steps that are cut.
        draw: Draws each of them, at once.
    """

    def __init__(self, draws: StepDraws, draw: Draw = drawn_here) -> None:
        self._draws, self._draw = draws, draw
        self._requeued: list[tuple[int, dict[str, RequeuedSamples]]] = []

    def requeued_before(self, step: int) -> Mapping[str, RequeuedSamples]:
        """What cuts have left before a step, by stream."""
        return next((found for first, found in reversed(self._requeued) if first <= step), {})

    def cut_last_step(self, plan: MixtureSchedule, read: int) -> NDArray[np.int64]:
        """How much is read of each stream in the last step of a plan, if it is cut after so many of its samples.

        What is left of the step is kept, for those that follow.

        Raises:
            ConfigError: It reads a stream that is not here.
        """
        step = plan.step(len(plan) - 1)
        self._draws.check(plan, step)
        before = self.requeued_before(step.number)
        one_node = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=1)
        drawn = batched(self._draws.shuffled(plan, step, before, epoch=0, draw=self._draw), one_node)
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
    """What a step takes of each of its streams, as :class:`~lightning_streaming.sequence.draw.Shuffled` is told."""
    counts = step.counts.tolist()
    size = sum(counts)
    return ResolvedWeights(
        proportion=tuple(count / size for count in counts),
        repeat=(0.0,) * len(counts),
        choose=tuple(counts),
        epoch_size=size,
    )
