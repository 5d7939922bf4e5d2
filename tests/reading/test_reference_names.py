"""What a dataset tells of itself by the names that MosaicML Streaming has, and that telling costs nothing.

Three scripts as users of MosaicML Streaming write them: the line that imports is changed, and nothing else.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_streaming import MDSWriter, Stream, StreamingDataset, World
from lightning_streaming.reading.reference_names import ReferenceNames, readonly_property
from tests.helpers import make_dataset, make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SIZES = {"a": 29, "b": 12}
ASKED: dict[str, tuple[Any, Any]] = {
    "predownload": (8, 8),
    "cache_limit": ("1mb", 1 << 20),
    "sampling_method": ("fixed", "fixed"),
    "sampling_granularity": (3, 3),
    "partition_algo": ("orig", "orig"),
    "num_canonical_nodes": (2, 2),
    "batch_size": (4, 4),
    "shuffle": (True, True),
    "shuffle_algo": ("py1br", "py1br"),
    "shuffle_seed": (7, 7),
    "shuffle_block_size": (64, 64),
    "batching_method": ("per_stream", "per_stream"),
    "allow_unsafe_types": (True, True),
    "replication": (2, 2),
}
"""Argument: what is asked, and what is told of it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, samples in SIZES.items():
        write_dataset(root / name, samples)
    return root


@pytest.fixture
def dataset(root: Path) -> Iterator[StreamingDataset]:
    streams = {name: Stream(remote=str(root / name), proportion=share) for name, share in (("a", 1), ("b", 3))}
    made = make_dataset(streams=streams, epoch_size=22, world=World(ranks_per_node=2))
    yield made
    made.close()


@pytest.mark.parametrize("name", ASKED)
def test_what_was_asked_is_an_attribute(name: str) -> None:
    asked, told = ASKED[name]
    dataset = StreamingDataset(remote="s3://nowhere/at-all", **{"batch_size": 2, name: asked})
    assert getattr(dataset, name) == told


def test_data_is_numbered_over_streams_and_shards(dataset: StreamingDataset) -> None:
    numbers = {name: getattr(dataset, name) for name in vars(ReferenceNames) if "_per_" in name}
    assert {name: array.tolist() for name, array in numbers.items()} == {
        "samples_per_shard": [5, 5, 5, 5, 5, 4, 5, 5, 2],
        "sample_offset_per_shard": [0, 5, 10, 15, 20, 25, 29, 34, 39],
        "stream_per_shard": [0] * 6 + [1] * 3,
        "samples_per_stream": [29, 12],
        "shards_per_stream": [6, 3],
        "sample_offset_per_stream": [0, 29],
        "shard_offset_per_stream": [0, 6],
    }
    assert {array.dtype for array in numbers.values()} == {np.dtype(np.int64)}
    assert (dataset.num_samples, dataset.size, dataset.num_shards, dataset.num_streams) == (41, 41, 9, 2)
    assert (dataset.epoch_size, dataset.length, len(dataset)) == (22, 11, 11)
    assert [shard.samples for shard in dataset.shards] == dataset.samples_per_shard.tolist()
    assert dataset.max_shard_size_across_all_streams == max(shard.raw_data.bytes for shard in dataset.shards)


def test_defaults_are_told_once_a_pass_has_settled_them(root: Path) -> None:
    dataset = make_dataset(root / "a", shuffle_block_size=None, world=World(num_nodes=2))
    names = "num_canonical_nodes", "shuffle_block_size", "initial_physical_nodes"
    assert [getattr(dataset, name) for name in names] == [None, None, None]
    next(iter(dataset))
    assert [getattr(dataset, name) for name in names] == [2, 2_000_000, 2]
    dataset.close()


def test_after_a_resume_what_was_saved_is_told(root: Path) -> None:
    saved = make_loader(root / "a", shuffle_seed=3, world=World(num_nodes=2)).state_dict()
    dataset = make_dataset(root / "a")
    dataset.load_state_dict(saved)
    assert (dataset.shuffle_seed, dataset.num_canonical_nodes, dataset.initial_physical_nodes) == (3, 2, 2)


