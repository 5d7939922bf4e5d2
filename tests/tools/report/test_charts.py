"""Charts are sound SVG for any numbers and names, and say what they show."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from lightning_streaming.tools.report.charts import Axis, Bar, Curve, Mark, areas, bars, histogram, lines, short_number

pytestmark = pytest.mark.fast
HOSTILE = "</svg><script>alert('&\"')</script>"
NUMBERS = st.floats(0, 1e15) | st.sampled_from([0.0, 1e-9])
SVG = "{http://www.w3.org/2000/svg}"


def read(chart: Markup) -> ElementTree.Element:
    """The figure, parsed as strictly as XML is."""
    assert isinstance(chart, Markup)
    return ElementTree.fromstring(str(chart))


def texts(figure: ElementTree.Element) -> list[str]:
    return [text for text in figure.itertext() if text.strip()]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=60), st.text("ab<>&\"' é", max_size=20))
def test_lines_of_any_numbers_are_whole_and_named(points: list[tuple[float, float]], name: str) -> None:
    points.sort()
    series = [Curve(name=name, x=[x for x, _ in points], y=[y for _, y in points]), Curve(name=HOSTILE, x=[], y=[])]
    figure = read(lines("What <is> shown", name, Axis(label=HOSTILE), Axis(label="y"), series, [Mark(at=3, name=name)]))
    drawing = figure.find("svg")
    assert drawing is not None
    assert drawing.attrib["role"] == "img"
    named = {element.attrib["id"]: element.text or "" for element in drawing if element.tag in ("title", "desc")}
    assert [named[word] for word in drawing.attrib["aria-labelledby"].split()] == ["What <is> shown", name]
    assert not list(figure.iter("script"))
    curve = figure.findall(".//polyline")[0]
    assert len(curve.attrib["points"].split()) == len(points)


@given(st.lists(NUMBERS, min_size=1, max_size=12), st.lists(NUMBERS, min_size=1, max_size=5))
def test_layers_bars_and_ranges_of_any_numbers_are_whole(xs: list[float], values: list[float]) -> None:
    xs.sort()
    layers = [Curve(name=f"layer {number}", x=xs, y=[value] * len(xs)) for number, value in enumerate(values)]
    assert len(read(areas("t", "d", Axis(label="x"), Axis(label="y"), layers)).findall(".//polygon")) == len(values)
    of = [Bar(name=HOSTILE, value=value, label=short_number(value)) for value in values]
    drawn = read(bars("t", "d", Axis(label="x"), of))
    widths = [float(element.attrib["width"]) for element in drawn.findall(".//rect")]
    assert len(widths) == len(values)
    assert max(widths) < 560
    assert sorted(widths) == [
        widths[place] for place in sorted(range(len(widths)), key=lambda at: (values[at], widths[at]))
    ]
    edges = [float(edge) for edge in range(len(values) + 1)]
    ranges = read(histogram("t", "d", Axis(label="x"), Axis(label="y"), edges, values)).findall(".//rect")
    assert len(ranges) == len(values)


def test_a_tooltip_shows_the_exact_number() -> None:
    x, y = Axis(label="step"), Axis(label="bytes", base=1024, show=lambda number: f"{number:.0f} B")
    shown = texts(read(lines("t", "d", x, y, [Curve(name="web", x=[0, 10], y=[0, 3000])])))
    assert "web: 3000 B at 10" in shown
    assert {"1024 B", "2048 B"} <= set(shown)
    shown = texts(read(areas("t", "d", x, y, [Curve(name=name, x=[0], y=[100]) for name in "ab"])))
    assert "b: 100 B at 0" in shown  # its own, and not the height at which it ends


def test_more_series_than_colours_differ_by_dashes() -> None:
    series = [Curve(name=str(number), x=[0, 1], y=[0, number]) for number in range(10)]
    classes = [
        element.attrib["class"]
        for element in read(lines("t", "d", Axis(label="x"), Axis(label="y"), series)).findall(".//polyline")
    ]
    assert len(set(classes)) == 10


def test_numbers_in_short() -> None:
    assert [short_number(number) for number in (0, 0.25, 999, 1500, 2e7, 3e9, 4.5e12)] == [
        "0", "0.25", "999", "1.5k", "20M", "3B", "4.5T",
    ]  # fmt: skip
