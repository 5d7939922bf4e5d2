"""Whatever is written in any order, with any limit, in any format, is read again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats import mds
from lightning_streaming.formats.algorithms import hash_file
from lightning_streaming.writing import shards
from lightning_streaming.writing.writers import CSVWriter, JSONWriter, MDSWriter, ShardWriter, TSVWriter, XSVWriter
from tests.formats.golden_datasets import (
    SPLIT,
    WRITTEN_BY_ONE_WRITER,
    expectations,
    read_index,
    read_samples,
    samples_to_write,
    unpack,
)
from tests.golden import golden_path
from tests.helpers import assert_error
from tests.tiers import examples


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def ids(out: Path, scratch: Path) -> list[int]:
    return [sample["id"] for sample in read_samples(out, scratch)]


def test_shards_are_cut_at_the_limit_and_never_above(tmp_path: Path) -> None:
    # The file of n samples has 4 + 4 (n + 1) + 159 + 8 n bytes: 299 with 11, 311 with 12.
    with MDSWriter(columns={"id": "int"}, out=tmp_path, size_limit=300) as writer:
        for number in range(30):
            writer.write({"id": number})
    assert read_index(tmp_path).samples_per_shard().tolist() == [11, 11, 8]
    assert [shard.raw_data.bytes for shard in read_index(tmp_path).shards] == [299, 299, 263]


def test_shards_are_numbered_with_five_digits(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path, size_limit=1, compression="zstd") as writer:
        for number in range(11):
            writer.write({"id": number})
    assert names(tmp_path)[:2] == ["index.json", "shard.00000.mds.zstd"]
    assert names(tmp_path)[-1] == "shard.00011.mds.zstd"


def test_an_oversized_sample_gets_a_shard_of_its_own(tmp_path: Path) -> None:
    with MDSWriter(columns={"text": "str"}, out=tmp_path, size_limit=400) as writer:
        for length in (1, 1, 1000, 1, 1):
            writer.write({"text": "x" * length})
    assert read_index(tmp_path).samples_per_shard().tolist() == [2, 1, 2]


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path, compression="zstd", hashes=["sha1", "xxh64"]) as writer:
        writer.write({"id": 1})
    (shard,) = read_index(tmp_path).shards
    assert shard.zip_data is not None
    assert shard.zip_data.hashes["xxh64"] == hash_file("xxh64", tmp_path / shard.zip_data.basename)
    assert shard.raw_data.hashes["sha1"] != shard.zip_data.hashes["sha1"]


def test_there_is_no_index_before_the_end(tmp_path: Path) -> None:
    writer = MDSWriter(columns={"id": "int"}, out=tmp_path, size_limit=1)
    for number in range(3):
        writer.write({"id": number})
    assert "index.json" not in names(tmp_path)
    writer.finish()
    assert "index.json" in names(tmp_path)


def test_an_exception_publishes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with MDSWriter(columns={"id": "int"}, out=tmp_path / "out", size_limit=1) as writer:
            for number in range(3):
                writer.write({"id": number})
            raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        fail()
    assert names(tmp_path) == []


def test_a_wrong_sample_can_be_left_out(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "out") as writer:
        writer.write({"id": 0})
        for wrong in ({"id": "one"}, {}):
            with pytest.raises(EncodingError, match="column 'id'"):
                writer.write(wrong)
        writer.write({"id": 2})
    assert ids(tmp_path / "out", tmp_path) == [0, 2]


@pytest.mark.parametrize("columns", [None, {"id": "int"}, {"id": "int", "text": "str"}])
@pytest.mark.parametrize("sample", [None, [1], "id", 3])
def test_what_is_no_sample_is_refused(columns: Any, sample: Any, tmp_path: Path) -> None:
    writer = MDSWriter(columns=columns, out=tmp_path)
    with pytest.raises(EncodingError, match="a sample must map column names to values, but got "):
        writer.write(sample)
    writer.finish()
    assert read_index(tmp_path).num_samples == 0


def test_a_finished_writer_writes_no_more_and_may_be_finished_again(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path) as writer:
        writer.finish()
        writer.finish()
        with pytest.raises(ConfigError, match="finished"):
            writer.write({"id": 0})
    assert read_index(tmp_path).num_samples == 0


def test_columns_may_be_told_from_the_first_sample_and_then_hold(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "out") as writer:
        writer.write({"id": 0, "tokens": np.arange(3)})
        with pytest.raises(EncodingError, match=r"had columns \['id', 'tokens'\], but this one has \['id'\]"):
            writer.write({"id": 1})
        with pytest.raises(EncodingError, match="but this one has"):
            writer.write({"id": 1, "tokens": np.arange(3), "more": 0})
        writer.write({"tokens": np.arange(5), "id": 2})
    assert ids(tmp_path / "out", tmp_path) == [0, 2]


def test_a_first_sample_that_fails_decides_nothing(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "out") as writer:
        with pytest.raises(EncodingError):
            writer.write({"id": 2**64})
        writer.write({"number": 3})
    assert read_samples(tmp_path / "out", tmp_path) == [{"number": 3}]


def test_an_empty_dataset_needs_no_columns(tmp_path: Path) -> None:
    MDSWriter(out=tmp_path).finish()
    assert (tmp_path / "index.json").read_bytes() == b'{"shards": [], "version": 2}'


@pytest.mark.parametrize(
    "settings",
    [
        {"columns": {}},
        {"columns": {"id": "integer"}},
        {"columns": {1: "int"}},
        {"columns": {"id": int}},
        {"compression": "lz4"},
        {"hashes": ["sha1", "md5"]},
        {"size_limit": "4gb"},
        {"columns": ["id"]},
        {"columns": "id"},
        {"compression": 3},
        {"hashes": [1]},
        {"hashes": 1},
        {"max_workers": 0},
        {"max_workers": 1.5},
        {"max_workers": "2"},
        {"retry": "x"},
        {"retry": None},
        {"retry": 0},
    ],
)
def test_settings_are_checked_before_anything_is_touched(settings: dict[str, Any], tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "out") as writer:
        writer.write({"id": 0})
    given: dict[str, Any] = {"columns": {"id": "int"}, "out": tmp_path / "out", "exist_ok": True}
    with pytest.raises(ConfigError):
        MDSWriter(**(given | settings))
    assert ids(tmp_path / "out", tmp_path) == [0]


def test_a_shard_of_4_gib_is_refused_before_it_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mds, shards):
        monkeypatch.setattr(module, "MAX_RAW_BYTES", 300)
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "out", size_limit=None) as writer:
        for number in range(11):
            writer.write({"id": number})
        with assert_error(ConfigError, option="size_limit"):
            writer.write({"id": 11})
    assert ids(tmp_path / "out", tmp_path) == list(range(11))


def test_a_dataset_is_replaced_on_request(tmp_path: Path) -> None:
    for count in (30, 3):
        with MDSWriter(columns={"id": "int"}, out=tmp_path / "out", size_limit=300, exist_ok=True) as writer:
            for number in range(count):
                writer.write({"id": number})
    assert names(tmp_path / "out") == ["index.json", "shard.00000.mds"]
    assert ids(tmp_path / "out", tmp_path) == [0, 1, 2]


def test_a_dataset_goes_to_a_bucket_index_last(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    with MDSWriter(columns={"id": "int"}, out="memory://writer/data", size_limit=300) as writer:
        for number in range(30):
            writer.write({"id": number})
        assert "/writer/data/index.json" not in store.find("/writer/data")
    store.get("/writer/data/", str(tmp_path / "copy"), recursive=True)
    store.rm("/writer", recursive=True)
    assert ids(tmp_path / "copy", tmp_path) == list(range(30))


WRITERS: list[tuple[type[ShardWriter], dict[str, Any]]] = [
    (MDSWriter, {}),
    (JSONWriter, {"newline": "\r\n"}),
    (CSVWriter, {}),
    (TSVWriter, {}),
    (XSVWriter, {"separator": "|"}),
]


@pytest.mark.parametrize("columns", [None, {"id": "int", "text": "str"}])
@pytest.mark.parametrize("shards", [{}, {"compression": "gz:1", "hashes": ["sha1", "xxh64"], "size_limit": "1kb"}])
@pytest.mark.parametrize(("kind", "of_format"), WRITERS)
def test_a_writer_tells_what_the_index_says_of_all_its_shards(
    tmp_path: Path, kind: Any, of_format: dict[str, Any], shards: dict[str, Any], columns: dict[str, str] | None
) -> None:
    writer = kind(out=tmp_path, columns=columns, **of_format, **shards)
    before = writer.get_config()
    with writer:
        writer.write({"id": 1, "text": "one"})
    told = writer.get_config()
    assert before.items() <= told.items()
    assert (before == told) is (columns is not None)
    (shard,) = json.loads((tmp_path / "index.json").read_text())["shards"]
    of_one_shard = {"samples", "raw_data", "zip_data", "raw_meta", "zip_meta"}
    assert told == {name: value for name, value in shard.items() if name not in of_one_shard}


def test_a_store_that_nothing_serves_is_refused_at_once() -> None:
    with assert_error(ConfigError, path="data") as caught:
        MDSWriter(columns={"id": "int"}, out="nowhere://bucket/data")
    assert "nowhere" in str(caught.value)


_ONE_LARGE_SAMPLE = """
import resource, sys
import numpy as np
from lightning_streaming import MDSWriter
size = 100 * 2**20
large = np.ones(size, np.uint8)
with MDSWriter(out=sys.argv[1], columns={"a": "ndarray:uint8"}, max_workers=1) as writer:
    writer.write({"a": large[:10]})
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size * 8 // 5, used + size * 8 // 5))
    writer.write({"a": large})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits addresses like this")
