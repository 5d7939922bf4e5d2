"""Single samples, as an epoch hands them out: by id, or again from their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.making import Making
from lightning_streaming.loading.rng import global_generators_kept
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.loading.shard_access import SampleIndex, ShardAccess
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.transform import SampleTransform


class KeyedAccess(ShardAccess, IterableDataset[Any]):
    """What the streams of a dataset hold, made what it is to be: transformed, or as a subclass says.

    Args:
        source: The shards of all streams.
        on_demand: Whether a single sample is read by its bytes alone where its shard is not here.
        transform: Applied to each decoded sample.
        seed_global_rng: Whether to seed the global generators from the sample's key before that.
        shuffle_seed: Key of the randomness of samples that are asked for by id.

    Raises:
        ConfigError: ``transform`` is no function.
    """

    def __init__(
        self,
        source: SampleSource,
        on_demand: bool,
        transform: Callable[..., Any] | None,
        seed_global_rng: bool,
        shuffle_seed: int,
    ) -> None:
        super().__init__(source, on_demand)
        self._transform = SampleTransform(transform, seed_global_rng)
        set_before = vars(self).get("_own_transform")
        self._own_transform = transform
        if set_before is not None:
            self.transform = set_before
        self._seed_by_id = shuffle_seed

    @property
    def transform(self) -> Any:
        """The function that decoded samples go through; may be set before a pass begins.

        A subclass that overrides :meth:`__getitem__` may set it for its own use, as those of torchvision do, before or
        after it calls this class's constructor: what is applied before stays what the constructor was given.
        """
        return self._own_transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._own_transform = transform
        if "_transform" in vars(self) and not self._is_overridden():
            self._transform = self._transform.replaced(transform)

    def __getitem__(self, index: SampleIndex) -> Any:
        """Samples by id, as an epoch hands them out: decoded by :meth:`get_item`, then transformed.

        To be overridden where samples are to be something else: epochs, loaders and :meth:`restore_sample` go through
        it. Outside of these a sample belongs to no epoch; a transform's ``rng`` is then keyed by the id alone.

        Args:
            index: An id in ``[-size, size)``; or a slice, list or array of such, which gives a list of ``self[i]``.

        Raises:
            SampleIndexError: An id is out of range.
            ConfigError: The index is of another type.
        """
        if type(index) is int:  # told soonest, as most are
            sample = self.get_item(index)
            if self._transform.function is None:
                return sample
            return self._transform.apply(sample, index % self._source.catalog.num_samples, self._seed_by_id)
        if isinstance(index, (int, np.integer)):
            return KeyedAccess.__getitem__(self, int(index))
        return self._listed(index)

    def restore_sample(self, key: SampleKey | Mapping[str, Any]) -> Any:
        """The very sample that an epoch handed out, augmentation included; on any machine, and from any dataset of
        the same class, streams and transform, whatever its order.

        Args:
            key: From ``StreamingDataLoader(with_keys=True)``, or what its ``as_dict`` gave.

        Returns:
            What ``dataset[i]`` gives for it, with the randomness that it had.

        Raises:
            SampleIndexError: These streams have no such sample.
            ConfigError: This is no key.
            FormatError: The shard or the sample is damaged.
            StorageError: The shard could not be fetched.
        """
        key = key if isinstance(key, SampleKey) else SampleKey.from_dict(key)
        shard = find_shard(self._source.catalog, key)
        sample_id = int(self._source.catalog.first_sample_of_shard[shard]) + key.index
        make = self._transform.asked(self.__getitem__, key.shuffle_seed, key.epoch)
        if self._transform.function is None and not self._is_overridden():
            return make(sample_id, key.position)
        with global_generators_kept():
            return make(sample_id, key.position)

    def can_restore_sample(self, key: SampleKey | Mapping[str, Any] | None = None) -> bool:
        """Whether :meth:`restore_sample` finds the key's sample; without a key, whether it works at all, as it does.

        Reads the indexes of the streams, no shard.

        Raises:
            ConfigError: This is no key.
        """
        if key is None:
            return True
        try:
            find_shard(self._source.catalog, key if isinstance(key, SampleKey) else SampleKey.from_dict(key))
        except SampleIndexError:
            return False
        return True

    def _making(self, shuffle_seed: int, epoch: int) -> Making:
        """How samples of an epoch are made: by way of :meth:`__getitem__` where a subclass has a say in it."""
        if self._is_overridden():
            make = self._transform.asked(self.__getitem__, shuffle_seed, epoch)
            return Making(transform=None, make=make, name=f"dataset[i] of {type(self).__name__}")
        return Making(transform=self._transform.keyed(shuffle_seed, epoch), make=None, name="transform")

    def _is_overridden(self) -> bool:
        """Whether samples are not, or need not be, what this class makes of them."""
        kind = type(self)
        is_own = kind.__getitem__ is KeyedAccess.__getitem__ and kind.get_item is ShardAccess.get_item
        return not is_own or "get_item" in vars(self)


def find_shard(catalog: Catalog, key: SampleKey) -> int:
    """The shard, counted over all streams, that holds a key's sample.

    Raises:
        SampleIndexError: There is no such sample.
    """
    if key.stream not in catalog.stream_names:
        raise SampleIndexError(f"the key's stream {key.stream!r} does not exist; there are {catalog.stream_names}")
    stream = catalog.stream_names.index(key.stream)
    sizes = catalog.shard_sizes_per_stream[stream]
    if not 0 <= key.shard < len(sizes):
        raise SampleIndexError(f"the key's shard {key.shard} of stream {key.stream!r} is not one of its {len(sizes)}")
    if not 0 <= key.index < sizes[key.shard]:
        raise SampleIndexError(
            f"the key's sample {key.index} of shard {key.shard} of stream {key.stream!r} is not one of its "
            f"{sizes[key.shard]}"
        )
    return sum(catalog.shards_per_stream[:stream]) + key.shard
