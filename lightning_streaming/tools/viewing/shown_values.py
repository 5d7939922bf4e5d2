"""Values as people look at them: pictures, text, trees, arrays, sound; no more than a page has room for.

Nothing here is markup but charts; templates escape the rest. Files within a value are known by their first bytes alone,
whatever a column is called, and only kinds that cannot run anything are given to a browser as what they are.
"""

from __future__ import annotations

import io
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.tools.console import counted, is_image, printable_name, render
from lightning_streaming.tools.drawing.charts import LARGEST, Axis, Curve, binned, histogram, lines
from lightning_streaming.tools.drawing.media import picture_size, picture_type, sound_type
from lightning_streaming.tools.drawing.png import png
from lightning_streaming.units import format_bytes

TEXT_PAGE = 20_000
"""Characters of a text that are shown at once."""
_BRIEF_TEXT = 280
_MOST_PICTURES = 24
_DEEPEST, _MOST_ITEMS, _MOST_NODES, _MOST_LEAF = 8, 50, 1500, 500
_MOST_POINTS, _MOST_BINS = 360, 32
_FEWEST = 8
"""Numbers of an array in a list that is drawn."""
_HUGE = 10**20
"""From here on digits are left out."""
_MOST_COUNTED = 1_000_000
"""Numbers of an array of which a chart is made; of a longer one, so many of it evenly."""
_MOST_HEX = 512
_MOST_PIXELS = 4096
"""Rows, and columns, of an array that is shown as a picture; of a larger one, so many of it evenly."""


