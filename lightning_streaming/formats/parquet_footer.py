"""The footer of a Parquet file, as far as it says where columns lie: read here, byte by byte.

pyarrow reads footers, too, and what it says of schemas and rows is taken from it. But when it is asked for a column of
a row group, and what the footer says of that is damaged or encrypted, it may end the process, so it is not asked. A
footer is a struct of Thrift's compact protocol, of which these fields are read::

    FileMetaData    4 row_groups
    RowGroup        1 columns
    ColumnChunk     3 meta_data, 8 crypto_metadata
    ColumnMetaData  3 path_in_schema, 5 num_values, 6 total_uncompressed_size, 7 total_compressed_size,
                    9 data_page_offset, 11 dictionary_page_offset
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(1, 14)
_MOST_DEPTH = 32
"""Structs within structs; Parquet has ten."""
_MOST_VARINT_BYTES = 10


class ColumnChunk(NamedTuple):
    """Where the values of a Parquet column of a row group lie, by the names that Parquet has for it."""

    path_in_schema: str
    num_values: int
    total_uncompressed_size: int
    """Bytes of its pages before compression."""
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int | None
    is_encrypted: bool


def read_chunks(footer: memoryview) -> list[list[ColumnChunk]]:
    """The columns of each row group.

    Args:
        footer: A whole footer, without its length and what follows that.

    Raises:
        ValueError: It is damaged.
    """
    walk = _Compact(footer)
    try:
        groups = walk.struct({4: lambda: list(walk.elements(lambda: walk.struct({1: walk.chunks})))})
    except IndexError:
        raise ValueError("its footer ends before all was said") from None
    return [group.get(1, []) for group in groups.get(4, [])]


class _Compact:
    """A walk through what Thrift's compact protocol has written."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at, self._depth = data, 0, 0

    def chunks(self) -> list[ColumnChunk]:
        """The columns of a row group."""
        return list(self.elements(self._chunk))

    def _chunk(self) -> ColumnChunk:
        found = self.struct({3: self._meta_data, 8: self._encrypted})
        told: dict[int, Any] = found.get(3, {})
        count, bytes_, compressed, first = sizes = [told.get(field, -1) for field in (5, 6, 7, 9)]
        if min(sizes) < 0 and 8 not in found:
            raise ValueError(
                f"its footer has a column of {count} values, {bytes_} bytes, compressed {compressed}, from byte {first}"
            )
        return ColumnChunk(".".join(told.get(3, ())), count, bytes_, compressed, first, told.get(11), 8 in found)

    def _meta_data(self) -> dict[int, Any]:
        number = self._number
        return self.struct({3: lambda: list(self.elements(self._text)), **dict.fromkeys((5, 6, 7, 9, 11), number)})

    def _encrypted(self) -> bool:
        self._skip(_STRUCT)
        return True

    # --- the protocol ---

    def struct(self, wanted: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """The wanted fields of a struct that are there; what reads one is told by its number."""
        found, field = dict[int, Any](), 0
        self._deeper()
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number()
            read = wanted.get(field)
            if read is None:
                self._skip(head & 15)
            else:
                found[field] = read()
        self._depth -= 1
        return found

    def elements(self, read: Callable[[], Any]) -> Iterator[Any]:
        """What is read of each element of a list."""
        count, _ = self._list_head()
        for _ in range(count):
            yield read()

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        count = head >> 4
        return (self._varint() if count == 15 else count), head & 15

    def _skip(self, kind: int) -> None:
        if kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            self._pass(self._varint())
        elif kind == _STRUCT:
            self.struct({})
        elif kind in (_LIST, _SET):
            count, inner = self._list_head()
            self._skip_all([inner], count)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            self._skip_all([kinds >> 4, kinds & 15], count)
        elif kind in (_BYTE, _DOUBLE, _UUID):
            self._pass({_BYTE: 1, _DOUBLE: 8, _UUID: 16}[kind])
        elif kind not in (_TRUE, _FALSE):  # which a field's head says
            raise ValueError(f"its footer has a value of the unknown type {kind}")

    def _skip_all(self, kinds: list[int], count: int) -> None:
        self._deeper()
        for _ in range(count):
            for kind in kinds:
                self._pass(1) if kind in (_TRUE, _FALSE) else self._skip(kind)
        self._depth -= 1

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise ValueError(f"its footer has more than {_MOST_DEPTH} structs within each other")

    def _pass(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise IndexError

    def _byte(self) -> int:
        found = self._data[self._at]
        self._at += 1
        return found

    def _varint(self) -> int:
        found = self._byte()
        if found < 0x80:
            return found
        found &= 0x7F
        for shift in range(7, 7 * _MOST_VARINT_BYTES, 7):
            byte = self._byte()
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise ValueError("its footer has a number of more than 64 bits")

    def _number(self) -> int:
        found = self._varint()
        return found >> 1 ^ -(found & 1)

    def _text(self) -> str:
        size = self._varint()
        start = self._at
        self._pass(size)
        return str(self._data[start : self._at], "utf-8", "replace")
