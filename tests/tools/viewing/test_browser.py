"""The pages of ``lightning-streaming view`` in Chromium: nothing runs, all fits the window, keys are enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lightning_streaming.writing.writers import MDSWriter
from tests.chromium import Browser, browser, needs_chromium
from tests.tools.viewing.asking import HOSTILE, Viewer, viewer, write_rich

pytestmark = needs_chromium
_DATASET = ["s/0/", "s/0/samples", "s/0/sample/7", "s/0/columns", "s/0/shards", f"find?key={quote(HOSTILE)}"]
_RUN = [
    "",
    "order",
    "batches",
    "batches?step=2&rank=0",
    "batches?step=99",
    "s/0/sample/7?when=1",
    "s/0/samples?only=left-out",
]
_WINDOWS = [(1280, 800), (390, 844)]


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with all that would do something in a careless page, also in its names."""
    directory = tmp_path_factory.mktemp("rich")
    write_rich(directory / "data")
    write_rich(directory / "<img src=x onerror=alert(1)>", 3)
    streams: dict[str, dict[str, Any]] = {name: {"remote": name} for name in ("data", "<img src=x onerror=alert(1)>")}
    streams["data"]["selection"] = {"where": "score >= 1"}
    written = {
        "data": {"init_args": {"batch_size": 4, "train": {"streams": streams}}},
        "trainer": {"devices": 2, "max_steps": 50},
    }
    (directory / "run.yaml").write_text(json.dumps(written))
    return directory


@pytest.fixture(scope="module")
def of_dataset(rich: Path) -> Iterator[Viewer]:
    with viewer("data", cwd=rich) as one:
        yield one


@pytest.fixture(scope="module")
def of_run(rich: Path) -> Iterator[Viewer]:
    with viewer("--config", "run.yaml", cwd=rich) as one:
        yield one


@pytest.fixture
def chromium() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.mark.parametrize("dark", [False, True])
def test_pages_of_a_dataset_fit_their_window_and_complain_of_nothing(
    of_dataset: Viewer, chromium: Browser, dark: bool
) -> None:
    _check_pages(of_dataset, chromium, _DATASET, dark)


@pytest.mark.parametrize("dark", [False, True])
def test_pages_of_a_run_fit_their_window_and_complain_of_nothing(of_run: Viewer, chromium: Browser, dark: bool) -> None:
    _check_pages(of_run, chromium, _RUN, dark)


def _check_pages(shown: Viewer, chromium: Browser, paths: list[str], dark: bool) -> None:
    for width, height in _WINDOWS:
        chromium.size(width, height, dark=dark)
        for path in paths:
            chromium.open(shown.url + path)
            assert chromium.overflow() == 0, (path, width)
            assert chromium.evaluate("document.title") != "taken"
            assert chromium.evaluate("document.querySelectorAll('script').length") == 0
            assert chromium.evaluate(_FAINT) == [], (path, width, dark)
    assert chromium.complaints() == []
    assert chromium.hosts() == {f"127.0.0.1:{shown.port}"}


_FAINT = """
(() => {
  const bright = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(one => {
      const level = one / 255;
      return level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    for (; element; element = element.parentElement) {
      const found = getComputedStyle(element).backgroundColor;
      if (!/, 0\\)$/.test(found)) return found;
    }
    return 'rgb(255, 255, 255)';
  };
  const faint = new Set();
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].some(one => one.nodeType === 3 && one.textContent.trim());
    if (!text || element.closest('svg') || !element.getClientRects().length) continue;
    const [low, high] = [bright(getComputedStyle(element).color), bright(ground(element))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.add(element.tagName + ': ' + element.textContent.slice(0, 40));
  }
  return [...faint];
})()
"""
"""Texts whose colour differs too little from what is behind them, by the rule of WCAG 2 AA."""


