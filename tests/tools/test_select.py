"""``select``: what it finds, keeps and says; killed or interrupted and run again; and runs that find it done."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE, default_cache_directory
from lightning_streaming.selection import scanning
from lightning_streaming.tools.commands import read_run_files
from tests.helpers import write_shards
from tests.reading.processes import wait_until
from tests.servers import HttpStore
from tests.tools.running import run
from tests.tools.tuning.tuned import write_config

SHARDS, SIZE = 100, 5
SQUARES = {"id": "int", "y": "int"}
THIRD = "id % 3 = 0"


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ids from 0 to 19, in four shards."""
    return write_shards(tmp_path / "data", [5] * 4)


@pytest.fixture
def remote(http_store: HttpStore, tmp_path: Path) -> HttpStore:
    """Ids from 0 to 499, in shards of five: more than are evaluated together."""
    http_store.put_all(write_shards(tmp_path / "source", [SIZE] * SHARDS))
    return http_store


def ids(dataset: StreamingDataset) -> list[int]:
    return sorted(int(dataset[number]["id"]) for number in range(len(dataset)))


def shards(store: HttpStore) -> set[int]:
    """The shards that were asked for."""
    return {int(name.split(".")[1]) for name in store.requests() if name.startswith("shard.")}


def forget_shards(local: Path) -> None:
    for path in local.glob("shard.*"):
        path.unlink()


def test_what_is_selected_is_said_with_what_a_run_is_told(data: Path, tmp_path: Path) -> None:
    shown = run("select", data, "--where", "id >= 12")
    assert shown.code == 0
    for words in ("8 of 20 (40.0%)", "2 of 4 (", "took", f'remote: "{data}"\n  selection: {{"where": "id >= 12"}}\n'):
        assert words in shown.out
    found = run("select", data, "--where", "id >= 12", "--fraction", ":50%", "--group-by", "id", "--json").json
    assert found["stream"] == {
        "remote": str(data),
        "selection": {"where": "id >= 12", "fraction": ":50%", "group_by": "id"},
    }
    assert Path(found["kept_at"]).parent == default_cache_directory(str(data)) / "selections"
    dataset = StreamingDataset(**found["stream"], batch_size=1)
    assert ids(dataset) == [number for number in ids(dataset) if number >= 12]
    assert len(dataset) == found["selected"] < 8


def test_a_run_of_the_same_conditions_finds_it_and_fetches_no_other_shard(remote: HttpStore, tmp_path: Path) -> None:
    local = tmp_path / "local"
    found = run("select", remote.url, "--local", local, "--where", "id < 23", "--json").json
    assert (found["selected"], found["shards_never_fetched"], found["was_kept"]) == (23, SHARDS - 5, False)
    assert shards(remote) == set(range(SHARDS))
    forget_shards(local)
    asked = len(remote.requests())
    dataset = StreamingDataset(remote=remote.url, local=str(local), selection={"where": "id < 23"}, batch_size=1)
    assert len(dataset) == 23
    assert not [name for name in remote.requests()[asked:] if name.startswith("shard.")]
    assert ids(dataset) == list(range(23))
    fetched = {name for name in remote.requests()[asked:] if name.startswith("shard.")}
    assert len(fetched) == 5
    again = run("select", remote.url, "--local", local, "--where", "id < 23", "--json").json
    assert again["was_kept"]
    assert "it was kept already" in run("select", remote.url, "--local", local, "--where", "id < 23").out


def test_a_part_by_number_fetches_nothing_but_the_index(remote: HttpStore, tmp_path: Path) -> None:
    found = run("select", remote.url, "--fraction", ":20%", "--json").json
    assert 60 < found["selected"] < 140
    assert shards(remote) == set()
    rest = run("select", remote.url, "--fraction", "20%:", "--json").json
    assert found["selected"] + rest["selected"] == SHARDS * SIZE