@pytest.mark.parametrize(("shuffle", "method", "changes"), [(1, "balanced", 1), (1, "fixed", 0), (0, "balanced", 0)])
def test_whether_epochs_differ(shuffle: int, method: Any, changes: int) -> None:
    dataset = StreamingDataset(remote="data", shuffle=bool(shuffle), sampling_method=method)
    assert dataset.epoch_seed_change is bool(changes)


def test_what_is_told_cannot_be_set_unnoticed(dataset: StreamingDataset) -> None:
    for name in (name for name, one in vars(ReferenceNames).items() if isinstance(one, readonly_property)):
        setattr(dataset, name, getattr(dataset, name))
        with pytest.raises(AttributeError, match=f"{name} is an argument of the dataset and read-only"):
            setattr(dataset, name, "another")


class Keeping(StreamingDataset):
    """Keeps its arguments, as many do, before and after its base does."""

    def __init__(self, shuffle: bool, **settings: Any) -> None:
        self.shuffle = shuffle
        super().__init__(shuffle=shuffle, **settings)
        self.shuffle = shuffle


def test_a_subclass_may_keep_its_arguments_too() -> None:
    assert Keeping(True, remote="data").shuffle is True


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("cache_limit", "1mb", 1 << 20),
        ("epoch_size", "0.02k", 20),
        ("epoch_size", None, 29),
        ("num_canonical_nodes", 0, 0),
        ("shuffle_block_size", None, None),
    ],
)
def test_an_argument_may_be_kept_as_it_was_given(root: Path, name: str, given: Any, told: Any) -> None:
    dataset = make_dataset(root / "a", **{"shuffle_block_size": None, name: given})
    setattr(dataset, name, given)
    assert getattr(dataset, name) == told
    with pytest.raises(AttributeError, match=f"{name} is an argument of the dataset"):
        setattr(dataset, name, "2k")


class Shadowing(StreamingDataset):
    """Has names of ours for things of its own."""

    shuffle = None  # type: ignore[assignment]  # that is the test

    def samples_per_stream(self) -> int:  # type: ignore[override]  # as well
        return 1


def test_a_subclass_may_have_such_a_name_for_its_own(root: Path) -> None:
    dataset = Shadowing(remote=str(root / "a"), shuffle=True)
    assert (dataset.shuffle, dataset.samples_per_stream()) == (None, 1)
    assert (dataset.epoch_seed_change, dataset.sample_offset_per_stream.tolist()) == (True, [0])


def test_streams_are_found_by_name_and_by_place(dataset: StreamingDataset) -> None:
    streams = dataset.streams
    assert streams[0] is streams["a"] is streams[-2]
    assert streams[1] is streams["b"] is streams[-1]
    assert (list(streams), len(streams), "a" in streams, "5" in streams) == (["a", "b"], 2, True, False)
    for wrong in ("c", 2, -3, 1.0, None):
        with pytest.raises(KeyError, match=r"there are 'a', 'b', by place from 0"):
            streams[wrong]  # type: ignore[index]  # that is the test


