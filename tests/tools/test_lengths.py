"""``lengths``: what it counts, keeps and says; killed or interrupted and run again."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming import MDSWriter
from lightning_streaming.cache.config import CACHE_VARIABLE, default_cache_directory
from lightning_streaming.selection.document_lengths import StreamLengths
from lightning_streaming.tools import lengths as tool
from tests.helpers import write_shards
from tests.reading.processes import wait_until
from tests.servers import HttpStore
from tests.tools.running import run

COLUMNS = {"num_tokens": "int", "raw": "bytes", "tokens": "ndarray:uint16", "text": "str"}
SHARDS, SIZE = 100, 5


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


def length(number: int) -> int:
    """Of a document."""
    return number * 7 % 40 + 1


def sample(number: int) -> dict[str, Any]:
    tokens = np.zeros(length(number), np.uint16)
    return {"num_tokens": length(number), "raw": tokens.tobytes(), "tokens": tokens, "text": "so"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twenty documents in four shards."""
    return write_shards(tmp_path / "data", [5] * 4, COLUMNS, sample)


@pytest.fixture
def remote(http_store: HttpStore, tmp_path: Path) -> HttpStore:
    """Documents of tokens alone, more shards than are counted together."""
    tokens = {"tokens": COLUMNS["tokens"]}
    http_store.put_all(
        write_shards(tmp_path / "source", [SIZE] * SHARDS, tokens, lambda number: {"tokens": sample(number)["tokens"]})
    )
    return http_store


WAYS = [("--column", "tokens"), ("--column", "raw", "--dtype", "uint16"), ("--lengths", "num_tokens")]


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_each_way_of_asking_tells_the_same(data: Path, words: tuple[str, ...]) -> None:
    found = run("lengths", data, *words, "--json").json
    expected = [length(number) for number in range(20)]
    assert {name: found[name] for name in ("documents", "tokens", "mean", "median", "longest", "was_kept")} == {
        "documents": 20,
        "tokens": sum(expected),
        "mean": sum(expected) / 20,
        "median": statistics.median(expected),
        "longest": max(expected),
        "was_kept": False,
    }
    assert found["asked"] == dict(zip((word[2:] for word in words[::2]), words[1::2], strict=True))
    assert sum(one["documents"] for one in found["histogram"]) == 20
    assert sum(one["tokens"] for one in found["histogram"]) == sum(expected)
    assert Path(found["kept_at"]).parent == default_cache_directory(str(data)) / "selections"
    assert run("lengths", data, *words, "--json").json["was_kept"]


def test_people_are_told_in_words(data: Path) -> None:
    shown = run("lengths", data, "--column", "tokens")
    assert shown.code == 0
    expected = [length(number) for number in range(20)]
    for words in ("documents", f"{sum(expected)}", "mean length", "median", "longest", "16 to 31", "kept at "):
        assert words in shown.out
    assert "it was kept already" in run("lengths", data, "--column", "tokens").out


@given(values=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**17), st.just(2**32 - 1)), min_size=1))
def test_what_is_said_of_lengths_is_right(values: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "_AT_ONCE", 3)
        found = tool._summary(StreamLengths(np.array(values, np.uint32)))
    assert found["median"] == statistics.median(values)
    assert (found["documents"], found["tokens"], found["longest"]) == (len(values), sum(values), max(values))
    for one in found["histogram"]:
        inside = [value for value in values if one["from"] <= value <= one["to"]]
        assert (one["documents"], one["tokens"]) == (len(inside), sum(inside))
    borders = [one["from"] for one in found["histogram"]] + [found["histogram"][-1]["to"] + 1]
    assert [one["to"] + 1 for one in found["histogram"]] == borders[1:]
    assert borders[0] <= min(values)


def test_of_remote_shards_the_heads_alone_are_read(remote: HttpStore, tmp_path: Path) -> None:
    found = run("lengths", remote.url, "--local", tmp_path / "local", "--column", "tokens", "--json").json
    assert found["tokens"] == sum(length(number) for number in range(SHARDS * SIZE))
    assert sum(name.startswith("shard.") for name in remote.requests()) == SHARDS
    assert not list((tmp_path / "local").glob("shard.*"))


