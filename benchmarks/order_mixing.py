"""How well an order mixes, and how unevenly it asks for shards: numbers from sample ids and shard sizes alone.

Mixing is measured in the batches that a model sees.

Each measure is an entropy (Shannon 1948: the mean of ``-ln p``, in nats) of labels in one global batch, averaged over
the batches of an epoch:

    shards      of the shard of each sample: does a batch draw on many shards?
    distances   of ``(next id - id) mod num_samples`` between neighbours, in 256 bins of equal width: does knowing one
                sample tell where the next one lies? Sees regular strides, which leave the shards of a batch diverse
    epochs      of the batch that each sample was in an epoch earlier: does a sample meet others this time?

Taking the entropy of the distances between neighbours is a known way to tell how well a deck of cards was shuffled, and
the reference's simulator applies it to a whole epoch. Here it is taken in each batch: over an epoch, even an order that
reads one shard after another has distances of all lengths. Bins of equal width because they tell a batch that covers
the data from one that covers a corner; of logarithmic width they would look alike.

A number in nats says little, as it depends on the batch size and the data. So it is divided by that of a uniform
permutation of the same samples in batches of the same size. The score is 0 where all samples of a batch have the same
label and about 1 where they are drawn at random; more than 1 is an order that is more even than chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.quality import Visits, entropy_of_rows, shards_of

_DISTANCE_BINS = 256
_ENOUGH_SAMPLES = 200_000
"""A uniform permutation of fewer samples is drawn several times, so that its entropies are not those of one draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """Mean entropies of the batches of an epoch: in nats, or relative to another order's."""

    shards: float
    """Of the shards that a batch draws on."""
    distances: float
    """Of the distances in sample ids between neighbours in a batch."""
    epochs: float
    """Of the batches that a batch's samples were in an epoch earlier."""

    def relative_to(self, uniform: Mixing) -> Mixing:
        """Each entropy as a share of another order's; 1 where the other's is 0, as there is nothing to mix."""
        return Mixing(
            shards=_ratio(self.shards, uniform.shards),
            distances=_ratio(self.distances, uniform.distances),
            epochs=_ratio(self.epochs, uniform.epochs),
        )


def mixing(ids: NDArray[np.int64], ids_before: NDArray[np.int64], shard_sizes: NDArray[np.int64]) -> Mixing:
    """Measure how well an epoch mixes.

    Args:
        ids: Sample ids of each global batch, in the order of the sequence, of shape (batches, global batch size).
            Batches with a negative id, which stands for no sample, are left out.
        ids_before: The same of the epoch before; batches may be of another size.
        shard_sizes: Samples in each shard; ids count from 0 at the first.

    Returns:
        Entropies in nats.

    Raises:
        ConfigError: No batch is full.
        SampleIndexError: An id lies beyond the last shard.
    """
    ids, ids_before = _full_batches(ids), _full_batches(ids_before)
    num_samples = int(shard_sizes.sum())
    return Mixing(
        shards=entropy_of_rows(shards_of(ids, shard_sizes)),
        distances=entropy_of_rows(_binned_distances(ids, num_samples)),
        epochs=entropy_of_rows(_batches_of(ids_before, num_samples)[ids]),
    )