def test_weights_of_streams_are_worked_out_and_what_was_asked_stays(root: Path) -> None:
    asked = [Stream(remote=str(root / "a"), repeat=0.5), Stream(remote=str(root / "b"), choose=6)]
    dataset = make_dataset(streams=asked)
    told = [(stream.proportion, stream.repeat, stream.choose) for stream in dataset.streams.values()]
    assert told == [(14 / 20, 14 / 29, 14), (6 / 20, 6 / 12, 6)]
    assert [stream.asked for stream in dataset.streams.values()] == asked
    assert (asked[0].proportion, asked[0].repeat, asked[0].choose) == (None, 0.5, None)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, ("train", 5, 7.0, "sha1", True)),
        (
            {"split": "", "download_retry": 0, "download_timeout": 1.0, "validate_hash": "md5", "keep_zip": False},
            ("", 0, 1.0, "md5", False),
        ),
    ],
)
def test_a_stream_tells_what_it_really_uses(own: dict[str, Any], told: tuple[Any, ...]) -> None:
    stream = Stream(remote="s3://bucket/a", local="/cache", storage={"options": {"anon": True}}, **own)
    defaults = {"download_retry": 5, "download_timeout": 7.0, "validate_hash": "sha1", "keep_zip": True}
    one = StreamingDataset(streams=[stream], split="train", **defaults).streams[0]  # type: ignore[arg-type]  # each fits
    assert (one.split, one.download_retry, one.download_timeout, one.validate_hash, one.keep_zip) == told
    assert (one.remote, one.local, one.storage.options) == ("s3://bucket/a", "/cache", {"anon": True})


def test_a_stream_gives_its_shards_and_fetches_them(root: Path, tmp_path: Path) -> None:
    streams = {name: Stream(remote=str(root / name), local=str(tmp_path / name)) for name in SIZES}
    stream = make_dataset(streams=streams).streams["b"]
    shards = stream.get_shards()
    assert [shard.samples for shard in shards] == [5, 5, 2]
    assert stream.prepare_shard(1)
    assert stream.prepare_shard(shards[2])
    assert [path.name for path in sorted((tmp_path / "b").glob("shard*"))] == ["shard.00001.mds", "shard.00002.mds"]
    assert not list((tmp_path / "a").glob("shard*"))
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            stream.prepare_shard(wrong)


def test_streams_of_one_dataset_make_another(dataset: StreamingDataset) -> None:
    for streams in (dataset.streams, [*dataset.streams.values()]):
        other = make_dataset(streams=streams, epoch_size=22)
        assert [one.asked for one in other.streams.values()] == [one.asked for one in dataset.streams.values()]
        assert other.epoch_size == 22


def test_more_of_the_only_stream_is_said_in_its_config(root: Path) -> None:
    dataset = StreamingDataset(remote=str(root / "a"), stream_name="stream", stream_config={"repeat": 2, "remote": "x"})
    assert (dataset.epoch_size, dataset.streams[0].remote) == (58, str(root / "a"))
    dataset = StreamingDataset(local=str(root / "b"), stream_config={"remote": str(root / "a"), "split": "x"})
    assert (dataset.streams[0].remote, dataset.streams[0].local) == (str(root / "a"), str(root / "b"))
    passed_on = StreamingDataset(streams=[Stream(remote=str(root / "a"))], stream_name="stream", stream_config=None)
    assert passed_on.epoch_size == 29


def test_what_follows_from_no_data_is_told_without_any() -> None:
    dataset = StreamingDataset(remote="s3://nowhere/at-all", batch_size=2)
    of_data = {"num_samples", "length", "shards", "max_shard_size_across_all_streams"}
    for name in vars(ReferenceNames):
        if not name.startswith("_") and "_per_" not in name and name not in of_data:
            getattr(dataset, name)
    assert repr(dataset.streams) == "{'0': " + repr(Stream(remote="s3://nowhere/at-all")) + "}"
    assert "nowhere" in repr(dataset.streams[0])


def test_a_copy_tells_the_same(dataset: StreamingDataset) -> None:
    next(iter(dataset))
    settled = dataset.num_canonical_nodes, dataset.shuffle_block_size, dataset.initial_physical_nodes
    assert None not in settled
    for made in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert (made.num_canonical_nodes, made.shuffle_block_size, made.initial_physical_nodes) == settled
        assert made.streams[1].choose == dataset.streams[1].choose == 17
        assert made.samples_per_shard.tolist() == dataset.samples_per_shard.tolist()


