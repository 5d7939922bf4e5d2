"""Rows of record batches: single ones, tables of plain ones, flat columns; damaged batches; and letting go of them."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets.table import embed_table_storage
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from torch.utils.data import default_collate

from lightning_streaming.errors import EncodingError, SampleIndexError, ShardCorruptError, StreamingError
from lightning_streaming.formats.arrow.rows import ArrowRows, PlainArrow, plain_arrow, sound_arrow
from tests.formats.stored import arrays_in, rows_of
from tests.helpers import assert_error
from tests.tiers import examples


def streamed(table: Any, rows: int) -> bytes:
    """An IPC stream of batches of so many rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for first in range(0, table.num_rows, rows):
            writer.write(table.slice(first, rows))
    return bytes(sink.getvalue())


def batches_in(data: Any) -> list[Any]:
    return list(pa.ipc.open_stream(pa.py_buffer(data)))


TOKENS = np.arange(60, dtype=np.int32).reshape(10, 6)
PLAIN = pa.record_batch(
    {
        "id": pa.array(range(10), pa.int64()),
        "half": pa.array(np.arange(10).astype(np.float16)),
        "flag": pa.array([number % 3 == 0 for number in range(10)]),
        "tokens": pa.array(TOKENS.tolist(), pa.list_(pa.int32())),
        "large": pa.array((TOKENS + 1).tolist(), pa.large_list(pa.uint16())),
        "mask": pa.array((TOKENS % 2 == 0).tolist(), pa.list_(pa.bool_(), 6)),
        "grid": pa.array(TOKENS.reshape(10, 3, 2).tolist(), pa.list_(pa.list_(pa.int64(), 2), 3)),
        "boxes": pa.array(TOKENS.reshape(10, 3, 2).tolist(), pa.list_(pa.list_(pa.float32(), 2))),
    }
)


def opened(batch: Any, rows: int, columns: Sequence[str] | None = None) -> ArrowRows:
    return rows_of(batches_in(streamed(batch, rows)), columns, "file")


def kind_of(rows: ArrowRows) -> PlainArrow | None:
    return plain_arrow({name: one.encoding for name, one in rows.columns.items()})


# --- single rows ---


@pytest.mark.parametrize("rows", [1, 3, 10, 100])
def test_rows_are_counted_over_all_batches(rows: int) -> None:
    found = opened(PLAIN, rows, ["tokens", "id"])
    assert len(found) == 10
    for index in range(10):
        sample = found[index]
        assert list(sample) == ["id", "tokens"]
        assert sample["id"] == index
        assert sample["tokens"].tolist() == TOKENS[index].tolist()
    for index in (-1, 10):
        with assert_error(SampleIndexError, path="file", sample=index):
            found[index]


def test_batches_without_rows_are_passed_over() -> None:
    nothing = PLAIN.slice(0, 0)
    found = rows_of([nothing, PLAIN.slice(0, 4), nothing, PLAIN.slice(4), nothing], None, "file")
    assert [found[index]["id"] for index in range(len(found))] == list(range(10))
    assert found.plain_rows() is not None
    for batches in ([], [nothing], [nothing, nothing]):
        empty = rows_of(batches, None, "file")
        assert len(empty) == 0
        assert empty.plain_rows() is None
        with pytest.raises(SampleIndexError):
            empty[0]
    assert arrays_in(rows_of([nothing], None, "file").flat_column("tokens")) == []


def test_batches_must_be_of_one_schema() -> None:
    with assert_error(ShardCorruptError, path="file") as caught:
        rows_of([PLAIN, PLAIN.select(["id"])], ["id"], "file")
    assert "one schema" in str(caught.value)


def test_dictionaries_may_change_from_batch_to_batch() -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    batches = [pa.record_batch({"x": pa.array(values, kind)}) for values in (["a", "b"], ["c", "a", None])]
    found = batches_in(streamed(pa.Table.from_batches(batches), 2))
    rows = rows_of(found, None, "file")
    assert [rows[index]["x"] for index in range(5)] == ["a", "b", "c", "a", None]


def test_what_is_not_wanted_may_be_damaged_or_of_any_type() -> None:
    odd = pa.array([1, 1, 2], pa.int32()).dictionary_encode()
    broken = pa.DictionaryArray.from_arrays(pa.array([0, 90, 1], pa.int8()), odd.dictionary, safe=False)
    batch = pa.record_batch({"x": pa.array([1, 2, 3]), "broken": broken, "ends": pa.array([1, 1, 2])})
    assert rows_of([batch], ["x"], "file")[2] == {"x": 3}
    with assert_error(ShardCorruptError, path="file") as caught:
        rows_of([batch], None, "file")
    assert "Arrow" in str(caught.value)


