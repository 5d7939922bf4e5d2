"""The lengths of arrays are those that samples have, whatever tells them; and what is no such array is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import JSONWriter
from lightning_streaming.errors import ConfigError, EncodingError, FormatError, IndexFormatError, ShardCorruptError
from lightning_streaming.formats.columns import ArrayLengths, array_lengths, check_dtype
from lightning_streaming.formats.index import FileInfo, ShardInfo, parse_index
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.values import NdarrayEncoding
from tests.helpers import assert_error, write_shards
from tests.tiers import examples

DTYPES = ("uint8", "uint16", "int32", "int64", "float16", "float64")
LENGTHS = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from([255, 256, 257, 65535, 65536, 65537])), min_size=1, max_size=12
)


def shard_of(root: Path) -> ShardInfo:
    (info,) = parse_index((root / "index.json").read_bytes(), "index").shards
    return info


class Afar:
    """A shard elsewhere, of which parts are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parts: list[tuple[int, int]] = []

    def __call__(self, file: FileInfo, start: int, stop: int) -> bytes:
        self.parts.append((start, stop))
        return (self.root / file.basename).read_bytes()[start:stop]


@contextmanager
def written(values: list[Any], columns: dict[str, str], **others: Any) -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        yield write_shards(
            Path(directory) / "x", [len(values)], columns, lambda number: {"tokens": values[number], **others}
        )


def both(lengths: ArrayLengths, root: Path) -> tuple[list[int], list[int] | None, int]:
    """The lengths by the file, those by parts of it, and how many parts these took."""
    afar = Afar(root)
    found = lengths.read_remote(afar)
    return lengths.read_local(root).tolist(), None if found is None else found.tolist(), len(afar.parts)


@settings(max_examples=examples(30), deadline=None)
@given(lengths=LENGTHS, dtype=st.sampled_from(DTYPES), is_named=st.booleans(), others=st.sampled_from([0, 1, 2]))
def test_arrays_have_the_lengths_that_samples_have(lengths: list[int], dtype: str, is_named: bool, others: int) -> None:
    values = [np.ones(length, dtype) for length in lengths]
    more: list[dict[str, Any]] = [{}, {"a": 3, "z": np.float32(2)}, {"a": 3, "text": "so"}]
    encodings = {"a": "int", "z": "float32", "text": "str"}
    columns = {
        "tokens": f"ndarray:{dtype}" if is_named else "ndarray",
        **{name: encodings[name] for name in more[others]},
    }
    with written(values, columns, **more[others]) as root:
        info = shard_of(root)
        reader = MDSReader(info, root)
        assert [len(reader[number]["tokens"]) for number in range(len(lengths))] == lengths
        told = array_lengths(info, "tokens", None)
        here, afar, parts = both(told, root)
        assert here == lengths
        assert told.is_in_offsets == (is_named and others < 2)
        assert (afar, parts) == ((lengths, 1) if told.is_in_offsets else (None, 0))


@settings(max_examples=examples(30), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=12), dtype=st.sampled_from(DTYPES), lone=st.booleans()
)
def test_bytes_have_as_many_elements_as_fit(lengths: list[int], dtype: str, lone: bool) -> None:
    values = [np.ones(length, dtype).tobytes() for length in lengths]
    with written(values, {"tokens": "bytes", "text": "int" if lone else "str"}, text=7 if lone else "so") as root:
        here, afar, parts = both(array_lengths(shard_of(root), "tokens", dtype), root)
        assert here == lengths
        assert (afar, parts) == ((lengths, 1) if lone else (None, 0))


def test_a_fixed_length_is_known_without_a_look(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [3], {"t": "ndarray:int32:7"}, lambda _: {"t": np.zeros(7, np.int32)})
    told = array_lengths(shard_of(root), "t", None)
    assert both(told, tmp_path / "nowhere") == ([7] * 3, [7] * 3, 0)


