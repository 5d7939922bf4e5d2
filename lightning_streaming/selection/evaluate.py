"""Evaluate what is asked of a stream, once per node: over the named columns only, in threads, resumable after a kill.

The outcome lies beside the stream's cached index, under a name made of data and conditions; while it is made, so do
the bits of some shards each, so that nobody evaluates them twice. :mod:`~lightning_streaming.cache.selection_files` has
the names.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
from lightning_streaming.formats.columns import ColumnValues, check_readable_columns, encodings_of
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.options.column_functions import WHERE
from lightning_streaming.options.selection import Indices, SelectionConfig, as_numbers
from lightning_streaming.selection.bitmap import Selection, packed_bytes
from lightning_streaming.selection.conditions import (
    Condition,
    FunctionCondition,
    PartCondition,
    SqlCondition,
)
from lightning_streaming.selection.id_index import IdIndex
from lightning_streaming.selection.scanning import (
    SAMPLES_AT_ONCE,
    ShardGroup,
    ShardScan,
    errors_name,
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


def select_samples(
    asked: SelectionConfig,
    index: DatasetIndex,
    cache: ShardCache,
    room: CacheQuota | None = None,
    progress: ProgressCallback | None = None,
    key: str | None = None,
    joined: Collection[str] = (),
) -> Selection:
    """The selected samples of one stream; evaluated now, unless a process of this node did before.

    Args:
        asked: What is wanted.
        index: The stream's index.
        cache: Where its files are.
        room: Where what is fetched is counted; None for no limit.
        progress: Is told of samples that were looked at; None to show it as other waits.
        key: That of the outcome, if it is known from another process: what is kept under it is taken as it is.
        joined: Columns that its samples have of datasets that are joined, which cannot be looked at.

    Raises:
        ConfigError: A condition cannot be evaluated on this data, or is another than it was where ``key`` comes from;
            says which and why.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    with errors_name(cache, f"{asked.in_words()} cannot be evaluated or kept"):
        found = None if key is None else _kept(cache.directory.path, key, index.num_samples)
        if found is not None:
            return found
        work = _Work(
            asked=asked,
            selected=None if asked.indices is None else _read_indices(asked.indices),
            index=index,
            sizes=index.samples_per_shard(),
            cache=cache,
            room=room,
            progress=progress,
            joined=joined,
        )
        if key not in (None, work.key):
            raise ConfigError(
                f"{asked.in_words()} is another selection in this process than in the one that has started it",
                hint="a function, what it names, a file of indices or the data has changed meanwhile",
                option="selection.where",
            )
        return work.done()


