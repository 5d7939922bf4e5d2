"""Datasets and loaders under the Trainer of transformers, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from lightning_streaming import StreamingDataLoader, StreamingDataset, World
from lightning_streaming.errors import ConfigError
from tests.forked_ranks import on_ranks
from tests.helpers import make_dataset, raises, write_dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS/MKL_NUM_THREADS unset:UserWarning"),
]

SAMPLES, EPOCHS = 29, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "ids", SAMPLES)


class Recorder(torch.nn.Module):
    """Notes the ids of each batch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[int]] = []

    def forward(self, id: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002  # the column's name
        self.seen.append(id.tolist())
        return {"loss": (self.weight * id.float().mean()).square().sum()}


def trainer(dataset: StreamingDataset, folder: Path, kind: type[Trainer] = Trainer, **settings: Any) -> Any:
    arguments: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    args = TrainingArguments(output_dir=str(folder), **{**arguments, **settings})
    return kind(model=Recorder(), args=args, train_dataset=dataset)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 3, "dataloader_num_workers": 2},
    {"accelerator_config": {"dispatch_batches": False}},
    {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 8},
]


def _whole_and_resumed(data: Path, directory: Path, world: World | None) -> list[tuple[Any, Any, Any, float, float]]:
    made = []
    for number, settings in enumerate(SETTINGS):
        whole = trainer(make_dataset(data, world=world), directory / str(number), **settings)
        whole.train()
        seen, steps = whole.model.seen, whole.state.global_step
        weight = whole.model.weight.item()
        for saved in {2, steps // 4 * 2 + 2} if steps > 4 else {2}:
            again = trainer(make_dataset(data, world=world), directory / str(number), save_strategy="no", **settings)
            again.train(resume_from_checkpoint=str(directory / str(number) / f"checkpoint-{saved}"))
            made.append((settings, seen, again.model.seen, weight, again.model.weight.item()))
    return made


def _flat(batches: list[list[int]]) -> list[int]:
    return [one for batch in batches for one in batch]


@pytest.mark.nightly
def test_one_process_reads_each_sample_once_and_resumes_exactly(data: Path, tmp_path: Path) -> None:
    for settings, whole, resumed, weight, weight_again in _whole_and_resumed(data, tmp_path, None):
        half = len(whole) // 2
        assert sorted(_flat(whole[:half])) == sorted(_flat(whole[half:])) == list(range(SAMPLES)), settings
        assert 0 < len(resumed) < len(whole)
        assert resumed == whole[-len(resumed) :], settings
        assert weight == weight_again


@pytest.mark.nightly
def test_two_processes_share_a_dataset_of_one_reader_and_resume_exactly(data: Path, tmp_path: Path) -> None:
    ranks = on_ranks(_whole_and_resumed, data, tmp_path, World(), meeting=tmp_path / "ranks")
    for of_first, of_second in zip(*ranks, strict=True):
        for settings, whole, resumed, weight, weight_again in (of_first, of_second):
            assert resumed == whole[-len(resumed) :], settings
            assert weight == weight_again
        half = len(of_first[1]) // 2
        for epoch in (slice(None, half), slice(half, None)):
            read = _flat(of_first[1][epoch] + of_second[1][epoch])
            assert set(read) == set(range(SAMPLES)), of_first[0]
            assert len(read) <= 4 * 8, "the last batch is filled up"


def _refused(data: Path, directory: Path) -> list[str]:
    said = []
    for settings in SETTINGS:
        with pytest.raises(ConfigError) as caught:
            trainer(make_dataset(data), directory, **settings).train()
        said.append(str(caught.value))
    return said


@pytest.mark.nightly
def test_a_dataset_that_shares_out_its_samples_itself_is_refused_on_all_ranks(data: Path, tmp_path: Path) -> None:
    for said in on_ranks(_refused, data, tmp_path, meeting=tmp_path / "ranks"):
        for words in said:
            assert "dealt out twice" in words
            assert "get_train_dataloader" in words


def test_skipping_past_a_loader_is_refused(data: Path, tmp_path: Path) -> None:
    class WithLoader(Trainer):
        train_dataset: Any

        def get_train_dataloader(self) -> StreamingDataLoader:
            return StreamingDataLoader(self.train_dataset)

    trainer(make_dataset(data), tmp_path, WithLoader).train()
    with raises(ConfigError, "skip_first_batches", "ignore_data_skip=True"):
        trainer(make_dataset(data), tmp_path, WithLoader).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
