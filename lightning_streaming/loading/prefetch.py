"""Fetching the shards that a worker is about to need, in the order it will need them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

_ROOM_SECONDS = 5.0
"""How often to look for room while the reader stays with its shard: other processes make room too."""


_BATCHES, _SAMPLES, _SHARDS = 8, 64, 4


class Reach(NamedTuple):
    """How many of its samples a worker looks ahead."""

    at_first: int
    """Before its first batch is read, which is not to share the link with many shards that only later ones need."""
    later: int


def default_reach(batch_size: int, samples_per_shard: float, readers: int) -> Reach:
    """How far to look if nobody says: 8 batches, and then also 4 shards read in order.

    Fewer shards than that would leave the link idle between one and the next.

    Args:
        batch_size: Samples per batch.
        samples_per_shard: On average.
        readers: Workers of all this node's ranks, who share each shard that is read in order.
    """
    at_first = max(_BATCHES * batch_size, _SAMPLES)
    return Reach(at_first, max(at_first, math.ceil(_SHARDS * samples_per_shard / readers)))


class ShardNeed(NamedTuple):
    """The first use of a shard in a stretch of a worker's samples."""

    sample: int
    """How many samples the worker reads before it needs the shard."""
    shard: int
    """Shard, counted over all streams."""


class ShardPrefetcher:
    """Keeps shards fetched as far ahead as told before their reader gets there.

    Args:
        needs: Shards in the order of need; may be endless, and may name a shard again.
        fetch: Brings one shard to this node; called from several threads, outside any lock of ours. It may leave a
            shard that another process is fetching; whoever reads it then waits. False says that there is no room: all
            threads then wait until the reader has moved on.
        reach: Samples to look ahead of the reader.
        num_threads: Shards fetched at a time.
    """

    def __init__(
        self, needs: Iterator[ShardNeed], fetch: Callable[[int], bool], reach: Reach, num_threads: int = 4
    ) -> None:
        self._progress = _Progress(needs, reach)
        self._fetch = fetch
        for number in range(num_threads):
            # Daemon threads: a download that stalls must not keep a process alive that wants to end.
            threading.Thread(
                target=_fetch_in_order, args=(self._progress, fetch), name=f"shard-prefetch-{number}", daemon=True
            ).start()

    def reader_at(self, sample: int) -> None:
        """Say how many samples the reader has read; lets the threads look further ahead."""
        with self._progress.changed:
            self._progress.samples_read = sample
            self._progress.changed.notify_all()

    def retry_if_failed(self, shard: int) -> None:
        """In the reader that needs a shard now: fetch it again if fetching it failed, and raise what then goes wrong.

        What went wrong before may have healed, or another process may have fetched the shard since.
        """
        if self._progress.failures.pop(shard, None) is not None:
            self._fetch(shard)

    def moved_on(self) -> None:
        """Say that the reader has gone on to another shard, or let go of one, so that there may be room now."""
        with self._progress.changed:
            self._progress.moves += 1
            self._progress.changed.notify_all()

    def close(self) -> None:
        """Let the threads end; one in the middle of a download ends after it."""
        with self._progress.changed:
            self._progress.closed = True
            self._progress.changed.notify_all()


class _Progress:
    """What reader and threads share. Fields change only while holding ``changed``, except the dict ``failures``."""

    def __init__(self, needs: Iterator[ShardNeed], reach: Reach) -> None:
        self.changed = threading.Condition()
        self.needs = needs
        self.reach = reach
        self.samples_read = 0
        self.moves = 0
        self.waiting_for_room: int | None = None
        self.closed = False
        self.failures: dict[int, Exception] = {}

    def next_shard(self) -> int | None:
        """Wait until the next shard in order comes into reach; None when there is nothing more to fetch."""
        with self.changed:
            if self.closed:
                return None
            need = next(self.needs, None)
            if need is None:
                return None
            while not self.closed and (need.sample >= self._horizon() or self.waiting_for_room is not None):
                self.changed.wait()
            return None if self.closed else need.shard

    def _horizon(self) -> int:
        return self.samples_read + (self.reach.later if self.samples_read else self.reach.at_first)

    def wait_for_room(self, shard: int, moves: int) -> bool:
        """Wait until a shard may find room that found none; the shards after it wait as well.

        Args:
            shard: The shard.
            moves: How often the reader had moved on before there was no room.

        Returns:
            Whether to try again; False if nobody needs it any more.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.waiting_for_room in (None, shard))
            self.waiting_for_room = shard
            self.changed.wait_for(lambda: self.closed or self.moves != moves, _ROOM_SECONDS)
            return not self.closed

    def found_room(self, shard: int) -> None:
        """Let the shards after this one be fetched."""
        with self.changed:
            if self.waiting_for_room == shard:
                self.waiting_for_room = None
                self.changed.notify_all()


def _fetch_in_order(progress: _Progress, fetch: Callable[[int], bool]) -> None:
    while (shard := progress.next_shard()) is not None:
        try:
            _fetch_when_there_is_room(progress, fetch, shard)
        except Exception as error:  # noqa: BLE001, PERF203  kept for the reader, who raises it when it needs the shard
            progress.failures[shard] = error
        finally:
            progress.found_room(shard)


def _fetch_when_there_is_room(progress: _Progress, fetch: Callable[[int], bool], shard: int) -> None:
    moves = progress.moves
    while not fetch(shard) and progress.wait_for_room(shard, moves):
        moves = progress.moves
