"""Any samples of any columns, through a shard file and back."""

from __future__ import annotations

import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, from_dtype
from PIL import Image

from lightning_streaming.formats.encodings import _ENCODINGS, _IMAGE_ENCODINGS
from lightning_streaming.formats.shard import check_shard, open_shard
from tests.formats.small_shards import put_shard

NUMPY_NUMBERS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
IMAGES = st.builds(
    lambda mode, size, color: Image.new(mode, size, color),
    st.sampled_from(["L", "RGB"]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from(["black", "white", "gray"]),
)
BYTE_ORDERS = st.sampled_from("<>")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(),
    "str": st.text(),
    "int": st.integers(-(2**63), 2**63 - 1) | st.booleans(),
    "str_int": st.integers(),
    "str_float": st.floats(),
    "str_decimal": st.decimals(),
    "json": st.dictionaries(st.text(), st.integers() | st.none() | st.floats() | st.text(), max_size=3),
    "pkl": st.tuples(st.text(), st.complex_numbers(), st.binary()),
    "pil": IMAGES,
    "jpeg": IMAGES,
    "png": IMAGES,
    "list[pil]": st.lists(IMAGES, max_size=2),
    "list[jpeg]": st.lists(IMAGES, max_size=2),
    "list[png]": st.lists(IMAGES, max_size=2),
    **{name: from_dtype(np.dtype(name)) for name in NUMPY_NUMBERS},
    "ndarray": st.tuples(st.sampled_from(NUMPY_NUMBERS), BYTE_ORDERS).flatmap(
        lambda kind: arrays(np.dtype(kind[0]).str.replace("<", kind[1]), array_shapes(max_dims=4, max_side=3))
    ),
    "ndarray:float32": BYTE_ORDERS.flatmap(lambda order: arrays(f"{order}f4", array_shapes(max_side=4))),
    "ndarray:uint16:2,3": BYTE_ORDERS.flatmap(lambda order: arrays(f"{order}u2", (2, 3))),
}


def same(found: Any, written: Any, encoding_name: str) -> bool:
    """Whether ``found`` is what a reader must make of ``written``."""
    if isinstance(written, list):
        return len(found) == len(written) and all(
            same(*pair, encoding_name) for pair in zip(found, written, strict=True)
        )
    if isinstance(written, Image.Image):
        exact = "jpeg" in encoding_name or found.tobytes() == written.tobytes()
        return bool(exact) and bool((found.mode, found.size) == (written.mode, written.size))
    if isinstance(written, np.ndarray):
        native = written.astype(written.dtype.newbyteorder("="))
        return bool((found.dtype, found.shape, found.tobytes()) == (native.dtype, native.shape, native.tobytes()))
    if isinstance(written, np.generic):
        return type(found) is type(written) and bytes(found.tobytes()) == written.tobytes()
    if isinstance(written, Decimal):
        return str(found) == str(written)
    if isinstance(written, bool):
        return type(found) is int and found == written
    return type(found) is type(written) and repr(found) == repr(written)  # so that a NaN equals itself


def test_every_encoding_has_its_values() -> None:
    others = {"jpeg_array", "jpegarray"}  # which give back images for files: see test_images
    assert VALUES.keys() >= {*_ENCODINGS, *_IMAGE_ENCODINGS} - others


@settings(max_examples=150)
@given(st.data())
def test_any_samples_of_any_columns_come_back(data: st.DataObject) -> None:
    columns = data.draw(st.dictionaries(st.text(max_size=5), st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    columns = {name: columns[name] for name in sorted(columns)}
    one = st.fixed_dictionaries({name: VALUES[encoding_name] for name, encoding_name in columns.items()})
    samples = data.draw(st.lists(one, max_size=3))
    with tempfile.TemporaryDirectory() as directory:
        info = put_shard(Path(directory), samples, columns)
        check_shard(info, allow_unsafe_types=True)
        reader = open_shard(info, Path(directory), allow_unsafe_types=True)
        assert len(reader) == len(samples)
        for index, written in enumerate(samples):
            found = reader[index]
            assert list(found) == list(columns)
            assert [name for name in columns if not same(found[name], written[name], columns[name])] == []
        reader.close()
