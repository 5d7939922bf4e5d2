"""Pairs of .bin and .idx files, laid out here byte by byte: documents, blocks, and what is wrong with them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    IndexFormatError,
    ObjectNotFoundError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.formats.columns import column_lengths, flat_column
from lightning_streaming.formats.index import FileInfo
from lightning_streaming.formats.megatron import MegatronFormat
from lightning_streaming.formats.npy import RowsReader
from lightning_streaming.formats.shard import may_be_flat, plain_kind
from lightning_streaming.formats.shard_table import ShardInfo
from tests.formats.small_shards import damaged_bytes
from tests.formats.stored import Folder, arrays_in, describe, opened, read_all
from tests.helpers import assert_error

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Parts = Mapping[str, bytes]
"""Of an index file, by name."""
NOTHING: Parts = {}
CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
DOCUMENTS: list[list[list[int]]] = [[[1, 2, 3]], [[4], [], [5, 6]], [], [[7, 8, 9, 10]], [[]]]
"""Each of sequences of tokens."""
WHOLE = [[1, 2, 3], [4, 5, 6], [], [7, 8, 9, 10], []]


def index_bytes(
    lengths: Sequence[int], borders: Sequence[int], code: int = 8, modes: bool = False, wrong: Parts = NOTHING
) -> bytes:
    """An index file, but for parts that are wrong."""
    size = np.dtype(CODES.get(code, "u1")).itemsize
    pointers = np.cumsum([0, *lengths])[: len(lengths)] * size
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", code),
        "sequences": struct.pack("<Q", len(lengths)),
        "borders": struct.pack("<Q", len(borders)),
        "lengths": np.array(lengths, "<i4").tobytes(),
        "pointers": pointers.astype("<i8").tobytes(),
        "documents": np.array(borders, "<i8").tobytes(),
        "modes": bytes(len(lengths)) if modes else b"",
    }
    return b"".join({**parts, **wrong}.values())


def write(
    root: Path, documents: Sequence[Sequence[Sequence[int]]] = DOCUMENTS, name: str = "x", code: int = 8, **more: Any
) -> Path:
    root.mkdir(exist_ok=True, parents=True)
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    borders = np.cumsum([0, *map(len, documents)]).tolist()
    (root / f"{name}.bin").write_bytes(np.array(tokens, CODES[code]).tobytes())
    (root / f"{name}.idx").write_bytes(index_bytes([*map(len, sequences)], borders, code, **more))
    return root


def tokens_of(infos: Sequence[ShardInfo], root: Path) -> list[list[int]]:
    return [sample["tokens"].tolist() for sample in read_all(infos, root)]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_documents_are_samples(tmp_path: Path, code: int, modes: bool) -> None:
    write(tmp_path, code=code, modes=modes)
    write(tmp_path, [[[11]]], "more", code)
    infos = describe(tmp_path, "megatron")
    assert [(info.raw_data.basename, info.samples) for info in infos] == [("more.bin", 1), ("x.bin", 5)]
    assert infos[0].raw_meta is not None
    assert infos[0].raw_meta.basename == "more.idx"
    samples = read_all(infos, tmp_path)
    assert [sample["tokens"].tolist() for sample in samples] == [[11], *WHOLE]
    assert {sample["tokens"].dtype for sample in samples} == {np.dtype(CODES[code])}


def test_no_documents_are_no_samples(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert tokens_of(describe(tmp_path, "megatron"), tmp_path) == []
    write(tmp_path, [[[]], []])
    assert tokens_of(describe(tmp_path, "megatron"), tmp_path) == [[], []]
    assert tokens_of(describe(tmp_path, "megatron", 3), tmp_path) == []


def test_samples_outlive_their_files_and_may_be_written(tmp_path: Path) -> None:
    reader = opened(describe(write(tmp_path), "megatron")[0], tmp_path)
    sample = reader[3]
    with assert_error(SampleIndexError, path="x.bin", sample=5):
        reader[5]
    reader.close()
    sample["tokens"][:] += 1
    assert sample["tokens"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("length", [1, 3, 4, 10, 11])
def test_blocks_pass_over_borders_of_documents(tmp_path: Path, length: int) -> None:
    infos = describe(write(tmp_path), "megatron", length)
    assert infos[0].raw_meta is None
    tokens = np.arange(1, 11, dtype=np.uint16)
    assert tokens_of(infos, tmp_path) == tokens[: 10 // length * length].reshape(-1, length).tolist()


def test_little_is_read_to_describe_files(tmp_path: Path) -> None:
    write(tmp_path, [[[1] * 10]] * 5000)
    folder = Folder(tmp_path)
    first = {info.raw_data.basename: info for info in MegatronFormat().describe(folder, {})}
    assert 0 < folder.bytes_read < 100
    again = Folder(tmp_path)
    assert list(MegatronFormat().describe(again, first)) == list(first.values())
    assert again.bytes_read == 0
    assert next(iter(MegatronFormat(100).describe(again, first))).samples == 500
    write(tmp_path, [[[1] * 10], *[[[1] * 10]] * 4998, [[1] * 5, [1] * 5]])
    (changed,) = MegatronFormat().describe(Folder(tmp_path), first)
    assert changed.raw_meta != first["x.bin"].raw_meta


# --- what is refused ---


def test_a_place_without_such_files_is_refused(tmp_path: Path) -> None:
    with assert_error(ConfigError, path=tmp_path):
        describe(tmp_path, "megatron")


@pytest.mark.parametrize(("gone", "left"), [("x.idx", "x.bin"), ("x.bin", "x.idx")])
def test_half_a_pair_is_refused(tmp_path: Path, gone: str, left: str) -> None:
    write(tmp_path)
    (tmp_path / gone).unlink()
    with assert_error(FormatError, path=left) as caught:
        describe(tmp_path, "megatron")
    assert "next" in str(caught.value)


def test_tokens_of_different_kinds_are_refused(tmp_path: Path) -> None:
    write(write(tmp_path), name="y", code=4)
    with assert_error(FormatError, path="y.bin"):
        describe(tmp_path, "megatron")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin like an .idx file"),
        ({"version": struct.pack("<Q", 2)}, "version 2"),
        ({"code": b"\x09"}, "dtype code 9"),
        ({"borders": struct.pack("<Q", 0)}, "0 document borders"),
        ({"sequences": struct.pack("<Q", 2**63)}, "must have"),
        ({"borders": struct.pack("<Q", 2)}, "must have"),
        ({"documents": np.array([0, 1, 4, 4, 5, 9], "<i8").tobytes()}, "ends with number 9"),
        ({"lengths": np.array([3, 1, 0, 2, 4, 1], "<i4").tobytes()}, "x.bin has 22 bytes of tokens, but it has 20"),
        ({"modes": b"x"}, "must have"),
    ],
)
@pytest.mark.parametrize("block_length", [None, 2])
def test_wrong_index_files_are_refused_at_once(
    tmp_path: Path, wrong: Parts, said: str, block_length: int | None
) -> None:
    write(tmp_path, wrong=wrong)
    with assert_error(ShardCorruptError, path="x.idx") as caught:
        describe(tmp_path, "megatron", block_length)
    assert said in str(caught.value)


@pytest.mark.parametrize("stop", [0, 8, 33, 34, 60, -1])
def test_an_index_file_that_is_cut_is_refused(tmp_path: Path, stop: int) -> None:
    write(tmp_path)
    (tmp_path / "x.idx").write_bytes((tmp_path / "x.idx").read_bytes()[:stop])
    with assert_error(ShardCorruptError, path="x.idx"):
        describe(tmp_path, "megatron")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"code": b"\x04"}, "sequence 1: must begin at byte 12"),
        ({"lengths": np.array([2, 2, 0, 2, 4, 0], "<i4").tobytes()}, "sequence 1: must begin at byte 4"),
        ({"lengths": np.array([3, -1, 2, 2, 4, 0], "<i4").tobytes()}, "sequence 1"),
        ({"pointers": np.array([0, 6, 8, 8, 11, 20], "<i8").tobytes()}, "sequence 4: must begin at byte 12"),
        ({"documents": np.array([0, 1, 5, 4, 5, 6], "<i8").tobytes()}, "decrease"),
        ({"documents": np.array([1, 1, 4, 4, 5, 6], "<i8").tobytes()}, "begin with 0"),
        ({"documents": np.array([0, -1, 4, 4, 5, 6], "<i8").tobytes()}, "decrease"),
    ],
)
def test_every_number_is_checked_when_documents_are_read(tmp_path: Path, wrong: Parts, said: str) -> None:
    info = describe(write(tmp_path, wrong=wrong), "megatron")[0]
    with assert_error(ShardCorruptError, path="x.idx") as caught:
        opened(info, tmp_path)
    assert said in str(caught.value)
    with assert_error(ShardCorruptError, path="x.idx") as caught:
        column_lengths(info, "tokens").read_local(tmp_path)
    assert said in str(caught.value)


def test_borders_are_checked_across_what_is_looked_at_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_streaming.formats.megatron._AT_ONCE", 2)
    assert tokens_of(describe(write(tmp_path), "megatron"), tmp_path) == WHOLE
    for wrong in ([0, 4, 1, 4, 5, 6], [0, 1, 4, 3, 5, 6]):
        (tmp_path / "x.idx").write_bytes(index_bytes([3, 1, 0, 2, 4, 0], wrong))
        with assert_error(ShardCorruptError, path="x.idx") as caught:
            opened(describe(tmp_path, "megatron")[0], tmp_path)
        assert "decrease" in str(caught.value)


def test_files_that_were_changed_since_the_index_are_refused(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "megatron")[0]
    write(tmp_path, [[[1], [2], [3], [4], [5], [6], [7]], [[8, 9, 10]]])  # of the same size
    with assert_error(ShardCorruptError, path="x.idx") as caught:
        opened(info, tmp_path)
    assert "documents" in str(caught.value)
    write(tmp_path, code=3)
    with assert_error(ShardCorruptError, path="x.idx") as caught:
        opened(info, tmp_path)
    assert "documents" in str(caught.value)
    write(tmp_path, [*DOCUMENTS[:-1], [[1]]])
    with assert_error(ShardCorruptError, path="x.idx"):
        opened(info, tmp_path)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(FormatError):
        opened(info, tmp_path)
    write(tmp_path)
    (tmp_path / "x.bin").unlink()
    with assert_error(ObjectNotFoundError, path="x.bin"):
        opened(info, tmp_path)


def test_an_index_that_describes_no_tokens_is_refused(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "megatron")[0]
    with assert_error(IndexFormatError, path="x.bin") as caught:
        opened(replace(info, raw_meta=None), tmp_path)
    assert "idx" in str(caught.value)
    for told in ("{}", '{"dtype": "O"}', '{"dtype": ["<u2"]}'):
        with assert_error(IndexFormatError, path="x.bin") as caught:
            opened(replace(info, schema={**info.schema, "described": told}), tmp_path)
        assert "tokens" in str(caught.value)


@QUICK
@given(st.data())
def test_damaged_index_files_give_what_they_say_or_a_typed_error(tmp_path: Path, data: st.DataObject) -> None:
    whole = (write(tmp_path) / "x.idx").read_bytes()
    info = describe(tmp_path, "megatron")[0]
    damaged = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    (tmp_path / "x.idx").write_bytes(damaged)
    try:
        found = tokens_of([info], tmp_path)
    except FormatError:
        assert damaged != whole
        return
    # Other borders are other documents; but all tokens are there, once and in order.
    assert [token for document in found for token in document] == list(range(1, 11))
    assert found == WHOLE or damaged[-8 * 6 :] != whole[-8 * 6 :]


@QUICK
@given(damaged_bytes(index_bytes([3, 1, 0, 2, 4, 0], [0, 1, 4, 4, 5, 6])))
def test_cut_index_files_give_samples_or_a_typed_error(tmp_path: Path, data: bytes) -> None:
    write(tmp_path)
    (tmp_path / "x.idx").write_bytes(data)
    for block_length in (None, 3):
        with suppress(FormatError):
            tokens_of(describe(tmp_path, "megatron", block_length), tmp_path)


# --- many at once ---


def test_blocks_are_plain_rows(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "megatron", 3)[0]
    reader = opened(info, tmp_path)
    assert isinstance(reader, RowsReader)
    plain = reader.plain_rows()
    assert plain is not None
    assert plain is plain_kind(info, None)
    rows = np.empty(2, plain.row)
    reader.copy_rows(np.array([2, 0]), rows)
    assert plain.columns_of(rows)["tokens"].tolist() == [[7, 8, 9], [1, 2, 3]]
    reader.close()


def test_documents_are_flat_and_not_plain(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "megatron")[0]
    assert plain_kind(info, None) is None
    assert may_be_flat(info)
    reader = opened(info, tmp_path)
    assert arrays_in(flat_column(reader, info, "tokens")) == WHOLE
    reader.close()


def test_lengths_are_told_by_the_index_file(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "megatron")[0]
    told, asked = column_lengths(info, "tokens", "uint16"), list[str]()

    def read(file: FileInfo, start: int, stop: int) -> bytes:
        asked.append(file.basename)
        return (tmp_path / file.basename).read_bytes()[start:stop]

    assert (told.constant, told.is_in_offsets, told.info) == (None, True, info)
    for found in (told.read_remote(read), told.read_local(tmp_path)):
        assert found is not None
        assert found.tolist() == [3, 3, 0, 4, 0]
    assert asked == ["x.idx"]
    with assert_error(ConfigError, option="dtype") as caught:
        column_lengths(info, "tokens", "int32")
    assert "'int32'" in str(caught.value)
    blocks = column_lengths(describe(tmp_path, "megatron", 4)[0], "tokens")
    assert blocks.constant == 4
