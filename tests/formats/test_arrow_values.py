"""What each of Arrow's types becomes: values, encodings, and what is refused."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_streaming.errors import ConfigError, EncodingError, ShardCorruptError, UnsupportedError
from lightning_streaming.formats.arrow.types import arrow_columns
from tests.formats.stored import rows_of
from tests.helpers import assert_error
from tests.tiers import examples


def column(array: Any, metadata: dict[str, Any] | None = None) -> list[Any]:
    """What samples have of an array; read whole, in two batches, and as a part of a larger array."""
    about = None if metadata is None else {"huggingface": json.dumps({"info": {"features": {"x": metadata}}})}
    schema = pa.schema([pa.field("x", array.type)], metadata=about)
    batch = pa.RecordBatch.from_arrays([array], schema=schema)
    half = len(array) // 2
    found = [values_of(batches) for batches in ([batch], [batch.slice(0, half), batch.slice(half)])]
    more = pa.RecordBatch.from_arrays([pa.concat_arrays([array, array, array])], schema=schema)
    found.append(values_of([more.slice(len(array), len(array))]))
    for other in found[1:]:
        assert str(found[0]) == str(other)
    return found[0]


def values_of(batches: Sequence[Any]) -> list[Any]:
    rows = rows_of(batches, None, "file")
    return [rows[index]["x"] for index in range(len(rows))]


def encoding_of(kind: Any, metadata: Any = None) -> str:
    return arrow_columns(pa.schema([pa.field("x", kind)], metadata=metadata), None, "file")["x"].encoding


@pytest.mark.parametrize(
    "name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
def test_numbers_keep_their_dtype(name: str) -> None:
    numbers = np.array([0, 1, 100], name)
    found = column(pa.array(numbers))
    assert found == [0, 1, 100]
    assert {type(one) for one in found} == {np.dtype(name).type}
    assert encoding_of(pa.from_numpy_dtype(name)) == name
    kind = pa.from_numpy_dtype(name)
    assert column(pa.array([None, numbers[2], None, numbers[1]], kind)) == [None, 100, None, 1]
    (array, empty, missing) = column(pa.array([numbers, numbers[:0], None], pa.list_(kind)))
    assert array.dtype == empty.dtype == np.dtype(name)
    assert array.tolist() == [0, 1, 100]
    assert empty.shape == (0,)
    assert missing is None
    array += 1
    assert encoding_of(pa.list_(kind)) == f"ndarray:{name}"
    assert encoding_of(pa.list_(kind, 7)) == f"ndarray:{name}:7"


NESTED = pa.struct([("a", pa.list_(pa.string())), ("b", pa.int32())])
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)

PLAIN_VALUES: list[tuple[Any, list[Any], str]] = [
    (pa.bool_(), [True, None, False, True], "int"),
    (pa.string(), ["", "text", None, "ü€😀"], "str"),
    (pa.large_string(), ["", "text", None, "ü€😀"], "str"),
    (pa.string_view(), ["", "text", None, "more than twelve bytes"], "str"),
    (pa.binary(), [b"", b"\0\xff", None], "bytes"),
    (pa.large_binary(), [b"", b"\0\xff", None], "bytes"),
    (pa.binary_view(), [b"", b"\0\xff", None, bytes(20)], "bytes"),
    (pa.binary(3), [b"abc", None, b"def"], "bytes"),
    (pa.null(), [None, None, None], "null"),
    (pa.list_(pa.string()), [["a", None], [], None, ["b"]], "json"),
    (pa.large_list(pa.string()), [["a", None], [], None, ["b"]], "json"),
    (pa.list_(pa.string(), 2), [["a", None], None, ["b", "c"]], "json"),
    (pa.list_(pa.list_(pa.string())), [[["a"], None], [], None, [[]]], "json"),
    (NESTED, [{"a": ["x", None], "b": 1}, None, {"a": None, "b": None}], "json"),
    (pa.list_(NESTED), [[{"a": [], "b": 1}, None], [], None], "json"),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1), ("b", None)], [], None], "map<string, int64>"),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None, "a"], "str"),
    (pa.list_(pa.dictionary(pa.int32(), pa.string())), [["a", "b"], ["a"], None], "json"),
    (pa.struct([]), [{}, None, {}], "json"),
    (pa.decimal128(10, 2), [decimal.Decimal("1.50"), None], "str_decimal"),
    (pa.decimal256(60, 2), [decimal.Decimal("1.50"), None], "str_decimal"),
    (pa.time32("s"), [datetime.time(23, 59, 59), None], "time32[s]"),
    (pa.time32("ms"), [datetime.time(23, 59, 59, 1000), None], "time32[ms]"),
    (pa.time64("us"), [datetime.time(0, 0, 0, 1), None], "time64[us]"),
    (pa.time64("ns"), [datetime.time(0, 0, 0, 1), None], "time64[ns]"),
    (pa.date32(), [np.datetime64("2024-02-29"), None, np.datetime64("1969-12-31")], "date32[day]"),
    (pa.date64(), [np.datetime64("2024-02-29"), None], "date64[ms]"),
    (pa.duration("ms"), [np.timedelta64(-5, "ms"), None], "duration[ms]"),
    *(
        (pa.timestamp(unit, zone), [np.datetime64(MOMENT, unit), None], str(pa.timestamp(unit, zone)))
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "Europe/Berlin")
    ),
]


@pytest.mark.parametrize(("kind", "values", "encoding"), PLAIN_VALUES, ids=lambda one: str(one)[:40])
def test_values_of_each_type(kind: Any, values: list[Any], encoding: str) -> None:
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_date(kind):
        raw = [None if one is None else int(one.astype(np.int64)) for one in values]
        if kind == pa.date64():
            raw = [None if one is None else one * 86_400_000 for one in raw]
        array = pa.array(raw, pa.int32() if kind == pa.date32() else pa.int64()).view(kind)
    else:
        array = pa.array(values, kind)
    found = column(array)
    assert found == values
    for mine, theirs in zip(found, values, strict=True):
        assert type(mine) is type(theirs) or isinstance(theirs, (int, datetime.time))
    assert encoding_of(kind) == encoding
    assert column(array.slice(0, 0)) == []


def test_a_timestamp_with_a_zone_is_in_utc() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    array = pa.array([MOMENT.replace(tzinfo=zone)], pa.timestamp("us", "+02:00"))
    assert column(array) == [np.datetime64("2024-02-29T10:30:15.123456")]


def test_a_time_of_more_than_a_day_is_an_error() -> None:
    """pyarrow's full validation would refuse it before; a value is looked at all the same."""
    array = pa.array([0, 86_400_000_000], pa.int64()).view(pa.time64("us"))
    with assert_error(ShardCorruptError, path="file") as caught:
        column(array)
    assert "86400000000" in str(caught.value)


