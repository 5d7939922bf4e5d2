"""Where training is, and how a worker process learns where to begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_streaming.errors import ConfigError
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
    shuffle_seed: int
    num_canonical_nodes: int
    shuffle_block_size: int


class Handover:
    """A few shared numbers through which the training process tells its workers where a pass begins.

    They lie in shared memory that has no name: it reaches workers by inheritance or through their start-up pickle,
    serves those that live on from pass to pass, and is gone with the last process that holds it.

    Two ways to read lead here. Under :class:`~lightning_streaming.StreamingDataLoader` the training process writes
    each pass before its workers begin it (*assigned*). Under a plain ``torch`` DataLoader nobody tells, so each worker
    counts the passes it has begun since the last :meth:`reset` (*counted*).
    """

    _WORDS = 10
    _MAX_WORKERS = 1024

    def __init__(self) -> None:
        self._words = torch.zeros(self._WORDS + self._MAX_WORKERS, dtype=torch.int64)
        self._words.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def assign(self, start: PassStart) -> None:
        """Tell workers that begin from now on to read this pass."""
        world = start.world
        words = [1, *start.cursor, world.num_nodes, world.ranks_per_node, world.rank, start.batch_size]
        words += [start.shuffle_seed, start.num_canonical_nodes, start.shuffle_block_size]
        self._words[: self._WORDS] = torch.tensor(words)

    def assigned(self) -> PassStart | None:
        """The pass that was assigned, or None where passes are counted."""
        words = [int(word) for word in self._words[: self._WORDS]]
        if not words[0]:
            return None
        return PassStart(
            cursor=Cursor(words[1], words[2]),
            world=World(num_nodes=words[3], ranks_per_node=words[4], rank=words[5]),
            batch_size=words[6],
            shuffle_seed=words[7],
            num_canonical_nodes=words[8],
            shuffle_block_size=words[9],
        )

    def reset(self, cursor: Cursor) -> None:
        """Count passes from ``cursor`` on."""
        self._words.zero_()
        self._words[1:3] = torch.tensor(cursor)

    def count_pass(self, worker: int) -> Cursor:
        """Begin this worker's next counted pass, and say where it begins."""
        if worker >= self._MAX_WORKERS:
            raise ConfigError(f"a DataLoader may have up to {self._MAX_WORKERS} workers, but this is worker {worker}")
        slot = self._WORDS + worker
        passes = int(self._words[slot])
        self._words[slot] = passes + 1
        return self._counted_from().passes_later(passes)

    def passes_counted(self) -> int:
        """Passes begun since the last reset by the workers of a plain DataLoader."""
        return int(self._words[self._WORDS :].max())

    def _counted_from(self) -> Cursor:
        return Cursor(int(self._words[1]), int(self._words[2]))