def test_names_are_not_cut_and_turn_nothing_around(tmp_path: Path, chromium: Browser) -> None:
    names = {HOSTILE: "str", "long" * 60: "int", "\u202ename": "json"}
    with MDSWriter(out=str(tmp_path / "data"), columns=names) as writer:
        for number in range(3):
            turned = {"\u202ekey": ["\u202eabc", "after"], "last": "\0\x07\ud800"}
            writer.write({HOSTILE: HOSTILE, "long" * 60: number, "\u202ename": turned})
    with viewer("data", cwd=tmp_path) as one:
        for width, height in _WINDOWS:
            chromium.size(width, height)
            for path in ("s/0/", "s/0/samples", "s/0/sample/1", "s/0/columns"):
                chromium.open(one.url + path)
                wide = "[...document.querySelectorAll('dt, dd, h1, h2, summary, .leaf')].filter(one => "
                wide += "one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).position !== 'absolute'"
                wide += " && getComputedStyle(one).display !== 'inline').map(one => one.textContent)"
                assert chromium.evaluate(wide) == [], (path, width)
                names_shown = chromium.evaluate(
                    "[...document.querySelectorAll('dt, h2, .key')].map(one => one.textContent)"
                )
                assert "\u202e" not in "".join(names_shown), path
    assert chromium.complaints() == []


def test_a_sound_may_be_begun_anywhere(of_dataset: Viewer, chromium: Browser) -> None:
    chromium.size(1280, 800)
    chromium.open(f"{of_dataset.url}s/0/sample/7")
    place = chromium.evaluate(
        """new Promise((done, failed) => {
          const sound = document.querySelector('audio');
          sound.onseeked = () => done([sound.currentTime, sound.duration]);
          sound.onerror = () => failed(new Error('it cannot be played'));
          const jump = () => { sound.currentTime = 0.04; };
          if (sound.readyState) jump(); else { sound.onloadedmetadata = jump; sound.preload = 'auto'; sound.load(); }
        })"""
    )
    assert place == [0.04, 0.05]


def test_where_there_is_no_page_that_is_told_with_the_way_to_the_others(of_dataset: Viewer, chromium: Browser) -> None:
    chromium.size(390, 844, dark=True)
    chromium.open(f"{of_dataset.url}s/0/elsewhere")
    assert chromium.evaluate("document.querySelector('h1').textContent") == "There is no such page"
    assert chromium.evaluate("document.querySelector('main a').href") == of_dataset.url
    assert chromium.evaluate(_FAINT) == []
    assert chromium.overflow() == 0


def test_pictures_are_shown(of_dataset: Viewer, chromium: Browser) -> None:
    chromium.size(1280, 800)
    chromium.open(f"{of_dataset.url}s/0/sample/7")
    sizes = chromium.evaluate("[...document.images].map(one => [one.naturalWidth, one.naturalHeight])")
    assert sorted(sizes) == [[9, 5], [20, 12], [24, 16]]


def test_everything_is_reached_by_keys_in_the_order_of_the_page(of_dataset: Viewer, chromium: Browser) -> None:
    chromium.size(1280, 800)
    chromium.open(f"{of_dataset.url}s/0/sample/7")
    wanted = "a[href], button, input:not([type=hidden]), summary, audio, [tabindex='0']"
    of_page = chromium.evaluate(
        f"[...document.querySelectorAll(`{wanted}`)].filter(one => one.checkVisibility()).length"
    )
    reached = []
    for _ in range(of_page):
        chromium.press("Tab")
        place = chromium.evaluate(f"[...document.querySelectorAll(`{wanted}`)].indexOf(document.activeElement)")
        if place in reached:  # a player of sound has buttons of its own
            continue
        reached.append(place)
        assert chromium.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached == sorted(reached)
    assert chromium.evaluate(f"document.querySelectorAll(`{wanted}`)[{reached[0]}].className") == "skip"
    assert len(reached) >= 10


