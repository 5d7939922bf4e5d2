"""How fast shards come from where they are: a few are fetched into an empty directory, and timed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import StorageError
from lightning_streaming.loading.dataset import StreamingDataset

_AT_A_TIME = 4
"""Shards that a worker fetches at a time."""
_PATIENCE = 120.0
"""Seconds to wait for the first shard; what is slower can hardly be trained from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One shard that was fetched; times in seconds since the first was asked for."""

    shard: int
    """Counted over all streams."""
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What fetching some shards has shown."""

    shards: list[int]
    """Those that are here now, counted over all streams."""
    stored_bytes: int
    """Bytes of these, as they travelled."""
    alone: float
    """Seconds that the first took, on its own; with it clients are made and connections opened."""
    each: float
    """Seconds that one takes while others come beside it: the median."""
    bytes_per_second: float
    """Of all that came beside each other; of the first where there was no other."""


def shards_to_fetch(stored: NDArray[np.int64], stream_of_shard: NDArray[np.int64], most_bytes: int) -> list[int]:
    """Some shards of every stream that has any to fetch: the first of each stream, then the second of each, and so on.

    Args:
        stored: Bytes of each shard as it travels, 0 for one that is read in place; of shape (shards,).
        stream_of_shard: Of the same shape.
        most_bytes: Bytes of all together, unless the first of each stream take more.
    """
    remote = np.flatnonzero(stored)
    streams, firsts = np.unique(stream_of_shard[remote], return_index=True)
    rounds = np.arange(len(remote)) - firsts[np.searchsorted(streams, stream_of_shard[remote])]
    in_turn = remote[np.argsort(rounds, kind="stable")]
    within = int(np.searchsorted(np.cumsum(stored[in_turn]), most_bytes, side="right"))
    return [int(shard) for shard in in_turn[: max(within, len(streams))]]


def fetch(
    dataset: StreamingDataset,
    shards: Sequence[int],
    seconds: float,
    start_method: str | None,
    tell: Callable[[int], object],
) -> list[Arrival]:
    """Fetch shards in another process, which is killed when the time is up, or when this one is interrupted.

    Args:
        dataset: Where from, and where to.
        shards: In this order; the first by itself, then some at a time.
        seconds: How long to go on; the first is waited for in any case.
        start_method: How the process starts; None for the platform's default.
        tell: Told how many shards have come since it was last told.

    Raises:
        StorageError: One could not be fetched, or the first did not come for long.
    """
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_fetch_all, args=(dataset, shards, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return _arrivals(ours, len(shards), seconds, tell)
    finally:
        process.kill()  # and not told to end: it may be in the middle of a download
        process.join()
        ours.close()


def link_of(arrivals: Sequence[Arrival], stored: NDArray[np.int64]) -> Link:
    """What the times of some shards, at least one, say about the link.

    Args:
        arrivals: In the order in which they came; the first came by itself.
        stored: Bytes of each shard as it travels, of shape (shards,).
    """
    first, *others = arrivals
    timed = others or [first]
    passed = max(one.ended for one in timed) - min(one.began for one in timed)
    return Link(
        shards=sorted(one.shard for one in arrivals),
        stored_bytes=sum(int(stored[one.shard]) for one in arrivals),
        alone=first.ended - first.began,
        each=median(one.ended - one.began for one in timed),
        bytes_per_second=sum(int(stored[one.shard]) for one in timed) / passed,
    )


def _arrivals(pipe: Connection, expected: int, seconds: float, tell: Callable[[int], object]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    began = perf_counter()
    while len(arrivals) < expected:
        patience = seconds if arrivals else _PATIENCE
        if not pipe.poll(max(0.0, began + patience - perf_counter())):
            break
        try:
            came = pipe.recv()
        except EOFError:
            raise StorageError("the process that fetched shards to measure the link has died") from None
        if isinstance(came, Exception):
            raise came
        arrivals.append(came)
        tell(1)
    if not arrivals:
        raise StorageError(f"no shard came within {_PATIENCE:.0f} s, so the data cannot be measured")
    return arrivals


def _fetch_all(dataset: StreamingDataset, shards: Sequence[int], pipe: Connection) -> None:
    """In the process that fetches: ended by whoever started it, so it heeds nobody else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    began = perf_counter()

    def timed(shard: int) -> Arrival:
        asked = perf_counter()
        dataset.prepare_shard(shard)
        return Arrival(shard=shard, began=asked - began, ended=perf_counter() - began)

    try:
        pipe.send(timed(shards[0]))
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            for came in [pool.submit(timed, shard) for shard in shards[1:]]:
                pipe.send(came.result())
    except Exception as error:  # noqa: BLE001  raised again by who waits for shards
        pipe.send(error)
