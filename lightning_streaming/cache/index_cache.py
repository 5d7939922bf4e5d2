"""A stream's index on this node: fetched by one process, parsed once, and the same for all processes of a run.

Each index goes with a tag: files that carry it were checked by that index, or by one that agrees with it. The manifest
ties the tag to the SHA-256 of the index. An index that only has more shards keeps the tag. Any other takes the next
one, so that jobs which began with the index before, and still publish files, do so under a tag that is not believed any
more. The steps are such that whoever is killed between two of them leaves files unchecked at worst.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.cache import index_files
from lightning_streaming.cache.config import CacheConfig, has_images, missing_index_hint, other_format_at
from lightning_streaming.cache.file_states import CacheDirectory
from lightning_streaming.cache.generated_index import GeneratedIndex, KnownIndex, find_or_generate_index
from lightning_streaming.cache.index_files import IndexForms, IndexLock, LoadedIndex
from lightning_streaming.cache.manifest import (
    CacheManifest,
    IndexCheck,
    OwnTags,
    ensure_manifest,
    make_tag,
    next_tag,
    read_manifest,
    write_manifest,
)
from lightning_streaming.cache.shared_files import StallTimeout, adopt_file, make_cache_directory, pauses, write_no_link
from lightning_streaming.errors import ConfigError, FormatError, ObjectNotFoundError, StorageError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import Identity, join_under
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.storage import Location
from lightning_streaming.storage.retries import PageError, longest_series

_logger = package_logger(__name__)

_LISTING = "listing"
"""In what is noted of an index that was made: what the listing of the files was then."""
_PARSE_SECONDS = 60.0
"""Added to what a download may take without a byte, for parsing a large index."""
_HEAD_BYTES = 64
"""In which a page of HTML is told from an index."""
_LOOK_SECONDS = 0.2
"""Longest pause between looks whether another user has fetched the index."""


class IndexCache:
    """The index of one stream, and the tag of its cache directory.

    The first call of :meth:`read` decides which index it is. Copies that are pickled after that, like those of worker
    processes, read the same one whatever happens to the remote or the file, and without asking anybody.

    Making one touches nothing. It may be pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._directory = config.cache_directory()
        self._forms = IndexForms(self._directory)
        # SHA-256 of the index that was read, and its text where that is small, so that copies get at the very same.
        self._digest: str | None = None
        self._text: bytes | None = None
        # Kept, so that nobody removes the parsed form as long as processes may be started that need it.
        self._index: DatasetIndex | None = None
        self._tag: int | None = None
        self._came_along = False  # whether the index was here before we first fetched anything
        self._asked_after = 0  # what others were told before does not count; nanoseconds since the epoch

    def anew(self) -> IndexCache:
        """Another one of the same stream, whose first :meth:`read` asks what there is by now."""
        found = IndexCache(self._config)
        found._asked_after = time.time_ns()
        return found

    def go_on_with(self, newer: IndexCache) -> None:
        """Be of the index that another one has read, which has all shards of this one."""
        self.__dict__.update(newer.__dict__)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    @property
    def tag(self) -> int:
        """The modification time, in nanoseconds, of fetched files that are ours, checked by this index, and unchanged.

        It goes with the index, which is read if it was not yet.

        Raises:
            StreamingError: As for :meth:`read`.
        """
        if self._tag is None:
            self.read()
        assert self._tag is not None, "a remote's index comes with one"
        return self._tag

    def own_tags(self) -> OwnTags:
        """Which modification times are ours in the cache directory, which is made if it is not there.

        Raises:
            StreamingError: As for :meth:`read`; or the directory is not for raw files of a dataset in place.
        """
        if self._config.source_directory() is None:
            tag = self.tag
            return OwnTags(tag, came_with_index=self._came_along)
        manifest = read_manifest(self._directory)
        if manifest is None or manifest.own is None:
            if not self._may_write():
                return OwnTags(make_tag())  # nothing there can be ours
            with self._lock() as lock:
                manifest = self._settle_manifest(lock)
        self._check_manifest(manifest)
        return OwnTags(None)

    def tag_in_place(self) -> int | None:
        """The tag of what was fetched into the directory that is read in place, and checked by the index there.

        Returns:
            None where that directory is no cache, or one of another index by now.

        Raises:
            StreamingError: As for :meth:`read`.
        """
        self.read()
        source = self._config.source_directory()
        assert source is not None, "it is read in place"
        with suppress(StorageError):
            manifest = read_manifest(source)
            if manifest is not None and manifest.digest == self._digest:
                return manifest.tag
        return None

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
            self._index = self._read_first() if self._digest is None else self._read_again(self._digest)
        return self._index

    def _read_first(self) -> DatasetIndex:
        source = self._config.source_directory()
        if source is None:
            found = self._read_cached_or_remote()
        elif self._config.format is None:
            found = self._read_in_place(source / INDEX_BASENAME)
        else:
            found = self._read_made()
        self._digest, self._text = found.digest, found.text
        if found.is_new:  # not before: what was read of an old one would keep it
            self._forms.sweep(keep=found.digest)
        return found.index

    def _read_again(self, digest: str) -> DatasetIndex:
        source = self._config.source_directory() if self._config.format is None else None
        path = (source or self._directory) / INDEX_BASENAME
        if self._text is not None:
            return parse_index(self._text, str(path))
        form = self._forms.open(digest)
        if form is not None:
            return form.index
        with suppress(OSError, FormatError):
            found = self._forms.load(path, likely=digest)
            if found.digest == digest:
                return found.index
        raise StorageError(
            f"the index that this run began with is gone: {path} is another one by now, and no parsed form of it is in "
            f"{self._directory}",
            hint="start again to read the new one",
            path=str(path),
        )

    def _read_in_place(self, path: Path) -> LoadedIndex:
        try:
            identity = Identity.of(path)
            if identity.size < index_files.LARGE_INDEX_BYTES:
                return self._forms.load(path)
            likely = None
            with suppress(StorageError):  # a directory that this user may not enter
                known = read_manifest(self._directory)
                likely = None if known is None else known.digest
            form = self._forms.find(identity, likely)
            if form is not None:
                return LoadedIndex(form.index, form.digest)
            if not self._may_write():
                return self._forms.load(path, likely=likely)
            with self._lock() as lock:
                manifest = self._settle_manifest(lock)
                found = self._forms.load(path, scratch=lock.scratch, likely=manifest.digest)
                with suppress(OSError):  # another user's
                    check = IndexCheck(digest=found.digest, checked=time.time_ns())
                    write_manifest(self._directory, replace(manifest, check=check), lock.scratch)
                return found
        except (FileNotFoundError, NotADirectoryError):
            hint = (
                "correct the path, or, if this directory is to be filled from elsewhere, give that as remote and this "
                "as local"
            )
            if (other := other_format_at(path.parent)) is not None:
                told, name = other
                hint = f"files like {name} are read with format={told!r}, see docs/other-formats.md"
            elif (index_hint := missing_index_hint(path.parent)) is not None:
                hint = index_hint
            elif has_images(path.parent):
                hint = "`lightning-streaming convert FOLDER OUT` converts a folder of images"
            raise ObjectNotFoundError(
                f"there is no dataset at {path.parent}: {path} does not exist", hint=hint, path=str(path)
            ) from None

    def _read_made(self) -> LoadedIndex:
        """The index of data of another format that is read in place: made anew where its files have changed."""
        if not self._may_write():
            text = self._made(None).text
            return LoadedIndex(parse_index(text, str(self._location)), hashlib.sha256(text).hexdigest(), text)
        with self._lock() as lock:
            manifest, began = self._settle_manifest(lock), time.time_ns()
            cached = self._load_cached(lock.scratch, manifest.digest)
            made = self._made(cached, manifest)
            write_no_link(lock.arriving, made.text)
            found = self._forms.load(lock.arriving, scratch=lock.scratch, shown=str(self._location))
            if cached is None or cached.digest != found.digest:
                self._replace(lock)
            with suppress(OSError):  # another user's; then its files are looked at next time
                check = IndexCheck(digest=found.digest, checked=began, version={_LISTING: made.listing})
                write_manifest(self._directory, replace(manifest, check=check), lock.scratch)
            return found

    def _made(self, before: LoadedIndex | None, manifest: CacheManifest | None = None) -> GeneratedIndex:
        """An index of data of another format.

        Args:
            before: The one that was made before; None for none.
            manifest: Tells when.
        """
        check = None if before is None or manifest is None else manifest.check_of(before.digest)
        known = None
        if before is not None and check is not None:
            known = KnownIndex(before.index.shards, check.checked / 1e9, str(check.version.get(_LISTING, "")))
        return find_or_generate_index(self._config, known)

    def _may_write(self) -> bool:
        """Whether the cache directory of a dataset that is read in place is there, or could be made."""
        with suppress(StorageError):
            make_cache_directory(self._directory)
            return os.access(self._directory, os.W_OK)
        return False

    def _read_cached_or_remote(self) -> LoadedIndex:
        make_cache_directory(self._directory)
        if not os.access(self._directory, os.W_OK):
            return self._read_foreign()
        with self._lock() as lock:
            found = read_manifest(self._directory)
            self._came_along = found is None or (found.check is not None and found.check.came_along)
            manifest = self._settle_manifest(lock)
            cached = self._load_cached(lock.scratch, manifest.digest)
            check = None if cached is None else manifest.check_of(cached.digest)
            if cached is not None and check is not None and check.is_fresh(self._asked_after):
                self._tag = manifest.tag
                return cached
            index_files.sweep_left_overs(self._directory)
            if cached is None:
                return self._fetch(None, manifest, lock)
            try:
                return self._fetch_if_changed(cached, manifest, lock)
            except ObjectNotFoundError as error:
                raise ObjectNotFoundError(
                    f"{self._location} is not there any more, though {self._directory} keeps an index that came "
                    f"from it ({error})",
                    hint="correct remote=, or put the dataset back; to read what this node keeps, whole or not, give "
                    f"local={str(self._directory)!r} alone, without remote=",
                    path=str(self._location),
                ) from error
            except (StorageError, FormatError) as error:
                _logger.warning("the index in %s is used as it is, which may be old: %s", self._directory, error)
                check = manifest.check_of(cached.digest)
                version = {} if check is None else check.version
                return self._conclude(cached, cached, manifest, lock, version=version, asked=False)

    def _read_foreign(self) -> LoadedIndex:
        """Read the index of a directory that is not ours to write to, which another user may be about to fetch."""
        cached = None
        stall = StallTimeout(self._stall_seconds())
        for _ in pauses(longest=_LOOK_SECONDS):
            coming = index_files.being_fetched(self._directory)
            manifest = read_manifest(self._directory)  # before the index: a later one has no say about an earlier tag
            self._check_manifest(manifest)
            cached = self._load_cached(None, None)
            if cached is not None or coming is None:
                break
            stall.check([coming])
        if cached is None:
            raise StorageError(
                f"{self._directory} has no index that may be read, and cannot be written to",
                hint="choose another directory with local=",
                path=str(self._directory),
            )
        is_known = manifest is not None and manifest.digest == cached.digest
        self._tag = manifest.tag if manifest is not None and is_known else make_tag()
        check = None if manifest is None else manifest.check
        self._came_along = manifest is None or (is_known and check is not None and check.came_along)
        return cached

    def _load_cached(self, scratch: Path | None, likely: str | None) -> LoadedIndex | None:
        """The index in the cache directory; None if there is none, or one that was cut short or may not be read."""
        path = self._directory / INDEX_BASENAME
        try:
            return self._forms.load(path, scratch=scratch, likely=likely)
        except (FileNotFoundError, PermissionError, FormatError):
            return None

    def _fetch_if_changed(self, cached: LoadedIndex, manifest: CacheManifest, lock: IndexLock) -> LoadedIndex:
        """Ask for the remote's version of a large index; a small one is fetched in no more time than that takes."""
        check = manifest.check_of(cached.digest)
        if cached.text is None and check is not None and self._config.format is None:
            with suppress(ObjectNotFoundError):  # said of every failure over HTTP; fetching it tells which
                version = self._remote_version()
                size = (self._directory / INDEX_BASENAME).stat().st_size
                if version["size"] == size and check.version in ({}, version):
                    return self._conclude(cached, cached, manifest, lock, version=version)
        return self._fetch(cached, manifest, lock)

    def _fetch(self, cached: LoadedIndex | None, manifest: CacheManifest, lock: IndexLock) -> LoadedIndex:
        made = None if self._config.format is None else self._made(cached, manifest)
        if made is None:
            self._location.download(lock.arriving, check=partial(_refuse_page, str(self._location)))
        else:
            write_no_link(lock.arriving, made.text)
        size = lock.arriving.stat().st_size
        fetched = self._forms.load(lock.arriving, scratch=lock.scratch, shown=str(self._location))
        version: Mapping[str, Any] = {}
        if fetched.text is None and self._config.format is None:
            with suppress(StorageError):
                version = self._remote_version()
        if cached is None or cached.digest != fetched.digest:
            self._replace(lock)
        # Of another size it is a later version, which is to be noticed next time.
        version = version if version.get("size") == size else {}
        if made is not None:
            version = {_LISTING: made.listing}
        return self._conclude(cached, fetched, manifest, lock, version=version)

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
            raise StorageError(
                f"{path} cannot be written: {error}",
                hint="choose another directory with local=",
                path=str(path),
            ) from error

    def _conclude(
        self,
        cached: LoadedIndex | None,
        found: LoadedIndex,
        manifest: CacheManifest,
        lock: IndexLock,
        *,
        version: Mapping[str, Any],
        asked: bool = True,
    ) -> LoadedIndex:
        """Note which index is here now, what the remote said of it, and find the tag that goes with it."""
        is_same = cached is not None and cached.digest == found.digest
        self._came_along = self._came_along and is_same and manifest.digest in (None, found.digest)
        check = IndexCheck(
            digest=found.digest,
            checked=time.time_ns(),
            version=version,
            asker=os.getpid() if asked else None,
            came_along=self._came_along,
        )
        self._tag = _IndexTags(self._directory, lock.scratch).settle(manifest, cached, found, check)
        return found

    def _remote_version(self) -> dict[str, Any]:
        found = self._location.stat()
        return {"size": found.size, **found.version}

    @property
    def _location(self) -> Location:
        return self._config.location / INDEX_BASENAME

    def _lock(self) -> AbstractContextManager[IndexLock]:
        return index_files.locked_index(self._directory, self._stall_seconds())

    def _stall_seconds(self) -> float:
        return longest_series(self._config.attempts, self._config.download_timeout) + _PARSE_SECONDS

    def _settle_manifest(self, lock: IndexLock) -> CacheManifest:
        in_place = self._config.source_directory() is not None
        manifest = ensure_manifest(self._directory, self._config.digest, lock.scratch, of_originals=in_place)
        self._check_manifest(manifest)
        return manifest

    def _check_manifest(self, manifest: CacheManifest | None) -> None:
        if manifest is None:
            return
        shown = self._config.shown
        if manifest.remote != self._config.digest:
            how = "" if self._config.format is None else f" in format {self._config.format}"
            raise ConfigError(
                f"{self._directory} holds shards of another remote than {shown}{how}",
                hint="correct remote= if it is "
                "mistyped, give this stream a directory of its own with local=, or remove that one",
                option="remote",
                path=str(self._directory),
            )
        in_place = self._config.source_directory() is not None
        if manifest.own is not None and manifest.of_originals != in_place:
            kinds = ["files fetched from", "raw files decompressed from"]
            raise ConfigError(
                f"{self._directory} is for {kinds[not in_place]} {shown}, so it cannot be for {kinds[in_place]} there "
                "too",
                hint="give this stream another directory with local=, or remove that one",
                option="local",
                path=str(self._directory),
            )


