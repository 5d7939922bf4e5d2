"""Leaves of litData's samples: the format of each serializer.

    int, float              int64, float64
    bool                    one byte
    str, text               UTF-8
    bytes, file, tif        the bytes
    numpy, tensor           uint32 number of the dtype, uint32 dimensions, uint32 each of them, the values in C order;
                            before the values numpy is little-endian, tensor big-endian, in first releases
                            little-endian
    no_header_numpy:N       values of dtype number N, in one dimension; no_header_tensor:N the same
    pil                     as in MDS
    jpeg, image             a JPEG or PNG file; read as a tensor of its pixels
    jpeg_array              as in MDS; read as a list of tensors
    json                    a value of JSON, nested as tags, counts and values; see :func:`decode_nested`

Numbers are little-endian unless stated. The part after a colon in a name is a detail (``file:txt``), or the name of the
effective serializer (``file:jpeg``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from lightning_streaming.errors import ConfigError, EncodingError, IndexFormatError, UnsupportedError
from lightning_streaming.formats.images import (
    PILLOW_ERRORS,
    JpegArrayEncoding,
    PilEncoding,
    check_rgb,
    open_image_file,
    require_pillow,
    rgb_pixels,
    stored_file,
)
from lightning_streaming.formats.values import PickleEncoding, StrEncoding, brief

Decode = Callable[[memoryview], Any]
"""Decodes the bytes of a leaf to a value that shares no memory with them. Raises EncodingError."""

_NUMPY_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)
"""By number; the following ones are Python objects, or have no size."""
_TORCH_DTYPES = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16"),
    *("float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16"),
)
"""By number; a dtype with two names has two."""
_PICKLE = "pickle"
_UNSUPPORTED = ("graph", "video", "audio", "nifti", "mesh", "pdf", "tifffile")


@lru_cache(maxsize=256)
def leaf_decoder(serializer: str, *, allow_unsafe_types: bool = False, as_file: bool = False) -> Decode:
    """Return the decoder of a serializer's leaves.

    Args:
        serializer: Its name in ``data_format``.
        allow_unsafe_types: Whether leaves may be unpickled, which runs code of their author.
        as_file: Whether image files are returned as bytes.

    Raises:
        ConfigError: Its leaves can run any code when they are read, and that was not allowed; or they are not
            supported, unlike in litData.
        IndexFormatError: Its dtype number is invalid.
        MissingDependencyError: It needs a package that is not installed.
    """
    first, _, detail = serializer.partition(":")
    name = detail if detail in _KNOWN else first
    if name == _PICKLE:
        if allow_unsafe_types:
            return PickleEncoding().decode
        raise ConfigError(
            f"its serializer is {serializer}, which can run any code when it is read",
            hint="pass allow_unsafe_types=True if you trust its author, list the other columns in columns=, or write "
            "the data with values of other types",
            option="allow_unsafe_types",
        )
    if name in _PLAIN:
        if name in _IMAGES:
            require_pillow()
        return _FILES[name] if as_file and name in _FILES else _PLAIN[name]
    if name == "no_header_numpy":
        return partial(_row_of_numpy, _dtype(_NUMPY_DTYPES, detail, serializer))
    if name == "no_header_tensor":
        return partial(_row_of_torch, _dtype(_TORCH_DTYPES, detail, serializer))
    raise UnsupportedError(
        f"its serializer is {brief(serializer)}, which is not supported",
        hint="list the other columns in columns=, or convert the data with litData",
        option="columns",
    )


def is_unsafe_leaf(serializer: str) -> bool:
    """Return whether reading the leaves of a serializer can run code of their author."""
    first, _, detail = serializer.partition(":")
    return (detail if detail in _KNOWN else first) == _PICKLE


def item_bytes(serializer: str) -> int | None:
    """Return the bytes of each value of a serializer of rows of values; None for others.

    Raises:
        IndexFormatError: Its dtype number is invalid.
    """
    name, _, detail = serializer.partition(":")
    if name == "no_header_numpy":
        return np.dtype(_dtype(_NUMPY_DTYPES, detail, serializer)).itemsize
    if name == "no_header_tensor":
        dtype = _dtype(_TORCH_DTYPES, detail, serializer)
        return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return None


def leaf_encoding(serializer: str) -> str:
    """Return the MDS encoding that would hold the values of a serializer; ``json`` if none does exactly.

    Raises:
        IndexFormatError: Its dtype number is invalid.
    """
    first, _, detail = serializer.partition(":")
    name = detail if detail in _KNOWN else first
    if name == "no_header_numpy":
        return f"ndarray:{_dtype(_NUMPY_DTYPES, detail, serializer)}"
    if name == "no_header_tensor":
        dtype = _dtype(_TORCH_DTYPES, detail, serializer)
        return "ndarray" if dtype == "bfloat16" else f"ndarray:{dtype}"
    return _ENCODINGS.get(name, "json")


def _dtype(dtypes: Sequence[str], number: str, serializer: str) -> str:
    if number.isascii() and number.isdigit() and len(number) <= 3 and int(number) < len(dtypes):
        return dtypes[int(number)]
    raise IndexFormatError(f"serializer {brief(serializer)} must end in a number below {len(dtypes)}, for its dtype")


# --- numbers, texts ---


def _number(form: str) -> Decode:
    packed = struct.Struct(form)
    unpack, size = packed.unpack, packed.size

    def decode(data: memoryview) -> Any:
        if len(data) != size:
            raise EncodingError(f"expected {size} bytes, but found {len(data)}")
        return unpack(data)[0]

    return decode


# --- arrays ---


def _row_of_numpy(dtype: str, data: memoryview) -> Any:
    try:
        return np.frombuffer(data, dtype).copy()
    except ValueError as error:
        raise EncodingError(f"expected values of {dtype}, but found {len(data)} bytes ({error})") from None


def _row_of_torch(dtype: str, data: memoryview) -> Any:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if not len(data):
        return torch.empty(0, dtype=kind)
    try:
        return torch.frombuffer(bytearray(data), dtype=kind)
    except ValueError as error:
        raise EncodingError(f"expected values of {dtype}, but found {len(data)} bytes ({error})") from None


def _shaped(row: Any, shape: tuple[int, ...]) -> Any:
    if math.prod(shape) != len(row):
        raise EncodingError(f"expected {math.prod(shape)} values for the shape {brief(shape)}, but found {len(row)}")
    try:
        return row.reshape(shape)
    except (
        ValueError,
        RuntimeError,
        OverflowError,
        TypeError,
    ) as error:  # a shape that is too large, though it has a 0
        raise EncodingError(f"expected a possible shape, but found {brief(shape)} ({error})") from None


def _head(data: memoryview, order: str) -> tuple[int, int]:
    if len(data) < 8:
        raise EncodingError(f"expected at least 8 bytes of an array, but found {len(data)}")
    number, rank = struct.unpack_from(f"{order}II", data)
    return number, rank


def _array(
    dtypes: Sequence[str], row: Callable[[str, memoryview], Any], data: memoryview, order: str, head: tuple[int, int]
) -> Any:
    number, rank = head
    start = 8 + 4 * rank
    if number >= len(dtypes):
        raise EncodingError(f"expected a number below {len(dtypes)} for its dtype, but found {number}")
    if start > len(data):
        raise EncodingError(f"expected {start} bytes for {rank} dimensions, but found {len(data)}")
    return _shaped(row(dtypes[number], data[start:]), struct.unpack_from(f"{order}{rank}I", data, 8))


def _numpy(data: memoryview) -> Any:
    return _array(_NUMPY_DTYPES, _row_of_numpy, data, "<", _head(data, "<"))


def _tensor(data: memoryview) -> Any:
    order = ">"
    head = _head(data, order)
    if head[0] >= len(_TORCH_DTYPES):  # no number is so large, and no written number is 0
        order, head = "<", _head(data, "<")
    return _array(_TORCH_DTYPES, _row_of_torch, data, order, head)


class PlainLayout(NamedTuple):
    """Layout of the values of a leaf."""

    head: int
    """Bytes before the values."""
    dtype: np.dtype[Any]
    """Their dtype, with a shape if the leaf is an array."""


def may_be_plain(serializer: str) -> bool:
    """Return whether the leaves of a serializer are numbers, or arrays, of numpy's types."""
    name = serializer.partition(":")[0]
    return name in _PLAIN_NUMBERS or name in ("numpy", "tensor") or leaf_encoding(serializer) in _PLAIN_ARRAYS


