"""Fetching the shards that a worker is about to need, in the order it will need them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple


class ShardNeed(NamedTuple):
    """The first use of a shard in a stretch of a worker's samples."""

    sample: int
    """How many samples the worker reads before it needs the shard."""
    shard: int
    """Shard, counted over all streams."""


class ShardPrefetcher:
    """Keeps up to ``ahead`` samples' worth of shards fetched before their reader gets there.

    Args:
        needs: Shards in the order of need; may be endless, and may name a shard again.
        fetch: Brings one shard to this node; called from several threads, outside any lock of ours. It may leave a
            shard that another process is fetching; whoever reads it then waits.
        ahead: Samples to look ahead of the reader.
        num_threads: Shards fetched at a time.
    """

    def __init__(
        self, needs: Iterator[ShardNeed], fetch: Callable[[int], object], ahead: int, num_threads: int = 4
    ) -> None:
        self._progress = _Progress(needs, ahead)
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

    def close(self) -> None:
        """Let the threads end; one in the middle of a download ends after it."""
        with self._progress.changed:
            self._progress.closed = True
            self._progress.changed.notify_all()


class _Progress:
    """What reader and threads share. Fields change only while holding ``changed``, except the dict ``failures``."""

    def __init__(self, needs: Iterator[ShardNeed], ahead: int) -> None:
        self.changed = threading.Condition()
        self.needs = needs
        self.ahead = ahead
        self.samples_read = 0
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
            while not self.closed and need.sample >= self.samples_read + self.ahead:
                self.changed.wait()
            return None if self.closed else need.shard


def _fetch_in_order(progress: _Progress, fetch: Callable[[int], object]) -> None:
    while (shard := progress.next_shard()) is not None:
        try:
            fetch(shard)
        except Exception as error:  # noqa: BLE001, PERF203  kept for the reader, who raises it when it needs the shard
            progress.failures[shard] = error