def is_known(asked: SelectionConfig, index: DatasetIndex, cache: ShardCache) -> bool:
    """Whether a selection is told without a look at any shard: no column decides, or it was made before.

    Args:
        asked: What is wanted.
        index: The stream's index.
        cache: Where its files are.

    Raises:
        ConfigError: ``indices`` is no file of numbers or truth values, or ``where`` is no condition.
        StorageError: The file of ``indices`` cannot be read.
    """
    if asked.where is None and (asked.fraction is None or asked.group_by is None):
        return True
    key = asked.key(cache.data_version(index), None if asked.indices is None else _read_indices(asked.indices))
    return _kept(cache.directory.path, key, index.num_samples) is not None


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One selection to be made."""

    asked: SelectionConfig
    selected: NDArray[np.bool_] | NDArray[np.int64] | None
    index: DatasetIndex
    sizes: NDArray[np.int64]
    cache: ShardCache
    room: CacheQuota | None
    progress: ProgressCallback | None
    joined: Collection[str] = ()

    @property
    def num_samples(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def key(self) -> str:
        """A name of the outcome."""
        return self.asked.key(self.cache.data_version(self.index), self.selected)

    @property
    def path(self) -> Path:
        return selection_path(self.cache.directory.path, self.key)

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        """What each sample must meet, checked. Who finds what was made before does without it, and without DuckDB."""
        conditions: list[Condition] = []
        if isinstance(self.asked.where, str):
            conditions.append(SqlCondition(self.asked.where))
        elif self.asked.where is not None:
            conditions.append(FunctionCondition(self.asked.where))
        if (part := self.asked.part) is not None:
            conditions.append(PartCondition(part, self.asked.group_by, self.asked.seed or 0))
        for condition in conditions:
            _check_columns(condition, self.index, self.asked, self.joined)
        return conditions

    @cached_property
    def chosen(self) -> NDArray[np.bool_] | None:
        """A truth value for each sample, where some were chosen by number."""
        return None if self.selected is None else _truth_values(self.selected, self.num_samples)

    def done(self) -> Selection:
        """What was made before; else make it, and keep it if the cache may be written to."""
        found = self._kept()
        if found is not None:
            return found
        _ = self.conditions, self.chosen  # to refuse what cannot be, before anything is made
        return load_or_create(
            self.path,
            self.cache.directory,
            "evaluates the selection",
            find=self._kept,
            make=self._made,
            make_unkept=lambda: self._unkept(self._evaluate(None)),
        )

    def _unkept(self, bits: NDArray[np.uint8]) -> Selection:
        _logger.warning("%s is not writable: each process evaluates the selection anew", self.path.parent)
        return Selection(bits, self.num_samples, self.key)

    def _kept(self) -> Selection | None:
        return _kept(self.cache.directory.path, self.key, self.num_samples)

    def _made(self, parts: Path) -> Selection | None:
        bits = self._evaluate(parts)
        try:
            write_checked(self.path, bits, self.cache.directory.path)
        except PermissionError:  # in place of another user's, which is damaged
            return self._unkept(bits)
        return None

    def _evaluate(self, parts: Path | None) -> NDArray[np.uint8]:
        bits = np.zeros(packed_bytes(self.num_samples), np.uint8)
        _ = self.chosen  # before there are threads
        self.cache.prepare()
        scan = ShardScan(index=self.index, cache=self.cache, room=self.room)
        with self._told() as tell:
            for group, wanted in scan.outcomes(lambda group: self._of_group(scan, group, parts)):
                _put(bits, group.first, wanted)
                tell(len(wanted))
        return bits

    def _told(self) -> AbstractContextManager[ProgressCallback]:
        asked = self.asked.in_words()
        begins = (
            f"evaluating {asked} over {self.num_samples} samples of {self.cache.label}; "
            "`lightning-streaming select` does it ahead"
        )
        looks = any(condition.columns for condition in self.conditions)
        what = f"evaluating {asked} of {self.cache.label}"
        return scan_progress(self.progress, self.num_samples, what, begins if looks else "")

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
        """Clear the truth values of samples that do not meet all conditions; shards without one set are not read."""
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
    """That a joined dataset has a sample's id."""

    on: str
    ids: IdIndex

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of ids."""
        return (self.on,)

    def met(
        self,
        columns: Mapping[str, ColumnValues],
        numbers: NDArray[np.int64],  # noqa: ARG002  # every condition is told them
    ) -> NDArray[np.bool_]:
        """Look them up."""
        return self.ids.places(columns[self.on]) >= 0


def select_partners(
    on: str,
    ids: IdIndex,
    version: str,
    selection: Selection | None,
    index: DatasetIndex,
    cache: ShardCache,
    room: CacheQuota,
    progress: ProgressCallback | None,
) -> Selection:
    """The selected samples of a stream whose ids a joined dataset has; kept as what was selected is.

    Args:
        on: The column of ids.
        ids: Those of the joined dataset.
        version: Of the joined dataset's data; see :meth:`ShardCache.data_version`.
        selection: The stream's; None where nothing is left out.
        index: The stream's.
        cache: Where its files are.
        room: Where what is fetched is counted.
        progress: Is told of samples that were looked at; None to show it as other waits.

    Raises:
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    with errors_name(cache, f"the ids in column {on!r} cannot be looked up"):
        work = _Partners(
            asked=SelectionConfig(),
            selected=None,
            index=index,
            sizes=index.samples_per_shard(),
            cache=cache,
            room=room,
            progress=progress,
            condition=PartnerCondition(on, ids),
            version=version,
            among=selection,
        )
        return work.done()


