"""Ranks that train together with DDP, however they are started: they share each epoch, and go on in other numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_streaming import StepLog
from lightning_streaming.dataset.step_lines import read_step_lines
from lightning_streaming.errors import ConfigError
from lightning_streaming.logs import read_step_log
from lightning_streaming.world import World
from tests.forked_ranks import on_ranks
from tests.helpers import make_dataset, raises, write_dataset
from tests.trainer.ddp_run import RankRun
from tests.trainer.harness import EPOCHS, TRAIN_SAMPLES, Run, SaveThenStop, write_data
from tests.trainer.ranks import RankedRun, Trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True"),
]

ALL_SAMPLES = sum(TRAIN_SAMPLES.values())


def drawn(ranks: list[Trained], epoch: int) -> list[int]:
    return [sample for rank in ranks for sample in rank.of_epoch(epoch)]


def test_ranks_share_each_epoch_and_have_equally_many_batches(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path, batch_size=2)
    ranks = RankedRun(run=run, strategy=DDPStrategy, meeting=tmp_path / "ranks", count=3).fit()
    for number, rank in enumerate(ranks):
        assert rank.batches == 5
        assert rank.steps == {0: 5, 1: 5, 2: 5}
        assert (rank.world, rank.replication) == (World(ranks_per_node=3, rank=number), None)
    for epoch in range(EPOCHS):
        counts = Counter(drawn(ranks, epoch))
        # 29 samples on 3 ranks: one is read twice so that all have 10.
        assert len(counts) == ALL_SAMPLES
        assert counts.total() == ALL_SAMPLES + 1


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("then", "now"),
    [((2, 2, 0), (1, 3, 0)), ((2, 2, 0), (2, 3, 2)), ((1, 3, 2), (3, 2, 0))],
    ids=["2 ranks to 1", "other batches and workers", "1 rank with workers to 3"],
)
@pytest.mark.parametrize("stream_weights", [{}, {"epoch_size": 40}], ids=["all", "drawn"])
def test_resuming_on_other_ranks_repeats_and_skips_nothing(
    then: tuple[int, int, int], now: tuple[int, int, int], stream_weights: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    def launch(ranks: int, batch_size: int, workers: int) -> RankedRun:
        run = Run(data=data, directory=tmp_path, batch_size=batch_size, workers=workers, order=stream_weights)
        return RankedRun(run=run, strategy=DDPStrategy, meeting=tmp_path / "ranks", count=ranks)

    one_by_one = Run(data=data, directory=tmp_path, batch_size=1, order=stream_weights)
    whole, _ = one_by_one.fit(callbacks=[StepLog(tmp_path / "whole")])
    ckpt_path = tmp_path / "saved.ckpt"
    before = launch(*then).fit(stop_at=("on_train_batch_end", 3, ckpt_path))
    after = launch(*now).fit(ckpt_path)
    in_order = [sample for epoch, sample in whole.seen if epoch == 0]
    read_before, read_after = drawn(before, 0), drawn(after, 0)
    assert Counter(read_before) == Counter(in_order[: len(read_before)])
    again = Counter(read_after) - Counter(in_order[len(read_before) :])
    assert again.total() < now[0], "only padding is read again"
    assert not Counter(in_order[len(read_before) :]) - Counter(read_after)
    for epoch in range(1, EPOCHS):
        assert set(drawn(after, epoch)) == {sample for of, sample in whole.seen if of == epoch}
        assert {rank.steps[epoch] for rank in after} == {after[0].batches}
    assert read_step_log(tmp_path / "steps") == read_step_log(tmp_path / "whole"), "the log says the same"
    lines = read_step_lines(tmp_path / "steps")
    assert {(line.run, line.rank, line.batch) for line in lines.batches} <= lines.values.keys(), "each rank logs losses"


def test_four_launches_in_a_row_are_one_run(data: Path, tmp_path: Path) -> None:
    whole, _ = Run(data=data, directory=tmp_path, batch_size=1).fit()
    in_order = [sample for epoch, sample in whole.seen if epoch == 0]
    ckpt_path, read = None, 0
    # 2 ranks * 2 samples * 3 steps = 12; then 1 * 3 * 2 = 6, 3 * 2 * 1 = 6, and the last 5 of 29 in one step of 2 * 4.
    for number, (ranks, batch_size, steps) in enumerate([(2, 2, 3), (1, 3, 2), (3, 2, 1), (2, 4, 1)]):
        run = Run(data=data, directory=tmp_path, batch_size=batch_size)
        launch = RankedRun(run=run, strategy=DDPStrategy, meeting=tmp_path / "ranks", count=ranks)
        target = tmp_path / f"{number}.ckpt"
        trained = launch.fit(ckpt_path, stop_at=("on_train_batch_end", steps, target))
        global_batches = steps * ranks * batch_size
        assert {*drawn(trained, 0)} == {*in_order[read : read + global_batches]}
        ckpt_path, read = target, read + global_batches
    after = launch.fit(ckpt_path)
    assert [seen for rank in after for seen in rank.seen if seen[0] == 0] == []
    assert {rank.steps[epoch] for rank in after for epoch in (1, 2)} == {4}
    assert set(drawn(after, 1)) == set(in_order)


def _read_in_a_spawned_worker(data: Path) -> list[str]:
    """What a plain loader's worker does where Lightning has launched this rank, so that it says no RANK."""
    for name in ("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    loader = DataLoader(make_dataset(data), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    with raises(ConfigError, "(WORLD_SIZE=2, LOCAL_RANK=0)", "read through a StreamingDataLoader"):
        next(iter(loader))
    return []


@pytest.mark.nightly
def test_spawned_workers_of_a_plain_loader_do_not_all_read_as_rank_0(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", 8)
    first, _ = on_ranks(_only_on_rank_0, data, meeting=tmp_path / "ranks")
    assert first == []


def _only_on_rank_0(data: Path) -> list[str]:
    return _read_in_a_spawned_worker(data) if os.environ["RANK"] == "0" else []


ROOT = Path(__file__).parents[2]
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


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("strategy", "start"),
    [
        ("ddp_fork", by_lightning_here),
        ("ddp_spawn", by_lightning_here),
        ("ddp", by_lightning_as_a_script),
        pytest.param("ddp", by_torchrun, marks=pytest.mark.nightly),
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