@pytest.mark.parametrize("kind", [pa.list_(pa.bool_()), pa.large_list(pa.bool_()), pa.list_(pa.bool_(), 3)], ids=str)
def test_bools_in_lists_are_arrays(kind: Any) -> None:
    found = column(pa.array([[True, False, True], None, [False, False, True]] * 5, kind))
    assert [None if one is None else one.tolist() for one in found] == [
        [True, False, True],
        None,
        [False, False, True],
    ] * 5
    assert found[0].dtype == np.bool_
    assert found[0].flags.writeable
    assert encoding_of(kind) == str(kind)


def test_lists_of_fixed_size_make_arrays_of_several_dimensions() -> None:
    kind = pa.list_(pa.list_(pa.int16(), 2), 3)
    grid = np.arange(6, dtype=np.int16).reshape(3, 2)
    found = column(pa.array([grid.tolist(), None, (grid + 1).tolist()], kind))
    assert found[1] is None
    np.testing.assert_array_equal(found[2], grid + 1)
    assert found[2].dtype == np.int16
    assert found[2].flags.writeable
    assert encoding_of(kind) == "ndarray:int16:3,2"


def test_lists_of_arrays_of_one_size_are_one_array() -> None:
    kind = pa.list_(pa.list_(pa.float32(), 4))
    boxes = [[[0, 1, 2, 3], [4, 5, 6, 7]], [], None, [[8, 9, 10, 11]]]
    found = column(pa.array(boxes, kind))
    assert [None if one is None else one.shape for one in found] == [(2, 4), (0, 4), None, (1, 4)]
    assert found[3].tolist() == boxes[3]
    assert encoding_of(kind) == "ndarray:float32"


