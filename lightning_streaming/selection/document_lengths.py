"""Lengths of samples in tokens.

StreamLengths   the lengths of the stored samples of one stream: four bytes a sample, mapped
CatalogLengths  lengths by sample id, over all streams and their selections

The file of a stream's lengths holds the lengths, then 32 bytes: their digest, their sum, the number of shards, and a
checksum of these three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.selection_files import map_bits
from lightning_streaming.errors import ConfigError, ShardCorruptError, StorageError
from lightning_streaming.formats.arrays.npy import header_of
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.waits import IN_LOG, ProgressDisplay

MOST_TOKENS = 2**32 - 1
"""Most tokens of a sample."""
_AT_ONCE = 1 << 16
"""Sample ids that are looked up together, so that temporary arrays stay in the processor's cache."""
_SUMMED_AT_ONCE = 1 << 20
_FACTS = np.dtype([("digest", "=u8"), ("tokens", "=u8"), ("shards", "=u8"), ("checksum", "=u8")])
_FACT_WORDS = _FACTS.itemsize // 4


class StreamLengths:
    """Number of tokens of each stored sample of a stream.

    Args:
        values: Of shape (samples,), in the order of the stream's index. May be a file's, mapped into memory.
        digest: Digest of the values, 16 hexadecimal digits; None to compute it when it is used.
        num_tokens: Sum of the values; None to compute it when it is used.
        key: Key of the lengths, from :meth:`LengthsRequest.key`; empty for none.
        cached_at: The file that is mapped; None for values in memory, or a part of a file.
    """

    def __init__(
        self,
        values: NDArray[np.uint32],
        digest: str | None = None,
        num_tokens: int | None = None,
        key: str = "",
        cached_at: Path | None = None,
    ) -> None:
        # Indexing a plain array is faster than indexing a memmap.
        self.values: NDArray[np.uint32] = np.asarray(values).view()
        self.values.setflags(write=False)
        self.key, self.cached_at = key, cached_at
        self._digest, self._num_tokens = digest, num_tokens
        self._digests_of_first: dict[int, str] = {}

    def __len__(self) -> int:
        """Return the number of stored samples."""
        return len(self.values)

    @property
    def digest(self) -> str:
        """Digest of the values, 16 hexadecimal digits."""
        if self._digest is None:
            self._digest = _digest_of(self.values)
        return self._digest

    def digest_of_first(self, num_stored: int) -> str:
        """Return the digest of the first values; that of all values is :attr:`digest`.

        Args:
            num_stored: Number of values; each digest is computed once.
        """
        if num_stored == len(self):
            return self.digest
        if num_stored not in self._digests_of_first:
            self._digests_of_first[num_stored] = _digest_of(self.values[:num_stored])
        return self._digests_of_first[num_stored]

    @property
    def num_tokens(self) -> int:
        """Tokens of all stored samples."""
        if self._num_tokens is None:
            self._num_tokens = sum(
                int(self.values[first : first + _SUMMED_AT_ONCE].sum(dtype=np.int64))
                for first in range(0, len(self), _SUMMED_AT_ONCE)
            )
        return self._num_tokens

    def is_whole(self) -> bool:
        """Check the values against their digest, which mapping a file does not do."""
        return self._digest in (None, _digest_of(self.values))

    def head(self, num_stored: int) -> StreamLengths:
        """Return the lengths of the first ``num_stored`` samples, in the same memory."""
        return StreamLengths(self.values[:num_stored])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the file itself.
        if self.cached_at is not None:
            return _mapped_again, (self.cached_at, len(self))
        return StreamLengths, (self.values, self._digest, self._num_tokens, self.key)


def _digest_of(values: NDArray[np.uint32]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=8).hexdigest()


# --- the file of a stream's lengths ---


def file_shape(num_samples: int) -> tuple[int]:
    """Return the shape of the uint32 array in a file of lengths."""
    return (num_samples + _FACT_WORDS,)


def write_facts(array: NDArray[np.uint32], num_shards: int) -> None:
    """Write the facts after the values of a new file.

    Args:
        array: Array of shape :func:`file_shape`, with the values filled in.
        num_shards: Number of shards that the values belong to.
    """
    lengths = StreamLengths(array[:-_FACT_WORDS])
    facts = np.zeros(1, _FACTS)
    facts[0] = (int(lengths.digest, 16), lengths.num_tokens, num_shards, 0)
    facts["checksum"] = _checksum(facts)
    array[-_FACT_WORDS:] = facts.view(np.uint32)


def map_lengths(path: Path, num_samples: int) -> StreamLengths | None:
    """Map a file of lengths; return None if it is missing, damaged, or has another number of samples."""
    array = map_bits(path)
    if array is None or array.dtype != np.uint32 or array.shape != file_shape(num_samples):
        return None
    facts = np.asarray(array)[-_FACT_WORDS:].view(_FACTS)
    if facts["checksum"][0] != _checksum(facts):
        return None
    digest, tokens = int(facts["digest"][0]), int(facts["tokens"][0])
    return StreamLengths(array[:-_FACT_WORDS], f"{digest:016x}", tokens, path.stem, path)


