"""What the footer of a Parquet file says: its row groups and columns, where these lie, and how much room rows take.

What columns of numbers take in memory is known; text takes at most what it took in the Parquet file before compression,
with an offset for each value, if columns that are stored with a dictionary keep it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import ShardCorruptError, UnsupportedError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.arrow.rows import sound_arrow
from lightning_streaming.formats.arrow.values import require_parquet, require_pyarrow
from lightning_streaming.formats.shard_format import RangedFile

_MAGIC, _SEALED = b"PAR1", b"PARE"
_POINTER = b"version https://git-lfs"
DAMAGED = "the file is damaged, so write or fetch it again"
"""What whoever has such a file can do."""
_TAIL_BYTES = 64 << 10
"""Read of a file's end at once; most footers are shorter."""
_GAP_BYTES = 256 << 10
"""Ranges that lie closer are fetched as one, as a request costs more than what lies between."""
_OLD_CHUNK_BYTES = 100
"""By which early writers of Parquet tell the length of a column too short."""
_FRAME_BYTES_OF_COLUMN = 512
"""More than a column takes in a stream of Arrow beside its values and its name."""
BUFFER_BYTES = 64
"""To which each buffer of such a stream is padded."""

Range = tuple[int, int]
"""The first of some bytes, and the one after the last."""


@dataclass(frozen=True)
class Footer:
    """What the end of a Parquet file says of all of it."""

    metadata: Any
    """A ``pyarrow.parquet.FileMetaData``."""
    schema: Any
    """The ``pyarrow.Schema`` of its rows."""
    start: int
    """Its first byte, before which all rows lie."""

    def leaves(self, columns: Sequence[str]) -> list[int]:
        """The numbers of the Parquet columns that make up some columns of rows."""
        wanted, found, first = set(columns), list[int](), 0
        for one in self.schema:
            after = first + num_leaves(one.type)
            if one.name in wanted:
                found += range(first, after)
            first = after
        return found


def read_footer(stored: RangedFile) -> Footer:
    """Read the end of a Parquet file.

    Raises:
        ShardCorruptError: It is no such file, or is cut.
        UnsupportedError: It is encrypted; or two columns have one name.
        StorageError: It could not be read.
    """
    arrow, size = require_pyarrow(), stored.size
    start = max(0, size - _TAIL_BYTES)
    tail = stored.read([(start, size)])[0] if size else b""
    magic = bytes(tail[-4:])
    if magic == _SEALED:
        raise UnsupportedError(
            f"{stored.shown} is encrypted, which is not read",
            hint="write it again without encryption",
            path=stored.shown,
        )
    if magic != _MAGIC or size < 12:
        raise _not_parquet(stored, bytes(tail))
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed + len(_MAGIC) > size:
        raise ShardCorruptError(
            f"{stored.shown} has {size} bytes, fewer than its footer's {needed}; the file is cut", path=stored.shown
        )
    if needed > len(tail):
        tail = stored.read([(size - needed, size)])[0]
    with sound_arrow(f"the footer of {stored.shown}", "sound", DAMAGED, stored.shown):
        metadata = require_parquet().read_metadata(arrow.BufferReader(_MAGIC + bytes(tail[-needed:])))
        schema = metadata.schema.to_arrow_schema()
        if len(set(schema.names)) < len(schema.names):
            raise UnsupportedError(
                f"{stored.shown} has two columns of one name, which is not read: {shortened(', '.join(schema.names))}",
                hint="write it again with other names",
                path=stored.shown,
            )
        if sum(num_leaves(one.type) for one in schema) != metadata.num_columns:
            raise UnsupportedError(
                f"{stored.shown} has columns that pyarrow {arrow.__version__} cannot tell apart", path=stored.shown
            )
        _check_columns(metadata, stored)
    return Footer(metadata, schema, size - needed)


def _not_parquet(stored: RangedFile, tail: bytes) -> ShardCorruptError:
    """Return the error of a file that does not end as a Parquet file does."""
    if not tail:
        wrong, hint = "is empty, which no Parquet file is", "write or fetch it again"
    elif tail.startswith(_POINTER):
        wrong, hint = "is a pointer of Git LFS, not the file that it stands for", "fetch that with: git lfs pull"
    else:
        wrong = f"does not end as a Parquet file does, but with {tail[-4:]!r} after {stored.size} bytes"
        hint = "if it was cut, write or fetch it again, and if it is no Parquet file, name the others with remote="
    return ShardCorruptError(f"{stored.shown} {wrong}", hint=hint, path=stored.shown)


