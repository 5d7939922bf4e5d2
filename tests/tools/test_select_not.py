"""``select --not``: the log of one run becomes the selection of the next, which reads none of what was bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from tests.broken_data import BROKEN, SIZES, ids, replacing_loader, write_broken_json
from tests.helpers import make_loader
from tests.tools.running import run


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Samples from 0 to 30, of which some are bad, as a run has found out."""
    root = write_broken_json(tmp_path / "data")
    list(replacing_loader(root, tmp_path / "log"))
    return root


def test_the_next_run_reads_none_of_them(data: Path, tmp_path: Path) -> None:
    keep = tmp_path / "keep.npy"
    found = run("select", data, "--not", tmp_path / "log", "--out", keep, "--json").json
    assert (found["samples"], found["selected"], found["bad_samples"]) == (sum(SIZES), sum(SIZES) - 4, 4)
    assert np.flatnonzero(~np.load(keep)).tolist() == sorted(BROKEN)
    assert found["stream"] == {"remote": str(data), "selection": {"indices": str(keep)}}
    rest = sorted({*range(sum(SIZES))} - {*BROKEN})
    assert sorted(ids(make_loader(streams=[Stream(**found["stream"])]))) == rest
    assert len(StreamingDataset(remote=str(data), selection={"indices": str(keep)}, batch_size=1)) == len(rest)


def test_it_goes_with_other_conditions_and_is_told(data: Path, tmp_path: Path) -> None:
    keep, log = tmp_path / "keep.npy", next((tmp_path / "log").iterdir())
    shown = run("select", data, "--not", log, "--where", "id < 12", "--out", keep)
    assert shown.code == 0
    assert np.flatnonzero(np.load(keep)).tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 11]
    for words in ("9 of 31", "bad samples left out", f'  remote: "{data}"\n  selection: {{"indices": "{keep}"}}\n'):
        assert words in shown.out
    assert "where" not in shown.out
    twice = run("select", data, "--not", log, "--indices", keep, "--out", tmp_path / "again.npy", "--json").json
    assert twice["selected"] == 9


def test_of_several_streams_one_is_meant(tmp_path: Path) -> None:
    write_broken_json(tmp_path / "a", broken=[2])
    write_broken_json(tmp_path / "b", broken=[4, 30], first_id=100)
    streams = {name: Stream(remote=str(tmp_path / name)) for name in ("a", "b")}
    list(replacing_loader(None, tmp_path / "log", streams=streams))
    words = ("select", tmp_path / "b", "--not", tmp_path / "log", "--out", tmp_path / "keep.npy")
    assert "there are bad samples of ['a', 'b']; choose one with --stream" in run(*words).err
    assert "there are no bad samples of stream 'c'" in run(*words, "--stream", "c").err
    assert run(*words, "--stream", "b", "--json").json["selected"] == 29
    assert np.flatnonzero(~np.load(tmp_path / "keep.npy")).tolist() == [4, 30]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--not", "log"), "name it with --out"),
        (("--not", "nowhere", "--out", "keep.npy"), "nowhere is no log of bad samples"),
        (("--not", "empty", "--out", "keep.npy"), "there are no bad samples to leave out"),
        (("--not", "other", "--out", "keep.npy"), "the log is of another dataset"),
        (("--where", "id > 3", "--stream", "a"), "give their log with --not"),
        (("--not", "log", "--where", "id = 3", "--out", "keep.npy"), "where='id = 3', --not log selects none"),
    ],
)
def test_what_cannot_be_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    list(replacing_loader(write_broken_json(tmp_path / "more", [9, 9], [1, 16]), Path("other")))
    done = run("select", data, *words)
    assert done.code in (1, 2)
    assert told in done.err
    assert not Path("keep.npy").exists()


def test_a_configuration_says_itself_what_is_left_out(data: Path, tmp_path: Path) -> None:
    done = run("select", "--config", "run.yaml", "--not", tmp_path / "log")
    assert "leave --not out" in done.err
