"""Values of a sample's files, by the suffix of their names, as in WebDataset.

    suffix                                        value
    json, jsn                                     parsed JSON
    txt, text, transcript, caption                str
    cls, cls2, index, inx, id                     int
    jpg, jpeg, png, webp                          PIL image
    npy                                           numpy array
    npz                                           dict of numpy arrays, by name
    pkl, pickle, pyd                              any pickled value; reading it can run code, so it must be allowed
    pth, pt                                       refused: pickles of torch
    gz after another, like txt.gz                 the same, decompressed
    any other                                     bytes

The size of arrays that a file states is checked against its bytes, and compressed data has at most 1 GiB when it is
decompressed.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError, FormatError
from lightning_streaming.formats.arrays.npy import NpyHeader, read_header
from lightning_streaming.formats.images.encodings import IMAGE_FORMATS, open_image_file
from lightning_streaming.formats.values import BytesEncoding, JsonEncoding, PickleEncoding, StrEncoding, brief

if TYPE_CHECKING:
    from PIL.Image import Image

Decode = Callable[[memoryview], Any]
"""Decodes a file's bytes to its value, which shares no memory with them. Raises EncodingError."""


class _Kind(NamedTuple):
    """The kind of files with some suffixes."""

    encoding: str
    """The MDS encoding that would hold their values."""
    decode: Decode


def kind_of(column: str) -> str:
    """Return the MDS encoding that would hold the values of a column.

    Args:
        column: The part after the first dot of the names of its files, in lower case.
    """
    return _kind(column).encoding


def decoder(column: str, *, as_file: bool = False) -> Decode:
    """Return the decoder of a column's files.

    Args:
        column: As for :func:`kind_of`.
        as_file: Whether images are returned as the bytes of their files.
    """
    decode = bytes if as_file and is_image(column) else _kind(column).decode
    if not _is_packed(column):
        return decode
    return lambda data: decode(_unpacked(data))


def is_unsafe_member(column: str) -> bool:
    """Return whether reading the files of a column can run code of their author."""
    return _kind(column) in (_PICKLE, _TORCH)


def is_never_read(column: str) -> bool:
    """Return whether the files of a column are never read, even if unsafe types are allowed."""
    return _kind(column) is _TORCH


def is_image(column: str) -> bool:
    """Return whether the files of a column are images."""
    return _kind(column).decode is _decode_image


def _kind(column: str) -> _Kind:
    names = column.split(".")
    suffix = names[-1] if not _is_packed(column) else "".join(names[-2:-1])
    return _KINDS.get(suffix, _BYTES)


def _is_packed(column: str) -> bool:
    return column == "gz" or column.endswith(".gz")


def _refuse(data: memoryview) -> Any:
    raise EncodingError(f"{len(data)} bytes are a pickle of torch, which is never read", hint="list others in columns=")


MAX_UNPACKED_BYTES = 2**30
"""Most bytes of a compressed file after decompression; of all arrays of a ``.npz`` file together."""
_PIECE_BYTES = 2**20
_DEFLATE_RATIO = 1032
"""Largest ratio of decompressed to deflated data."""
_SMALL_PIECE_BYTES = 4096
"""Bytes that are read at a time of data of other algorithms, which zipfile decompresses without a limit."""


def _unpacked(data: memoryview) -> memoryview:
    try:
        if len(data) <= MAX_UNPACKED_BYTES // _DEFLATE_RATIO:
            return memoryview(gzip.decompress(data))
        pieces, free = list[bytes](), MAX_UNPACKED_BYTES
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while piece := file.read(min(_PIECE_BYTES, free + 1)):
                pieces.append(piece)
                free -= len(piece)
                if free < 0:
                    raise _too_large(data)
        return memoryview(b"".join(pieces))
    except EncodingError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise EncodingError(f"expected gz data, but found {brief(data)} ({error})") from None


def _too_large(data: memoryview) -> EncodingError:
    return EncodingError(
        f"a file of {len(data)} bytes has more than {MAX_UNPACKED_BYTES} bytes when it is decompressed",
        hint="store it uncompressed, or in several files",
    )


