"""The documentation site: made without a warning, with every public name and tool; each page opened in a browser."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import lightning_streaming
from docs._ext.command_reference import description, marked
from docs._ext.navigation import REPOSITORY, llms_txt, sidebar, with_repository_links
from docs._ext.python_reference import readied, with_defaults, with_programs
from docs._ext.tabs import with_tabs
from lightning_streaming import errors
from lightning_streaming.exports import TOPICS
from lightning_streaming.tools.commands import COMMANDS, parser_of
from lightning_streaming.trainer import SUBCOMMANDS
from tests.chromium import Browser, browser, needs_chromium
from tests.servers import http_server

pytestmark = pytest.mark.timeout(300)  # the first test has the site made
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
WINDOWS = {"desktop": (1280, 800), "phone": (390, 844)}

SMALLEST_LETTERS = """
Math.min(...[...document.querySelectorAll("article p, article li, article td, article pre, article code, article dt")]
    .map(one => parseFloat(getComputedStyle(one).fontSize)))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make docs`` makes it: where a link leads nowhere, or a page is in no list, it is not made."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-E", "-W", "--keep-going", "-q", "-d", f"{out}.cache"]
    done = subprocess.run([*command, DOCS, out], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with http_server(site) as url:
        yield url


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def told(site: Path, page: str) -> str:
    """The HTML of a page."""
    return (site / f"{page}.html").read_text()


def test_every_page_of_markdown_is_made(site: Path) -> None:
    assert [page for page in PAGES if not (site / f"{page}.html").exists()] == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    links = r"<link(?![^>]*\srel=\"canonical\")[^>]*\shref=[\"'](?:https?:)?//"
    loaded = re.compile(rf"<(?:script|img|iframe)[^>]*\ssrc=[\"'](?:https?:)?//|{links}")
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text())] == []
    assert [
        path.name for path in site.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//", path.read_text())
    ] == []


def test_every_page_says_where_it_is_published(site: Path) -> None:
    said = re.search(r'^Documentation = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert said is not None
    where = re.compile(r'<link rel="canonical" href="([^"]+)"')
    assert [page for page in PAGES if where.findall(told(site, page)) != [f"{said[1]}{page}.html"]] == []


def test_every_public_name_is_documented_once(site: Path) -> None:
    text = "".join(told(site, page) for page in PAGES if page.startswith("api/"))
    found = re.findall(r'<dt class="sig sig-object py" id="lightning_streaming\.([\w.]+)"', text)
    exceptions = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception))
    classes = {f"errors.{kind.__name__}" for kind in exceptions}
    by_topic = {f"{topic}.{name}" for topic in TOPICS for name in import_module(f"lightning_streaming.{topic}").__all__}
    names = {*dir(lightning_streaming), *classes, *by_topic} - {"errors"}
    assert names <= set(found)
    assert len(found) == len(set(found))


def test_every_option_of_every_tool_is_documented(site: Path) -> None:
    text = told(site, "command-line")
    for name in COMMANDS:
        for action in parser_of(name)._actions:
            if action.option_strings and "--help" not in action.option_strings:
                assert f'id="cmdoption-lightning-streaming-{name}-{action.option_strings[-1].lstrip("-")}"' in text


def test_training_is_documented_among_the_commands(site: Path) -> None:
    text = told(site, "command-line")
    for name in SUBCOMMANDS:
        for option in ("config", "print_config", "ckpt_path", "debug"):
            assert f'id="cmdoption-lightning-streaming-{name}-{option}"' in text


GROUPS = [name for name in dir(lightning_streaming) if name.endswith(("Config", "Budget", "Phase"))]


@pytest.mark.parametrize("name", ["StreamingDataModule", "Stream", *GROUPS])
def test_every_field_of_a_configuration_is_documented(site: Path, name: str) -> None:
    listed = re.findall(r"<dt><strong>(\w+)</strong><span", told(site, "configuration"))
    assert set(inspect.signature(getattr(lightning_streaming, name)).parameters) <= set(listed)