def test_a_local_that_is_a_url_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MDSWriter(out="data", columns={"n": "int"}) as writer:
        writer.write({"n": 1})
    refused = run("lengths", "data", "--lengths", "n", "--local", "s3://b/x")
    assert (refused.code, refused.out) == (2, "")
    assert "must be a directory of this machine, but is s3://b/x" in refused.err
    assert {path.name for path in tmp_path.iterdir()} == {"data"}


def test_data_that_was_appended_is_all_that_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "x"
    modes: tuple[dict[str, Any], ...] = ({}, {"mode": "append"})
    for times, mode in enumerate(modes, start=1):
        with MDSWriter(out=str(root), columns={"n": "int"}, size_limit=230, hashes=["sha1"], **mode) as writer:
            for number in range(20):
                writer.write({"n": number})
        if times == 2:
            (root / "shard.00000.mds").write_bytes(b"")  # nobody looks at it again
        assert run("lengths", root, "--lengths", "n", "--json").json["tokens"] == 190 * times


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "either --column TOKENS or --lengths NUM_TOKENS"),
        (("--column", "tokens", "--lengths", "num_tokens"), "either --column TOKENS or --lengths NUM_TOKENS"),
        (("--lengths", "num_tokens", "--dtype", "uint16"), "name that with --column"),
        (("--column", "token"), "did you mean 'tokens'?"),
        (("--column", "raw"), "has encoding 'bytes'; pass their dtype"),
        (("--column", "raw", "--dtype", "uint15"), "dtype must be one of numbers"),
        (("--column", "text"), "whose tokens cannot be counted"),
        (("--lengths", "text"), "is a column of str, not of whole numbers"),
    ],
)
def test_what_cannot_be_is_refused_in_words(data: Path, words: tuple[str, ...], told: str) -> None:
    done = run("lengths", data, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lightning-streaming lengths: error: ")
    assert told in done.err


def test_damaged_data_is_told_as_such(data: Path) -> None:
    path = data / "shard.00002.mds"
    path.write_bytes(path.read_bytes()[:-1])
    done = run("lengths", data, "--column", "tokens")
    assert done.code == 1
    assert "shard.00002.mds" in done.err
    write_shards(data.parent / "empty", [0], {"n": "int"})
    assert "has no documents" in run("lengths", data.parent / "empty", "--lengths", "n").err


def test_a_cache_that_cannot_be_written_to_is_said(data: Path, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file")
    done = run("lengths", data, "--column", "tokens", "--json")
    assert (done.code, done.json["kept_at"]) == (0, None)
    assert "nowhere: " in run("lengths", data, "--column", "tokens").out


@contextmanager
def counting(store: HttpStore, local: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, which has kept some parts when this begins."""
    command = [sys.executable, "-m", "lightning_streaming", "lengths", store.url, "--local", str(local)]
    with subprocess.Popen([*command, "--column", "tokens"], stderr=subprocess.PIPE) as process:
        try:
            assert wait_until(lambda: bool(kept_parts(local)))
            yield process
        finally:
            process.kill()


def kept_parts(local: Path) -> set[str]:
    return {path.stem for path in local.glob("selections/*.parts/*.npy")}


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_that_was_ended_goes_on_where_it_was(
    remote: HttpStore, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    local, whole = tmp_path / "local", tmp_path / "whole"
    remote.fail("shard.0009", "slow", rate=300)  # of the last part
    with counting(remote, local) as process:
        process.send_signal(number)
        assert process.wait(40) == code
    remote.heal()
    done = {int(shard) for part in kept_parts(local) for shard in range(*map(int, part.split("-")))}
    assert done
    assert len(done) < SHARDS
    asked = len(remote.requests())
    found = run("lengths", remote.url, "--local", local, "--column", "tokens", "--json").json
    again = {int(name.split(".")[1]) for name in remote.requests()[asked:] if name.startswith("shard.")}
    assert again == set(range(SHARDS)) - done
    assert not list(local.glob("selections/*.parts"))
    plain = run("lengths", remote.url, "--local", whole, "--column", "tokens", "--json").json
    assert Path(found["kept_at"]).read_bytes() == Path(plain["kept_at"]).read_bytes()
    assert found["digest"] == plain["digest"]


def test_secrets_of_the_store_are_not_shown(data: Path) -> None:
    options: Any = ("--storage-options", "token=hunter2", "--storage-options", "anon=true")
    shown = run("lengths", data, "--column", "tokens", *options)
    assert shown.code == 0
    assert "hunter2" not in shown.out + shown.err + str(list(data.iterdir()))
