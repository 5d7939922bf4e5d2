"""Images: their encodings, files opened without decoding and checked for truncation, and decoded pixels.

    encoding       payload
    pil            uint32 width, uint32 height, uint32 length of the mode, the mode as UTF-8, raw pixels
    jpeg, png      an image file
    jpeg_array     uint32 count, count times uint32 size, then that many JPEG files back to back
    list[...]      uint32 0, then the same, with a payload of the encoding in brackets for each

Dimensions that a payload states are checked against the number of pixels that its bytes can hold. The Pillow package is
imported on first use of these encodings.

    kind           values of a column of images, as `decode` requests them
    pil            a PIL image, which decodes its pixels on first access
    bytes          the file
    array          uint8, numpy, (height, width, 3), RGB
    tensor         uint8, torch, (3, height, width), RGB
    encoded        an :class:`EncodedImage`, which decodes on request

JPEG files are decoded by libjpeg-turbo, without the interpreter's lock; all others by Pillow. Pixels are those of
Pillow's ``convert("RGB")``. Files that libjpeg-turbo does not support, like CMYK and files with slight damage, are
decoded by Pillow, so both take the same files. EXIF rotations are not applied.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import index
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.values import brief, check_type
from lightning_streaming.signatures import public

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from torch import Tensor

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes of image files."""
PILLOW_ERRORS = (OSError, ValueError, SyntaxError, OverflowError, EOFError, struct.error)
"""Errors of Pillow for damaged files, except its own classes."""