def test_a_first_sample_that_starts_late_is_looked_at_by_itself(tmp_path: Path) -> None:
    columns = {"a": "ndarray:float64:1000", "tokens": "ndarray:uint16"}
    make = {"a": np.zeros(1000), "tokens": np.zeros(5, np.uint16)}
    root = write_shards(tmp_path / "x", [3], columns, lambda _: make)
    assert both(array_lengths(shard_of(root), "tokens", None), root) == ([5] * 3, [5] * 3, 2)


def changed(root: Path, at: int, new: bytes) -> None:
    path = root / shard_of(root).raw_data.basename
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])


def first_payload(root: Path) -> int:
    """Where the first sample's array starts, of samples of one array."""
    (start,) = struct.unpack_from("<I", (root / shard_of(root).raw_data.basename).read_bytes(), 4)
    return int(start) + 4


def test_a_length_that_is_written_in_more_bytes_than_it_takes_is_read_as_it_says() -> None:
    # 300 elements take a length of two bytes; 299 whose length has four bytes take as many.
    with written([np.zeros(300, np.uint16)] * 3, {"tokens": "ndarray:uint16"}) as root:
        told = array_lengths(shard_of(root), "tokens", None)
        assert both(told, root) == ([300] * 3, [300] * 3, 1)
        changed(root, first_payload(root), bytes([1 << 2 | 2]) + struct.pack("<I", 299))
        assert both(told, root) == ([299, 300, 300], None, 1)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float64"])
def test_payloads_that_no_writer_makes_have_no_length_by_their_bytes(dtype: str) -> None:
    near = [*range(1, 12), *range(250, 262), *range(65530, 65542)]
    written_bytes = {length: len(NdarrayEncoding(dtype).encode(np.zeros(length, dtype))) for length in near}
    by_bytes = {size: length for length, size in written_bytes.items()}
    with written([np.zeros(1, dtype)], {"tokens": f"ndarray:{dtype}"}) as root:
        told = array_lengths(shard_of(root), "tokens")
    for first, last in ((1, 11), (250, 261), (65530, 65541)):
        for size in range(written_bytes[first], written_bytes[last] + 1):
            found = told._by_offsets(np.array([0, 4 + size]))
            assert (None if found is None else found.tolist()) == ([by_bytes[size]] if size in by_bytes else None)
    assert told._by_offsets(np.array([0, 4 + 2])) is None  # none of no elements
    assert told._by_offsets(np.array([0, 4 + 1])) is None


def test_arrays_of_several_dimensions_are_refused() -> None:
    flat, deep = np.zeros(5, np.uint16), np.zeros((2, 301), np.uint16)
    for values in ([deep, flat], [flat, deep]):
        for columns in ({"tokens": "ndarray:uint16"}, {"tokens": "ndarray"}):
            with (
                written(values, columns) as root,
                assert_error(ConfigError, option="column", path="shard.00000.mds") as caught,
            ):
                array_lengths(shard_of(root), "tokens", None).read_local(root)
            assert "301" in str(caught.value)
    with written([deep, flat], {"tokens": "ndarray:uint16"}) as root:
        assert array_lengths(shard_of(root), "tokens", None).read_remote(Afar(root)) is None


