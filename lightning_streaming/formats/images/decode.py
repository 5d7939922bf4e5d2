"""Images decoded to pixels: JPEG files by libjpeg-turbo, without the interpreter's lock; all others by Pillow.

    kind       values of a column of images
    pil        a PIL image, which decodes its pixels on first access
    bytes      the file
    array      uint8, numpy, (height, width, 3), RGB
    tensor     uint8, torch, (3, height, width), RGB
    encoded    an :class:`EncodedImage`, which decodes on request

Pixels are those of Pillow's ``convert("RGB")``. Files that libjpeg-turbo does not support, like CMYK and files with
slight damage, are decoded by Pillow, so both take the same files. EXIF rotations are not applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.images.encodings import (
    BEGINNINGS,
    IMAGE_FORMATS,
    PIXELS_PER_BYTE,
    open_image_file,
    require_pillow,
    stored_file,
)
from lightning_streaming.formats.values import brief

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

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


def _pil(value: Any) -> Any:
    return value if _is_image(value) else EncodedImage(_file_of(value)).pil()


def _array(value: Any) -> Pixels:
    if not isinstance(value, bytes) and _is_image(value) and stored_file(value) is None:
        return _writable(value)
    return EncodedImage(_file_of(value)).decode()


def _tensor(value: Any) -> Tensor:
    return _channels_first(_array(value).transpose(2, 0, 1))


def _encoded(value: Any) -> EncodedImage:
    return EncodedImage(_file_of(value))


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "pil": _pil,
    "bytes": _file_of,
    "array": _array,
    "tensor": _tensor,
    "encoded": _encoded,
}
KINDS = tuple(_KINDS)
"""Kinds of a column of images."""