def uniform_mixing(ids: NDArray[np.int64], shard_sizes: NDArray[np.int64], seed: int = 0) -> Mixing:
    """Measure uniform permutations of the same samples in the same batches, one for each of two epochs.

    It does not depend on the order of ``ids``, so one serves all orders of the same samples.

    Args:
        ids: As for :func:`mixing`.
        shard_sizes: As for :func:`mixing`.
        seed: Of the permutations.

    Returns:
        Entropies in nats.

    Raises:
        ConfigError: No batch is full.
        SampleIndexError: An id lies beyond the last shard.
    """
    ids = _full_batches(ids)
    generator = np.random.default_rng(seed)
    draws = []
    for _ in range(max(1, _ENOUGH_SAMPLES // ids.size)):
        now, before = (generator.permutation(ids.ravel()).reshape(ids.shape) for _ in range(2))
        draws.append(mixing(now, before, shard_sizes))
    return Mixing(
        shards=math.fsum(draw.shards for draw in draws) / len(draws),
        distances=math.fsum(draw.distances for draw in draws) / len(draws),
        epochs=math.fsum(draw.epochs for draw in draws) / len(draws),
    )


def _full_batches(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    full = ids[(ids >= 0).all(axis=1)]
    if full.size == 0:
        raise ConfigError(f"mixing is measured in full batches, but none of {len(ids)} is; use smaller batches")
    return full


def _binned_distances(ids: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Distances forward from each sample to the next of its batch, around the end, as bins in [0, 256)."""
    distances = np.diff(ids, axis=1) % num_samples
    # int64 holds ids up to 2**55 times the bins.
    return distances * _DISTANCE_BINS // num_samples


def _batches_of(ids: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """The batch that each sample is in; the last one where there are several, -1 where there is none."""
    batches = np.full(num_samples, -1, np.int64)
    batches[ids] = np.arange(len(ids))[:, np.newaxis]
    return batches


def _ratio(measured: float, uniform: float) -> float:
    return measured / uniform if uniform > 0 else 1.0


def needed_within(visits: Visits, weights: NDArray[np.int64], num_batches: int) -> int:
    """How much the first ``num_batches`` batches use; with 1, what must arrive before the first batch is complete.

    Args:
        visits: Of one node and epoch.
        weights: What each shard counts, of shape (num_shards,): its bytes, or ones to count shards.
        num_batches: From the start of the epoch.
    """
    used = visits.used()
    return int(weights[used[visits.first_batches()[used] < num_batches]].sum())


def largest_burst(visits: Visits, run: int) -> float:
    """How unevenly new shards come: the most in any ``run`` consecutive batches, relative to the mean of such runs.

    The first ``run`` batches are left out, as every order that mixes must open many shards there; :func:`needed_within`
    tells about them. 1 is perfectly even; 0 where all shards are first used at the start.

    Args:
        visits: Of one node and epoch.
        run: Batches looked at together, at least 1: about as many as are prefetched.

    Raises:
        ConfigError: ``run`` is less than 1.
    """
    if run < 1:
        raise ConfigError(f"bursts are looked for in runs of at least one batch, but got {run}")
    used = visits.used()
    new_shards = np.bincount(visits.first_batches()[used], minlength=visits.num_batches)
    new_before = np.concatenate([[0], np.cumsum(new_shards)])[run:]  # [t]: before batch run + t
    in_run = new_before[run:] - new_before[:-run]
    if in_run.size == 0 or used.size == 0:
        return 0.0
    return float(in_run.max()) / (len(used) * run / visits.num_batches)


def lru_downloads(visits: Visits, shard_bytes: NDArray[np.int64], limit: int) -> int:
    """Count downloads of a cache, empty at first, that gives up the shards used longest ago.

    All shards of a batch are needed together: they stay until the batch is done, even beyond the limit. Among shards
    last used in the same batch, lower numbers go first.

    Args:
        visits: Of one node and epoch.
        shard_bytes: Bytes of each shard, of shape (num_shards,).
        limit: Bytes that the cache may hold.

    Returns:
        Downloads; the number of shards that the node uses where none is fetched twice.

    Raises:
        ConfigError: The limit is negative.
    """
    if limit < 0:
        raise ConfigError(f"a cache limit must not be negative, but got {limit}", option="cache_limit")
    used = visits.used()
    if shard_bytes[used].sum() <= limit:
        return len(used)
    cache = _LruCache(visits, shard_bytes, limit)
    return sum(cache.read(batch) for batch in range(visits.num_batches))


class _LruCache:
    """A cache that is read batch by batch.

    Instead of a list of shards by last use, which each visit would have to change, batches are passed a second time,
    far behind: shards that a batch was the last to use are evicted when its turn comes. So each visit is read twice,
    in numpy, for any number of shards.
    """

    def __init__(self, visits: Visits, shard_bytes: NDArray[np.int64], limit: int) -> None:
        self._shards = visits.shards
        self._starts = np.searchsorted(visits.batches, np.arange(visits.num_batches + 1)).tolist()
        self._bytes = shard_bytes
        self._limit = limit
        self._last_use = np.full(visits.num_shards, -1, np.int64)
        self._cached = np.zeros(visits.num_shards, np.bool_)
        self._size = 0
        self._oldest = 0
        """No cached shard was last used before this batch."""

    def read(self, batch: int) -> int:
        """Use a batch's shards, the batches before having been read; returns how many had to be downloaded."""
        shards = self._of(batch)
        self._last_use[shards] = batch
        missing = shards[~self._cached[shards]]
        if missing.size:
            self._cached[missing] = True
            self._size += int(self._bytes[missing].sum())
            while self._size > self._limit and self._oldest < batch:
                self._evict()
        return len(missing)

    def _of(self, batch: int) -> NDArray[np.int64]:
        return self._shards[self._starts[batch] : self._starts[batch + 1]]

    def _evict(self) -> None:
        """Give up as many of the shards used longest ago as are over the limit; all of them if that is not enough."""
        shards = self._of(self._oldest)
        shards = shards[self._cached[shards] & (self._last_use[shards] == self._oldest)]
        freed = np.cumsum(self._bytes[shards])
        count = int(np.searchsorted(freed, self._size - self._limit)) + 1
        if count >= len(shards):
            count = len(shards)
            self._oldest += 1
        if count:
            self._cached[shards[:count]] = False
            self._size -= int(freed[count - 1])
