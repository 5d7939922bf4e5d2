"""NumPy's own files, written by numpy: their rows are samples, and nothing that is wrong with them goes unnoticed."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    IndexFormatError,
    ObjectNotFoundError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.formats.columns import check_readable_columns, column_lengths, flat_column, read_columns
from lightning_streaming.formats.npy import NpyFormat, RowsReader
from lightning_streaming.formats.shard import may_be_flat, plain_kind
from tests.formats.stored import Folder, arrays_in, describe, opened, read_all
from tests.helpers import assert_error

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
RECORDS = np.zeros(5, np.dtype([("label", "<i4"), ("pixels", "u1", (2, 3)), ("名", "U4"), ("flag", "?")], align=True))
RECORDS["label"] = np.arange(5)
RECORDS["pixels"] = np.arange(30).reshape(5, 2, 3)
RECORDS["名"] = ["a", "bb", "", "dé", "e"]
DTYPES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8"]


def save(path: Path, array: NDArray[Any], version: tuple[int, int] | None = None) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    version = version or ((3, 0) if array.dtype.names else (1, 0))
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version, allow_pickle=True)
    return path.parent


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_rows_are_samples(tmp_path: Path, version: tuple[int, int]) -> None:
    save(tmp_path / "b.npy", NUMBERS[2:], version)
    save(tmp_path / "a.npy", NUMBERS[:2], version)
    save(tmp_path / "c" / "d.npy", NUMBERS[:0], version)
    infos = describe(tmp_path, "npy")
    assert [(info.raw_data.basename, info.samples) for info in infos] == [("a.npy", 2), ("b.npy", 2), ("c/d.npy", 0)]
    samples = read_all(infos, tmp_path)
    assert all(list(sample) == ["values"] for sample in samples)
    assert np.array_equal([sample["values"] for sample in samples], NUMBERS)
    assert samples[0]["values"].dtype == np.float32


def test_samples_outlive_their_file_and_may_be_written(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    reader = opened(describe(tmp_path, "npy")[0], tmp_path)
    sample = reader[3]
    reader.close()
    sample["values"][:] += 1
    assert np.array_equal(sample["values"], NUMBERS[3] + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_dtypes_come_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    save(tmp_path / "a.npy", array)
    samples = read_all(describe(tmp_path, "npy"), tmp_path)
    for sample, expected in zip(samples, array, strict=True):
        assert sample["values"].dtype == np.dtype(dtype).newbyteorder("=")
        assert np.array_equal(sample["values"], expected)


def test_rows_of_one_value_are_numpy_scalars_and_texts_are_texts(tmp_path: Path) -> None:
    for name, values in {
        "n": np.arange(3, dtype=np.int16),
        "s": np.array(["a", "bc"]),
        "b": np.array([b"x", b""]),
    }.items():
        save(tmp_path / name / "a.npy", values)
    found = {name: read_all(describe(tmp_path / name, "npy"), tmp_path / name)[0]["values"] for name in "nsb"}
    assert found == {"n": 0, "s": "a", "b": b"x"}
    assert {name: type(value) for name, value in found.items()} == {"n": np.int16, "s": str, "b": bytes}


def test_fields_of_records_are_columns(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", RECORDS)
    infos = describe(tmp_path, "npy")
    samples = read_all(infos, tmp_path)
    assert [list(sample) for sample in samples] == [["label", "pixels", "名", "flag"]] * 5
    for sample, expected in zip(samples, RECORDS, strict=True):
        assert all(np.array_equal(sample[name], expected[name]) for name in sample)
    assert [list(sample) for sample in read_all(infos, tmp_path, ["pixels"])] == [["pixels"]] * 5
    with assert_error(ConfigError, option="columns", path="a.npy") as caught:
        opened(infos[0], tmp_path, ["x"])
    assert "'x'" in str(caught.value)


def test_blocks_are_cut_from_long_arrays(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.arange(23, dtype=np.uint16))
    save(tmp_path / "b.npy", np.arange(100, 104, dtype=np.uint16))
    infos = describe(tmp_path, "npy", 5)
    assert [info.samples for info in infos] == [4, 0]
    samples = read_all(infos, tmp_path)
    assert [sample["tokens"].tolist() for sample in samples] == np.arange(20).reshape(4, 5).tolist()


@pytest.mark.parametrize("index", [-1, 4, 2**40])
def test_other_numbers_are_no_samples(tmp_path: Path, index: int) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    reader = opened(describe(tmp_path, "npy")[0], tmp_path)
    with assert_error(SampleIndexError, path="a.npy", sample=index):
        reader[index]
    reader.close()


def test_only_headers_are_read_to_describe_files(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.zeros((1000, 1000)))
    save(tmp_path / "b.npy", np.zeros((10, 1000)))
    folder = Folder(tmp_path)
    first = list(NpyFormat().describe(folder, {}))
    assert folder.bytes_read == 2 * 4096
    again = Folder(tmp_path)
    known = {info.raw_data.basename: info for info in first}
    assert list(NpyFormat().describe(again, known)) == first
    assert again.bytes_read == 0
    save(tmp_path / "b.npy", np.zeros((11, 1000)))
    assert [info.samples for info in NpyFormat().describe(Folder(tmp_path), known)] == [1000, 11]


def test_what_is_known_of_blocks_of_another_length_is_not_taken(tmp_path: Path) -> None:
    folder = Folder(save(tmp_path / "a.npy", np.arange(23)))
    known = {"a.npy": next(iter(NpyFormat().describe(folder, {})))}
    assert [info.samples for info in NpyFormat(5).describe(folder, known)] == [4]


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    array = np.zeros(3, [(f"column_{number}", "<i4") for number in range(1000)])
    array["column_999"] = [7, 8, 9]
    save(tmp_path / "a.npy", array)
    samples = read_all(describe(tmp_path, "npy"), tmp_path, ["column_999"])
    assert [sample["column_999"] for sample in samples] == [7, 8, 9]


# --- what is refused ---


def test_parts_of_a_large_file_map_their_rows_alone(tmp_path: Path) -> None:
    whole = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (3 << 16, 1000))  # a hole, but for a few
    infos = describe(tmp_path, "npy")
    firsts = [int(info.raw_data.basename.rpartition("/")[2].partition("-")[0]) for info in infos]
    assert len(firsts) > 10
    whole[firsts, 0] = firsts
    readers = [NpyFormat().open(info, tmp_path, None) for info in infos]
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if line.endswith(str(tmp_path / "a.npy"))]
    # One of them is the array that was written.
    assert sum(int(stop, 16) - int(start, 16) for start, stop in mapped) < 3 * whole.nbytes
    assert sum(map(len, readers)) == len(whole)
    assert [int(reader[0]["values"][0]) for reader in readers] == firsts
    flat = readers[1].flat_column("values")
    assert np.frombuffer(flat.data, flat.dtype, 1, int(flat.starts[0])).tolist() == [firsts[1]]
    del flat
    for reader in readers:
        reader.close()


def test_a_place_without_such_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with assert_error(ConfigError, path=tmp_path):
        describe(tmp_path, "npy")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([{}, []], object), "Python objects"),
        (np.zeros(2, [("x", "i4"), ("y", "O")]), "Python objects"),
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), "Fortran order"),
        (np.array(3.0), "of no dimension"),
        (np.zeros((2, 0)), "samples of 0 bytes"),
        (np.zeros((2, 2), [("x", "i4")]), "an array of records can have one dimension"),
        (np.zeros(2, "V5"), "cannot be read"),
        (np.zeros(2, [("x", [("y", "i4")])]), "cannot be read"),
    ],
)
def test_arrays_that_hold_no_samples_are_refused(tmp_path: Path, array: NDArray[Any], said: str) -> None:
    save(tmp_path / "odd.npy", array)
    with assert_error(FormatError, path="odd.npy") as caught:
        describe(tmp_path, "npy")
    assert said in str(caught.value)


def test_fortran_order_of_one_dimension_is_an_order_like_any(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", np.arange(3)) / "a.npy"
    path.write_bytes(path.read_bytes().replace(b"'fortran_order': False", b"'fortran_order': True "))
    assert [sample["values"] for sample in read_all(describe(tmp_path, "npy"), tmp_path)] == [0, 1, 2]


def test_blocks_of_rows_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    with assert_error(FormatError, option="block_length", path="a.npy"):
        describe(tmp_path, "npy", 5)


@pytest.mark.parametrize("other", [NUMBERS.astype(np.float64), NUMBERS[:, :2], RECORDS])
def test_files_of_different_kinds_are_refused(tmp_path: Path, other: NDArray[Any]) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    save(tmp_path / "b.npy", other)
    with assert_error(FormatError, path="b.npy"):
        describe(tmp_path, "npy")


HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not begin like a .npy file"),
        (b"\x93NUMPX\x01\x00", "does not begin like a .npy file"),
        (b"\x93NUMPY\x04\x00" + HEADER, "version"),
        (b"\x93NUMPY", "version"),
        (b"\x93NUMPY\x01\x00\xff", "the file is truncated"),
        (b"\x93NUMPY\x01\x00\xff\xff" + HEADER, "the file is truncated"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + HEADER, "the file is truncated"),
        *(
            (b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(24), said)
            for text, said in (
                (b"[" * 5000, "invalid header"),
                (b"1", "invalid header"),
                (b"{'descr': '<f4', 'shape': (2, 3)}", "invalid header"),
                (HEADER.replace(b"<f4", b"<f\xff"), "invalid header"),
                (HEADER.replace(b"'<f4'", b"open"), "invalid header"),
                (HEADER.replace(b"(2, 3)", b"[2, 3]"), "invalid header"),
                (HEADER.replace(b"(2, 3)", b"(2, -3)"), "invalid header"),
                (HEADER.replace(b"(2, 3)", b"(2, True)"), "invalid header"),
                (HEADER.replace(b"}", b"'more': 1}"), "invalid header"),
                (HEADER.replace(b"(2, 3)", b"(9" + b"9" * 100 + b", 3)"), "must have"),
                (HEADER.replace(b"(2, 3)", b"(2, 4)"), "must have"),
            )
        ),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "bad.npy").write_bytes(data)
    with assert_error(ShardCorruptError, path="bad.npy") as caught:
        describe(tmp_path, "npy")
    assert said in str(caught.value)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_than_it_says_is_refused(tmp_path: Path, change: int) -> None:
    path = save(tmp_path / "a.npy", NUMBERS) / "a.npy"
    (tmp_path / "a.npy").write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    with assert_error(ShardCorruptError, path=path) as caught:
        describe(tmp_path, "npy")
    assert "more" in str(caught.value)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (NUMBERS[:3], "must have"),
        (NUMBERS.view(np.int32), "has changed since"),
        (NUMBERS.reshape(2, 6, 2), "has changed since"),
        (NUMBERS.reshape(4, 2, 3), "has changed since"),
        (np.asfortranarray(NUMBERS), "Fortran order"),
    ],
)
def test_a_file_that_was_changed_since_the_index_is_refused(tmp_path: Path, array: NDArray[Any], said: str) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    info = describe(tmp_path, "npy")[0]
    save(tmp_path / "a.npy", array)
    with pytest.raises(FormatError, match=rf"a\.npy .*{said}"):
        opened(info, tmp_path)
    (tmp_path / "a.npy").unlink()
    with assert_error(ObjectNotFoundError, path=info.raw_data.basename):
        opened(info, tmp_path)


@pytest.mark.parametrize(
    "told",
    [
        "{}",
        "[]",
        "x",
        '{"row_bytes": 0, "columns": []}',
        '{"row_bytes": 4, "columns": []}',
        '{"row_bytes": 4}',
        '{"row_bytes": 4, "columns": 3}',
        '{"row_bytes": 1e3, "columns": [["values", "<f4", [], 0]]}',
        '{"row_bytes": 9999999999999, "columns": [["values", "<f4", [], 0]]}',
        '{"row_bytes": 4, "columns": [["other", "<f4", [], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "<f4", [], 1]]}',
        '{"row_bytes": 4, "columns": [["values", "<f4", [], -1]]}',
        '{"row_bytes": 4, "columns": [["values", "<f4", [2], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "<f4", [-1], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "u1", [9999999999], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "O", [], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "none", [], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "i1,i1", [], 0]]}',
        '{"row_bytes": 4, "columns": [["values", 4, [], 0]]}',
        '{"row_bytes": 4, "columns": [["values", "<f4", [], 0], ["values", "<f4", [], 0]]}',
    ],
)
def test_an_index_that_describes_no_rows_is_refused(tmp_path: Path, told: str) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    info = describe(tmp_path, "npy")[0]
    wrong = replace(info, schema={**info.schema, "described": told})
    with pytest.raises(IndexFormatError):
        opened(wrong, tmp_path)


# --- whatever happens to their bytes ---

ARRAYS = (NUMBERS, RECORDS, np.arange(7, dtype=">i2"))


@QUICK
@given(st.data())
def test_damaged_files_give_what_their_bytes_are_or_a_typed_error(tmp_path: Path, data: st.DataObject) -> None:
    array = data.draw(st.sampled_from(ARRAYS))
    path = save(tmp_path / "a.npy", array) / "a.npy"
    whole, infos = path.read_bytes(), describe(tmp_path, "npy")
    damaged = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.sampled_from([len(whole), len(whole), len(whole) - 1, 130, 9, 0]))])
    with suppress(FormatError):  # of an index that was made of it now
        read_all(describe(tmp_path, "npy"), tmp_path)
    try:
        samples = read_all(infos, tmp_path, ["label"] if array is RECORDS else None)
    except FormatError:
        return
    values = np.frombuffer(bytes(damaged[-array.nbytes :]), array.dtype).reshape(array.shape)
    expected = values["label"] if array is RECORDS else values
    assert np.array_equal([next(iter(one.values())) for one in samples], expected, equal_nan=True)


@QUICK
@given(arrays_of.arrays(arrays_of.scalar_dtypes(), arrays_of.array_shapes(max_dims=3, max_side=4)))
def test_any_array_comes_back(tmp_path: Path, array: NDArray[Any]) -> None:
    save(tmp_path / "a.npy", array)
    if not array.dtype.itemsize:
        return
    samples = read_all(describe(tmp_path, "npy"), tmp_path)
    expected = array.astype(array.dtype.newbyteorder("="))
    for sample, row in zip(samples, expected, strict=True):
        assert np.asarray(sample["values"], row.dtype).tobytes() == row.tobytes()


def test_text_of_no_characters_is_a_typed_error(tmp_path: Path) -> None:
    for name, texts in {"one": np.array(["a", "bc"]), "two": np.array([["a", "b"], ["c", "d"]], ">U2")}.items():
        path = save(tmp_path / name / "a.npy", texts) / "a.npy"
        (info,), whole = describe(path.parent, "npy"), path.read_bytes()
        path.write_bytes(whole[:-4] + b"\x7f" * 4)
        reader = opened(info, path.parent)
        assert np.array_equal(reader[0]["values"], texts[0])
        with assert_error(EncodingError, path=path, sample=1) as caught:
            reader[1]
        assert "'values'" in str(caught.value)
        reader.close()
        with assert_error(EncodingError, path=path) as caught:
            read_columns(info, path.parent, ["values"])
        assert "'values'" in str(caught.value)


# --- many at once ---


def rows_of(reader: Any, indexes: list[int]) -> dict[str, NDArray[Any]]:
    plain = reader.plain_rows()
    assert plain is not None
    rows = np.empty(len(indexes), plain.row)
    reader.copy_rows(np.array(indexes), rows)
    assert plain.are(rows)
    return dict(plain.columns_of(rows))


def test_rows_are_plain(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", NUMBERS)
    info = describe(tmp_path, "npy")[0]
    reader = opened(info, tmp_path)
    assert np.array_equal(rows_of(reader, [3, 0, 3])["values"], NUMBERS[[3, 0, 3]])
    assert isinstance(reader, RowsReader)
    assert plain_kind(info, None) is reader.plain_rows()
    reader.close()


def test_records_are_plain_where_torch_has_their_dtypes(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", RECORDS)
    info = describe(tmp_path, "npy")[0]
    assert plain_kind(info, None) is None
    assert not may_be_flat(info)
    wanted = ["pixels", "flag"]
    reader = opened(info, tmp_path, wanted)
    found = rows_of(reader, [4, 1])
    assert list(found) == wanted
    assert all(np.array_equal(found[name], RECORDS[name][[4, 1]]) for name in wanted)
    reader.close()


@pytest.mark.parametrize("dtype", [">i4", "<U3", "S3", "<M8[s]"])
def test_what_torch_cannot_hold_is_not_plain(tmp_path: Path, dtype: str) -> None:
    save(tmp_path / "a.npy", np.zeros((3, 2), dtype))
    info = describe(tmp_path, "npy")[0]
    assert plain_kind(info, None) is None
    assert not may_be_flat(info)


def test_columns_tell_what_they_are(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", RECORDS)
    info = describe(tmp_path, "npy")[0]
    assert info.schema["column_encodings"] == ("int32", "ndarray:uint8:2,3", "str", "bool of shape ()")
    check_readable_columns(info, ["label", "名"], "where=...")
    found = read_columns(info, tmp_path, ["label", "名"])
    assert np.array_equal(found["label"], np.arange(5, dtype=np.int32))
    assert found["名"] == ["a", "bb", "", "dé", "e"]
    with pytest.raises(ConfigError, match="reads column 'flag', which is 'bool of shape"):
        check_readable_columns(info, ["flag"], "where=...")


def test_rows_of_one_dimension_are_flat_and_equally_long(tmp_path: Path) -> None:
    tokens = np.arange(12, dtype=np.uint16).reshape(4, 3)
    save(tmp_path / "a.npy", tokens)
    info = describe(tmp_path, "npy")[0]
    told = column_lengths(info, "values")
    assert (told.constant, told.is_in_offsets) == (3, False)
    assert told.read_local(tmp_path).tolist() == [3, 3, 3, 3]
    reader = opened(info, tmp_path)
    assert arrays_in(flat_column(reader, info, "values")) == tokens.tolist()
    reader.close()
    save(tmp_path / "b" / "a.npy", NUMBERS)
    other = describe(tmp_path / "b", "npy")[0]
    with assert_error(ConfigError, option="column") as caught:
        column_lengths(other, "values")
    assert "counted" in str(caught.value)
    reader = opened(other, tmp_path / "b")
    with assert_error(EncodingError, path="a.npy") as caught:
        flat_column(reader, other, "values")
    assert "not of one dimension" in str(caught.value)
    reader.close()


def test_arrays_within_records_are_flat(tmp_path: Path) -> None:
    records = np.zeros(3, [("label", "u1"), ("tokens", "<i4", (2,))])
    records["tokens"] = np.arange(6).reshape(3, 2)
    info = describe(save(tmp_path / "a.npy", records), "npy")[0]
    reader = opened(info, tmp_path)
    assert arrays_in(flat_column(reader, info, "tokens")) == records["tokens"].tolist()
    reader.close()