def test_lists_of_lists_of_numbers_are_lists_of_arrays() -> None:
    kind = pa.list_(pa.large_list(pa.int32()))
    found = column(pa.array([[[1, 2], None, [3]], [], None], kind))
    assert [one if one is None else one.tolist() for one in found[0]] == [[1, 2], None, [3]]
    assert found[0][0].dtype == np.int32
    assert found[1:] == [[], None]
    assert encoding_of(kind) == "json"


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int32(), 2),
        pa.list_(pa.list_(pa.int32(), 2)),
        pa.list_(pa.list_(pa.int32(), 2), 2),
    ],
    ids=str,
)
def test_a_null_inside_an_array_is_an_error_of_that_sample_alone(kind: Any) -> None:
    nested = kind.value_type != pa.int32()
    rows = [[1, 2], [3, None], None, [5, 6]]
    array = pa.array([row if row is None or not nested else [row, row] for row in rows], kind)
    batch = pa.record_batch({"x": array})
    for batches in ([batch], [batch.slice(1)], [batch.slice(0, 1), batch.slice(1)]):
        found = rows_of(batches, None, "file")
        bad = len(found) - 3
        with assert_error(EncodingError, path="file", sample=bad) as caught:
            found[bad]
        assert "columns" in str(caught.value)
        assert found[bad + 1] == {"x": None}
        assert found[bad + 2]["x"].max() == 6
        assert found.plain_rows() is None
        with assert_error(EncodingError, path="file") as caught:
            found.flat_column("x")
        assert "'x'" in str(caught.value)


def test_a_null_that_no_row_reaches_is_no_error() -> None:
    array = pa.array([[1, None], [3, 4], [5, 6]], pa.list_(pa.int8())).slice(1)
    assert [one.tolist() for one in column(array)] == [[3, 4], [5, 6]]


UNREADABLE = [
    pa.dense_union([pa.field("a", pa.int32()), pa.field("b", pa.string())]),
    pa.sparse_union([pa.field("a", pa.int32())]),
    pa.run_end_encoded(pa.int32(), pa.int64()),
    pa.month_day_nano_interval(),
    pa.list_view(pa.int32()),
    pa.list_(pa.run_end_encoded(pa.int32(), pa.int64())),
    pa.struct([pa.field("a", pa.month_day_nano_interval())]),
    pa.struct([pa.field("a", pa.int32()), pa.field("a", pa.int32())]),
    pa.map_(pa.string(), pa.list_view(pa.string())),
]


@pytest.mark.parametrize("kind", UNREADABLE, ids=str)
def test_a_type_that_is_not_read_is_an_error_only_where_it_is_wanted(kind: Any) -> None:
    schema = pa.schema([("odd", kind), ("x", pa.int32())])
    with assert_error(UnsupportedError, path="a.parquet") as caught:
        arrow_columns(schema, None, "a.parquet")
    assert "'odd'" in str(caught.value)
    assert list(arrow_columns(schema, ["x"], "a.parquet")) == ["x"]


def test_columns_must_be_there_and_have_names_of_their_own() -> None:
    schema = pa.schema([("a", pa.int32()), ("b", pa.int32()), ("a", pa.string())])
    with assert_error(UnsupportedError, path="f") as caught:
        arrow_columns(schema, None, "f")
    assert "several" in str(caught.value)
    with assert_error(ConfigError, option="columns", path="f") as caught:
        arrow_columns(schema, ["b", "c"], "f")
    assert "'b'" in str(caught.value)
    assert list(arrow_columns(schema, ["b"], "f")) == ["b"]


def test_columns_come_in_the_order_of_the_schema() -> None:
    schema = pa.schema([("a", pa.int32()), ("b", pa.string()), ("c", pa.int8())])
    found = arrow_columns(schema, ["c", "a"], "f")
    assert {name: one.encoding for name, one in found.items()} == {"a": "int32", "c": "int8"}
    assert [one.name for one in found.values()] == ["a", "c"]


# --- extension types ---


class Unheard(pa.ExtensionType):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(pa.list_(pa.int32()), "somebody.elses")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: Any) -> Unheard:
        return cls()


def test_extension_types_are_what_they_are_stored_as() -> None:
    array = pa.ExtensionArray.from_storage(Unheard(), pa.array([[1, 2], None, []], pa.list_(pa.int32())))
    assert [None if one is None else one.tolist() for one in column(array)] == [[1, 2], None, []]
    assert encoding_of(Unheard()) == "ndarray:int32"
    nested = pa.StructArray.from_arrays([array], ["a"])
    assert column(nested)[0]["a"].tolist() == [1, 2]


def test_tensors_of_a_fixed_shape_have_it() -> None:
    values = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    found = column(array)
    np.testing.assert_array_equal(found, values)
    assert encoding_of(array.type) == "ndarray:int32:3,4"
    turned = pa.fixed_shape_tensor(pa.int32(), [3, 4], permutation=[1, 0])
    array = pa.ExtensionArray.from_storage(turned, array.storage)
    np.testing.assert_array_equal(column(array), values.transpose(0, 2, 1))
    assert encoding_of(turned) == "ndarray:int32:4,3"
    rows = rows_of([pa.record_batch({"x": array})], None, "file")
    plain = rows.plain_rows()
    assert plain is not None
    table = np.empty(2, plain.row)
    rows.copy_rows(np.array([1, 0]), table)
    np.testing.assert_array_equal(plain.columns_of(table)["x"], values.transpose(0, 2, 1)[::-1])