def test_a_large_sample_is_copied_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _ONE_LARGE_SAMPLE, str(tmp_path / "out")], check=True)
    assert read_index(tmp_path / "out").samples_per_shard().tolist() == [1, 1]


EXPECTED = expectations()
GOLDEN_WRITERS: dict[str, Any] = {
    "mds": MDSWriter,
    "json": JSONWriter,
    "csv": CSVWriter,
    "tsv": TSVWriter,
    "xsv": XSVWriter,
}


@pytest.mark.parametrize("name", [*WRITTEN_BY_ONE_WRITER, *SPLIT])
def test_a_dataset_is_written_byte_for_byte_as_the_original_does(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "ours")
    golden, ours = contents(golden_path("mds", name), tmp_path / "a"), contents(tmp_path / "ours", tmp_path / "b")
    assert ours == golden


def write(name: str, out: Path) -> None:
    expected = EXPECTED[name]
    with GOLDEN_WRITERS[expected["format"]](out=out, columns=expected["columns"], **expected["writer"]) as writer:
        for sample in samples_to_write(name):
            writer.write(sample)


def contents(directory: Path, scratch: Path) -> dict[str, Any]:
    """Every file of a dataset. Shards are decompressed, because compressed bytes depend on the library's version."""
    index = unpack(directory, scratch)
    pairs = [pair for shard in index.shards for pair in shard.files]
    stored = [(compressed or raw).basename for raw, compressed in pairs]
    assert sorted(path.name for path in directory.iterdir()) == sorted(["index.json", *stored])
    files: dict[str, Any] = {raw.basename: (scratch / raw.basename).read_bytes() for raw, _ in pairs}
    text = (directory / "index.json").read_bytes()
    is_compressed = any(shard.compression for shard in index.shards)
    return {**files, "index.json": without_compressed_bytes(text) if is_compressed else text}