@dataclass(frozen=True, kw_only=True)
class _Partners(_Work):
    """Those that a joined dataset has ids of, to be found."""

    condition: PartnerCondition
    version: str
    among: Selection | None

    @cached_property
    def key(self) -> str:
        """A name of the outcome."""
        among = None if self.among is None else self.among.digest
        facts = json.dumps(["partners", self.cache.data_version(self.index), self.version, self.condition.on, among])
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        """Its only one: that the columns fit was checked when the join was."""
        return (self.condition,)

    @cached_property
    def chosen(self) -> NDArray[np.bool_] | None:
        """The samples that are selected: shards of which none is are not read."""
        if self.among is None:
            return None
        parts = range(0, self.num_samples, SAMPLES_AT_ONCE)
        return np.concatenate(
            [self.among.has(np.arange(at, min(at + SAMPLES_AT_ONCE, self.num_samples))) for at in parts]
        )


def _kept(directory: Path, key: str, num_samples: int) -> Selection | None:
    """What was made before, and is whole."""
    path = selection_path(directory, key)
    bits = read_checked(path, packed_bytes(num_samples))
    return None if bits is None else Selection(bits, num_samples, key, kept_at=path)


def _put(bits: NDArray[np.uint8], first: int, wanted: NDArray[np.bool_]) -> None:
    """Set the bits of some samples, beginning with number ``first``."""
    aligned = np.concatenate([np.zeros(first % 8, np.bool_), wanted])
    packed = np.packbits(aligned, bitorder="little")
    bits[first // 8 : first // 8 + len(packed)] |= packed


def _check_columns(condition: Condition, index: DatasetIndex, asked: SelectionConfig, joined: Collection[str]) -> None:
    own = "selection.where and selection.group_by look at the stream's own columns"
    hints = {name: f"{name!r} is joined, and {own}" for name in joined}
    if isinstance(condition, SqlCondition):
        quoted = [name for name in condition.columns if f'"{name}"' in condition.expression and name not in hints]
        hints |= {name: f"text stands in single quotes in SQL: '{name}'" for name in quoted}
    option = "selection.group_by" if isinstance(condition, PartCondition) else "selection.where"
    other_hint = WHERE.unknown_column_hint if isinstance(condition, FunctionCondition) else None
    for _, info in index.shards.examples():
        check_readable_columns(info, condition.columns, asked.in_words(), hints, option, other_hint)
        if isinstance(condition, PartCondition):
            _check_equal_or_not(encodings_of(info), condition)


def _check_equal_or_not(known: Mapping[str, str], condition: PartCondition) -> None:
    for name in condition.columns:
        if "float" in known[name] or known[name] == "str_decimal":
            raise ConfigError(
                f"selection.group_by={name!r} is a column of {known[name]}; parts are drawn by whole numbers, text or "
                "bytes, which are equal or not",
                option="selection.group_by",
            )


def _read_indices(indices: Indices) -> NDArray[np.bool_] | NDArray[np.int64]:
    """Return the numbers, or truth values, from memory or a file."""
    if not isinstance(indices, str):
        return as_numbers(indices)
    try:
        values = _mapped(Location(indices))
    except (ValueError, EOFError) as error:
        raise ConfigError(
            f"selection.indices={short_repr(indices)} must be a .npy file of numbers or truth values ({error})",
            option="selection.indices",
            path=indices,
        ) from None
    return as_numbers(values)


def _mapped(location: Location) -> NDArray[Any]:
    """An array; a file of this machine is not read as a whole."""
    path = location.path
    if path is not None and path.is_file():
        with system_errors(f"read {path}"):
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    else:
        found = np.load(io.BytesIO(location.read()), allow_pickle=False)
    return found


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