# --- Hugging Face datasets ---


def image_file(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(file, kind)
    return file.getvalue()


IMAGES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_images_are_opened_and_decoded_when_they_are_needed() -> None:
    rows = [{"bytes": image_file(kind), "path": None} for kind in ("PNG", "JPEG", "WEBP")]
    (png, jpeg, webp, missing) = column_of_images([*rows, None])
    np.testing.assert_array_equal(np.asarray(png), np.arange(12).reshape(3, 4))
    assert (jpeg.format, webp.format, jpeg.size) == ("JPEG", "WEBP", (4, 3))
    assert missing is None


def column_of_images(rows: list[Any]) -> list[Any]:
    schema = pa.schema([pa.field("x", IMAGES)], metadata=huggingface({"x": {"_type": "Image"}}))
    assert arrow_columns(schema, None, "f")["x"].encoding == "pil"
    return values_of([pa.RecordBatch.from_arrays([pa.array(rows, IMAGES)], schema=schema)])


def huggingface(features: Any) -> dict[str, str]:
    return {"huggingface": json.dumps({"info": {"features": features}})}


def test_an_image_that_is_only_named_says_how_to_embed_it() -> None:
    with assert_error(EncodingError, path="file", sample=0) as caught:
        column_of_images([{"bytes": None, "path": "a/b.png"}])
    assert "'x'" in str(caught.value)


def test_a_damaged_image_is_an_error() -> None:
    with assert_error(EncodingError, path="file", sample=0) as caught:
        column_of_images([{"bytes": image_file()[:20], "path": None}])
    assert "'x'" in str(caught.value)


def test_images_in_lists_and_structs() -> None:
    inner = {"_type": "Sequence", "feature": {"_type": "Image"}}
    kinds = {"x": pa.list_(IMAGES), "y": pa.struct([("z", pa.list_(IMAGES))])}
    row = {"bytes": image_file(), "path": None}
    for hint in (inner, {**inner, "_type": "List"}, [{"_type": "Image"}]):
        schema = pa.schema(kinds.items(), metadata=huggingface({"x": hint, "y": {"z": hint}}))
        assert arrow_columns(schema, ["x"], "f")["x"].encoding == "list[pil]"
        batch = pa.RecordBatch.from_pylist([{"x": [row, row], "y": {"z": [row]}}], schema=schema)
        (sample,) = list(map(rows_of([batch], None, "f").__getitem__, range(1)))
        assert [one.size for one in sample["x"]] == [(4, 3)] * 2
        assert sample["y"]["z"][0].size == (4, 3)


@pytest.mark.parametrize("lists", [lambda kind, _: pa.list_(kind), pa.list_], ids=["any size", "fixed size"])
def test_arrays_of_several_dimensions_have_their_shape(lists: Any) -> None:
    grid = np.arange(6).reshape(2, 3)
    kind = lists(lists(pa.int16(), 3), 2)
    hint = {"_type": "Array2D", "shape": [2, 3], "dtype": "int16"}
    found = column(pa.array([grid.tolist(), (grid + 1).tolist()], kind), hint)
    np.testing.assert_array_equal(found, [grid, grid + 1])
    assert found[0].dtype == np.int16
    assert found[0].flags.writeable
    with_null = column(pa.array([None, grid.tolist(), None], kind), hint)
    assert with_null[0] is None
    np.testing.assert_array_equal(with_null[1], grid)


def test_the_first_dimension_may_be_of_any_size() -> None:
    hint = {"_type": "Array3D", "shape": [None, 2, 1], "dtype": "uint8"}
    kind = pa.list_(pa.list_(pa.list_(pa.uint8())))
    rows: list[Any] = [[[[1], [2]]], [], [[[1], [2]], [[3], [4]]], None]
    found = column(pa.array(rows, kind), hint)
    assert [None if one is None else one.shape for one in found] == [(1, 2, 1), (0, 2, 1), (2, 2, 1), None]
    assert found[2].tolist() == rows[2]


def test_an_array_of_another_shape_than_its_column_is_an_error() -> None:
    hint = {"_type": "Array2D", "shape": [2, 2], "dtype": "uint8"}
    schema = pa.schema([pa.field("x", pa.list_(pa.list_(pa.uint8())))], metadata=huggingface({"x": hint}))
    good: list[Any] = [[1, 2], [3, 4]]
    bad: list[Any] = [[[1, 2, 3], [4]], [[1, 2]], [[1, None], [3, 4]], [None, [3, 4]], []]
    batch = pa.RecordBatch.from_pylist([{"x": one} for one in (*bad, good)], schema=schema)
    rows = rows_of([batch], None, "f")
    for index in range(len(bad)):
        with assert_error(EncodingError, path="f", sample=index) as caught:
            rows[index]
        assert "sample" in str(caught.value)
    assert rows[len(bad)]["x"].tolist() == good
    assert rows.plain_rows() is None


@pytest.mark.parametrize(
    "features",
    [
        [],
        {"x": 1},
        {"x": {"_type": ["Image"]}},
        {"x": {"_type": "Image"}},
        {"x": {"_type": "Array2D", "shape": [2**40, 2**40]}},
        {"x": {"_type": "Array2D", "shape": [-1, None]}},
        {"x": {"_type": "Array2D", "shape": "ab"}},
        {"x": {"_type": "Array9D", "shape": [1, 1]}},
        {"x": {"_type": "Sequence", "feature": {"a": 1}}},
        {"x": []},
    ],
    ids=str,
)
def test_metadata_that_cannot_be_meant_leaves_columns_as_they_are_stored(features: Any) -> None:
    kind = pa.list_(pa.list_(pa.int32()))
    schema = pa.schema([pa.field("x", kind)], metadata=huggingface(features))
    batch = pa.RecordBatch.from_pylist([{"x": [[1], [2, 3]]}], schema=schema)
    assert [one.tolist() for one in rows_of([batch], None, "f")[0]["x"]] == [[1], [2, 3]]


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"[]", b'{"info": 1}', b"\xff"], ids=len)
def test_metadata_that_cannot_be_read_says_nothing(text: bytes) -> None:
    assert encoding_of(pa.int8(), {b"huggingface": text}) == "int8"


