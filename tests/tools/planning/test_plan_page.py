"""The page of a plan: whole, escaped, and fine in Chromium, on a wide window and on a phone's."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.tools.planning.plan_run import planned_from
from tests.chromium import Browser, browser, needs_chromium
from tests.helpers import write_dataset
from tests.phased_data import write_config
from tests.schedules import schedule
from tests.tools.running import run

HOSTILE = "</title><script>alert(1)</script><b>\"'&amp; {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with hostile names, phases, repeats, and a limit that is too small for it."""
    root = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        patched.setenv("LIGHTNING_STREAMING_CACHE", str(root / "caches"))
        for name, samples in (("web", 300), ("math", 30)):
            write_dataset(root / name, samples)
        streams = {
            name: {"remote": str(root / of), "local": str(root / f"{of}-cache")}
            for name, of in (("web", "web"), (HOSTILE, "math"), ("x" * 120, "math"))
        }
        streams["x" * 120]["local"] = str(root / "long")
        phases = [
            {"name": HOSTILE, "end": 150, "mix": {"web": 1, HOSTILE: 1}},
            {"name": "anneal", "mix": {"web": [1, 0.5], HOSTILE: [0.5, 1], "x" * 120: 0.2}},
        ]
        train = {"streams": streams, "schedule": schedule(phases), "epoch_size": 400, "num_canonical_nodes": 2}
        config = write_config(root / "run.yaml", train, {"batch_size": 2}, max_epochs=2, devices=2)
        out = root / "plan.html"
        failing = ("--fail-if", "samples > 1")
        done = run("plan", "--config", config, "--html", out, "--limit", "none", "--limit", "20kb", *failing)
        assert done.code == 1
        assert done.err.endswith(f"lightning-streaming plan: wrote {out}\n")
    return out


class Seen(HTMLParser):
    """What there is of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.nightly
def test_a_page_is_one_file_without_scripts_and_names_do_nothing_to_it(page: Path) -> None:
    seen = Seen(page.read_text())
    assert not [tag for tag, _ in seen.tags if tag in ("script", "b-hostile", "iframe", "object", "form")]
    assert not [attrs for _, attrs in seen.tags if any(name.startswith("on") for name in attrs)]
    links = [attrs.get(name, "") for _, attrs in seen.tags for name in ("src", "href") if name in attrs]
    assert all(re.match(r"#|data:image/svg", link) for link in links), links
    assert HOSTILE in seen.texts
    assert any("{{ 7 * 7 }}" in one for one in seen.texts)
    policies = [attrs["content"] for tag, attrs in seen.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert "default-src 'none'" in policies[0]
    assert "samples > 1" in seen.texts


def test_a_page_says_what_was_planned_and_when(page: Path) -> None:
    told = re.escape(f"{page.parent}/run.yaml, planned on ") + r"\d{4}-\d\d-\d\d \d\d:\d\d UTC: 2 ranks, "
    assert any(re.match(told, text) for text in Seen(page.read_text()).texts)
    assert f"<title>Plan of {page.parent}/run.yaml</title>" in page.read_text()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"config": ["a.yaml"], "set": [], "checkpoint": None}, "a.yaml"),
        (
            {"config": ["a.yaml", "b.yaml"], "set": [("train.remote", "https://me:hush@host")], "checkpoint": "x.ckpt"},
            "a.yaml, b.yaml with other train.remote, from x.ckpt",
        ),
    ],
)
def test_what_was_planned_is_told_without_values(args: dict[str, Any], told: str) -> None:
    assert planned_from(Namespace(**args)) == told


def test_charts_are_named_and_described(page: Path) -> None:
    seen = Seen(page.read_text())
    charts = [attrs for tag, attrs in seen.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(charts) == 6
    ids = {attrs["id"] for _, attrs in seen.tags if "id" in attrs}
    assert all(set(attrs["aria-labelledby"].split()) <= ids for attrs in charts)
    assert len(ids) == sum("id" in attrs for _, attrs in seen.tags)


@pytest.mark.parametrize("where", ["nowhere/plan.html", "."])
def test_a_page_that_cannot_be_written_is_an_error_at_once(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr("lightning_streaming.tools.planning.plan_run.RunPlan", None)  # nothing is worked out
    done = run("plan", "--config", page.parent / "run.yaml", "--html", tmp_path / where)
    assert (done.code, done.out) == (2, "")
    assert str(tmp_path / where) in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_plan_is_told_even_if_its_page_cannot_be_written_any_more(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(
        "lightning_streaming.tools.planning.plan_run.check_page", lambda _: None
    )  # as if it vanished after that
    done = run("plan", "--config", page.parent / "run.yaml", "--html", tmp_path / "nowhere" / "plan.html")
    assert done.code == 2
    assert "nowhere" in done.err
    assert done.out.startswith("plan: ")


def test_names_that_would_turn_a_line_around_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    write_dataset(tmp_path / "data", 40)
    name = "we\u202eb"
    train = {
        "streams": {name: {"remote": str(tmp_path / "data")}, "code": {"remote": str(tmp_path / "data")}},
        "schedule": schedule([{"name": "a", "end": 20, "mix": {name: 1}}, {"name": name, "mix": {name: 1, "code": 1}}]),
        "epoch_size": 40,
    }
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, max_epochs=1)
    done = run("plan", "--config", config, "--html", tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert done.code == 0
    assert "\u202e" not in text + done.out
    assert "\\u202e" in text
    assert "\\u202e" in done.out


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as one:
        yield one


@needs_chromium
@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, False), (1280, 800, True), (375, 700, False)])
def test_a_page_is_legible_and_silent_in_a_browser(
    page: Path, opened: Browser, width: int, height: int, dark: bool
) -> None:
    opened.size(width, height, dark=dark)
    opened.open(page.as_uri())
    assert opened.complaints() == []
    assert opened.overflow() == 0
    smallest = opened.evaluate(
        "Math.min(...[...document.querySelectorAll('svg[role=img] text')].filter(one => one.getClientRects().length)"
        ".map(one => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a))"
    )
    assert smallest > 9.5
    outside = opened.evaluate(
        "[...document.querySelectorAll('svg[role=img] text')].filter(one => one.getClientRects().length)"
        ".filter(one => one.getBoundingClientRect().right > one.closest('.card').getBoundingClientRect().right"
        " || one.getBoundingClientRect().left < one.closest('.card').getBoundingClientRect().left)"
        ".map(one => one.textContent)"
    )
    assert outside == []


@needs_chromium
def test_all_that_scrolls_is_reached_by_keyboard(page: Path, opened: Browser) -> None:
    opened.size(375, 700)
    opened.open(page.as_uri())
    reached = []
    for _ in range(4):
        opened.press("Tab")
        reached.append(opened.evaluate("document.activeElement.className + document.activeElement.tagName"))
    assert reached == ["skipA", "scrollDIV", "scrollDIV", "scrollDIV"]
