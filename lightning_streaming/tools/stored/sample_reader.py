"""Single samples of a stored dataset, read by byte ranges, with large transfers on request only; names of samples."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.sources import takes_room_in_place
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError, DownloadError, FormatError, SampleIndexError, StreamingError
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import SingleSampleReader, check_shard, table_part, unsafe_columns
from lightning_streaming.formats.shard_table import OTHER_FORMATS, PART, column_names
from lightning_streaming.storage import Location
from lightning_streaming.storage.retries import is_of_store
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.stored.stored_dataset import (
    StoredDataset,
    columns_of,
    open_cached,
    raw_directory,
    read_parts,
    single_samples,
    stored_files,
)
from lightning_streaming.units import format_bytes

_SHARD_INDEX = re.compile(r"(?:(.*):)?([0-9]{1,18}):([0-9]{1,18})", re.DOTALL)
_STREAM_INDEX = re.compile(r"(?:(.*):)?([0-9]{1,18})", re.DOTALL)
_KEY_FIELDS = tuple(field.name for field in fields(SampleKey))
_MAX_SAMPLE_BYTES = 8 << 20
"""Largest sample that is read without a request for it."""
_MAX_FETCHED = 16 << 20
_MAX_UNPACKED = 512 << 20
"""Bytes that are downloaded for the shards of a page, and unpacked for a shard, without a request."""
_MAX_CACHED = 64 << 20
"""Bytes of cached samples, as stored: a page requests its images one by one."""
_MAX_TABLE_BYTES = 64 << 20
"""Bytes of cached tables of offsets; that of the current shard is always cached."""
_GRACE = 1.0
"""Seconds to wait at the end for a thread that reads."""
_MAX_GAP = 1 << 15
"""Ranges at most this far apart are read as one."""

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSample:
    """A sample as named on a command line or a page."""

    stream: str | None
    """None if the text names none."""
    shard: int | None
    """Number of the shard within the stream; None if ``index`` counts within the stream."""
    index: int
    """Index within the shard, or the stream."""
    key: SampleKey | None = None
    """The complete key, if the text is one."""


def named_sample(text: str) -> NamedSample | None:
    """Parse the name of a sample; return None if the text is none.

    Args:
        text: ``INDEX``, ``SHARD:INDEX``, ``STREAM:INDEX`` or ``STREAM:SHARD:INDEX``, where the stream may contain
            colons; or a mapping as JSON, with ``shard``, ``sample_index`` and the other fields of a key.

    Raises:
        ConfigError: It starts like JSON, but is not the key of a sample.
    """
    if not text.lstrip().startswith("{"):
        if match := _SHARD_INDEX.fullmatch(text):
            return NamedSample(stream=match[1], shard=int(match[2]), index=int(match[3]))
        match = _STREAM_INDEX.fullmatch(text)
        return NamedSample(stream=match[1], shard=None, index=int(match[2])) if match else None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the sample starts like JSON, but is not JSON: {error}") from None
    if values.keys() == set(_KEY_FIELDS):
        key = SampleKey.from_dict(values)
        return NamedSample(stream=key.stream, shard=key.shard, index=key.sample_index, key=key)
    shard, index, stream = (values.get(name) for name in ("shard", "sample_index", "stream"))
    if (
        type(shard) is not int
        or type(index) is not int
        or not isinstance(stream, str | None)
        or not values.keys() <= set(_KEY_FIELDS)
    ):
        raise ConfigError(
            f"the key of a sample has {', '.join(_KEY_FIELDS)}, at least shard and sample_index, but got "
            f"{values!r:.200}"
        )
    return NamedSample(stream=stream, shard=shard, index=index)


@dataclass(frozen=True, kw_only=True, slots=True)
class TooMuch:
    """A sample, or a selection, that costs too much to be read without a request."""

    reason: str
    """The cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A sample that could not be read."""

    reason: str
    """Message of the error."""


@dataclass(kw_only=True, slots=True)
class FetchBudget:
    """Bytes that were downloaded for one page to open shards, without a request."""

    used: int = 0


class SampleReader:
    """Reads samples of one dataset by number; threads that share it take turns.

    Creating one does no I/O.

    Args:
        dataset: Location of the dataset.
        cache: Opens shards of other formats, in a temporary directory.
        index: Its index.
        allow_unsafe_types: Whether columns may be decoded that can run code of the author of the data.
    """

    def __init__(
        self, dataset: StoredDataset, cache: ShardCache, index: DatasetIndex, allow_unsafe_types: bool
    ) -> None:
        self.dataset, self.index = dataset, index
        self._cache, self._allows_unsafe = cache, allow_unsafe_types
        self._stops = np.cumsum(index.samples_per_shard())
        self._lock = threading.RLock()
        self._tables: OrderedDict[int, SingleSampleReader] = OrderedDict()
        self._samples: OrderedDict[int, tuple[Sample, int]] = OrderedDict()
        self._open: tuple[int, Any] | None = None
        self._opened = ExitStack()

    def close(self) -> None:
        """Close the open shard, and remove what was downloaded for it.

        This does not wait for a thread that waits for a store, which may take minutes; the process ends without it.
        """
        if self._lock.acquire(timeout=_GRACE):
            try:
                self._open = None
                self._opened.close()
            finally:
                self._lock.release()

    def find(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and its index there.

        Raises:
            SampleIndexError: The dataset has no such sample.
        """
        if not 0 <= number < self.index.num_samples:
            raise SampleIndexError(
                f"there is no sample {number:,}",
                hint=f"the dataset has {counted(self.index.num_samples, 'sample')}, numbered from 0",
                sample=number,
            )
        shard = int(np.searchsorted(self._stops, number, side="right"))
        return shard, number - self.first_of(shard)

    def first_of(self, shard: int) -> int:
        """Return the number of the first sample of a shard.

        Raises:
            SampleIndexError: The dataset has no such shard.
        """
        if not 0 <= shard < len(self._stops):
            raise SampleIndexError(
                f"there is no shard {shard:,}", hint=f"the dataset has {len(self._stops):,}, numbered from 0"
            )
        return int(self._stops[shard - 1]) if shard else 0

    def disallowed_columns(self, shard: int) -> list[str]:
        """Return the columns of a shard that are not decoded, because that can run code of the author of the data.

        Raises:
            FormatError: The index describes invalid columns.
        """
        return [] if self._allows_unsafe else unsafe_columns(self.index.shards[shard])

    def read(
        self, numbers: Sequence[int], *, force: bool = False, budget: FetchBudget | None = None
    ) -> list[Sample | TooMuch | Unreadable]:
        """Read samples; adjacent ones of a shard are read together.

        Args:
            numbers: Numbers of the samples, ascending.
            force: Whether to read them regardless of the cost.
            budget: Bytes downloaded for the same page before; None for none.

        Returns:
            The allowed columns of each sample, or the reason why it was not read.

        Raises:
            SampleIndexError: The dataset has no such sample.
        """
        with self._lock:
            samples: list[Sample | TooMuch | Unreadable] = []
            failure: DownloadError | None = None
            budget = budget or FetchBudget()
            for shard, group in groupby(numbers, lambda number: self.find(number)[0]):
                wanted = list(group)
                missing = [number for number in wanted if number not in self._samples]
                read: dict[int, Sample | TooMuch | Unreadable] = {}
                if missing and failure is not None:
                    reason = f"not requested, because the store just failed: {failure}"
                    read = dict.fromkeys(missing, Unreadable(reason=reason))
                elif missing:
                    try:
                        read = self._read(shard, missing, force, budget)
                    except (StreamingError, OSError) as error:
                        if isinstance(error, DownloadError) and is_of_store(error):
                            failure = error
                        read = dict.fromkeys(missing, Unreadable(reason=str(error)))
                samples += [read[number] if number in read else self._samples[number][0] for number in wanted]
                while sum(size for _, size in self._samples.values()) > _MAX_CACHED:
                    self._samples.popitem(last=False)
            return samples

    def _read(
        self, shard: int, numbers: list[int], force: bool, budget: FetchBudget
    ) -> dict[int, Sample | TooMuch | Unreadable]:
        info, first = self.index.shards[shard], self.first_of(shard)
        check_shard(info, allow_unsafe_types=True, columns=self._allowed_columns(info))
        too_much = None if force else self._cost_of_opening(shard, info, budget)
        if too_much is not None:
            return dict.fromkeys(numbers, too_much)
        if info.format in OTHER_FORMATS:
            reader = self._open_shard(shard, info)
            return {number: self._cached(number, partial(reader.__getitem__, number - first)) for number in numbers}
        # By their bytes alone: the shard is uncompressed in place, or was unpacked here.
        at = self.dataset.at if info.compression is None else self._open_shard(shard, info)
        table = self._table(shard, info, at)
        parts = {number: table.part(number - first) for number in numbers}
        sizes = {number: part.stop - part.start for number, part in parts.items()}
        read: dict[int, Sample | TooMuch | Unreadable] = {
            number: TooMuch(reason=f"this sample takes {format_bytes(size)}")
            for number, size in sizes.items()
            if size > _MAX_SAMPLE_BYTES and not force
        }
        runs: list[list[int]] = []
        for number in (number for number in numbers if number not in read):
            part = parts[number]
            is_near = runs and part.start - parts[runs[-1][-1]].stop <= _MAX_GAP
            if not is_near or part.stop - parts[runs[-1][0]].start > _MAX_SAMPLE_BYTES:
                runs.append([])
            runs[-1].append(number)
        for run in runs:
            pieces = read_parts(at / info.raw_data.basename, [parts[number] for number in run])
            for number, data in zip(run, pieces, strict=True):
                read[number] = self._cached(number, partial(table.decode, number - first, data), sizes[number])
        return read

    def _cost_of_opening(self, shard: int, info: ShardInfo, budget: FetchBudget) -> TooMuch | None:
        """Return the cost of opening a shard if it is high; else count its bytes as downloaded."""
        is_open = self._open is not None and self._open[0] == shard
        if is_open or (info.compression is None and shard in self._tables):
            return None
        raw = sum(raw.bytes for raw, _ in info.files)
        size, why = raw, "because its shard is read as a whole"
        if info.format not in OTHER_FORMATS and info.compression is None:
            size, why = table_part(info).stop, "for the offsets of the samples in its shard"
        elif info.compression != PART:
            size = sum(file.bytes for file in stored_files(info))
        is_fetched = self.dataset.directory is None
        if is_fetched and budget.used + size > _MAX_FETCHED:
            besides = "" if size > _MAX_FETCHED else " in addition to other samples of this page"
            return TooMuch(reason=f"{format_bytes(size)} must be fetched{besides}, {why}")
        if raw > _MAX_UNPACKED and takes_room_in_place(info):
            return TooMuch(reason=f"{format_bytes(raw)} must be unpacked, because its shard is compressed")
        mean = raw // max(1, info.samples)
        if mean > _MAX_SAMPLE_BYTES and info.format in OTHER_FORMATS:
            return TooMuch(reason=f"samples of its shard take {format_bytes(mean)} on average")
        budget.used += size if is_fetched else 0
        return None

    def _cached(self, number: int, decode: Callable[[], Sample], size: int | None = None) -> Sample | Unreadable:
        """Decode a sample and cache it; ``size`` is about its size as stored, None for that in memory."""
        try:
            sample = decode()
        except FormatError as error:
            return Unreadable(reason=str(error))
        self._samples[number] = sample, _memory_of(sample) if size is None else size
        return sample

    def _allowed_columns(self, info: ShardInfo) -> list[str] | None:
        """Return the columns to decode; None for all: samples of other formats may lack columns, unless named."""
        disallowed = [] if self._allows_unsafe else unsafe_columns(info)
        return [name for name in column_names(info) if name not in disallowed] if disallowed else None

    def _table(self, shard: int, info: ShardInfo, at: Location) -> SingleSampleReader:
        """Return the table of a shard's offsets, which also decodes single samples."""
        if shard not in self._tables:
            self._tables[shard] = single_samples(
                info,
                at,
                allow_unsafe_types=True,  # columns that are not named are not decoded
                columns=self._allowed_columns(info),
                as_files=[column.name for column in columns_of(info.schema) if column.encoding in ("jpeg", "png")],
            )
            while (
                len(self._tables) > 1
                and sum(table_part(self.index.shards[number]).stop for number in self._tables) > _MAX_TABLE_BYTES
            ):
                self._tables.popitem(last=False)
        return self._tables[shard]

    def _open_shard(self, shard: int, info: ShardInfo) -> Any:
        """Return the reader of a shard of another format, or the location of raw files of a compressed one.

        One shard is open at a time.
        """
        if self._open is None or self._open[0] != shard:
            self.close()
            if info.format in OTHER_FORMATS:
                how: Any = {"allow_unsafe_types": self._allows_unsafe, "as_files": column_names(info)}
                opened = open_cached(self._cache, info, self._allowed_columns(info), **how)
                self._open = shard, self._opened.enter_context(opened)
            else:
                scratch = self._opened.enter_context(TemporaryDirectory(prefix="lightning_streaming_"))
                self._open = shard, Location(str(raw_directory(self.dataset, info, Path(scratch))), {}, 1, 60.0)
        return self._open[1]


def _memory_of(value: Any) -> int:
    """Return about how many bytes a decoded value takes."""
    if isinstance(value, Mapping):
        return sum(map(_memory_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_memory_of, value))
    return int(value.nbytes) if isinstance(value, np.ndarray) else sys.getsizeof(value)