def without_compressed_bytes(text: bytes) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = json.loads(text)["shards"]
    return [
        {key: file["basename"] if key.startswith("zip_") else file for key, file in shard.items()} for shard in shards
    ]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=50),
    "str": st.text(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255),
    "float64": st.floats(allow_nan=False),
    "str_int": st.integers(),
    "json": st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(), max_size=3),
}
FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\t,|"), max_size=30)
SPLIT_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": FIELDS,
    "int": st.integers(),
    "float": st.floats(allow_nan=False),
}
SPLIT_WRITERS: list[tuple[type[ShardWriter], dict[str, Any]]] = [
    (JSONWriter, {}),
    (JSONWriter, {"newline": "\r\n"}),
    (CSVWriter, {}),
    (TSVWriter, {}),
    (XSVWriter, {"separator": "||", "newline": "\r\n"}),
]

Dataset = tuple[dict[str, str], list[dict[str, Any]]]


@st.composite
def datasets(
    draw: st.DrawFn, names: st.SearchStrategy[str], values: dict[str, st.SearchStrategy[Any]]
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Columns, and samples that fit them."""
    columns = draw(st.dictionaries(names, st.sampled_from(sorted(values)), min_size=1, max_size=4))
    sample = st.fixed_dictionaries({name: values[encoding_name] for name, encoding_name in columns.items()})
    return columns, draw(st.lists(sample, max_size=20))


def check_round_trip(writer: type[ShardWriter], dataset: Dataset, most_samples: int, **arguments: Any) -> None:
    """Write a dataset, read it, and look at the sizes of its shards; ``most_samples`` of a shard above the limit."""
    columns, samples = dataset
    with TemporaryDirectory() as directory:
        out, scratch = Path(directory) / "out", Path(directory) / "scratch"
        with writer(columns=columns, out=out, **arguments) as written:
            for sample in samples:
                written.write(sample)
        assert read_samples(out, scratch) == samples
        limit = arguments["size_limit"]
        for shard in read_index(out).shards:
            assert limit is None or shard.raw_data.bytes <= limit or shard.samples <= most_samples


LIMITS = st.none() | st.integers(1, 2000)
COMPRESSIONS = st.sampled_from([None, "zstd"])
HASHES = st.sampled_from([[], ["sha1", "xxh64"]])


@settings(max_examples=examples(100))
@given(datasets(st.text(), VALUES), LIMITS, COMPRESSIONS, HASHES)
def test_an_mds_dataset_comes_back_as_it_was(
    dataset: Dataset, size_limit: int | None, compression: str | None, hashes: list[str]
) -> None:
    check_round_trip(MDSWriter, dataset, 1, size_limit=size_limit, compression=compression, hashes=hashes)


@settings(max_examples=examples(100))
@given(st.sampled_from(SPLIT_WRITERS), datasets(FIELDS, SPLIT_VALUES), LIMITS, COMPRESSIONS, HASHES)
def test_a_dataset_of_rows_comes_back_as_it_was(
    writer: tuple[type[ShardWriter], dict[str, Any]],
    dataset: Dataset,
    size_limit: int | None,
    compression: str | None,
    hashes: list[str],
) -> None:
    # The header row is not counted, so a shard of any number of samples may be above the limit.
    settings: dict[str, Any] = {"size_limit": size_limit, "compression": compression, "hashes": hashes}
    check_round_trip(writer[0], dataset, len(dataset[1]), **settings, **writer[1])


@settings(max_examples=examples(30))
@given(st.permutations(range(30)), st.integers(150, 500), st.integers(1, 4))
def test_samples_stay_in_the_order_they_are_written_in(order: list[int], size_limit: int, workers: int) -> None:
    samples = [{"id": number, "text": "x" * (number * 7 % 50)} for number in order]
    dataset = ({"id": "int", "text": "str"}, samples)
    check_round_trip(MDSWriter, dataset, 1, size_limit=size_limit, max_workers=workers)
