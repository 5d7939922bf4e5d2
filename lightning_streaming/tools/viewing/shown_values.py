"""Values of samples prepared for a page: images, text, trees, arrays, audio, each limited to the room of a page.

Only charts are markup; templates escape the rest. Files within a value are detected by their first bytes, not by
the name of the column, and only types that cannot run code are served under their own content type.
"""

from __future__ import annotations

import io
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.tools.console import counted, is_image, printable_name, render
from lightning_streaming.tools.report.charts import LARGEST, Axis, Curve, binned, histogram, lines
from lightning_streaming.tools.report.media import audio_type, encode_png, image_size, image_type
from lightning_streaming.units import format_bytes

TEXT_PAGE = 20_000
"""Characters of a text that are shown at once."""
_BRIEF_TEXT = 280
_MAX_IMAGES, _MAX_BRIEF_IMAGES = 24, 3
_MAX_DEPTH, _MAX_ITEMS, _MAX_NODES, _MAX_LEAF = 8, 50, 1500, 500
_MAX_POINTS, _MAX_BINS = 360, 32
_MIN_SPARK = 8
"""Fewest numbers of an array that are drawn as a line in a list."""
_HUGE = 10**20
"""Integers from here on are rounded."""
_MAX_COUNTED = 1_000_000
"""Numbers of an array that a chart includes; a longer array is sampled evenly."""
_MAX_HEX = 512
_MAX_PIXELS = 4096
"""Rows and columns of an array shown as an image; a larger one is sampled evenly."""
_CHUNK = 1 << 20

_SCALED_MODES = ("I", "I;16", "I;16B", "I;16L", "F")
"""Modes of PIL images with more levels than a screen shows."""
_CONVERTED_MODES = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
"""Modes that PNG does not have, and the modes they are converted to; all others are converted to RGB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A value in a tree: its name, and either its items or its text."""

    name: str | None
    words: str
    items: Sequence[Node] = ()
    more: int = 0
    """Number of items that are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownValue:
    """One value of a sample."""

    kind: str
    """"text", "tree", "images", "audio", "array", "bytes", "plain", or "failed"."""
    words: str
    """A description in one line."""
    text: str = ""
    start: int = 0
    """Position in a long text at which the shown part starts."""
    length: int = 0
    tree: Node | None = None
    images: Sequence[str] = ()
    """A description of each image."""
    facts: Sequence[tuple[str, str]] = ()
    charts: Sequence[Any] = field(default=(), repr=False)
    spark: str = ""
    """The points of a line through its values, 100 wide and 24 high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFile:
    """A file for a browser, of a type that runs no code."""

    content_type: str
    data: bytes


def shown_value(value: Any, start: int = 0) -> ShownValue:
    """Return all that the page of a sample shows of a value.

    Args:
        value: The decoded value of a column.
        start: Position in a long text at which to start.
    """
    images = _images_in(value)
    described = [_describe_image(image) for image in images]
    if isinstance(value, np.ndarray):
        facts, charts = _describe_array(value, "pixels" if images else "values")
        return ShownValue(kind="array", words=render(value), facts=facts, charts=charts, images=described)
    if images:
        return ShownValue(kind="images", words=_cut(render(value)), images=described)
    if isinstance(value, str):
        first = min(max(0, start), max(0, len(value) - 1)) // TEXT_PAGE * TEXT_PAGE
        part, words = value[first : first + TEXT_PAGE], counted(len(value), "character")
        return ShownValue(kind="text", words=words, text=part, start=first, length=len(value))
    if isinstance(value, bytes):
        words = counted(len(value), "byte")
        if audio_type(value) is not None:
            return ShownValue(kind="audio", words=f"{_describe_audio(value)}, {words}")
        return ShownValue(kind="bytes", words=words, text=_hex(value))
    if isinstance(value, (Mapping, list, tuple)):
        tree = _tree(None, value, 0, _MAX_NODES)
        return ShownValue(kind="tree", words=tree.words, tree=tree)
    return ShownValue(kind="plain", words=_cut(render(value)))


def brief_value(value: Any) -> ShownValue:
    """Return what a list of samples shows of a value: less, and no chart."""
    images = _images_in(value)[:_MAX_BRIEF_IMAGES]
    if images:
        return ShownValue(kind="images", words=_cut(render(value)), images=[_describe_image(image) for image in images])
    if isinstance(value, str):
        return ShownValue(kind="text", words="", text=_cut(value), length=len(value))
    if isinstance(value, bytes) and audio_type(value) is not None:
        return ShownValue(kind="audio", words=_describe_audio(value))
    return ShownValue(kind="plain", words=_cut(render(value)), spark=_spark(value))


