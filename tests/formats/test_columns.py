"""Columns read whole, beside the samples read one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError, FormatError, ShardCorruptError
from lightning_streaming.formats import columns
from lightning_streaming.formats.columns import check_readable_columns, joined, read_columns
from lightning_streaming.formats.index import ShardInfo, parse_index
from lightning_streaming.formats.shard import open_shard
from lightning_streaming.writing.writers import MDSWriter
from tests.helpers import assert_error

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255).map(np.uint8),
    "int16": st.integers(-(2**15), 2**15 - 1).map(np.int16),
    "uint64": st.integers(0, 2**64 - 1).map(np.uint64),
    "float16": st.floats(width=16, allow_nan=False).map(np.float16),
    "float64": st.floats(allow_nan=False).map(np.float64),
    "str": st.text(max_size=9),
    "bytes": st.binary(max_size=9),
    "str_int": st.integers(),
    "ndarray:uint8": st.lists(st.integers(0, 255), min_size=1, max_size=5).map(lambda one: np.array(one, np.uint8)),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, Any]]]:
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6))
    named = {"5": "int16", **{f"{place}{kind[0]}": kind for place, kind in enumerate(kinds)}}
    row = st.fixed_dictionaries({name: VALUES[kind] for name, kind in named.items()})
    return named, draw(st.lists(row, min_size=1, max_size=20))


@settings(deadline=None)
@given(table=tables(), at_once=st.integers(1, 7))
def test_columns_are_what_the_samples_have(
    tmp_path_factory: pytest.TempPathFactory, table: tuple[dict[str, str], list[dict[str, Any]]], at_once: int
) -> None:
    named, rows = table
    root = tmp_path_factory.mktemp("table")
    with MDSWriter(out=str(root / "x"), columns=named) as writer:
        for row in rows:
            writer.write(row)
    info = only_shard(root / "x")
    told = [name for name, kind in named.items() if not kind.startswith("ndarray")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_AT_ONCE", at_once)
        found = read_columns(info, root / "x", told)
    reader = open_shard(info, root / "x")
    for name in told:
        assert list(found[name]) == [reader[index][name] for index in range(len(rows))]
    reader.close()


def only_shard(root: Path) -> ShardInfo:
    (info,) = parse_index((root / "index.json").read_bytes(), "index.json").shards
    return info


def write(root: Path, **columns_: str) -> Path:
    with MDSWriter(out=str(root), columns=columns_) as writer:
        for number in range(5):
            writer.write({"id": number, "text": "ä" * number})
    return root


def test_json_is_told_as_its_text(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"meta": "json"}) as writer:
        writer.write({"meta": {"a": [1, None]}})
    info = only_shard(tmp_path / "x")
    assert read_columns(info, tmp_path / "x", ["meta"]) == {"meta": ['{"a": [1, null]}']}


def test_damage_ends_in_an_error_that_names_the_file(tmp_path: Path) -> None:
    root = write(tmp_path / "x", id="int", text="str")
    info = only_shard(root)
    path, whole = root / "shard.00000.mds", (root / "shard.00000.mds").read_bytes()
    text = whole.rindex("ää".encode())
    path.write_bytes(whole[:text] + b"\xff" + whole[text + 1 :])
    with assert_error(EncodingError, path="shard.00000.mds") as caught:
        read_columns(info, root, ["id", "text"])
    assert "'text'" in str(caught.value)
    assert read_columns(info, root, ["id"])["id"] is not None
    start = int.from_bytes(whole[4:8], "little")
    path.write_bytes(whole[:start] + b"\x07" + whole[start + 1 :])
    with assert_error(ShardCorruptError, path="shard.00000.mds"):
        read_columns(info, root, ["text"])
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read_columns(info, root, ["id", "text"])
        except FormatError:
            continue


def test_columns_that_nothing_can_look_at_are_refused(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"score": "float32", "array": "ndarray"}) as writer:
        writer.write({"score": 0.5, "array": np.zeros(3)})
    info = only_shard(tmp_path / "x")
    check_readable_columns(info, ["score"], "where")
    with pytest.raises(
        ConfigError, match=r"where: unknown column 'scores'; the columns are array, score; did you mean 'score'\?"
    ):
        check_readable_columns(info, ["scores"], "where")
    with pytest.raises(ConfigError, match="which is 'ndarray'; name columns of numbers"):
        check_readable_columns(info, ["array"], "where")


def test_columns_of_several_shards_are_one() -> None:
    numbers = joined([np.array([1, 2], np.uint8), np.array([3], np.uint8)])
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [1, 2, 3]
    assert joined([np.array([-1]), np.array([2**64 - 1], np.uint64)]) == [-1, 2**64 - 1]
    assert joined([np.array([1]), ["a"]]) == [1, "a"]
