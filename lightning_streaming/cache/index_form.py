"""The parsed form of an index: what a large ``index.json`` says, as arrays that processes map and share::

    0      magic, which also says the version · length and CRC-32 of the description
    64     identity of index.json (size, modification time, inode) and its CRC-32; may be written again in place
    128    description: JSON with SHA-256 of index.json, the kinds, the data digest, and length and CRC-32 of each array
    ...    the arrays, each at a multiple of 4096

It is only ever a copy of what ``index.json`` says, so one that is not exactly as it should be is simply not used.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.files import Identity
from lightning_streaming.formats.index import DatasetIndex, parse_shard, shard_to_json
from lightning_streaming.formats.shard_table import ShardKind, ShardTable

_MAGIC = b"LSINDEX1"
_HEAD = struct.Struct("<8sQI")
_IDENTITY = struct.Struct("<qqqI")
_IDENTITY_PLACE, _DESCRIPTION_PLACE, _PAGE = 64, 128, 4096
_ARRAYS = {"kind_of_shard": "<i4", "samples": "<i8", "sizes": "<i8", "text_stops": "<i8", "text": "|u1"}


@dataclass(frozen=True, kw_only=True)
class IndexForm:
    """A parsed form that was found whole."""

    index: DatasetIndex
    """Its arrays are mapped from the file, which stays locked (shared) for as long as they are in use."""
    digest: str
    """SHA-256 of the ``index.json`` it was made of."""


def write_form(file: BinaryIO, index: DatasetIndex, digest: str, identity: Identity) -> None:
    """Write a parsed form.

    Args:
        file: Empty; may be sought in.
        index: What was read.
        digest: SHA-256 of ``index.json``, hexadecimal.
        identity: Of ``index.json``.
    """
    table = index.shards
    arrays = {name: np.ascontiguousarray(getattr(table, name), kind) for name, kind in _ARRAYS.items()}
    description = {
        "digest": digest,
        "data_digest": index.data_digest,
        "kinds": [shard_to_json(kind.example) for kind in table.kinds],
        "arrays": {name: [len(one), zlib.crc32(one.data)] for name, one in arrays.items()},
    }
    text = json.dumps(description).encode()
    file.write(_HEAD.pack(_MAGIC, len(text), zlib.crc32(text)))
    file.seek(_IDENTITY_PLACE)
    file.write(_pack(identity))
    file.seek(_DESCRIPTION_PLACE)
    file.write(text)
    places = _places(len(text), (one.nbytes for one in arrays.values()))
    for place, one in zip(places, arrays.values(), strict=True):
        file.seek(place)
        file.write(one.data)
    file.truncate(max(file.tell(), _DESCRIPTION_PLACE + len(text)))


def read_form(file: BinaryIO) -> IndexForm | None:
    """Map a parsed form; None if it is not whole, or another version's.

    Args:
        file: Open for reading. It may be closed afterwards: the map has a descriptor of its own, with the same locks.
    """
    try:
        return _checked(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None


def identity_of(file: BinaryIO) -> Identity | None:
    """Of the ``index.json`` that a parsed form was made of; None where it is damaged."""
    data = os.pread(file.fileno(), _IDENTITY_PLACE + _IDENTITY.size, 0)
    if len(data) < _IDENTITY_PLACE + _IDENTITY.size or not data.startswith(_MAGIC):
        return None
    *found, check = _IDENTITY.unpack_from(data, _IDENTITY_PLACE)
    identity = Identity(*found)
    return identity if _pack(identity) == _IDENTITY.pack(*found, check) else None


def note_identity(file: BinaryIO, identity: Identity) -> None:
    """Note that ``index.json`` has another identity now, with the same content."""
    os.pwrite(file.fileno(), _pack(identity), _IDENTITY_PLACE)


def _pack(identity: Identity) -> bytes:
    return _IDENTITY.pack(*identity, zlib.crc32(repr(tuple(identity)).encode()))


def _checked(data: memoryview) -> IndexForm:
    """Every byte of a form is looked at, which takes a fraction of a second for a million shards.

    Raises:
        ValueError: Something is wrong with it; also KeyError, TypeError and struct.error.
    """
    magic, length, check = _HEAD.unpack_from(data)
    text = data[_DESCRIPTION_PLACE : _DESCRIPTION_PLACE + length]
    _demand(magic == _MAGIC and len(text) == length and zlib.crc32(text) == check)
    description = json.loads(bytes(text))
    table = ShardTable(
        kinds=tuple(ShardKind(example=parse_shard(entry, {})) for entry in description["kinds"]),
        **_arrays(data, length, description["arrays"]),
    )
    _check_table(table)
    return IndexForm(index=DatasetIndex(table, description["data_digest"]), digest=description["digest"])


def _arrays(data: memoryview, description_length: int, described: dict[str, Any]) -> dict[str, NDArray[Any]]:
    counts = [int(described[name][0]) for name in _ARRAYS]
    lengths = [count * np.dtype(kind).itemsize for count, kind in zip(counts, _ARRAYS.values(), strict=True)]
    arrays = {}
    for name, place, length in zip(_ARRAYS, _places(description_length, lengths), lengths, strict=True):
        part = data[place : place + length]
        _demand(len(part) == length and zlib.crc32(part) == described[name][1])
        arrays[name] = np.frombuffer(part, _ARRAYS[name])
    return arrays


def _check_table(table: ShardTable) -> None:
    kinds, samples, sizes, stops = table.kind_of_shard, table.samples, table.sizes, table.text_stops
    _demand(len(kinds) == len(samples) and (not len(kinds) or 0 <= kinds.min() <= kinds.max() < len(table.kinds)))
    _demand(len(sizes) == table.first_file[-1] and len(stops) == table.first_text[-1])
    _demand(bool((np.diff(stops, prepend=0) >= 0).all()) and len(table.text) == (stops[-1] if len(stops) else 0))
    _demand(int(samples.min(initial=0)) >= 0 and int(sizes.min(initial=0)) >= 0)


def _demand(is_sound: bool) -> None:
    if not is_sound:
        raise ValueError("a parsed form that is damaged")


def _places(description_length: int, lengths: Iterable[int]) -> list[int]:
    """Where arrays of so many bytes lie after a description."""
    places, end = [], _DESCRIPTION_PLACE + description_length
    for length in lengths:
        places.append(-(-end // _PAGE) * _PAGE)
        end = places[-1] + length
    return places