def show_unpickled(show: Callable[[Any], ShownValue], value: Any) -> ShownValue:
    """Return ``show(value)`` for a value that was unpickled; a failure of the code of its class is shown instead.

    Args:
        show: Returns what is shown of values of known classes.
        value: The value, of any class.
    """
    try:
        return show(value)
    except Exception as error:  # noqa: BLE001  it is shown in the position of the value
        message = traceback.format_exception_only(error)[-1].strip()  # also if str(error) fails
        return ShownValue(kind="failed", words=f"The code of this value's class failed: {_cut(message)}")


def media_of(value: Any, number: int) -> MediaFile | None:
    """Return an image or audio file of a value; None if it has none of this number.

    Args:
        value: The decoded value of a column.
        number: Number of the image in the value; audio is number 0.
    """
    if isinstance(value, bytes) and number == 0:
        content_type = audio_type(value)
        if content_type is not None:
            return MediaFile(content_type=content_type, data=value)
    images = _images_in(value)
    if not 0 <= number < len(images):
        return None
    image = images[number]
    if isinstance(image, bytes):
        return MediaFile(content_type=image_type(image) or "application/octet-stream", data=image)
    if isinstance(image, np.ndarray):
        whole = _channels_last(image)
        data = encode_png(whole[:: math.ceil(whole.shape[0] / _MAX_PIXELS), :: math.ceil(whole.shape[1] / _MAX_PIXELS)])
    elif image.mode in _SCALED_MODES:  # scaled to grey, from its least to its greatest level
        low, high = _levels(image)
        levels = np.nan_to_num(as_floats(np.asarray(image)), nan=low, posinf=high, neginf=low)
        data = encode_png((255 * ((levels - low) / ((high - low) or 1))).astype(np.uint8))
    else:
        file = io.BytesIO()
        is_png_mode = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
        (image if is_png_mode else image.convert(_CONVERTED_MODES.get(image.mode, "RGB"))).save(file, "PNG")
        data = file.getvalue()
    return MediaFile(content_type="image/png", data=data)


def _images_in(value: Any) -> list[Any]:
    """Return the images that a value is, or is a list of."""
    if isinstance(value, (list, tuple)):
        first = list(islice(value, _MAX_IMAGES))
        return first if first and all(map(_is_shown_as_image, first)) else []
    return [value] if _is_shown_as_image(value) else []


def _is_shown_as_image(value: Any) -> bool:
    if isinstance(value, bytes):
        return image_type(value) is not None
    if not isinstance(value, np.ndarray):
        return is_image(value)
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or 0 in value.shape:
        return False
    height, width, *channels = _channels_last(value).shape
    return min(height, width) >= 2 and (not channels or channels[0] in (1, 3, 4))