_SCALED = ("I", "I;16", "I;16B", "I;16L", "F")
"""Modes of PIL images with more levels than a screen has."""
_CONVERTED = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
"""Other modes that a PNG file has not, and those that it has in their place; RGB for all else."""
_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A value in a tree: what it is called, and either what is in it or what it says."""

    name: str | None
    words: str
    items: Sequence[Node] = ()
    more: int = 0
    """Items that are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownValue:
    """One value of a sample."""

    kind: str
    """"text", "tree", "pictures", "audio", "array", "bytes", "plain", or "failed"."""
    words: str
    """What it is, in a line."""
    text: str = ""
    start: int = 0
    """Where in a long text the shown part begins."""
    length: int = 0
    tree: Node | None = None
    pictures: Sequence[str] = ()
    """Of each what it is."""
    facts: Sequence[tuple[str, str]] = ()
    charts: Sequence[Any] = field(default=(), repr=False)
    spark: str = ""
    """The points of a line through its values, 100 wide and 24 high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFile:
    """Bytes for a browser, of a kind that runs nothing."""

    content_type: str
    data: bytes


def shown_value(value: Any, start: int = 0) -> ShownValue:
    """All that a page shows of a value.

    Args:
        value: What a column was decoded to.
        start: Where in a long text to begin.
    """
    pictures = _pictures(value)
    if isinstance(value, np.ndarray):
        return _shown_array(value, pictures)
    if pictures:
        return ShownValue(kind="pictures", words=_cut(render(value)), pictures=[_told(one) for one in pictures])
    if isinstance(value, str):
        first = min(max(0, start), max(0, len(value) - 1)) // TEXT_PAGE * TEXT_PAGE
        part, words = value[first : first + TEXT_PAGE], counted(len(value), "character")
        return ShownValue(kind="text", words=words, text=part, start=first, length=len(value))
    if isinstance(value, bytes):
        return _shown_bytes(value)
    if isinstance(value, (Mapping, list, tuple)):
        tree = _tree(None, value, 0, _MOST_NODES)
        return ShownValue(kind="tree", words=tree.words, tree=tree)
    return ShownValue(kind="plain", words=_cut(render(value)))


def foreign_value(show: Callable[[Any], ShownValue], value: Any) -> ShownValue:
    """What is shown of a value that was unpickled: its class is anybody's, and may fail at whatever it is asked.

    Args:
        show: What makes it of values of known classes.
        value: The value.
    """
    try:
        return show(value)
    except Exception as error:  # noqa: BLE001  it is told in the place of the value
        told = traceback.format_exception_only(error)[-1].strip()  # also of an error that cannot say what it is
        return ShownValue(kind="failed", words=f"Its own code failed when it was to be shown: {_cut(told)}")


def brief_value(value: Any) -> ShownValue:
    """What a list of samples shows of a value: less, and no chart."""
    pictures = _pictures(value)[:3]
    if pictures:
        return ShownValue(kind="pictures", words=_cut(render(value)), pictures=[_told(one) for one in pictures])
    if isinstance(value, str):
        return ShownValue(kind="text", words="", text=_cut(value), length=len(value))
    if isinstance(value, bytes) and sound_type(value) is not None:
        return ShownValue(kind="audio", words=_told_sound(value))
    return ShownValue(kind="plain", words=_cut(render(value)), spark=_spark(value))


def _spark(value: Any) -> str:
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.size < _FEWEST or value.dtype.kind not in "iuf":
        return ""
    values = as_floats(value[:: math.ceil(value.size / 100)])
    values = values[np.isfinite(values)]
    if len(values) < _FEWEST:
        return ""
    span = float(values.max()) - float(values.min())
    heights = (values - values.min()) / (span or 1) if math.isfinite(span) else np.zeros(len(values))
    return " ".join(f"{100 * at / (len(values) - 1):.1f},{23 - 22 * height:.1f}" for at, height in enumerate(heights))


def media_of(value: Any, place: int) -> MediaFile | None:
    """The file of a value's picture or sound; None if it has none there.

    Args:
        value: What a column was decoded to.
        place: Which of its pictures; a sound is 0.
    """
    if isinstance(value, bytes) and place == 0:
        sound = sound_type(value)
        if sound is not None:
            return MediaFile(content_type=sound, data=value)
    pictures = _pictures(value)
    if not 0 <= place < len(pictures):
        return None
    one = pictures[place]
    if isinstance(one, bytes):
        return MediaFile(content_type=picture_type(one) or "application/octet-stream", data=one)
    data = png(_pixels(one)) if isinstance(one, np.ndarray) else _as_png(one)
    return MediaFile(content_type="image/png", data=data)


def _pictures(value: Any) -> list[Any]:
    """The pictures that a value is, or is a list of."""
    if isinstance(value, (list, tuple)):
        few = list(islice(value, _MOST_PICTURES))
        return few if few and all(map(_is_picture, few)) else []
    return [value] if _is_picture(value) else []


def _is_picture(value: Any) -> bool:
    if isinstance(value, bytes):
        return picture_type(value) is not None
    if isinstance(value, np.ndarray):
        return _is_pixels(value)
    return is_image(value)


def _is_pixels(array: NDArray[Any]) -> bool:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or 0 in array.shape:
        return False
    height, width, *channels = _channels_last(array).shape
    return min(height, width) >= 2 and (not channels or channels[0] in (1, 3, 4))


def _channels_last(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        return np.moveaxis(array, 0, -1)
    return array


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    whole = _channels_last(array)
    return whole[:: math.ceil(whole.shape[0] / _MOST_PIXELS), :: math.ceil(whole.shape[1] / _MOST_PIXELS)]


def _as_png(image: Any) -> bytes:
    """A PIL image as a PNG file; of more levels than a screen has those from the least to the most, as grey."""
    if image.mode in _SCALED:
        low, high = _levels(image)
        values = np.nan_to_num(as_floats(np.asarray(image)), nan=low, posinf=high, neginf=low)
        return png((255 * ((values - low) / ((high - low) or 1))).astype(np.uint8))
    drawn = io.BytesIO()
    is_of_png = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
    (image if is_of_png else image.convert(_CONVERTED.get(image.mode, "RGB"))).save(drawn, "PNG")
    return drawn.getvalue()


def _levels(image: Any) -> tuple[float, float]:
    """The least and the most of an image's levels."""
    values = as_floats(np.asarray(image))
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _told(picture: Any) -> str:
    if is_image(picture) and picture.mode in _SCALED:
        low, high = _levels(picture)
        return f"{render(picture)}, black {low:.6g} to white {high:.6g}"
    if isinstance(picture, bytes):
        size = picture_size(picture)
        pixels = f", {size[0]:,} × {size[1]:,} pixels" if size else ""
        return f"{(picture_type(picture) or '').removeprefix('image/').upper()}{pixels}, {format_bytes(len(picture))}"
    return render(picture).partition(" ")[0] if isinstance(picture, np.ndarray) else render(picture)


def _told_sound(data: bytes) -> str:
    return f"{(sound_type(data) or '').removeprefix('audio/').upper()}, {format_bytes(len(data))}"


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF_TEXT else f"{text[:_BRIEF_TEXT]}…"


def _shown_bytes(data: bytes) -> ShownValue:
    words = counted(len(data), "byte")
    if sound_type(data) is not None:
        return ShownValue(kind="audio", words=f"{_told_sound(data)}, {words}")
    rows = [data[start : start + 16] for start in range(0, min(len(data), _MOST_HEX), 16)]
    told = [f"{16 * at:08x}  {row.hex(' '):<47}  {_printable(row)}" for at, row in enumerate(rows)]
    more = [f"… {len(data) - _MOST_HEX:,} more bytes"] if len(data) > _MOST_HEX else []
    return ShownValue(kind="bytes", words=words, text="\n".join(told + more))


def _printable(row: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)


def _tree(name: str | None, value: Any, depth: int, room: int) -> Node:
    """A value with what is in it, as deep and as much as there is room for: so many nodes below it."""
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[str, Any]] = (
            (printable_name(str(key)[:_MOST_LEAF]), item) for key, item in value.items()
        )
    elif isinstance(value, (list, tuple)):
        pairs = ((str(place), item) for place, item in enumerate(value))
    else:
        return Node(name=name, words=_leaf(value))
    shown = 0 if depth >= _DEEPEST else min(_MOST_ITEMS, room, len(value))
    of_each = (room - shown) // max(1, shown)
    items = [_tree(key, item, depth + 1, of_each) for key, item in islice(pairs, shown)]
    words = counted(len(value), "field" if isinstance(value, Mapping) else "item")
    return Node(name=name, words=words, items=items, more=len(value) - len(items))