def plain_layout(serializer: str, data: memoryview) -> PlainLayout | None:
    """Return the layout of a leaf; None if its bytes are invalid.

    Args:
        serializer: A serializer accepted by :func:`may_be_plain`.
        data: A leaf.
    """
    name = serializer.partition(":")[0]
    if name in _PLAIN_NUMBERS:
        return PlainLayout(0, np.dtype(_PLAIN_NUMBERS[name]))
    try:
        value = leaf_decoder(serializer)(data)
    except EncodingError:
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype == "bfloat16":
        return None
    head = 0 if name.startswith("no_header") else 8 + 4 * value.ndim
    return PlainLayout(head, np.dtype((dtype, tuple(value.shape))))


# --- images ---


def _pixels(image: Any) -> Any:
    """Return a tensor uint8 of shape (3, height, width). A JPEG file is rotated according to its EXIF data."""
    import PIL.ImageOps
    import torch

    check_rgb(image)
    if "exif" in image.info and image.format == "JPEG":
        try:
            image = PIL.ImageOps.exif_transpose(image)
        except (*PILLOW_ERRORS, TypeError, KeyError, RuntimeError) as error:
            if isinstance(error, EncodingError):  # about its pixels
                raise
            raise EncodingError(f"expected an image with valid EXIF data, but {error!r}") from error
    return torch.from_numpy(np.ascontiguousarray(rgb_pixels(image).transpose(2, 0, 1)))