def require_pillow() -> ModuleType:
    """Return the module ``PIL.Image``.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    try:
        import PIL.Image
    except ImportError:
        raise MissingDependencyError(
            "columns of images need the Pillow package", hint="run: pip install 'lightning-streaming[images]'"
        ) from None
    return PIL.Image


def _join_parts(parts: Sequence[bytes | bytearray]) -> bytes:
    """Join parts to one payload.

    Raises:
        EncodingError: There are too many, or one is too large, for 32 bits.
    """
    try:
        head = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts))
    except struct.error as error:
        raise EncodingError(f"expected parts whose number and sizes fit in 32 bits ({error})") from None
    return b"".join([head, *parts])


def _split_parts(data: memoryview) -> list[memoryview]:
    """Return the parts of a payload, as slices of it. Their number and sizes are checked first.

    Raises:
        EncodingError: The sizes do not add up to the payload.
    """
    count = int.from_bytes(data[:4], "little") if len(data) >= 4 else 0
    start = 4 + 4 * count
    if len(data) < start:
        raise EncodingError(f"expected {start} bytes for the sizes of {count} parts, but found {len(data)}")
    stops = [*accumulate(struct.unpack_from(f"<{count}I", data, 4), initial=start)]
    if stops[-1] != len(data):
        raise EncodingError(f"expected {stops[-1]} bytes by the sizes of the parts, but found {len(data)}")
    return [data[start:stop] for start, stop in pairwise(stops)]


BEGINNINGS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
"""First bytes of each kind of file."""

PIXELS_PER_BYTE = {"JPEG": 512, "MPO": 512, "PNG": 8 * 1032}
"""Most pixels that a byte of each kind of file can describe. JPEG: a bit for each block of 64. PNG: a bit for each,
deflated at most 1032-fold. WebP: a file of a few bytes can have one colour and any size."""

_SCAN, _END = 0xDA, b"\xff\xd9"
"""JPEG: the marker before the pixels, and the bytes after them, which no pixels contain."""
_ALONE = (0x01, *range(0xD0, 0xD8))
"""JPEG: markers without a length."""

_OVERWRITTEN = (
    "{} was overwritten after it was opened as an image, so the pixels are lost; decode images (image.load()) before "
    "overwriting their files"
)


IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
"""Kinds of image files in data of other libraries."""


def open_image_file(data: bytes, formats: Sequence[str] = ("JPEG", "PNG")) -> Image:
    """Open an image file by reading only its head; pixels are decoded on first access.

    Args:
        data: The file.
        formats: The allowed ones of ``IMAGE_FORMATS``.

    Raises:
        EncodingError: It has another format, its head is damaged, or it states more pixels than its bytes can hold or
            Pillow allows. Also raised later, for pixels that cannot be decoded.
        MissingDependencyError: Pillow is not installed.
    """
    pillow = require_pillow()
    try:
        image: ImageFile = pillow.open(io.BytesIO(data), formats=formats)
    except pillow.UnidentifiedImageError:
        raise EncodingError(_no_image(data, formats)) from None
    except (pillow.DecompressionBombError, *PILLOW_ERRORS) as error:
        raise EncodingError(f"expected an image file that PIL can open, but {error}") from error
    _check_can_hold(image, data)
    image.__class__ = _not_decoded(type(image))
    return image


def _check_can_hold(image: ImageFile, data: bytes) -> None:
    width, height = image.size
    if width * height > PIXELS_PER_BYTE.get(image.format or "PNG", math.inf) * len(data):
        raise EncodingError(f"{len(data)} bytes of {image.format} cannot hold an image of {width} x {height}")


@lru_cache(maxsize=16)
def _not_decoded(plain: type[ImageFile]) -> type[ImageFile]:
    """Return the class of an open file until its pixels are decoded; then it has the class ``plain`` of Pillow."""

    class NotDecoded(plain):  # type: ignore[misc, valid-type]
        is_not_decoded = True

        def load(self) -> Any:
            """Decode the pixels.

            Raises:
                EncodingError: The file is damaged, or truncated.
            """
            try:
                pixels = super().load()
            except PILLOW_ERRORS as error:
                width, height = self.size
                raise EncodingError(
                    f"expected a whole {self.format} file of {width} x {height} pixels, but they cannot be decoded: "
                    f"{error}"
                ) from error
            self.__class__ = plain  # type: ignore[assignment]
            return pixels

        def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
            """Pickle decoded, like other images."""
            self.load()
            return self.__reduce_ex__(protocol)

    NotDecoded.__name__, NotDecoded.__module__ = plain.__name__, plain.__module__
    NotDecoded.__qualname__ = plain.__qualname__
    return NotDecoded


def check_whole(data: bytes) -> None:
    """Raise EncodingError if a JPEG or PNG file is truncated, or a PNG file has wrong checksums.

    Pixels are decoded only for a JPEG file without an end marker, which some complete files lack.

    Raises:
        EncodingError: The file is truncated, damaged, or of another kind.
    """
    if data.startswith(BEGINNINGS["PNG"]):
        _check_png(data)
    elif not _jpeg_has_end(data):
        open_image_file(data).load()


def load_whole(image: Image) -> None:
    """Decode the pixels of an image; check the end of its file if that is still open.

    Raises:
        EncodingError: The file is truncated or damaged.
    """
    file = getattr(image, "fp", None)
    if isinstance(file, io.BytesIO) and getattr(image, "format", None) == "PNG":
        check_whole(file.getvalue())
    image.load()


def stored_file(image: Image) -> bytes | None:
    """Return the file in memory that an image was opened from, if only its head was read; else None."""
    file = getattr(image, "fp", None)
    is_open = getattr(image, "is_not_decoded", False) or getattr(image, "tile", None)  # WebP has no tiles
    return file.getvalue() if isinstance(file, io.BytesIO) and is_open else None


def _file_behind(image: Image) -> bytes | None:
    """Return the JPEG file that an image was opened from, if it has exactly the pixels of the image.

    An image that is not decoded yet can only have changed its size and mode (``draft``), and the selected one of
    several images. A decoded image is compared pixel by pixel: it may have been edited.

    Raises:
        EncodingError: The file was overwritten after it was opened, so that the pixels are lost.
    """
    from PIL.JpegImagePlugin import JpegImageFile

    name = getattr(image, "filename", None)
    if not isinstance(image, JpegImageFile) or not name:
        return None
    data = _bytes_of(image, os.fsdecode(name))
    if data is None or not _jpeg_has_end(data):
        return None
    try:
        reopened = _reopened(data, image)
        _check_can_hold(reopened, data)
        is_same = _identity(reopened, image) == _identity(image, image)
    except (EncodingError, *PILLOW_ERRORS):
        return None
    if _is_open(image) and _head(reopened) != _head(image):
        raise EncodingError(_OVERWRITTEN.format(os.fsdecode(name)))
    return data if is_same else None


def _reopened(data: bytes, image: JpegImageFile) -> JpegImageFile:
    """Open an image like ``Image.open``, without another warning of large images."""
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.MpoImagePlugin import MpoImageFile

    kind = MpoImageFile if isinstance(image, MpoImageFile) else JpegImageFile
    return kind(io.BytesIO(data))


def _identity(image: Image, like: ImageFile) -> tuple[object, ...]:
    """Return what identifies an image: positions of pixels in its file; or the pixels, if ``like`` is decoded."""
    if like.tile:
        return image.size, image.mode, getattr(image, "tile", None)
    return image.size, image.mode, image.tobytes()


def _head(image: JpegImageFile) -> tuple[object, ...]:
    """Return the head that was read on opening; () for several images, where it depends on the last one read."""
    return () if image.format == "MPO" else (image.quantization, image.applist)


def _is_open(image: ImageFile) -> bool:
    """Return whether the pixels are not read yet, and can be."""
    return bool(image.tile) and image.fp is not None and not image.fp.closed


def _bytes_of(image: ImageFile, name: str) -> bytes | None:
    """Return the open file, which may have been renamed; or else the file of its name."""
    try:
        if not _is_open(image) or image.fp is None:
            return Path(name).read_bytes()
        position = image.fp.tell()
        image.fp.seek(0)
        buffered = image.fp.read()  # begins like the file when it was opened, as far as that is in the buffer
        image.fp.seek(position)
        current = _read_past_buffer(image.fp.fileno())
    except PILLOW_ERRORS:  # removed, not readable, or not a file on disk
        return None
    if buffered != current:
        raise EncodingError(_OVERWRITTEN.format(name))
    return current


def _read_past_buffer(descriptor: int) -> bytes:
    """Read a whole open file in its current state."""
    pieces, offset = list[bytes](), 0
    while piece := os.pread(descriptor, max(os.fstat(descriptor).st_size - offset, 1), offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _no_image(data: bytes, formats: Sequence[str]) -> str:
    for kind, beginning in BEGINNINGS.items():
        if data.startswith(beginning[: max(1, len(data))]):
            return f"expected a whole {kind} file, but the head of this one is damaged or cut off ({len(data)} bytes)"
    return f"expected a {' or '.join(formats)} file, but found {brief(data)}"


def _check_png(data: bytes) -> None:
    """Check all chunks: length, name, content, checksum of name and content."""
    position, name = len(BEGINNINGS["PNG"]), b""
    view = memoryview(data)
    while name != b"IEND":
        content = position + 8
        stop = content + int.from_bytes(data[position : position + 4], "big")
        if stop + 4 > len(data):
            raise EncodingError(
                f"expected a whole PNG file, but this one was cut off: of its {len(data)} bytes none mark the end"
            )
        name = data[position + 4 : content]
        if zlib.crc32(view[position + 4 : stop]) != int.from_bytes(data[stop : stop + 4], "big"):
            raise EncodingError(
                f"expected a whole PNG file, but this one is damaged: the checksum of its chunk {name!r} differs"
            )
        position = stop + 4


def _jpeg_has_end(data: bytes) -> bool:
    """Return whether the end of the pixels is marked; some complete files lack the mark.

    Skips the segments before the pixels, to ignore the end of a thumbnail within the head.
    """
    position = 2 if data.startswith(BEGINNINGS["JPEG"]) else len(data)
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            return False
        marker = data[position + 1]
        if marker == _SCAN:
            return data.find(_END, position) >= 0
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _ALONE:
            position += 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


_PIL_HEAD = struct.Struct("<III")
_RESERVED = bytes(4)
_BITS_OF_MODE = {
    "1": 1,
    **dict.fromkeys(("L", "P"), 8),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16L", "I;16B", "I;16N"), 16),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32),
}
"""Bits of a raw pixel; a row is padded to whole bytes."""


@dataclass(frozen=True, slots=True)
class PilEncoding:
    """The raw pixels of a PIL image. A palette and other metadata of the image are lost."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        image = _check_image(value)
        mode = image.mode.encode()
        _raw_bytes(image.mode, *image.size)
        try:
            pixels = image.tobytes()
        except PILLOW_ERRORS as error:  # a damaged file that was opened lazily
            raise EncodingError(f"expected an image that PIL can load, but got {brief(value)} ({error})") from error
        return b"".join([_PIL_HEAD.pack(*image.size, len(mode)), mode, pixels])

    def decode(self, data: bytes | memoryview) -> Image:
        if len(data) < _PIL_HEAD.size:
            raise EncodingError(f"expected at least {_PIL_HEAD.size} bytes of an image, but found {len(data)}")
        width, height, mode_bytes = _PIL_HEAD.unpack_from(data)
        start = _PIL_HEAD.size + mode_bytes
        mode = str(data[_PIL_HEAD.size : start], "utf-8", "replace") if mode_bytes <= 8 else "(too long)"
        expected = _raw_bytes(mode, width, height)
        if len(data) - start != expected:
            raise EncodingError(
                f"expected {expected} bytes of pixels for an image of {width} x {height} in mode {mode}, but found "
                f"{len(data) - start}"
            )
        image: Image = require_pillow().frombytes(mode, (width, height), bytes(data[start:]))
        return image


