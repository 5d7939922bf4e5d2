"""Making the files of a shard appear, by whoever holds the part of the shard."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter_ns

from lightning_streaming.cache.arrival import Part, claim
from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.locks import pauses
from lightning_streaming.cache.misses import Misses
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.presence import Held, Presence
from lightning_streaming.cache.room import CacheRoom, Demand
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.cache.verify import unpack
from lightning_streaming.errors import DiskFullError, IndexFormatError, IntegrityError, LockTimeoutError
from lightning_streaming.files import join_under
from lightning_streaming.formats.compression import check_algorithm
from lightning_streaming.formats.index import FileInfo, ShardInfo

_logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 5.0
"""More than anybody needs to find out whether a part is dead."""


class Absence(enum.Enum):
    """Why a shard is not here after one try."""

    FETCHED_ELSEWHERE = enum.auto()
    """Another process, or thread, is fetching it."""
    NO_ROOM = enum.auto()
    """There is no room for it."""
    REMOVED = enum.auto()
    """It was here, and was removed before it could be held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Who wants a shard, and what may be done for it."""

    room: CacheRoom
    """Where room for it is counted."""
    let_go: Callable[[], object] | None = None
    """Closes what a reader has open that cannot go on without the shard; None where nobody waits for it."""
    spare_since: int | None = None
    """Where nobody waits for it: nothing used at this time or later is removed for it, in nanoseconds."""

    def reserve(self, place: CachePlace, demands: list[Demand]) -> bool:
        """Whether there is room now for these files."""
        if self.let_go is None:
            return self.room.reserve(place, demands, spare_since=self.spare_since)
        self.room.reserve_now(place, demands, self.let_go)
        return True

    def try_with_space(self, place: CachePlace, demands: list[Demand], attempt: Callable[[], bool]) -> bool:
        """Whether something could be done in the end for which the disk was too full.

        Who fetches ahead stands back for readers, and tries it once: a full disk is like a limit that was reached.
        """
        if self.let_go is not None:
            return self.room.try_with_space(place, demands, attempt, self.let_go)
        needed = sum(size for _, size in demands)
        return not self.room.somebody_waits() and self.room.make_space(needed, self.spare_since) > 0 and attempt()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One raw file to make."""

    raw: FileInfo
    compressed: FileInfo | None
    part: Part
    """What becomes the raw file."""
    compressed_part: Part | None
    """What the compressed file is fetched into; None where there is none, or it is here."""

    def demands(self) -> list[Demand]:
        """The parts, with the bytes that each will have."""
        found = [(self.part, self.raw.bytes)]
        if self.compressed_part is not None and self.compressed is not None:
            found.append((self.compressed_part, self.compressed.bytes))
        return found


