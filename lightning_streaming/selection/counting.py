"""Count the tokens of every stored sample of a stream, once per node: in threads, resumable after a kill.

The outcome lies beside the stream's cached index, as a selection does, under a name made of the data and of what is
asked. Where offsets tell the lengths and a shard is not on this node, its head alone is read, and nothing is fetched.
A stream that has grown keeps what was counted of the shards that it had.
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
    kept_shape,
    map_lengths,
    shards_told,
    write_facts,
)
from lightning_streaming.selection.scanning import (
    ProgressFactory,
    ShardGroup,
    ShardScan,
    array_file,
    errors_name,
    load_or_create,
    no_progress,
    part_path,
    read_checked,
    scan_progress,
    write_part,
)
from lightning_streaming.waits import ProgressCallback

_HEADS_AT_ONCE = 16
"""Heads of shards that are read at the same time from where they are stored: each takes little but a round trip."""

_logger = package_logger(__name__)


def document_lengths(
    asked: LengthsRequest,
    index: DatasetIndex,
    cache: ShardCache,
    room: CacheQuota | None = None,
    *,
    watched: ProgressFactory = no_progress,
    key: str | None = None,
) -> StreamLengths:
    """The length of every stored sample of one stream; counted now, unless a process of this node did before.

    Args:
        asked: What says the length.
        index: The stream's.
        cache: Where its files are.
        room: Where what is fetched is counted; None for no limit.
        watched: Is around the work, and may say who is told of its progress.
        key: That of the outcome, if it is known from another process: what is kept under it is taken as it is.

    Raises:
        ConfigError: The length cannot be told so from this data, is negative or too large, or is asked of another
            function than it was where ``key`` comes from; says which and why.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched or read.
    """
    words, failed = asked.in_words(), f"the lengths by {asked.in_words()} cannot be counted or kept"
    with (
        errors_name(cache, failed),
        fields_of(asked.group),
        watched(cache.label, words, index.num_samples) as progress,
    ):
        known = map_lengths(selection_path(cache.directory.path, key), index.num_samples) if key else None
        if known is not None:
            return known
        work = _Counting(asked=asked, index=index, cache=cache, room=room, progress=progress)
        if key and key != work.path.stem:
            raise ConfigError(
                f"{words} says other lengths in this process than in the one that has started it",
                hint="a function, what it names, or the data has changed meanwhile",
                option="lengths",
            )
        return work.done()


@dataclass(frozen=True, kw_only=True)
class _Counting:
    """The lengths of one stream, to be made."""

    asked: LengthsRequest
    index: DatasetIndex
    cache: ShardCache
    room: CacheQuota | None
    progress: ProgressCallback | None

    @cached_property
    def path(self) -> Path:
        return self._path_of(self.index)

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """Where the samples of each shard end."""
        return np.cumsum(self.index.samples_per_shard())

    @cached_property
    def looked_at(self) -> Sequence[str]:
        """The columns whose values tell; none where arrays are counted."""
        if self.asked.lengths is None:
            return ()
        return (self.asked.lengths,) if isinstance(self.asked.lengths, str) else LENGTHS.columns(self.asked.lengths)

    @cached_property
    def before(self) -> tuple[int, StreamLengths] | None:
        """What was made when the stream had fewer shards, of the most there are, and how many these are."""
        found = None
        for path in self.path.parent.glob("*.npy"):
            shards = shards_told(path)
            if shards is None or not (found[0] if found else 0) < shards < len(self.index.shards):
                continue
            head = self.index.head(shards)
            lengths = map_lengths(path, head.num_samples) if path == self._path_of(head) else None
            found = found if lengths is None else (shards, lengths)
        return found

    def done(self) -> StreamLengths:
        self._check()
        return load_or_create(
            self.path,
            self.cache.directory,
            "counts the tokens",
            find=lambda: map_lengths(self.path, self.index.num_samples),
            make=self._made,
            make_unkept=self._unkept,
        )

    def _path_of(self, index: DatasetIndex) -> Path:
        return selection_path(self.cache.directory.path, self.asked.key(self.cache.data_version(index)))

    def _check(self) -> None:
        """Refuse what the columns cannot tell, before anything is fetched."""
        for _, info in self.index.shards.examples():
            if self.asked.column is not None:
                column_lengths(info, self.asked.column, self.asked.dtype)
                continue
            hint = LENGTHS.unknown_column_hint if callable(self.asked.lengths) else None
            check_readable_columns(info, self.looked_at, self.asked.in_words(), option="lengths", other_hint=hint)
            known = encodings_of(info)
            if isinstance(self.asked.lengths, str) and known[self.asked.lengths] not in WHOLE_NUMBERS:
                raise ConfigError(
                    f"{self.asked.in_words()} is a column of {known[self.asked.lengths]}, which says no length",
                    hint="name one of whole numbers, the column of the tokens as column=, or pass a function of "
                    "columns",
                    option="lengths",
                )

    def _made(self, parts: Path) -> StreamLengths | None:
        num_samples = self.index.num_samples
        try:
            with array_file(self.path, np.uint32, kept_shape(num_samples), self.cache.directory.path) as array:
                self._fill(array[:num_samples], parts)
                write_facts(array, len(self.index.shards))
                array.flush()  # on to the disk: whoever maps it looks at the facts alone
        except StreamingError:
            raise
        except PermissionError:  # in place of another user's, which is damaged
            return self._unkept(parts)
        return None

    def _unkept(self, parts: Path | None = None) -> StreamLengths:
        _logger.warning("%s is not writable: each process counts the tokens anew", self.path.parent)
        values = np.empty(self.index.num_samples, np.uint32)
        self._fill(values, parts)
        return StreamLengths(values, key=self.path.stem)

    def _fill(self, values: NDArray[np.uint32], parts: Path | None) -> None:
        _ = self.before  # before there are threads
        self.cache.prepare()
        scan, asked = self._scan(), self.asked.in_words()
        begins = (
            f"counting the tokens of {self.index.num_samples} samples of {self.cache.label} by {asked}; "
            "`lightning-streaming lengths` does it ahead"
        )
        what = f"counting the tokens of {self.cache.label} by {asked}"
        with scan_progress(self.progress, self.index.num_samples, what, begins) as tell:
            for group, found in scan.outcomes(lambda group: self._of_group(scan, group, parts)):
                values[group.first : group.first + group.samples] = found
                tell(group.samples)

    def _scan(self) -> ShardScan:
        kinds = [info for _, info in self.index.shards.examples()]
        if self.cache.reads_in_place or not any(map(self._may_be_read_afar, kinds)):
            return ShardScan(index=self.index, cache=self.cache, room=self.room)
        return ShardScan(index=self.index, cache=self.cache, room=self.room, num_threads=_HEADS_AT_ONCE)

    def _of_group(self, scan: ShardScan, group: ShardGroup, parts: Path | None) -> NDArray[np.uint32]:
        is_new = self.before is None or group.shards.stop > self.before[0]
        path = part_path(parts, group) if parts is not None and is_new else None
        if path is not None:
            kept = read_checked(path, 4 * group.samples)
            if kept is not None:
                return kept.view(np.uint32)
        found = [self._of_shard(scan, shard) for shard in group.shards]
        joined = np.concatenate(found).astype(np.uint32, copy=False)
        if path is not None:
            write_part(path, joined.view(np.uint8), self.cache.directory.path)
        return joined

    def _of_shard(self, scan: ShardScan, shard: int) -> NDArray[Any]:
        scan.go_on()
        info = self.index.shards[shard]
        first = int(self.stops[shard]) - info.samples
        if self.before is not None and shard < self.before[0]:
            return self.before[1].values[first : first + info.samples]
        if self.asked.column is not None:
            return self._of_arrays(scan, shard, self.asked.column)
        columns = scan.columns([shard], self.looked_at)
        if isinstance(self.asked.lengths, str):
            return self._checked(columns[self.asked.lengths], info)
        assert self.asked.lengths is not None, "or there is a column"
        numbers = np.arange(first, first + info.samples)
        return self._checked(list(LENGTHS.called(self.asked.lengths, columns, numbers, operator.index)), info)

    def _of_arrays(self, scan: ShardScan, shard: int, column: str) -> NDArray[np.int64]:
        lengths = column_lengths(self.index.shards[shard], column, self.asked.dtype)
        is_afar = self._may_be_read_afar(lengths.info) and not self.cache.reads_in_place
        if lengths.constant is not None or (is_afar and not self.cache.has(lengths.info)):
            found = lengths.read_remote(self.cache.read_bytes)
            if found is not None:
                return found
        return scan.look(shard, lambda _, directory: lengths.read_local(directory), [column])

    def _may_be_read_afar(self, info: ShardInfo) -> bool:
        return (
            self.asked.column is not None
            and info.compression is None
            and column_lengths(info, self.asked.column, self.asked.dtype).is_in_offsets
        )

    def _checked(self, values: ColumnValues, info: ShardInfo) -> NDArray[np.uint32]:
        """What a column or a function says, where it may be a length."""
        if isinstance(values, np.ndarray):
            is_wrong = (values < 0) | (values > MOST_TOKENS)
        else:
            is_wrong = np.fromiter((not 0 <= one <= MOST_TOKENS for one in values), np.bool_, len(values))
        if is_wrong.any():
            worst = int(is_wrong.argmax())
            raise ConfigError(
                f"{self.asked.in_words()} says that sample {worst} of {info.raw_data.basename} has {values[worst]} "
                "tokens",
                hint=f"a length is a whole number from 0 to {MOST_TOKENS}",
                option="lengths",
                path=info.raw_data.basename,
                sample=worst,
            )
        return np.asarray(values, np.uint32) if isinstance(values, list) else values.astype(np.uint32)
