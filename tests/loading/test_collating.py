"""What is said where samples cannot be made a batch: of which column, and what to do."""

from __future__ import annotations

import datetime
import io
import json
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_streaming import MDSWriter, SampleKey, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import SampleError
from tests.helpers import ids, make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

ODD = 5
"""A sample that is unlike those before it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _image(number: int) -> Image.Image:
    return Image.new("RGB", (8 + number % 2, 8))


Make = Callable[[int], Any]
NO_BATCH: dict[str, tuple[Make, list[str], bool]] = {
    "image": (lambda number: {"x": _image(number)}, ["column 'x' is a PIL image (Image)", "make an array"], False),
    "image alone": (_image, ["each sample is a PIL image", "make an array"], False),
    "image in a tuple": (lambda number: (_image(number), number), ["column [0] is a PIL image", "transform="], False),
    "none": (lambda number: {"x": None}, ["column 'x' is None,", "put a value there"], False),
    "a none": (
        lambda number: {"x": None if number == ODD else number},
        ["column 'x' is None in 1 of 4 samples", "put a value there"],
        True,
    ),
    "object": (lambda number: {"x": {"y": datetime.date(2024, 1, 1)}}, ["column 'x'['y'] is an object", "date"], False),
    "shapes": (
        lambda number: {"id": number, "x": np.zeros((2, number % 3))},
        ["column 'x' is an array of different shapes", "(2, 1), (2, 2), (2, 0)", "pad them"],
        False,
    ),
    "tensors": (lambda number: {"x": torch.zeros(number + 1)}, ["of different shapes", "(5,), (6,)"], False),
    "dtype": (lambda number: {"x": np.array(["a", "b"])}, ["column 'x' is an array of dtype <U1"], False),
    "lengths": (lambda number: {"x": [0] * number}, ["column 'x' is a list of different lengths (4, 5, 6, 7)"], False),
    "columns": (
        lambda number: {"x": 1} if number == ODD else {"x": 1, "y": 2},
        ["each sample has different columns: ['x', 'y'] in number 0 of the batch, ['x'] in number 1"],
        True,
    ),
    "types": (
        lambda number: {"x": "text" if number == ODD else number},
        ["column 'x' is of different types, int and str"],
        True,
    ),
}


@pytest.mark.parametrize("name", NO_BATCH)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_torch_cannot_collate_is_told_in_a_paragraph(root: Path, workers: int, name: str) -> None:
    make, words, names_a_sample = NO_BATCH[name]

    def transform(sample: dict[str, Any]) -> Any:
        return sample["id"] if sample["id"] < 4 else make(sample["id"])

    with closing(make_loader(root, workers=workers, shuffle=False, transform=transform)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(SampleError) as caught:
            next(batches)
    told = str(caught.value)
    assert [word for word in words if word not in told] == []
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    assert len(told.splitlines()) == 1 + names_a_sample
    if names_a_sample:
        key = json.loads(told[told.index("restore_sample(") + len("restore_sample(") : -1])
        assert StreamingDataset(remote=str(root)).restore_sample(key) == {"id": ODD}


def test_images_as_they_are_stored_are_told_of(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"image": "jpeg", "label": "int"}) as writer:
        for number in range(4):
            written = io.BytesIO()
            _image(number).save(written, "JPEG")
            writer.write({"image": Image.open(written), "label": number})
    loader = StreamingDataLoader(StreamingDataset(remote=str(tmp_path)), batch_size=2)
    with pytest.raises(
        SampleError, match=r"^column 'image' is a PIL image \(JpegImageFile\), of which torch's default"
    ):
        next(iter(loader))


def test_arrays_that_are_read_as_tables_are_told_of_too(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "ndarray:int32"}) as writer:
        for number in range(4):
            writer.write({"x": np.zeros(1 + number, np.int32)})
    with pytest.raises(SampleError, match=r"column 'x' is an array of different shapes, .* \(1,\), \(2,\)"):
        next(iter(StreamingDataLoader(StreamingDataset(remote=str(tmp_path)), batch_size=4)))


def test_what_goes_with_torch_is_left_to_it(root: Path) -> None:
    kinds = {"text": "a", "bytes": b"a", "bool": True, "float": 1.5, "numpy": np.float32(1), "list": [1, 2], "none": {}}
    (batch, *_) = make_loader(root, transform=lambda sample: {**sample, **kinds})
    assert list(batch) == ["id", *kinds]


def _refuse(samples: list[Any]) -> list[Any]:
    if any(sample["id"] == 9 for sample in samples):
        raise LookupError("no nine")
    return samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, 10])
def test_a_collate_function_that_fails_names_its_samples(root: Path, workers: int, batch_size: int) -> None:
    settings: dict[str, Any] = {"batch_size": batch_size, "loader": {"collate_fn": _refuse, "with_keys": True}}
    with closing(make_loader(root, workers=workers, **settings)) as loader:
        with pytest.raises(SampleError, match="collate_fn failed on a batch: LookupError: no nine") as caught:
            list(loader)
        cause = caught.value.__cause__
        assert (type(cause), str(cause)) == (LookupError, "no nine")
        *_, last = str(caught.value).splitlines()
        keys = [SampleKey.from_dict(json.loads(line)) for line in str(caught.value).splitlines() if line[:3] == "  {"]
        (batch,) = [batch for batch in ids(make_loader(root, batch_size=batch_size)) if 9 in batch]
        assert [loader.restore_sample(key)["id"] for key in keys] == batch[:8]
        assert (last == f"  and {len(batch) - 8} more") == (len(batch) > 8)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
