"""The encoding of numpy arrays.

    name                       payload                                  size
    ndarray                    dtype code, shape header, values         variable
    ndarray:int32              shape header, values                     variable
    ndarray:int32:2,3          values                                   2 · 3 · 4 bytes

The dtype code is one byte. The shape header is one byte ``(ndim << 2) | w``, then ndim unsigned integers of 2^w bytes.
The values follow in row-major order. All numbers are little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.scalars import brief, check_type

_CODES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "uint32": 32,
    "int32": 33,
    "float32": 34,
    "uint64": 64,
    "int64": 65,
    "float64": 66,
}
_NAMES = {code: name for name, code in _CODES.items()}
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _CODES}
_NAME_OF_DTYPE = {
    **{dtype: name for name, dtype in _DTYPES.items()},
    **{dtype.newbyteorder(">"): name for name, dtype in _DTYPES.items()},
}
"""By a dtype of either byte order. numpy works ``dtype.name`` out anew each time, which takes longer than the rest."""
_DIM_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_MOST_DIMS = 63  # six bits of the shape header
_Layout = tuple[tuple[int, ...], np.dtype[Any], int]
"""Of a payload: the shape of the values, their dtype, and where they start."""
_SHAPE_TEXT = re.compile(r"[1-9]\d{0,18}(,[1-9]\d{0,18})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class NdarrayEncoding:
    """A numpy array. What is read is the caller's own: writable, and apart from the shard."""

    dtype: str | None = None
    """Name of the one dtype allowed, or None: each payload says its own."""
    shape: tuple[int, ...] | None = None
    """The one shape allowed, or None: each payload says its own. Needs a dtype."""

    size: int | None = field(init=False, repr=False)
    """Bytes of every payload; None where they vary."""
    _layout: _Layout | None = field(init=False, repr=False, compare=False)
    """How every payload lies; None where that varies."""

    def __post_init__(self) -> None:
        size = layout = None
        if self.dtype is not None and self.shape is not None:
            layout = self.shape, _DTYPES[self.dtype], 0
            size = math.prod(self.shape) * _DTYPES[self.dtype].itemsize
        object.__setattr__(self, "size", size)  # worked out once: both are looked at for each array
        object.__setattr__(self, "_layout", layout)

    def encode(self, value: Any) -> bytes:
        return b"".join(self.parts(value))

    def parts(self, value: Any) -> tuple[bytes, Any]:
        """The payload in two parts: what stands before the values, and the values as they lie on disk.

        Returns:
            Bytes, and an array, which type checkers know as a buffer from Python 3.12 on only.

        Raises:
            EncodingError: The value does not fit.
        """
        if type(value) is not np.ndarray:
            check_type(value, np.ndarray)
            _check_no_mask(value)
        head, dtype = _head_and_dtype(self.dtype, self.shape, value.dtype, value.shape)
        return head, np.ascontiguousarray(value, dtype)

    def decode(self, data: bytes | memoryview) -> NDArray[Any]:
        layout = self._layout
        shape, dtype, start = layout if layout and len(data) == self.size else self.read_layout(data)
        try:
            array: NDArray[Any] = np.ndarray(shape, dtype, data, start).copy()
        except ValueError as error:  # numpy 1 stops at 32 dimensions
            raise EncodingError(f"numpy cannot hold shape {shape}: {error}") from None
        return array

    def read_layout(self, data: bytes | memoryview) -> _Layout:
        """How the values of a payload lie in it.

        Raises:
            EncodingError: It does not begin as it must, or does not have as many bytes as that takes.
        """
        name, shape, start = self.dtype, self.shape, 0
        if name is None:
            name, start = _read_dtype(data)
        if shape is None:
            shape, start = _read_shape(data, start)
        expected = self.size or math.prod(shape) * _DTYPES[name].itemsize
        if len(data) - start != expected:
            raise EncodingError(
                f"expected {expected} bytes for {name} values of shape {shape}, but found {len(data) - start}"
            )
        return shape, _DTYPES[name], start


def parse_ndarray(config: str) -> NdarrayEncoding:
    """Understand what follows ``ndarray:``, for example ``""``, ``"int32"`` or ``"int32:2,3"``.

    Raises:
        ConfigError: It is neither a dtype nor a dtype and a shape.
    """
    dtype, colon, shape = config.partition(":")
    if dtype in _CODES and (not colon or _SHAPE_TEXT.fullmatch(shape)):
        dims = tuple(map(int, shape.split(","))) if colon else None
        if dims is None or len(dims) <= _MOST_DIMS:
            return NdarrayEncoding(dtype, dims)
    elif not config:
        return NdarrayEncoding()
    raise ConfigError(
        f"ndarray takes a dtype, or a dtype and a shape, like ndarray:int32:2,3, but got 'ndarray:{config}'; "
        f"dtypes are {', '.join(_CODES)}"
    )


def _check_no_mask(value: NDArray[Any]) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise EncodingError(
            "expected an array without a mask, which cannot be stored, but got a numpy MaskedArray; write "
            "value.filled(...), or value.data, and numpy.ma.getmaskarray(value).astype('uint8') as another column"
        )


@lru_cache(maxsize=1024)
def _head_and_dtype(
    fixed_dtype: str | None, fixed_shape: tuple[int, ...] | None, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[bytes, np.dtype[Any]]:
    """What stands before the values of an array, and the dtype that they have on disk, if it may be written."""
    name = _NAME_OF_DTYPE.get(dtype)
    if name is None or (fixed_dtype and name != fixed_dtype):
        raise EncodingError(f"expected dtype {fixed_dtype or ' or '.join(_CODES)}, but got {dtype.name}")
    if fixed_shape is not None and shape != fixed_shape:
        raise EncodingError(f"expected shape {fixed_shape}, but got {shape}")
    if not 1 <= len(shape) <= _MOST_DIMS or 0 in shape:
        raise EncodingError(f"expected 1 to {_MOST_DIMS} dimensions and at least one value, but got shape {shape}")
    head = b"" if fixed_dtype else bytes([_CODES[name]])
    return head + (b"" if fixed_shape else _shape_header(shape)), _DTYPES[name]


def _shape_header(shape: tuple[int, ...]) -> bytes:
    width = next(w for w in range(4) if max(shape) < 2 ** (8 * 2**w))
    return bytes([len(shape) << 2 | width]) + np.array(shape, _DIM_DTYPES[width]).tobytes()


@lru_cache(maxsize=256)
def _dimensions(ndim_and_width: int) -> struct.Struct:
    ndim, width = divmod(ndim_and_width, 4)
    return struct.Struct(f"<{ndim}{'BHIQ'[width]}")


def _read_dtype(data: bytes | memoryview) -> tuple[str, int]:
    """The dtype's name and where the shape header starts."""
    name = _NAMES.get(data[0]) if len(data) else None
    if name is None:
        raise EncodingError(f"expected a dtype code, one of {sorted(_NAMES)}, but found {bytes(data[:1])!r}")
    return name, 1


def _read_shape(data: bytes | memoryview, start: int) -> tuple[tuple[int, ...], int]:
    """The shape and where the values start."""
    ndim, width = divmod(data[start], 4) if len(data) > start else (0, 0)
    stop = start + 1 + (ndim << width)
    if ndim == 0 or len(data) < stop:
        raise EncodingError(f"expected a shape header, but found {brief(data[start:])}")
    shape = _dimensions(data[start]).unpack_from(data, start + 1)
    if 0 in shape:
        raise EncodingError(f"expected dimensions of at least 1, but found shape {shape}")
    return shape, stop
