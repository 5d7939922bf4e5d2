"""What datasets and loaders tell of themselves."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset
from tests.helpers import json_copy, make_dataset, make_loader


def test_a_dataset_tells_all_it_was_asked_for() -> None:
    asked = set(inspect.signature(StreamingDataset).parameters)
    told = make_dataset("/data").config()
    told_of_streams = {"remote", "local", "storage_options", "stream_name", "stream_config"}
    assert told.keys() == asked - {"world", *told_of_streams} | {"type"}
    assert told["streams"]["0"]["remote"] == "/data"


def test_telling_reads_nothing_and_goes_through_json() -> None:
    loader = make_loader("s3://nowhere/at-all", predownload=np.int64(4), columns=("id",))
    assert json_copy(loader.config()) == loader.config()


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
        "a": Stream(remote="https://user:secret@host/a?token=secret", storage_options={"key": "secret"}),
        "b": Stream(remote="s3://b", local="/cache"),
    }
    one = make_dataset("s3://c", storage_options={"secret": "secret"})
    assert "secret" not in json.dumps([make_loader(streams=streams).config(), one.config()])


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


def test_a_loader_tells_of_itself_and_its_dataset() -> None:
    dataset = make_dataset("/data")
    loader = StreamingDataLoader(dataset, num_workers=2, with_keys=True)
    told = loader.config()
    assert told["dataset"] == dataset.config()
    assert (told["type"], told["num_workers"], told["with_keys"]) == ("StreamingDataLoader", 2, True)
    told["dataset"]["streams"].clear()
    assert loader.config()["dataset"]["streams"]
