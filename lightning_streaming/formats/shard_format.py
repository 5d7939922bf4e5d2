"""Interfaces of shard readers and of formats of other libraries, and what implementations of these formats share.

A format answers two questions: which shards a location has (``describe``), and what the samples of a shard are
(``open``). The result of ``describe`` goes into an index like any other, so cache, orders, selections and resumes know
nothing of formats. A shard is a file of the data, or several that belong together; its entry in the index has::

    format          one of OTHER_FORMATS
    raw_data        the file; of a compressed file its raw form, with zip_data for the stored one; of a part of a
                    file the part alone, with zip_data for the whole file and PART for compression
    raw_meta        a second file without which the first cannot be read; or none
    column_names, column_encodings
                    the columns of each sample, and the MDS encodings that would hold their values
    described       JSON text: what else the format has to know of all shards alike; "block_length" if one was set

A reader returns single samples, and may read many at once without decoding each. Samples of only numbers, and arrays of
one shape, are :class:`PlainRows`: their bytes, one below the other, are a table::

    sample 0 | label int64 | pixels 2 x 3 x float32 |         columns: label    int64    (samples,)
    sample 1 | label int64 | pixels 2 x 3 x float32 |                  pixels   float32  (samples, 2, 3)
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import IndexFormatError, SampleIndexError
from lightning_streaming.formats.shard_table import OTHER_FORMATS, FileInfo, ShardInfo
from lightning_streaming.formats.values import brief

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class StoredFiles(Protocol):
    """The files at a location."""

    @property
    def shown(self) -> str:
        """The location, as errors show it."""
        ...

    def shown_file(self, name: str) -> str:
        """Return the path or URL of a file, without secrets."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of each file, by its path below the location with forward slashes, sorted."""
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read some bytes of a file; never more than it has.

        Raises:
            StorageError: They could not be read.
        """
        ...

    def read_if_there(self, name: str) -> bytes | None:
        """Read a whole file, which may be hidden; return None if it does not exist.

        Raises:
            StorageError: It could not be read.
        """
        ...


class ShardFormat(Protocol):
    """A format of another library."""

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """Yield the shards at a location, in the order of their samples; closing the generator ends its threads.

        Args:
            files: The files at the location.
            known: Shards that were described before, by the name of their raw data file. One whose files have the same
                sizes may be yielded again without reading them.

        Raises:
            ConfigError: No file there is of this format.
            FormatError: A file is damaged; names it.
            StorageError: A file could not be read.
        """
        ...

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Raise if a shard could not be read, before anything of it is fetched.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            IndexFormatError: Its entry in the index is not of this format.
        """
        ...

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open the raw files of a shard.

        Args:
            info: The shard, as its index describes it.
            directory: Directory of its raw files.
            columns: Names of the columns to read; None for all.

        Raises:
            FormatError: A file is not what the index describes, or damaged.
            ObjectNotFoundError: A file is missing.
            StorageError: A file cannot be opened.
        """
        ...


class RangedFile(Protocol):
    """A stored file of which parts are read."""

    @property
    def shown(self) -> str:
        """The file, as errors show it."""
        ...

    @property
    def size(self) -> int:
        """Its bytes according to the index."""
        ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """Read some ranges, none of them empty: each from its first byte up to, not including, its last.

        Raises:
            StorageError: They could not be read.
        """
        ...


class RangeReadableFormat(ShardFormat, Protocol):
    """A format whose shards may be parts of files: a part is fetched by ranges, and cached as a raw file."""

    @property
    def is_read_in_place(self) -> bool:
        """Whether :meth:`open` also takes a directory that has the stored file itself."""
        ...

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
        """Return the shard that has only some columns of another, for which less is fetched.

        Args:
            info: A shard.
            columns: Names of columns, all of which it has; None for all.
        """
        ...

    def read_metadata(self, stored: RangedFile) -> Any:
        """Read what :meth:`unpack` has to know of a file; it is cached for the file's other parts.

        Raises:
            FormatError: The file is damaged.
            StorageError: It could not be read.
        """
        ...

    def unpack(self, info: ShardInfo, metadata: Any, stored: RangedFile, destination: Path) -> int:
        """Create the raw file of a shard.

        Args:
            info: The shard; of all its columns, or of some.
            metadata: The result of :meth:`read_metadata`.
            stored: The file that the shard is a part of.
            destination: The raw file, overwritten if it exists; has the size that the shard states.

        Returns:
            Bytes that were read of the stored file.

        Raises:
            ShardCorruptError: The file is damaged, or another one than when the index was created.
            StorageError: It could not be read.
            OSError: The raw file cannot be written.
        """
        ...


# --- entries of an index ---


def by_file(known: Mapping[str, ShardInfo], sizes: Mapping[str, int]) -> dict[str, list[ShardInfo]]:
    """Return the shards that were described before, by the file that contains them, if its size is the same.

    Args:
        known: See :meth:`ShardFormat.describe`.
        sizes: Bytes of each file.
    """
    shards = dict[str, list[ShardInfo]]()
    for shard in known.values():
        file = shard.zip_data or shard.raw_data
        if sizes.get(file.basename) == file.bytes:
            shards.setdefault(file.basename, []).append(shard)
    return shards


def other_shard(
    shard_format: str,
    samples: int,
    raw_data: FileInfo,
    columns: Mapping[str, str],
    described: Mapping[str, Any],
    *,
    raw_meta: FileInfo | None = None,
    compression: str | None = None,
    zip_data: FileInfo | None = None,
) -> ShardInfo:
    """Return the entry of a shard in an index; arguments are those of :class:`ShardInfo`.

    Args:
        columns: The columns of each sample, with the MDS encoding that their values would have, like "ndarray:uint16";
            for code that checks columns without reading samples.
        described: What the format has to know of all shards alike, as plain JSON values.
    """
    return ShardInfo(
        format=shard_format,
        samples=samples,
        compression=compression,
        hashes=(),
        size_limit=None,
        raw_data=raw_data,
        zip_data=zip_data,
        raw_meta=raw_meta,
        schema={
            "column_names": tuple(columns),
            "column_encodings": tuple(columns.values()),
            "described": json.dumps(described, sort_keys=True, separators=(",", ":")),
        },
    )


def described(info: ShardInfo) -> dict[str, Any]:
    """Return the ``described`` of :func:`other_shard`; empty for a shard of another format.

    Raises:
        IndexFormatError: It is not a JSON object.
    """
    if info.format not in OTHER_FORMATS:
        return {}
    try:
        facts = json.loads(info.schema["described"])
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise IndexFormatError(f"described must be the text of a JSON object, but is {brief(info.schema['described'])}")
    return facts


# --- many files at once ---
#
# Reading the head of a file waits for a store, or a disk, far longer than it computes: one after the other, a thousand
# files would take a thousand round trips.

_THREADS = 16
_PENDING = 2 * _THREADS
"""Items that are in progress or wait to be returned: a slow one blocks the others late, and a kill loses few."""
_Outcome = tuple[_Result | None, BaseException | None]


def ordered_map(
    function: Callable[[StoredFiles, _Item], _Result], files: StoredFiles, items: Iterable[_Item]
) -> Generator[_Result, None, None]:
    """Map a function over items in threads, and yield the results in the order of the items.

    Items are taken, and results yielded, in the calling thread; the function is called in threads that end when the
    generator does: at its end, by an error, or because it was closed. A caller that stops early closes it: ``yield
    from`` does, as does ``contextlib.closing``.

    Args:
        function: Called with the files to read from, and an item, by up to 16 threads.
        files: The files to read. Within ``function`` the next read after the end raises CancelledError, which it must
            not catch.
        items: Each has one result.

    Raises:
        Exception: The error of the first item for which ``function`` raised one, after the results before it.
    """
    files.sizes()  # imports and lists in one thread
    stopped, threads = Event(), list[Thread]()
    # Ctrl-C cannot leave these queues locked, unlike the locks of concurrent.futures.
    todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    pending = deque[SimpleQueue[_Outcome[_Result]]]()
    cancellable, remaining = _CancellableFiles(files, stopped), iter(items)

    def attempt(item: _Item) -> _Outcome[_Result]:
        try:
            cancellable.raise_if_stopped()
            return function(cancellable, item), None
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            return None, error

    def work() -> None:
        while (task := todo.get()) is not None:
            task()

    try:
        while True:
            for item in islice(remaining, _PENDING - len(pending)):
                answer: SimpleQueue[_Outcome[_Result]] = SimpleQueue()
                pending.append(answer)
                todo.put(lambda item=item, answer=answer: answer.put(attempt(item)))  # type: ignore[misc]
                if len(threads) < _THREADS:
                    threads.append(Thread(target=work, name="ordered-map", daemon=True))
                    threads[-1].start()
            if not pending:
                return
            result, error = pending[0].get()
            if error is not None:
                raise error
            pending.popleft()
            yield result  # type: ignore[misc]  # not None without an error
    finally:
        stopped.set()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            thread.join()


def map_unknown(
    function: Callable[[StoredFiles, _Item], _Result], files: StoredFiles, items: Iterable[tuple[_Item, _Result | None]]
) -> Generator[_Result, None, None]:
    """Yield the known results of items, and for other items those of :func:`ordered_map`.

    Args:
        function: As for :func:`ordered_map`; not called for items whose result is known.
        files: The files to read.
        items: Each with its known result, or None.

    Raises:
        Exception: As for :func:`ordered_map`.
    """
    pairs = list(items)
    with closing(ordered_map(function, files, (item for item, known in pairs if known is None))) as results:
        for _, known in pairs:
            yield next(results) if known is None else known


class _CancellableFiles:
    """Files that can be read until the results are no longer needed; see :class:`StoredFiles`."""

    def __init__(self, files: StoredFiles, stopped: Event) -> None:
        self._files, self._stopped = files, stopped

    def raise_if_stopped(self) -> None:
        """Raise CancelledError in a thread whose result is no longer needed."""
        if self._stopped.is_set():
            raise CancelledError

    @property
    def shown(self) -> str:
        return self._files.shown

    def shown_file(self, name: str) -> str:
        return self._files.shown_file(name)

    def sizes(self) -> Mapping[str, int]:
        return self._files.sizes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        self.raise_if_stopped()
        return self._files.read_range(name, start, stop)

    def read_if_there(self, name: str) -> bytes | None:
        self.raise_if_stopped()
        return self._files.read_if_there(name)


# --- readers ---

Allocate = Callable[[Sequence[int], np.dtype[Any]], NDArray[Any]]
"""Returns an uninitialised array of a shape and a dtype, as ``numpy.empty`` does."""


class ShardReader(Protocol):
    """The samples of one shard, read from its raw files."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample at ``index`` in [0, len), as column name to value. It shares no memory with the shard.

        Raises:
            SampleIndexError: The index is out of range.
            FormatError: The sample's bytes are not what the format says.
        """
        ...

    def close(self) -> None:
        """Release the files; nothing can be read afterwards."""
        ...


def no_such_sample(shown: Path | str, count: int, index: int, path: str | None = None) -> SampleIndexError:
    """Return the error of an index that is out of range.

    Args:
        shown: The shard, as errors show it.
        count: Number of its samples.
        index: The index.
        path: The file, if it is not ``shown``.
    """
    message = f"{shown} has {count} samples, but sample {index} was requested"
    return SampleIndexError(message, path=path or str(shown), sample=index)


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Layout of such samples in their bytes. Equal layouts are one object, so that they compare by identity."""

    row: np.dtype[np.void]
    """A sample's bytes, as something that numpy copies whole."""
    columns: np.dtype[np.void]
    """The same bytes by requested column."""
    heads: tuple[tuple[int, bytes], ...]
    """The sizes and shapes that every sample must state, each with its position."""

    def are(self, rows: NDArray[np.void]) -> bool:
        """Return whether samples have this layout.

        Args:
            rows: Their bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(np.uint8).reshape(len(rows), self.row.itemsize)
        heads = ((table[:, start : start + len(head)], head) for start, head in self.heads)
        return all(bool((actual == np.frombuffer(head, np.uint8)).all()) for actual, head in heads)

    @property
    def is_column(self) -> bool:
        """Whether samples consist of one column and nothing else, so that their bytes are its values."""
        kinds = [self.columns[name] for name in self.columns.names or ()]
        return len(kinds) == 1 and kinds[0].itemsize == self.row.itemsize

    def columns_of(self, rows: NDArray[np.void], empty: Allocate = np.empty) -> dict[str, NDArray[Any]]:
        """Return the columns of some samples, by name, each of shape (samples, ...); a copy unless it is the only one.

        Args:
            rows: The samples' bytes, of shape (samples,) and dtype :attr:`row`.
            empty: Returns the memory of copies.
        """
        table = rows.view(self.columns)
        columns = {name: table[name] for name in self.columns.names or ()}
        if self.is_column:
            return columns
        for name, part in columns.items():
            # Even of a single sample, which is contiguous already: it may be at any address.
            columns[name] = empty(part.shape, part.dtype)
            columns[name][...] = part
        return columns


@lru_cache(maxsize=1024)
def plain_rows(
    size: int, fields: tuple[tuple[str, int, np.dtype[Any]], ...], heads: tuple[tuple[int, bytes], ...] = ()
) -> PlainRows:
    """Return the only object of this layout.

    Args:
        size: Bytes of a sample.
        fields: The requested columns: name, first byte, and dtype, which has a shape if a value is an array.
        heads: See :attr:`PlainRows.heads`.
    """
    names, offsets, formats = zip(*fields, strict=True)
    table: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    return PlainRows(np.dtype(f"V{size}"), np.dtype(table), heads)


class PlainReader(Protocol):
    """A shard whose samples may be plain."""

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of the first sample, if it may be plain and all samples have the same size; else None."""
        ...

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples of a shard that has :meth:`plain_rows`.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,).
            rows: The destination; of shape (samples,), and the dtype of the plain rows.
        """
        ...


class ColumnReader(ABC):
    """A shard that can build batches column by column."""

    @abstractmethod
    def take(self, indexes: NDArray[np.int64]) -> dict[str, NDArray[Any] | list[Any]] | None:
        """Return the values of some samples, by column: arrays of shape (samples, ...), or lists of texts or of bytes.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,), at least one.

        Returns:
            Values that share no memory with the shard; None if these samples have to be decoded one by one.
        """


class FlatColumn(NamedTuple):
    """A column of one-dimensional arrays, by the positions of their values in the shard's file."""

    data: memoryview
    """The file, valid while its reader is open."""
    dtype: np.dtype[Any]
    starts: NDArray[np.int64]
    """Byte at which the values of each sample start."""
    counts: NDArray[np.int64]
    """Number of values of each sample."""


class FlatReader(Protocol):
    """A shard with columns of one-dimensional arrays."""

    def flat_column(self, name: str) -> FlatColumn:
        """Return the positions of the values of such a column.

        Raises:
            EncodingError: The column is not one of one-dimensional arrays.
        """
        ...