@pytest.mark.parametrize("column", ["ndarray:uint16", "ndarray"])
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_damage_is_told_or_changes_nothing(column: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    with written([np.zeros(length, np.uint16) for length in lengths], {"tokens": column}) as root:
        info = shard_of(root)
        file = root / info.raw_data.basename
        at = data.draw(st.integers(0, file.stat().st_size - 1))
        changed(root, at, bytes([file.read_bytes()[at] ^ data.draw(st.integers(1, 255))]))
        told = array_lengths(info, "tokens")
        for read in (partial(told.read_local, root), partial(told.read_remote, Afar(root))):
            refused, found = said_of(read)
            assert not refused or info.raw_data.basename in refused
            assert found is None or len(found) == len(lengths)


def said_of(read: Callable[[], Any]) -> tuple[str, Any]:
    """What an error says, and what is found without one."""
    try:
        return "", read()
    except (FormatError, ConfigError) as error:
        return str(error), None


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    with written([np.zeros(9, np.uint16)] * 3, {"tokens": "ndarray:uint16"}) as root:
        info = shard_of(root)
        path = root / info.raw_data.basename
        whole = path.read_bytes()
        for size in (0, 3, 20, len(whole) - 1):
            path.write_bytes(whole[:size])
            with assert_error(ShardCorruptError, path="shard.00000.mds"):
                array_lengths(info, "tokens").read_local(root)
        path.write_bytes(whole[:8])
        with assert_error(ShardCorruptError, path="shard.00000.mds") as caught:
            array_lengths(info, "tokens").read_remote(Afar(root))
        assert "alone" in str(caught.value)


def test_bytes_that_are_no_elements_are_told_with_their_sample() -> None:
    with written([b"1234", b"123"], {"tokens": "bytes"}) as root:
        told = array_lengths(shard_of(root), "tokens", "uint16")
        assert told.read_remote(Afar(root)) is None
        with assert_error(EncodingError, path="shard.00000.mds", sample=1) as caught:
            told.read_local(root)
        assert "'tokens'" in str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "value", "column", "dtype", "told"),
    [
        ("bytes", b"", "tokens", None, "has encoding 'bytes'; pass their dtype"),
        ("str", "", "tokens", None, "has encoding 'str', whose tokens cannot be counted"),
        ("float32", 1.0, "tokens", None, "name a column of integers that holds the length"),
        ("json", {}, "tokens", None, "tokenize={'tokenizer': 'tokenizer.json', 'chat': 'tokens'}"),
        ("int", 3, "tokens", None, "or pass a function of columns, like lengths=lambda text"),
        ("ndarray:int32:2,2", np.zeros((2, 2), np.int32), "tokens", None, "'ndarray:int32:2,2'"),
        ("ndarray:int32", np.zeros(2, np.int32), "tokens", "uint16", "but dtype='uint16'; leave dtype out"),
        ("ndarray:int32", np.zeros(2, np.int32), "token", None, "did you mean 'tokens'?"),
    ],
)
def test_what_has_no_length_is_refused_with_the_ways_out(
    tmp_path: Path, encoding: str, value: Any, column: str, dtype: str | None, told: str
) -> None:
    root = write_shards(tmp_path / "x", [1], {"tokens": encoding}, lambda _: {"tokens": value})
    with pytest.raises(ConfigError) as refused:
        array_lengths(shard_of(root), column, dtype)
    assert told in str(refused.value)


def test_columns_of_text_formats_are_no_arrays(tmp_path: Path) -> None:
    with JSONWriter(out=str(tmp_path / "x"), columns={"text": "str"}) as writer:
        writer.write({"text": "so"})
    with assert_error(ConfigError, option="column") as caught:
        array_lengths(shard_of(tmp_path / "x"), "text", "uint8")
    assert "'str'" in str(caught.value)


def test_an_index_that_is_wrong_is_told() -> None:
    with written([np.zeros(3, np.uint16)], {"tokens": "ndarray:uint16"}) as root:
        path = root / "index.json"
        path.write_text(path.read_text().replace('"column_sizes": [null]', '"column_sizes": [12]'))
        with pytest.raises(IndexFormatError):
            array_lengths(shard_of(root), "tokens").read_local(root)


@pytest.mark.parametrize("dtype", ["", "uint15", "str", "O", "complex64", 3, None])
def test_what_is_no_dtype_of_numbers_is_refused(dtype: Any) -> None:
    with assert_error(ConfigError, option="dtype") as caught:
        check_dtype(dtype)
    assert "numbers" in str(caught.value)
