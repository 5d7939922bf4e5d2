"""Samples by id or by key: as they are stored, or transformed as epochs yield them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from lightning_streaming.cache import ShardCache
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.dataset.stream import Stream, StreamDefaults, cache_config_of
from lightning_streaming.dataset.transform import SampleFactory, SampleTransform, global_generators_kept
from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.options.groups import as_group
from lightning_streaming.options.reading import DecodeConfig
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.units import check_path, check_truth

SampleIndex = int | slice | Sequence[Any] | NDArray[np.integer[Any]]
"""Index of a dataset: an id in ``[-size, size)``; or a slice, list or array of ids."""


class ShardAccess:
    """Access to the stored samples of streams by id; :class:`~lightning_streaming.StreamingDataset` adds an order.

    Args:
        source: The shards of all streams.
        on_demand: Whether ``dataset[i]`` reads a sample by its bytes alone where its shard is not here.
    """

    def __init__(self, source: SampleSource, on_demand: bool) -> None:
        self._source = source
        self._on_demand = on_demand

    @property
    def size(self) -> int:
        """Number of samples of all streams before weighting: the range of ``dataset[i]``."""
        return self._source.catalog.num_samples

    @property
    def num_shards(self) -> int:
        """Number of shards of all streams."""
        return len(self._source.catalog.shards)

    @property
    def cache_usage(self) -> int:
        """Bytes of these streams in the cache of this node, including downloads under way."""
        return self._source.quota.usage()

    def get_item(self, sample_id: int, retry: int = 1) -> Any:
        """Return a decoded sample: a dict of column name to value. Override it to read samples differently.

        While it reads, the shard cannot be evicted.

        Args:
            sample_id: Id in ``[-size, size)``.
            retry: Number of times to download the shard again if it is damaged on this node, or has vanished.

        Raises:
            SampleIndexError: The id is out of range.
            FormatError: The shard or the sample is damaged.
            StorageError: The shard could not be fetched.
        """
        shard, index = self._source.catalog.find(sample_id)
        return self._source.read(shard, index, alone=self._on_demand, retry=retry)

    def __getitem__(self, index: SampleIndex) -> Any:
        """Return a sample by id, as :meth:`get_item` does; for a slice, list or array a list of ``self[i]``.

        Args:
            index: An id in ``[-size, size)``; or a slice, list or array of ids.

        Raises:
            SampleIndexError: An id is out of range.
            ConfigError: The index is of another type.
        """
        if isinstance(index, (int, np.integer)):
            return self.get_item(int(index))
        return self._listed(index)

    def prepare_shard(self, shard: int, blocking: bool = True) -> bool:
        """Download a shard to this node, for example in ``prepare_data``.

        Args:
            shard: Number of the shard over all streams, in ``[0, num_shards)``.
            blocking: Wait while another process downloads it, or for room.

        Returns:
            Whether the shard is on this node.

        Raises:
            SampleIndexError: There is no such shard.
            StorageError: The download failed.
        """
        return self._source.fetch(self._checked(shard), wait=blocking)

    def evict_shard(self, shard: int) -> bool:
        """Remove the downloaded files of a shard from this node, unless it is in use.

        Args:
            shard: Number of the shard over all streams, in ``[0, num_shards)``.

        Returns:
            Whether files were removed.

        Raises:
            SampleIndexError: There is no such shard.
        """
        return self._source.evict(self._checked(shard))

    def evict_coldest_shard(self) -> int:
        """Remove the least recently used shard of these streams that is not in use.

        Returns:
            Number of the shard over all streams.

        Raises:
            ConfigError: No shard can be removed.
        """
        return self._source.evict_coldest()

    def _listed(self, index: slice | Sequence[Any] | NDArray[np.integer[Any]]) -> list[Any]:
        if not isinstance(index, (slice, list, np.ndarray)):
            raise ConfigError(f"a sample index must be an int, slice, list or array, but got {type(index).__name__}")
        ids = range(*index.indices(self.size)) if isinstance(index, slice) else index
        try:
            return [self[sample_id] for sample_id in ids]
        except RecursionError as error:
            raise ConfigError(
                f"{type(self).__name__}.__getitem__ reads a list or slice, which calls it again for each sample, "
                "without end",
                hint="read one sample at a time there: [super().__getitem__(i) for i in ids]",
            ) from error

    def _checked(self, shard: int) -> int:
        if not 0 <= shard < self.num_shards:
            raise SampleIndexError(f"shard {shard} does not exist", hint=f"the dataset has {self.num_shards} shards")
        return shard


class KeyedAccess(ShardAccess, IterableDataset[Any]):
    """Access to samples by id or key, transformed, or as a subclass makes them.

    Args:
        source: The shards of all streams.
        on_demand: Whether a single sample is read by its bytes alone where its shard is not here.
        transform: Applied to each decoded sample.
        seed_global_rng: Whether to seed the global generators from the sample's key before that.
        shuffle_seed: Key of the randomness of samples that are read by id.

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
        """Function that is applied to decoded samples; may be set before a pass begins.

        A subclass that overrides :meth:`__getitem__` may set it for its own use, as torchvision's datasets do, before
        or after it calls the constructor of this class. The function given to the constructor then still applies.
        """
        return self._own_transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._own_transform = transform
        if "_transform" in vars(self) and not self._is_overridden():
            self._transform = self._transform.replaced(transform)

    def __getitem__(self, index: SampleIndex) -> Any:
        """Return a sample by id, as epochs yield it: decoded by :meth:`get_item`, then transformed.

        Override it to customize samples: epochs, loaders and :meth:`restore_sample` call it. A sample that is read
        outside of these belongs to no epoch; the ``rng`` of a transform is then seeded by the id alone.

        Args:
            index: An id in ``[-size, size)``; or a slice, list or array of ids, for a list of ``self[i]``.

        Raises:
            SampleIndexError: An id is out of range.
            ConfigError: The index is of another type.
        """
        if type(index) is int:  # the fastest check, as most are
            sample = self.get_item(index)
            if self._transform.function is None:
                return sample
            return self._transform.apply(sample, index % self._source.catalog.num_samples, self._seed_by_id)
        if isinstance(index, (int, np.integer)):
            return KeyedAccess.__getitem__(self, int(index))
        return self._listed(index)

    def restore_sample(self, key: SampleKey | Mapping[str, Any]) -> Any:
        """Return a sample exactly as an epoch yielded it, with the same augmentation.

        This works on any machine, and with any dataset of the same class, streams and transform, in any order.

        Args:
            key: From ``StreamingDataLoader(return_keys=True)``, or the dict of its ``as_dict``.

        Returns:
            The result of ``dataset[i]``, with the random numbers of that epoch.

        Raises:
            SampleIndexError: These streams have no such sample.
            ConfigError: ``key`` is not a key.
            FormatError: The shard or the sample is damaged.
            StorageError: The download of the shard failed.
        """
        key = key if isinstance(key, SampleKey) else SampleKey.from_dict(key)
        sample_id = find_sample(self._source.catalog, key)
        make = self._transform.by_id(self.__getitem__, key.shuffle_seed, key.epoch)
        if self._transform.function is None and not self._is_overridden():
            return make(sample_id, key.position)
        with global_generators_kept():
            return make(sample_id, key.position)

    def can_restore_sample(self, key: SampleKey | Mapping[str, Any] | None = None) -> bool:
        """Return whether :meth:`restore_sample` finds the sample of a key; True without a key.

        This reads the indexes of the streams, and no shard.

        Raises:
            ConfigError: ``key`` is not a key.
        """
        if key is None:
            return True
        try:
            find_sample(self._source.catalog, key if isinstance(key, SampleKey) else SampleKey.from_dict(key))
        except SampleIndexError:
            return False
        return True

    def _sample_factory(self, shuffle_seed: int, epoch: int) -> SampleFactory:
        """Return how samples of an epoch are made: by :meth:`__getitem__` if a subclass overrides it."""
        if self._is_overridden():
            make = self._transform.by_id(self.__getitem__, shuffle_seed, epoch)
            return SampleFactory(transform=None, make=make, name=f"dataset[i] of {type(self).__name__}")
        return SampleFactory(transform=self._transform.keyed(shuffle_seed, epoch), make=None, name="transform")

    def _is_overridden(self) -> bool:
        """Return whether a subclass changes how samples are made."""
        kind = type(self)
        is_own = kind.__getitem__ is KeyedAccess.__getitem__ and kind.get_item is ShardAccess.get_item
        return not is_own or "get_item" in vars(self)


