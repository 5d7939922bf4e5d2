"""WebDataset: tar files, in which neighbours of one name are a sample.

    00000.tar    dogs/0001.jpg    \\
                 dogs/0001.json    > {"__key__": "dogs/0001", "jpg": image, "json": {...}}
                 dogs/0002.jpg    ...

Every file under a place that ends in ``.tar``, ``.tar.gz`` or ``.tgz`` is a shard, in the order of their paths. The key
of a member is its path up to the first dot of the file's own name, the column all that follows that dot, in lower case.
Left out are members that are no plain files, files without an ending or that begin with a dot, and what lies in a
directory called like ``__meta__``, or is itself called so.

A sample has the columns whose members it has; an index names those that any sample of a shard has. How many samples a
shard has is told by its headers, or by an index that another library left beside it: then of its columns only those of
its first samples are known.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    IndexFormatError,
    MissingDependencyError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.images.encodings import require_pillow
from lightning_streaming.formats.mds.shard import map_file
from lightning_streaming.formats.shard_format import StoredFiles, map_unknown, other_shard
from lightning_streaming.formats.shard_table import FileInfo, ShardInfo, check_columns, column_names
from lightning_streaming.formats.tar.member_values import decoder, is_image, is_never_read, is_unsafe_member, kind_of
from lightning_streaming.formats.tar.members import Members, read_members
from lightning_streaming.formats.tar.published_counts import published_counts
from lightning_streaming.formats.tar.windows import StoredWindow, UnpackedWindow

KEY = "__key__"
"""The column of the samples' names."""
_NAME = "webdataset"
_PACKED = {".tar": None, ".tar.gz": "gz", ".tgz": "gz"}
"""How files are compressed, by how their names end."""
_NO_KEY = ("", "/")
"""What the key of a file would end in whose name begins with a dot."""
_ENOUGH = 16
"""So many samples tell the columns, of a file that need not be counted."""


@dataclass(frozen=True, slots=True)
class WebDatasetFormat:
    """Tar files of samples."""

    allow_unsafe_types: bool = False
    """Whether members may be unpickled, which runs code of whoever wrote them."""
    as_files: frozenset[str] = frozenset()
    """Columns whose image files are given as bytes."""

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """See :meth:`ShardFormat.describe`."""
        tars = _tar_files(files)
        before = [known.get(tar.raw_name) for tar in tars]
        same = [one if one is not None and tar.is_that_of(one) else None for tar, one in zip(tars, before, strict=True)]
        counts = published_counts(files) if None in same else {}
        yield from map_unknown(
            lambda watched, tar: _described(watched, tar, counts.get(tar.name)), files, zip(tars, same, strict=True)
        )

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """See :meth:`ShardFormat.check`.

        Raises:
            ConfigError: A wanted column can run code of whoever wrote it.
        """
        names = column_names(info)
        if KEY not in names:
            raise IndexFormatError(
                f"the index entry of {info.raw_data.basename} must have the column {KEY}", path=info.raw_data.basename
            )
        wanted = [name for name in names if columns is None or name in columns]
        for name in filter(is_unsafe_member, wanted):
            if is_never_read(name):
                raise ConfigError(
                    f"{info.raw_data.basename} has a column {name!r}, which torch pickled and which is not read here",
                    hint="name the others with columns= to read only these",
                    option="columns",
                    path=info.raw_data.basename,
                )
            if not self.allow_unsafe_types:
                raise ConfigError(
                    f"{info.raw_data.basename} has a column {name!r}, which can run any code when it is read",
                    hint="pass allow_unsafe_types=True if you trust its author, or name the others with columns= to "
                    "read only these",
                    option="allow_unsafe_types",
                    path=info.raw_data.basename,
                )
        if any(map(is_image, wanted)):
            try:
                require_pillow()
            except MissingDependencyError as error:
                file = info.raw_data.basename
                raise error.with_context(f"{file} cannot be read", path=file) from None

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> TarSamples:
        """See :meth:`ShardFormat.open`.

        Raises:
            ConfigError: The shard lacks a wanted column, or one can run code of whoever wrote it.
            MissingDependencyError: A wanted column needs a package that is not installed.
        """
        check_columns(info, columns)
        self.check(info, columns)
        return TarSamples(info, directory, columns, self.as_files)


def unsafe_members(info: ShardInfo) -> list[str]:
    """The columns of a shard whose values can run code of whoever wrote them when they are read."""
    return [name for name in column_names(info) if is_unsafe_member(name)]


