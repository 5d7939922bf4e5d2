"""The streams of a dataset: what was asked of each, and what came of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_streaming.cache import CacheConfig
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.loading.epochs import Epochs
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.stream import Stream, StreamDefaults
from lightning_streaming.replaced_names import tells_replacements


@tells_replacements
class DatasetStream:
    """A stream in its dataset, with the dataset's defaults filled in and its share of an epoch worked out.

    Making one reads nothing; :attr:`proportion`, :attr:`repeat`, :attr:`choose` and the shards need the indexes of all
    streams. :attr:`asked` is the :class:`~lightning_streaming.Stream` that it was made of, unchanged.
    """

    def __init__(
        self, name: str, place: int, asked: Stream, defaults: StreamDefaults, epochs: Epochs, source: SampleSource
    ) -> None:
        self.name = name
        """In the dataset."""
        self.place = place
        """Among its streams, from 0."""
        self.asked = asked
        """What the user wrote."""
        self._defaults = defaults
        self._epochs = epochs
        self._source = source

    def __repr__(self) -> str:
        return f"<{self.name!r}: {self.asked!r}>"

    @property
    def remote(self) -> str | None:
        """Where its shards come from, without :attr:`split`."""
        return self.asked.remote

    @property
    def local(self) -> str | None:
        """The directory of this node that was asked for, without :attr:`split`; None for the default one."""
        return self.asked.local

    @property
    def split(self) -> str:
        """Subdirectory of both; empty for none."""
        return (self._defaults.split if self.asked.split is None else self.asked.split) or ""

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """Arguments of its filesystem."""
        return self.asked.storage_options

    @property
    def download_retry(self) -> int:
        """Attempts per file after the first."""
        return self.cache_config().download_retry

    @property
    def download_timeout(self) -> float:
        """Seconds without a byte arriving after which an attempt ends."""
        return self.cache_config().download_timeout

    @property
    def validate_hash(self) -> str | None:
        """Hash to check downloaded files with; None for one that the index offers."""
        return self.cache_config().validate_hash

    @property
    def keep_zip(self) -> bool:
        """Whether compressed files are kept beside the decompressed ones."""
        return self.cache_config().keep_zip

    @property
    def proportion(self) -> float:
        """Its share of an epoch; those of all streams sum to 1."""
        return self._epochs.weights.proportion[self.place]

    @property
    def repeat(self) -> float:
        """How often an epoch reads each of its samples, on average."""
        return self._epochs.weights.repeat[self.place]

    @property
    def choose(self) -> int:
        """Samples that an epoch draws from it."""
        return self._epochs.weights.choose[self.place]

    def get_shards(self) -> Sequence[ShardInfo]:
        """What its index says of each of its shards, in order."""
        return self._source.catalog.indexes[self.place].shards

    def prepare_shard(self, shard: int | ShardInfo, blocking: bool = True) -> bool:
        """Have one of its shards on this node.

        Args:
            shard: Of :meth:`get_shards`, or its place there.
            blocking: Whether to wait while another process fetches it, or for room.

        Returns:
            Whether it is here.

        Raises:
            StorageError: It could not be fetched.
        """
        place = self.get_shards().index(shard) if isinstance(shard, ShardInfo) else range(len(self.get_shards()))[shard]
        return self._source.fetch(sum(self._source.catalog.shards_per_stream[: self.place]) + place, wait=blocking)

    def cache_config(self) -> CacheConfig:
        """Where and how its files are fetched."""
        return self.asked.cache_config(self.name, self._defaults)


class DatasetStreams(Mapping[str, DatasetStream]):
    """The streams of a dataset by name; by place too, so ``streams[0]`` is the first.

    It is a mapping, so iterating gives names; ``streams.values()`` are the streams.

    Args:
        asked: What the user wrote, by name.
        defaults: What a stream uses unless it says otherwise.
        epochs: Knows each one's share.
        source: Knows their shards.
    """

    def __init__(
        self, asked: Mapping[str, Stream], defaults: StreamDefaults, epochs: Epochs, source: SampleSource
    ) -> None:
        self._streams = {
            name: DatasetStream(name, place, stream, defaults, epochs, source)
            for place, (name, stream) in enumerate(asked.items())
        }

    def __getitem__(self, key: str | int) -> DatasetStream:
        names = list(self._streams)
        if isinstance(key, int) and -len(names) <= key < len(names):
            return self._streams[names[key]]
        if isinstance(key, str) and key in self._streams:
            return self._streams[key]
        raise KeyError(f"no stream {key!r}; there are {', '.join(map(repr, names))}, by place from 0")

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {stream.asked!r}' for name, stream in self._streams.items())}}}"


Asked = Sequence[Stream | DatasetStream] | Mapping[str, Stream] | Mapping[str, DatasetStream]
"""Streams as a user gives them: new ones, or those of another dataset."""


def as_asked(streams: Asked | None) -> Sequence[Stream] | Mapping[str, Stream] | None:
    """Streams as they were asked for; those of another dataset too, which its seed and indexes have no part in."""
    if isinstance(streams, Mapping):
        return {name: _as_asked(stream) for name, stream in streams.items()}
    return None if streams is None else [_as_asked(stream) for stream in streams]


def _as_asked(stream: Stream | DatasetStream) -> Stream:
    return stream.asked if isinstance(stream, DatasetStream) else stream
