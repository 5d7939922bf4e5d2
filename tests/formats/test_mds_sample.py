from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError, ShardCorruptError, UnsupportedError
from lightning_streaming.formats import mds_sample
from lightning_streaming.formats.mds_sample import compile_layout

VALUES = {
    "bytes": st.binary(),
    "str": st.text(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "json": st.lists(st.integers(), max_size=3),
}
LAYOUT = compile_layout(("a", "b", "c"), ("str", "uint8", "bytes"))


@given(st.dictionaries(st.text(), st.sampled_from(sorted(VALUES)), min_size=1, max_size=6), st.data())
def test_a_sample_comes_back_as_it_was(columns: dict[str, str], data: st.DataObject) -> None:
    layout = compile_layout(tuple(columns), tuple(columns.values()))
    sample = {name: data.draw(VALUES[encoding_name]) for name, encoding_name in columns.items()}
    encoded = layout.encode(sample)
    assert len(encoded) >= layout.smallest_bytes
    assert layout.decode(memoryview(encoded)) == sample


def test_sizes_of_varying_columns_come_first() -> None:
    encoded = LAYOUT.encode({"c": b"cc", "b": 7, "a": "a"})
    assert encoded == bytes.fromhex("01000000 02000000") + b"a" + b"\x07" + b"cc"


def test_what_is_beside_the_columns_is_left_out() -> None:
    assert LAYOUT.encode({"a": "", "b": 0, "c": b"", "d": object()}) == bytes(9)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(EncodingError, match="column 'b' is missing; the sample has 'a', 'c'"):
        LAYOUT.encode({"a": "", "c": b""})


def test_the_column_of_a_wrong_value_is_named() -> None:
    with pytest.raises(EncodingError, match="column 'b': expected an unsigned integer of 8 bits, but got 256"):
        LAYOUT.encode({"a": "", "b": 256, "c": b""})


def test_the_column_of_a_wrong_payload_is_named() -> None:
    with pytest.raises(EncodingError, match="column 'a': expected UTF-8"):
        LAYOUT.decode(memoryview(LAYOUT.encode({"a": b"\xff", "b": 0, "c": b""})))


def test_a_sample_of_4_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds_sample, "MAX_RAW_BYTES", 10)
    assert LAYOUT.encode({"a": "12345", "b": 0, "c": b"6789"})
    with pytest.raises(EncodingError, match="a sample can have 10 bytes, but got 11"):
        LAYOUT.encode({"a": "12345", "b": 0, "c": b"67890"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(8),  # the fixed column is missing
        bytes(10),  # a byte too many
        b"\x01" + bytes(8),  # a size goes beyond the sample
        b"\xff" * 4 + bytes(5),
        b"\xff" * 8 + bytes(1),  # the sum does not wrap
    ],
)
def test_sizes_that_do_not_add_up_are_refused(data: bytes) -> None:
    with pytest.raises(ShardCorruptError, match=r"expected .* bytes.*, but found"):
        LAYOUT.decode(memoryview(data))


@pytest.mark.parametrize(
    ("names", "encoding_names", "error"),
    [
        ((), (), ConfigError),
        (("a",), (), ConfigError),
        (("a", "a"), ("int", "int"), ConfigError),
        (("a",), ("text",), ConfigError),
        (("a",), ("jpeg",), UnsupportedError),
    ],
)
def test_columns_that_cannot_be_are_refused(names: Any, encoding_names: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        compile_layout(names, encoding_names)