def _channels_last(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        return np.moveaxis(array, 0, -1)
    return array


def _levels(image: Any) -> tuple[float, float]:
    """Return the least and the greatest finite level of an image."""
    levels = as_floats(np.asarray(image))
    finite = levels[np.isfinite(levels)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _describe_image(image: Any) -> str:
    if is_image(image) and image.mode in _SCALED_MODES:
        low, high = _levels(image)
        return f"{render(image)}, black {low:.6g} to white {high:.6g}"
    if isinstance(image, bytes):
        size = image_size(image)
        pixels = f", {size[0]:,} × {size[1]:,} pixels" if size else ""
        return f"{(image_type(image) or '').removeprefix('image/').upper()}{pixels}, {format_bytes(len(image))}"
    return render(image).partition(" ")[0] if isinstance(image, np.ndarray) else render(image)


def _describe_audio(data: bytes) -> str:
    return f"{(audio_type(data) or '').removeprefix('audio/').upper()}, {format_bytes(len(data))}"


def _describe_array(array: NDArray[Any], unit: str) -> tuple[list[tuple[str, str]], list[Any]]:
    """Return facts and charts of an array."""
    shape = " × ".join(f"{size:,}" for size in array.shape) or "scalar"
    facts = [("dtype", str(array.dtype)), ("shape", shape), ("size", format_bytes(array.nbytes))]
    spread = spread_of([array])
    if spread is None:
        facts += [("not finite", "all")] if array.dtype.kind == "f" and array.size else []
        return facts, []
    if spread.finite < array.size:
        facts.append(("not finite", f"{array.size - spread.finite:,} of {array.size:,}"))
    facts.append(("min, mean, max", str(spread)))
    step = math.ceil(array.size / _MAX_COUNTED)
    finite = as_floats(array.reshape(-1)[::step])
    finite, charts = finite[np.isfinite(finite)], []
    if not len(finite) or np.abs(finite).max() > LARGEST:
        return facts, []
    if array.ndim == 1 and array.size >= 2:
        charts.append(_line_chart(array))
    bins = binned(finite, _MAX_BINS)
    if bins is not None:
        charts.append(
            histogram(
                "How often each value occurs" + ("" if step == 1 else f", of one value in {step:,}"),
                f"A histogram of {len(finite):,} {unit} from {finite.min():.6g} to {finite.max():.6g}.",
                Axis(label="value", low=None),
                Axis(label=unit),
                *bins,
            )
        )
    return facts, charts


def _line_chart(array: NDArray[Any]) -> Any:
    """Draw the values in order; of many, every n-th."""
    step = math.ceil(array.size / _MAX_POINTS)
    indices = np.arange(0, array.size, step)
    values = as_floats(array[indices])
    indices, values = indices[np.isfinite(values)], values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0, 0)
    return lines(
        "Values in order" + ("" if step == 1 else f", one in {step:,}"),
        f"A line through {len(values):,} of {array.size:,} values, from {low:.6g} to {high:.6g}.",
        Axis(label="index"),
        Axis(label="value", low=None),
        [Curve(name="value", x=indices.tolist(), y=values.tolist())],
    )


def _spark(value: Any) -> str:
    """Return the points of a small line through an array of numbers; empty for other values."""
    is_row = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iuf"
    if not is_row or value.size < _MIN_SPARK:
        return ""
    values = as_floats(value[:: math.ceil(value.size / 100)])
    values = values[np.isfinite(values)]
    if len(values) < _MIN_SPARK:
        return ""
    span = float(values.max()) - float(values.min())
    heights = (values - values.min()) / (span or 1) if math.isfinite(span) else np.zeros(len(values))
    return " ".join(f"{100 * at / (len(values) - 1):.1f},{23 - 22 * height:.1f}" for at, height in enumerate(heights))


def _hex(data: bytes) -> str:
    """Return the first bytes in hexadecimal, 16 in a row, with the ASCII characters."""
    rows = [data[start : start + 16] for start in range(0, min(len(data), _MAX_HEX), 16)]
    dump = [
        f"{16 * number:08x}  {row.hex(' '):<47}  {''.join(chr(byte) if 32 <= byte < 127 else '.' for byte in row)}"
        for number, row in enumerate(rows)
    ]
    more = [f"… {len(data) - _MAX_HEX:,} more bytes"] if len(data) > _MAX_HEX else []
    return "\n".join(dump + more)


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF_TEXT else f"{text[:_BRIEF_TEXT]}…"


def _tree(name: str | None, value: Any, depth: int, max_nodes: int) -> Node:
    """Return a value with its items, to a limited depth and with at most ``max_nodes`` nodes below it."""
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[str, Any]] = ((printable_name(str(key)[:_MAX_LEAF]), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        pairs = ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, str):
        more = f"… ({len(value):,} characters)" if len(value) > _MAX_LEAF else ""
        return Node(name=name, words=f"“{value[:_MAX_LEAF]}”{more}")
    elif value is None or isinstance(value, bool):
        return Node(name=name, words="null" if value is None else str(value).lower())
    else:
        return Node(name=name, words=_cut(render(value)))
    shown = 0 if depth >= _MAX_DEPTH else min(_MAX_ITEMS, max_nodes, len(value))
    nodes_each = (max_nodes - shown) // max(1, shown)
    items = [_tree(key, item, depth + 1, nodes_each) for key, item in islice(pairs, shown)]
    words = counted(len(value), "field" if isinstance(value, Mapping) else "item")
    return Node(name=name, words=words, items=items, more=len(value) - len(items))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Minimum, mean and maximum of all finite numbers of some arrays."""

    min: int | float
    mean: float
    max: int | float
    finite: int
    """Count of finite numbers."""

    def __str__(self) -> str:
        return ", ".join(map(format_number, (self.min, self.mean, self.max)))


def spread_of(arrays: Iterable[NDArray[Any]]) -> Spread | None:
    """Read all numbers of some arrays, in chunks; return None if none is finite."""
    least, greatest, count, mean = math.inf, -math.inf, 0, 0.0
    flat = (
        np.asarray(array).reshape(-1) for array in arrays if array.dtype.kind in "iufb" and array.dtype.itemsize <= 8
    )
    for chunk in (array[start : start + _CHUNK] for array in flat for start in range(0, len(array), _CHUNK)):
        finite = chunk[np.isfinite(chunk)]
        if not len(finite):
            continue
        least, greatest = min(least, finite.min().item()), max(greatest, finite.max().item())
        values = as_floats(finite)
        largest = float(np.abs(values).max()) or 1.0  # dividing by it keeps sums within the range of floats
        count += len(values)
        share = len(values) / count
        mean = mean * (1 - share) + float((values / largest).mean()) * largest * share
    return Spread(min=least, mean=mean, max=greatest, finite=count) if count else None


def as_floats(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return numbers as float64, without warnings about signalling NaNs."""
    with np.errstate(invalid="ignore"):
        return np.asarray(array, np.float64)


def format_number(value: int | float | Fraction) -> str:
    """Format a number for a page: integers exactly, unless they are huge."""
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < _HUGE else f"{Decimal(value):.6g}"
    if isinstance(value, float) or abs(value) <= sys.float_info.max:
        return f"{float(value):,.6g}"
    return f"{Decimal(value.numerator) / value.denominator:.6g}"
