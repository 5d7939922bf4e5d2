"""Where ``lightning-streaming state`` cannot write what it was asked to."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.tools.running import run

STATE = {
    "version": 1,
    "epoch": 1,
    "sample_in_epoch": 12,
    "shuffle_seed": 9176,
    "num_canonical_nodes": 1,
    "initial_physical_nodes": 1,
    "fingerprint": None,
}


@pytest.fixture(params=["json", "torch"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"state.{request.param}"
    if request.param == "json":
        path.write_text(json.dumps(STATE))
    else:
        torch.save(STATE, path)
    return path


@contextmanager
def no_room() -> Iterator[None]:
    """Files of this process may have 16 bytes only, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


MOVES = [("set", "--epoch", 1, "--sample", 8), ("skip", "--samples", 4)]


@pytest.mark.parametrize("move", MOVES, ids=["set", "skip"])
def test_a_folder_that_does_not_exist_is_told(place: Path, move: tuple[object, ...]) -> None:
    verb, *words = move
    outcome = run("state", verb, place, *words, "--out", place.parent / "none" / "new")
    assert outcome.code == 2
    assert f"there is no directory {place.parent / 'none'}; make it first" in outcome.err


@pytest.mark.parametrize("more", [(), ("--out", "new")], ids=["in_place", "new"])
@pytest.mark.parametrize("move", MOVES, ids=["set", "skip"])
def test_a_full_disk_is_told_and_changes_nothing(
    place: Path, move: tuple[object, ...], more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    before = place.read_bytes()
    verb, *words = move
    with no_room():
        outcome = run("state", verb, place, *words, *more)
    assert outcome.code == 2
    assert "could not be written: " in outcome.err
    assert place.read_bytes() == before
    assert {path.name for path in place.parent.iterdir()} <= {place.name, f"{place.name}.bak"}