@dataclass(frozen=True, slots=True)
class ImageFileEncoding:
    """A PIL image as a file. It is opened without decoding its pixels, which PIL does on first access; damaged pixels
    raise EncodingError then.
    """

    format: str
    """``"JPEG"`` or ``"PNG"``: the format to write. Both may be read."""
    size: None = None

    def encode(self, value: Any) -> bytes:
        image = _check_image(value)
        unchanged = _file_behind(image) if self.format == "JPEG" else None
        if unchanged is not None:
            return unchanged
        file = io.BytesIO()
        try:
            image.save(file, self.format)
        except PILLOW_ERRORS as error:
            raise EncodingError(
                f"expected an image that {self.format} can hold, but got {brief(value)} ({error})"
            ) from error
        return file.getvalue()

    def decode(self, data: bytes | memoryview) -> Image:
        return open_image_file(bytes(data))


@dataclass(frozen=True, slots=True)
class JpegArrayEncoding:
    """A sequence of JPEG files, each as bytes; read as a list of PIL images."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        files = list(value) if isinstance(value, Iterable) else [value]
        if isinstance(value, str) or not all(isinstance(file, (bytes, bytearray)) for file in files):
            raise EncodingError(f"expected a sequence of JPEG files as bytes, but got {brief(value)}")
        return _join_parts(files)

    def decode(self, data: bytes | memoryview) -> list[Image]:
        return [open_image_file(bytes(part)) for part in _split_parts(memoryview(data))]


@dataclass(frozen=True, slots=True)
class ImageListEncoding:
    """A list of PIL images of one encoding; may be empty."""

    element: PilEncoding | ImageFileEncoding
    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, list)
        return _RESERVED + _join_parts([self.element.encode(image) for image in value])

    def decode(self, data: bytes | memoryview) -> list[Image]:
        if len(data) < len(_RESERVED):
            raise EncodingError(f"expected at least 8 bytes of a list of images, but found {len(data)}")
        return [self.element.decode(part) for part in _split_parts(memoryview(data)[len(_RESERVED) :])]


def _check_image(value: Any) -> Image:
    check_type(value, require_pillow().Image)
    image: Image = value
    return image


def _raw_bytes(mode: str, width: int, height: int) -> int:
    """Return the bytes of the pixels of an image.

    Raises:
        EncodingError: No image has this mode or size.
    """
    bits = _BITS_OF_MODE.get(mode)
    if bits is None:
        raise EncodingError(f"expected an image mode, one of {', '.join(_BITS_OF_MODE)}, but found {brief(mode)}")
    if not width or not height:  # PIL allocates memory for each row, even without pixels
        raise EncodingError(f"expected an image of at least one pixel, but found {width} x {height}")
    return (width * bits + 7) // 8 * height


Size = tuple[int, int]
"""Width and height in pixels, as in Pillow."""
Pixels = NDArray[np.uint8]
"""RGB, of shape (height, width, 3)."""

_FACTORS = (8, 4, 2)
"""Factors by which libjpeg scales down for free; sizes are rounded up."""
_QUICK_COLORS = ("YCbCr", "Gray", "RGB")
"""Colours of JPEG files that libjpeg-turbo converts to RGB like Pillow."""
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Modes of 8 bits per channel."""


