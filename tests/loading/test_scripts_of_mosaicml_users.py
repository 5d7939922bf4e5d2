"""Three scripts as users of MosaicML Streaming write them: the line that imports is changed, and nothing else."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_streaming import MDSWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

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
