"""The shards of an index as a few arrays, so that a million of them take megabytes and no time to make.

What shards of one writer have in common is kept once, as a *kind*. The rest are numbers and texts. With kinds k0 (one
file, one hash) and k1 (raw and compressed, no hash), three shards are::

    kinds     k0         k1                  k0
    samples   10         11                  12
    sizes     99         99     70           99           bytes of each file
    texts     a.mds ab   b.mds  b.mds.gz     c.mds cd     each file's name and hashes, end to end in one text
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from json.encoder import encode_basestring_ascii as quote
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.formats.index_entries import FileInfo, ShardInfo, unchecked

_AT_ONCE = 4096
"""Shards whose texts are decoded together when all are looked at."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What many shards have in common."""

    example: ShardInfo
    """One of them."""

    @cached_property
    def files(self) -> tuple[FileInfo, ...]:
        """The example's files in the order of the arrays: data before meta, raw before compressed."""
        shard = self.example
        return tuple(file for file in (shard.raw_data, shard.zip_data, shard.raw_meta, shard.zip_meta) if file)

    @cached_property
    def hash_names(self) -> tuple[tuple[str, ...], ...]:
        """The hashes recorded of each file, in their order."""
        return tuple(tuple(file.hashes) for file in self.files)

    @cached_property
    def num_texts(self) -> int:
        """Texts of each shard: a name of every file, and its hashes."""
        return len(self.files) + sum(map(len, self.hash_names))

    def make(self, samples: int, sizes: Sequence[int], texts: Sequence[str]) -> ShardInfo:
        """A shard of this kind."""
        files: list[FileInfo] = []
        place = 0
        for size, names in zip(sizes, self.hash_names, strict=True):
            stop = place + 1 + len(names)
            digests = dict(zip(names, texts[place + 1 : stop], strict=True))
            files.append(unchecked(FileInfo, basename=texts[place], bytes=size, hashes=digests))
            place = stop
        is_packed = self.example.zip_data is not None
        data, meta = (files[:2], files[2:]) if is_packed else (files[:1], files[1:])
        like = self.example
        return unchecked(
            ShardInfo,
            format=like.format,
            samples=samples,
            compression=like.compression,
            hashes=like.hashes,
            size_limit=like.size_limit,
            raw_data=data[0],
            zip_data=data[1] if is_packed else None,
            raw_meta=meta[0] if meta else None,
            zip_meta=meta[1] if meta and is_packed else None,
            schema=like.schema,
        )


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[ShardInfo]):
    """The shards of an index in sample order; each is made when it is asked for.

    Equal to any sequence of equal shards. A slice is a tuple.
    """

    kinds: tuple[Kind, ...]
    kind_of_shard: NDArray[np.int32]
    """Of shape (shards,)."""
    samples: NDArray[np.int64]
    """Of shape (shards,)."""
    sizes: NDArray[np.int64]
    """Bytes of each file, of shape (files,)."""
    text_stops: NDArray[np.int64]
    """Where in ``text`` each text ends, of shape (texts,)."""
    text: NDArray[np.uint8]
    """All texts end to end, in UTF-8."""

    @cached_property
    def first_file(self) -> NDArray[np.int64]:
        """Place in ``sizes`` of each shard's first file, and the end; of shape (shards + 1,)."""
        return self._places([len(kind.files) for kind in self.kinds])

    @cached_property
    def first_text(self) -> NDArray[np.int64]:
        """Place in ``text_stops`` of each shard's first text, and the end; of shape (shards + 1,)."""
        return self._places([kind.num_texts for kind in self.kinds])

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ShardInfo, ...]: ...

    def __getitem__(self, index: int | slice) -> ShardInfo | tuple[ShardInfo, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return tuple(self._made(start, stop))
            return tuple(self[one] for one in range(start, stop, step))
        place = range(len(self))[index]
        return next(self._made(place, place + 1))

    def __iter__(self) -> Iterator[ShardInfo]:
        return chain.from_iterable(
            self._made(start, min(start + _AT_ONCE, len(self))) for start in range(0, len(self), _AT_ONCE)
        )

    def __add__(self, others: Iterable[ShardInfo]) -> tuple[ShardInfo, ...]:
        return (*self, *others)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShardTable) and self._is_same(other):
            return True
        if not isinstance(other, ShardTable | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(map(ShardInfo.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} shards>"

    def examples(self) -> list[tuple[int, ShardInfo]]:
        """The first shard of each kind with its number, in their order: to look at what all of a kind share."""
        kinds, firsts = np.unique(self.kind_of_shard, return_index=True)
        return [(place, self[place]) for place in sorted(firsts.tolist())] if len(kinds) else []

    def data_bytes(self) -> NDArray[np.int64]:
        """Bytes of each shard's raw data file, of shape (shards,)."""
        return self.sizes[self.first_file[:-1]]

    def texts(self, start: int, stop: int) -> list[str]:
        """The texts of some shards.

        Args:
            start: The first shard.
            stop: The one after the last.
        """
        first, last = int(self.first_text[start]), int(self.first_text[stop])
        begin = int(self.text_stops[first - 1]) if first else 0
        stops = (self.text_stops[first:last] - begin).tolist()
        data = self.text[begin : begin + (stops[-1] if stops else 0)].tobytes()
        starts = chain((0,), stops)
        if data.isascii():
            whole = data.decode("ascii")
            return [whole[one:end] for one, end in zip(starts, stops, strict=False)]
        return [data[one:end].decode("utf-8", "surrogatepass") for one, end in zip(starts, stops, strict=False)]

    def digest(self, kinds: Collection[str] | None = None) -> str:
        """What identifies the data, wherever and however it is stored: 16 hexadecimal digits.

        Of the JSON text of a list that has, for each shard, its raw data file's name, its samples, and the bytes and
        sorted hashes of that file.

        Args:
            kinds: Names of the hashes to take in; None for all.
        """
        hasher = hashlib.blake2b(b"[", digest_size=8)
        separator = ""
        for start, stop in self._runs():
            hasher.update(f"{separator}{self._described(start, stop, kinds)}".encode())
            separator = ", "
        hasher.update(b"]")
        return hasher.hexdigest()

    def outline(self) -> str:
        """The same of samples, sizes and the first few thousand names alone: as good as at once, and without hashes."""
        hasher = hashlib.blake2b(digest_size=8)
        hasher.update(self.samples.astype("<i8").tobytes())
        hasher.update(self.data_bytes().astype("<i8").tobytes())
        few = min(_AT_ONCE, len(self))
        if few:
            places = self.first_text[:few] - self.first_text[0]
            texts = self.texts(0, few)
            hasher.update("\n".join(texts[place] for place in places.tolist()).encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    def hash_names(self) -> tuple[str, ...]:
        """Names of the hashes that are recorded of raw data files, sorted."""
        return tuple(
            sorted({name for place in np.unique(self.kind_of_shard) for name in self.kinds[place].hash_names[0]})
        )

    def _described(self, start: int, stop: int, kinds: Collection[str] | None) -> str:
        """JSON of some shards of one kind; quoting and joining columns is many times faster than lists of lists."""
        kind = self.kinds[int(self.kind_of_shard[start])]
        texts, step = self.texts(start, stop), kind.num_texts
        names = kind.hash_names[0]
        wanted = sorted(name for name in names if kinds is None or name in kinds)
        hashes = ", ".join("[" + quote(name).replace("%", "%%") + ", %s]" for name in wanted)
        columns = [
            map(quote, texts[0::step]),
            self.samples[start:stop].tolist(),
            self.sizes[int(self.first_file[start]) : int(self.first_file[stop]) : len(kind.files)].tolist(),
            *(map(quote, texts[1 + names.index(name) :: step]) for name in wanted),
        ]
        return ", ".join(map(f"[%s, %d, %d, [{hashes}]]".__mod__, zip(*columns, strict=True)))

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Runs of shards of one kind, not too long."""
        borders = np.flatnonzero(np.diff(self.kind_of_shard)) + 1
        edges = [0, *borders.tolist(), len(self)]
        for first, last in pairwise(edges):
            for start in range(first, last, _AT_ONCE):
                yield start, min(start + _AT_ONCE, last)

    def _made(self, start: int, stop: int) -> Iterator[ShardInfo]:
        if start >= stop:
            return
        texts = iter(self.texts(start, stop))
        sizes = iter(self.sizes[int(self.first_file[start]) : int(self.first_file[stop])].tolist())
        kinds, samples = self.kind_of_shard[start:stop].tolist(), self.samples[start:stop].tolist()
        for kind, count in zip(map(self.kinds.__getitem__, kinds), samples, strict=True):
            yield kind.make(count, tuple(islice(sizes, len(kind.files))), tuple(islice(texts, kind.num_texts)))

    def _is_same(self, other: ShardTable) -> bool:
        """Whether the arrays are equal, which they need not be for shards to be equal."""
        return self.starts_like(other, len(self)) and len(self) == len(other)

    def starts_like(self, other: ShardTable, count: int) -> bool:
        """Whether the first ``count`` shards of both are the same, as far as arrays tell without looking at each."""
        if min(len(self), len(other)) < count or not np.array_equal(
            self.kind_of_shard[:count], other.kind_of_shard[:count]
        ):
            return False
        kinds = int(self.kind_of_shard[:count].max(initial=-1)) + 1
        if self.kinds_key(kinds) != other.kinds_key(kinds):
            return False
        files, texts = int(self.first_file[count]), int(self.first_text[count])
        end = int(self.text_stops[texts - 1]) if texts else 0
        return (
            np.array_equal(self.samples[:count], other.samples[:count])
            and np.array_equal(self.sizes[:files], other.sizes[:files])
            and np.array_equal(self.text_stops[:texts], other.text_stops[:texts])
            and np.array_equal(self.text[:end], other.text[:end])
        )

    def kinds_key(self, count: int) -> list[tuple[Any, ...]]:
        """What tells the first kinds from others."""
        return [key_of(kind.example) for kind in self.kinds[:count]]

    def _places(self, counts: Sequence[int]) -> NDArray[np.int64]:
        places = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.asarray(counts, np.int64)[self.kind_of_shard], out=places[1:]) if len(self) else None
        return places


def key_of(shard: ShardInfo) -> tuple[Any, ...]:
    """Equal for shards of one kind only."""
    schema = tuple(
        (name, tuple(value.items()) if isinstance(value, dict) else value) for name, value in shard.schema.items()
    )
    hash_names = tuple(tuple(file.hashes) for pair in shard.files for file in pair if file is not None)
    has_zip = shard.zip_data is not None, shard.zip_meta is not None, shard.raw_meta is not None
    return shard.format, shard.compression, shard.hashes, shard.size_limit, schema, hash_names, has_zip