def _refuse_page(shown: str, path: Path) -> None:
    """Refuse a page of HTML, which a proxy or a login page may send in place of an index for a while.

    Raises:
        PageError: It is one.
    """
    with path.open("rb") as file:
        if file.read(_HEAD_BYTES).lstrip().startswith(b"<"):
            raise PageError(f"{shown} must be JSON, but a page of HTML arrived", path=shown)


class _IndexTags:
    """Finds the tag of a directory that holds files of a remote; used by who holds the index's lock.

    Args:
        directory: The cache directory, which is there.
        scratch: A file in it that nobody else writes.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._directory = directory
        self._scratch = scratch

    def settle(
        self, manifest: CacheManifest, old: LoadedIndex | None, new: LoadedIndex, check: IndexCheck
    ) -> int | None:
        """Find the tag for an index that is in its place by now, and tie it to that.

        Files that both indexes have keep their standing, if the old one is known to be what the tag went with; those
        that are others by now are removed. Without such an old one, all are to be checked again.

        Args:
            manifest: What was known when the lock was taken.
            old: The index that was here; None if there was none that could be read.
            new: The one that is here.
            check: What is to be noted of that.
        """
        settled = manifest
        known = old if old is not None and manifest.digest == old.digest else None
        if manifest.digest != new.digest and not (known is not None and _extends(known.index, new.index)):
            settled = self._renew(manifest, new.digest)
            if known is not None and settled.check is None:
                self._carry_over(manifest, settled, known, new)
        noted = replace(settled, check=check)
        with suppress(OSError), self._locked(settled):  # else the remote is asked again next time
            latest = read_manifest(self._directory)
            if latest is None or latest.tag != settled.tag:
                return noted.tag  # another user was faster; we go on like a job that began before
            if latest.digest not in (manifest.digest, settled.digest, check.digest):
                noted = replace(noted, tag=next_tag(_tag_of(latest)))
            write_manifest(self._directory, noted, self._scratch)
        return noted.tag

    def _renew(self, manifest: CacheManifest, digest: str) -> CacheManifest:
        try:
            with self._locked(manifest):
                latest = read_manifest(self._directory) or manifest
                if latest.tag != manifest.tag and latest.digest == digest:
                    return latest  # another user adopted the same index just now
                renewed = replace(latest, tag=next_tag(_tag_of(latest)), check=None)
                write_manifest(self._directory, renewed, self._scratch)
                if latest.digest is not None:
                    _logger.info("files in %s that changed with the index are fetched again", self._directory)
                return renewed
        except OSError:  # another user's file: nothing there is believed
            return replace(manifest, tag=make_tag())

    def _carry_over(self, manifest: CacheManifest, renewed: CacheManifest, old: LoadedIndex, new: LoadedIndex) -> None:
        own = OwnTags(manifest.tag)
        place = CacheDirectory(self._directory, lambda: own)
        for name, is_same in _compare_files(old.index, new.index):
            path = join_under(self._directory, name)
            with suppress(FileNotFoundError):
                modified = path.stat().st_mtime_ns
                if is_same and modified == manifest.tag:
                    _tag_again(path, modified, _tag_of(renewed))
                elif not is_same and own.include(modified):
                    place.remove(path)

    @contextmanager
    def _locked(self, manifest: CacheManifest) -> Iterator[None]:
        """Hold the usage lock, for moments: each user has an index lock of their own, but the manifest is one."""
        with CacheDirectory(self._directory, lambda: OwnTags(_tag_of(manifest))).locked():
            yield


def _tag_of(manifest: CacheManifest) -> int:
    return make_tag() if manifest.tag is None else manifest.tag


def _tag_again(path: Path, before: int, tag: int) -> None:
    """Change a file's tag; by its descriptor, lest another one take its name meanwhile."""
    with suppress(OSError):  # gone, or another user's: it is checked when it is used
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            if found.st_mtime_ns == before:
                os.utime(descriptor, ns=(found.st_atime_ns, tag))
        finally:
            os.close(descriptor)


