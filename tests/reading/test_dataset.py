"""The dataset by itself: samples by id, epochs, its place, and reading through a plain torch DataLoader.

What datasets and loaders tell of themselves.

What ``repr`` shows of a dataset and a loader: streams, samples if they are known, and the place; no secrets.

Settings that work and do not suit: told of once, before the first batch, with what to do.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.reading.loader import no_batch_error
from tests.helpers import ids, json_copy, make_dataset, make_loader, raises, read_epochs, write_dataset
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


@pytest.fixture(scope="module")
def epochs(root: Path) -> list[list[int]]:
    """Four epochs, in order."""
    loader = make_loader(root, batch_size=29)
    return [ids(loader)[0] for _ in range(4)]


def _flat(batches: Any) -> list[int]:
    return [one for batch in ids(batches) for one in batch]


def test_making_a_dataset_touches_nothing(tmp_path: Path) -> None:
    script = (
        "import socket, sys, threading\n"
        "opened = []\n"
        "forbidden = {'open', 'os.mkdir', 'socket.connect', 'subprocess.Popen', 'os.fork', 'os.posix_spawn'}\n"
        "from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset\n"
        "sys.addaudithook(lambda name, args: opened.append((name, args)) if name in forbidden else None)\n"
        "stream = Stream(remote='s3://nowhere/at/all', local=sys.argv[1] + '/cache')\n"
        "dataset = StreamingDataset(streams={'a': stream}, shuffle=True, batch_size=4, replication=2)\n"
        "loader = StreamingDataLoader(dataset, num_workers=2)\n"
        "iter(loader)\n"
        "assert not opened, opened\n"
        "assert threading.active_count() == 1\n"
        "assert not {'lightning', 's3fs', 'fsspec'} & set(sys.modules)\n"
        "import torch.distributed\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    environment = {"PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True)
    assert not list(tmp_path.iterdir())


def test_the_warning_of_a_deprecated_order_names_the_line_that_asks_for_it(root: Path) -> None:
    class Own(StreamingDataset):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    for made in (StreamingDataset, Own):
        with pytest.warns(DeprecationWarning, match="py1b") as told:
            made(remote=str(root), shuffle_algo="py1b")
        assert told[0].filename == __file__


def test_size_counts_stored_samples_and_epoch_size_drawn_ones(root: Path) -> None:
    streams = [Stream(remote=str(root), repeat=0.5), Stream(remote=str(root), repeat=2)]
    dataset = make_dataset(streams=streams, world=World(ranks_per_node=3))
    assert (dataset.size, dataset.epoch_size, len(dataset)) == (58, 14 + 58, 24)


def test_len_counts_ranks_that_read_the_same_once(root: Path) -> None:
    assert len(make_dataset(root, world=World(ranks_per_node=4), replication=2)) == 15


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (0, 0),
        (-1, 28),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, -10), [28, 18, 8]),
        (slice(40, 50), []),
        ([3, -1, 3], [3, 28, 3]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([slice(0, 2), 5], [[0, 1], 5]),
        (np.array([5, -2]), [5, 27]),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        ([], []),
    ],
)
def test_samples_are_found_by_id(root: Path, index: Any, wanted: Any) -> None:
    def unpack(sample: Any) -> Any:
        return [unpack(one) for one in sample] if isinstance(sample, list) else sample["id"]

    assert unpack(make_dataset(root)[index]) == wanted


@pytest.mark.parametrize("index", [29, -30, np.int64(29), [0, 29], np.array([[0], [-30]])])
def test_an_id_out_of_range_is_an_index_error(root: Path, index: Any) -> None:
    with pytest.raises(SampleIndexError, match="the dataset has 29 samples"):
        make_dataset(root)[index]


@pytest.mark.parametrize("index", ["0", 1.0, None, (0, 1), [0.5], np.array([0.5]), np.array([True])])
def test_an_index_of_another_type_is_refused(root: Path, index: Any) -> None:
    with pytest.raises(ConfigError, match="a sample index must be an int, slice, list or array"):
        make_dataset(root)[index]


def test_samples_by_id_are_read_without_order_or_epoch(root: Path) -> None:
    dataset = make_dataset(root, transform=lambda sample: -sample["id"])
    before = dataset.state_dict()
    assert (dataset[4], dataset.get_item(4)) == (-4, {"id": 4})
    assert dataset.state_dict() == before


def test_iterating_reads_epoch_after_epoch(root: Path, epochs: list[list[int]]) -> None:
    dataset = make_dataset(root)
    assert [[sample["id"] for sample in dataset] for _ in range(3)] == epochs[:3]
    assert [sorted(epoch) for epoch in epochs] == [list(range(29))] * 4
    assert dataset.next_epoch == 3


def test_leaving_a_pass_early_begins_the_next_epoch(root: Path, epochs: list[list[int]]) -> None:
    dataset = make_dataset(root)
    next(iter(dataset))
    assert [sample["id"] for sample in dataset] == epochs[1]


def test_next_epoch_can_be_set(root: Path, epochs: list[list[int]]) -> None:
    dataset = make_dataset(root)
    samples = iter(dataset)
    next(samples)
    dataset.next_epoch = 3
    assert (dataset.next_epoch, dataset.state_dict()["epoch"], dataset.state_dict()["sample_in_epoch"]) == (3, 3, 0)
    assert [next(samples)["id"]] == epochs[0][1:2]  # a pass under way is not disturbed
    assert [sample["id"] for sample in dataset] == epochs[3]
    with pytest.raises(ConfigError, match="next_epoch"):
        dataset.next_epoch = -1


def test_a_batch_size_is_needed_to_iterate(root: Path) -> None:
    dataset = make_dataset(root, batch_size=None)
    assert len(dataset) == 29
    with pytest.raises(ConfigError, match="pass batch_size="):
        iter(dataset)


@pytest.mark.parametrize("read", [0, 1, 11, 28])
def test_state_counts_what_was_taken_in_this_process(root: Path, epochs: list[list[int]], read: int) -> None:
    samples = iter(dataset := make_dataset(root))
    assert [next(samples)["id"] for _ in range(read)] == epochs[0][:read]
    state = dataset.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (0, read)
    resumed = make_dataset(root)
    resumed.load_state_dict(state)
    assert [sample["id"] for sample in resumed] == epochs[0][read:]
    assert [sample["id"] for sample in resumed] == epochs[1]


def test_state_may_be_told_how_much_was_read(root: Path) -> None:
    dataset = make_dataset(root)
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 2, "sample_in_epoch": 8})
    iter(dataset)
    told = [dataset.state_dict(12), dataset.state_dict(12, False), dataset.state_dict(12, from_beginning=True)]
    assert [(state["epoch"], state["sample_in_epoch"]) for state in told] == [(2, 20), (2, 20), (2, 12)]


def test_the_end_of_an_epoch_is_saved_as_the_beginning_of_the_next(root: Path) -> None:
    dataset = make_dataset(root, world=World(ranks_per_node=4))
    assert len(list(dataset)) == 8  # 4 * 8 = 32 samples, three of them read twice
    state = dataset.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)


@pytest.mark.parametrize("start", [0, 1, 7, 28])
def test_a_pass_that_began_between_two_rounds_of_the_ranks_ends_where_the_next_begins(root: Path, start: int) -> None:
    dataset = make_dataset(root, world=World(ranks_per_node=8), num_canonical_nodes=8)
    dataset.load_state_dict({**dataset.state_dict(), "sample_in_epoch": start})
    assert len(list(dataset)) * 8 >= 29 - start
    state = dataset.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)


def test_saving_right_after_loading_gives_the_same_state(root: Path) -> None:
    samples = iter(dataset := make_dataset(root))
    next(samples)
    state = {**dataset.state_dict(), "epoch": 4, "sample_in_epoch": 13}
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state


def test_a_look_before_does_not_count_in_the_pass_of_workers(root: Path) -> None:
    dataset = make_dataset(root)
    samples = iter(dataset)
    next(samples)
    batches = iter(DataLoader(dataset, batch_size=4, num_workers=2))
    next(batches)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["sample_in_epoch"]) == (1, 0)


def test_the_place_under_a_loader_is_counted_from_where_its_pass_began(root: Path) -> None:
    dataset = make_dataset(root)
    dataset.load_state_dict({**dataset.state_dict(), "sample_in_epoch": 4})
    batches = iter(StreamingDataLoader(dataset, num_workers=2))
    next(batches)
    assert dataset.state_dict(4)["sample_in_epoch"] == 8
    assert dataset.state_dict(4)["epoch"] == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_data_loader_reads_epoch_after_epoch(root: Path, epochs: list[list[int]], workers: int) -> None:
    dataset = make_dataset(root)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    assert [_flat(loader), _flat(loader)] == epochs[:2]
    next(iter(loader))
    assert (dataset.next_epoch, dataset.state_dict(4)["sample_in_epoch"]) == (3, 4)
    assert _flat(loader) == epochs[3]


def test_workers_that_do_not_persist_know_the_epoch_too(root: Path, epochs: list[list[int]]) -> None:
    loader: DataLoader[Any] = DataLoader(make_dataset(root), batch_size=4, num_workers=2)
    assert [_flat(loader), _flat(loader)] == epochs[:2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_data_loader_resumes(root: Path, workers: int) -> None:
    batches, states = read_epochs(make_loader(root), 2)
    dataset = make_dataset(root)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    for place in (3, 11, 1):
        dataset.load_state_dict(states[place])
        assert (ids(loader) + ids(loader))[: 16 - place] == batches[place:]


def test_a_plain_data_loader_may_follow_ours(root: Path, epochs: list[list[int]]) -> None:
    dataset = make_dataset(root)
    ours = StreamingDataLoader(dataset, num_workers=2)
    plain: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=2)
    assert [_flat(ours), _flat(plain), _flat(plain), _flat(ours)] == epochs


def test_looking_into_the_dataset_does_not_repeat_the_pass_of_a_loader(root: Path, epochs: list[list[int]]) -> None:
    dataset = make_dataset(root)
    loader = StreamingDataLoader(dataset, num_workers=2)
    assert _flat(loader) == epochs[0]
    assert [sample["id"] for sample in dataset] == epochs[1]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
@pytest.mark.parametrize("kind", [DataLoader, StreamingDataLoader])
def test_a_copy_goes_on_by_itself(root: Path, epochs: list[list[int]], copied: Any, kind: Any) -> None:
    original = make_dataset(root)
    assert [sample["id"] for sample in original] == epochs[0]
    other = copied(original)
    loader = kind(other, batch_size=4, num_workers=2, persistent_workers=True)
    assert [_flat(loader), _flat(loader)] == epochs[1:3]
    assert (original.next_epoch, other.next_epoch) == (1, 3)


def test_several_datasets_read_one_directory_at_once(root: Path, epochs: list[list[int]]) -> None:
    several = [make_dataset(root) for _ in range(3)]
    assert [[sample["id"] for sample in together] for together in zip(*several, strict=True)] == [
        [one] * 3 for one in epochs[0]
    ]


def test_a_closed_dataset_opens_again_what_it_needs(root: Path) -> None:
    dataset = make_dataset(root)
    samples = iter(dataset)
    next(samples)
    dataset.close()
    dataset.close()
    assert next(samples, None) is None
    assert dataset[3] == {"id": 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_others_may_count_the_epochs(workers: int, root: Path, epochs: list[list[int]]) -> None:
    dataset = make_dataset(root)
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    for epoch in (2, 0, 0, 3):
        dataset.set_epoch(epoch)
        assert _flat(loader) == epochs[epoch]
    with raises(ConfigError, "whole number of at least 0", "got -1"):
        dataset.set_epoch(-1)


class TellsItsState(StreamingDataset):
    """Asks for its place where it is read."""

    def __iter__(self) -> Any:
        self.state_dict()
        return super().__iter__()


def test_a_worker_does_not_tell_the_place_of_all(root: Path) -> None:
    dataset = TellsItsState(remote=str(root), batch_size=4)
    assert len(_flat(DataLoader(dataset, batch_size=4))) == 29
    with raises(ConfigError, "in a worker", "StreamingDataLoader"):
        next(iter(DataLoader(dataset, batch_size=4, num_workers=1)))


def test_a_dataset_tells_all_it_was_asked_for() -> None:
    asked = set(inspect.signature(StreamingDataset).parameters)
    told = make_dataset("/data").config()
    told_of_streams = {"remote", "local", "join", "stream_name", "stream_config"}
    assert told.keys() == asked - {"world", *told_of_streams} | {"type"}
    assert told["streams"]["0"]["remote"] == "/data"


def test_telling_reads_nothing_and_goes_through_json() -> None:
    told = make_dataset("s3://nowhere/at-all", predownload=np.int64(4), columns=("id",)).config()
    assert json_copy(told) == told


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"epoch_size": "1.5k"}, {"epoch_size": 1500}),
        ({"cache_limit": "1mb"}, {"cache_limit": 1 << 20}),
        ({"columns": ("id",)}, {"columns": ["id"]}),
    ],
)
def test_the_same_wish_in_other_words_is_told_alike(one: dict[str, Any], same: dict[str, Any]) -> None:
    told = make_dataset("/data", **one).config()
    assert told == make_dataset("/data", **same).config() != make_dataset("/data").config()


def test_no_secret_is_told() -> None:
    streams = {
        "a": Stream(remote="https://user:secret@host/a?token=secret", storage={"options": {"key": "secret"}}),
        "b": Stream(remote="s3://b", local="/cache"),
    }
    one = make_dataset("s3://c", storage={"options": {"secret": "secret"}})
    assert "secret" not in json.dumps([StreamingDataset(streams=streams).config(), one.config()])


def _transform(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class _Transform:
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


@pytest.mark.parametrize(
    ("transform", "name"),
    [(_transform, "_transform"), (_Transform(), "_Transform"), (partial(_transform), "functools.partial")],
)
def test_functions_are_told_by_name(transform: Callable[..., Any], name: str) -> None:
    assert make_dataset("/data", transform=transform).config()["transform"].endswith(name)


def test_what_a_dataset_tells_is_a_copy() -> None:
    dataset = make_dataset("/data")
    dataset.config()["streams"].clear()
    assert dataset.config()["streams"]


@pytest.fixture(scope="module")
def root_of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 29)


def test_a_dataset_tells_its_streams_samples_and_place(root_of_words: Path) -> None:
    dataset = make_dataset(streams={"a": Stream(remote=str(root_of_words)), "b": Stream(local=str(root_of_words))})
    before = f"<StreamingDataset: a='{root_of_words}', b='{root_of_words}'; index not read; at epoch 0, sample 0>"
    assert repr(dataset) == before
    assert len(dataset) == 58
    assert repr(dataset) == before.replace("index not read", "58 samples")
    dataset.next_epoch = 3
    assert repr(dataset).endswith("at epoch 3, sample 0>")


def test_a_loader_tells_where_the_next_batch_begins(root_of_words: Path) -> None:
    loader = make_loader(root_of_words)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert repr(loader) == (
        f"<StreamingDataLoader: batch_size=4, num_workers=0; at epoch 0, sample 8; of "
        f"<StreamingDataset: 0='{root_of_words}'; 29 samples; at epoch 0, sample 8>>"
    )


def test_many_streams_are_counted(root_of_words: Path) -> None:
    dataset = StreamingDataset(streams={f"s{number}": Stream(remote=str(root_of_words)) for number in range(120)})
    assert "and 116 more streams; index not read" in repr(dataset)
    assert len(repr(dataset)) < 2000


def test_nothing_is_read_for_it_and_nothing_secret_told(tmp_path: Path) -> None:
    dataset = StreamingDataset(
        streams={
            "web": Stream(
                remote="https://me:hunter2@nowhere.invalid/a?sig=hunter2", storage={"options": {"key": "hunter2"}}
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
    root_of_words: Path, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(root_of_words, batch_size=batch_size, drop_last=True)
    with caplog.at_level(logging.WARNING):
        assert list(loader) == []
    assert (
        "drop_last=True leaves no batch at all: an epoch has 29 samples for the only rank, and a batch has "
        f"{batch_size}; pass drop_last=False, a batch_size of 29 at most, or more data"
    ) in caplog.text
    assert no_batch_error(make_loader(root_of_words, batch_size=29, drop_last=True)) is None
    assert no_batch_error(make_loader(root_of_words, batch_size=30)) is None


LOGGER = "lightning_streaming.reading.plan"


UNSUITED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "canonical nodes": ({"num_canonical_nodes": 30}, ["29 samples, fewer than its 30 canonical", "of at most 29"]),
    "default nodes": ({"shuffle_algo": "py1s"}, ["fewer than its 64 canonical nodes", "num_canonical_nodes="]),
    "epoch": ({"epoch_size": 3, "num_canonical_nodes": 4}, ["an epoch has 3 samples", "of at most 3"]),
    "ranks": (
        {"epoch_size": 3, "world": World(ranks_per_node=4, rank=0)},
        ["3 samples, fewer than the 4 ranks", "larger epoch_size="],
    ),
    "block": ({"shuffle_block_size": 4}, ["shuffle_block_size=4 is below the 5 samples", "pass at least 5"]),
}
SUITED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "canonical nodes": {"num_canonical_nodes": 29},
    "ranks": {"epoch_size": 4, "world": World(ranks_per_node=4, rank=0)},
    "block": {"shuffle_block_size": 5},
    "no shuffle": {"shuffle": False, "shuffle_block_size": 4},
    "other shuffle": {"shuffle_algo": "py1br", "shuffle_block_size": 4},
    "nothing to fetch": {"predownload": 1},
    "another rank": {"epoch_size": 3, "world": World(ranks_per_node=4, rank=1)},
}


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.rotate(4)
@pytest.mark.parametrize("name", UNSUITED)
@pytest.mark.parametrize("workers", [None, 0, 2], ids=["dataset", "loader", "workers"])
def test_what_does_not_suit_is_told_once(
    root: Path, caplog: pytest.LogCaptureFixture, name: str, workers: int | None
) -> None:
    settings, words = UNSUITED[name]
    if workers is None:
        dataset = make_dataset(root, **settings)
        for _ in range(2):
            assert list(dataset)
    else:
        with closing(make_loader(root, workers=workers, **settings)) as loader:
            for _ in range(2):
                assert list(loader)
    (told,) = _told(caplog)
    assert [word for word in ["streams 0: ", *words] if word not in told] == []
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("workers", [0, 1])
def test_so_it_is_to_who_reads_through_torchs_loader(
    root: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    handler = logging.StreamHandler()  # workers write to the stderr that they inherit
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        loader: DataLoader[Any] = DataLoader(
            make_dataset(root, shuffle_block_size=4), batch_size=4, num_workers=workers
        )
        for _ in range(2):
            assert len(list(loader)) == 8
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    assert capfd.readouterr().err.count("shuffle_block_size=4 is below") == 1


@pytest.mark.parametrize("name", SUITED)
def test_what_suits_is_not_talked_of(root: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert list(make_dataset(root, **SUITED[name]))
    assert _told(caplog) == []


@pytest.mark.parametrize(("predownload", "count"), [(3, 1), (4, 0), (None, 0)])
def test_fetching_less_ahead_than_a_batch_is_told_of(
    http_store: HttpStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, predownload: int | None, count: int
) -> None:
    write_dataset(http_store.root, 10)
    dataset = StreamingDataset(remote=http_store.url, local=str(tmp_path), batch_size=4, predownload=predownload)
    assert len(list(dataset)) == 10
    assert len(_told(caplog)) == count
    assert all("predownload=3 is below batch_size=4" in told and "at least 4" in told for told in _told(caplog))
