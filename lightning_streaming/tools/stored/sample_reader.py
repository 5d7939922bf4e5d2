"""Samples of a stored dataset, one by one or a few in a row: by ranges of its files, and nothing large unasked."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.sources import takes_room_in_place
from lightning_streaming.errors import DownloadError, FormatError, SampleIndexError, StreamingError
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.formats.shard import FilePart, SingleSampleReader, check_shard, table_part, unsafe_columns
from lightning_streaming.formats.shard_table import OTHER_FORMATS, PART, column_names
from lightning_streaming.storage import Location
from lightning_streaming.storage.retries import is_of_store
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.stored.held_shards import lone_samples, opened, parts_of
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, columns_of, raw_directory, stored_files
from lightning_streaming.units import format_bytes

_MOST_SAMPLE_BYTES = 8 << 20
"""A sample with more is read only when it is asked for by itself."""
_MOST_FETCHED = 16 << 20
_MOST_UNPACKED = 512 << 20
"""Shards that take more to bring here, those of a page together, or to unpack here, are opened only when asked for."""
_MOST_KEPT = 64 << 20
"""Bytes of samples, as stored, that are remembered: a page asks for each of its pictures again."""
_MOST_TABLE_BYTES = 64 << 20
"""Bytes of shards' offsets that are remembered; those of the shard that is looked at are, whatever they take."""
_GRACE = 1.0
"""Seconds to wait for a thread that is reading when nobody needs it any more."""
_GAP = 1 << 15
"""Ranges this near to each other are read as one."""

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TooMuch:
    """What is not read unasked."""

    words: str
    """What it would take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A sample that could not be read."""

    words: str
    """Why, as the error says it."""


Found = Sample | TooMuch | Unreadable


@dataclass(kw_only=True, slots=True)
class FetchedUnasked:
    """What is fetched for one page to open shards, unasked."""

    bytes: int = 0


