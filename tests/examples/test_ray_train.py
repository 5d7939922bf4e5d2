"""Ray Train on this machine: two workers, of which one is lost, and all that Ray starts in their place."""

from __future__ import annotations

import gc
import importlib
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import line_run
from lightning_streaming import StreamingDataLoader, StreamingDataset, World
from tests.examples.test_programs import run_here

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def _ray() -> Any:
    """Import Ray, which takes as long as all other imports of the tests together, where a test needs it."""
    pytest.importorskip("ray.train", reason="needs ray[train]", exc_type=ImportError)
    return importlib.import_module("ray")


@pytest.fixture
def cluster() -> Iterator[None]:
    """Ray, with room for two workers and their controller; all of its processes end with the test."""
    ray = _ray()
    # Ray sets its own, and leaves them; on Ctrl-C it would start anew.
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()
    for one, handler in before.items():
        signal.signal(one, handler)
    gc.collect()


@pytest.mark.nightly
def test_it_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _ray()
    with pytest.raises(SystemExit) as ended:
        run_here("ray_train", "--help", monkeypatch=monkeypatch)
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def _read_by(data: Path, rank: int) -> list[dict[str, torch.Tensor]]:
    """The batches of one of two workers of whom none is lost."""
    dataset = StreamingDataset(remote=str(data), shuffle=True, world=World(ranks_per_node=2, rank=rank))
    loader = StreamingDataLoader(dataset, batch_size=line_run.BATCH_SIZE)
    return [batch for _ in range(line_run.EPOCHS) for batch in loader]


def _trained_on(steps: Iterable[tuple[dict[str, torch.Tensor], ...]]) -> torch.Tensor:
    """The weight after steps on batches of all workers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in steps:
        losses = [(model(one["x"].unsqueeze(1)).squeeze(1) - one["y"]).square().mean() for one in batches]
        optimizer.zero_grad()
        loss: Any = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
    return model.weight.detach()


def test_a_lost_worker_costs_no_sample(tmp_path: Path, cluster: None) -> None:
    from examples.ray_train import train

    line_run.write_samples(tmp_path / "data")
    seen, weight = train(tmp_path, "failing", workers=2, fail_after=12)
    batches = [_read_by(tmp_path / "data", rank) for rank in range(2)]
    assert seen == [[sample for batch in one for sample in batch["id"].tolist()] for one in batches]
    assert torch.allclose(weight, _trained_on(zip(*batches, strict=True)))
    assert len(list((tmp_path / "failing").glob("checkpoint_2*"))) == 6