# --- as tables ---


def table_of(rows: ArrowRows, indexes: Sequence[int]) -> dict[str, Any]:
    plain = rows.plain_rows()
    assert plain is not None
    table = np.empty(len(indexes), plain.row)
    rows.copy_rows(np.array(indexes, np.int64), table)
    assert plain.are(table)
    return plain.columns_of(table)


@pytest.mark.parametrize("rows", [1, 3, 10])
@pytest.mark.parametrize("columns", [None, ["tokens"], ["flag"], ["mask", "id"], ["grid"], ["half", "boxes"]])
def test_batches_of_plain_rows_are_what_collating_single_ones_makes(rows: int, columns: list[str] | None) -> None:
    found = opened(PLAIN, rows, columns)
    for indexes in ([9, 0, 5, 5, 2, 9], [3], list(range(10))):
        table = table_of(found, indexes)
        expected = default_collate([found[index] for index in indexes])
        assert list(table) == list(expected)
        for name, values in table.items():
            made = torch.from_numpy(values)
            assert made.dtype == expected[name].dtype
            assert torch.equal(made, expected[name])
            assert values.flags.writeable


@pytest.mark.parametrize("per_batch", [100, 300])
def test_rows_of_many_bytes_are_copied_from_several_batches(per_batch: int) -> None:
    """Of so many that batches are not put together."""
    values = np.random.default_rng(0).integers(0, 1 << 30, (400, 2048), np.int32)
    array = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 2048)
    for more in ({}, {"id": pa.array(range(400))}):
        found = opened(pa.record_batch({"x": array, **more}), per_batch)
        for indexes in ([5], [399, 0, 101, 100, 99, 300, 0], list(range(0, 400, 7))):
            table = table_of(found, indexes)
            np.testing.assert_array_equal(table["x"], values[indexes])
            if more:
                assert table["id"].tolist() == indexes


def test_rows_of_one_kind_are_of_one_object() -> None:
    first, second = opened(PLAIN, 4), opened(PLAIN.slice(2), 3)
    assert first.plain_rows() is second.plain_rows()
    assert kind_of(first) == kind_of(second)
    narrower = opened(PLAIN, 4, ["id"])
    assert narrower.plain_rows() is not first.plain_rows()
    assert kind_of(narrower) != kind_of(first)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1, 2], [3]], pa.list_(pa.int8())),
        pa.array([[1, 2], None], pa.list_(pa.int8())),
        pa.array([[1, 2], [3, None]], pa.list_(pa.int8())),
        pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)),
        pa.array([[], []], pa.list_(pa.int8())),
        pa.array([1, None]),
        pa.array([True, None]),
    ],
    ids=str,
)
def test_rows_of_several_lengths_or_with_nulls_are_not_plain(values: Any) -> None:
    batch = pa.record_batch({"id": pa.array([0, 1]), "x": values})
    found = rows_of([batch], None, "file")
    assert found.plain_rows() is None
    assert kind_of(found) is not None, "by its schema it may be"
    assert rows_of([batch], ["id"], "file").plain_rows() is not None


@pytest.mark.parametrize("values", [pa.array([["a"], ["b"]]), pa.array([{"a": 1}] * 2), pa.nulls(2)], ids=str)
def test_rows_of_other_values_are_never_plain(values: Any) -> None:
    found = rows_of([pa.record_batch({"x": values})], None, "file")
    assert found.plain_rows() is None
    assert kind_of(found) is None


def test_rows_whose_lengths_change_from_batch_to_batch_are_not_plain() -> None:
    kind = pa.list_(pa.int8())
    batches = [pa.record_batch({"x": pa.array(values, kind)}) for values in ([[1, 2]] * 3, [[1, 2, 3]] * 2)]
    assert rows_of(batches, None, "file").plain_rows() is None


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 5), st.data())
def test_any_rows_can_be_copied(rows: int, per_batch: int, width: int, data: st.DataObject) -> None:
    values = np.arange(rows * width, dtype=np.uint16).reshape(rows, width)
    batch = pa.record_batch({"x": pa.array(values.tolist(), pa.list_(pa.uint16())), "n": pa.array(range(rows))})
    start = data.draw(st.integers(0, rows - 1))
    columns = data.draw(st.sampled_from([None, ["x"], ["n"]]))
    found = opened(batch.slice(start), per_batch, columns)
    indexes = data.draw(st.lists(st.integers(0, rows - start - 1), min_size=1, max_size=30))
    table = table_of(found, indexes)
    if columns != ["n"]:
        np.testing.assert_array_equal(table["x"], values[start:][indexes])
    if columns != ["x"]:
        assert table["n"].tolist() == [start + index for index in indexes]


