"""Whoever looks on is told what is fetched before the first batch, by all processes that read."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from lightning_streaming import StreamingDataLoader
from lightning_streaming.errors import StreamingError
from lightning_streaming.reading.loader import watch_first_download
from lightning_streaming.reading.measures import DownloadReporter, FetchCounts, Fetched
from tests.helpers import ids, make_dataset, make_loader, write_dataset

Process = multiprocessing.get_context("fork").Process
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.mark.nightly
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")])
def test_what_is_fetched_before_the_first_batch_is_told(tmp_path: Path, workers: int, method: str | None) -> None:
    data, heard = write_dataset(tmp_path / "data"), list[Fetched | None]()
    dataset = make_dataset(data, local=str(tmp_path / "cache"))
    loader = StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=method)
    watch_first_download(loader, heard.append)
    batches = iter(loader)
    first = next(batches)
    told = [one for one in heard if one is not None]
    assert heard[len(told) :] == [None], "nothing more is told after the first batch"
    last = told[-1]
    assert 1 <= last.here <= last.begun <= last.of == 6
    assert last.bytes >= last.here * 100
    assert last.seconds > 0
    assert [one.begun for one in told] == sorted(one.begun for one in told)
    assert sorted(chain(*ids([first, *batches]))) == list(range(29))
    assert heard[-1] is None
    assert len(heard) == len(told) + 1
    loader.close()


def test_a_second_pass_and_data_that_is_here_tell_nothing(tmp_path: Path) -> None:
    data, heard = write_dataset(tmp_path / "data"), list[Fetched | None]()
    loader = make_loader(data)
    watch_first_download(loader, heard.append)
    assert len(ids(loader)) == len(ids(loader)) == 8
    assert heard == [None]


def test_the_end_is_told_where_the_first_batch_fails(tmp_path: Path) -> None:
    data, heard = write_dataset(tmp_path / "data"), list[Fetched | None]()
    for shard in data.glob("*.mds"):
        shard.write_bytes(shard.read_bytes()[:-1])
    loader = make_loader(data, workers=1, local=str(tmp_path / "cache"), download_retry=0)
    watch_first_download(loader, heard.append)
    with pytest.raises(StreamingError):
        next(iter(loader))
    assert heard[-1] is None
    assert all(one is None or one.here == 0 for one in heard)


def test_workers_that_live_on_fetch_as_many_shards_as_they_like(tmp_path: Path) -> None:
    counts, looks, heard = FetchCounts(2), threading.Event(), list[Fetched | None]()

    def look(fetched: Fetched | None) -> None:
        heard.append(fetched)
        looks.wait(20)

    def fetch() -> None:
        tell = counts.counter(1)
        for _ in range(20_000):
            tell(1, 0)
            tell(0, 100)

    watch = DownloadReporter(look, counts, 100_000)
    first, second = (Process(target=fetch) for _ in range(2))
    first.start()
    first.join(20)
    assert counts.sums() == (20_000, 20_000, 2_000_000)  # though nobody has looked on yet
    looks.set()
    watch.close()
    watch.close()
    assert heard[-2:] == [Fetched(20_000, 20_000, 100_000, 2_000_000, heard[-2].seconds), None]  # type: ignore[union-attr]
    second.start()
    second.join(20)
    assert second.exitcode == 0
    assert counts.sums()[0] == 40_000


def test_threads_of_a_process_count_together() -> None:
    counts = FetchCounts(1)
    tell = counts.counter(0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: tell(1, 3), range(8000)))
    assert counts.sums() == (8000, 0, 24_000)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_was_watched_is_pickled(tmp_path: Path, workers: int) -> None:
    dataset = make_dataset(write_dataset(tmp_path / "data"), local=str(tmp_path / "cache"))
    loader = StreamingDataLoader(dataset, num_workers=workers)
    watch_first_download(loader, lambda _: None)
    list(loader)
    loader.close()
    assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset)
