"""Lengths of the stored samples of a stream in tokens: counted once per node, cached, and mapped.

They are counted in threads, and a process that was killed resumes. The file is next to the stream's index, as a
selection is, under a name that depends on the data and the request; it holds the lengths, four bytes each, then 32
bytes: their digest, their sum, the number of shards, and a checksum of these three. If the offsets in a shard's head
give the lengths, only the head of a remote shard is read. If a stream has grown, only its new shards are counted.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.selection_files import map_bits, selection_path
from lightning_streaming.errors import ConfigError, EncodingError, ShardCorruptError, StorageError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.columns import (
    WHOLE_NUMBERS,
    ColumnValues,
    check_readable_columns,
    column_lengths,
    encodings_of,
    listed,
)
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.npy import header_of
from lightning_streaming.options.column_functions import LENGTHS
from lightning_streaming.options.groups import fields_of
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection.scanning import (
    ProgressFactory,
    ShardGroup,
    ShardScan,
    add_error_context,
    array_file,
    load_or_create,
    no_progress,
    part_path,
    read_checked,
    scan_progress,
    write_part,
)
from lightning_streaming.tokenizing.documents import DocumentTokenizer
from lightning_streaming.waits import ProgressCallback

_logger = package_logger(__name__)

MOST_TOKENS = 2**32 - 1
"""Most tokens of a sample."""
_MOST_BYTES_TOKENIZED_AT_ONCE = 1 << 23
"""Bytes of small shards whose tokens are counted together: a few seconds, which are lost if the process is killed."""
SUMMED_AT_ONCE = 1 << 20
"""Lengths that are summed together."""
_FACTS = np.dtype([("digest", "=u8"), ("tokens", "=u8"), ("shards", "=u8"), ("checksum", "=u8")])
_FACT_WORDS = _FACTS.itemsize // 4
_HEADS_AT_ONCE = 16
"""Shard heads that are read from the remote at the same time: each takes little more than a round trip."""


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
                int(self.values[first : first + SUMMED_AT_ONCE].sum(dtype=np.int64))
                for first in range(0, len(self), SUMMED_AT_ONCE)
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


# --- counting ---


def document_lengths(
    request: LengthsRequest,
    index: DatasetIndex,
    cache: ShardCache,
    quota: CacheQuota | None = None,
    *,
    watched: ProgressFactory = no_progress,
    key: str | None = None,
) -> StreamLengths:
    """Return the length of every stored sample of a stream, from the cache of this node or counted now.

    Args:
        request: Column or function that gives the length.
        index: Index of the stream.
        cache: Shard cache of the stream.
        quota: Quota that fetched bytes count against; None for no limit.
        watched: Context of the work, which may return a progress callback.
        key: Key of the lengths, if another process has computed it: lengths cached under it are used unchecked.

    Raises:
        ConfigError: The data does not give such lengths, a length is negative or too large, or the function is another
            one than where ``key`` comes from.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched or read.
    """
    words, failed = request.in_words(), f"the lengths by {request.in_words()} cannot be counted or cached"
    with (
        add_error_context(cache, failed),
        fields_of(request.group),
        watched(cache.label, words, index.num_samples) as progress,
    ):
        known = map_lengths(selection_path(cache.directory.path, key), index.num_samples) if key else None
        if known is not None:
            return known
        work = _Counting(request=request, index=index, cache=cache, quota=quota, progress=progress)
        if key and key != work.path.stem:
            raise ConfigError(
                f"{words} gives other lengths in this process than in the process that started it",
                hint="a function, something that it uses, or the data has changed; start the run again",
                option="lengths",
            )
        return work.done()


@dataclass(frozen=True, kw_only=True)
class _Counting:
    """Computation of the lengths of one stream."""

    request: LengthsRequest
    index: DatasetIndex
    cache: ShardCache
    quota: CacheQuota | None
    progress: ProgressCallback | None

    @cached_property
    def path(self) -> Path:
        return self._path_of(self.index)

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """End of each shard, in samples of the stream."""
        return np.cumsum(self.index.samples_per_shard())

    @cached_property
    def columns(self) -> Sequence[str]:
        """The columns whose values give the length; none if the length is that of an array."""
        if self.request.lengths is None:
            return ()
        if isinstance(self.request.lengths, DocumentTokenizer):
            return self.request.lengths.columns
        return (
            (self.request.lengths,) if isinstance(self.request.lengths, str) else LENGTHS.columns(self.request.lengths)
        )

    @cached_property
    def before(self) -> tuple[int, StreamLengths] | None:
        """The lengths cached when the stream had fewer shards, with their number of shards; the largest such cache."""
        largest = None
        for path in self.path.parent.glob("*.npy"):
            shards = read_num_shards(path)
            if shards is None or not (largest[0] if largest else 0) < shards < len(self.index.shards):
                continue
            head = self.index.head(shards)
            lengths = map_lengths(path, head.num_samples) if path == self._path_of(head) else None
            largest = largest if lengths is None else (shards, lengths)
        return largest

    def done(self) -> StreamLengths:
        self._check()
        return load_or_create(
            self.path,
            self.cache.directory,
            "counts the tokens",
            find=lambda: map_lengths(self.path, self.index.num_samples),
            create=self._create,
            create_uncached=self._uncached,
        )

    def _path_of(self, index: DatasetIndex) -> Path:
        return selection_path(self.cache.directory.path, self.request.key(self.cache.data_version(index)))

    def _check(self) -> None:
        """Check that the columns can give lengths, before anything is fetched."""
        for _, info in self.index.shards.examples():
            if self.request.column is not None:
                column_lengths(info, self.request.column, self.request.dtype)
                continue
            if isinstance(self.request.lengths, DocumentTokenizer):
                for name, column in self.request.lengths.columns_by_field.items():
                    option = f"tokenize.{name}"
                    check_readable_columns(info, (column,), f"{option}={column!r}", option=option)
                continue
            hint = LENGTHS.unknown_column_hint if callable(self.request.lengths) else None
            check_readable_columns(info, self.columns, self.request.in_words(), option="lengths", other_hint=hint)
            known = encodings_of(info)
            if isinstance(self.request.lengths, str) and known[self.request.lengths] not in WHOLE_NUMBERS:
                raise ConfigError(
                    f"{self.request.in_words()} is a column of {known[self.request.lengths]}, not of whole numbers",
                    hint="name a column of whole numbers, pass the column of the tokens as column=, or a function of "
                    "columns",
                    option="lengths",
                )

    def _create(self, parts: Path) -> StreamLengths | None:
        num_samples = self.index.num_samples
        try:
            with array_file(self.path, np.uint32, file_shape(num_samples), self.cache.directory.path) as array:
                self._fill(array[:num_samples], parts)
                write_facts(array, len(self.index.shards))
                array.flush()  # to the disk: a process that maps the file checks only the facts
        except StreamingError:
            raise
        except PermissionError:  # a damaged file of another user cannot be replaced
            return self._uncached(parts)
        return None

    def _uncached(self, parts: Path | None = None) -> StreamLengths:
        _logger.warning("%s is not writable: each process counts the tokens itself", self.path.parent)
        values = np.empty(self.index.num_samples, np.uint32)
        self._fill(values, parts)
        return StreamLengths(values, key=self.path.stem)

    def _fill(self, values: NDArray[np.uint32], parts: Path | None) -> None:
        _ = self.before  # computed before threads start
        self.cache.prepare()
        scan, words = self._scan(), self.request.in_words()
        begins = (
            f"counting the tokens of {self.index.num_samples} samples of {self.cache.label} by {words}; "
            "`lightning-streaming lengths` does this ahead of a run"
        )
        what = f"counting the tokens of {self.cache.label} by {words}"
        with scan_progress(self.progress, self.index.num_samples, what, begins) as report:
            for group, lengths in scan.outcomes(lambda group: self._of_group(scan, group, parts)):
                values[group.first : group.first + group.samples] = lengths
                report(group.samples)

    def _scan(self) -> ShardScan:
        if isinstance(self.request.lengths, DocumentTokenizer):
            return ShardScan(
                index=self.index, cache=self.cache, quota=self.quota, most_bytes=_MOST_BYTES_TOKENIZED_AT_ONCE
            )
        kinds = [info for _, info in self.index.shards.examples()]
        if self.cache.reads_in_place or not any(map(self._may_be_read_afar, kinds)):
            return ShardScan(index=self.index, cache=self.cache, quota=self.quota)
        return ShardScan(index=self.index, cache=self.cache, quota=self.quota, num_threads=_HEADS_AT_ONCE)

    def _of_group(self, scan: ShardScan, group: ShardGroup, parts: Path | None) -> NDArray[np.uint32]:
        is_new = self.before is None or group.shards.stop > self.before[0]
        path = part_path(parts, group) if parts is not None and is_new else None
        if path is not None:
            kept = read_checked(path, 4 * group.samples)
            if kept is not None:
                return kept.view(np.uint32)
        lengths = [self._of_shard(scan, shard) for shard in group.shards]
        joined = np.concatenate(lengths).astype(np.uint32, copy=False)
        if path is not None:
            write_part(path, joined.view(np.uint8), self.cache.directory.path)
        return joined

    def _of_shard(self, scan: ShardScan, shard: int) -> NDArray[Any]:
        scan.check_stopped()
        info = self.index.shards[shard]
        first = int(self.stops[shard]) - info.samples
        if self.before is not None and shard < self.before[0]:
            return self.before[1].values[first : first + info.samples]
        stored, inserted = self._stored(scan, shard, info, first), self.request.inserted
        return np.where(stored > 0, stored + np.uint32(inserted), 0) if inserted else stored

    def _stored(self, scan: ShardScan, shard: int, info: ShardInfo, first: int) -> NDArray[Any]:
        """Return the lengths of a shard's documents as they are stored."""
        if self.request.column is not None:
            return self._of_arrays(scan, shard, self.request.column)
        columns = scan.columns([shard], self.columns)
        if isinstance(self.request.lengths, str):
            return self._checked(columns[self.request.lengths], info)
        if isinstance(self.request.lengths, DocumentTokenizer):
            try:
                rows = {name: listed(values) for name, values in columns.items()}
                return self._checked(self.request.lengths.lengths(rows), info)
            except EncodingError as error:
                file = info.raw_data.basename
                raise error.with_context(file, path=file, sample=error.sample) from error
        assert self.request.lengths is not None, "or there is a column"
        numbers = np.arange(first, first + info.samples)
        return self._checked(list(LENGTHS.called(self.request.lengths, columns, numbers, operator.index)), info)

    def _of_arrays(self, scan: ShardScan, shard: int, column: str) -> NDArray[np.int64]:
        lengths = column_lengths(self.index.shards[shard], column, self.request.dtype)
        is_afar = self._may_be_read_afar(lengths.info) and not self.cache.reads_in_place
        if lengths.constant is not None or (is_afar and not self.cache.has(lengths.info)):
            remote = lengths.read_remote(self.cache.read_bytes)
            if remote is not None:
                return remote
        return scan.look(shard, lambda _, directory: lengths.read_local(directory), [column])

    def _may_be_read_afar(self, info: ShardInfo) -> bool:
        return (
            self.request.column is not None
            and info.compression is None
            and column_lengths(info, self.request.column, self.request.dtype).is_in_offsets
        )

    def _checked(self, values: ColumnValues, info: ShardInfo) -> NDArray[np.uint32]:
        """Return lengths given by a column or a function, after checking their range."""
        most = MOST_TOKENS - self.request.inserted
        if isinstance(values, np.ndarray):
            is_wrong = (values < 0) | (values > most)
        else:
            is_wrong = np.fromiter((not 0 <= value <= most for value in values), np.bool_, len(values))
        if is_wrong.any():
            worst = int(is_wrong.argmax())
            raise ConfigError(
                f"{self.request.in_words()} gives {values[worst]} tokens for sample {worst} of "
                f"{info.raw_data.basename}",
                hint=f"a length is a whole number from 0 to {most}",
                option="lengths",
                path=info.raw_data.basename,
                sample=worst,
            )
        return np.asarray(values, np.uint32) if isinstance(values, list) else values.astype(np.uint32)