# --- column by column ---


def test_numbers_that_are_stored_once_are_no_list_of_a_batch() -> None:
    assert rows_of([pa.record_batch({"a": pa.array([5, 6, 5]).dictionary_encode()})]).take(np.array([0, 2])) is None
    texts = rows_of([pa.record_batch({"a": pa.array(["x", "y", "x"]).dictionary_encode()})])
    assert texts.take(np.array([0, 1])) == {"a": ["x", "y"]}


def collated(rows: ArrowRows, indexes: Sequence[int]) -> Any:
    return default_collate([rows[index] for index in indexes])


@pytest.mark.parametrize("rows", [1, 3, 10])
@pytest.mark.parametrize("has_data", [True, False])
def test_rows_taken_column_by_column_are_what_collating_single_ones_makes(rows: int, has_data: bool) -> None:
    texts = ["", "a", "üö", "text"] * 2 + ["", "b"]
    more = {
        "text": pa.array(texts),
        "large": pa.array(texts, pa.large_string()),
        "raw": pa.array([one.encode() for one in texts], pa.binary()),
        "ragged": pa.array([list(range(number // 2)) for number in range(10)], pa.list_(pa.int16())),
    }
    columns = dict(zip(PLAIN.schema.names, PLAIN.columns, strict=True)) | more
    data = memoryview(streamed(pa.record_batch(columns), rows))
    found = rows_of(batches_in(data), None, "file", data if has_data else None)
    assert found.plain_rows() is None
    for indexes in ([8, 9, 8], [4, 5], [9]):
        taken, expected = found.take(np.array(indexes)), collated(found, indexes)
        assert taken is not None
        assert list(taken) == list(expected)
        for name, values in taken.items():
            if isinstance(values, list):
                assert values == expected[name]
            else:
                assert torch.from_numpy(values).dtype == expected[name].dtype
                assert torch.equal(torch.from_numpy(values), expected[name])
    for unequal in ([8, 0], [0, 1]):  # of several lengths; of none
        assert found.take(np.array(unequal)) is None


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", None]),
        pa.array([1, None]),
        pa.array([["a"], ["b"]]),
        pa.array(["a", "b"], pa.string_view()),
        pa.array([[1], [None]], pa.list_(pa.int8())),
        pa.array([[1], None], pa.list_(pa.int8())),
        pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int8(), 2))),
        pa.array([[True], [True, False]], pa.list_(pa.bool_())),
    ],
    ids=str,
)
def test_other_rows_are_not_taken_column_by_column(values: Any) -> None:
    found = rows_of([pa.record_batch({"id": pa.array([0, 1]), "x": values})])
    assert found.take(np.array([0])) is None
    assert rows_of([pa.record_batch({"id": pa.array([0, 1]), "x": values})], ["id"]).take(np.array([0])) is not None


# --- as flat columns ---


DOCUMENTS: list[list[int]] = [[1, 2, 3], [], [4], [5, 6, 7, 8], [9], []]


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.uint16())], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_a_flat_column_lies_in_the_stream(kind: Any, rows: int) -> None:
    batch = pa.record_batch({"text": pa.array(["x"] * 6), "tokens": pa.array(DOCUMENTS, kind)})
    data = memoryview(streamed(batch, rows))
    found = rows_of(batches_in(data), None, "file", data).flat_column("tokens")
    assert found.data is data
    assert found.dtype == np.uint16
    assert arrays_in(found) == DOCUMENTS
    copied = rows_of(batches_in(data), None, "file").flat_column("tokens")
    assert arrays_in(copied) == DOCUMENTS
    elsewhere = rows_of(batches_in(data), None, "file", memoryview(bytes(data))).flat_column("tokens")
    assert arrays_in(elsewhere) == DOCUMENTS


def test_a_flat_column_of_lists_of_fixed_size_and_of_slices() -> None:
    kind = pa.list_(pa.float32(), 2)
    batch = pa.record_batch({"x": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], kind)})
    found = rows_of([batch.slice(1, 2), batch.slice(3)], None, "file").flat_column("x")
    assert arrays_in(found) == [[3, 4], [5, 6], [7, 8]]