# --- what lies under a place ---


class _TarFile(NamedTuple):
    """A tar file, as it lies."""

    name: str
    raw_name: str
    size: int
    compression: str | None

    def is_that_of(self, info: ShardInfo) -> bool:
        """Whether a shard was described of a file like this."""
        (stored,) = info.stored
        return (stored.basename, stored.bytes, info.compression) == (self.name, self.size, self.compression)


def _tar_files(files: StoredFiles) -> list[_TarFile]:
    """All of a place, in the order of their paths.

    Raises:
        ConfigError: There are none, or two would be the same when they are unpacked.
    """
    found = dict[str, _TarFile]()
    for name, size in files.sizes().items():
        ending = next((one for one in _PACKED if name.endswith(one)), None)
        if ending is None or any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        tar = _TarFile(name, name.removesuffix(ending) + ".tar", size, _PACKED[ending])
        other = found.setdefault(tar.raw_name, tar)
        if other is not tar:
            raise ConfigError(
                f"{files.shown} has {other.name} and {name}, which are one shard",
                hint="take one away",
                path=files.shown,
            )
    if not found:
        raise ConfigError(
            f"{files.shown} has no file of format={_NAME!r}: none ends in {', '.join(_PACKED)}", path=files.shown
        )
    return sorted(found.values(), key=lambda tar: tar.name)


def _described(files: StoredFiles, tar: _TarFile, count: int | None) -> ShardInfo:
    """Go through all headers of a file; or through the first ones, where somebody has counted its samples."""
    shown = files.shown_file(tar.name)
    stored = FileInfo(basename=tar.name, bytes=tar.size, hashes={})
    if tar.compression is None:
        samples = Samples(shown)
        for members in read_members(StoredWindow(files, tar.name, tar.size), shown):
            samples.add(members)
            if count is not None and _ENOUGH < len(samples) <= count:
                return other_shard(_NAME, count, stored, samples.kinds, {})
        return other_shard(_NAME, len(samples), stored, samples.kinds, {})
    window = UnpackedWindow(files, tar.name, tar.size)
    samples = Samples.of(read_members(window, shown), shown)
    raw = FileInfo(basename=tar.raw_name, bytes=window.raw_bytes(), hashes={})
    return other_shard(_NAME, len(samples), raw, samples.kinds, {}, compression=tar.compression, zip_data=stored)


# --- members to samples ---


class Samples:
    """Which members are a sample, and where they lie.

    Args:
        shown: What to call the file in an error.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._numbers = dict[str, int]()  # of columns, by what follows the dot, in any case
        self._known_keys = set[str]()
        self._seen = 0  # columns of the last sample, a bit for each
        self.keys: list[str] = []
        self.columns: list[str] = []
        """Column names, in the order in which they are met."""
        self.firsts = array("q", [0])
        """Which member is the first of each sample; and the number of all."""
        self.column_of = array("q")
        """Of each member."""
        self.starts, self.stops = array("q"), array("q")
        """Where in the file the bytes of each member lie."""

    @classmethod
    def of(cls, members: Iterable[Members], shown: str) -> Samples:
        """Those of a whole file; raises as :meth:`add` does."""
        samples = cls(shown)
        for some in members:
            samples.add(some)
        return samples

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def kinds(self) -> dict[str, str]:
        """The key's column, and all that any sample has, sorted; each with the MDS encoding of its values."""
        return {KEY: "str", **{column: kind_of(column) for column in sorted(self.columns)}}

    def add(self, members: Members) -> None:
        """Go on with the members that come next.

        Raises:
            ShardCorruptError: A key comes again after others, or a sample has two members of one column.
        """
        numbers, keys, known, firsts = self._numbers, self.keys, self._known_keys, self.firsts
        last, found, count, seen = keys[-1] if keys else None, list[int](), firsts[-1], self._seen
        for name in members.names:
            key, _, ending = name.partition(".")
            if "/" in ending:  # the dot was a directory's
                key, _, ending = _split(name)
            if not ending or key[-1:] in _NO_KEY or (name[0] == "_" and _is_meta(name)):
                found.append(-1)
                continue
            number = numbers.get(ending)
            if number is None:
                number = self._new_column(ending, name)
            if key != last:
                if key in known:
                    raise ShardCorruptError(self._comes_again(name), path=self._shown)
                known.add(key)
                keys.append(key)
                firsts.append(count)
                last, seen = key, 0
            if seen >> number & 1:
                raise ShardCorruptError(
                    f"{self._shown}: member {name!r} is the second of its sample that ends in .{self.columns[number]}",
                    path=self._shown,
                )
            seen |= 1 << number
            found.append(number)
            count += 1
            firsts[-1] = count
        self._seen = seen
        self._place(members, np.asarray(found, np.int64))

    def _place(self, members: Members, found: NDArray[np.int64]) -> None:
        """Note where members lie whose columns are these; -1 for those that are left out."""
        kept = found >= 0
        starts, sizes = np.asarray(members.starts, np.int64)[kept], np.asarray(members.sizes, np.int64)[kept]
        self.column_of.frombytes(found[kept].tobytes())
        self.starts.frombytes(starts.tobytes())
        self.stops.frombytes((starts + sizes).tobytes())

    def _comes_again(self, name: str) -> str:
        return (
            f"{self._shown}: member {name!r} comes after other samples, but its own began before them; members of one "
            "sample must follow each other, and no two samples have one name"
        )

    def _new_column(self, ending: str, name: str) -> int:
        column = ending.lower()
        if column == KEY or not column.isprintable():
            raise ShardCorruptError(
                f"{self._shown}: member {name!r} ends in what is no name of a column", path=self._shown
            )
        if column not in self.columns:
            self.columns.append(column)
        number = self._numbers[ending] = self.columns.index(column)
        return number


