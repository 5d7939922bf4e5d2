"""Count the tokens of every stored sample of a stream, once per node: in threads, and resumable after a kill.

The lengths are cached next to the stream's index, as a selection is, under a name that depends on the data and the
request. If the offsets in a shard's head give the lengths, only the head of a remote shard is read. If a stream has
grown, only its new shards are counted.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.selection_files import selection_path
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.columns import (
    WHOLE_NUMBERS,
    ColumnValues,
    check_readable_columns,
    column_lengths,
    encodings_of,
)
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.options.column_functions import LENGTHS
from lightning_streaming.options.groups import fields_of
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection.document_lengths import (
    MOST_TOKENS,
    StreamLengths,
    file_shape,
    map_lengths,
    read_num_shards,
    write_facts,
)
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
from lightning_streaming.waits import ProgressCallback

_HEADS_AT_ONCE = 16
"""Shard heads that are read from the remote at the same time: each takes little more than a round trip."""

_logger = package_logger(__name__)


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
        if self.request.column is not None:
            return self._of_arrays(scan, shard, self.request.column)
        columns = scan.columns([shard], self.columns)
        if isinstance(self.request.lengths, str):
            return self._checked(columns[self.request.lengths], info)
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
        if isinstance(values, np.ndarray):
            is_wrong = (values < 0) | (values > MOST_TOKENS)
        else:
            is_wrong = np.fromiter((not 0 <= value <= MOST_TOKENS for value in values), np.bool_, len(values))
        if is_wrong.any():
            worst = int(is_wrong.argmax())
            raise ConfigError(
                f"{self.request.in_words()} gives {values[worst]} tokens for sample {worst} of "
                f"{info.raw_data.basename}",
                hint=f"a length is a whole number from 0 to {MOST_TOKENS}",
                option="lengths",
                path=info.raw_data.basename,
                sample=worst,
            )
        return np.asarray(values, np.uint32) if isinstance(values, list) else values.astype(np.uint32)