def test_a_column_that_is_not_flat_says_so() -> None:
    found = opened(PLAIN, 10)
    for name in ("id", "mask", "grid", "boxes"):
        with assert_error(EncodingError, path="file") as caught:
            found.flat_column(name)
        assert f"column '{name}'" in str(caught.value)
    kind = pa.list_(pa.int8())
    batches = [pa.record_batch({"x": pa.array(values, kind)}) for values in ([[1], [2]], [[1], None])]
    with assert_error(EncodingError, path="file") as caught:
        rows_of(batches, None, "file").flat_column("x")
    assert "'x'" in str(caught.value)
    batches = [pa.record_batch({"x": pa.array([[1], [], [2, None], [3]], kind)}).slice(1)]
    with assert_error(EncodingError, path="file") as caught:
        rows_of(batches, None, "file").flat_column("x")
    assert "'x'" in str(caught.value)


# --- letting go ---


def test_samples_share_no_memory_and_the_map_can_be_closed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    table = pa.table({"n": [1, 2], "s": ["a", None], "l": [[1, 2], [3, 4]], "b": [b"x", b"y"], "t": [True, False]})
    path.write_bytes(streamed(table, 1))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = memoryview(mapped)
    rows = rows_of(batches_in(data), None, "file", data)
    samples = [rows[0], rows[1]]
    narrow = rows_of(batches_in(data), ["n", "l", "t"], "file", data)
    made = table_of(narrow, [1, 0])
    narrow.flat_column("l")
    for reader in (rows, narrow):
        reader.close()
        reader.close()
        assert len(reader) == 0
    data.release()
    mapped.close()
    path.write_bytes(bytes(path.stat().st_size))
    assert samples[0]["l"].tolist() == [1, 2]
    assert (samples[1]["n"], samples[1]["s"], samples[1]["b"], samples[1]["t"]) == (2, None, b"y", False)
    assert made["l"].tolist() == [[3, 4], [1, 2]]
    samples[0]["l"] += 1


# --- damage ---

FUZZED = pa.table(
    {
        "n": pa.array([1, None, 3, 4], pa.int16()),
        "s": pa.array(["a", "text", None, "üö"]),
        "v": pa.array(["a", "a text of more than twelve", None, "ü"], pa.string_view()),
        "l": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32())),
        "f": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.float32(), 2)),
        "st": pa.array([{"a": ["x"], "b": True}, None, {"a": [], "b": None}, {"a": None, "b": False}]),
        "d": pa.array(["x", "y", None, "x"]).dictionary_encode(),
        "m": pa.array([[("a", 1)], [], None, [("b", 2)]], pa.map_(pa.string(), pa.int8())),
        "c": pa.array(["1.5", "2", None, "3"]).cast(pa.decimal128(10, 2)),
        "t": pa.array([1, 2, None, 3], pa.int64()).cast(pa.time64("us")),
    }
)


def read_everything(data: bytes) -> None:
    """All that can be done with a stream."""
    try:
        batches = batches_in(data)
        rows = rows_of(batches, None, "file", memoryview(data))
    except (StreamingError, pa.ArrowException, OSError, ValueError):
        return
    for index in range(min(len(rows), 1000)):
        with suppress(StreamingError):
            rows[index]
    for name in rows.columns:
        with suppress(EncodingError):
            arrays_in(rows.flat_column(name))
    if rows.plain_rows() is not None:
        table_of(rows, [0, len(rows) - 1])


@pytest.mark.rotate(2)
@pytest.mark.parametrize("seed", [0, 1, 106])
def test_damaged_streams_are_errors_or_other_values(seed: int) -> None:
    """Opening a stream is pyarrow's own, and what that raises its caller names; but nothing leads out of its memory."""
    chosen = random.Random(seed)
    streams = [streamed(FUZZED, 4), streamed(FUZZED, 2), streamed(pa.Table.from_batches([PLAIN]), 10)]
    # Each alone too: else most damage is found in the first column that has some.
    streams += [streamed(FUZZED.select([name]), 4) for name in FUZZED.column_names]
    for _ in range(5000):
        data = bytearray(chosen.choice(streams))
        for _ in range(chosen.choice([1, 1, 2, 8])):
            place = chosen.randrange(len(data))
            data[place] = chosen.choice([0, 1, 127, 128, 255, data[place] ^ 1 << chosen.randrange(8)])
        read_everything(bytes(data))


