"""Each error of docs/troubleshooting.md and of errors.md really happens, with the message that is shown there.

A block after ``<!-- raises -->`` must raise what the ``text`` block below it shows; ``without PACKAGE`` hides a package
from it, ``with NAME=VALUE`` sets a variable of the environment, and :data:`TROUBLES` has what else may be wrong with
the machine. What is seen without an error of ours is tried where it can be. As a script, this file writes the messages.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from lightning_streaming import MDSWriter
from lightning_streaming.cache import shared_files
from lightning_streaming.cache.file_states import claim
from lightning_streaming.errors import StreamingError
from tests.cache.helpers import disk_of
from tests.servers import HttpStore, fresh_store, http_server

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
PAGES = (PAGE, Path(__file__).with_name("errors.md"))
HOST = "https://data.example.com"
"""Where the page has a store; it answers that nobody may read it."""
HOME = "/home/me"
"""Where the page is tried out."""
FULL = "/mnt/full"
"""Where the page has a disk with no room left."""
_BLOCK = re.compile(
    r"^(?:<!-- (?P<raises>raises)"
    r"(?:, without (?P<package>\w+)|, with (?P<variable>\w+=\w+)|, (?P<trouble>[\w ]+))? -->\n)?"
    r"```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<told>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@contextmanager
def _full_disk() -> Iterator[Mapping[str, str]]:
    """A disk of ten pages, of which an index takes most."""
    with TemporaryDirectory() as root, disk_of(Path(root) / "disk", 40) as disk, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 0.05)
        (disk / "filling").write_bytes(bytes(4096 * 7))
        yield {str(disk): FULL}


@contextmanager
def _stopped_process() -> Iterator[Mapping[str, str]]:
    """Somebody who fetches the first shard into ``stalled``, and whom the others have waited for as long as they do."""
    Path("stalled").mkdir()
    part = claim(Path("stalled"), "shard.00000.mds")
    assert part is not None
    with pytest.MonkeyPatch.context() as patch:
        hurried = SimpleNamespace(monotonic=lambda: 1e6 * time.monotonic(), sleep=time.sleep)
        patch.setattr(shared_files, "time", hurried)
        yield {f"process {os.getpid()}": "process 4242"}
    part.close()


@contextmanager
def _few_files() -> Iterator[Mapping[str, str]]:
    """Room for three more open files, or some more that others of this process give back meanwhile."""
    gc.collect()  # what earlier blocks left, so that no file is closed later
    with ExitStack() as taken:
        most = max(int(one.name) for one in Path("/dev/fd").iterdir())
        numbers = [0]
        while numbers[-1] <= most:
            numbers.append(os.open(os.devnull, os.O_RDONLY))
            taken.callback(os.close, numbers[-1])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (numbers[-1] + 4, hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield {}


TROUBLES: dict[str | None, Callable[[], AbstractContextManager[Mapping[str, str]]]] = {
    "on a full disk": _full_disk,
    "with a stopped process": _stopped_process,
    "with few open files": _few_files,
    None: lambda: nullcontext({}),
}
"""What may be wrong with a machine; gives what the page shows in place of what is here."""


def raised(block: re.Match[str], names: dict[str, object], store: HttpStore) -> str:
    """What a block raises, as the page shows it."""
    with TROUBLES[block["trouble"]]() as here, pytest.MonkeyPatch.context() as patch:
        if block["package"]:
            patch.setitem(sys.modules, block["package"], None)
        if block["variable"]:
            patch.setenv(*block["variable"].split("="))
        code = block["code"].replace(HOST, store.url)
        for found, shown in here.items():
            code = code.replace(shown, found)
        with pytest.raises(StreamingError) as caught:
            exec(code, names)
    told = re.sub(r"(?<=\.arriving/)[\w-]+\.part", "1f0c5a.part", f"{caught.type.__name__}: {caught.value}")
    told = re.sub(r"shard\.\d+(?=\.mds cannot be opened)", "shard.00000", told)  # whichever there was no room for
    for found, shown in here.items():
        told = told.replace(found, shown)
    return told.replace(store.url, HOST).replace(str(Path.cwd()), HOME)


def errors(page: str, store: HttpStore) -> Iterator[tuple[re.Match[str], str]]:
    """Each block that is to raise, and what it does raise."""
    store.fail("private/index.json", "status", status=403)
    store.fail("busy/index.json", "status", status=503)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in _BLOCK.finditer(page):
        if block["raises"]:
            try:
                yield block, raised(block, names, store)
            except pytest.skip.Exception:  # no disk can be mounted here: the page is taken at its word
                yield block, block["told"].rstrip("\n")
        else:
            exec(block["code"], names)


def test_the_pages_have_the_common_errors() -> None:
    assert sum(path.read_text().count("<!-- raises") for path in PAGES) >= 25


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_each_error_happens_and_says_what_the_page_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, http_store: HttpStore
) -> None:
    monkeypatch.chdir(tmp_path)
    page = path.read_text()
    found = list(errors(page, http_store))
    assert [told for _, told in found] == [block["told"] and block["told"].rstrip("\n") for block, _ in found]
    assert len(found) == page.count("<!-- raises")


SCRIPT = """
import numpy as np
from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

