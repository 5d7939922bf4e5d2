"""The index of a stream on this node: fetched by one process, parsed once, and the same for all processes of a run.

Each index has a tag: files with this tag were checked by that index, or by one that agrees with it. The manifest
records the tag with the SHA-256 of the index. An index that only appends shards keeps the tag. Any other index gets the
next tag, so files that jobs with the previous index still publish are checked again. A process that is killed between
two steps leaves files unchecked at worst.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.cache import index_files
from lightning_streaming.cache.config import CacheConfig, has_images, missing_index_hint, other_format_at
from lightning_streaming.cache.file_states import CacheDirectory
from lightning_streaming.cache.generated_index import GeneratedIndex, KnownIndex, find_or_generate_index
from lightning_streaming.cache.index_files import IndexForms, IndexLock, LoadedIndex
from lightning_streaming.cache.records import (
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
"""Key of the digest of the listed files, in the record of a generated index."""
_PARSE_SECONDS = 60.0
"""Added to the timeout of a download without progress, for parsing a large index."""
_HEAD_BYTES = 64
"""Bytes that are read to detect a page of HTML."""
_POLL_SECONDS = 0.2
"""Longest pause between two checks whether another user has fetched the index."""


class IndexCache:
    """The index of one stream, and the tag of its cache directory.

    The first :meth:`read` selects the index. Pickled copies made after that, like those of worker processes, read the
    same one without a request, also after the remote or the file has changed.

    The constructor does no I/O. Instances may be pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._directory = config.cache_directory()
        self._forms = IndexForms(self._directory)
        # SHA-256 of the index that was read, and its text if that is small, so that copies read the same one.
        self._digest: str | None = None
        self._text: bytes | None = None
        # Retained, so that no process removes the parsed form while processes that need it may be started.
        self._index: DatasetIndex | None = None
        self._tag: int | None = None
        self._came_along = False  # whether the index existed here before we first fetched anything
        self._checked_after = 0  # earlier requests of other processes do not count; nanoseconds since the epoch

    def refreshed(self) -> IndexCache:
        """Return another cache of the same stream, whose first :meth:`read` requests the current index."""
        newer = IndexCache(self._config)
        newer._checked_after = time.time_ns()
        return newer

    def adopt(self, newer: IndexCache) -> None:
        """Switch to the index that another cache has read, which has all shards of this one."""
        self.__dict__.update(newer.__dict__)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    @property
    def tag(self) -> int:
        """The modification time, in nanoseconds, of fetched files that are ours, checked by this index, and unchanged.

        Reads the index if it was not read yet.

        Raises:
            StreamingError: :meth:`read` raises it.
        """
        if self._tag is None:
            self.read()
        assert self._tag is not None, "the index of a remote has one"
        return self._tag

    def own_tags(self) -> OwnTags:
        """Return the modification times of files that are ours in the cache directory; create a missing directory.

        Raises:
            StreamingError: :meth:`read` raises it; or the directory is not for raw files of a dataset in place.
        """
        if self._config.source_directory() is None:
            tag = self.tag
            return OwnTags(tag, came_with_index=self._came_along)
        manifest = read_manifest(self._directory)
        if manifest is None or manifest.own is None:
            if not self._can_write():
                return OwnTags(make_tag())  # no file there is ours
            with self._lock() as lock:
                manifest = self._ensure_manifest(lock)
        self._check_manifest(manifest)
        return OwnTags(None)

    def tag_in_place(self) -> int | None:
        """Return the tag of files that were fetched into the directory that is read in place, checked by its index.

        Returns:
            None if that directory is not a cache, or the cache of another index.

        Raises:
            StreamingError: :meth:`read` raises it.
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
        """Read the index of the stream.

        The first time, the remote is checked for a newer index, unless another process on this node did so just now. If
        the remote cannot be reached, the cached index is used, with a warning.

        Raises:
            IndexFormatError: The index is invalid.
            ObjectNotFoundError: There is none, or the remote does not have it any more.
            StorageError: It could not be fetched, or the index that this run started with is gone.
            ConfigError: The cache directory holds files of another remote.
            LockTimeoutError: Another process is fetching it, and has made no progress for too long.
        """
        if self._index is not None:
            return self._index
        if self._digest is not None:
            self._index = self._read_again(self._digest)
            return self._index
        source = self._config.source_directory()
        if source is None:
            loaded = self._read_cached_or_remote()
        elif self._config.format is None:
            loaded = self._read_in_place(source / INDEX_BASENAME)
        else:
            loaded = self._read_generated()
        self._digest, self._text, self._index = loaded.digest, loaded.text, loaded.index
        if loaded.is_new:  # not before: a map of an old form would keep it
            self._forms.sweep(keep=loaded.digest)
        return self._index

    def _read_again(self, digest: str) -> DatasetIndex:
        source = self._config.source_directory() if self._config.format is None else None
        path = (source or self._directory) / INDEX_BASENAME
        if self._text is not None:
            return parse_index(self._text, str(path))
        form = self._forms.open(digest)
        if form is not None:
            return form.index
        with suppress(OSError, FormatError):
            loaded = self._forms.load(path, likely=digest)
            if loaded.digest == digest:
                return loaded.index
        raise StorageError(
            f"the index that this run started with is gone: {path} was replaced by another one, and {self._directory} "
            "has no parsed form of it",
            hint="restart the run to read the new index",
            path=str(path),
        )

    def _read_in_place(self, path: Path) -> LoadedIndex:
        try:
            identity = Identity.of(path)
            if identity.size < index_files.LARGE_INDEX_BYTES:
                return self._forms.load(path)
            likely = None
            with suppress(StorageError):  # this user may not enter the directory
                manifest = read_manifest(self._directory)
                likely = None if manifest is None else manifest.digest
            form = self._forms.find(identity, likely)
            if form is not None:
                return LoadedIndex(form.index, form.digest)
            if not self._can_write():
                return self._forms.load(path, likely=likely)
            with self._lock() as lock:
                manifest = self._ensure_manifest(lock)
                loaded = self._forms.load(path, scratch=lock.scratch, likely=manifest.digest)
                with suppress(OSError):  # another user's
                    check = IndexCheck(digest=loaded.digest, checked=time.time_ns())
                    write_manifest(self._directory, replace(manifest, check=check), lock.scratch)
                return loaded
        except (FileNotFoundError, NotADirectoryError):
            hint = "correct the path, or, to fill this directory from a remote, pass that as remote= and this as local="
            if (other := other_format_at(path.parent)) is not None:
                format_name, name = other
                hint = f"files like {name} are read with format={format_name!r}, see docs/other-formats.md"
            elif (index_hint := missing_index_hint(path.parent)) is not None:
                hint = index_hint
            elif has_images(path.parent):
                hint = "`lightning-streaming convert FOLDER OUT` converts a folder of images"
            raise ObjectNotFoundError(
                f"there is no dataset at {path.parent}: {path} does not exist", hint=hint, path=str(path)
            ) from None

    def _read_generated(self) -> LoadedIndex:
        """Return the index of data of another format that is read in place, generated again if its files changed."""
        if not self._can_write():
            text = self._generate(None).text
            return LoadedIndex(parse_index(text, str(self._location)), hashlib.sha256(text).hexdigest(), text)
        with self._lock() as lock:
            manifest, started = self._ensure_manifest(lock), time.time_ns()
            cached = self._load_cached(lock.scratch, manifest.digest)
            generated = self._generate(cached, manifest)
            write_no_link(lock.arriving, generated.text)
            loaded = self._forms.load(lock.arriving, scratch=lock.scratch, shown=str(self._location))
            if cached is None or cached.digest != loaded.digest:
                self._replace(lock)
            with suppress(OSError):  # another user's; then its files are read again next time
                check = IndexCheck(digest=loaded.digest, checked=started, version={_LISTING: generated.listing})
                write_manifest(self._directory, replace(manifest, check=check), lock.scratch)
            return loaded

    def _generate(self, before: LoadedIndex | None, manifest: CacheManifest | None = None) -> GeneratedIndex:
        """Generate the index of data of another format.

        Args:
            before: The index that was generated before; None if there is none.
            manifest: The manifest, which has the time of that.
        """
        check = None if before is None or manifest is None else manifest.check_of(before.digest)
        known = None
        if before is not None and check is not None:
            known = KnownIndex(before.index.shards, check.checked / 1e9, str(check.version.get(_LISTING, "")))
        return find_or_generate_index(self._config, known)

    def _can_write(self) -> bool:
        """Return whether the cache directory of a dataset that is read in place exists, or could be created."""
        with suppress(StorageError):
            make_cache_directory(self._directory)
            return os.access(self._directory, os.W_OK)
        return False

    def _read_cached_or_remote(self) -> LoadedIndex:
        make_cache_directory(self._directory)
        if not os.access(self._directory, os.W_OK):
            return self._read_foreign()
        with self._lock() as lock:
            existing = read_manifest(self._directory)
            self._came_along = existing is None or (existing.check is not None and existing.check.came_along)
            manifest = self._ensure_manifest(lock)
            cached = self._load_cached(lock.scratch, manifest.digest)
            check = None if cached is None else manifest.check_of(cached.digest)
            if cached is not None and check is not None and check.is_fresh(self._checked_after):
                self._tag = manifest.tag
                return cached
            index_files.sweep_leftovers(self._directory)
            if cached is None:
                return self._fetch(None, manifest, lock)
            try:
                # Only the version of a large index is requested; fetching a small one takes no longer than that.
                if cached.text is None and check is not None and self._config.format is None:
                    with suppress(ObjectNotFoundError):  # HTTP reports every failure so; fetching it reports which
                        version = self._remote_version()
                        size = (self._directory / INDEX_BASENAME).stat().st_size
                        if version["size"] == size and check.version in ({}, version):
                            return self._record(cached, cached, manifest, lock, version=version)
                return self._fetch(cached, manifest, lock)
            except ObjectNotFoundError as error:
                raise ObjectNotFoundError(
                    f"{self._location} does not exist any more, but {self._directory} has an index that was fetched "
                    f"from there ({error})",
                    hint="correct remote=, or restore the dataset; to read the cached shards only, pass "
                    f"local={str(self._directory)!r} without remote=",
                    path=str(self._location),
                ) from error
            except (StorageError, FormatError) as error:
                _logger.warning("using the cached index in %s, which may be outdated: %s", self._directory, error)
                known = {} if check is None else check.version
                return self._record(cached, cached, manifest, lock, version=known, has_response=False)

    def _read_foreign(self) -> LoadedIndex:
        """Read the index of a directory that this user may not write to; another user may be fetching it."""
        cached = None
        stall = StallTimeout(self._stall_seconds())
        for _ in pauses(longest=_POLL_SECONDS):
            staging = index_files.being_fetched(self._directory)
            manifest = read_manifest(self._directory)  # before the index: its tag may be older, not newer
            self._check_manifest(manifest)
            cached = self._load_cached(None, None)
            if cached is not None or staging is None:
                break
            stall.check([staging])
        if cached is None:
            raise StorageError(
                f"{self._directory} has no readable index, and this user may not write to it",
                hint="choose another directory with local=",
                path=str(self._directory),
            )
        is_known = manifest is not None and manifest.digest == cached.digest
        self._tag = manifest.tag if manifest is not None and is_known else make_tag()
        check = None if manifest is None else manifest.check
        self._came_along = manifest is None or (is_known and check is not None and check.came_along)
        return cached

    def _load_cached(self, scratch: Path | None, likely: str | None) -> LoadedIndex | None:
        """Return the index in the cache directory; None if there is none, or it is truncated or may not be read."""
        path = self._directory / INDEX_BASENAME
        try:
            return self._forms.load(path, scratch=scratch, likely=likely)
        except (FileNotFoundError, PermissionError, FormatError):
            return None

    def _fetch(self, cached: LoadedIndex | None, manifest: CacheManifest, lock: IndexLock) -> LoadedIndex:
        def refuse_page(path: Path) -> None:
            # A proxy or a login page may send HTML instead of an index for a while.
            with path.open("rb") as file:
                if file.read(_HEAD_BYTES).lstrip().startswith(b"<"):
                    shown = str(self._location)
                    raise PageError(f"{shown} must be JSON, but a page of HTML arrived", path=shown)

        generated = None if self._config.format is None else self._generate(cached, manifest)
        if generated is None:
            self._location.download(lock.arriving, check=refuse_page)
        else:
            write_no_link(lock.arriving, generated.text)
        size = lock.arriving.stat().st_size
        fetched = self._forms.load(lock.arriving, scratch=lock.scratch, shown=str(self._location))
        version: Mapping[str, Any] = {}
        if generated is not None:
            version = {_LISTING: generated.listing}
        elif fetched.text is None:
            with suppress(StorageError):
                version = self._remote_version()
            if version.get("size") != size:  # a later version, to be detected next time
                version = {}
        if cached is None or cached.digest != fetched.digest:
            self._replace(lock)
        return self._record(cached, fetched, manifest, lock, version=version)

    def _replace(self, lock: IndexLock) -> None:
        """Replace the index by the fetched one, unless it belongs to another user."""
        path = self._directory / INDEX_BASENAME
        try:
            with lock.arriving.open("rb") as file:
                adopt_file(file.fileno(), self._directory)
            os.replace(lock.arriving, path)
        except PermissionError as error:
            _logger.warning(
                "%s differs from the index of the remote, and may not be replaced: %s; the remote's index is used, and "
                "fetched at each start; remove that file, or choose another directory with local=",
                path,
                error,
            )
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error}",
                hint="choose another directory with local=",
                path=str(path),
            ) from error

    def _record(
        self,
        cached: LoadedIndex | None,
        current: LoadedIndex,
        manifest: CacheManifest,
        lock: IndexLock,
        *,
        version: Mapping[str, Any],
        has_response: bool = True,
    ) -> LoadedIndex:
        """Record the current index and its version at the remote in the manifest, and set its tag."""
        is_same = cached is not None and cached.digest == current.digest
        self._came_along = self._came_along and is_same and manifest.digest in (None, current.digest)
        check = IndexCheck(
            digest=current.digest,
            checked=time.time_ns(),
            version=version,
            asker=os.getpid() if has_response else None,
            came_along=self._came_along,
        )
        self._tag = _IndexTags(self._directory, lock.scratch).update(manifest, cached, current, check)
        return current

    def _remote_version(self) -> dict[str, Any]:
        stat = self._location.stat()
        return {"size": stat.size, **stat.version}

    @property
    def _location(self) -> Location:
        return self._config.location / INDEX_BASENAME

    def _lock(self) -> AbstractContextManager[IndexLock]:
        return index_files.locked_index(self._directory, self._stall_seconds())

    def _stall_seconds(self) -> float:
        return longest_series(self._config.attempts, self._config.download_timeout) + _PARSE_SECONDS

    def _ensure_manifest(self, lock: IndexLock) -> CacheManifest:
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
                hint="correct remote=, set another local= for this stream, or remove that directory",
                option="remote",
                path=str(self._directory),
            )
        in_place = self._config.source_directory() is not None
        if manifest.own is not None and manifest.of_originals != in_place:
            kinds = ["files fetched from", "raw files decompressed from"]
            raise ConfigError(
                f"{self._directory} is for {kinds[not in_place]} {shown}, and cannot hold {kinds[in_place]} there, too",
                hint="set another local= for this stream, or remove that directory",
                option="local",
                path=str(self._directory),
            )


class _IndexTags:
    """The tag of a directory of files of a remote; used while the lock of the index is held.

    Args:
        directory: The cache directory, which exists.
        scratch: A file in it that no other process writes.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._directory = directory
        self._scratch = scratch

    def update(
        self, manifest: CacheManifest, old: LoadedIndex | None, new: LoadedIndex, check: IndexCheck
    ) -> int | None:
        """Return the tag of an index that is in the directory now, and record both.

        If the old index is known to be that of the old tag, files that both indexes have stay checked, and files that
        differ are removed. Otherwise all files are checked again.

        Args:
            manifest: The manifest when the lock was taken.
            old: The previous index; None if there was none that could be read.
            new: The current one.
            check: The request for it, to be recorded.
        """
        updated = manifest
        known = old if old is not None and manifest.digest == old.digest else None
        # Mostly a new index only appends shards. The same index is not compared: that takes as long as it is large.
        if manifest.digest != new.digest and not (
            known is not None and known.index.shards.starts_like(new.index.shards, len(known.index.shards))
        ):
            updated = self._renew(manifest, new.digest)
            if known is not None and updated.check is None:
                own = OwnTags(manifest.tag)
                directory = CacheDirectory(self._directory, lambda: own)
                for name, is_same in _compare_files(known.index, new.index):
                    path = join_under(self._directory, name)
                    with suppress(FileNotFoundError):
                        modified = path.stat().st_mtime_ns
                        if is_same and modified == manifest.tag:
                            _change_tag(path, modified, _tag_of(updated))
                        elif not is_same and own.include(modified):
                            directory.remove(path)
        recorded = replace(updated, check=check)
        with suppress(OSError), self._locked(updated):  # else the remote is checked again next time
            latest = read_manifest(self._directory)
            if latest is None or latest.tag != updated.tag:
                return recorded.tag  # another user was faster; this process continues like a job that started before
            if latest.digest not in (manifest.digest, updated.digest, check.digest):
                recorded = replace(recorded, tag=next_tag(_tag_of(latest)))
            write_manifest(self._directory, recorded, self._scratch)
        return recorded.tag

    def _renew(self, manifest: CacheManifest, digest: str) -> CacheManifest:
        """Write a manifest with the next tag, and without a request; return it."""
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
        except OSError:  # another user's file: no file there counts as checked
            return replace(manifest, tag=make_tag())

    @contextmanager
    def _locked(self, manifest: CacheManifest) -> Iterator[None]:
        """Hold the usage lock for a moment: each user has a separate index lock, but there is one manifest."""
        with CacheDirectory(self._directory, lambda: OwnTags(_tag_of(manifest))).locked():
            yield