class SampleReader:
    """The samples of one dataset, by their numbers; used by several threads, one at a time.

    Making one reads nothing.

    Args:
        place: Where the dataset is.
        cache: What opens shards of another format, in a directory that is ours.
        index: Its index.
        allow_unsafe_types: Whether columns may be decoded that can run code of whoever wrote the data.
    """

    def __init__(self, place: StoredDataset, cache: ShardCache, index: DatasetIndex, allow_unsafe_types: bool) -> None:
        self.place, self.index = place, index
        self._cache, self._allows_unsafe = cache, allow_unsafe_types
        self._stops = np.cumsum(index.samples_per_shard())
        self._lock = threading.RLock()
        self._tables: OrderedDict[int, SingleSampleReader] = OrderedDict()
        self._kept: OrderedDict[int, tuple[Sample, int]] = OrderedDict()
        self._open: tuple[int, Any] | None = None
        self._opened = ExitStack()

    def close(self) -> None:
        """Let go of what is open, and remove what was fetched for it.

        A thread that waits for a store is not waited for: that may take minutes, and the process ends without it.
        """
        if self._lock.acquire(timeout=_GRACE):
            try:
                self._open = None
                self._opened.close()
            finally:
                self._lock.release()

    def find(self, number: int) -> tuple[int, int]:
        """The shard of a sample, and its index there.

        Raises:
            SampleIndexError: There is no such sample.
        """
        if not 0 <= number < self.index.num_samples:
            raise SampleIndexError(
                f"there is no sample {number:,}",
                hint=f"the dataset has {counted(self.index.num_samples, 'sample')}, from 0 on",
                sample=number,
            )
        shard = int(np.searchsorted(self._stops, number, side="right"))
        return shard, number - self.first_of(shard)

    def first_of(self, shard: int) -> int:
        """The number of a shard's first sample.

        Raises:
            SampleIndexError: There is no such shard.
        """
        if not 0 <= shard < len(self._stops):
            raise SampleIndexError(
                f"there is no shard {shard:,}", hint=f"the dataset has {len(self._stops):,}, from 0 on"
            )
        return int(self._stops[shard - 1]) if shard else 0

    def shut_columns(self, shard: int) -> list[str]:
        """The columns of a shard that are not decoded, because that can run code of whoever wrote the data.

        Raises:
            FormatError: The index describes columns that cannot be.
        """
        return [] if self._allows_unsafe else unsafe_columns(self.index.shards[shard])

    def read(
        self, numbers: Sequence[int], *, is_asked: bool = False, fetched: FetchedUnasked | None = None
    ) -> list[Found]:
        """Some samples, in ascending order; those beside each other in one shard are read at once.

        Args:
            numbers: Which.
            is_asked: Whether to read them whatever that takes.
            fetched: For the page so far; None for nothing yet.

        Returns:
            Of each sample its columns, but for those that are shut; or why there are none.

        Raises:
            SampleIndexError: There is no such sample.
        """
        with self._lock:
            found: list[Found] = []
            of_store: DownloadError | None = None
            fetched = fetched or FetchedUnasked()
            for shard, group in groupby(numbers, lambda number: self.find(number)[0]):
                wanted = list(group)
                missing = [number for number in wanted if number not in self._kept]
                told: dict[int, Found] = {}
                if missing and of_store is not None:
                    words = f"it is not asked for, as the store failed just before: {of_store}"
                    told = dict.fromkeys(missing, Unreadable(words=words))
                elif missing:
                    try:
                        told = self._read(shard, missing, is_asked, fetched)
                    except (StreamingError, OSError) as error:
                        if isinstance(error, DownloadError) and is_of_store(error):
                            of_store = error
                        told = dict.fromkeys(missing, Unreadable(words=str(error)))
                found += [told[number] if number in told else self._kept[number][0] for number in wanted]
                while sum(size for _, size in self._kept.values()) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            return found

    def _read(self, shard: int, numbers: list[int], is_asked: bool, fetched: FetchedUnasked) -> dict[int, Found]:
        info, first = self.index.shards[shard], self.first_of(shard)
        check_shard(info, allow_unsafe_types=True, columns=self._wanted(info))
        refused = None if is_asked else self._refused(shard, info, fetched)
        if refused is not None:
            return dict.fromkeys(numbers, refused)
        if info.format not in OTHER_FORMATS:
            return self._read_alone(shard, info, numbers, is_asked)
        reader = self._reader(shard, info)
        return {number: self._keep(number, None, lambda at: reader[at], number - first) for number in numbers}

    def _refused(self, shard: int, info: ShardInfo, fetched: FetchedUnasked) -> TooMuch | None:
        """What opening a shard takes, where that is much and it is not open; else it counts as fetched."""
        is_open = self._open is not None and self._open[0] == shard
        if is_open or (info.compression is None and shard in self._tables):
            return None
        raw = sum(raw.bytes for raw, _ in info.files)
        size, why = raw, "because its shard is read as a whole"
        if info.format not in OTHER_FORMATS and info.compression is None:
            size, why = table_part(info).stop, "to know where the samples of its shard are"
        elif info.compression != PART:
            size = sum(file.bytes for file in stored_files(info))
        is_fetched = self.place.directory is None
        if is_fetched and fetched.bytes + size > _MOST_FETCHED:
            besides = "" if size > _MOST_FETCHED else " besides what other samples here take"
            return TooMuch(words=f"{format_bytes(size)} must be fetched{besides}, {why}")
        if raw > _MOST_UNPACKED and takes_room_in_place(info):
            return TooMuch(words=f"{format_bytes(raw)} must be unpacked, because its shard is compressed")
        mean = raw // max(1, info.samples)
        if mean > _MOST_SAMPLE_BYTES and info.format in OTHER_FORMATS:
            return TooMuch(words=f"samples of its shard take {format_bytes(mean)} on average")
        fetched.bytes += size if is_fetched else 0
        return None

    def _read_alone(self, shard: int, info: ShardInfo, numbers: list[int], is_asked: bool) -> dict[int, Found]:
        """Samples by their bytes alone, of a shard that lies uncompressed where it is or was unpacked here."""
        at = self.place.at if info.compression is None else self._reader(shard, info)
        table, first = self._table(shard, info, at), self.first_of(shard)
        spans = {number: table.part(number - first) for number in numbers}
        found: dict[int, Found] = {
            number: TooMuch(words=f"this sample takes {format_bytes(span.stop - span.start)}")
            for number, span in spans.items()
            if span.stop - span.start > _MOST_SAMPLE_BYTES and not is_asked
        }
        data = at / info.raw_data.basename
        run: list[int] = []
        for number in [*(one for one in numbers if one not in found), None]:
            ends = run and (number is None or not _are_near(spans, run, number))
            if ends:
                for one, part in zip(run, parts_of(data, [spans[one] for one in run]), strict=True):
                    found[one] = self._keep(one, len(part), table.decode, one - first, part)
                run = []
            if number is not None:
                run.append(number)
        return found

    def _keep(self, number: int, size: int | None, decode: Any, *told: Any) -> Found:
        try:
            sample: Sample = decode(*told)
        except FormatError as error:
            return Unreadable(words=str(error))
        self._kept[number] = sample, _bytes_of(sample) if size is None else size
        return sample

    def _wanted(self, info: ShardInfo) -> list[str] | None:
        """The columns to decode; None for all: samples of other formats may lack columns, unless they are named."""
        shut = [] if self._allows_unsafe else unsafe_columns(info)
        return [name for name in column_names(info) if name not in shut] if shut else None

    def _table(self, shard: int, info: ShardInfo, at: Location) -> SingleSampleReader:
        if shard not in self._tables:
            pictures = [one.name for one in columns_of(info.schema) if one.encoding in ("jpeg", "png")]
            self._tables[shard] = lone_samples(
                info,
                at,
                allow_unsafe_types=True,  # what is not wanted is not decoded
                columns=self._wanted(info),
                as_files=pictures,
            )
            while len(self._tables) > 1 and self._table_bytes() > _MOST_TABLE_BYTES:
                self._tables.popitem(last=False)
        return self._tables[shard]

    def _table_bytes(self) -> int:
        return sum(table_part(self.index.shards[shard]).stop for shard in self._tables)

    def _reader(self, shard: int, info: ShardInfo) -> Any:
        """Of another format what reads a shard; of a compressed one where its raw files are. One is open at a time."""
        if self._open is None or self._open[0] != shard:
            self.close()
            if info.format in OTHER_FORMATS:
                reader: ShardReader = self._opened.enter_context(
                    opened(
                        self._cache,
                        info,
                        self._wanted(info),
                        allow_unsafe_types=self._allows_unsafe,
                        as_files=column_names(info),
                    )
                )
                self._open = shard, reader
            else:
                scratch = self._opened.enter_context(TemporaryDirectory(prefix="lightning_streaming_"))
                self._open = shard, Location(str(raw_directory(self.place, info, Path(scratch))), {}, 1, 60.0)
        return self._open[1]


def _are_near(spans: Mapping[int, FilePart], run: Sequence[int], number: int) -> bool:
    start, before, span = spans[run[0]].start, spans[run[-1]], spans[number]
    return bool(span.start - before.stop <= _GAP and span.stop - start <= _MOST_SAMPLE_BYTES)


def _bytes_of(value: Any) -> int:
    """About how many bytes a decoded value takes."""
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return int(value.nbytes) if isinstance(value, np.ndarray) else sys.getsizeof(value)