def _extends(old: DatasetIndex, new: DatasetIndex) -> bool:
    """Whether a new index has all shards of the old one, and only more at the end, as mostly."""
    return old.shards.starts_like(new.shards, len(old.shards))


def _compare_files(old: DatasetIndex, new: DatasetIndex) -> Iterator[tuple[str, bool]]:
    """Names of files of raw files that both indexes have, and whether they are the same: size and hashes.

    Where one file of a pair, raw and compressed, has changed, the other counts as changed too: it may have no hash that
    would tell. Without hashes nothing is the same for sure: sizes of numbers, for example, are always alike. A version
    that only one index has changes nothing: a listing that failed once would else empty the cache.
    """
    known = {name: content for name, content, _ in _pairs(old)}
    for name, content, names in _pairs(new):
        if name in known:
            for one in names:
                yield one, known[name].is_same(content)


class _Content(NamedTuple):
    """The recorded content of a raw file and of its compressed form."""

    digest: int
    """Of their sizes and hashes."""
    has_hashes: bool
    version: str
    """Of the stored file."""

    def is_same(self, other: _Content) -> bool:
        """Return whether both are surely of the same files."""
        versions = {self.version, other.version} - {""}
        is_known = versions or (self.has_hashes and other.has_hashes)
        return bool(is_known) and self.digest == other.digest and len(versions) < 2


def _pairs(index: DatasetIndex) -> Iterator[tuple[str, _Content, list[str]]]:
    """Yield each raw file's name, its content and its compressed form's, and the names of both."""
    for shard in index.shards:
        for pair in shard.files:
            files = [file for file in pair if file is not None]
            digest = hash(tuple((file.bytes, *sorted(file.hashes.items())) for file in files))
            content = _Content(digest, all(file.hashes for file in files), files[-1].version)
            yield pair[0].basename, content, [file.basename for file in files]