def _image(data: memoryview) -> Any:
    return _pixels(open_image_file(bytes(data)))


def _files(data: memoryview) -> list[Any]:
    return [stored_file(image) for image in JpegArrayEncoding().decode(data)]


# --- nested values ---

_COUNT = struct.Struct("<I")
_NESTED_NUMBERS = {2: "<q", 3: "<d", 4: "<?"}
"""Tags of lists."""
_SINGLE_NUMBERS = {8: "<q", 9: "<d", 10: "<?"}
_RECORD_NUMBERS = {0x12: "<q", 0x13: "<d", 0x14: "<?"}
_JSON, _TEXTS, _DICT, _RECORDS, _TEXT, _NONE = 0, 1, 5, 6, 7, 11
_RECORD_NONE, _RECORD_TEXT = 0x10, 0x11
_FIRST_OF_JSON = 0x20
"""A larger tag is the first character of a JSON text of earlier releases."""


def decode_nested(data: memoryview) -> Any:
    """Return a value of JSON; each value has a tag before it.

        0    a JSON text             uint32 bytes, the text
        1    list of texts           uint32 count, and for each uint32 bytes and its UTF-8
        2–4  list of ints, floats, bools     uint32 count, and int64, float64 or a byte of each
        5    dict                    uint32 count, and for each its key, as 7 without a tag, and its value
        6    list of equal dicts     uint32 count, uint32 keys, the keys, and for each dict its values by tags 0x10–0x14
        7    text                    uint32 bytes, UTF-8
        8–11 int, float, bool, None

    Raises:
        EncodingError: The bytes are not such a value.
    """
    raw = bytes(data)
    try:
        if not raw or raw[0] > _FIRST_OF_JSON:
            return json.loads(raw)
        value, stop = _nested(raw, 0)
    except RecursionError:
        raise EncodingError("expected a nested value, but it is nested too deeply") from None
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, EncodingError):
            raise
        raise EncodingError(f"expected a nested value, but found invalid bytes ({error})") from None
    if stop != len(raw):
        raise EncodingError(f"expected a nested value of {stop} bytes, but found {len(raw)}")
    return value


def _nested(raw: bytes, place: int) -> tuple[Any, int]:
    tag = raw[place]
    place += 1
    if tag == _NONE:
        return None, place
    if tag in _SINGLE_NUMBERS:
        return _number_at(raw, place, _SINGLE_NUMBERS[tag])
    if tag == _TEXT:
        return _text(raw, place)
    if tag == _JSON:
        text, place = _text(raw, place)
        return json.loads(text), place
    if tag in _NESTED_NUMBERS:
        return _numbers(raw, place, _NESTED_NUMBERS[tag])
    if tag == _TEXTS:
        return _texts(raw, *_count(raw, place, 4))
    if tag == _DICT:
        count, place = _count(raw, place, 5)
        items = dict[str, Any]()
        for _ in range(count):
            key, place = _text(raw, place)
            items[key], place = _nested(raw, place)
        return items, place
    if tag == _RECORDS:
        return _records(raw, place)
    raise EncodingError(f"expected the tag of a nested value, but found {tag}")


