"""What a loader says of itself: counts that are exact, waits that add up, in whichever process batches are made."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.logs import LoaderStatistics, WaitTimes
from lightning_streaming.reading.measures import split_wait
from tests.helpers import make_loader, write_dataset
from tests.servers import HttpStore

SECONDS = st.floats(0, 1e6)


def split(wait: float, download: float, decompress: float, work: float, is_first: bool) -> WaitTimes:
    """The parts of the wait for one batch."""
    parts = split_wait(
        np.array([wait], np.float64),
        download=np.array([download], np.float64),
        decompress=np.array([decompress], np.float64),
        work=np.array([work], np.float64),
        are_first=np.array([is_first]),
    )
    return WaitTimes(*(float(part[0]) for part in parts))


@given(wait=SECONDS, download=SECONDS, decompress=SECONDS, other=SECONDS, is_first=st.booleans())
def test_the_parts_of_a_wait_add_up_to_it(
    wait: float, download: float, decompress: float, other: float, is_first: bool
) -> None:
    work = download + decompress + other
    parts = split(wait, download, decompress, work, is_first)
    assert parts.total == pytest.approx(wait)
    assert min(parts) >= -1e-6
    assert parts.download <= download * (1 + 1e-9)
    assert parts.decompress <= decompress * (1 + 1e-9)
    assert parts.queue + parts.start == pytest.approx(max(0, wait - work))
    assert (parts.queue if is_first else parts.start) == 0


@pytest.mark.parametrize(
    ("wait", "is_first", "parts"),
    [
        (8, False, (1, 0, 3, 4, 0)),
        (8, True, (1, 0, 3, 0, 4)),
        (2, False, (0.5, 0, 1.5, 0, 0)),
        (0, False, (0, 0, 0, 0, 0)),
    ],
)
def test_a_wait_is_shared_out_like_the_work(wait: float, is_first: bool, parts: tuple[float, ...]) -> None:
    assert split(wait, 1, 0, 4, is_first) == parts


def test_statistics_can_be_added_and_taken_apart() -> None:
    first = LoaderStatistics(batches=2, samples=8, samples_per_stream={"a": 8}, wait=WaitTimes(decode=1), shards_open=3)
    more = LoaderStatistics(
        batches=1, samples=4, samples_per_stream={"a": 1, "b": 3}, wait=WaitTimes(decode=2, queue=1), shards_open=2
    )
    both = first + more
    assert both.wait == WaitTimes(decode=3, queue=1)
    assert (both.batches, both.samples, both.samples_per_stream) == (3, 12, {"a": 9, "b": 3})
    assert both.shards_open == 2
    assert both.since(first) == more


def stored_bytes(root: Path, form: str) -> int:
    """Bytes of a dataset's data files, "raw" or "zip"."""
    shards = json.loads((root / "index.json").read_text())["shards"]
    return sum(shard[f"{form}_data"]["bytes"] for shard in shards)


def fetching_loader(tmp_path: Path, workers: int, **loader: Any) -> StreamingDataLoader:
    """A loader of 29 compressed samples in 6 shards, none of which is on this node yet."""
    write_dataset(tmp_path / "remote", compression="zstd")
    return make_loader(tmp_path / "remote", local=str(tmp_path / "local"), workers=workers, loader=loader)


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")], ids=["no worker", "fork", "spawn"]
)
def test_an_epoch_is_counted_exactly(tmp_path: Path, workers: int, method: str | None) -> None:
    loader = fetching_loader(tmp_path, workers, multiprocessing_context=method)
    assert loader.statistics() == LoaderStatistics(samples_per_stream={"0": 0})
    batches = len(list(loader))
    told = loader.statistics()
    assert (told.batches, told.samples, told.samples_per_stream) == (batches, 29, {"0": 29})
    assert abs(told.sample_bytes - stored_bytes(tmp_path / "remote", "raw")) <= batches  # rounded in each batch
    assert told.fetched_bytes == stored_bytes(tmp_path / "remote", "zip")
    assert told.shards_opened == told.shards_open == 6 * max(1, workers)
    assert told.wait.decode > 0
    assert told.wait.start > 0