def _split(name: str) -> tuple[str, str, str]:
    """A path up to the first dot of the file's own name, the dot, and what follows it."""
    start = name.rfind("/") + 1
    stem, dot, ending = name[start:].partition(".")
    return name[:start] + stem, dot, ending


def _is_meta(name: str) -> bool:
    """Whether a path begins with a name like ``__this__``."""
    first = name.partition("/")[0]
    return len(first) >= 4 and first.endswith("__")


class TarSamples:
    """The samples of a tar file, memory-mapped; see :class:`ShardReader`."""

    def __init__(
        self, info: ShardInfo, directory: Path, columns: Sequence[str] | None, as_files: frozenset[str]
    ) -> None:
        """Map the raw file, and walk through its headers; arguments and errors are those of ``ShardFormat.open``."""
        self._path = join_under(directory, info.raw_data.basename)
        self._data = map_file(self._path, info.raw_data.bytes)
        found = Samples.of(read_members(lambda start, _: self._data[start:], str(self._path)), str(self._path))
        if len(found) != info.samples:
            raise ShardCorruptError(
                f"{self._path} must have {info.samples} samples by its index, but has {len(found)}: it, or what the "
                "index was made of, has changed",
                hint="index it anew",
                path=str(self._path),
            )
        self._keys, self._firsts, self._column_of = found.keys, found.firsts, found.column_of
        self._starts, self._stops = found.starts, found.stops
        self._wanted = None if columns is None else frozenset(columns)
        self._has_key = columns is None or KEY in columns
        self._decoders = [
            (name, decoder(name, as_file=name in as_files) if columns is None or name in columns else None)
            for name in found.columns
        ]

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """See :meth:`ShardReader.__getitem__`.

        Raises:
            SampleIndexError: The index is not in [0, len).
            EncodingError: A member does not hold what its name says, or the sample lacks a wanted column.
        """
        if not 0 <= index < len(self._keys):
            raise SampleIndexError(
                f"{self._path} has {len(self._keys)} samples, but sample {index} was asked for",
                path=str(self._path),
                sample=index,
            )
        data, decoders, name = self._data, self._decoders, ""
        sample: dict[str, Any] = {KEY: self._keys[index]} if self._has_key else {}
        first, last = self._firsts[index], self._firsts[index + 1]
        try:
            for place in range(first, last):
                name, decode = decoders[self._column_of[place]]
                if decode is not None:
                    sample[name] = decode(data[self._starts[place] : self._stops[place]])
        except EncodingError as error:
            member = shortened(f"{self._keys[index]}.{name}")
            shown = str(self._path)
            where = f"{shown}, sample {index}, member {member!r}"
            raise error.with_context(where, path=shown, sample=index) from error
        if self._wanted is not None and len(sample) < len(self._wanted):
            lacking = min(self._wanted.difference(sample))
            raise EncodingError(
                f"{self._path}, sample {index}, {self._keys[index]!r}: it has no member .{lacking}",
                path=str(self._path),
                sample=index,
            )
        return sample

    def close(self) -> None:
        """Let go of the file; nothing can be read afterwards."""
        self._data.release()
