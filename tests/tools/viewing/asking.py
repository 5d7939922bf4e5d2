"""Data to look at, pages without a server, and viewers in processes of their own."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import wave
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_streaming.tools.stored.stored_dataset import find_dataset, temporary_caches
from lightning_streaming.tools.viewing.pages import Request, Response, Viewed
from lightning_streaming.tools.viewing.server import Pages
from lightning_streaming.tools.viewing.view_run import viewed_of
from lightning_streaming.tools.viewing.viewed import ViewedStream
from lightning_streaming.tools.viewing.viewed_run import ViewedRun
from lightning_streaming.writing.writers import MDSWriter

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">'\"&lt;"
"""A text that would do something in a page that does not escape it."""
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'></svg>"
_SECONDS = 60


def tone() -> bytes:
    """A sound file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0\1" * 400)
    return file.getvalue()


def write_rich(out: Path | str, samples: int = 30, **writer: Any) -> None:
    """Samples with a value of every kind that pages show, in shards of a few."""
    columns = {
        "caption": "str",
        "picture": "jpeg",
        "drawn": "pil",
        "tree": "json",
        "score": "float64",
        "wave": "ndarray:float32",
        "pixels": "ndarray:uint8",
        "sound": "bytes",
        "raw": "bytes",
    }
    rng = np.random.default_rng(3)
    told: dict[str, Any] = {"columns": columns, "size_limit": 100_000, **writer}
    with MDSWriter(out=str(out), **told) as output:
        for number in range(samples):
            output.write(
                {
                    "caption": f"caption {number} {HOSTILE}",
                    "picture": Image.new("RGB", (24, 16), (number * 7, 90, 30)),
                    "drawn": Image.new("L", (9, 5), number),
                    "tree": {"id": number, "deep": {"list": [1, 2, {"text": HOSTILE}]}, HOSTILE: None},
                    "score": number / 8,
                    "wave": np.sin(np.arange(200, dtype=np.float32) / 9),
                    "pixels": rng.integers(0, 255, (12, 20, 3), dtype=np.uint8),
                    "sound": tone(),
                    "raw": SVG + bytes(range(256)),
                }
            )


def pages_of(location: Path | str, options: Mapping[str, Any] | None = None, **how: Any) -> Pages:
    """The pages of a dataset, without a server."""
    unsafe = how.pop("allow_unsafe_types", False)
    place = find_dataset(str(location), options or {}, **how)
    return Pages(Viewed(shown=place.shown, streams=[ViewedStream(place, place.shown, unsafe)]))


@contextmanager
def run_pages(**asked: Any) -> Iterator[Pages]:
    """The pages of ``run.yaml``, without a server."""
    names = ("checkpoint", "loader", "nodes", "ranks_per_node", "accumulate")
    told = Namespace(**{**dict.fromkeys(names), "config": ["run.yaml"], "set": [], **asked})
    run_seen = ViewedRun.read(told)
    with temporary_caches():
        viewed = viewed_of(run_seen, allow_unsafe_types=False)
        yield Pages(viewed)
        viewed.close()


def answer(pages: Pages, path: str, **query: str) -> Response:
    """What these pages answer."""
    found = pages.respond(Request(root="/token/", path=path, query=query))
    assert found is not None, f"there is no page {path}"
    return found


def html(pages: Pages, path: str, **query: str) -> str:
    """A page, found and well formed."""
    found = answer(pages, path, **query)
    assert found.status == 200, found.data.decode()
    text = found.data.decode()
    Elements.of(text)
    return text


class Elements(HTMLParser):
    """What stands in a page."""

    _ALONE = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []

    @classmethod
    def of(cls, text: str) -> Elements:
        """Those of a page, whose elements are all closed."""
        found = cls()
        found.feed(text)
        found.close()
        assert found._open == []
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See :class:`HTMLParser`."""
        self.tags.append((tag, dict(attrs)))
        if tag not in self._ALONE:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See :class:`HTMLParser`."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """See :class:`HTMLParser`."""
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """See :class:`HTMLParser`."""
        self.words.append(data)

    def values(self, tag: str, attribute: str) -> list[str]:
        """The values of an attribute of all elements of a kind."""
        return [value for name, told in self.tags if name == tag and (value := told.get(attribute)) is not None]

    @property
    def text(self) -> str:
        """All words of the page."""
        return " ".join(" ".join(self.words).split())


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file under a directory: its size, and when it was written."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def text(self) -> str:
        """As text."""
        return self.data.decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewer:
    """A viewer that runs."""

    process: subprocess.Popen[str]
    url: str
    notes: list[str] = field(default_factory=list)
    """What it wrote to standard error, once it has ended."""

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.split(":")[2].split("/")[0])

    def get(self, path: str = "", *, url: str | None = None, method: str = "GET", **headers: str) -> Given:
        """Ask for a page; what follows a redirection is what is given."""
        asked = urllib.request.Request((url or self.url) + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=_SECONDS) as found:
                return Given(status=found.status, headers=dict(found.headers), data=found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Given(status=error.code, headers=dict(error.headers), data=error.read())


@contextmanager
def viewer(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, ends: int = signal.SIGINT
) -> Iterator[Viewer]:
    """A viewer in a process of its own, which is told to end as the signal says."""
    command = [sys.executable, "-m", "lightning_streaming", "view", *map(str, args)]
    notes = list[str]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", cwd=cwd, env=env
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, process.communicate()[1]
            yield Viewer(process=process, url=url, notes=notes)
            process.send_signal(ends)
            _, told = process.communicate(timeout=_SECONDS)
            notes.append(told)
        finally:
            process.kill()
    assert "Traceback" not in told, told
