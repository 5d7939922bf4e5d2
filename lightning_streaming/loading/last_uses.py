"""When shards are needed for the last time in a pass, so that room can be made of them right then.

A worker lets go of a shard after its own last sample of it. That others may go on with it is known from what all
workers of the node read: the shard is *finished* once all must have read on beyond the batch that has the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST_SAMPLES = 2 * 10**8
"""Above this the plan is not read ahead to its end: shards then go by when they were used."""
_FEW_SAMPLES = 2**16
"""So few samples are looked through at once, before the first is read."""

_ROUNDS_BEHIND = 2
"""How many batches behind another a worker may be: as many as torch asks of each ahead, unless told otherwise."""


class BatchShards(NamedTuple):
    """The shards of some batches' samples, in order of batches."""

    batches: NDArray[np.int64]
    """The batch of each sample, of shape (samples,), not descending."""
    shards: NDArray[np.int64]
    """The shard of each sample, of shape (samples,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What one worker reads in a pass, and what all workers of its node read together."""

    worker: int
    """The worker's first batch."""
    num_workers: int
    """Batches from one of the worker's to its next."""
    num_shards: int
    """Shards of the dataset."""
    num_samples: int
    """About how many samples the node reads."""
    own: Callable[[], Iterator[NDArray[np.int64]]]
    """Gives the shard of each of the worker's samples in order, as arrays one after another."""
    of_node: Callable[[], Iterator[BatchShards]]
    """Gives the same of all samples of the node."""


class _Found(NamedTuple):
    last: NDArray[np.int64]
    """The worker's last sample of each shard, counted among its own; -1 for a shard that it does not read."""
    finished: list[int]
    """The worker's shards in the order in which the node is done with them."""
    after: list[int]
    """After how many of the worker's batches each of them is finished."""


class LastUses:
    """The last uses of shards, found by going through the plan once, beside reading."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._found: _Found | None = None
        self._num_told = 0
        self._closed = False
        if plan.num_samples <= _FEW_SAMPLES:
            self._find()
        elif plan.num_samples <= _MOST_SAMPLES:
            threading.Thread(target=self._find, name="last-uses", daemon=True).start()

    def among(self, shards: NDArray[np.int64], first_sample: int) -> NDArray[np.bool_]:
        """Which of some consecutive samples are this worker's last of their shards; none as long as that is not known.

        Args:
            shards: The shard of each sample, of shape (samples,).
            first_sample: How many samples were read before them.
        """
        if self._found is None:
            return np.zeros(len(shards), np.bool_)
        is_last: NDArray[np.bool_] = self._found.last[shards] == np.arange(first_sample, first_sample + len(shards))
        return is_last

    def finished(self, batches_read: int) -> list[int]:
        """Shards that nobody on this node needs any more; each is told once.

        Args:
            batches_read: How many batches this worker has read.
        """
        if self._found is None:
            return []
        told, after = self._num_told, self._found.after
        while self._num_told < len(after) and after[self._num_told] <= batches_read:
            self._num_told += 1
        return self._found.finished[told : self._num_told]

    def close(self) -> None:
        """Stop looking."""
        self._closed = True

    def _find(self) -> None:
        plan = self._plan
        last, last_batch = np.full((2, plan.num_shards), -1, np.int64)
        samples_before = 0
        for shards in plan.own():
            # Where a shard is named more than once, numpy keeps the last.
            last[shards] = np.arange(samples_before, samples_before + len(shards))
            samples_before += len(shards)
            if self._closed:
                return
        for batches, shards in plan.of_node():
            last_batch[shards] = batches
            if self._closed:
                return
        mine = np.flatnonzero(last >= 0)
        after = batches_until(last_batch[mine], plan.worker, plan.num_workers)
        order = np.argsort(after, kind="stable")
        self._found = _Found(last, mine[order].tolist(), after[order].tolist())


def batches_until(batches: NDArray[np.int64], worker: int, num_workers: int) -> NDArray[np.int64]:
    """How many batches a worker has read when all workers are done with those up to a given one.

    For example the second of three workers reads batches 1, 4, 7, 10, ...: after one of them it is beyond batch 1, and
    after three all of them are, even one that is two rounds behind.

    Args:
        batches: Batches, counted over all workers.
        worker: The worker's first batch.
        num_workers: Batches from one of the worker's to its next.
    """
    passed: NDArray[np.int64] = 1 - (worker - batches) // num_workers
    return passed + _ROUNDS_BEHIND
