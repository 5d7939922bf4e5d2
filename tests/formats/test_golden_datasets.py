from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import UnsupportedError
from lightning_streaming.formats.encodings import encode_value, encoding
from lightning_streaming.formats.hashing import hash_file
from lightning_streaming.formats.index import dump_index
from lightning_streaming.formats.shard import check_shard, open_shard
from tests.formats.golden_datasets import NOT_SERVED, SERVED, expectations, read_index, read_samples, unpack, value_of
from tests.golden import golden_path

EXPECTED = expectations()


def test_every_golden_dataset_is_either_served_or_known_not_to_be() -> None:
    assert sorted([*SERVED, *NOT_SERVED]) == sorted(EXPECTED)


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
    for sample, payloads in zip(samples, EXPECTED[name]["payload"], strict=True):
        encoded = {column: encode_value(encoding(columns[column]), sample[column]).hex() for column in columns}
        assert encoded == payloads


@pytest.mark.parametrize("name", [*SERVED, *NOT_SERVED])
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
        check_shard(shard)
        for root, file in ((tmp_path, shard.raw_data), (golden_path("mds", name), shard.zip_data)):
            if file is not None:
                path = root / file.basename
                assert path.stat().st_size == file.bytes
                assert {hash_name: hash_file(hash_name, path) for hash_name in shard.hashes} == file.hashes


@pytest.mark.parametrize(("name", "what"), NOT_SERVED.items())
def test_what_is_not_served_yet_is_named(name: str, what: str) -> None:
    shard = read_index(golden_path("mds", name)).shards[0]
    with pytest.raises(UnsupportedError, match=what):
        check_shard(shard, allow_unsafe_types=True)
    if shard.compression is None:
        with pytest.raises(UnsupportedError, match=what):
            open_shard(shard, golden_path("mds", name), allow_unsafe_types=True)


def assert_read_back(found: Any, written: Any, encoding_name: str) -> None:
    """That ``found`` is what a reader must make of ``written``, in value and in type."""
    if isinstance(written, bytes) and encoding_name != "bytes":  # the dataset of pre-encoded values
        assert found == {"str": "raw-é", "json": {"a": 1}, "float32": np.float32(1.5)}[encoding_name]
    elif isinstance(written, np.ndarray):
        assert found.dtype == written.dtype
        assert found.shape == written.shape
        assert found.tobytes() == written.tobytes()
    elif encoding_name.startswith(("uint", "int", "float")) and encoding_name != "int":
        assert found.dtype == encoding_name
        assert found.tobytes() == np.dtype(encoding_name).type(written).tobytes()
    else:
        assert type(found) is type(written)
        assert repr(found) == repr(written)  # so that a NaN equals itself