def _decode_json(data: memoryview) -> Any:
    try:
        return JsonEncoding().decode(data)
    except EncodingError:
        try:
            return json.loads(bytes(data))  # which supports UTF-16, and byte order marks
        except (ValueError, RecursionError):
            pass
        raise


def _decode_int(data: memoryview) -> int:
    text = bytes(data)
    try:
        return int(text)
    except ValueError:
        raise EncodingError(f"expected an integer, but found {brief(text)}") from None


def _decode_image(data: memoryview) -> Image:
    return open_image_file(bytes(data), IMAGE_FORMATS)


def _decode_npy(data: memoryview) -> NDArray[Any]:
    width = 2 if bytes(data[6:7]) == b"\1" else 4
    head = npy_head(bytes(data[: 8 + width + int.from_bytes(data[8 : 8 + width], "little")]))
    expected = head.stop + head.dtype.itemsize * math.prod(head.shape)
    if len(data) != expected:
        raise EncodingError(
            f"expected {expected} bytes of {head.dtype} of shape {head.shape}, but found {len(data)} bytes"
        )
    order: Literal["C", "F"] = "F" if head.is_fortran else "C"
    try:
        array: NDArray[Any] = np.ndarray(head.shape, head.dtype, data, head.stop, order=order).copy("K")
    except ValueError as error:  # dimensions that numpy does not support
        raise EncodingError(f"expected an array of shape {head.shape}, but {error}") from None
    return array


@lru_cache(maxsize=256)
def npy_head(head: bytes) -> NpyHeader:
    """Return the parsed head of a .npy file; nearly all files of a dataset share a few heads.

    Raises:
        EncodingError: It is damaged, or of Python objects.
    """
    try:
        header = read_header(lambda start, stop: head[start:stop], len(head), "it")
    except FormatError as error:
        raise EncodingError(f"expected a .npy file, but {error}") from None
    if header.dtype.hasobject:
        raise EncodingError("expected an array of numbers or texts, but found Python objects, which can run any code")
    return header


_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError),
    *(ValueError, NotImplementedError, RuntimeError, KeyError, OverflowError),
)
"""Errors of zipfile for damaged files; RuntimeError for encrypted ones."""


def _decode_npz(data: memoryview) -> dict[str, Any]:
    arrays = dict[str, Any]()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise _too_large(data)
            for info in archive.infolist():
                content = _zipped_file(archive, info)
                is_array = info.filename.endswith(".npy")
                arrays[info.filename.removesuffix(".npy")] = _decode_npy(memoryview(content)) if is_array else content
    except EncodingError:
        raise
    except _ZIP_ERRORS as error:
        raise EncodingError(f"expected a .npz file, but found {brief(data)} ({error})") from None
    return arrays


def _zipped_file(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a file of an archive, without decompressing much more than the size that the archive states."""
    with archive.open(info) as file:
        if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return file.read(info.file_size)
        return b"".join(iter(lambda: file.read(_SMALL_PIECE_BYTES), b""))


_BYTES = _Kind("bytes", BytesEncoding().decode)
_PICKLE, _TORCH = _Kind("pkl", PickleEncoding().decode), _Kind("pkl", _refuse)
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        **dict.fromkeys(("json", "jsn"), _Kind("json", _decode_json)),
        **dict.fromkeys(("txt", "text", "transcript", "caption"), _Kind("str", StrEncoding().decode)),
        **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _Kind("int", _decode_int)),
        **dict.fromkeys(("jpg", "jpeg"), _Kind("jpeg", _decode_image)),
        "png": _Kind("png", _decode_image),
        "webp": _Kind("pil", _decode_image),
        "npy": _Kind("ndarray", _decode_npy),
        "npz": _Kind("pkl", _decode_npz),
        **dict.fromkeys(("pkl", "pickle", "pyd"), _PICKLE),
        **dict.fromkeys(("pth", "pt"), _TORCH),
    }
)
"""By the last suffix; others are bytes. The only encoding that holds several arrays is pkl."""
