"""Workers that are paused in mid-epoch: no batch is lost, repeated or changed, and no process stays."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_streaming import KeyedBatch, Stream, StreamingDataLoader, World
from lightning_streaming.errors import ConfigError
from tests.broken_data import replacing_loader, write_broken_json
from tests.helpers import make_loader, raises, write_dataset
from tests.packed_data import packed_loader, packed_train, write_documents

Options = dict[str, Any]
Make = Callable[[Path, int, Options], StreamingDataLoader]


def plain(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    return make_loader(write_dataset(root, 29), workers=workers, loader=loader)


def mixture(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    streams = {name: Stream(remote=str(write_dataset(root / name))) for name in "ab"}
    late = {"mix": {"a": [0.5, 0.1], "b": [0.5, 0.9]}}
    schedule = {"early": {"end": "50%", "mix": {"a": 0.9, "b": 0.1}}, "late": late}
    return make_loader(streams=streams, schedule=schedule, epoch_size=40, workers=workers, loader=loader)


def stratified(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    streams = {name: Stream(remote=str(write_dataset(root / name))) for name in "ab"}
    return make_loader(streams=streams, batching_method="stratified", workers=workers, loader=loader)


def skipping(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    return make_loader(write_dataset(root, 40), skip=["2-3", 6], workers=workers, loader=loader)


def second_of_two_ranks(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    world = World(ranks_per_node=2, rank=1)
    return make_loader(write_dataset(root, 60), world=world, num_canonical_nodes=2, workers=workers, loader=loader)


def packed(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    return packed_loader(packed_train(write_documents(root)), 4, num_workers=workers, **loader)


def replacing_bad_samples(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    return replacing_loader(write_broken_json(root / "data"), root / "log", workers=workers, loader=loader)


def fixed(root: Path, workers: int, loader: Options) -> StreamingDataLoader:
    options = {"return_valid_mask": True, "fixed_epoch": True, **loader}
    return make_loader(write_dataset(root, 30), workers=workers, loader=options)


KINDS: list[Make] = [
    plain,
    mixture,
    stratified,
    skipping,
    second_of_two_ranks,
    packed,
    replacing_bad_samples,
    fixed,
]


def content(batch: Any) -> Any:
    """Return a batch, with its keys if it has some, as plain values, which can be compared."""
    if not isinstance(batch, KeyedBatch):
        return plain_values(batch)
    return plain_values(batch.batch), [str(key) for key in batch.keys]


def plain_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain_values(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def epoch(loader: StreamingDataLoader, pause_after: set[int]) -> list[Any]:
    """Return the batches of an epoch; workers pause after some of them, given by number."""
    batches = []
    for number, batch in enumerate(loader):
        batches.append(content(batch))
        if number in pause_after:
            loader.pause_workers()
            assert multiprocessing.active_children() == []
            loader.pause_workers()  # once more changes nothing
    return batches


@pytest.mark.rotate
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_paused_workers_read_the_same_batches(make: Make, persistent: bool, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", 0, {"return_keys": True})
    paused = make(tmp_path / "paused", 2, {"return_keys": True, "persistent_workers": persistent})
    for _ in range(2):
        expected = epoch(whole, set())
        assert len(expected) > 5
        assert epoch(paused, {0, 3, 4, len(expected) - 1}) == expected
    assert paused.statistics().batches == whole.statistics().batches
    paused.close()


def test_a_state_saved_while_workers_are_paused_resumes_after_the_latest_batch(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, 29)
    loader = make_loader(root, workers=1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    before = loader.state_dict()
    loader.pause_workers()
    state = loader.state_dict()
    assert state == before
    rest = [batch["id"].tolist() for batch in batches]
    resumed = make_loader(root)
    resumed.load_state_dict(state)
    assert [batch["id"].tolist() for batch in resumed] == rest
    assert rest


def test_a_pass_that_has_yielded_all_batches_ends_without_workers(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 12), workers=1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.pause_workers()
    assert next(batches, None) is None
    assert multiprocessing.active_children() == []
    assert loader.state_dict()["epoch"] == 1


def test_a_pause_draws_no_random_number_and_frees_prefetched_batches(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 29), workers=1)
    batches = iter(loader)
    next(batches)
    before = torch.get_rng_state()
    loader.pause_workers()
    gc.collect()
    assert "memfd:batches" not in Path("/proc/self/maps").read_text()
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)
    loader.close()


def test_workers_of_a_pass_that_a_loaded_state_has_replaced_end(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 29), workers=1)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    loader.pause_workers()
    assert multiprocessing.active_children() == []
    assert next(batches, None) is None


def test_a_paused_pass_that_another_one_has_replaced_is_an_error(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 29), workers=1)
    old = iter(loader)
    next(old)
    loader.pause_workers()
    new = iter(loader)
    next(new)
    with raises(ConfigError, "another pass"):
        next(old)
    loader.close()


@pytest.mark.parametrize("end", [StreamingDataLoader.pause_workers, StreamingDataLoader.close])
def test_workers_of_an_older_pass_that_is_still_held_end(
    end: Callable[[StreamingDataLoader], None], tmp_path: Path
) -> None:
    loader = make_loader(write_dataset(tmp_path, 29), workers=1)
    old = iter(loader)
    next(old)
    new = iter(loader)
    first = next(new)
    assert len(multiprocessing.active_children()) == 2
    end(loader)
    assert multiprocessing.active_children() == []
    if end is StreamingDataLoader.pause_workers:
        with raises(ConfigError, "another pass"):
            next(old)
        rest = [batch["id"].tolist() for batch in new]
        whole = make_loader(tmp_path)
        whole.dataset.next_epoch = 1
        assert [first["id"].tolist(), *rest] == [batch["id"].tolist() for batch in whole]
    else:
        assert next(old, None) is next(new, None) is None


@pytest.mark.parametrize("persistent", [False, True])
def test_shards_of_ended_workers_do_not_count_as_open(persistent: bool, tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 29), workers=2, loader={"persistent_workers": persistent})
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.statistics().shards_open > 0
    loader.pause_workers()
    before = loader.statistics()
    assert before.shards_open == 0
    next(batches)
    after = loader.statistics()
    assert after.shards_open > 0
    assert after.batches == before.batches + 1
    loader.close()
    assert loader.statistics().shards_open == 0


def test_a_warning_about_batches_that_are_not_whole_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = {name: Stream(remote=str(write_dataset(tmp_path / name))) for name in "ab"}
    options: Options = {"streams": roots, "batching_method": "stratified"}
    before = make_loader(**options, batch_size=8)
    next(iter(before))
    loader = make_loader(**options, batch_size=4, workers=1)
    loader.load_state_dict(before.state_dict())
    assert epoch(loader, {0, 2})
    assert caplog.text.count("epoch 0 continues with global batches of 8 samples") == 1


def test_a_closed_loader_ends_a_paused_pass(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 29), workers=1)
    batches = iter(loader)
    next(batches)
    loader.pause_workers()
    loader.close()
    assert next(batches, None) is None


def test_without_workers_a_pause_changes_nothing(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, 29)
    loader, other = make_loader(root), make_loader(root)
    batches = iter(loader)
    seen = [next(batches)["id"].tolist()]
    loader.pause_workers()
    seen += [batch["id"].tolist() for batch in batches]
    assert seen == [batch["id"].tolist() for batch in other]
