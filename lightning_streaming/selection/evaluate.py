"""Evaluate the selection of a stream, once per node: over the named columns only, in threads, resumable after a kill.

The selection is cached next to the stream's index, under a name that depends on data and conditions. During evaluation,
the bits of each group of shards are cached too, so that no group is evaluated twice. The names are defined in
:mod:`~lightning_streaming.cache.selection_files`.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.selection_files import selection_path
from lightning_streaming.errors import (
    ConfigError,
)
from lightning_streaming.escaping import package_logger, short_repr
from lightning_streaming.files import system_errors
from lightning_streaming.formats.columns import ColumnValues, check_readable_columns, encodings_of, listed
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.options.column_functions import WHERE
from lightning_streaming.options.selection import Indices, SelectionConfig, as_numbers
from lightning_streaming.selection.bitmap import Selection, bitmap_bytes
from lightning_streaming.selection.conditions import (
    Condition,
    FunctionCondition,
    PartCondition,
    SqlCondition,
)
from lightning_streaming.selection.id_index import IdIndex
from lightning_streaming.selection.joins import JoinedDataset
from lightning_streaming.selection.scanning import (
    SAMPLES_AT_ONCE,
    ShardGroup,
    ShardScan,
    add_error_context,
    load_or_create,
    part_path,
    read_checked,
    scan_progress,
    write_checked,
    write_part,
)
from lightning_streaming.storage import Location
from lightning_streaming.waits import ProgressCallback

_logger = package_logger(__name__)
MOST_LISTED = 10
"""Missing ids that are listed one by one."""


def select_samples(
    config: SelectionConfig,
    index: DatasetIndex,
    cache: ShardCache,
    quota: CacheQuota | None = None,
    progress: ProgressCallback | None = None,
    key: str | None = None,
    joined: Collection[str] = (),
) -> Selection:
    """Return the selected samples of a stream, from the cache of this node or evaluated now.

    Args:
        config: Options of the selection.
        index: Index of the stream.
        cache: Shard cache of the stream.
        quota: Quota that fetched bytes count against; None for no limit.
        progress: Called with the number of samples that were read; None to show progress as other waits do.
        key: Key of the selection, if another process has computed it: a selection cached under it is used unchecked.
        joined: Columns of joined datasets, which conditions cannot read.

    Raises:
        ConfigError: A condition cannot be evaluated on this data, or is another one than where ``key`` comes from.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    with add_error_context(cache, f"{config.in_words()} cannot be evaluated or cached"):
        cached = None if key is None else _read_cached(cache.directory.path, key, index.num_samples)
        if cached is not None:
            return cached
        work = _Evaluation(
            config=config,
            selected=None if config.indices is None else _read_indices(config.indices),
            index=index,
            sizes=index.samples_per_shard(),
            cache=cache,
            quota=quota,
            progress=progress,
            joined=joined,
        )
        if key not in (None, work.key):
            raise ConfigError(
                f"{config.in_words()} is another selection in this process than in the process that started it",
                hint="a function, something that it uses, a file of indices or the data has changed; start the run "
                "again",
                option="selection.where",
            )
        return work.done()