class _UnreadFile(io.RawIOBase):
    """A file of which nothing can be read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: ARG002
        return self._size

    def read(self, size: int | None = -1) -> bytes:  # noqa: ARG002
        raise _ReachedError


class _ReachedError(Exception):
    """What is in a file would be read now."""


def _check_columns(metadata: Any, stored: RangedFile) -> None:
    """Refuse a footer over which pyarrow would end the process when it is asked about a column of a row group.

    Here it looks at all of them, before it reads the first, and raises what is wrong.
    """
    file = require_parquet().ParquetFile(_UnreadFile(stored.size), metadata=metadata, pre_buffer=True)
    groups, columns = list(range(metadata.num_row_groups)), list(range(metadata.num_columns))
    with suppress(_ReachedError):
        file.reader.read_row_groups(groups, column_indices=columns, use_threads=False)


def ranges_of(chunks: Sequence[Any], footer: Footer, stored: RangedFile) -> list[Range]:
    """The bytes of a file that hold some columns of a row group, in order, those that lie close together as one."""
    found = list[Range]()
    for chunk in chunks:
        starts = [chunk.data_page_offset]
        if chunk.dictionary_page_offset is not None and chunk.dictionary_page_offset > 0:
            starts.append(chunk.dictionary_page_offset)
        start = min(starts)
        stop = start + chunk.total_compressed_size
        if not len(_MAGIC) <= start <= stop <= footer.start:
            raise ShardCorruptError(
                f"the footer of {stored.shown} has column {shortened(chunk.path_in_schema)!r} in bytes {start} to "
                f"{stop}, but begins itself at byte {footer.start}; the file is damaged",
                path=stored.shown,
            )
        found.append((start, min(stop + _OLD_CHUNK_BYTES, stored.size)))
    joined = list[Range]()
    for start, stop in sorted(found):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def first_leaves(schema: Any) -> Iterator[int]:
    first = 0
    for one in schema:
        yield first
        first += num_leaves(one.type)


def num_leaves(kind: Any) -> int:
    """How many Parquet columns make up a column of rows of this type."""
    children = _children(kind)
    return sum(map(num_leaves, children)) if children else 1


def _children(kind: Any) -> list[Any]:
    """The types within a type; those of a dictionary's values lie in the column itself."""
    types = require_pyarrow().types
    if isinstance(kind, require_pyarrow().BaseExtensionType):
        return _children(kind.storage_type)
    if types.is_dictionary(kind):
        return []
    return [kind.field(place).type for place in range(kind.num_fields)]


# --- how much room unpacked rows take ---


def column_bytes_of(footer: Footer, group: Any) -> list[int]:
    """Most bytes that each column of a row group takes in a stream of Arrow, with its share of the schema."""
    chunks = iter([group.column(place) for place in range(group.num_columns)])
    share = len(footer.schema.serialize()) // max(len(footer.schema), 1)
    return [_FRAME_BYTES_OF_COLUMN + share + _most_bytes(one.type, group.num_rows, chunks) for one in footer.schema]


def _most_bytes(kind: Any, count: int, chunks: Iterator[Any]) -> int:
    """Most bytes that some values take.

    Args:
        kind: Their Arrow type.
        count: How many there are at most.
        chunks: The metadata of Parquet columns, the next of which are theirs.
    """
    arrow = require_pyarrow()
    if isinstance(kind, arrow.BaseExtensionType):
        return _most_bytes(kind.storage_type, count, chunks)
    children = _children(kind)
    validity = count // 8 + 2 * BUFFER_BYTES
    if not children:
        return validity + _most_leaf_bytes(kind, next(chunks))
    if arrow.types.is_struct(kind):
        return validity + sum(_most_bytes(one, count, chunks) for one in children)
    offsets = 8 * (count + 1) if arrow.types.is_large_list(kind) else 4 * (count + 1)
    mine = list[Any]()
    for _ in range(sum(map(num_leaves, children))):
        mine.append(next(chunks))
    below = max(one.num_values for one in mine)
    if arrow.types.is_fixed_size_list(kind):
        below = max(below, count * kind.list_size)
    return validity + offsets + sum(_most_bytes(one, below, iter(mine)) for one in children)


def _most_leaf_bytes(kind: Any, chunk: Any) -> int:
    """Most bytes that the values of a Parquet column take."""
    types, count = require_pyarrow().types, int(chunk.num_values)
    if types.is_dictionary(kind):  # an index for each value, beside the values
        width = max(int(kind.index_type.bit_width) // 8, 4)
        return width * count + BUFFER_BYTES + _FRAME_BYTES_OF_COLUMN + _most_leaf_bytes(kind.value_type, chunk)
    if is_text(kind):
        width = 16 if "view" in str(kind) else 8 if "large" in str(kind) else 4
        width += 4 if chunk.has_dictionary_page else 0
        return int(chunk.total_uncompressed_size) + width * (count + 1) + 4 * BUFFER_BYTES
    if types.is_null(kind):
        return 0
    try:
        return count * int(kind.bit_width) // 8 + BUFFER_BYTES
    except ValueError:  # of no fixed width
        return int(chunk.total_uncompressed_size) + 16 * (count + 1)


def is_text(kind: Any) -> bool:
    """Whether values are text or bytes of any length."""
    types = require_pyarrow().types
    asked = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    return any(one(kind) for one in asked) or str(kind) in ("string_view", "binary_view")