TEXT = """
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from streaming import Stream, StreamingDataLoader, StreamingDataset


class WordTokenizer:
    pad_token_id = 0

    def __init__(self, max_length: int):
        self.model_max_length = max_length

    def __call__(self, text: str) -> Dict[str, List[int]]:
        numbers = [int(word) + 1 for word in text.split()][: self.model_max_length]
        padding = [self.pad_token_id] * (self.model_max_length - len(numbers))
        return {"input_ids": numbers + padding, "attention_mask": [1] * len(numbers) + [0] * len(padding)}


class StreamingTextDataset(StreamingDataset):
    def __init__(
        self,
        tokenizer: Any,
        max_seq_len: int,
        streams: Optional[Sequence[Stream]] = None,
        remote: Optional[str] = None,
        local: Optional[str] = None,
        split: Optional[str] = None,
        download_retry: int = 2,
        download_timeout: float = 60,
        validate_hash: Optional[str] = None,
        keep_zip: bool = False,
        epoch_size: Optional[Union[int, str]] = None,
        predownload: Optional[int] = None,
        cache_limit: Optional[Union[int, str]] = None,
        partition_algo: str = "relaxed",
        num_canonical_nodes: Optional[int] = None,
        batch_size: Optional[int] = None,
        shuffle: bool = False,
        shuffle_algo: str = "py1e",
        shuffle_seed: int = 9176,
        shuffle_block_size: Optional[int] = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        batching_method: str = "random",
        **kwargs: Any,
    ):
        if kwargs:
            raise ValueError(f"got unexpected arguments {kwargs}")
        super().__init__(
            streams=streams,
            remote=remote,
            local=local,
            split=split,
            download_retry=download_retry,
            download_timeout=download_timeout,
            validate_hash=validate_hash,
            keep_zip=keep_zip,
            epoch_size=epoch_size,
            predownload=predownload,
            cache_limit=cache_limit,
            partition_algo=partition_algo,
            num_canonical_nodes=num_canonical_nodes,
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_algo=shuffle_algo,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            batching_method=batching_method,
        )
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len

    def _tokenize(self, text_sample: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        return {name: torch.tensor(values) for name, values in self.tokenizer(text_sample["text"]).items()}

    def __getitem__(self, idx: int):
        sample = super().__getitem__(idx)
        token_sample = self._tokenize(sample)
        token_sample["labels"] = token_sample["input_ids"].clone()
        return token_sample


def main(remote: str, local: str, num_workers: int):
    dataset = StreamingTextDataset(
        tokenizer=WordTokenizer(6), max_seq_len=6, remote=remote, local=local, split="train", batch_size=4, shuffle=True
    )
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=num_workers)
    return dataset, [batch for _ in range(2) for batch in loader]
"""

VISION = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from streaming import StreamingDataset


class VisionDataset(Dataset):  # that of torchvision, as far as it is of interest
    def __init__(self, root=None, transforms=None, transform=None, target_transform=None):
        self.root = root
        self.transform = transform
        self.target_transform = target_transform
        self.transforms = transforms

    def __getitem__(self, index):
        raise NotImplementedError

    def __len__(self):
        raise NotImplementedError


class StreamingVisionDataset(StreamingDataset, VisionDataset):
    def __init__(self, *, transform=None, target_transform=None, **kwargs):
        StreamingDataset.__init__(self, **kwargs)
        VisionDataset.__init__(self, root=None, transform=transform, target_transform=target_transform)

    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        x, y = sample["x"], sample["y"]
        if self.transform is not None:
            x = self.transform(x)
        if self.target_transform is not None:
            y = self.target_transform(y)
        return x, y


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def main(remote: str, local: str, num_workers: int):
    dataset = StreamingVisionDataset(
        remote=remote, local=local, shuffle=True, batch_size=4, transform=to_tensor, target_transform=lambda y: y + 1000
    )
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
    return dataset, [(images, labels) for images, labels in loader]
"""

WEIGHTED = """
from streaming import Stream, StreamingDataLoader, StreamingDataset


