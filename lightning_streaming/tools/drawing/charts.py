"""Charts as SVG for pages of HTML: numbers in, markup out; no script, no style attribute, nothing fetched.

A chart is a ``<figure>``: its title, a legend where it has several series, and one ``<svg>`` that scales with the page,
named and described for screen readers, with the exact numbers as tooltips. Colours and sizes are those of
:data:`STYLE`, which a page includes once: eight colours for light and dark, as ``--chart-0`` to ``--chart-7``; more
series than that are told apart by dashes. Texts may hold anything, since all are escaped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.tools.drawing.markup import Markup

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 18, 14, 54
_COLOURS = 8
_MOST_POINTS = 40
"""Points of a series that have a tooltip of their own."""
_BAR_HEIGHT = 44
_LEAST_RANGE = 1e-12
"""Numbers that differ by less are one."""
_MOST_NAME = 48
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
"""What a page's style needs for charts."""


def in_short(number: float) -> str:
    """A number as an axis shows it: ``"1.5k"``, ``"20M"``, ``"0.25"``."""
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= power:
            return f"{number / power:.4g}{letter}"
    return f"{number:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """What one direction of a chart stands for."""

    label: str
    show: Callable[[float], str] = in_short
    """A number of it in a few characters."""
    base: float = 1000
    """Round numbers are those of its powers: 1024 for bytes."""
    low: float | None = 0
    """Where it begins, or lower; None where the numbers do."""
    high: float | None = None
    """Where it ends, or higher; None where the numbers do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line, or layer. Numbers of x ascend; x and y are of one length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar."""

    name: str
    value: float
    told: str
    """The value in words, written beside it."""
    colour: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A dashed line across a chart, with a name."""

    at: float
    name: str
    is_level: bool = False
    """Whether it stands for a number of the vertical axis."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Numbers of an axis to places in a chart."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    def at(self, number: float) -> str:
        """The place of a number, as it is written in SVG."""
        part = (number - self.low) / (self.high - self.low)
        return f"{self.start + min(max(part, -0.5), 1.5) * (self.stop - self.start):.1f}"

    def ticks(self, most: int) -> list[float]:
        """Round numbers on it."""
        step = _round_step((self.high - self.low) / most, self.axis.base)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def lines(
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    series: Sequence[Curve],
    marks: Sequence[Mark] = (),
) -> Markup:
    """Lines over a common axis.

    Args:
        title: What is shown.
        description: What there is to see, for who cannot.
        x: The horizontal axis.
        y: The vertical axis.
        series: The lines.
        marks: Lines across.
    """
    across = _scale(x, [number for one in series for number in one.x], _LEFT, _WIDTH - _RIGHT)
    levels = [mark.at for mark in marks if mark.is_level]
    up = _scale(y, [*levels, *(number for one in series for number in one.y)], _HEIGHT - _BOTTOM, _TOP)
    curves = [_curve(number, one, across, up) for number, one in enumerate(series)]
    return _figure(title, description, [*_axes(across, up), *_marks(marks, across, up), *curves], _legend(series))


def areas(
    title: str, description: str, x: Axis, y: Axis, series: Sequence[Curve], marks: Sequence[Mark] = ()
) -> Markup:
    """Layers one on another, all over the same numbers of x; arguments as of :func:`lines`."""
    sums = list(accumulate(series, lambda low, one: _added(low, one.y), initial=[0.0] * len(series[0].x)))
    across = _scale(x, series[0].x, _LEFT, _WIDTH - _RIGHT)
    up = _scale(y, [number for heights in sums for number in heights], _HEIGHT - _BOTTOM, _TOP)
    drawn = []
    for number, (one, (below, above)) in enumerate(zip(series, pairwise(sums), strict=True)):
        there = [f"{across.at(at)},{up.at(height)}" for at, height in zip(one.x, above, strict=True)]
        back = [f"{across.at(at)},{up.at(height)}" for at, height in zip(one.x, below, strict=True)]
        shape = Markup('<polygon class="area f{}" points="{}"><title>{}</title></polygon>')
        drawn.append(shape.format(number % _COLOURS, " ".join(there + back[::-1]), one.name))
        top = replace(one, y=above)
        drawn += _points(number, top, one.y, across, up)
    return _figure(title, description, [*_axes(across, up), *drawn, *_marks(marks, across, up)], _legend(series))


def bars(title: str, description: str, x: Axis, of: Sequence[Bar]) -> Markup:
    """Bars below each other, each with its name above it and its value beside it.

    Args:
        title: What is shown.
        description: What there is to see, for who cannot.
        x: What their lengths stand for.
        of: The bars.
    """
    across = _scale(x, [bar.value for bar in of], 2, _WIDTH - 165)
    height, drawn = 8 + _BAR_HEIGHT * len(of), []
    shape = Markup(
        '<g><title>{}: {}</title><text class="name" x="2" y="{}">{}</text><rect class="f{}" x="2" y="{}" '
        'width="{:.1f}" height="12" rx="2"/><text class="value" x="{:.1f}" y="{}">{}</text></g>'
    )
    for number, bar in enumerate(of):
        top, length = 4 + _BAR_HEIGHT * number, max(1.0, float(across.at(bar.value)) - 2)
        name = bar.name if len(bar.name) <= _MOST_NAME else f"{bar.name[: _MOST_NAME - 1]}…"
        words = (bar.name, bar.told, top + 14, name, bar.colour % _COLOURS, top + 20, length, length + 8)
        drawn.append(shape.format(*words, top + 31, bar.told))
    return _figure(title, description, drawn, Markup(), height)


LARGEST = 1e300
"""Beyond it an axis would have no room for its ticks among the floats that there are."""


def binned(numbers: NDArray[Any], most: int) -> tuple[list[float], list[int]] | None:
    """Edges and counts for :func:`histogram`, in equal ranges.

    Args:
        numbers: Finite ones, at least one.
        most: Ranges at most; no more than there are different numbers.

    Returns:
        None where floats tell no such ranges apart, or no axis is so long.
    """
    values = numbers.astype(np.float64)
    least, largest = float(values.min()), float(values.max())
    if max(-least, largest) > LARGEST:
        return None
    edges = np.linspace(least, largest, min(most, len(np.unique(values))) + 1)
    if not (edges[1:] > edges[:-1]).all():
        return None
    return edges.tolist(), np.histogram(values, edges)[0].tolist()


def histogram(
    title: str, description: str, x: Axis, y: Axis, edges: Sequence[float], counts: Sequence[float]
) -> Markup:
    """How many there are in each range.

    Args:
        title: What is shown.
        description: What there is to see, for who cannot.
        x: What is counted in ranges.
        y: How many there are.
        edges: Borders of the ranges, ascending; one more than there are ranges.
        counts: Of each range.
    """
    across, up = _scale(x, edges, _LEFT, _WIDTH - _RIGHT), _scale(y, counts, _HEIGHT - _BOTTOM, _TOP)
    shape = Markup('<rect class="f0" x="{}" y="{}" width="{:.1f}" height="{:.1f}"><title>{} to {}: {}</title></rect>')
    drawn = []
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        left, top = across.at(low), up.at(count)
        width = max(0.5, float(across.at(high)) - float(left) - 1)
        told = (x.show(low), x.show(high), y.show(count))
        drawn.append(shape.format(left, top, width, _HEIGHT - _BOTTOM - float(top), *told))
    return _figure(title, description, [*_axes(across, up), *drawn], Markup())


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
    items = (line.format(number % _COLOURS, _dashes(number), one.name) for number, one in enumerate(series))
    return Markup("<ul>{}</ul>").format(Markup("").join(items))


def _axes(across: _Scale, up: _Scale) -> list[Markup]:
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    level = Markup(
        '<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/><text class="end" x="{3}" y="{2}" dy="4">{4}</text>'
    )
    below = Markup(
        '<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text class="middle{4}" x="{0}" y="{3}">{5}</text>'
    )
    found = [level.format(left, right, up.at(tick), left - 6, up.axis.show(tick)) for tick in up.ticks(4)]
    for number, tick in enumerate(across.ticks(5)):
        spare = " spare" if number % 2 else ""
        found.append(below.format(across.at(tick), bottom, bottom + 4, bottom + 21, spare, across.axis.show(tick)))
    label = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    found.append(label.format("end", right, bottom + 45, across.axis.label))
    found.append(label.format("", 2, bottom + 45, f"↑ {up.axis.label}"))
    return found


def _marks(marks: Sequence[Mark], across: _Scale, up: _Scale) -> list[Markup]:
    drawn, bottom = [], _HEIGHT - _BOTTOM
    line = Markup(
        '<g><title>{}</title><line class="mark" x1="{}" x2="{}" y1="{}" y2="{}"/>'
        '<text x="{}" y="{}" class="{}">{}</text></g>'
    )
    for number, mark in enumerate(marks):
        name = mark.name if len(mark.name) <= _MOST_NAME // 2 else f"{mark.name[: _MOST_NAME // 2 - 1]}…"
        if mark.is_level:
            at = up.at(mark.at)
            drawn.append(line.format(mark.name, _LEFT, _WIDTH - _RIGHT, at, at, _LEFT + 4, float(at) - 4, "over", name))
            continue
        at, low = across.at(mark.at), _TOP + 10 + 14 * (number % 3)
        is_far = float(at) > 0.75 * _WIDTH
        place = float(at) + (-4 if is_far else 4)
        drawn.append(line.format(mark.name, at, at, _TOP, bottom, place, low, "over end" if is_far else "over", name))
    return drawn


def _curve(number: int, one: Curve, across: _Scale, up: _Scale) -> Markup:
    points = " ".join(f"{across.at(x)},{up.at(y)}" for x, y in zip(one.x, one.y, strict=True))
    shape = Markup('<polyline class="curve c{}{}" points="{}"><title>{}</title></polyline>')
    curve = shape.format(number % _COLOURS, _dashes(number), points, one.name)
    return Markup("").join([curve, *_points(number, one, one.y, across, up)])


def _points(number: int, one: Curve, told: Sequence[float], across: _Scale, up: _Scale) -> list[Markup]:
    """Some places of a series that tell their numbers."""
    step = max(1, math.ceil(len(one.x) / _MOST_POINTS))
    shape = Markup('<circle class="point f{}" cx="{}" cy="{}" r="5"><title>{}: {} at {}</title></circle>')
    return [
        shape.format(number % _COLOURS, across.at(x), up.at(y), one.name, up.axis.show(value), across.axis.show(x))
        for x, y, value in list(zip(one.x, one.y, told, strict=True))[::step]
    ]


def _dashes(number: int) -> str:
    return " dashed" if number // _COLOURS % 2 else ""


def _added(low: Sequence[float], more: Sequence[float]) -> list[float]:
    return [one + other for one, other in zip(low, more, strict=True)]


def _scale(axis: Axis, numbers: Iterable[float], start: float, stop: float) -> _Scale:
    """A scale for some numbers, a little longer than they need where nothing else is said."""
    of = [number for number in numbers if math.isfinite(number)]
    low = min([*of, *([] if axis.low is None else [axis.low])], default=0.0)
    high = max([*of, *([] if axis.high is None else [axis.high])], default=1.0)
    is_range = high - low > max(1e-9 * abs(low), _LEAST_RANGE)
    return _Scale(axis, low, high if is_range else low + (abs(low) if abs(low) > _LEAST_RANGE else 1), start, stop)


def _round_step(least: float, base: float) -> float:
    """The next step of round numbers: 1, 2, 5, 10, ... times a power of the base; with base 1024 also 256 and 512."""
    unit: float = base ** math.floor(math.log(least, base) + 1e-9)
    round_numbers = (1, 2, 5, 10, 20, 50, 100, 200, *((256, 512) if base == 1024 else (500,)), base)
    step: float = unit * next(number for number in round_numbers if number * unit >= least * (1 - 1e-9))
    return step
