"""Pictures made pixels: JPEG files by libjpeg-turbo, without the interpreter's lock; all others by Pillow.

    kind       what a column of pictures gives
    pil        a PIL image, which decodes its pixels when they are first needed
    bytes      the file
    array      uint8, numpy, (height, width, 3), RGB
    tensor     uint8, torch, (3, height, width), RGB
    picture    a :class:`EncodedImage`, which decodes what it is asked for

Pixels are those of Pillow's ``convert("RGB")``. What libjpeg-turbo's own door does not take, as CMYK and files with
slight damage, is decoded by Pillow too, so both take the same files. Nothing is turned as EXIF data says.
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
"""Width and height in pixels, as Pillow has them."""
Pixels = NDArray[np.uint8]
"""RGB, of shape (height, width, 3)."""

_FACTORS = (8, 4, 2)
"""What libjpeg divides sizes by at no cost; rounded up."""
_QUICK_COLORS = ("YCbCr", "Gray", "RGB")
"""Colours of JPEG files that libjpeg-turbo makes RGB of as Pillow does."""
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Of 8 bits a channel."""


def require_simplejpeg() -> Any:
    """The module ``simplejpeg``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import simplejpeg
    except ImportError:
        raise MissingDependencyError(
            "pictures are decoded with the simplejpeg package", hint="run: pip install 'lightning-streaming[jpeg]'"
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
                f"an EncodedImage is made of the bytes of a whole file, but got {brief(file)}", option="file"
            )
        self.file = file
        """Content of the file."""

    @property
    def size(self) -> Size:
        """Width and height, from the header of the file.

        Raises:
            EncodingError: It is no such file, or its header is damaged.
        """
        head = _jpeg_head(self.file)
        return self.pil().size if head is None else head

    def pil(self) -> Image:
        """Return a PIL image, which decodes its pixels when they are first needed.

        Raises:
            EncodingError: It is no such file, or its header is damaged. Damaged pixels raise later.
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
        least = None if min_size is None else _pair("min_size", min_size)
        if not self.file.startswith(BEGINNINGS["JPEG"]):
            return _own(self.pil())
        pixels = _decode_quickly(self.file, least)
        if pixels is None:  # Pillow decodes it, or says why not
            image = self.pil()
            factor = _factor(image.size, least)
            if factor > 1:
                width, height = image.size
                image.draft(None, (width // factor, height // factor))
            pixels = _own(image)
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
        # Made a batch before its channels come first: the other way round torch takes twice as long.
        cut = torch.from_numpy(pixels[rows, columns])[None].permute(0, 3, 1, 2)
        if cut.shape[2:] != (to_height, to_width):
            cut = torch.nn.functional.interpolate(cut, (to_height, to_width), mode="bilinear", antialias=True)
        return _channels_first(cut[0].numpy())  # now, as it is in the cache: to collate others takes thrice as long

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse conversion by numpy, which would make an array of one object.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "an EncodedImage is not decoded yet",
            hint="call its decode(), crop() or pil(), or give decode.columns array",
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
    """The pixels of a PIL image, uint8 of shape (height, width, 3), RGB; not to be written to.

    Raises:
        EncodingError: They cannot be decoded, or have more than 8 bits a channel.
    """
    check_rgb(image)
    if image.mode in ("P", "PA"):  # by way of RGBA, as Pillow itself would warn of what is transparent
        image = image.convert("RGBA")
    found: Pixels = np.asarray(image.convert("RGB"))
    return found


def _own(image: Image) -> Pixels:
    """The same, to be written to."""
    return np.array(rgb_pixels(image))


def check_rgb(image: Image) -> None:
    """Refuse an image of more than 8 bits a channel.

    Raises:
        EncodingError: It is one.
    """
    if image.mode not in _MODES:
        raise EncodingError(f"expected an image of 8 bits a channel, but found mode {image.mode}")


def _channels_first(pixels: Pixels) -> Tensor:
    """A tensor of pixels of shape (3, height, width) in this order in memory, too."""
    import torch

    # By numpy: torch wakes its threads for so few bytes, which in threads of ours costs several times the copy.
    return torch.from_numpy(np.ascontiguousarray(pixels))


# --- JPEG ---


def _jpeg_head(data: bytes) -> Size | None:
    """Width and height; None where Pillow is to look."""
    if not data.startswith(BEGINNINGS["JPEG"]):
        return None
    try:
        height, width, colors, _ = require_simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    most = min(PIXELS_PER_BYTE["JPEG"] * len(data), require_pillow().MAX_IMAGE_PIXELS or width * height)
    return (width, height) if colors in _QUICK_COLORS and width * height <= most else None


def _decode_quickly(data: bytes, least: Size | None) -> Pixels | None:
    """The pixels; None where Pillow is to decode them, or to say what is wrong."""
    size = _jpeg_head(data)
    if size is None:
        return None
    factor = _factor(size, least)
    width, height = (-(-side // factor) for side in size)
    try:
        found: Pixels = require_simplejpeg().decode_jpeg(
            data, "RGB", min_width=width, min_height=height, min_factor=factor
        )
    except ValueError:
        return None
    return found


def _factor(size: Size, least: Size | None) -> int:
    """What to divide both sides by, so that neither becomes shorter than it may be."""
    if least is None:
        return 1
    fits = (
        one
        for one in _FACTORS
        if all(side >= one and -(-side // one) >= enough for side, enough in zip(size, least, strict=True))
    )
    return next(fits, 1)


def _pair(what: str, size: int | Size, option: str = "min_size") -> Size:
    """Width and height, as they were asked for."""
    try:
        width, height = _sides(size)
    except (TypeError, ValueError):
        width = height = 0
    if min(width, height) < 1:
        raise ConfigError(
            f"{what} must be a number of pixels, or width and height; at least 1; but got {short_repr(size)}",
            option=option,
        )
    return width, height


def _sides(size: Any) -> tuple[int, ...]:
    try:
        return (index(size),) * 2
    except TypeError:  # not asked of its type: an array of two sides has that method, too
        return tuple(map(index, size))


def _box_within(box: tuple[int, int, int, int], width: int, height: int) -> tuple[int, int, int, int]:
    """The same, if it is a box within a picture."""
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
    """A stretch of a side that was scaled; at least one pixel."""
    first = min(round(start * scale), length - 1)
    return slice(first, max(first + 1, round(stop * scale)))


# --- columns ---

DecodePictures = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the pictures of a sample what was asked for."""


def decoded_columns(asked: Mapping[str, str]) -> DecodePictures:
    """What makes the pictures of a sample what is asked for, in the sample itself.

    A list has one for each of its pictures. What a sample lacks stays so, and so does None, in a list too.

    Args:
        asked: Kinds by the names of columns.

    Returns:
        A function that raises EncodingError of files that are damaged, and ConfigError of columns that hold none.

    Raises:
        MissingDependencyError: What decodes them is not installed.
    """
    if any(kind not in ("pil", "bytes") for kind in asked.values()):
        require_simplejpeg()
    makes = [(name, _KINDS[kind], kind) for name, kind in asked.items()]

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        for name, make, kind in makes:
            value = sample.get(name)
            if value is None:
                continue
            try:
                sample[name] = [_made(make, one) for one in value] if isinstance(value, list) else make(value)
            except EncodingError as error:
                raise error.with_context(f"column {name!r}") from error
            except _NoPictureError as error:
                raise ConfigError(
                    f"decode.columns={{{name!r}: {kind!r}}}: the column {error}", option="decode.columns"
                ) from None
        return sample

    return decode


def _made(make: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else make(value)


class _NoPictureError(Exception):
    """A value that nothing of the kind can be made of: what the column holds, and the way out."""


def _file_of(value: Any) -> bytes:
    """The file of a picture as a format's reader gives it."""
    if isinstance(value, bytes):
        return value
    data = stored_file(value) if _is_image(value) else None
    if data is None:
        held = "is stored as pixels, not as files; ask for 'pil', 'array' or 'tensor'" if _is_image(value) else None
        raise _NoPictureError(held or f"holds no pictures, but {brief(value)}; leave it out of decode")
    return data


def _is_image(value: Any) -> bool:
    return isinstance(value, require_pillow().Image)


def _pil(value: Any) -> Any:
    return value if _is_image(value) else EncodedImage(_file_of(value)).pil()


def _array(value: Any) -> Pixels:
    if not isinstance(value, bytes) and _is_image(value) and stored_file(value) is None:
        return _own(value)
    return EncodedImage(_file_of(value)).decode()


def _tensor(value: Any) -> Tensor:
    return _channels_first(_array(value).transpose(2, 0, 1))


def _picture(value: Any) -> EncodedImage:
    return EncodedImage(_file_of(value))


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "pil": _pil,
    "bytes": _file_of,
    "array": _array,
    "tensor": _tensor,
    "encoded": _picture,
}
KINDS = tuple(_KINDS)
"""What may be asked for of a column of pictures."""