# --- any nesting ---

LEAVES = st.sampled_from([pa.int8(), pa.uint32(), pa.float64(), pa.bool_(), pa.string(), pa.large_binary(), pa.null()])


def _wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.tuples(inner, st.integers(1, 3)).map(lambda pair: pa.list_(*pair)),
        st.lists(inner, max_size=3).map(lambda kinds: pa.struct([(f"f{n}", one) for n, one in enumerate(kinds)])),
        inner.map(lambda one: pa.map_(pa.string(), one)),
    )


KINDS = st.recursive(LEAVES, _wrap, max_leaves=4)


def values_for(kind: Any, numbers: bool = False) -> st.SearchStrategy[Any]:
    """Values of a type, or None; but among numbers, no None."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        fixed_below = pa.types.is_fixed_size_list(kind.value_type)
        deep = fixed_below or pa.types.is_primitive(kind.value_type)
        inner = values_for(kind.value_type, deep)
        found: st.SearchStrategy[Any] = st.lists(inner, min_size=size or 0, max_size=3 if size is None else size)
    elif pa.types.is_struct(kind):
        fields = {kind.field(place).name: kind.field(place).type for place in range(kind.num_fields)}
        found = st.fixed_dictionaries({name: values_for(one) for name, one in fields.items()})
    elif pa.types.is_map(kind):
        found = st.lists(st.tuples(st.text(max_size=3), values_for(kind.item_type)), max_size=3)
    else:
        small: dict[Any, st.SearchStrategy[Any]] = {
            pa.bool_(): st.booleans(),
            pa.string(): st.text(max_size=5),
            pa.large_binary(): st.binary(max_size=5),
            pa.float64(): st.floats(allow_nan=False),
            pa.null(): st.none(),
        }
        found = small.get(kind, st.integers(0, 100))
    return found if numbers else st.none() | found


def plainly(value: Any) -> Any:
    """Arrays as lists, and numbers of numpy as Python's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plainly(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plainly, value))
    return value


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_values_are_those_that_pyarrow_gives(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    values = data.draw(st.lists(values_for(kind), min_size=1, max_size=6))
    array = pa.array(values, kind)
    start = data.draw(st.integers(0, len(values)))
    batch = pa.record_batch({"x": array})
    borders = sorted({start, len(values), *data.draw(st.lists(st.integers(start, len(values)), max_size=3))})
    batches = [batch.slice(first, stop - first) for first, stop in pairwise(borders)]
    expected = array.slice(start).to_pylist()
    assert plainly(values_of(batches or [batch.slice(start)])) == expected
