"""A stream's index on this node: fetched by one process, parsed once, and the same for all processes of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.index_checks import checked, is_fresh, likely_digest, mark_checked_by, version_of
from lightning_streaming.cache.index_file import LARGE_INDEX_BYTES, FoundIndex, KnownIndex, load_index
from lightning_streaming.cache.index_forms import IndexForms
from lightning_streaming.cache.index_lock import IndexLock, being_fetched, held_index, sweep_left_overs
from lightning_streaming.cache.index_marks import IndexMarks
from lightning_streaming.cache.layout import origin_of
from lightning_streaming.cache.locks import pauses
from lightning_streaming.cache.marks import OwnTimes, make_mark
from lightning_streaming.cache.origin import IndexCheck, Origin, gone, read_origin, settle_origin, write_origin
from lightning_streaming.cache.patience import Patience
from lightning_streaming.cache.permissions import adopt_file
from lightning_streaming.errors import ConfigError, FormatError, ObjectNotFoundError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.formats.index_form import Identity
from lightning_streaming.storage import download, join_url, mask_url
from lightning_streaming.storage.object_version import object_version
from lightning_streaming.storage.retry import longest_series

_logger = logging.getLogger(__name__)

_PARSE_SECONDS = 60.0
"""Added to what a download may take without a byte, for parsing a large index."""
_LOOK_SECONDS = 0.2
"""Longest pause between looks whether another user has fetched the index."""


class IndexCache:
    """The index of one stream, and the mark of its cache directory.

    The first call of :meth:`read` decides which index it is. Copies that are pickled after that, like those of worker
    processes, read the same one whatever happens to the remote or the file, and without asking anybody.

    Making one touches nothing. It may be pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._directory = config.cache_directory()
        self._forms = IndexForms(self._directory)
        self._known: KnownIndex | None = None
        # Kept, so that nobody removes the parsed form as long as processes may be started that need it.
        self._index: DatasetIndex | None = None
        self._mark: int | None = None
        self._came_along = False  # whether the index was here before we first fetched anything

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    @property
    def mark(self) -> int:
        """The modification time, in nanoseconds, of fetched files that are ours, checked by this index, and unchanged.

        It goes with the index, which is read if it was not yet.

        Raises:
            StreamingError: As for :meth:`read`.
        """
        if self._mark is None:
            self.read()
        assert self._mark is not None, "a remote's index comes with one"
        return self._mark

    @property
    def own(self) -> OwnTimes:
        """Which modification times are ours in the cache directory, which is made if it is not there.

        Raises:
            StreamingError: As for :meth:`read`; or the directory is not for raw files of a dataset in place.
        """
        if self._config.source_directory() is None:
            mark = self.mark
            return OwnTimes(mark, came_with_index=self._came_along)
        origin = read_origin(self._directory)
        if origin is None or origin.own is None:
            if not self._may_write():
                return OwnTimes(make_mark())  # nothing there can be ours
            with self._lock() as lock:
                origin = self._settle_origin(lock)
        self._check_origin(origin)
        return OwnTimes(None)

    def mark_in_place(self) -> int | None:
        """What :func:`mark_checked_by` says of the index and the directory that is read in place.

        Raises:
            StreamingError: As for :meth:`read`.
        """
        self.read()
        source = self._config.source_directory()
        assert source is not None, "it is read in place"
        assert self._known is not None, "it was read"
        return mark_checked_by(source, self._known.digest)

    def read(self) -> DatasetIndex:
        """Read the stream's index.

        The first time, a remote is asked whether it has another one by now, unless another process on this node did so
        just now. If it cannot be reached, the index that is here is used, with a warning.

        Raises:
            IndexFormatError: The index cannot be used.
            ObjectNotFoundError: There is none, or the remote says that it has none any more.
            StorageError: It could not be fetched, or the one that this run began with is gone.
            ConfigError: The cache directory holds files of another remote.
            LockTimeoutError: Another process is fetching it, and has shown no sign of life for too long.
        """
        if self._index is None:
            self._index = self._read_first() if self._known is None else self._read_again(self._known)
        return self._index

    def _read_first(self) -> DatasetIndex:
        source = self._config.source_directory()
        found = self._read_cached_or_remote() if source is None else self._read_in_place(source / INDEX_BASENAME)
        self._known = found.known
        if found.is_new:  # not before: what was read of an old one would keep it
            self._forms.sweep(keep=found.known.digest)
        return found.index

    def _read_again(self, known: KnownIndex) -> DatasetIndex:
        path = (self._config.source_directory() or self._directory) / INDEX_BASENAME
        if known.text is not None:
            return parse_index(known.text, str(path))
        form = self._forms.open(known.digest)
        if form is not None:
            return form.index
        with suppress(OSError, FormatError):
            found = self._load(path, str(path), None, known.digest)
            if found.known.digest == known.digest:
                return found.index
        raise StorageError(
            f"the index that this run began with is gone: {path} is another one by now, and no parsed form of it is in "
            f"{self._directory}; start again to read the new one"
        )

    def _read_in_place(self, path: Path) -> FoundIndex:
        try:
            identity = Identity.of(path)
            if identity.size < LARGE_INDEX_BYTES:
                return self._load(path, str(path), None, None)
            likely = None
            with suppress(StorageError):  # a directory that this user may not enter
                likely = likely_digest(read_origin(self._directory))
            form = self._forms.find(identity, likely)
            if form is not None:
                return FoundIndex(form.index, KnownIndex(form.digest, None))
            if not self._may_write():
                return self._load(path, str(path), None, likely)
            with self._lock() as lock:
                origin = self._settle_origin(lock)
                found = self._load(path, str(path), lock.scratch, likely_digest(origin))
                with suppress(OSError):  # another user's
                    write_origin(self._directory, replace(origin, check=checked(found, {}, None)), lock.scratch)
                return found
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectNotFoundError(
                f"there is no dataset at {path.parent}: {path} does not exist; correct the path, or, if this directory "
                "is to be filled from elsewhere, give that as remote and this as local"
            ) from None

    def _may_write(self) -> bool:
        """Whether the cache directory of a dataset that is read in place is there, or could be made."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self._directory, os.W_OK)

    def _read_cached_or_remote(self) -> FoundIndex:
        self._make_directory()
        if not os.access(self._directory, os.W_OK):
            return self._read_foreign()
        with self._lock() as lock:
            found = read_origin(self._directory)
            self._came_along = found is None or (found.check is not None and found.check.came_along)
            origin = self._settle_origin(lock)
            cached = self._load_cached(lock.scratch, likely_digest(origin))
            if cached is not None and is_fresh(cached.known, origin.check):
                self._mark = origin.mark
                return cached
            sweep_left_overs(self._directory)
            if cached is None:
                return self._fetch(None, origin, lock)
            try:
                return self._fetch_if_changed(cached, origin, lock)
            except ObjectNotFoundError as error:
                raise gone(self._url, self._directory, error) from error
            except (StorageError, FormatError) as error:
                _logger.warning("the index in %s is used as it is, which may be old: %s", self._directory, error)
                version = version_of(cached.known, origin) or {}
                return self._conclude(cached, cached, checked(cached, version, None), origin, lock)

    def _read_foreign(self) -> FoundIndex:
        """Read the index of a directory that is not ours to write to, which another user may be about to fetch."""
        cached = None
        patience = Patience(self._patience())
        for _ in pauses(longest=_LOOK_SECONDS):
            coming = being_fetched(self._directory)
            origin = read_origin(self._directory)  # before the index: a later one has no say about an earlier mark
            self._check_origin(origin)
            cached = self._load_cached(None, None)
            if cached is not None or coming is None:
                break
            patience.check([coming])
        if cached is None:
            raise StorageError(
                f"{self._directory} has no index that may be read, and cannot be written to; choose another directory "
                "with local="
            )
        is_known = origin is not None and origin.digest == cached.known.digest
        self._mark = origin.mark if origin is not None and is_known else make_mark()
        check = None if origin is None else origin.check
        self._came_along = origin is None or (is_known and check is not None and check.came_along)
        return cached

    def _load_cached(self, scratch: Path | None, likely: str | None) -> FoundIndex | None:
        """The index in the cache directory; None if there is none, or one that was cut short or may not be read."""
        path = self._directory / INDEX_BASENAME
        try:
            return self._load(path, str(path), scratch, likely)
        except (FileNotFoundError, PermissionError, FormatError):
            return None

    def _fetch_if_changed(self, cached: FoundIndex, origin: Origin, lock: IndexLock) -> FoundIndex:
        """Ask for the remote's version of a large index; a small one is fetched in no more time than that takes."""
        known = version_of(cached.known, origin)
        if cached.known.is_large and known is not None:
            with suppress(ObjectNotFoundError):  # said of every failure over HTTP; fetching it tells which
                version = self._remote_version()
                if version["size"] == (self._directory / INDEX_BASENAME).stat().st_size and known in ({}, version):
                    return self._conclude(cached, cached, checked(cached, version, os.getpid()), origin, lock)
        return self._fetch(cached, origin, lock)

    def _fetch(self, cached: FoundIndex | None, origin: Origin, lock: IndexLock) -> FoundIndex:
        config = self._config
        download(
            self._url,
            config.storage_options,
            lock.arriving,
            expected_bytes=None,
            retry=config.attempts,
            timeout=config.download_timeout,
        )
        size = lock.arriving.stat().st_size
        fetched = self._load(lock.arriving, mask_url(self._url), lock.scratch, None)
        version: Mapping[str, Any] = {}
        if fetched.known.is_large:
            with suppress(StorageError):
                version = self._remote_version()
        if cached is None or cached.known.digest != fetched.known.digest:
            self._replace(lock)
        # Of another size it is a later version, which is to be noticed next time.
        check = checked(fetched, version if version.get("size") == size else {}, os.getpid())
        return self._conclude(cached, fetched, check, origin, lock)

    def _replace(self, lock: IndexLock) -> None:
        """Let the index that was fetched take the place of the one before, unless that is another user's to keep."""
        path = self._directory / INDEX_BASENAME
        try:
            with lock.arriving.open("rb") as file:
                adopt_file(file.fileno(), self._directory)
            os.replace(lock.arriving, path)
        except PermissionError as error:
            _logger.warning(
                "%s is not what the remote has, and may not be replaced: %s; what the remote has is used, and fetched "
                "at each start; have that file removed, or choose another directory with local=",
                path,
                error,
            )
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error}; choose another directory with local=") from error

    def _conclude(
        self, cached: FoundIndex | None, found: FoundIndex, check: IndexCheck, origin: Origin, lock: IndexLock
    ) -> FoundIndex:
        """Note which index is here now, and find the mark that goes with it."""
        is_same = cached is not None and cached.known.digest == found.known.digest
        self._came_along = self._came_along and is_same and origin.digest in (None, found.known.digest)
        check = replace(check, came_along=self._came_along)
        marks = IndexMarks(self._directory, lock.scratch)
        settled = marks.settle(origin, cached, found)
        self._mark = marks.note(settled, origin, check).mark
        return found

    def _load(self, path: Path, shown: str, scratch: Path | None, likely: str | None) -> FoundIndex:
        return load_index(path, shown, self._forms, scratch, likely)

    def _remote_version(self) -> dict[str, Any]:
        config = self._config
        return object_version(self._url, config.storage_options, retry=config.attempts, timeout=config.download_timeout)

    @property
    def _url(self) -> str:
        assert self._config.remote, "otherwise it is read in place"
        return join_url(self._config.remote, INDEX_BASENAME)

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self._directory} cannot be made: {error}; give the stream another directory with local="
            ) from error

    def _lock(self) -> AbstractContextManager[IndexLock]:
        return held_index(self._directory, self._patience())

    def _patience(self) -> float:
        return longest_series(self._config.attempts, self._config.download_timeout) + _PARSE_SECONDS

    def _settle_origin(self, lock: IndexLock) -> Origin:
        in_place = self._config.source_directory() is not None
        origin = settle_origin(self._directory, self._origin_digest(), lock.scratch, of_originals=in_place)
        self._check_origin(origin)
        return origin

    def _origin_digest(self) -> str:
        source = self._config.source_directory()
        if source is not None:
            return origin_of(str(source), {}).decode()
        return origin_of(self._config.remote or "", self._config.storage_options).decode()

    def _check_origin(self, origin: Origin | None) -> None:
        if origin is None:
            return
        shown = mask_url(self._config.remote or str(self._config.local))
        if origin.remote != self._origin_digest():
            raise ConfigError(
                f"{self._directory} holds shards of another remote than {shown}; correct remote= if it is mistyped, "
                "give this stream a directory of its own with local=, or remove that one"
            )
        in_place = self._config.source_directory() is not None
        if origin.own is not None and origin.of_originals != in_place:
            kinds = ["files fetched from", "raw files decompressed from"]
            raise ConfigError(
                f"{self._directory} is for {kinds[not in_place]} {shown}, so it cannot be for {kinds[in_place]} there "
                "too; give this stream another directory with local=, or remove that one"
            )
