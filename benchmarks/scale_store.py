"""A store that answers so many requests a second and refuses the others, asked by all nodes of a job at once.

The waits between attempts, and when one gives up, are the library's own. A request that is refused gives its connection
to the next one while it waits, as in ``storage/downloads.py``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

from lightning_streaming.errors import DownloadError
from lightning_streaming.storage.requests import RefusedError
from lightning_streaming.storage.retries import Attempts, Series


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """What is asked, and over which links."""

    per_second: float
    """Requests that it answers in a second; of the others it says 503."""
    latency: float
    """Seconds before an answer."""
    link: float
    """Bytes a second of each node."""
    connections: int = 64
    """Requests at once of each node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storm:
    """What came of some requests."""

    requests: int
    refused: int
    """Answers of 503."""
    gave_up: int
    """Requests that no attempt got an answer for."""
    seconds: float
    """Until the last answer."""


def storm(store: Store, nodes: int, each: int, size: float, attempts: int) -> Storm:
    """Let each node make requests, all from the same moment on.

    Args:
        store: Whom they ask.
        nodes: How many there are.
        each: Requests of each.
        size: Bytes that each gives.
        attempts: How many of a request may fail: ``download_retry`` and one.
    """
    tried = Attempts(purpose="download", options={}, total=attempts, failure=DownloadError)
    taking = store.latency + size * store.connections / store.link
    refusal, numbers = RefusedError(503, {}, "SlowDown"), count()  # without a time to wait, as S3 says it
    # Those that begin, in turn, each with its node and its attempts; a node's others wait for a connection.
    first = [node for node in range(nodes) for _ in range(min(each, store.connections))]
    begin = [(0.0, next(numbers), node, Series(tried)) for node in first]
    waiting = [each - min(each, store.connections)] * nodes
    heapq.heapify(begin)
    tokens, since, refused, gave_up, end = store.per_second, 0.0, 0, 0, 0.0
    while begin:
        now, _, node, series = heapq.heappop(begin)
        tokens, since = min(store.per_second, tokens + (now - since) * store.per_second), now
        is_answered = tokens >= 1
        free = now + (taking if is_answered else store.latency)
        if waiting[node]:
            waiting[node] -= 1
            heapq.heappush(begin, (free, next(numbers), node, Series(tried)))
        if is_answered:
            tokens -= 1
            end = max(end, free)
            continue
        refused += 1
        try:
            pause = series.pause_after(refusal)
        except DownloadError:
            gave_up += 1
        else:
            heapq.heappush(begin, (free + pause, next(numbers), node, series))
    return Storm(requests=nodes * each, refused=refused, gave_up=gave_up, seconds=end)