def find_sample(catalog: Catalog, key: SampleKey) -> int:
    """Return the id of a key's sample.

    Raises:
        SampleIndexError: There is no such sample, or it is not selected.
    """
    if key.stream not in catalog.stream_names:
        raise SampleIndexError(
            f"the key's stream {key.stream!r} does not exist",
            hint=f"there are {catalog.stream_names}",
            stream=key.stream,
        )
    stream = catalog.stream_names.index(key.stream)
    sizes = catalog.indexes[stream].samples_per_shard()
    if not 0 <= key.shard < len(sizes):
        raise SampleIndexError(
            f"the key's shard {key.shard} of stream {key.stream!r} is not one of its {len(sizes)}", stream=key.stream
        )
    if not 0 <= key.sample_index < sizes[key.shard]:
        raise SampleIndexError(
            f"the key's sample {key.sample_index} of shard {key.shard} of stream {key.stream!r} is not one of its "
            f"{sizes[key.shard]}",
            stream=key.stream,
            sample=key.sample_index,
        )
    sample_id = catalog.id_of(catalog.first_shard(stream) + key.shard, key.sample_index)
    if sample_id is None:
        raise SampleIndexError(
            f"the key's sample {key.sample_index} of shard {key.shard} of stream {key.stream!r} is there, but "
            "selection leaves it out of this dataset",
            stream=key.stream,
            sample=key.sample_index,
        )
    return sample_id


