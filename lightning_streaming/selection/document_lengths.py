"""The length in tokens of every stored sample of a stream.

StreamLengths   the outcome for one stream: four bytes a sample, mapped
CatalogLengths  the same for the sample ids of a dataset, whatever its streams and selections

The file of a stream's lengths holds them one after another, then 32 bytes: a digest of them, their sum, of how many
shards they are, and a checksum of these three.
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
"""Of one sample."""
_AT_ONCE = 1 << 16
"""Sample ids that are looked up together, so that what that takes stays in the processor's cache."""
_SUMMED_AT_ONCE = 1 << 20
_FACTS = np.dtype([("digest", "=u8"), ("tokens", "=u8"), ("shards", "=u8"), ("checksum", "=u8")])
_FACT_WORDS = _FACTS.itemsize // 4


class StreamLengths:
    """How many tokens each stored sample of a stream has.

    Args:
        values: Of shape (samples,), in the order of the stream's index. May be a file's, mapped into memory.
        digest: 16 hexadecimal digits, a name of the values; None to make it when it is asked for.
        num_tokens: Their sum; None likewise.
        key: What :meth:`LengthsRequest.key` calls them; empty for no name.
        kept_at: The file that is mapped; None for values in memory, or a part of a file.
    """

    def __init__(
        self,
        values: NDArray[np.uint32],
        digest: str | None = None,
        num_tokens: int | None = None,
        key: str = "",
        kept_at: Path | None = None,
    ) -> None:
        self.values: NDArray[np.uint32] = np.asarray(
            values
        ).view()  # of which single numbers are had sooner than of a file's
        self.values.setflags(write=False)
        self.key, self.kept_at = key, kept_at
        self._digest, self._num_tokens = digest, num_tokens
        self._digests_of_first: dict[int, str] = {}

    def __len__(self) -> int:
        """Stored samples."""
        return len(self.values)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits: a name of the values."""
        if self._digest is None:
            self._digest = _digest_of(self.values)
        return self._digest

    def digest_of_first(self, num_stored: int) -> str:
        """Return a name of the first values: 16 hexadecimal digits, of all the same as :attr:`digest`.

        Args:
            num_stored: How many values; each number is hashed once.
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
        """Whether the values are those that were made: a file is not looked through as a whole when it is mapped."""
        return self._digest in (None, _digest_of(self.values))

    def head(self, num_stored: int) -> StreamLengths:
        """The lengths of the first ``num_stored`` samples, of the same memory."""
        return StreamLengths(self.values[:num_stored])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the file itself.
        if self.kept_at is not None:
            return _mapped_again, (self.kept_at, len(self))
        return StreamLengths, (self.values, self._digest, self._num_tokens, self.key)


def _digest_of(values: NDArray[np.uint32]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=8).hexdigest()


# --- its file ---


def kept_shape(num_samples: int) -> tuple[int]:
    """Of the array of uint32 that a file of lengths is."""
    return (num_samples + _FACT_WORDS,)


def write_facts(array: NDArray[np.uint32], num_shards: int) -> None:
    """Write what follows the values of a file that is being made.

    Args:
        array: Of the shape :func:`kept_shape`; its values are there.
        num_shards: How many shards they are of.
    """
    made = StreamLengths(array[:-_FACT_WORDS])
    facts = np.zeros(1, _FACTS)
    facts[0] = (int(made.digest, 16), made.num_tokens, num_shards, 0)
    facts["checksum"] = _checksum(facts)
    array[-_FACT_WORDS:] = facts.view(np.uint32)


def map_lengths(path: Path, num_samples: int) -> StreamLengths | None:
    """Map kept lengths; None if there are none of so many samples, or they are damaged."""
    found = map_bits(path)
    if found is None or found.dtype != np.uint32 or found.shape != kept_shape(num_samples):
        return None
    facts = np.asarray(found)[-_FACT_WORDS:].view(_FACTS)
    if facts["checksum"][0] != _checksum(facts):
        return None
    digest, tokens = int(facts["digest"][0]), int(facts["tokens"][0])
    return StreamLengths(found[:-_FACT_WORDS], f"{digest:016x}", tokens, path.stem, path)


def shards_told(path: Path) -> int | None:
    """Of how many shards a file has the lengths, without mapping it; None if it is no file of lengths."""
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
    found = map_lengths(path, num_samples)
    if found is None:
        raise StorageError(
            f"the lengths of samples in {path} were removed, or are damaged",
            hint="start again to make them anew",
            path=str(path),
        )
    return found


# --- of a dataset ---


class CatalogLengths:
    """How many tokens samples have, by sample id.

    Args:
        catalog: Says which stored sample an id is.
        streams: The lengths of each stream, by name.
        shown: How to show waits for what is worked out of them.

    Raises:
        ConfigError: A stream has none, or not as many as it has stored samples.
    """

    def __init__(self, catalog: Catalog, streams: Mapping[str, StreamLengths], shown: ProgressDisplay = IN_LOG) -> None:
        for name, index in zip(catalog.stream_names, catalog.indexes, strict=True):
            if name not in streams or len(streams[name]) != index.num_samples:
                found = f"{len(streams[name])} lengths are" if name in streams else "no lengths are"
                raise ConfigError(
                    f"stream {name!r} stores {index.num_samples} samples, of which {found} known", stream=name
                )
        self.streams = tuple(streams[name] for name in catalog.stream_names)
        self._selections = catalog.selections
        self._firsts, self._samples = catalog.first_ids, catalog.samples_per_stream
        self._gathered: dict[int, NDArray[np.uint32]] = {}
        self.shown = shown

    def gather(self) -> None:
        """Gather the lengths of selected samples in this process's memory, 4 bytes each, of streams with a selection.

        This pays where most of them are looked up: each then takes as long as without a selection. Streams without one
        stay mapped.
        """
        for stream, selection in enumerate(self._selections):
            if selection is not None and stream not in self._gathered:
                gathered, filled = np.empty(len(selection), np.uint32), 0
                for some in self._selected(stream):
                    gathered[filled : filled + len(some)] = some
                    filled += len(some)
                self._gathered[stream] = gathered

    def let_go(self) -> None:
        """Keep nothing of what was gathered."""
        self._gathered = {}

    def __call__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        """The lengths of some samples.

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
        """Of each stream a name of the lengths of all its stored samples: 16 hexadecimal digits."""
        return tuple(one.digest for one in self.streams)

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """Of each stream the tokens of the samples that are selected."""
        return tuple(map(self._selected_tokens, range(len(self.streams))))

    def _selected_tokens(self, stream: int) -> int:
        if self._selections[stream] is None:
            return self.streams[stream].num_tokens
        return sum(int(some.sum(dtype=np.int64)) for some in self._selected(stream))

    def _selected(self, stream: int) -> Iterator[NDArray[np.uint32]]:
        """The lengths of a stream's selected samples, in order, some at a time."""
        lengths, selection = self.streams[stream].values, self._selections[stream]
        assert selection is not None, "or all are"
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
