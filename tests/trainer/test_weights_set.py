"""Weights that a callback sets are read by killed and resumed runs as by whole ones, with and without the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_streaming.errors import ConfigError
from tests.forked_ranks import on_ranks
from tests.helpers import make_loader
from tests.phased_data import SIZES, counted_by_stream, write_streams
from tests.tools.running import run
from tests.trainer.phased_run import PhasedRun, flat

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
CALLS = {7: {"web": 1.0, "math": 2.0}, 18: {"code": 1.0}}


def train_of(root: Path, **more: Any) -> dict[str, Any]:
    """The data of a run, with mixture steps of 40 samples."""
    streams = {name: {"remote": str(root / name), "proportion": 1} for name in SIZES}
    return {"streams": streams, "mixing": {"longest_step": 40}, "epoch_size": 240, "num_canonical_nodes": 4, **more}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_killed_run_resumes_with_the_weights_that_were_set(tmp_path: Path, devices: int) -> None:
    train = train_of(write_streams(tmp_path))
    whole = PhasedRun(directory=str(tmp_path / "whole"), train=train, batch_size=8, workers=2, weights=CALLS)
    whole.run_to_end()
    expected = flat(whole.read_by())
    assert counted_by_stream([sample for *_, sample in expected[80:160]]).keys() == {"web", "math"}
    assert counted_by_stream([sample for *_, sample in expected[160:]]).keys() == {"code"}
    first = PhasedRun(
        directory=str(tmp_path / "first"),
        train=train,
        batch_size=8 // devices,
        devices=devices,
        workers=1,
        weights=CALLS,
        pause_after=22,
    )
    first.run_and_kill()
    saved = first.newest_checkpoint()
    shown = run("state", "show", saved)
    assert "weights set" in shown.out
    assert "math 2.0, web 1.0" in shown.out
    # Without the callback, on other ranks, with another batch size.
    second = PhasedRun(
        directory=str(tmp_path / "second"), train=train, batch_size=5, devices=3 - devices, ckpt_path=str(saved)
    )
    second.run_to_end()
    assert flat(first.read_up_to(saved)) + flat(second.read_by()) == expected


def _set_other_weights(root: Path, rank_of: Any = None) -> None:
    loader = make_loader(**train_of(root))
    weights = {"web": 1.0, "code": 1.0 + dist.get_rank()}
    with pytest.raises(ConfigError) as caught:
        loader.set_weights(weights)
    assert caught.value.option == "weights"
    loader.set_weights({"web": 1.0})


def test_ranks_that_set_other_weights_are_an_error(tmp_path: Path) -> None:
    on_ranks(_set_other_weights, write_streams(tmp_path), meeting=tmp_path / "ranks", count=2)


def test_a_run_may_read_exactly_what_its_limits_allow(tmp_path: Path) -> None:
    root = write_streams(tmp_path)
    mixing = {"size_exponent": 1, "max_repeats": dict.fromkeys(SIZES, 1)}
    train = {"streams": {name: {"remote": str(root / name)} for name in SIZES}, "mixing": mixing}
    whole = PhasedRun(directory=str(tmp_path / "whole"), train={**train, "num_canonical_nodes": 1}, batch_size=8)
    whole.run_to_end()
    read = [sample for *_, sample in flat(whole.read_by())]
    assert len(set(read)) == len(read) == sum(SIZES.values())