def test_more_batches_than_are_noted_at_once_are_counted(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path, 600), batch_size=1)
    counted = [loader.statistics().samples for batches, _ in enumerate(loader, start=1) if batches in (255, 256, 600)]
    assert counted == [255, 256, 600]


def test_what_is_on_the_node_is_a_hit(tmp_path: Path) -> None:
    loader = fetching_loader(tmp_path, 0)
    list(loader)
    loader.close()
    first = loader.statistics()
    list(loader)
    second = loader.statistics().since(first)
    assert (first.shards_opened, first.cache_hits) == (6, 0)
    assert (second.shards_opened, second.cache_hits, second.fetched_bytes) == (6, 6, 0)
    assert first.wait.download > 0
    assert first.wait.decompress + first.wait.decode > 0
    assert second.wait.download == second.wait.decompress == 0


def test_shards_that_are_read_in_place_are_hits(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path))
    list(loader)
    told = loader.statistics()
    assert (told.shards_opened, told.cache_hits, told.fetched_bytes) == (6, 6, 0)


def test_shards_that_are_decompressed_from_a_directory_are_no_hits(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", compression="zstd")
    loader = make_loader(local=str(tmp_path / "data"))
    list(loader)
    told = loader.statistics()
    assert (told.shards_opened, told.cache_hits, told.fetched_bytes) == (6, 0, 0)
    assert told.wait.decompress > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_counted_by_stream_as_they_are_handed_out(tmp_path: Path, workers: int) -> None:
    write_dataset(tmp_path / "a", 40)
    write_dataset(tmp_path / "b", 20, first_id=1000)
    streams = {"a": Stream(remote=str(tmp_path / "a")), "b": Stream(remote=str(tmp_path / "b"))}
    loader = make_loader(streams=streams, workers=workers)
    handed_out = {"a": 0, "b": 0}
    for batches, batch in enumerate(loader, start=1):
        of_b = int((batch["id"] >= 1000).sum())
        handed_out["a"] += len(batch["id"]) - of_b
        handed_out["b"] += of_b
        told = loader.statistics()  # workers are ahead, and what they have made does not count yet
        assert (told.batches, told.samples_per_stream) == (batches, handed_out)
    assert handed_out == {"a": 40, "b": 20}


@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_that_live_on_are_read_after_a_pass_that_was_given_up(tmp_path: Path, drop_last: bool) -> None:
    loader = make_loader(write_dataset(tmp_path), workers=2, drop_last=drop_last, loader={"persistent_workers": True})
    assert len(list(islice(loader, 3))) == 3
    given_up = loader.statistics()
    assert (given_up.batches, given_up.samples) == (3, 12)
    list(loader)
    whole = loader.statistics().since(given_up)
    assert (whole.batches, whole.samples) == ((7, 28) if drop_last else (8, 29))
    loader.close()


def slow(sample: Any) -> Any:
    """A transform that takes a hundredth of a second."""
    time.sleep(0.01)
    return sample


def slow_collate(samples: list[Any]) -> Any:
    """As slow for a whole batch."""
    time.sleep(0.01)
    return default_collate(samples)


def test_transform_and_collate_are_a_part_of_decoding(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path), transform=slow, loader={"collate_fn": slow_collate})
    batches = len(list(loader))
    assert loader.statistics().wait.decode >= 0.01 * (29 + batches)
    assert loader.collate_fn is slow_collate


def test_a_wait_for_a_slow_server_is_a_download(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root / "data", 4)
    http_store.fail(r"\.mds$", "stall", seconds=0.3, times=1)
    loader = make_loader(f"{http_store.url}/data", local=str(tmp_path / "local"))
    assert len(list(loader)) == 1
    assert loader.statistics().wait.download >= 0.2