def make(remotes, local, num_workers):
    streams = [
        Stream(remote=remotes[0], local=f"{local}/0", proportion=0.75),
        Stream(remote=remotes[1], local=f"{local}/1", proportion=0.25),
    ]
    dataset = StreamingDataset(streams=streams, epoch_size=40, shuffle=True, batch_size=4, num_canonical_nodes=2)
    return StreamingDataLoader(dataset, batch_size=4, num_workers=num_workers)


def main(remotes, local: str, num_workers: int, stop_after=None, state=None):
    loader = make(remotes, local, num_workers)
    if state is not None:
        loader.load_state_dict(state)
    batches = []
    while len(batches) < 20:
        for batch in loader:
            batches.append(batch["id"].tolist())
            if len(batches) == stop_after:
                return batches, loader.state_dict()
        if state is not None:
            break
    return batches, None
"""


def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> ModuleType:
    """The script as a module, which a worker finds however it starts."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    changed = text.replace("from streaming import", "from lightning_streaming import")
    assert [line for line in changed.splitlines() if "streaming import" in line] != []
    (folder / f"{name}.py").write_text(changed)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture(params=[0, 2])
def workers(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def test_a_text_dataset_that_tokenizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    remote = tmp_path / "remote"
    with MDSWriter(out=str(remote / "train"), columns={"text": "str"}, size_limit=200) as writer:
        for number in range(30):
            writer.write({"text": " ".join([str(number)] * (number % 8 + 1))})
    script = _script(tmp_path, monkeypatch, "text_script", TEXT)
    dataset, batches = script.main(str(remote), str(tmp_path / "local"), workers)
    assert len(batches) == 16
    assert {name: value.shape for name, value in batches[0].items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), torch.Size([4, 6])
    )
    for epoch in (batches[:8], batches[8:]):
        firsts = [int(row[0]) - 1 for batch in epoch for row in batch["input_ids"]]
        assert sorted(set(firsts)) == list(range(30))
        assert all(torch.equal(batch["labels"], batch["input_ids"]) for batch in epoch)
    assert dataset[7]["attention_mask"].tolist() == [1] * 6
    assert (tmp_path / "local" / "train" / "index.json").exists()


def test_a_vision_dataset_with_transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    remote = tmp_path / "remote"
    with MDSWriter(out=str(remote), columns={"x": "jpeg", "y": "int"}, size_limit=5000) as writer:
        for number in range(14):
            written = io.BytesIO()
            Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(written, "JPEG")
            writer.write({"x": Image.open(written), "y": number})
    script = _script(tmp_path, monkeypatch, "vision_script", VISION)
    dataset, batches = script.main(str(remote), str(tmp_path / "local"), workers)
    labels = [label for _, labels in batches for label in labels.tolist()]
    assert sorted(set(labels)) == list(range(1000, 1014))
    for images, numbers in batches:
        assert images.shape[1:] == (3, 8, 8)
        assert torch.allclose(images.mean(dim=(1, 2, 3)), (numbers - 1000) * 10 / 255, atol=0.02)
    image, label = dataset[3]
    assert (image.shape, label) == ((3, 8, 8), 1003)


@pytest.mark.rotate(1)
def test_weighted_streams_whose_place_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    remotes = [str(tmp_path / "a"), str(tmp_path / "b")]
    for remote, first in zip(remotes, (0, 1000), strict=True):
        with MDSWriter(out=remote, columns={"id": "int"}, size_limit=230) as writer:
            for number in range(50):
                writer.write({"id": first + number})
    script = _script(tmp_path, monkeypatch, "weighted_script", WEIGHTED)
    whole, _ = script.main(remotes, str(tmp_path / "local"), 0)
    assert sum(one >= 1000 for batch in whole[:10] for one in batch) == 10
    for stop_after in (1, 6, 10, 13):
        begun, state = script.main(remotes, str(tmp_path / "local"), workers, stop_after)
        state = json.loads(json.dumps(state))
        resumed: list[Any]
        resumed, _ = script.main(remotes, str(tmp_path / "local"), workers, None, state)
        epoch_ends = 10 if stop_after < 10 else 20
        assert begun + resumed == whole[:epoch_ends]