def test_offsets_and_indices_that_lead_out_of_their_buffers_are_refused() -> None:
    values = pa.array(range(4), pa.int32())
    for offsets in ([0, 1000, 4], [0, -5, 4], [0, 3, 1, 4]):
        buffers = [None, pa.py_buffer(np.array(offsets, np.int32))]
        array = pa.Array.from_buffers(pa.list_(pa.int32()), len(offsets) - 1, buffers, children=[values])
        with assert_error(ShardCorruptError, path="file") as caught:
            rows_of([pa.RecordBatch.from_arrays([array], ["x"])], None, "file")
        assert "Arrow" in str(caught.value)
    texts = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    with assert_error(ShardCorruptError, path="file") as caught:
        rows_of([pa.RecordBatch.from_arrays([texts], ["x"])], None, "file")
    assert "UTF8" in str(caught.value)


# --- Hugging Face datasets ---


def test_what_datasets_writes_to_parquet_is_what_it_reads(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "images": datasets.Sequence(datasets.Image()),
            "grid": datasets.Array2D((2, 3), "float32"),
            "cube": datasets.Array3D((None, 2, 2), "int16"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "ids": datasets.Sequence(datasets.Value("int32")),
            "boxes": datasets.Sequence(datasets.Sequence(datasets.Value("float32"), length=4)),
            "turns": [{"role": datasets.Value("string"), "tokens": datasets.Sequence(datasets.Value("int64"))}],
        }
    )
    pictures = [Image.fromarray(np.full((4, 5, 3), number, np.uint8)) for number in range(6)]
    rows = [
        {
            "image": picture,
            "images": pictures[:number],
            "grid": np.full((2, 3), number, np.float32),
            "cube": np.full((number, 2, 2), number, np.int16),
            "label": number % 2,
            "ids": list(range(number)),
            "boxes": [[0.0, 1.0, 2.0, 3.0]] * number,
            "turns": [{"role": "user", "tokens": [number, 1]}] * number,
        }
        for number, picture in enumerate(pictures)
    ]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path, batch_size=4)
    batches = parquet.ParquetFile(path).read().to_batches()
    found = rows_of(batches, None, "a.parquet")
    for number, row in enumerate(rows):
        sample = found[number]
        assert list(sample) == list(features)
        np.testing.assert_array_equal(np.asarray(sample["image"]), np.asarray(pictures[number]))
        assert [np.asarray(one).max() for one in sample["images"]] == list(range(number))
        for name in ("grid", "cube", "ids"):
            np.testing.assert_array_equal(sample[name], row[name])
        assert (sample["grid"].dtype, sample["cube"].dtype) == (np.float32, np.int16)
        assert (sample["cube"].shape, sample["boxes"].shape) == ((number, 2, 2), (number, 4))
        assert sample["label"] == number % 2
        assert [(turn["role"], turn["tokens"].tolist()) for turn in sample["turns"]] == [("user", [number, 1])] * number
    assert {name: one.encoding for name, one in found.columns.items()} == {
        "image": "pil",
        "images": "list[pil]",
        "grid": "ndarray:float32:2,3",
        "cube": "ndarray:int16",
        "label": "int64",
        "ids": "ndarray:int32",
        "boxes": "ndarray:float32",
        "turns": "json",
    }
    plain = rows_of(batches, ["grid", "label"], "a.parquet")
    np.testing.assert_array_equal(table_of(plain, [5, 1])["grid"][:, 1, 1], [5, 1])


def test_an_image_of_which_datasets_stored_the_path_alone(tmp_path: Path) -> None:
    Image.new("L", (2, 2), 7).save(tmp_path / "one.png")
    features = datasets.Features({"image": datasets.Image()})
    data = datasets.Dataset.from_dict({"image": [str(tmp_path / "one.png")]}, features=features)
    data.to_parquet(tmp_path / "a.parquet")
    with assert_error(EncodingError, path="file", sample=0) as caught:
        rows_of(parquet.read_table(tmp_path / "a.parquet").to_batches())[0]
    assert "embed_table_storage" in str(caught.value)
    embedded = data.with_format("arrow").map(embed_table_storage, batched=True)
    embedded.to_parquet(tmp_path / "b.parquet")
    (tmp_path / "one.png").unlink()
    found = rows_of(parquet.read_table(tmp_path / "b.parquet").to_batches())[0]
    assert np.asarray(found["image"]).tolist() == [[7, 7], [7, 7]]


def test_a_length_beyond_any_memory_is_damage_and_a_lack_of_memory_is_not() -> None:
    with (
        assert_error(ShardCorruptError, path="a file") as caught,
        sound_arrow("a file"),
    ):
        pa.allocate_buffer(2**60)
    assert "malloc" in str(caught.value)
    for lack in (MemoryError("no room"), pa.ArrowMemoryError("malloc of size 4096 failed")):
        with pytest.raises(MemoryError), sound_arrow("a file"):
            raise lack