def test_the_first_key_leads_past_what_all_pages_have(of_dataset: Viewer, chromium: Browser) -> None:
    chromium.size(1280, 800)
    chromium.open(f"{of_dataset.url}s/0/samples")
    chromium.press("Tab")
    assert chromium.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.press("Enter")
    assert chromium.evaluate("document.activeElement.id") == "content"
    chromium.press("Tab")
    assert chromium.evaluate("document.activeElement.id") == "match"


def test_a_sample_is_found_by_typing(of_dataset: Viewer, chromium: Browser) -> None:
    chromium.size(1280, 800)
    chromium.open(f"{of_dataset.url}s/0/samples")
    chromium.evaluate("document.querySelector('#key').focus()")
    chromium.evaluate("document.querySelector('#key').value = '0:9'")
    chromium.press("Enter")
    chromium.wait_for_load()
    assert chromium.evaluate("document.querySelector('h1').textContent") == "Sample 9"


def test_the_batches_are_one_step_from_the_first_page_and_turned_by_keys(of_run: Viewer, chromium: Browser) -> None:
    chromium.size(390, 844)
    chromium.open(of_run.url)
    _go(chromium, "Show the batches")
    assert chromium.evaluate("document.querySelector('h1').textContent") == "The samples of step 0"
    pictures = "[...document.images].map(one => one.naturalWidth)"
    assert len(chromium.evaluate(pictures)) == 24  # three in each of 8 samples
    chromium.evaluate("Promise.all([...document.images].map(one => { one.loading = 'eager'; return one.decode() }))")
    assert all(chromium.evaluate(pictures))
    _go(chromium, "next step")
    assert chromium.evaluate("document.querySelector('h1').textContent") == "The samples of step 1"
    chromium.evaluate("document.querySelector('#rank').value = '1'")
    chromium.evaluate("document.querySelector('.ask button').focus()")
    chromium.press("Enter")
    chromium.wait_for_load()
    assert chromium.evaluate("[...document.querySelectorAll('h2')].map(one => one.textContent.slice(0, 6))") == [
        "Rank 1"
    ]
    assert chromium.evaluate("document.querySelectorAll('.cards .card').length") == 4
    assert chromium.complaints() == []


def _go(chromium: Browser, words: str) -> None:
    """Press Enter on a link."""
    links = f"[...document.querySelectorAll('main a')].find(one => one.textContent === {words!r})"
    chromium.evaluate(f"{links}.focus()")
    chromium.press("Enter")
    chromium.wait_for_load()


def test_a_table_that_is_wider_than_a_phone_shows_that_it_scrolls(of_run: Viewer, chromium: Browser) -> None:
    chromium.size(390, 844)
    chromium.open(of_run.url)
    region = "document.querySelector('.scroll')"
    assert chromium.evaluate(f"{region}.scrollWidth - {region}.clientWidth") > 0
    backgrounds = chromium.evaluate(f"getComputedStyle({region}).backgroundAttachment")
    assert backgrounds == "local, local, scroll, scroll"  # what is at the table's ends covers what is at the window's
    assert chromium.evaluate(f"getComputedStyle({region}).backgroundImage").count("linear-gradient") == 4


def test_fields_have_labels_and_tables_heads(of_run: Viewer, chromium: Browser) -> None:
    chromium.size(1280, 800)
    for path in _RUN:
        chromium.open(of_run.url + path)
        fields = "[...document.querySelectorAll('input:not([type=hidden]), select')]"
        assert chromium.evaluate(f"{fields}.every(one => one.labels.length === 1)")
        assert chromium.evaluate("[...document.querySelectorAll('th')].every(one => one.scope)")
        assert chromium.evaluate("document.querySelectorAll('h1').length") == 1
        assert chromium.evaluate("[...document.images].every(one => one.alt)")
        assert chromium.evaluate(
            "[...document.querySelectorAll('[aria-labelledby]')].every(one => one.getAttribute('aria-labelledby')"
            ".split(' ').every(id => document.getElementById(id)))"
        )
        ids = chromium.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
        assert len(ids) == len(set(ids))
