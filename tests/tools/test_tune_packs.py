"""``tune`` of a run that packs documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packed_data import LENGTHS, packed_train, write_documents
from tests.phased_data import write_config
from tests.tools.running import run

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.mark.nightly
@pytest.mark.parametrize("is_far", [False, True])
def test_batches_are_of_packs_and_samples_are_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    train = packed_train(write_documents(tmp_path))
    if is_far:
        train["streams"] = {
            name: {"remote": f"file://{tmp_path / name}", "local": str(tmp_path / "local" / name)} for name in LENGTHS
        }
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, devices=1)
    done = run("tune", "--config", config, "--seconds", 0.1, "--num-workers", "0", "--json")
    assert done.code == 0, done.err
    assert (done.json["batch_size"], done.json["batches_of"]) == (2, "packs")
    (speed,) = done.json["measured"]
    assert speed["samples_per_second"] > 3 * speed["batches_per_second"]
    assert not (tmp_path / "local").exists()
    shown = run("tune", "--config", config, "--seconds", 0.1, "--num-workers", "0").out
    assert "in batches of 2 packs, with reasons of waiting" in shown
