from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_streaming.formats.algorithms import hash_file
from lightning_streaming.formats.encodings import encode_value, encoding
from lightning_streaming.formats.index import dump_index
from lightning_streaming.formats.shard import check_shard
from tests.formats.golden_datasets import (
    SERVED,
    expectations,
    read_index,
    read_samples,
    samples_to_write,
    unpack,
    value_of,
)
from tests.golden import golden_path

EXPECTED = expectations()
IMAGE_FILES = ("jpeg", "png", "jpeg_array", "jpegarray", "list[jpeg]", "list[png]")
"""Encodings that do not give back the bytes of an image that was read: it is encoded anew."""


def test_every_golden_dataset_is_served() -> None:
    assert sorted(SERVED) == sorted(EXPECTED)
    assert len(SERVED) == 25


@pytest.mark.parametrize("name", SERVED)
def test_values_are_the_ones_that_were_written(name: str, tmp_path: Path) -> None:
    found = read_samples(golden_path("mds", name), tmp_path)
    columns = EXPECTED[name]["columns"]
    assert len(found) == len(EXPECTED[name]["samples"]) == sum(EXPECTED[name]["shard_samples"])
    for sample, descriptions in zip(found, EXPECTED[name]["samples"], strict=True):
        assert list(sample) == sorted(columns)
        for column, value in sample.items():
            assert_read_back(value, value_of(descriptions[column]), columns[column])


@pytest.mark.parametrize("name", [name for name in SERVED if "payload" in EXPECTED[name]])
def test_values_encode_to_the_payloads_in_the_file(name: str, tmp_path: Path) -> None:
    columns = EXPECTED[name]["columns"]
    samples = read_samples(golden_path("mds", name), tmp_path)
    for sample, written, payloads in zip(samples, samples_to_write(name), EXPECTED[name]["payload"], strict=True):
        sample |= {column: value for column, value in written.items() if columns[column] in IMAGE_FILES}
        encoded = {column: encode_value(encoding(columns[column]), sample[column]).hex() for column in columns}
        assert encoded == payloads


@pytest.mark.parametrize("name", SERVED)
def test_an_index_of_any_format_is_understood_and_written_back(name: str) -> None:
    text = golden_path("mds", name, "index.json").read_bytes()
    index = read_index(golden_path("mds", name))
    assert index.samples_per_shard().tolist() == EXPECTED[name]["shard_samples"]
    assert index.num_samples == sum(EXPECTED[name]["shard_samples"])
    if name != "merged":  # merging writes the version first
        assert dump_index(index.shards) == text


@pytest.mark.parametrize("name", SERVED)
def test_recorded_sizes_and_hashes_are_ours(name: str, tmp_path: Path) -> None:
    for shard in unpack(golden_path("mds", name), tmp_path).shards:
        check_shard(shard, allow_unsafe_types=True)
        for root, file in ((tmp_path, shard.raw_data), (golden_path("mds", name), shard.zip_data)):
            if file is not None:
                path = root / file.basename
                assert path.stat().st_size == file.bytes
                assert {hash_name: hash_file(hash_name, path) for hash_name in shard.hashes} == file.hashes


def assert_read_back(found: Any, written: Any, encoding_name: str) -> None:
    """That ``found`` is what a reader must make of ``written``, in value and in type."""
    if encoding_name in IMAGE_FILES or encoding_name in ("pil", "list[pil]"):
        assert_same_images(found, written, exactly="jpeg]" not in encoding_name)
    elif isinstance(written, bytes) and encoding_name != "bytes":  # the dataset of pre-encoded values
        assert found == {"str": "raw-é", "json": {"a": 1}, "float32": np.float32(1.5)}[encoding_name]
    elif isinstance(written, np.ndarray):
        assert found.dtype == written.dtype
        assert found.shape == written.shape
        assert found.tobytes() == written.tobytes()
    elif encoding_name.startswith(("uint", "int", "float")) and encoding_name not in ("int", "float"):
        assert found.dtype == encoding_name
        assert found.tobytes() == np.dtype(encoding_name).type(written).tobytes()
    else:
        assert type(found) is type(written)
        assert repr(found) == repr(written)  # so that a NaN equals itself


def assert_same_images(found: Any, written: Any, *, exactly: bool) -> None:
    """Of images, or lists of them; what was written may also be a file's bytes. Not exactly: but for JPEG's losses."""
    if isinstance(written, list):
        assert isinstance(found, list)
        for one, other in zip(found, written, strict=True):
            assert_same_images(one, other, exactly=exactly)
        return
    written = Image.open(io.BytesIO(written)) if isinstance(written, bytes) else written
    assert (found.mode, found.size) == (written.mode, written.size)
    assert not exactly or found.tobytes() == written.tobytes()
