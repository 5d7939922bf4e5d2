"""Whoever looks on is told what is fetched before the first batch, by all processes that read."""

from __future__ import annotations

import threading
from itertools import chain
from pathlib import Path

import pytest

from lightning_streaming import StreamingDataLoader
from lightning_streaming.errors import StreamingError
from lightning_streaming.loading.arrivals import Arrivals, Fetched
from lightning_streaming.loading.dataloader import watch_first_download
from tests.helpers import ids, make_dataset, make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


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


def test_who_tells_never_waits_for_who_looks_on() -> None:
    looks = threading.Event()
    arrivals = Arrivals(lambda _: looks.wait(), 100_000)
    for _ in range(20_000):  # more than a pipe holds
        arrivals.tell(1, 0)
    looks.set()
    arrivals.close()
    arrivals.close()
    arrivals.tell(1, 0)
