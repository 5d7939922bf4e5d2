"""Three small streams, a mixture of them that changes, and what a dataset really reads of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_streaming import StreamingDataset
from lightning_streaming.trainer.config import config_of
from tests.helpers import write_dataset
from tests.schedules import schedule

SIZES = {"code": 40, "math": 20, "web": 60}
FIRST_ID = {name: 1000 * number for number, name in enumerate(SIZES)}
PHASES: list[dict[str, Any]] = [
    {"name": "broad", "end": 50, "mix": {"web": 0.9, "code": 0.1}},
    {"name": "ramp", "end": "70%", "steps": 4, "mix": {"web": [0.9, 0.5], "code": [0.1, 0.3], "math": [0, 0.2]}},
    {"name": "anneal", "mix": {"math": 3, "code": 2}, "max_repeats": {"math": 4}},
]


def write_streams(root: Path) -> Path:
    """The streams, in a directory each; their ids do not overlap."""
    for name, samples in SIZES.items():
        write_dataset(root / name, samples, first_id=FIRST_ID[name])
    return root


def phased_train(root: Path, phases: Sequence[Any] = PHASES, **changes: Any) -> dict[str, Any]:
    """The data of a run, as a configuration has it."""
    streams = {name: {"remote": str(root / name)} for name in SIZES}
    return {"streams": streams, "schedule": schedule(phases), "epoch_size": 120, "num_canonical_nodes": 4, **changes}


def write_config(path: Path, train: dict[str, Any], data: dict[str, Any] | None = None, **trainer: Any) -> Path:
    """A configuration whose model is never imported."""
    init_args = {"train": train, **(data or {})}
    content = {"model": {"class_path": "not.imported"}, "data": {"init_args": init_args}, "trainer": trainer}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def phased_dataset(train: dict[str, Any], batch_size: int = 1) -> StreamingDataset:
    """The dataset of such a run."""
    config = config_of(train)
    assert config is not None
    return StreamingDataset(**config.dataset_arguments(shuffle_by_default=True), batch_size=batch_size)


def ids_of_epoch(train: dict[str, Any], epoch: int = 0) -> list[int]:
    """The ids that one rank reads of an epoch, in order."""
    dataset = phased_dataset(train)
    dataset.next_epoch = epoch
    ids = [int(sample["id"]) for sample in dataset]
    dataset.close()
    return ids


def counted_by_stream(ids: Sequence[int]) -> Counter[str]:
    """How many of some ids are of each stream."""
    names = list(SIZES)
    return Counter(names[sample // 1000] for sample in ids)