def is_selection_cached(config: SelectionConfig, index: DatasetIndex, cache: ShardCache) -> bool:
    """Return whether a selection is known without reading shards: it reads no column, or is cached.

    Args:
        config: Options of the selection.
        index: Index of the stream.
        cache: Shard cache of the stream.

    Raises:
        ConfigError: ``indices`` is no file of numbers or truth values, or ``where`` is no condition.
        StorageError: The file of ``indices`` cannot be read.
    """
    if config.where is None and (config.fraction is None or config.group_by is None):
        return True
    key = config.key(cache.data_version(index), None if config.indices is None else _read_indices(config.indices))
    return _read_cached(cache.directory.path, key, index.num_samples) is not None


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """Evaluation of one selection."""

    config: SelectionConfig
    selected: NDArray[np.bool_] | NDArray[np.int64] | None
    index: DatasetIndex
    sizes: NDArray[np.int64]
    cache: ShardCache
    quota: CacheQuota | None
    progress: ProgressCallback | None
    joined: Collection[str] = ()

    @property
    def num_samples(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def key(self) -> str:
        """Name of the cached selection."""
        return self.config.key(self.cache.data_version(self.index), self.selected)

    @property
    def path(self) -> Path:
        return selection_path(self.cache.directory.path, self.key)

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        """The conditions, checked. A cached selection is read without them, and without DuckDB."""
        conditions: list[Condition] = []
        if isinstance(self.config.where, str):
            conditions.append(SqlCondition(self.config.where))
        elif self.config.where is not None:
            conditions.append(FunctionCondition(self.config.where))
        if (part := self.config.part) is not None:
            conditions.append(PartCondition(part, self.config.group_by, self.config.seed or 0))
        for condition in conditions:
            _check_columns(condition, self.index, self.config, self.joined)
        return conditions

    @cached_property
    def chosen(self) -> NDArray[np.bool_] | None:
        """A truth value for each sample, if samples are given by ``indices``."""
        return None if self.selected is None else _truth_values(self.selected, self.num_samples)

    def done(self) -> Selection:
        """Return the cached selection, or evaluate it and cache it if the cache is writable."""
        cached = self._read_cached()
        if cached is not None:
            return cached
        _ = self.conditions, self.chosen  # raise errors of the options before anything is written
        return load_or_create(
            self.path,
            self.cache.directory,
            "evaluates the selection",
            find=self._read_cached,
            create=self._create,
            create_uncached=lambda: self._uncached(self._evaluate(None)),
        )

    def _uncached(self, bits: NDArray[np.uint8]) -> Selection:
        _logger.warning("%s is not writable: each process evaluates the selection itself", self.path.parent)
        return Selection(bits, self.num_samples, self.key)

    def _read_cached(self) -> Selection | None:
        return _read_cached(self.cache.directory.path, self.key, self.num_samples)

    def _create(self, parts: Path) -> Selection | None:
        bits = self._evaluate(parts)
        try:
            write_checked(self.path, bits, self.cache.directory.path)
        except PermissionError:  # a damaged file of another user cannot be replaced
            return self._uncached(bits)
        return None

    def _evaluate(self, parts: Path | None) -> NDArray[np.uint8]:
        bits = np.zeros(bitmap_bytes(self.num_samples), np.uint8)
        _ = self.chosen  # computed before threads start
        self.cache.prepare()
        scan = ShardScan(index=self.index, cache=self.cache, quota=self.quota)
        words = self.config.in_words()
        warning = (
            f"evaluating {words} over {self.num_samples} samples of {self.cache.label}; "
            "`lightning-streaming select` does this ahead of a run"
        )
        reads_columns = any(condition.columns for condition in self.conditions)
        what = f"evaluating {words} of {self.cache.label}"
        with scan_progress(self.progress, self.num_samples, what, warning if reads_columns else "") as report:
            for group, wanted in scan.outcomes(lambda group: self._of_group(scan, group, parts)):
                aligned = np.concatenate([np.zeros(group.first % 8, np.bool_), wanted])
                filled = np.packbits(aligned, bitorder="little")
                bits[group.first // 8 : group.first // 8 + len(filled)] |= filled
                report(len(wanted))
        return bits

    def _of_group(self, scan: ShardScan, group: ShardGroup, parts: Path | None) -> NDArray[np.bool_]:
        path = None if parts is None else part_path(parts, group)
        if path is not None:
            kept = read_checked(path, -(-group.samples // 8))
            if kept is not None:
                return np.unpackbits(kept, count=group.samples, bitorder="little").view(np.bool_)
        wanted = np.ones(group.samples, np.bool_)
        if self.chosen is not None:
            wanted &= self.chosen[group.first : group.first + group.samples]
        self._narrow(scan, group, wanted)
        if path is not None:
            write_part(path, np.packbits(wanted, bitorder="little"), self.cache.directory.path)
        return wanted

    def _narrow(self, scan: ShardScan, group: ShardGroup, wanted: NDArray[np.bool_]) -> None:
        """Clear the truth values of samples that do not meet all conditions; shards without any set are not read."""
        sizes = self.sizes[group.shards.start : group.shards.stop]
        stops = np.cumsum(sizes)
        spans = enumerate(zip((stops - sizes).tolist(), stops.tolist(), strict=True))
        read = [shard for shard, (start, stop) in spans if wanted[start:stop].any()]
        if not read or not self.conditions:
            return
        places = np.concatenate([np.arange(stops[shard] - sizes[shard], stops[shard]) for shard in read])
        names = list(dict.fromkeys(name for condition in self.conditions for name in condition.columns))
        columns = scan.columns([group.shards[shard] for shard in read], names)
        for condition in self.conditions:
            wanted[places] &= condition.met(columns, group.first + places)


@dataclass(frozen=True, slots=True)
class PartnerCondition:
    """Condition that a joined dataset has a sample with the same id."""

    on: str
    ids: IdIndex

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of ids."""
        return (self.on,)

    def met(
        self,
        columns: Mapping[str, ColumnValues],
        numbers: NDArray[np.int64],  # noqa: ARG002  # part of the protocol
    ) -> NDArray[np.bool_]:
        """Look the ids up."""
        return self.ids.places(columns[self.on]) >= 0


def select_partners(
    on: str,
    ids: IdIndex,
    version: str,
    selection: Selection | None,
    index: DatasetIndex,
    cache: ShardCache,
    quota: CacheQuota,
    progress: ProgressCallback | None,
) -> Selection:
    """Return the selected samples of a stream whose ids a joined dataset has; cached as selections are.

    Args:
        on: The column of ids.
        ids: Index of the joined dataset's ids.
        version: Version of the joined dataset's data; see :meth:`ShardCache.data_version`.
        selection: Selection of the stream; None if all samples are selected.
        index: Index of the stream.
        cache: Shard cache of the stream.
        quota: Quota that fetched bytes count against.
        progress: Called with the number of samples that were read; None to show progress as other waits do.

    Raises:
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    with add_error_context(cache, f"the ids in column {on!r} cannot be looked up"):
        work = _PartnerEvaluation(
            config=SelectionConfig(),
            selected=None,
            index=index,
            sizes=index.samples_per_shard(),
            cache=cache,
            quota=quota,
            progress=progress,
            condition=PartnerCondition(on, ids),
            version=version,
            among=selection,
        )
        return work.done()


@dataclass(frozen=True, kw_only=True)
class _PartnerEvaluation(_Evaluation):
    """Evaluation of the samples whose ids a joined dataset has."""

    condition: PartnerCondition
    version: str
    among: Selection | None

    @cached_property
    def key(self) -> str:
        """Name of the cached selection."""
        among = None if self.among is None else self.among.digest
        facts = json.dumps(["partners", self.cache.data_version(self.index), self.version, self.condition.on, among])
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        """The condition on ids; its column was checked with the join."""
        return (self.condition,)

    @cached_property
    def chosen(self) -> NDArray[np.bool_] | None:
        """The selected samples; shards without any are not read."""
        if self.among is None:
            return None
        parts = range(0, self.num_samples, SAMPLES_AT_ONCE)
        return np.concatenate(
            [self.among.has(np.arange(at, min(at + SAMPLES_AT_ONCE, self.num_samples))) for at in parts]
        )


class MissingIds(NamedTuple):
    """Ids of a stream that a joined dataset lacks."""

    join: str
    """Label of the joined dataset in errors."""
    on: str
    """The column of the ids."""
    samples: int
    """Number of selected samples of the stream that have a missing id."""
    first: int
    """Number of the first such sample in the stream."""
    values: tuple[Any, ...]
    """The first missing ids, at most ``MOST_LISTED``."""


def find_missing_ids(
    index: DatasetIndex,
    cache: ShardCache,
    joined: JoinedDataset,
    selection: Selection | None,
    quota: CacheQuota,
    progress: ProgressCallback | None,
) -> MissingIds | None:
    """Find the ids of a stream's selected samples that a dataset joined by id lacks; return None if it lacks none.

    Args:
        index: Index of the stream.
        cache: Shard cache of the stream.
        joined: The joined dataset, with its ids indexed.
        selection: Selection of the stream; None if all samples are selected.
        quota: Quota that fetched bytes count against.
        progress: Called with the number of samples that were read; None to log progress.

    Raises:
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched, or the index of ids is damaged.
    """
    on, ids = joined.config.key, joined.ids
    assert on is not None, "it is joined by id"
    assert ids is not None, "its ids are indexed"
    version = joined.cache.data_version(joined.index)
    partners = select_partners(on, ids, version, selection, index, cache, quota, progress)
    samples = (index.num_samples if selection is None else len(selection)) - len(partners)
    if not samples:
        return None
    joined.check_index_of_ids()
    scan = ShardScan(index=index, cache=cache, quota=quota)
    numbers = list(_first_without(partners, selection))
    return MissingIds(joined.cache.label, on, samples, numbers[0], tuple(_values(scan, on, numbers)))


def _first_without(partners: Selection, selection: Selection | None) -> Iterator[int]:
    """Yield the first selected samples without a partner."""
    left = MOST_LISTED
    for first in range(0, partners.num_stored, SAMPLES_AT_ONCE):
        numbers = np.arange(first, min(first + SAMPLES_AT_ONCE, partners.num_stored))
        lacks = ~partners.has(numbers)
        if selection is not None:
            lacks &= selection.has(numbers)
        here = numbers[lacks][:left].tolist()
        yield from here
        left -= len(here)
        if not left:
            return


def _values(scan: ShardScan, column: str, numbers: list[int]) -> Iterator[Any]:
    stops = np.cumsum(scan.index.samples_per_shard())
    for number in numbers:
        shard = int(np.searchsorted(stops, number, side="right"))
        first = int(stops[shard]) - scan.index.shards[shard].samples
        yield listed(scan.columns([shard], [column])[column])[number - first]


def _read_cached(directory: Path, key: str, num_samples: int) -> Selection | None:
    """Return the cached selection, if there is one that is not damaged."""
    path = selection_path(directory, key)
    bits = read_checked(path, bitmap_bytes(num_samples))
    return None if bits is None else Selection(bits, num_samples, key, cached_at=path)


def _check_columns(condition: Condition, index: DatasetIndex, config: SelectionConfig, joined: Collection[str]) -> None:
    own = "selection.where and selection.group_by can read only the stream's own columns"
    hints = {name: f"{name!r} is joined, and {own}" for name in joined}
    if isinstance(condition, SqlCondition):
        quoted = [name for name in condition.columns if f'"{name}"' in condition.expression and name not in hints]
        hints |= {name: f"text is written in single quotes in SQL: '{name}'" for name in quoted}
    option = "selection.group_by" if isinstance(condition, PartCondition) else "selection.where"
    other_hint = WHERE.unknown_column_hint if isinstance(condition, FunctionCondition) else None
    for _, info in index.shards.examples():
        check_readable_columns(info, condition.columns, config.in_words(), hints, option, other_hint)
        known = encodings_of(info)
        for name in condition.columns if isinstance(condition, PartCondition) else ():
            if "float" in known[name] or known[name] == "str_decimal":
                raise ConfigError(
                    f"selection.group_by={name!r} is a column of {known[name]}; it must be of whole numbers, text or "
                    "bytes, which compare exactly",
                    option="selection.group_by",
                )


def _read_indices(indices: Indices) -> NDArray[np.bool_] | NDArray[np.int64]:
    """Return the sample numbers or truth values, from memory or a file."""
    if not isinstance(indices, str):
        return as_numbers(indices)
    try:
        location = Location(indices)
        path = location.path
        if path is not None and path.is_file():  # a local file is mapped
            with system_errors(f"read {path}"):
                values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            values = np.load(io.BytesIO(location.read()), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(
            f"selection.indices={short_repr(indices)} must be a .npy file of numbers or truth values ({error})",
            option="selection.indices",
            path=indices,
        ) from None
    return as_numbers(values)


def _truth_values(selected: NDArray[np.bool_] | NDArray[np.int64], num_samples: int) -> NDArray[np.bool_]:
    if selected.dtype == np.bool_:
        if len(selected) != num_samples:
            raise ConfigError(
                f"selection.indices has {len(selected)} truth values, but the stream has {num_samples} samples",
                option="selection.indices",
            )
        return selected.astype(np.bool_, copy=False)
    if selected.size and not (selected.min() >= 0 and selected.max() < num_samples):
        raise ConfigError(
            f"selection.indices names sample "
            f"{int(selected.max() if selected.max() >= num_samples else selected.min())}, but the stream has samples "
            f"0 to {num_samples - 1}",
            option="selection.indices",
        )
    wanted = np.zeros(num_samples, np.bool_)
    wanted[selected] = True
    return wanted
