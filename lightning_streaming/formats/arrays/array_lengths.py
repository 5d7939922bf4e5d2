"""How many elements the arrays of a column have, told without decoding them.

Where the column is the only one whose size varies, the offsets at the head of a shard tell the bytes of its payloads::

    bytes of sample k  =  4  +  fixed sizes of the other columns  +  bytes of the payload
    bytes of a payload =  dtype code?  +  shape header (1 + width of the length)  +  length * bytes of an element

A writer takes the least width that holds the length, so more bytes are more elements, and one number follows from the
other. Some samples are looked at, whether that is so. Else each sample's own head says what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError, ShardCorruptError
from lightning_streaming.formats.arrays.megatron import DocumentLengths
from lightning_streaming.formats.columns import AT_ONCE, encodings_of, no_such_column, payloads
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.mds.shard import MDSReader, read_places, table_bytes
from lightning_streaming.formats.plain_rows import FlatReader
from lightning_streaming.formats.shard import may_be_flat, open_shard
from lightning_streaming.formats.shard_table import OTHER_FORMATS
from lightning_streaming.formats.values import BYTES_OF_CODE, NdarrayEncoding

ReadPart = Callable[[FileInfo, int, int], bytes]
"""Gives some bytes of a file: those from one place on, up to before another."""

_LONGEST_HEAD = 10
"""Bytes before the elements of an array of one dimension: dtype code, shape header, length."""
_MORE = 4096
"""Bytes after the offsets that are read with them: the first sample's head is mostly among them."""
_LOOKED_AT = 16
"""Samples of a shard on this node of which the heads are compared with the offsets."""
_WIDTHS = (1, 2, 4, 8)
"""Bytes of an element, and of a length in a shape header."""
_WIDTH_MASKS = np.array([2 ** (8 * width) - 1 for width in _WIDTHS], np.uint64)


