"""SVG charts for HTML pages, without scripts, style attributes or external files.

A chart is a ``<figure>`` with a title, a legend if it has several series, and an ``<svg>`` that scales with the page.
It is labelled for screen readers, and tooltips show exact numbers. A page includes the CSS of :data:`STYLE` once. There
are eight colours (``--chart-0`` to ``--chart-7``), for light and dark mode; series beyond the eighth are dashed. All
texts are escaped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from markupsafe import Markup as Markup
else:
    try:
        from markupsafe import Markup
    except ImportError:
        Markup = str  # also imported by tools that show no page; Jinja requires markupsafe

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 18, 14, 54
_COLOURS = 8
_MAX_POINTS = 40
"""Number of points of a series that have a tooltip."""
_BAR_HEIGHT = 44
_MIN_RANGE = 1e-12
"""Smallest difference of two numbers that are drawn as different."""
_MAX_NAME = 48
"""Characters of a bar's name that are drawn; its tooltip has all."""

STYLE = Markup("""\
:root { --chart-ink: #1f2937; --chart-soft: #6b7280; --chart-line: #e5e7eb; --chart-ground: #ffffff;
  --chart-0: #2563eb; --chart-1: #c2570c; --chart-2: #047857; --chart-3: #be123c;
  --chart-4: #7c3aed; --chart-5: #0e7490; --chart-6: #475569; --chart-7: #4d7c0f; }
@media (prefers-color-scheme: dark) { :root { --chart-ink: #e5e7eb; --chart-soft: #9ca3af; --chart-line: #374151;
  --chart-ground: #111827; --chart-0: #60a5fa; --chart-1: #fb923c; --chart-2: #34d399; --chart-3: #fb7185;
  --chart-4: #a78bfa; --chart-5: #22d3ee; --chart-6: #cbd5e1; --chart-7: #a3e635; } }
.chart { margin: 0; min-width: 0; }
.chart figcaption { font-weight: 600; color: var(--chart-ink); overflow-wrap: anywhere; }
.chart svg { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font: 13px system-ui, sans-serif; fill: var(--chart-soft); }
.chart .value, .chart .name { fill: var(--chart-ink); }
.chart .grid { stroke: var(--chart-line); stroke-width: 1; }
.chart .mark { stroke: var(--chart-soft); stroke-width: 1; stroke-dasharray: 2 3; }
.chart .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.chart .area { fill-opacity: .75; stroke: var(--chart-ground); stroke-width: .5; }
.chart .dashed { stroke-dasharray: 6 4; }
.chart .point { fill-opacity: 0; }
.chart .point:hover { fill-opacity: 1; }
.chart .over { fill: var(--chart-ink); paint-order: stroke; stroke: var(--chart-ground); stroke-width: 3px; }
.chart .end { text-anchor: end; }
.chart .middle { text-anchor: middle; }
.chart ul { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0; padding: 0; }
.chart li { color: var(--chart-ink); font-size: .85rem; overflow-wrap: anywhere; }
.chart li svg { display: inline-block; width: 1.2rem; height: .7rem; margin-right: .4rem; }
@media (max-width: 640px) { .chart text { font-size: 18px; } .chart .spare { display: none; } }
""") + Markup("\n").join(
    f".chart .c{number} {{ color: var(--chart-{number}); stroke: var(--chart-{number}); }} "
    f".chart .f{number} {{ color: var(--chart-{number}); fill: var(--chart-{number}); }}"
    for number in range(_COLOURS)
)
"""CSS of the charts, for the style sheet of a page."""