class Fetcher:
    """Brings the files of a stream's shards into its cache directory."""

    def __init__(
        self, place: CachePlace, source: InPlaceSource | RemoteSource, presence: Presence, config: CacheConfig
    ) -> None:
        self._place = place
        self._source = source
        self._presence = presence
        self._config = config
        self.misses = Misses()
        """What was not here when it was asked for."""

    def fetch(self, shard: ShardInfo, lock: Part, ask: Ask) -> Held | Absence:
        """Make what is missing of a shard, and hold the shard.

        Args:
            shard: The shard.
            lock: The part of its raw data file, which this ends.
            ask: Who wants it.

        Raises:
            IntegrityError: What arrives is not what the index promises, time after time.
            ShardCorruptError: A compressed file that is read in place is not what the index promises.
            StorageError: A file could not be fetched.
            IndexFormatError: Two files of the shard have one name.
            ConfigError: The hash to check by is not recorded, or a limit cannot be kept here.
        """
        parts = [lock]
        held: Held | Absence = Absence.REMOVED
        try:
            with ExitStack() as stack:
                stack.callback(self._place.drop, parts)
                _check_names(shard)
                held = self._fetch(shard, parts, ask, stack)
        except BaseException:
            if isinstance(held, Held):
                held.close()
            raise
        return held

    def _fetch(self, shard: ShardInfo, parts: list[Part], ask: Ask, stack: ExitStack) -> Held | Absence:
        missing = [pair for pair in shard.files if not self._presence.settle(*pair)]
        jobs = []
        for raw, compressed in missing:
            part = parts[0] if raw is shard.raw_data else self._claim(raw, parts)
            jobs.append(self._job(raw, compressed, part, parts, stack))
        demands = [demand for job in jobs for demand in job.demands()]
        if demands and not ask.reserve(self._place, demands):
            return Absence.NO_ROOM
        for job in jobs:
            if not self._make_with_space(job, shard.compression, ask):
                return Absence.NO_ROOM
        # Before the parts are let go of, so that nobody comes in between.
        return self._presence.hold(shard) or Absence.REMOVED

    def _job(self, raw: FileInfo, compressed: FileInfo | None, part: Part, parts: list[Part], stack: ExitStack) -> _Job:
        if compressed is None or isinstance(self._source, InPlaceSource):
            return _Job(raw=raw, compressed=compressed, part=part, compressed_part=None)
        kept = self._presence.hold_kept(compressed)
        if kept is not None:
            stack.callback(kept.close)
        compressed_part = self._claim(compressed, parts) if kept is None else None
        return _Job(raw=raw, compressed=compressed, part=part, compressed_part=compressed_part)

    def _claim(self, file: FileInfo, parts: list[Part]) -> Part:
        """Claim a part that only holders of the shard's part claim; but others look whether it is dead."""
        for _ in pauses(_SWEEP_SECONDS):
            part = claim(self._place.directory, file.basename)
            if part is not None:
                parts.append(part)
                return part
        raise LockTimeoutError(
            f"the part of {file.basename} in {self._place.directory} is locked, and nobody fetches it"
        )

    def _make_with_space(self, job: _Job, algorithm: str | None, ask: Ask) -> bool:
        """Whether a file was made; False if the disk is full, and nobody waits for it."""
        full: DiskFullError | None = None

        def attempt() -> bool:
            nonlocal full
            try:
                self._make(job, algorithm)
            except DiskFullError as error:
                _logger.info("the disk is full, so other shards are removed: %s", error)
                full = error
                return False
            return True

        if attempt() or ask.try_with_space(self._place, job.demands(), attempt):
            return True
        if ask.let_go is not None:
            raise DiskFullError(f"{job.raw.basename}: {full}, or set a cache_limit that fits") from full
        return False

    def _make(self, job: _Job, algorithm: str | None) -> None:
        with job.part.beating():
            mark = self._write(job, algorithm)
        if not job.part.publish(self._place.directory, job.raw.basename, mark):
            # Another user, whose parts are not ours, was faster; or it is wrong, and this says that it must stay.
            self._presence.settle(job.raw, job.compressed)
        job.part.keep_shared()
        if job.compressed_part is not None and job.compressed_part.is_unpublished():
            self._place.discard_part(job.compressed_part)

    def _write(self, job: _Job, algorithm: str | None) -> int:
        """Write a raw file to its part; gives the mark that it is to have."""
        if isinstance(self._source, InPlaceSource):
            assert job.compressed is not None, "otherwise it is used where it is"
            assert algorithm is not None, "or the index was refused"
            began = perf_counter_ns()
            mark = self._source.unpack_raw(job.raw, job.compressed, algorithm, job.part.path)
            self.misses.unpacked(job.raw.basename, 0, began)
            return mark
        if job.compressed is None or algorithm is None:
            self._source.fetch(job.raw, job.part.path, _accept_any)
            self.misses.fetched(job.raw.basename, job.raw.bytes)
        else:
            check_algorithm(algorithm)
            self._unpack_fetched(self._source, job, job.compressed, algorithm)
        return self._mark()

    def _unpack_fetched(self, source: RemoteSource, job: _Job, compressed: FileInfo, algorithm: str) -> None:
        def accept(path: Path, fetched_bytes: int = compressed.bytes) -> None:
            began = perf_counter_ns()
            unpack(path, source.shown(compressed), job.raw, algorithm, job.part.path)
            self.misses.unpacked(job.raw.basename, fetched_bytes, began)

        # It may have been kept by an earlier try, for whose raw file there was no room.
        if job.compressed_part is None or not job.compressed_part.is_unpublished():
            kept = join_under(self._place.directory, compressed.basename)
            try:
                accept(kept, fetched_bytes=0)
            except IntegrityError:
                # No hash was recorded that would have told; the next try fetches it.
                self._place.remove(kept)
                raise
            return
        source.fetch(compressed, job.compressed_part.path, accept)
        if self._config.keep_zip:
            job.compressed_part.publish(self._place.directory, compressed.basename, self._mark())

    def _mark(self) -> int:
        mark = self._place.own.mark
        assert mark is not None, "the directory of a remote has one"
        return mark


def _check_names(shard: ShardInfo) -> None:
    names = [file.basename for file in chain(*shard.files) if file is not None]
    if len(set(names)) < len(names):
        raise IndexFormatError(f"the files of a shard must have different names, but are {', '.join(names)}")


def _accept_any(path: Path) -> None:
    """Size and hash are all there is to check."""