@public()
@suggests_names
class LocalDataset(ShardAccess, Dataset[Any]):
    """Map-style dataset of a local directory, for torch's ``DataLoader`` and samplers.

    Creating one does no I/O: the index is read at the first ``len`` or ``[i]``. It has no position and no ranks; for
    training use :class:`~lightning_streaming.StreamingDataset`.

    Args:
        local: Directory of the dataset.
        split: Subdirectory of it, like "train".
        allow_unsafe_types: Whether columns may be unpickled. Unpickling runs code found in the data.
        columns: Names of the columns to read. None: all.
        decode: Decoding of columns of images: a :class:`~lightning_streaming.DecodeConfig` without threads, like
            ``{"columns": {"image": "array"}}``. See docs/images.md.

    Raises:
        ConfigError: ``columns`` is not a list of names, or ``decode`` cannot be.
    """

    def __init__(
        self,
        local: str | Path,
        split: str | None = None,
        *,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
        decode: DecodeConfig | Mapping[str, Any] | None = None,
    ) -> None:
        stream = Stream(local=check_path("local", local, "a directory"), split=split)
        check_truth("allow_unsafe_types", allow_unsafe_types)
        self.local = local
        self.split = split or ""
        cache = ShardCache(cache_config_of(stream, "0", StreamDefaults()))
        decoding = as_group(DecodeConfig, decode) or DecodeConfig()
        if decoding.threads:
            raise ConfigError(
                "decode.threads is of a StreamingDataset; a LocalDataset has none", option="decode.threads"
            )
        source = SampleSource({"0": cache}, allow_unsafe_types, columns, decode=decoding.columns)
        super().__init__(source, on_demand=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.size

    @property
    def num_samples(self) -> int:
        """Return ``len(dataset)``."""
        return self.size

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """Entries of the index, one for each shard."""
        return self._source.catalog.shards

    def close(self) -> None:
        """Unmap every shard. The dataset can be used again; it reopens what it needs."""
        self._source.close()