def _count(raw: bytes, place: int, least: int) -> tuple[int, int]:
    """Return a count of values, each of which takes at least some bytes; and the position after it."""
    (count,) = _COUNT.unpack_from(raw, place)
    if count * least > len(raw) - place:
        raise EncodingError(f"expected {count} values, but found {len(raw) - place} bytes")
    return count, place + 4


def _text(raw: bytes, place: int) -> tuple[str, int]:
    size, place = _count(raw, place, 1)
    stop = place + size
    if stop > len(raw):
        raise EncodingError(f"expected a text of {size} bytes, but found {len(raw) - place}")
    return raw[place:stop].decode(), stop


def _texts(raw: bytes, count: int, place: int) -> tuple[list[str], int]:
    texts = []
    for _ in range(count):
        text, place = _text(raw, place)
        texts.append(text)
    return texts, place


def _number_at(raw: bytes, place: int, form: str) -> tuple[Any, int]:
    return struct.unpack_from(form, raw, place)[0], place + struct.calcsize(form)


def _numbers(raw: bytes, place: int, form: str) -> tuple[list[Any], int]:
    count, place = _count(raw, place, struct.calcsize(form))
    many = f"<{count}{form[1]}"
    return list(struct.unpack_from(many, raw, place)), place + struct.calcsize(many)


def _records(raw: bytes, place: int) -> tuple[list[dict[str, Any]], int]:
    rows, place = _count(raw, place, 1)
    keys, place = _texts(raw, *_count(raw, place, 4))
    if rows and not keys:
        raise EncodingError(f"expected keys of {rows} dicts, but found none")
    records = []
    for _ in range(rows):
        row = {}
        for key in keys:
            row[key], place = _record_value(raw, place)
        records.append(row)
    return records, place


def _record_value(raw: bytes, place: int) -> tuple[Any, int]:
    tag = raw[place]
    place += 1
    if tag == _RECORD_NONE:
        return None, place
    if tag == _RECORD_TEXT:
        return _text(raw, place)
    if tag in _RECORD_NUMBERS:
        return _number_at(raw, place, _RECORD_NUMBERS[tag])
    raise EncodingError(f"expected the tag of a value in a dict, but found {tag}")


_IMAGES = ("pil", "jpeg", "image", "jpeg_array")
_PLAIN: dict[str, Decode] = {
    "int": _number("<q"),
    "float": _number("<d"),
    "bool": _number("<?"),
    **dict.fromkeys(("str", "text"), StrEncoding().decode),
    **dict.fromkeys(("bytes", "file", "tif"), bytes),
    "numpy": _numpy,
    "tensor": _tensor,
    "json": decode_nested,
    "pil": PilEncoding().decode,
    "jpeg": _image,
    "image": _image,
    "jpeg_array": lambda data: [_pixels(image) for image in JpegArrayEncoding().decode(data)],
}
_FILES: dict[str, Decode] = {"jpeg": bytes, "image": bytes, "jpeg_array": _files}
"""Image files as bytes."""
_ENCODINGS = {
    "int": "int",
    "float": "float64",
    "str": "str",
    "text": "str",
    "bytes": "bytes",
    "file": "bytes",
    "tif": "bytes",
    "numpy": "ndarray",
    "tensor": "ndarray",
    "jpeg": "ndarray:uint8",
    "image": "ndarray:uint8",
    "pil": "pil",
    "pickle": "pkl",
    "graph": "pkl",
}
_PLAIN_NUMBERS = {"int": "<i8", "float": "<f8", "bool": "?"}
_PLAIN_ARRAYS = frozenset(f"ndarray:{dtype}" for dtype in {*_NUMPY_DTYPES, *_TORCH_DTYPES} - {"bfloat16"})
_KNOWN = frozenset({*_PLAIN, _PICKLE, *_UNSUPPORTED})