def short_number(number: float) -> str:
    """Return a number as an axis shows it: ``"1.5k"``, ``"20M"``, ``"0.25"``."""
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= power:
            return f"{number / power:.4g}{letter}"
    return f"{number:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The label, number format and range of one dimension of a chart."""

    label: str
    show: Callable[[float], str] = short_number
    """Formats a number in a few characters."""
    base: float = 1000
    """Ticks are round multiples of its powers: 1024 for bytes."""
    low: float | None = 0
    """Largest start of the axis; None for the smallest number shown."""
    high: float | None = None
    """Smallest end of the axis; None for the largest number shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One series of a line or area chart; x ascends and has the length of y."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of a bar chart."""

    name: str
    value: float
    label: str
    """The value as text, written next to the bar."""
    colour: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A dashed line across a chart, with a name."""

    at: float
    name: str
    is_level: bool = False
    """Whether the line is horizontal, at a number of the vertical axis."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps numbers of an axis to coordinates of the drawing."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def fit(cls, axis: Axis, numbers: Iterable[float], start: float, stop: float) -> _Scale:
        """Return the scale that shows all finite numbers between two coordinates."""
        finite = [number for number in numbers if math.isfinite(number)]
        low = min([*finite, *([] if axis.low is None else [axis.low])], default=0.0)
        high = max([*finite, *([] if axis.high is None else [axis.high])], default=1.0)
        if high - low <= max(1e-9 * abs(low), _MIN_RANGE):
            high = low + (abs(low) if abs(low) > _MIN_RANGE else 1)
        return cls(axis, low, high, start, stop)

    def at(self, number: float) -> str:
        """Return the coordinate of a number, formatted for SVG."""
        part = (number - self.low) / (self.high - self.low)
        return f"{self.start + min(max(part, -0.5), 1.5) * (self.stop - self.start):.1f}"

    def ticks(self, max_steps: int) -> list[float]:
        """Return round numbers of the axis, at distances of 1, 2, 5, 10, ... (for bytes also 256, 512)."""
        base, min_step = self.axis.base, (self.high - self.low) / max_steps
        unit: float = base ** math.floor(math.log(min_step, base) + 1e-9)
        factors = (1, 2, 5, 10, 20, 50, 100, 200, *((256, 512) if base == 1024 else (500,)), base)
        step = unit * next(factor for factor in factors if factor * unit >= min_step * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def lines(
    title: str, description: str, x: Axis, y: Axis, series: Sequence[Curve], marks: Sequence[Mark] = ()
) -> Markup:
    """Draw a line chart.

    Args:
        title: Title of the chart.
        description: Text for screen readers.
        x: The horizontal axis.
        y: The vertical axis.
        series: The lines.
        marks: Lines across the chart.
    """
    across = _Scale.fit(x, [number for curve in series for number in curve.x], _LEFT, _WIDTH - _RIGHT)
    levels = [mark.at for mark in marks if mark.is_level]
    up = _Scale.fit(y, [*levels, *(number for curve in series for number in curve.y)], _HEIGHT - _BOTTOM, _TOP)
    shape = Markup('<polyline class="curve c{}{}" points="{}"><title>{}</title></polyline>')
    drawn = [*_axes(across, up), *_marks(marks, across, up)]
    for number, curve in enumerate(series):
        points = " ".join(f"{across.at(x)},{up.at(y)}" for x, y in zip(curve.x, curve.y, strict=True))
        drawn.append(shape.format(number % _COLOURS, _dashes(number), points, curve.name))
        drawn += _points(number, curve, curve.y, across, up)
    return _figure(title, description, drawn, _legend(series))


def areas(
    title: str, description: str, x: Axis, y: Axis, series: Sequence[Curve], marks: Sequence[Mark] = ()
) -> Markup:
    """Draw layers stacked on each other, all over the same numbers of x; arguments as for :func:`lines`."""
    heights = list(
        accumulate(
            series,
            lambda below, curve: [low + more for low, more in zip(below, curve.y, strict=True)],
            initial=[0.0] * len(series[0].x),
        )
    )
    across = _Scale.fit(x, series[0].x, _LEFT, _WIDTH - _RIGHT)
    up = _Scale.fit(y, [number for layer in heights for number in layer], _HEIGHT - _BOTTOM, _TOP)
    shape = Markup('<polygon class="area f{}" points="{}"><title>{}</title></polygon>')
    drawn = _axes(across, up)
    for number, (curve, (below, above)) in enumerate(zip(series, pairwise(heights), strict=True)):
        top, bottom = (
            [f"{across.at(at)},{up.at(height)}" for at, height in zip(curve.x, edge, strict=True)]
            for edge in (above, below)
        )
        drawn.append(shape.format(number % _COLOURS, " ".join(top + bottom[::-1]), curve.name))
        drawn += _points(number, replace(curve, y=above), curve.y, across, up)
    return _figure(title, description, [*drawn, *_marks(marks, across, up)], _legend(series))


def bars(title: str, description: str, x: Axis, items: Sequence[Bar]) -> Markup:
    """Draw horizontal bars, each with its name above and its label to the right.

    Args:
        title: Title of the chart.
        description: Text for screen readers.
        x: The axis of the bars' lengths.
        items: The bars.
    """
    across = _Scale.fit(x, [bar.value for bar in items], 2, _WIDTH - 165)
    drawn = list[Markup]()
    shape = Markup(
        '<g><title>{}: {}</title><text class="name" x="2" y="{}">{}</text><rect class="f{}" x="2" y="{}" '
        'width="{:.1f}" height="12" rx="2"/><text class="value" x="{:.1f}" y="{}">{}</text></g>'
    )
    for number, bar in enumerate(items):
        top, length = 4 + _BAR_HEIGHT * number, max(1.0, float(across.at(bar.value)) - 2)
        name, colour = _shortened(bar.name, _MAX_NAME), bar.colour % _COLOURS
        texts = (bar.name, bar.label, top + 14, name, colour, top + 20, length, length + 8, top + 31, bar.label)
        drawn.append(shape.format(*texts))
    return _figure(title, description, drawn, Markup(), 8 + _BAR_HEIGHT * len(items))


LARGEST = 1e300
"""Largest absolute number on an axis: ticks between larger ones would overflow a float."""


def binned(numbers: NDArray[Any], max_bins: int) -> tuple[list[float], list[int]] | None:
    """Return edges and counts for :func:`histogram`, in bins of equal width.

    Args:
        numbers: Finite numbers, at least one.
        max_bins: Maximum number of bins; there are no more than different numbers.

    Returns:
        None if the numbers are too close or too large for bins of floats.
    """
    values = numbers.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if max(-low, high) > LARGEST:
        return None
    edges = np.linspace(low, high, min(max_bins, len(np.unique(values))) + 1)
    if not (edges[1:] > edges[:-1]).all():
        return None
    return edges.tolist(), np.histogram(values, edges)[0].tolist()


def histogram(
    title: str, description: str, x: Axis, y: Axis, edges: Sequence[float], counts: Sequence[float]
) -> Markup:
    """Draw counts of ranges as adjacent bars.

    Args:
        title: Title of the chart.
        description: Text for screen readers.
        x: The axis of the ranges.
        y: The axis of the counts.
        edges: Borders of the ranges, ascending; one more than there are ranges.
        counts: Count of each range.
    """
    across, up = _Scale.fit(x, edges, _LEFT, _WIDTH - _RIGHT), _Scale.fit(y, counts, _HEIGHT - _BOTTOM, _TOP)
    shape = Markup('<rect class="f0" x="{}" y="{}" width="{:.1f}" height="{:.1f}"><title>{} to {}: {}</title></rect>')
    drawn = _axes(across, up)
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        left, top = across.at(low), up.at(count)
        width = max(0.5, float(across.at(high)) - float(left) - 1)
        texts = x.show(low), x.show(high), y.show(count)
        drawn.append(shape.format(left, top, width, _HEIGHT - _BOTTOM - float(top), *texts))
    return _figure(title, description, drawn, Markup())


def _figure(title: str, description: str, drawn: Iterable[Markup], legend: Markup, height: int = _HEIGHT) -> Markup:
    inner = Markup("").join(drawn)
    name = (
        "chart-" + hashlib.blake2s(f"{title}\n{description}\n{inner}".encode("utf-8", "surrogatepass")).hexdigest()[:10]
    )
    return Markup(
        '<figure class="chart"><figcaption>{title}</figcaption>{legend}<svg viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{title}</title><desc id="{name}-d">{description}'
        "</desc>{inner}</svg></figure>\n"
    ).format(title=title, legend=legend, width=_WIDTH, height=height, name=name, description=description, inner=inner)


def _legend(series: Sequence[Curve]) -> Markup:
    if len(series) < 2:
        return Markup()
    line = Markup(
        '<li><svg viewBox="0 0 24 12" aria-hidden="true"><line class="curve c{}{}" x1="0" x2="24" y1="6" y2="6"/></svg>'
        "{}</li>"
    )
    items = (line.format(number % _COLOURS, _dashes(number), curve.name) for number, curve in enumerate(series))
    return Markup("<ul>{}</ul>").format(Markup("").join(items))


def _axes(across: _Scale, up: _Scale) -> list[Markup]:
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    level = Markup(
        '<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/><text class="end" x="{3}" y="{2}" dy="4">{4}</text>'
    )
    below = Markup(
        '<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text class="middle{4}" x="{0}" y="{3}">{5}</text>'
    )
    drawn = [level.format(left, right, up.at(tick), left - 6, up.axis.show(tick)) for tick in up.ticks(4)]
    for number, tick in enumerate(across.ticks(5)):
        spare = " spare" if number % 2 else ""
        drawn.append(below.format(across.at(tick), bottom, bottom + 4, bottom + 21, spare, across.axis.show(tick)))
    label = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    drawn.append(label.format("end", right, bottom + 45, across.axis.label))
    drawn.append(label.format("", 2, bottom + 45, f"↑ {up.axis.label}"))
    return drawn


def _marks(marks: Sequence[Mark], across: _Scale, up: _Scale) -> list[Markup]:
    drawn, bottom = [], _HEIGHT - _BOTTOM
    line = Markup(
        '<g><title>{}</title><line class="mark" x1="{}" x2="{}" y1="{}" y2="{}"/>'
        '<text x="{}" y="{}" class="{}">{}</text></g>'
    )
    for number, mark in enumerate(marks):
        name = _shortened(mark.name, _MAX_NAME // 2)
        if mark.is_level:
            at = up.at(mark.at)
            drawn.append(line.format(mark.name, _LEFT, _WIDTH - _RIGHT, at, at, _LEFT + 4, float(at) - 4, "over", name))
            continue
        at, low = across.at(mark.at), _TOP + 10 + 14 * (number % 3)
        is_far = float(at) > 0.75 * _WIDTH
        text_at = float(at) + (-4 if is_far else 4)
        drawn.append(line.format(mark.name, at, at, _TOP, bottom, text_at, low, "over end" if is_far else "over", name))
    return drawn


def _points(number: int, curve: Curve, values: Sequence[float], across: _Scale, up: _Scale) -> list[Markup]:
    """Return invisible points of a series whose tooltips show numbers."""
    step = max(1, math.ceil(len(curve.x) / _MAX_POINTS))
    shape = Markup('<circle class="point f{}" cx="{}" cy="{}" r="5"><title>{}: {} at {}</title></circle>')
    return [
        shape.format(number % _COLOURS, across.at(x), up.at(y), curve.name, up.axis.show(value), across.axis.show(x))
        for x, y, value in list(zip(curve.x, curve.y, values, strict=True))[::step]
    ]


def _dashes(number: int) -> str:
    return " dashed" if number // _COLOURS % 2 else ""


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