def check_dtype(dtype: str) -> int:
    """Bytes of an element.

    Args:
        dtype: Name of a dtype of whole numbers or floats, like "uint16".

    Raises:
        ConfigError: There is no such dtype.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if not isinstance(dtype, str) or found.kind not in "iuf" or found.itemsize not in _WIDTHS:
        raise ConfigError(f"dtype must be one of numbers, like 'uint16' or 'int32', but is {dtype!r}", option="dtype")
    return found.itemsize


class ColumnLengths(Protocol):
    """How the elements of a column are counted in one shard; made by :func:`column_lengths`."""

    @property
    def info(self) -> ShardInfo:
        """The shard."""
        ...

    @property
    def constant(self) -> int | None:
        """Of each sample, where all are equally long by the index; then no file need be read."""
        ...

    @property
    def told_by_offsets(self) -> bool:
        """Whether small parts of the shard's files tell, as a rule."""
        ...

    def read_afar(self, read: ReadPart) -> NDArray[np.int64] | None:
        """The lengths by small parts of an uncompressed shard that is elsewhere; see :class:`ArrayLengths`."""
        ...

    def read_here(self, directory: Path) -> NDArray[np.int64]:
        """The lengths by the raw files of the shard; see :class:`ArrayLengths`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ArrayLengths:
    """The same of MDS shards, and of others where all samples are equally long."""

    info: ShardInfo
    column: str
    constant: int | None
    """Of each sample, where the encoding fixes the shape; then no file need be read."""
    element_bytes: int | None
    """Bytes of an element; None where each payload says its own dtype."""
    array: NdarrayEncoding | None
    """The encoding; None for bytes."""

    @cached_property
    def told_by_offsets(self) -> bool:
        """Whether the shard's offsets tell, as no other column varies and all elements have as many bytes."""
        if self.constant is not None:
            return False
        names, sizes = self.info.schema["column_names"], self.info.schema["column_sizes"]
        varying = [name for name, size in zip(names, sizes, strict=False) if size is None]
        return self.element_bytes is not None and varying == [self.column]

    def read_afar(self, read: ReadPart) -> NDArray[np.int64] | None:
        """The lengths by one or two small parts of an uncompressed shard that is elsewhere.

        Args:
            read: Reads a part of it.

        Returns:
            Of shape (samples,); None where only the whole shard tells.

        Raises:
            ShardCorruptError: The offsets contradict the index.
            StorageError: As ``read`` does.
        """
        if self.constant is not None:
            return self._same()
        if not self.told_by_offsets:
            return None
        file, table = self.info.raw_data, table_bytes(self.info.samples)
        head = read(file, 0, min(file.bytes, table + _MORE))
        offsets = self._offsets(memoryview(head))
        found = self._by_offsets(offsets)
        if found is None or self.array is None or not len(found):
            return found
        start, stop = self._payload(offsets, 0)
        end = min(stop, start + _LONGEST_HEAD)
        first = head[start:end] if end <= len(head) else read(file, start, end)
        padded = np.frombuffer(first.ljust(_LONGEST_HEAD, b"\0"), np.uint8)
        return found if self._said(padded[None], np.array([stop - start]))[0] == found[0] else None

    def read_here(self, directory: Path) -> NDArray[np.int64]:
        """The lengths by the raw file of the shard.

        Args:
            directory: Where it is.

        Returns:
            Of shape (samples,).

        Raises:
            ShardCorruptError: It is not what the index describes, or a sample has other bytes than it says.
            EncodingError: A sample does not hold what its encoding says, or bytes that are no elements.
            ConfigError: An array has several dimensions.
            StorageError: It cannot be opened.
        """
        if self.constant is not None:
            return self._same()
        reader = MDSReader(self.info, directory, columns=[self.column])
        try:
            data, offsets = reader.bytes_and_offsets()
            found = self._by_offsets(offsets) if self.told_by_offsets else None
            if found is not None and self._holds(found, data, offsets):
                return found
            parts = [
                self._exact(data, offsets[first : first + AT_ONCE + 1], first)
                for first in range(0, self.info.samples, AT_ONCE)
            ]
        finally:
            reader.close()
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _same(self) -> NDArray[np.int64]:
        return np.full(self.info.samples, self.constant, np.int64)

    def _offsets(self, head: memoryview) -> NDArray[np.int64]:
        shown, fewest = self.info.raw_data.basename, 4 + self._fixed_bytes(len(self.info.schema["column_sizes"]))
        return read_places(head, self.info, shown, table_bytes(self.info.samples), fewest)[0]

    def _fixed_bytes(self, columns: int) -> int:
        """Of the first so many columns."""
        return sum(size for size in self.info.schema["column_sizes"][:columns] if size is not None)

    def _payload(self, offsets: NDArray[np.int64], sample: int) -> tuple[int, int]:
        """Where a payload starts and stops in the file, where it is the only one that varies."""
        sizes = self.info.schema["column_sizes"]
        place = sizes.index(None)
        start = int(offsets[sample]) + 4 + self._fixed_bytes(place)
        return start, int(offsets[sample + 1]) - (self._fixed_bytes(len(sizes)) - self._fixed_bytes(place))

    def _by_offsets(self, offsets: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The lengths that payloads of so many bytes have, as a writer writes them; None where one has no such."""
        assert self.element_bytes is not None, "told_by_offsets"
        payload_bytes = np.diff(offsets) - (4 + self._fixed_bytes(len(self.info.schema["column_sizes"])))
        least: Any = 0
        if self.array is not None:
            # A length that one byte, or two, cannot hold has more.
            is_wider, is_widest = (
                payload_bytes > 1 + width + ((1 << 8 * width) - 1) * self.element_bytes for width in (1, 2)
            )
            least = np.where(is_wider, 1 << 8, 1)
            least[is_widest] = 1 << 16
            payload_bytes -= 2 + is_wider + 2 * is_widest
        lengths = payload_bytes >> self.element_bytes.bit_length() - 1
        is_whole = (payload_bytes & (self.element_bytes - 1)) == 0
        return lengths if bool((is_whole & (lengths >= least)).all()) else None

    def _holds(self, found: NDArray[np.int64], data: memoryview, offsets: NDArray[np.int64]) -> bool:
        """Whether some samples say themselves what their offsets tell of them."""
        if self.array is None or not len(found):
            return True
        samples = np.unique(np.linspace(0, len(found) - 1, _LOOKED_AT).astype(np.int64))
        for sample in samples.tolist():
            try:
                said = self._exact(data, offsets[sample : sample + 2], sample)
            except (EncodingError, ConfigError, ShardCorruptError):
                return False  # whoever looks at all of them says what is wrong
            if said[0] != found[sample]:
                return False
        return True

    def _exact(self, data: memoryview, offsets: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """The lengths that samples say themselves.

        Args:
            data: The file.
            offsets: Of these samples, and of what follows.
            first: Number of the first of them in the shard.
        """
        sizes = self.info.schema["column_sizes"]
        place = self.info.schema["column_names"].index(self.column)
        starts, stops = payloads(data, offsets, sizes, place, self.info)
        if self.array is None:
            assert self.element_bytes is not None, "check_dtype gave it"
            lengths, left = np.divmod(stops - starts, self.element_bytes)
            if left.any():
                worst = int(left.argmax())
                raise EncodingError(
                    f"{self._shown(first + worst)} has {stops[worst] - starts[worst]} bytes, which are no whole number "
                    f"of elements of {self.element_bytes} bytes",
                    hint="is dtype another one?",
                    path=self.info.raw_data.basename,
                    sample=first + worst,
                )
            return lengths
        places = np.minimum(starts[:, None] + np.arange(_LONGEST_HEAD), len(data) - 1)
        lengths = self._said(np.frombuffer(data, np.uint8)[places], stops - starts)
        if (lengths < 0).any():
            worst = int((lengths < 0).argmax())
            self._refuse(data[int(starts[worst]) : int(stops[worst])], first + worst)
        return lengths

    def _said(self, heads: NDArray[np.uint8], payload_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths that arrays say at their heads; -1 where that is not an array of one dimension.

        Args:
            heads: The first bytes of payloads, filled up with anything; of shape (payloads, 10).
            payload_bytes: All bytes of each.
        """
        has_code = self.array is not None and self.array.dtype is None
        element: Any = BYTES_OF_CODE[heads[:, 0]] if has_code else self.element_bytes
        at = int(has_code)
        widths = heads[:, at] & 3
        lengths = np.ascontiguousarray(heads[:, at + 1 : at + 9]).view("<u8")[:, 0] & _WIDTH_MASKS[widths]
        is_sound = (heads[:, at] >> 2 == 1) & (lengths > 0) & (lengths < 1 << 32)
        lengths = np.where(is_sound, lengths, 0).astype(np.int64)
        is_sound &= (element > 0) & (at + 1 + (1 << widths.astype(np.int64)) + lengths * element == payload_bytes)
        return np.where(is_sound, lengths, -1)

    def _refuse(self, payload: memoryview, sample: int) -> None:
        assert self.array is not None, "bytes have no head"
        try:
            shape, _, _ = self.array.read_layout(bytes(payload))
        except EncodingError as error:
            file = self.info.raw_data.basename
            raise error.with_context(self._shown(sample), path=file, sample=sample) from error
        raise _several_dimensions(self.info, self.column, sample, shape)

    def _shown(self, sample: int) -> str:
        return _shown(self.info, self.column, sample)


@dataclass(frozen=True)
class StoredLengths:
    """The same of a shard that other libraries wrote: by where its reader says that arrays lie; else by each array."""

    info: ShardInfo
    column: str
    constant: int | None = None
    told_by_offsets: bool = False

    def read_afar(self, read: ReadPart) -> None:  # noqa: ARG002
        """Nothing: only a whole shard tells; see :class:`ArrayLengths`."""
        return

    def read_here(self, directory: Path) -> NDArray[np.int64]:
        """The lengths by the raw file; see :class:`ArrayLengths`."""
        reader = open_shard(self.info, directory, columns=[self.column])
        try:
            if may_be_flat(self.info):
                return cast("FlatReader", reader).flat_column(self.column).counts
            lengths = (self._length(reader[sample][self.column], sample) for sample in range(len(reader)))
            return np.fromiter(lengths, np.int64, len(reader))
        finally:
            reader.close()

    def _length(self, value: Any, sample: int) -> int:
        if value.ndim != 1:
            raise _several_dimensions(self.info, self.column, sample, value.shape)
        return len(value)


def _shown(info: ShardInfo, column: str, sample: int) -> str:
    return f"{info.raw_data.basename}, sample {sample}, column {column!r}"


def _several_dimensions(info: ShardInfo, column: str, sample: int, shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"{_shown(info, column, sample)} is an array of shape {tuple(shape)}, but the tokens of a document are of one "
        "dimension",
        hint="write the length to a column of whole numbers, and name that with lengths=",
        option="column",
        path=info.raw_data.basename,
        sample=sample,
    )


def array_lengths(info: ShardInfo, column: str, dtype: str | None = None) -> ArrayLengths:
    """How the elements of a column are counted in one shard.

    Args:
        info: The shard, as its index describes it.
        column: A column of arrays of one dimension, or of bytes that hold elements.
        dtype: What elements are in bytes; arrays say so themselves.

    Raises:
        ConfigError: The shard lacks the column; it holds something else, or arrays of another number of dimensions; or
            the dtype is missing, or another than that of the arrays.
    """
    known = encodings_of(info)
    asked = f"column={column!r}"
    if column not in known:
        raise no_such_column(asked, column, known, option="column")
    name = known[column]
    if name == "bytes" and info.format == "mds":
        if dtype is None:
            raise ConfigError(
                f"{asked} is of bytes", hint="say of which elements with dtype, like dtype='uint16'", option="dtype"
            )
        return ArrayLengths(info=info, column=column, constant=None, element_bytes=check_dtype(dtype), array=None)
    try:
        array = encoding(name)
    except (ConfigError, MissingDependencyError):
        array = None
    if not isinstance(array, NdarrayEncoding) or (array.shape is not None and len(array.shape) != 1):
        raise ConfigError(
            f"{asked} is {name!r}, whose tokens cannot be counted; that takes bytes, 'ndarray', 'ndarray:DTYPE' or "
            "'ndarray:DTYPE:LENGTH'",
            hint="name a column of whole numbers that holds the length, like lengths='num_tokens', or pass a function "
            "of columns, like lengths=lambda text: len(text) // 4",
            option="column",
        )
    if dtype is not None and array.dtype is not None and np.dtype(dtype).name != array.dtype:
        raise ConfigError(
            f"{asked} is {name!r}, but dtype={dtype!r}",
            hint="leave dtype out: these arrays say their own",
            option="dtype",
        )
    return ArrayLengths(
        info=info,
        column=column,
        constant=None if array.shape is None else array.shape[0],
        element_bytes=None if array.dtype is None else np.dtype(array.dtype).itemsize,
        array=array,
    )


def column_lengths(info: ShardInfo, column: str, dtype: str | None = None) -> ColumnLengths:
    """The same of a shard of any format."""
    found = array_lengths(info, column, dtype)
    if found.constant is not None or info.format not in OTHER_FORMATS:
        return found
    return DocumentLengths(info) if info.format == "megatron" else StoredLengths(info, column)
