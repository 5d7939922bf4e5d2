"""Single samples made again from their keys: with their transform and its randomness, without order or epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.rng import global_generators_kept
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.loading.shard_access import ShardAccess
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.transform import keyed_transform


class KeyedAccess(ShardAccess, IterableDataset[Any]):
    """What the streams of a dataset hold, transformed.

    Args:
        source: The shards of all streams.
        on_demand: Whether a single sample is read by its bytes alone where its shard is not here.
        transform: Applied to each decoded sample.
        seed_global_rng: Whether to seed the global generators from the sample's key before that.

    Raises:
        ConfigError: ``transform`` is no function.
    """

    def __init__(
        self, source: SampleSource, on_demand: bool, transform: Callable[..., Any] | None, seed_global_rng: bool
    ) -> None:
        super().__init__(source, on_demand)
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform must be a function of a sample, but got {transform!r}")
        self.transform = transform
        self.seed_global_rng = seed_global_rng

    def restore_sample(self, key: SampleKey | Mapping[str, Any]) -> Any:
        """The very sample that an epoch handed out, augmentation included; on any machine, and from any dataset of
        the same streams and transform, whatever its order.

        Args:
            key: From ``StreamingDataLoader(with_keys=True)``, or what its ``as_dict`` gave.

        Returns:
            What the transform makes of it; the decoded sample if there is none.

        Raises:
            SampleIndexError: These streams have no such sample.
            ConfigError: This is no key.
            FormatError: The shard or the sample is damaged.
            StorageError: The shard could not be fetched.
        """
        key = key if isinstance(key, SampleKey) else SampleKey.from_dict(key)
        shard = find_shard(self.catalog, key)
        sample = self._source.read(shard, key.index, alone=self._on_demand)
        transform = keyed_transform(self.transform, self.seed_global_rng, key.shuffle_seed, key.epoch)
        if transform is None:
            return sample
        with global_generators_kept():
            return transform(sample, key.position)

    def can_restore_sample(self, key: SampleKey | Mapping[str, Any] | None = None) -> bool:
        """Whether :meth:`restore_sample` finds the key's sample; without a key, whether it works at all, as it does.

        Reads the indexes of the streams, no shard.

        Raises:
            ConfigError: This is no key.
        """
        if key is None:
            return True
        try:
            find_shard(self.catalog, key if isinstance(key, SampleKey) else SampleKey.from_dict(key))
        except SampleIndexError:
            return False
        return True


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
