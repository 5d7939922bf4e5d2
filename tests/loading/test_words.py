"""What ``repr`` shows of a dataset and a loader: streams, samples if they are known, and the place; no secrets."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.loading.dataloader import why_empty
from tests.helpers import make_dataset, make_loader, write_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 29)


def test_a_dataset_tells_its_streams_samples_and_place(root: Path) -> None:
    dataset = make_dataset(streams={"a": Stream(remote=str(root)), "b": Stream(local=str(root))})
    before = f"<StreamingDataset: a='{root}', b='{root}'; index not read; at epoch 0, sample 0>"
    assert repr(dataset) == before
    assert len(dataset) == 58
    assert repr(dataset) == before.replace("index not read", "58 samples")
    dataset.next_epoch = 3
    assert repr(dataset).endswith("at epoch 3, sample 0>")


def test_a_loader_tells_where_the_next_batch_begins(root: Path) -> None:
    loader = make_loader(root)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert repr(loader) == (
        f"<StreamingDataLoader: batch_size=4, num_workers=0; at epoch 0, sample 8; of <StreamingDataset: 0='{root}'; "
        "29 samples; at epoch 0, sample 8>>"
    )


def test_many_streams_are_counted(root: Path) -> None:
    dataset = StreamingDataset(streams={f"s{number}": Stream(remote=str(root)) for number in range(120)})
    assert "and 116 more streams; index not read" in repr(dataset)
    assert len(repr(dataset)) < 2000


def test_nothing_is_read_for_it_and_nothing_secret_told(tmp_path: Path) -> None:
    dataset = StreamingDataset(
        streams={
            "web": Stream(
                remote="https://me:hunter2@nowhere.invalid/a?sig=hunter2", storage_options={"key": "hunter2"}
            ),
            "gone": Stream(remote=str(tmp_path / "gone")),
        }
    )
    shown = f"{dataset!r} {StreamingDataLoader(dataset, batch_size=1)!r}"
    assert "hunter2" not in shown
    assert "https://nowhere.invalid/a" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("batch_size", [30, 100])
def test_a_loader_that_leaves_out_its_only_batch_says_so(
    root: Path, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(root, batch_size=batch_size, drop_last=True)
    with caplog.at_level(logging.WARNING):
        assert list(loader) == []
    assert (
        "drop_last=True leaves no batch at all: an epoch has 29 samples for the only rank, and a batch has "
        f"{batch_size}; pass drop_last=False, a batch_size of 29 at most, or more data"
    ) in caplog.text
    assert why_empty(make_loader(root, batch_size=29, drop_last=True)) is None
    assert why_empty(make_loader(root, batch_size=30)) is None
