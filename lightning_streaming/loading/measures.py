"""What a loader has handed out and what that took: sums over its batches, and the arithmetic of waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class WaitTimes(NamedTuple):
    """For how long whoever consumes the batches waited for them, by reason."""

    download: float = 0
    """Files had to be fetched to this node."""
    decompress: float = 0
    """Files had to be decompressed."""
    decode: float = 0
    """Samples were read, decoded, transformed and collated."""
    queue: float = 0
    """Batches were made, but had still to come from the worker process."""
    start: float = 0
    """A pass began: workers were started, indexes read, the order worked out."""

    @property
    def total(self) -> float:
        """All together."""
        return sum(self)


_NO_WAIT = WaitTimes()
_Seconds = NDArray[np.float64]


def split_wait(
    wait: _Seconds, *, download: _Seconds, decompress: _Seconds, work: _Seconds, are_first: NDArray[np.bool_]
) -> tuple[_Seconds, _Seconds, _Seconds, _Seconds, _Seconds]:
    """Say why the consumer of some batches waited for them. Arrays of shape (batches,), all times in one unit.

    As much of a wait as making the batch took is shared out like that work; a consumer who came late waited for its end
    only, and nobody knows for which part of it. What is left was spent on other things. For example a wait of 8 for a
    batch whose 4 of work were 1 of download and 3 of decoding: 1 and 3, and 4 in the queue.

    Args:
        wait: How long the consumer waited for each batch.
        download: How long the worker that made the batch waited for files.
        decompress: How long it waited for decompression.
        work: How long it took for the batch, both included.
        are_first: Which batches are the first of their pass.

    Returns:
        The fields of :class:`WaitTimes`, for each batch.
    """
    explained = np.minimum(wait, work)
    share = np.divide(explained, work, out=np.zeros_like(work), where=work > 0)
    for_download, for_decompress = download * share, decompress * share
    rest = wait - explained
    start = np.where(are_first, rest, 0.0)
    return for_download, for_decompress, explained - for_download - for_decompress, rest - start, start


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStatistics:
    """What one rank's loader has handed out, and what that took. Times in seconds."""

    batches: int = 0
    samples: int = 0
    samples_per_stream: Mapping[str, int] = field(default_factory=dict)
    sample_bytes: int = 0
    """Bytes of these samples as they are stored uncompressed, counted by the mean of each one's shard."""
    wait: WaitTimes = _NO_WAIT
    """For how long the consumer waited."""
    shards_opened: int = 0
    """How often a worker opened a shard."""
    cache_hits: int = 0
    """How often it was on this node before that worker wanted it; one that was fetched ahead in time is no hit."""
    fetched_bytes: int = 0
    """Bytes that were fetched of the other shards, compressed where they are stored so."""
    shards_open: int = 0
    """Shards that this rank's workers have mapped now."""

    def __add__(self, later: LoaderStatistics) -> LoaderStatistics:
        """Both together; what is open now is as ``later`` has it."""
        return self._combined(later, 1, later.shards_open)

    def since(self, earlier: LoaderStatistics) -> LoaderStatistics:
        """What has come since the same loader said ``earlier``; what is open now stays."""
        return self._combined(earlier, -1, self.shards_open)

    def _combined(self, other: LoaderStatistics, sign: int, shards_open: int) -> LoaderStatistics:
        names = dict.fromkeys((*self.samples_per_stream, *other.samples_per_stream))
        counts = {one.name: getattr(self, one.name) + sign * getattr(other, one.name) for one in _counts()}
        return LoaderStatistics(
            **counts,
            samples_per_stream={
                name: self.samples_per_stream.get(name, 0) + sign * other.samples_per_stream.get(name, 0)
                for name in names
            },
            wait=WaitTimes(*(mine + sign * its for mine, its in zip(self.wait, other.wait, strict=True))),
            shards_open=shards_open,
        )


def _counts() -> list[Any]:
    apart = ("samples_per_stream", "wait", "shards_open")
    return [one for one in fields(LoaderStatistics) if one.name not in apart]