def _leaf(value: Any) -> str:
    if isinstance(value, str):
        more = f"… ({len(value):,} characters)" if len(value) > _MOST_LEAF else ""
        return f"“{value[:_MOST_LEAF]}”{more}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else _cut(render(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Where the numbers of some arrays lie, of all that are finite."""

    least: int | float
    mean: float
    most: int | float
    finite: int
    """How many are."""

    def in_words(self) -> str:
        """The least, the mean and the most."""
        return ", ".join(map(number_words, (self.least, self.mean, self.most)))


def spread_of(arrays: Iterable[NDArray[Any]]) -> Spread | None:
    """Look at all numbers of some arrays; None where none is finite."""
    least, most, count, mean = math.inf, -math.inf, 0, 0.0
    for part in _parts(arrays):
        finite = part[np.isfinite(part)]
        if not len(finite):
            continue
        least, most = min(least, finite.min().item()), max(most, finite.max().item())
        values = as_floats(finite)
        largest = float(np.abs(values).max()) or 1.0  # so that no sum is beyond what a float can hold
        count += len(values)
        share = len(values) / count
        mean = mean * (1 - share) + float((values / largest).mean()) * largest * share
    return Spread(least=least, mean=mean, most=most, finite=count) if count else None


def as_floats(array: NDArray[Any]) -> NDArray[np.float64]:
    """Numbers as floats; those that signal that they are none do so no more."""
    with np.errstate(invalid="ignore"):
        return np.asarray(array, np.float64)


def _parts(arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """The numbers of arrays, some at a time."""
    for array in arrays:
        if array.dtype.kind in "iufb" and array.dtype.itemsize <= 8:
            flat = np.asarray(array).reshape(-1)
            yield from (flat[start : start + _AT_ONCE] for start in range(0, len(flat), _AT_ONCE))


def number_words(value: int | float | Fraction) -> str:
    """A number as people read it: whole ones exactly, unless they are huge."""
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < _HUGE else f"{Decimal(value):.6g}"
    if isinstance(value, float) or abs(value) <= sys.float_info.max:
        return f"{float(value):,.6g}"
    return f"{Decimal(value.numerator) / value.denominator:.6g}"


def _shown_array(array: NDArray[Any], pictures: Sequence[Any]) -> ShownValue:
    shape = " × ".join(f"{size:,}" for size in array.shape) or "one number"
    facts = [("dtype", str(array.dtype)), ("shape", shape), ("size", format_bytes(array.nbytes))]
    charts, spread = [], spread_of([array])
    if spread is not None:
        if spread.finite < array.size:
            facts.append(("not finite", f"{array.size - spread.finite:,} of {array.size:,}"))
        facts.append(("min, mean, max", spread.in_words()))
        charts = _charts(array, is_picture=bool(pictures))
    elif array.dtype.kind == "f" and array.size:
        facts.append(("not finite", "all"))
    words = render(array)
    return ShownValue(kind="array", words=words, facts=facts, charts=charts, pictures=[_told(one) for one in pictures])


def _charts(array: NDArray[Any], *, is_picture: bool) -> list[Any]:
    step = math.ceil(array.size / _MOST_COUNTED)
    finite = as_floats(array.reshape(-1)[::step])
    finite, found = finite[np.isfinite(finite)], []
    if not len(finite) or np.abs(finite).max() > LARGEST:
        return []
    if array.ndim == 1 and array.size >= 2:
        found.append(_line(array))
    bins = binned(finite, _MOST_BINS)
    if bins is not None:
        what = "pixels" if is_picture else "values"
        found.append(
            histogram(
                "How often each value occurs" + ("" if step == 1 else f", of one value in {step:,}"),
                f"A histogram of {len(finite):,} {what} from {finite.min():.6g} to {finite.max():.6g}.",
                Axis(label="value", low=None),
                Axis(label=what),
                *bins,
            )
        )
    return found


def _line(array: NDArray[Any]) -> Any:
    """The values one after another; of many, those at even steps."""
    step = math.ceil(array.size / _MOST_POINTS)
    places = np.arange(0, array.size, step)
    values = as_floats(array[places])
    places, values = places[np.isfinite(values)], values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0, 0)
    return lines(
        "Values in order" + ("" if step == 1 else f", one in {step:,}"),
        f"A line through {len(values):,} of {array.size:,} values, from {low:.6g} to {high:.6g}.",
        Axis(label="place"),
        Axis(label="value", low=None),
        [Curve(name="value", x=places.tolist(), y=values.tolist())],
    )