def read(**how):
    dataset = StreamingDataset(remote="data", transform=how.pop("transform", None))
    print(len(list(StreamingDataLoader(dataset, batch_size=2, num_workers=1, **how))))

def small(sample):
    return {"x": np.zeros(1 << 20, np.uint8)}

def large(sample):
    return {"x": np.zeros(3 << 25, np.uint8)}

def local():
    return lambda sample: sample
"""
"""Begins a script; its data has two samples."""


def seen(directory: Path, code: str, *before: str) -> str:
    """What a script prints, errors too; a command before it may change the machine for it."""
    (directory / "script.py").write_text(SCRIPT + code)
    command = [*before, sys.executable, "script.py"]
    done = subprocess.run(command, cwd=directory, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


@pytest.fixture
def two_samples(tmp_path: Path) -> Path:
    with MDSWriter(out=tmp_path / "data", columns={"x": "int"}) as writer:
        for x in range(2):
            writer.write({"x": x})
    return tmp_path


def in_the_table(words: str) -> bool:
    """Whether the page's table of what is seen has these words in its first column."""
    return any(words in row.split(" | ")[0] for row in PAGE.read_text().splitlines() if row.startswith("| "))


@pytest.mark.nightly
def test_workers_that_are_not_forked_need_functions_of_a_module_and_a_guard(two_samples: Path) -> None:
    main, how = 'if __name__ == "__main__":\n    ', "multiprocessing_context='forkserver'"
    found = re.search(r"Can't (?:pickle|get) local object", seen(two_samples, f"{main}read({how}, transform=local())"))
    assert found is not None
    assert in_the_table(found[0])
    unguarded = "An attempt has been made to start a new process before the current process has finished"
    assert in_the_table(unguarded)
    assert unguarded in " ".join(seen(two_samples, f"read({how})").split())


@pytest.mark.nightly
def test_only_batches_sent_in_torchs_own_way_need_shared_memory_of_the_container(two_samples: Path) -> None:
    unshare = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && "$@"', "sh")
    try:
        subprocess.run([*unshare, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"/dev/shm cannot be made small here: {error}")
    assert seen(two_samples, "read(transform=small)", *unshare) == "1\n"
    told = seen(two_samples, "read(transform=large)", *unshare)
    assert any(
        words in told and in_the_table(words) for words in ("unable to allocate shared memory(shm)", "Bus error")
    )


def test_torch_says_that_a_forked_process_may_not_use_cuda() -> None:
    words = "Cannot re-initialize CUDA in forked subprocess"
    assert in_the_table(words)
    assert words in Path(torch.cuda.__file__).read_text()


def write_messages(path: Path) -> None:
    """Write what each block of a page raises below it."""
    text = path.read_text()
    with TemporaryDirectory() as home, TemporaryDirectory() as root, http_server(Path(root)) as url:
        os.chdir(home)
        for block, message in list(errors(text, fresh_store(url, Path(root)))):
            head = block[0][: block.start("told") - block.start() - len("\n```text\n")] if block["told"] else block[0]
            text = text.replace(block[0], f"{head}\n```text\n{message}\n```\n", 1)
        os.chdir(path.parent)
    path.write_text(text)


if __name__ == "__main__":
    for page in PAGES:
        write_messages(page)