def _tag_of(manifest: CacheManifest) -> int:
    return make_tag() if manifest.tag is None else manifest.tag


def _change_tag(path: Path, before: int, tag: int) -> None:
    """Change the tag of a file; by its descriptor, since another file could get its name meanwhile."""
    with suppress(OSError):  # gone, or another user's: it is checked when it is used
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            if status.st_mtime_ns == before:
                os.utime(descriptor, ns=(status.st_atime_ns, tag))
        finally:
            os.close(descriptor)


def _compare_files(old: DatasetIndex, new: DatasetIndex) -> Iterator[tuple[str, bool]]:
    """Yield names of files that both indexes have, and whether these are the same: size and hashes.

    If one file of a pair, raw and compressed, has changed, the other counts as changed too: it may have no hash.
    Without hashes no file is known to be the same: sizes of numbers, for example, are always equal. A version that only
    one index has does not count: otherwise a listing that failed once would empty the cache.
    """
    known = {name: content for name, content, _ in _pairs(old)}
    for name, content, names in _pairs(new):
        if name in known:
            is_same = known[name].is_same(content)
            yield from ((file, is_same) for file in names)


class _Content(NamedTuple):
    """The recorded content of a raw file and of its compressed form."""

    digest: int
    """Hash of their sizes and hashes."""
    has_hashes: bool
    version: str
    """Version of the stored file."""

    def is_same(self, other: _Content) -> bool:
        """Return whether both are known to be of the same files."""
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
