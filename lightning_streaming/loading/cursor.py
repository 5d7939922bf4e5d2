"""Where training is, and how a worker process learns where to begin."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.gaps import NO_GAPS, Gaps
from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.world import World


class Cursor(NamedTuple):
    """A place in the data: everything before it has been read, everything from it on has not."""

    epoch: int
    """Passes over the data before this one."""
    sample_in_epoch: int
    """Position in the epoch's global sequence, over all ranks; replicated ranks count once."""

    def passes_later(self, passes: int) -> Cursor:
        """Where the pass begins that comes ``passes`` after the one that begins here."""
        return self if passes == 0 else Cursor(self.epoch + passes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStart:
    """All that a process must be told to read its share of one pass."""

    cursor: Cursor
    world: World
    """The world in which samples are dealt: ranks that read the same samples count as one."""
    batch_size: int
    """Samples per batch on each rank."""
    geometry: BatchGeometry
    """What the epoch's batches were made for; not this world, where it changed in the middle of the epoch."""
    shuffle_seed: int
    num_canonical_nodes: int
    shuffle_block_size: int
    gaps: Gaps = NO_GAPS
    """What the pass leaves out of its epoch."""


class Handover:
    """A few shared numbers through which a loader tells its own workers where each pass begins.

    They lie in shared memory that has no name: it reaches workers by inheritance or through their start-up pickle,
    serves those that live on from pass to pass, and is gone with the last process that holds it.

    Args:
        most_gaps: The most gaps that an epoch may have.
    """

    _PLAIN = 12
    """Numbers that every pass has."""

    def __init__(self, most_gaps: int = 0) -> None:
        self._words = _shared_words(self._PLAIN + 2 * most_gaps)

    def assign(self, start: PassStart) -> None:
        """Tell workers that begin from now on to read this pass."""
        world = start.world
        words = [*start.cursor, world.num_nodes, world.ranks_per_node, world.rank, start.batch_size]
        geometry = start.geometry
        words += [geometry.num_nodes, geometry.ranks_per_node, geometry.batch_size]
        words += [start.shuffle_seed, start.num_canonical_nodes, start.shuffle_block_size]
        words += [position for run in start.gaps.runs for position in run]
        words += [0] * (len(self._words) - len(words))  # no run is empty, so these are none
        self._words[:] = torch.tensor(words)

    def assigned(self) -> PassStart:
        """The pass that was assigned last."""
        words: list[int] = self._words.tolist()  # at once: each number by itself is a tensor first
        runs = zip(words[self._PLAIN :: 2], words[self._PLAIN + 1 :: 2], strict=True)
        return PassStart(
            cursor=Cursor(words[0], words[1]),
            world=World(num_nodes=words[2], ranks_per_node=words[3], rank=words[4]),
            batch_size=words[5],
            geometry=BatchGeometry(num_nodes=words[6], ranks_per_node=words[7], batch_size=words[8]),
            shuffle_seed=words[9],
            num_canonical_nodes=words[10],
            shuffle_block_size=words[11],
            gaps=Gaps(tuple(run for run in runs if run[1])),
        )


class PassCounter:
    """Counts the passes that workers of a plain ``torch`` DataLoader begin, where nobody tells them which one it is.

    The counts lie in shared memory like that of :class:`Handover`.
    """

    _MAX_WORKERS = 1024

    def __init__(self) -> None:
        self._words = _shared_words(2 + self._MAX_WORKERS)
        self._owner = os.getpid()

    def reset(self, cursor: Cursor) -> None:
        """Count passes from ``cursor`` on."""
        if self._owner != os.getpid():
            # Ranks that were forked or spawned with one dataset must not count each other's passes.
            self._words, self._owner = _shared_words(2 + self._MAX_WORKERS), os.getpid()
        self._words.zero_()
        self._words[:2] = torch.tensor(cursor)

    def count_pass(self, worker: int) -> Cursor:
        """Begin a worker's next pass, and say where it begins. To be called in the worker.

        Raises:
            ConfigError: There are too many workers, or this is a worker of another process than the one that counts.
        """
        if worker >= self._MAX_WORKERS:
            raise ConfigError(f"a DataLoader may have up to {self._MAX_WORKERS} workers, but this is worker {worker}")
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != self._owner:
            raise ConfigError(
                f"the dataset was made in process {self._owner} and is read by a plain DataLoader in process "
                f"{parent.pid}; make it in the process that reads it, or use StreamingDataLoader"
            )
        slot = 2 + worker
        passes = int(self._words[slot])
        self._words[slot] = passes + 1
        return Cursor(int(self._words[0]), int(self._words[1])).passes_later(passes)

    def passes_counted(self) -> int:
        """Passes begun since the last reset."""
        return int(self._words[2:].max())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._words.untyped_storage().is_shared():  # a copy, and not a worker's start, which brings the memory
            self._words, self._owner = _shared(self._words), os.getpid()


def _shared_words(count: int) -> torch.Tensor:
    return _shared(torch.zeros(count, dtype=torch.int64))


def _shared(words: torch.Tensor) -> torch.Tensor:
    words.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return words
