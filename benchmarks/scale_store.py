"""A store that answers so many requests a second and refuses the others, asked by all nodes of a job at once.

The waits between attempts, and when one gives up, are the library's own. A request that is refused gives its connection
to the next one while it waits, as in ``storage/downloads.py``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from lightning_streaming.errors import DownloadError
from lightning_streaming.storage.retries import Attempts


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


class _RefusedError(Exception):
    """503, told without a time to wait, as S3 does."""


def storm(store: Store, nodes: int, each: int, size: float, attempts: int) -> Storm:
    """Let each node make requests, all from the same moment on.

    Args:
        store: Whom they ask.
        nodes: How many there are.
        each: Requests of each.
        size: Bytes that each gives.
        attempts: How often a request is made at most: ``download_retry`` and one.
    """
    tried = Attempts(purpose="download", options={}, total=attempts, failure=DownloadError)
    taking = store.latency + size * store.connections / store.link
    # Those that begin, each with the node and the attempts made; a node's others wait for a connection.
    begin = [(0.0, node, 0) for node in range(nodes) for _ in range(min(each, store.connections))]
    waiting = [each - min(each, store.connections)] * nodes
    heapq.heapify(begin)
    tokens, since, refused, gave_up, end = store.per_second, 0.0, 0, 0, 0.0
    while begin:
        now, node, made = heapq.heappop(begin)
        tokens, since = min(store.per_second, tokens + (now - since) * store.per_second), now
        is_answered = tokens >= 1
        free = now + (taking if is_answered else store.latency)
        if waiting[node]:
            waiting[node] -= 1
            heapq.heappush(begin, (free, node, 0))
        if is_answered:
            tokens -= 1
            end = max(end, free)
            continue
        refused += 1
        try:
            pause = tried.pause_after(_RefusedError("503 Slow Down"), made + 1)
        except DownloadError:
            gave_up += 1
        else:
            heapq.heappush(begin, (free + pause, node, made + 1))
    return Storm(requests=nodes * each, refused=refused, gave_up=gave_up, seconds=end)