@needs_chromium
@pytest.mark.timeout(600)  # some seventy pages, twice
def test_every_page_is_legible_and_nothing_fails_on_it(address: str, window: Browser) -> None:
    wide, small = {}, {}
    for name, (width, height) in WINDOWS.items():
        window.size(width, height)
        for page in PAGES:
            window.open(f"{address}/{page}.html")
            if window.overflow() > 0:
                wide[page, name] = window.overflow()
            if (size := window.evaluate(SMALLEST_LETTERS)) < 10:
                small[page, name] = size
    assert wide == {}
    assert small == {}
    assert window.complaints() == []
    assert window.hosts() == {address.removeprefix("http://")}


@needs_chromium
def test_search_finds_an_option(address: str, window: Browser) -> None:
    window.size(*WINDOWS["desktop"])
    window.open(f"{address}/search.html?q=cache_limit")
    found = "document.querySelector('#search-results a[href^=\"configuration.html\"]')"
    # Results come one by one; where this one never does, the wait ends in an error.
    asks = f"const ask = () => {found} ? done(true) : setTimeout(ask, 50); ask()"
    assert window.evaluate(f"new Promise(done => {{ {asks} }})")
    assert window.complaints() == []


def test_the_sidebar_is_what_a_page_lists() -> None:
    text = "# Home\n\n## Start\n\n- [One](one.md): first\n- [2](a/two.md)\n\n## More\n\nwords, [three](three.md)\n"
    (made,) = sidebar(text)
    assert made.split() == ["```{toctree}", ":hidden:", ":caption:", "Start", "One", "<one>", "a/two", "```"]


def test_a_list_for_language_models_has_every_page_of_the_home_page(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# lightning_streaming\n\n> Stream training data")
    pages = re.findall(r"^- \[[^\]]+\]\(([\w/-]+)\.md\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert len(pages) > 30
    assert [page for page in pages if f"/{page}.html)" not in text] == []


def test_a_list_for_language_models_has_title_summary_and_pages() -> None:
    text = "# Home\n\nA **library**\nfor data.\n\nMore.\n\n## Start\n\n- [One](one.md): first\n\n## Empty\n\nwords\n"
    assert llms_txt(text, "https://x/") == (
        "# Home\n\n> A **library** for data.\n\n## Start\n\n- [One](https://x/one.html): first\n"
    )


def test_links_to_files_that_are_no_pages_lead_to_the_repository() -> None:
    text = "[a](../configs/s3.yaml) [b](resume.md#limits) [c](../nowhere.md) [d](https://x.y) [e](img/packing.py)"
    made = with_repository_links(text, DOCS, DOCS)
    assert re.findall(r"\((.*?)\)", made) == [
        f"{REPOSITORY}/configs/s3.yaml",
        "resume.md#limits",
        "../nowhere.md",
        "https://x.y",
        f"{REPOSITORY}/docs/img/packing.py",
    ]


def test_blocks_after_a_mark_become_tabs() -> None:
    python = "<!-- not run -->\n```python\nx = 1\n```\n"
    text = f"a\n\n<!-- tabs -->\n\n```bash\nls\n```\n\n{python}\nb\n\n```yaml\ny: 1\n```\n"
    tabbed = with_tabs(text)
    assert re.findall(r"<label[^>]*>(.*?)</label>", tabbed) == ["Command line", "Python"]
    assert tabbed.count(" checked") == 1
    assert tabbed.count("<div") == tabbed.count("</div>") == 3
    assert tabbed.endswith("b\n\n```yaml\ny: 1\n```\n")


def test_docstrings_become_what_they_mean() -> None:
    assert (
        readied("``a*`` and *.parquet, clip_; see docs/order.md") == r"``a*`` and \*.parquet, clip\_; see :doc:`/order`"
    )
    assert marked("give --out, like *.tar") == r"give ``--out``, like \*.tar"
    shown = list(description("Words.\n\n    lightning-streaming copy A B"))
    assert shown[-3:] == ["$ lightning-streaming copy A B", "```", ""]


def test_defaults_are_told_with_their_arguments() -> None:
    def function(size: int, name: str = "x") -> None: ...

    lines = ["Args:", "    size: How large.", "    name: What it is", "        called."]
    assert with_defaults(lines, inspect.signature(function)) == [*lines[:3], "        called. Default: ``'x'``."]


def test_an_indented_block_of_a_docstring_is_a_program() -> None:
    lines = ["Does it.", "", "    do_it()", "", "Args:", "    size: How large.", "", "    more"]
    assert list(with_programs(lines)) == [*lines[:2], ".. code-block:: python", "", *lines[2:]]