def require_simplejpeg() -> Any:
    """Return the module ``simplejpeg``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import simplejpeg
    except ImportError:
        raise MissingDependencyError(
            "images are decoded with the simplejpeg package", hint="run: pip install 'lightning-streaming[jpeg]'"
        ) from None
    return simplejpeg


@public()
class EncodedImage:
    """Image that is not decoded yet. Each call of a method decodes it again.

    Args:
        file: Content of a JPEG, PNG or WebP file.

    Raises:
        ConfigError: ``file`` is not bytes.
    """

    __slots__ = ("file",)

    def __init__(self, file: bytes) -> None:
        if not isinstance(file, bytes):
            raise ConfigError(
                f"an EncodedImage is created from the bytes of a whole file, but got {brief(file)}", option="file"
            )
        self.file = file
        """Content of the file."""

    @property
    def size(self) -> Size:
        """Width and height, from the header of the file.

        Raises:
            EncodingError: It is not such a file, or its header is damaged.
        """
        head = _jpeg_head(self.file)
        return self.pil().size if head is None else head

    def pil(self) -> Image:
        """Return a PIL image, which decodes its pixels when they are first needed.

        Raises:
            EncodingError: It is not such a file, or its header is damaged. Damaged pixels raise later.
        """
        return open_image_file(self.file, IMAGE_FORMATS)

    def decode(self, min_size: int | Size | None = None) -> Pixels:
        """Return the pixels: uint8 of shape (height, width, 3), RGB.

        Args:
            min_size: Minimum width and height, or a number for both. A JPEG file is decoded at a half, a quarter or an
                eighth of its size if both sides keep this minimum, which is faster. None, and all other files: full
                size.

        Raises:
            EncodingError: The file is damaged, or of more than 8 bits a channel.
            ConfigError: ``min_size`` is not a size.
        """
        minimum = None if min_size is None else _pair("min_size", min_size)
        if not self.file.startswith(BEGINNINGS["JPEG"]):
            return _writable(self.pil())
        pixels = _decode_quickly(self.file, minimum)
        if pixels is None:  # Pillow decodes it, or raises the error
            image = self.pil()
            factor = _factor(image.size, minimum)
            if factor > 1:
                width, height = image.size
                image.draft(None, (width // factor, height // factor))
            pixels = _writable(image)
        return pixels

    def crop(self, box: tuple[int, int, int, int], size: int | Size) -> Tensor:
        """Return the pixels of a box, resized: a tensor of uint8 of shape (3, height, width), RGB.

        A JPEG file is decoded at the smallest sufficient size. Resizing is bilinear with antialias as in Pillow; for a
        file that is decoded at full size the values differ from Pillow's by at most two, and rarely by more than one.

        Args:
            box: Left, upper, right and lower edge in pixels of the whole image.
            size: Width and height of the result, or a number for both.

        Raises:
            EncodingError: The file is damaged, or of more than 8 bits a channel.
            ConfigError: The box is empty, not of whole pixels, or not within the image; or ``size`` is not a size.
        """
        import torch

        width, height = self.size
        left, upper, right, lower = _box_within(box, width, height)
        to_width, to_height = _pair("the size of a crop", size, "size")
        enough = -(-width * to_width // (right - left)), -(-height * to_height // (lower - upper))
        pixels = self.decode(enough)
        across, down = pixels.shape[1] / width, pixels.shape[0] / height
        rows = _scaled(upper, lower, down, pixels.shape[0])
        columns = _scaled(left, right, across, pixels.shape[1])
        # The batch dimension is added before the permutation: the other order takes torch twice as long.
        cut = torch.from_numpy(pixels[rows, columns])[None].permute(0, 3, 1, 2)
        if cut.shape[2:] != (to_height, to_width):
            cut = torch.nn.functional.interpolate(cut, (to_height, to_width), mode="bilinear", antialias=True)
        return _channels_first(
            cut[0].numpy()
        )  # now, while it is in the cache: collating other tensors takes three times as long

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ConfigError on conversion by numpy, which would create an array of one object.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "an EncodedImage is not decoded yet",
            hint="call its decode(), crop() or pil(), or set decode.columns to array",
        )

    def __reduce__(self) -> tuple[type[EncodedImage], tuple[bytes]]:
        return EncodedImage, (self.file,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedImage) and self.file == other.file

    def __hash__(self) -> int:
        return hash(self.file)

    def __repr__(self) -> str:
        return f"<EncodedImage of {len(self.file)} bytes>"


def rgb_pixels(image: Image) -> Pixels:
    """Return the pixels of a PIL image, uint8 of shape (height, width, 3), RGB; they must not be written to.

    Raises:
        EncodingError: They cannot be decoded, or have more than 8 bits per channel.
    """
    check_rgb(image)
    if image.mode in ("P", "PA"):  # by way of RGBA, as Pillow would warn about transparency
        image = image.convert("RGBA")
    pixels: Pixels = np.asarray(image.convert("RGB"))
    return pixels


def _writable(image: Image) -> Pixels:
    """Return the pixels as a writable array."""
    return np.array(rgb_pixels(image))


def check_rgb(image: Image) -> None:
    """Raise EncodingError if an image has more than 8 bits per channel.

    Raises:
        EncodingError: See above.
    """
    if image.mode not in _MODES:
        raise EncodingError(f"expected an image of 8 bits per channel, but found mode {image.mode}")


def _channels_first(pixels: Pixels) -> Tensor:
    """Return a contiguous tensor of pixels of shape (3, height, width)."""
    import torch

    # By numpy: torch starts its threads even for few bytes, which takes several times as long as the copy.
    return torch.from_numpy(np.ascontiguousarray(pixels))


# --- JPEG ---


def _jpeg_head(data: bytes) -> Size | None:
    """Return width and height; None if Pillow has to read the file."""
    if not data.startswith(BEGINNINGS["JPEG"]):
        return None
    try:
        height, width, colors, _ = require_simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    max_pixels = min(PIXELS_PER_BYTE["JPEG"] * len(data), require_pillow().MAX_IMAGE_PIXELS or width * height)
    return (width, height) if colors in _QUICK_COLORS and width * height <= max_pixels else None


def _decode_quickly(data: bytes, minimum: Size | None) -> Pixels | None:
    """Return the pixels; None if Pillow has to decode them, or to raise the error."""
    size = _jpeg_head(data)
    if size is None:
        return None
    factor = _factor(size, minimum)
    width, height = (-(-side // factor) for side in size)
    try:
        pixels: Pixels = require_simplejpeg().decode_jpeg(
            data, "RGB", min_width=width, min_height=height, min_factor=factor
        )
    except ValueError:
        return None
    return pixels


def _factor(size: Size, minimum: Size | None) -> int:
    """Return the largest divisor of both sides that keeps their minimum."""
    for factor in _FACTORS if minimum is not None else ():
        if all(side >= factor and -(-side // factor) >= least for side, least in zip(size, minimum or (), strict=True)):
            return factor
    return 1


def _pair(what: str, size: int | Size, option: str = "min_size") -> Size:
    """Return the requested width and height."""
    try:
        try:
            width = height = index(size)  # type: ignore[arg-type]
        except TypeError:  # not a check of its type: an array of two sides also has __index__
            width, height = map(index, size)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        width = height = 0
    if min(width, height) < 1:
        raise ConfigError(
            f"{what} must be a number of pixels, or width and height; at least 1; but got {short_repr(size)}",
            option=option,
        )
    return width, height


def _box_within(box: tuple[int, int, int, int], width: int, height: int) -> tuple[int, int, int, int]:
    """Return the box, if it is within an image."""
    try:
        left, upper, right, lower = map(index, box)
        is_within = 0 <= left < right <= width and 0 <= upper < lower <= height
    except (TypeError, ValueError):
        is_within = False
    if not is_within:
        raise ConfigError(
            f"a crop must be a box of whole pixels within {width} x {height} pixels, but got {short_repr(box)}",
            option="box",
        )
    return left, upper, right, lower


def _scaled(start: int, stop: int, scale: float, length: int) -> slice:
    """Return a slice of a scaled side, of at least one pixel."""
    first = min(round(start * scale), length - 1)
    return slice(first, max(first + 1, round(stop * scale)))


# --- columns ---

DecodeImages = Callable[[dict[str, Any]], dict[str, Any]]
"""Decodes the images of a sample in place."""


def image_decoder(kinds: Mapping[str, str]) -> DecodeImages:
    """Return a function that decodes the images of a sample in place.

    Each image of a list is decoded. Missing columns stay missing, and None stays None, also in a list.

    Args:
        kinds: Kinds by column.

    Returns:
        A function that raises EncodingError for damaged files, and ConfigError for columns without images.

    Raises:
        MissingDependencyError: The package that decodes them is not installed.
    """
    if any(kind not in ("pil", "bytes") for kind in kinds.values()):
        require_simplejpeg()
    decoders = [(name, _KINDS[kind], kind) for name, kind in kinds.items()]

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        for name, convert, kind in decoders:
            value = sample.get(name)
            if value is None:
                continue
            try:
                if isinstance(value, list):
                    sample[name] = [None if image is None else convert(image) for image in value]
                else:
                    sample[name] = convert(value)
            except EncodingError as error:
                raise error.with_context(f"column {name!r}") from error
            except _NoImageError as error:
                raise ConfigError(
                    f"decode.columns={{{name!r}: {kind!r}}}: the column {error}", option="decode.columns"
                ) from None
        return sample

    return decode


class _NoImageError(Exception):
    """A value that is not an image of the requested kind; states the column's contents and a fix."""


def _file_of(value: Any) -> bytes:
    """Return the file of an image from a format's reader."""
    if isinstance(value, bytes):
        return value
    data = stored_file(value) if _is_image(value) else None
    if data is None:
        if _is_image(value):
            raise _NoImageError("is stored as pixels, not as files; request 'pil', 'array' or 'tensor'")
        raise _NoImageError(f"has no images, but {brief(value)}; leave it out of decode")
    return data


def _is_image(value: Any) -> bool:
    return isinstance(value, require_pillow().Image)


def _array(value: Any) -> Pixels:
    if not isinstance(value, bytes) and _is_image(value) and stored_file(value) is None:
        return _writable(value)
    return EncodedImage(_file_of(value)).decode()


def _tensor(value: Any) -> Tensor:
    return _channels_first(_array(value).transpose(2, 0, 1))


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "pil": lambda value: value if _is_image(value) else EncodedImage(_file_of(value)).pil(),
    "bytes": _file_of,
    "array": _array,
    "tensor": _tensor,
    "encoded": lambda value: EncodedImage(_file_of(value)),
}
KINDS = tuple(_KINDS)
"""Kinds of a column of images."""