def read_num_shards(path: Path) -> int | None:
    """Read the number of shards from a file of lengths, without mapping it; return None for other files."""
    try:
        with path.open("rb") as file:
            header = header_of(file)
            if header.dtype != np.uint32 or len(header.shape) != 1:
                return None
            file.seek(header.stop + 4 * header.shape[0] - _FACTS.itemsize)
            facts = np.frombuffer(file.read(_FACTS.itemsize), _FACTS)
    except (OSError, ValueError, ShardCorruptError):
        return None
    return int(facts["shards"][0]) if len(facts) and facts["checksum"][0] == _checksum(facts) else None


def _checksum(facts: NDArray[np.void]) -> int:
    return crc32(facts.tobytes()[: -_FACTS["checksum"].itemsize])


def _mapped_again(path: Path, num_samples: int) -> StreamLengths:
    lengths = map_lengths(path, num_samples)
    if lengths is None:
        raise StorageError(
            f"the lengths of samples in {path} were removed, or are damaged",
            hint="start the run again to count them",
            path=str(path),
        )
    return lengths


# --- lengths of a dataset ---


class CatalogLengths:
    """Number of tokens of samples, by sample id.

    Args:
        catalog: Catalog that maps ids to stored samples.
        streams: The lengths of each stream, by name.
        shown: How waits for computations over the lengths are shown.

    Raises:
        ConfigError: A stream has no lengths, or another number of lengths than of stored samples.
    """

    def __init__(self, catalog: Catalog, streams: Mapping[str, StreamLengths], shown: ProgressDisplay = IN_LOG) -> None:
        for name, index in zip(catalog.stream_names, catalog.indexes, strict=True):
            if name not in streams or len(streams[name]) != index.num_samples:
                known = f"{len(streams[name])} lengths" if name in streams else "no lengths"
                raise ConfigError(f"stream {name!r} stores {index.num_samples} samples, but has {known}", stream=name)
        self.streams = tuple(streams[name] for name in catalog.stream_names)
        self._selections = catalog.selections
        self._firsts, self._samples = catalog.first_ids, catalog.samples_per_stream
        self._gathered: dict[int, NDArray[np.uint32]] = {}
        self.shown = shown

    def gather(self) -> None:
        """Copy the lengths of selected samples into memory, 4 bytes each, for streams with a selection.

        This pays if most of them are looked up: a lookup is then as fast as without a selection. Streams without a
        selection stay mapped.
        """
        for stream, selection in enumerate(self._selections):
            if selection is not None and stream not in self._gathered:
                gathered, filled = np.empty(len(selection), np.uint32), 0
                for some in self._selected(stream):
                    gathered[filled : filled + len(some)] = some
                    filled += len(some)
                self._gathered[stream] = gathered

    def release(self) -> None:
        """Free the lengths that :meth:`gather` copied."""
        self._gathered = {}

    def __call__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the lengths of some samples.

        Args:
            sample_ids: Each in ``[0, catalog.num_samples)``; of shape (samples,).

        Returns:
            Tokens, of the same shape.
        """
        if len(self.streams) == 1 and self._selections[0] is None:
            return self.streams[0].values.take(sample_ids)
        lengths = np.empty(len(sample_ids), np.uint32)
        for start in range(0, len(sample_ids), _AT_ONCE):
            self._look_up(sample_ids[start : start + _AT_ONCE], lengths[start : start + _AT_ONCE])
        return lengths

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of the lengths of all stored samples of each stream, 16 hexadecimal digits."""
        return tuple(lengths.digest for lengths in self.streams)

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of the selected samples of each stream."""
        return tuple(
            lengths.num_tokens
            if selection is None
            else sum(int(some.sum(dtype=np.int64)) for some in self._selected(stream))
            for stream, (lengths, selection) in enumerate(zip(self.streams, self._selections, strict=True))
        )

    def _selected(self, stream: int) -> Iterator[NDArray[np.uint32]]:
        """Yield the lengths of a stream's selected samples in order, in chunks."""
        lengths, selection = self.streams[stream].values, self._selections[stream]
        assert selection is not None, "the stream has a selection"
        for first in range(0, len(lengths), _SUMMED_AT_ONCE):
            some = lengths[first : first + _SUMMED_AT_ONCE]
            yield some[selection.has(np.arange(first, first + len(some)))]

    def _look_up(self, sample_ids: NDArray[np.int64], lengths: NDArray[np.uint32]) -> None:
        smallest, largest = int(sample_ids.min()), int(sample_ids.max())
        for stream, (first, samples) in enumerate(zip(self._firsts, self._samples, strict=True)):
            if largest < first or smallest >= first + samples:
                continue
            here: Any = slice(None)
            if smallest < first or largest >= first + samples:
                here = np.flatnonzero((sample_ids >= first) & (sample_ids < first + samples))
            numbers, selection = sample_ids[here] - first, self._selections[stream]
            if stream in self._gathered:
                lengths[here] = self._gathered[stream].take(numbers)
            else:
                stored = numbers if selection is None else selection.stored(numbers)
                lengths[here] = self.streams[stream].values.take(stored)
