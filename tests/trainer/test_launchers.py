"""Every way to start ranks: each goes on from a checkpoint of one process, and its ranks share what is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.helpers import write_dataset
from tests.trainer.ddp_run import RankRun
from tests.trainer.harness import EPOCHS, TRAIN_SAMPLES, Run, SaveThenStop, write_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True"),
]

ROOT = Path(__file__).parents[2]
ALL_SAMPLES = sum(TRAIN_SAMPLES.values())
STEPS_BEFORE = 3


def _start(command: list[str], run: RankRun) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, json.dumps(asdict(run))],
        timeout=100,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def by_lightning_here(run: RankRun) -> None:
    run.fit()


def by_lightning_as_a_script(run: RankRun) -> None:
    _start(["tests.trainer.ddp_run"], run)


def by_torchrun(run: RankRun) -> None:
    _start(["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tests.trainer.ddp_run"], run)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """Data, a checkpoint that one process made after three steps, and the samples that those were on."""
    root = tmp_path_factory.mktemp("begun")
    data, ckpt_path = write_data(root / "data"), root / "begun.ckpt"
    stop = SaveThenStop("on_train_batch_end", STEPS_BEFORE, ckpt_path)
    model, _ = Run(data=data, directory=root, batch_size=3).fit(callbacks=[stop])
    return data, ckpt_path, [sample for _, sample in model.seen]


@pytest.mark.parametrize(
    ("strategy", "start"),
    [
        ("ddp_fork", by_lightning_here),
        ("ddp_spawn", by_lightning_here),
        ("ddp", by_lightning_as_a_script),
        ("ddp", by_torchrun),
    ],
    ids=["fork", "spawn", "script", "torchrun"],
)
def test_ranks_share_what_one_process_has_left(
    strategy: str, start: Callable[[RankRun], None], begun: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    data, ckpt_path, read_before = begun
    run = RankRun(data=str(data), report=str(tmp_path / "reports"), strategy=strategy, ckpt_path=str(ckpt_path))
    if start is by_torchrun:
        run = replace(run, alone=str(write_dataset(tmp_path / "alone", 29)))
    start(run)
    reports = run.reports()
    for report in reports:
        assert report["batches"] == 8
        assert report["steps"] == {"0": STEPS_BEFORE + 5, "1": 8, "2": 8}
    for epoch in range(EPOCHS):
        counts = Counter(sample for report in reports for of, sample in report["seen"] if of == epoch)
        already = read_before if epoch == 0 else []
        # An odd sample out is read by both ranks, so that they have equally many.
        assert counts.total() == len(counts) + (ALL_SAMPLES - len(already)) % 2
        assert not counts.keys() & set(already)
        assert len(counts) + len(already) == ALL_SAMPLES
    if run.alone:
        _, connected = alone = [json.loads((tmp_path / "reports" / f"alone{rank}.json").read_text()) for rank in (0, 1)]
        for before, connected in alone:
            assert before == connected
            assert len(before) == 8
        assert sorted({sample for read, _ in alone for batch in read for sample in batch}) == list(range(29))