def test_truth_values_are_written_for_select(data: Path, tmp_path: Path) -> None:
    keep = tmp_path / "keep.npy"
    found = run("select", data, "--where", THIRD, "--out", keep, "--json").json
    assert found["out"] == str(keep)
    values = np.load(keep)
    assert values.dtype == np.bool_
    assert np.flatnonzero(values).tolist() == [0, 3, 6, 9, 12, 15, 18]
    stream = Stream(remote=str(data), selection={"indices": str(keep)})
    assert ids(StreamingDataset(streams=[stream], batch_size=1)) == [0, 3, 6, 9, 12, 15, 18]
    both = run("select", data, "--indices", keep, "--where", "id > 10", "--json").json
    assert both["selected"] == 3
    told = f'  remote: "{data}"\n  selection: {{"indices": "{keep}"}}\n'
    assert told in run("select", data, "--indices", keep).out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "every sample would be selected; select some with --where"),
        (("--split", "train"), "every sample would be selected"),
        (("--where", "idd > 3"), "unknown column 'idd'; the columns are id; did you mean 'id'?"),
        (("--where", "id >"), "cannot be read as a condition in SQL"),
        (("--where", "id > 300"), "of the 20 samples of "),
        (("--where", "id > 3", "--group-by", "id"), "--group-by needs a part to draw"),
        (("--fraction", ":50"), "selection.fraction must be a range in percent"),
        (("--where", "id > 3", "--out", "keep.txt"), "--out must name a .npy file"),
        (("--where", "id > 3", "--out", "nowhere/keep.npy"), "nowhere is not a directory"),
        (("--indices", "missing.npy"), "missing.npy"),
    ],
)
def test_what_cannot_be_is_refused_in_words(data: Path, words: tuple[str, ...], told: str) -> None:
    done = run("select", data, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lightning-streaming select: error: ")
    assert told in done.err


def test_damaged_data_is_told_as_such(data: Path) -> None:
    path = data / "shard.00002.mds"
    path.write_bytes(path.read_bytes()[:-1])
    done = run("select", data, "--where", THIRD)
    assert done.code == 1
    assert "shard.00002.mds" in done.err


def test_a_cache_that_cannot_be_written_to_is_said(data: Path, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file")
    done = run("select", data, "--where", THIRD, "--json")
    assert done.code == 0
    assert done.json["kept_at"] is None
    assert "nowhere: " in run("select", data, "--where", THIRD).out


@contextmanager
def selecting(store: HttpStore, local: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, which has kept some parts when this begins."""
    command = [sys.executable, "-m", "lightning_streaming", "select", store.url, "--local", str(local)]
    with subprocess.Popen([*command, "--where", THIRD], stderr=subprocess.PIPE) as process:
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
    remote.fail("shard.0009", "slow", rate=300)  # of the last part: a second each
    with selecting(remote, local) as process:
        process.send_signal(number)
        assert process.wait(40) == code
    remote.heal()
    done = {int(shard) for part in kept_parts(local) for shard in range(*map(int, part.split("-")))}
    assert done
    assert len(done) < SHARDS
    forget_shards(local)
    asked = len(remote.requests())
    found = run("select", remote.url, "--local", local, "--where", THIRD, "--json").json
    again = {int(name.split(".")[1]) for name in remote.requests()[asked:] if name.startswith("shard.")}
    assert again == set(range(SHARDS)) - done
    assert not list(local.glob("selections/*.parts"))
    plain = run("select", remote.url, "--local", whole, "--where", THIRD, "--json").json
    assert Path(found["kept_at"]).read_bytes() == Path(plain["kept_at"]).read_bytes()
    assert found["selected"] == plain["selected"] == len(range(0, SHARDS * SIZE, 3))


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Path:
    """A run that selects and joins: of ids from 0 to 19, those that are odd, with what is squared."""
    write_shards(tmp_path / "squares", [3, 17], SQUARES, lambda number: {"id": 19 - number, "y": (19 - number) ** 2})
    join = {"squares": {"remote": str(tmp_path / "squares"), "key": "id", "local": str(tmp_path / "local")}}
    train = {"streams": {"a": {"remote": str(data), "selection": {"where": "id % 2 = 1"}, "join": join}}}
    return write_config(tmp_path / "run.yaml", train, val={"remote": str(data), "selection": {"fraction": ":50%"}})


def test_a_setting_of_the_data_is_changed_by_hand(config: Path) -> None:
    found = run("select", "--config", config, "--set", "val.selection.fraction=:10%", "--json").json["made"]
    assert found[-1]["asked"] == "fraction=':10%'"
    assert "--set changes the data of a run" in run("select", "some", "--set", "val.selection.fraction=:10%").err


def test_what_a_run_needs_is_made_for_all_its_stages(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run("select", "--config", config, "--json").json["made"]
    squares = "stream 'a' of data.train, join 'squares'"
    assert [(one["of"], one["asked"], one["was_kept"]) for one in found] == [
        ("stream 'a' of data.train", "where='id % 2 = 1'", False),
        (squares, "on 'id'", False),
        ("data.val", "fraction=':50%'", False),
    ]
    assert Path(found[1]["kept_at"]).is_relative_to(tmp_path / "local" / "selections")
    monkeypatch.setattr(scanning, "read_columns", None)  # nothing is looked at again
    again = run("select", "--config", config)
    assert again.code == 0
    assert again.out.count("was kept") == 3
    assert f"{squares}: {found[1]['kept_at']}\n" in again.out
    module = read_run_files([str(config)], {}).datamodule
    dataset = module.build_dataset("train", module.configs["train"])
    assert sorted((int(one["id"]), int(one["y"])) for one in dataset[:]) == [(n, n * n) for n in range(1, 20, 2)]


@pytest.mark.rotate(1)
@pytest.mark.parametrize(("gone", "where"), [((7,), ""), ((3, 8, 15), ""), ((3, 8), "id > 3"), ((8,), "id <> 8")])
def test_ids_that_a_joined_dataset_lacks_are_told_ahead_of_a_run(
    data: Path, tmp_path: Path, gone: tuple[int, ...], where: str
) -> None:
    ids = [number for number in range(20) if number not in gone]
    write_shards(tmp_path / "some", [len(ids)], SQUARES, lambda number: {"id": ids[number], "y": 0})
    join = {"some": {"remote": str(tmp_path / "some"), "key": "id"}}
    train = {
        "streams": {
            "a": {"remote": str(data), "selection": {"where": where}, "join": join, "local": str(tmp_path / "here")}
        }
    }
    config = write_config(tmp_path / "run.yaml", train)
    lacks = [
        one for one in range(20) if one in gone and not (where == "id > 3" and one <= 3) and where != f"id <> {one}"
    ]
    for _ in range(2):  # the second time it was kept
        done = run("select", "--config", config, "--json")
        told = [(one["samples"], one["values"]) for one in done.json["missing_ids"]]
        assert told == ([(len(lacks), lacks)] if lacks else [])
        assert done.code == bool(lacks)
    shown = run("select", "--config", config)
    if not lacks:
        assert shown.err == ""
        return
    assert f"stream 'a' of data.train, join 'some': {len(lacks)} sample" in shown.err
    assert f"the first is sample {lacks[0]}, id={lacks[0]}. Add them there" in shown.err
    condition = shown.err.partition('where="')[2].partition('"')[0]
    train["streams"]["a"]["selection"] = {"where": f"{where} and {condition}" if where else condition}
    assert run("select", "--config", write_config(tmp_path / "run.yaml", train)).code == 0


@pytest.mark.parametrize(
    ("kind", "first", "told"),
    [
        ("str", "it's", "where=\"key not in ('it''s')\" or selection.indices"),
        ("bytes", b"\xff", "key=b'\\xff'. Add them"),
    ],
)
def test_ids_of_text_and_bytes_are_told_too(tmp_path: Path, kind: str, first: Any, told: str) -> None:
    there: Any = "b" if kind == "str" else b"b"
    write_shards(tmp_path / "x", [2], {"key": kind}, lambda number: {"key": (first, there)[number]})
    write_shards(tmp_path / "y", [1], {"key": kind, "z": "int"}, lambda number: {"key": there, "z": number})
    train = {
        "streams": {"a": {"remote": str(tmp_path / "x"), "join": {"y": {"remote": str(tmp_path / "y"), "key": "key"}}}}
    }
    config = write_config(tmp_path / "run.yaml", train)
    done = run("select", "--config", config)
    assert (done.code, told in done.err) == (1, True)
    assert run("select", "--config", config, "--json").json["missing_ids"][0]["samples"] == 1


@pytest.mark.nightly
def test_an_index_of_ids_that_was_begun_is_gone_on_with(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    last = tmp_path / "squares" / "shard.00001.mds"
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    broken = run("select", "--config", config)
    assert (broken.code, broken.out) == (1, "")
    assert "stream 'a' of data.train, join 'squares': " in broken.err
    assert [path.name for path in (tmp_path / "local").glob("selections/*.parts/*.npy")] == ["0-1.npy"]
    last.write_bytes(whole)
    (tmp_path / "local" / "shard.00000.mds").unlink()
    assert run("select", "--config", config).code == 0
    assert not (tmp_path / "local" / "shard.00000.mds").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--where", "id > 3"), "--config defines what is read, and from where; leave --where out"),
        (("data",), "give either DATASET"),
    ],
)
def test_a_configuration_is_given_alone(config: Path, words: tuple[str, ...], told: str) -> None:
    done = run("select", "--config", config, *words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert "give either DATASET" in run("select").err


def test_a_run_that_needs_nothing_is_told_so(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", {"remote": str(data)})
    assert "nothing to compute" in run("select", "--config", config).out


def test_secrets_of_the_store_are_not_shown(data: Path) -> None:
    options: Any = ("--storage-options", "token=hunter2", "--storage-options", "anon=true")
    shown = run("select", data, "--where", THIRD, *options)
    assert shown.code == 0
    assert "hunter2" not in shown.out + shown.err + str(list(data.iterdir()))
