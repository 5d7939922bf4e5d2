"""Types of packed values: one in all batches of a run, and no value is changed by a conversion."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, PackingConfig, Stream, StreamingDataLoader, StreamingDataset, TokenBudget
from lightning_streaming.errors import ConfigError, SampleError
from lightning_streaming.reading.packs.types import first_lost
from tests.broken_data import replacing
from tests.helpers import raises

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

Documents = list[dict[str, NDArray[Any]]]
KINDS: list[dict[str, Any]] = [{"packing": {"capacity": 4}}, {"token_budget": {"tokens": 4}}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["pack", "budget"])
ways = pytest.mark.parametrize("how", [{}, {"transform": dict}], ids=["joined", "one by one"])


def write(root: Path, documents: Documents, encodings: Mapping[str, str]) -> Path:
    with MDSWriter(out=str(root), columns=dict(encodings)) as writer:
        for one in documents:
            writer.write({name: of.tobytes() if encodings[name] == "bytes" else of for name, of in one.items()})
    return root


def loader(roots: list[Path], kind: dict[str, Any], workers: int = 0, *, told: Any = None, **how: Any) -> Any:
    streams = {root.name: Stream(remote=str(root)) for root in roots}
    asked: dict[str, Any] = {option: {"column": "tokens", **own, **(told or {})} for option, own in kind.items()}
    dataset = StreamingDataset(streams=streams, num_canonical_nodes=1, **asked, **how)
    return StreamingDataLoader(dataset, batch_size=1, num_workers=workers)


def values(batches: list[dict[str, torch.Tensor]], name: str = "input_ids") -> list[Any]:
    """The values of all batches that pad nothing, sorted."""
    return sorted(value for batch in batches for value in batch[name].flatten().tolist() if value)


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """A stream of small tokens and one of large ones, each in documents that fill a pack or share one."""
    small: Documents = [{"tokens": np.full(count, count, np.uint16)} for count in (1, 3, 4, 2)]
    large: Documents = [{"tokens": np.full(count, 70_000 + count, np.uint32)} for count in (1, 3, 4, 2)]
    return [
        write(tmp_path / "small", small, {"tokens": "ndarray:uint16"}),
        write(tmp_path / "large", large, {"tokens": "ndarray:uint32"}),
    ]


@kinds
@ways
@pytest.mark.parametrize("as_dtype", ["int64", None, "uint32", {"tokens": None}], ids=str)
def test_streams_of_several_types_have_one_in_batches(
    mixed: list[Path], kind: dict[str, Any], how: dict[str, Any], as_dtype: Any
) -> None:
    for shuffle in (False, True):
        batches = list(loader(mixed, kind, told={"as_dtype": as_dtype}, shuffle=shuffle, **how))
        wanted = torch.int64 if as_dtype == "int64" else torch.uint32
        assert {batch["input_ids"].dtype for batch in batches} == {wanted}
        expected = [count + shift for shift in (0, 70_000) for count in (1, 3, 4, 2) for _ in range(count)]
        assert values(batches) == sorted(expected)


@kinds
@ways
@pytest.mark.parametrize("as_dtype", ["uint16", "int8", "float16"])
def test_a_value_that_the_wanted_type_does_not_hold_is_refused(
    mixed: list[Path], kind: dict[str, Any], how: dict[str, Any], as_dtype: str
) -> None:
    words = ("'tokens' has the value 7000", f"which {as_dtype} does not hold", "sample ", "as_dtype=")
    with raises(SampleError, *words):
        list(loader(mixed, kind, told={"as_dtype": as_dtype}, **how))


@ways
def test_the_refused_value_is_named_with_its_sample(tmp_path: Path, how: dict[str, Any]) -> None:
    documents: Documents = [{"tokens": np.array([1, 2, 3], np.int32)}, {"tokens": np.array([4, -5], np.int32)}]
    root = write(tmp_path / "a", documents, {"tokens": "ndarray:int32"})
    with raises(SampleError, "has the value -5, which uint16 does not hold (sample 1)"):
        list(loader([root], {"packing": {"capacity": 16}}, told={"as_dtype": "uint16"}, **how))


@kinds
def test_whole_numbers_of_which_no_type_holds_all_are_refused_before_the_first_batch(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    roots = [
        write(tmp_path / name, [{"tokens": np.ones(3, name)}], {"tokens": f"ndarray:{name}"})
        for name in ("uint64", "int64")
    ]
    with raises(ConfigError, "uint64, int64", "as_dtype='int64'"):
        next(iter(loader(roots, kind, told={"as_dtype": None})))
    assert len(values(list(loader(roots, kind)))) == 6


@kinds
def test_they_are_refused_where_samples_are_read_one_by_one_too(tmp_path: Path, kind: dict[str, Any]) -> None:
    roots = [
        write(tmp_path / name, [{"tokens": np.ones(3, name)}], {"tokens": f"ndarray:{name}"})
        for name in ("uint64", "int64")
    ]
    watched: dict[str, Any] = {"told": {"as_dtype": None}, "debug": {"sample_log": tmp_path / "log"}}
    with raises(ConfigError, "uint64, int64", "as_dtype='int64'"):
        next(iter(loader(roots, kind, **watched)))
    # A transform may make one type of them; where it does not, the error names a type of whole numbers.
    alike: dict[str, Any] = {"transform": lambda sample: {"tokens": sample["tokens"].astype(np.int64)}}
    assert len(values(list(loader(roots, kind, **watched, **alike)))) == 6
    with raises(SampleError, "has one type in a run", "as_dtype={'tokens': 'int64'}"):
        list(loader(roots, kind, **watched, transform=dict))


@kinds
def test_weights_are_not_cut_to_whole_numbers(tmp_path: Path, kind: dict[str, Any]) -> None:
    for name, weight in (("whole", "int64"), ("parts", "float32")):
        weights = (np.array([1, 1, 2, 2]) / (1 if name == "whole" else 4)).astype(weight)
        document: dict[str, NDArray[Any]] = {"tokens": np.ones(4, np.uint16), "weights": weights}
        columns = {"tokens": "ndarray:uint16", "weights": f"ndarray:{weight}"}
        write(tmp_path / name, [document] * 3, columns)
    for roots in (["whole", "parts"], ["parts", "whole"]):
        batches = list(loader([tmp_path / name for name in roots], kind, told={"along": ["weights"]}))
        assert {batch["weights"].dtype for batch in batches} == {torch.float64}
        assert values(batches, "weights") == sorted([1, 1, 2, 2, 0.25, 0.25, 0.5, 0.5] * 3)


def _of_several_types(sample: dict[str, Any]) -> dict[str, Any]:
    tokens = sample["tokens"]
    return {
        "tokens": tokens.astype(np.int32 if tokens[0] % 2 else np.int64),
        "weights": tokens / 2 if tokens[0] % 2 else tokens,
    }


@kinds
def test_a_transform_that_returns_several_types_is_refused(tmp_path: Path, kind: dict[str, Any]) -> None:
    documents: Documents = [{"tokens": np.full(4, number, np.uint16)} for number in (2, 1, 4, 3)]
    root = write(tmp_path / "a", documents, {"tokens": "ndarray:uint16"})
    told = {"along": ["weights"]}
    with raises(SampleError, "column 'weights'", "float64", "int64", "(sample id ", "as_dtype={'weights': 'float64'}"):
        list(loader([root], kind, told=told, transform=_of_several_types))
    with raises(SampleError, "column 'tokens'", "int32", "int64"):
        list(loader([root], kind, told={**told, "as_dtype": None}, transform=_of_several_types))
    named = {**told, "as_dtype": {"weights": "float32"}}
    batches = list(loader([root], kind, told=named, transform=_of_several_types))
    assert {(batch["input_ids"].dtype, batch["weights"].dtype) for batch in batches} == {(torch.int64, torch.float32)}
    assert values(batches, "weights") == sorted([2.0] * 4 + [0.5] * 4 + [4.0] * 4 + [1.5] * 4)


def test_workers_that_return_several_types_are_refused(tmp_path: Path) -> None:
    documents: Documents = [{"tokens": np.full(4, number, np.uint16)} for number in (2, 1)]
    root = write(tmp_path / "a", documents, {"tokens": "ndarray:uint16"})
    told = {"along": ["weights"]}
    with raises(
        SampleError, "column 'weights' is torch.", "torch.float64", "in those before", "{'weights': 'float64'}"
    ):
        list(loader([root], KINDS[0], workers=2, told=told, transform=_of_several_types))


def _float_weights(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["tokens"][0] == 9:
        raise ValueError("no document")
    return {**sample, "weights": (sample["tokens"] / 2).astype(np.float32)}


@pytest.mark.rotate(2)
@kinds
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_bad_documents_alone_decide_no_type(tmp_path: Path, kind: dict[str, Any], workers: int) -> None:
    documents: Documents = [{"tokens": np.full(4, number, np.uint16)} for number in (9, 1, 9, 3, 5, 9, 9)]
    root = write(tmp_path / "a", documents, {"tokens": "ndarray:uint16"})
    how = {"transform": _float_weights, "bad_samples": replacing(tmp_path / "log")}
    read = loader([root], kind, workers, told={"along": ["weights"]}, shuffle=False, **how)
    batches = [*read, *read]
    assert len(batches) == 14
    assert all(type(batch) is dict for batch in batches)
    are_bare = [not batch["weights"].any() for batch in batches]
    assert sum(are_bare) == 8
    first = are_bare.index(False)
    assert {batch["weights"].dtype for batch in batches[first:]} == {torch.float32}
    assert values(batches, "weights") == sorted([0.5, 1.5, 2.5] * 8)


@kinds
@ways
def test_each_column_of_bytes_has_a_type(tmp_path: Path, kind: dict[str, Any], how: dict[str, Any]) -> None:
    documents: Documents = [
        {"tokens": np.arange(300, 300 + count, dtype=np.uint16), "mask": np.ones(count, np.uint8)}
        for count in (3, 4, 1)
    ]
    root = write(tmp_path / "a", documents, {"tokens": "bytes", "mask": "bytes"})
    told = {"along": ["mask"], "dtype": {"tokens": "uint16", "mask": "uint8"}}
    batches = list(loader([root], kind, told=told, **how))
    assert values(batches) == [300, 300, 300, 301, 301, 302, 302, 303]
    assert values(batches, "mask") == [1] * 8


@pytest.mark.parametrize("option", ["dtype", "as_dtype"])
def test_types_of_columns_that_are_not_packed_are_refused(option: str) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = [(PackingConfig, {"capacity": 4}), (TokenBudget, {"tokens": 4})]
    for kind, more in asked:
        with raises(ConfigError, f"{kind.option}.{option} may name tokens", "'mask'"):
            kind(column="tokens", **more, **{option: {"mask": "uint8"}})
        with raises(ConfigError, f"{kind.option}.{option}.tokens", "'text'"):
            kind(column="tokens", **more, **{option: {"tokens": "text"}})


@pytest.mark.parametrize(
    "wrong",
    [
        *({option: name} for option in ("dtype", "as_dtype") for name in ("longdouble", ">i8", "int\ud800", "bool")),
        *({"pad": pad} for pad in (10**400, True, np.True_, 1j, np.complex64(1), "0", None)),
    ],
)
def test_types_and_fillings_that_torch_lacks_are_refused(wrong: dict[str, Any]) -> None:
    for kind in (partial(PackingConfig, capacity=4), partial(TokenBudget, tokens=4)):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kind(column="tokens", **wrong)


@kinds
@ways
def test_a_column_that_is_missing_is_named(tmp_path: Path, kind: dict[str, Any], how: dict[str, Any]) -> None:
    root = write(tmp_path / "a", [{"tokens": np.ones(4, np.int32)}], {"tokens": "ndarray:int32"})
    with raises(SampleError if how else ConfigError, "'masks'"):
        list(loader([root], kind, told={"along": ["masks"]}, **how))


RETURNED: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16),
    "a gradient": lambda: torch.ones(4, requires_grad=True),
    "longdouble": lambda: np.ones(4, np.longdouble),
    "ragged": lambda: [[1], [1, 2], [3], [4]],
}


@kinds
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_values_of_a_transform_that_are_no_numbers_of_numpy_are_refused(
    tmp_path: Path, kind: dict[str, Any], returned: Callable[[], Any]
) -> None:
    root = write(tmp_path / "a", [{"tokens": np.ones(4, np.int32)}], {"tokens": "ndarray:int32"})
    with raises(SampleError, "column 'tokens' of a document must be numbers in one dimension"):
        list(loader([root], kind, transform=lambda _: {"tokens": returned()}))


@kinds
def test_values_of_a_transform_may_be_in_the_other_byte_order(tmp_path: Path, kind: dict[str, Any]) -> None:
    root = write(tmp_path / "a", [{"tokens": np.arange(4, dtype=np.int32)}], {"tokens": "ndarray:int32"})
    (batch,) = loader(
        [root], kind, told={"as_dtype": None}, transform=lambda of: {"tokens": of["tokens"].astype(">i4")}
    )
    assert batch["input_ids"].dtype == torch.int32
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3]]


_WHOLE = [np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]
_FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64")]


@given(st.data())
def test_a_value_is_refused_exactly_where_it_would_change(data: st.DataObject) -> None:
    given_, wanted = data.draw(st.sampled_from(_WHOLE)), data.draw(st.sampled_from(_WHOLE + _FLOATS))
    limits = np.iinfo(given_)
    near = [limits.min, limits.max, 0, 127, 128, 255, 256, 2047, 2048, 2049, 32767, 65535, 65536, 2**24 + 1, 2**53 + 1]
    numbers = st.sampled_from([one for one in near if limits.min <= one <= limits.max]) | st.integers(
        int(limits.min), int(limits.max)
    )
    drawn = data.draw(st.lists(numbers, max_size=5))
    found = first_lost(np.array(drawn, given_), wanted)

    def is_lost(value: int) -> bool:
        if wanted.kind == "f":
            return bool(abs(value) > 2 ** (np.finfo(wanted).nmant + 1))
        return not int(np.iinfo(wanted).min) <= value <= int(np.iinfo(wanted).max)

    assert found == next((place for place, value in enumerate(drawn) if is_lost(value)), None)


def test_floats_are_rounded_and_never_become_infinite() -> None:
    assert first_lost(np.array([0.1, np.inf, np.nan, 65504.0]), np.dtype("float16")) is None
    assert first_lost(np.array([0.1, 7e4]), np.dtype("float16")) == 1
    assert first_lost(np.array([1.0, 2.5]), np.dtype("int64")) == 1
    assert first_lost(np.array([1.0, 2.0**63]), np.dtype("int64")) == 1
    assert first_lost(np.array([np.nan]), np.dtype("int64")) == 0
    assert first_lost(np.array([-3.0, 255.0]), np.dtype("int16")) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halves = np.array([-65504.0, 65504.0, np.inf], np.float16)
        assert first_lost(halves[:2], np.dtype("int32")) is None
        assert first_lost(halves, np.dtype("uint64")) == 0
        assert first_lost(halves[1:], np.dtype("uint64")) == 1


class _Unread(np.ndarray[Any, Any]):
    """Values that fail a test which reads them."""

    def min(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def test_values_of_a_type_that_the_wanted_one_holds_are_not_read() -> None:
    for given_, wanted in (("uint16", "int64"), ("int8", "int64"), ("uint8", "uint32"), ("float32", "float64")):
        assert first_lost(np.ones(3, given_).view(_Unread), np.dtype(wanted)) is None


@ways
@pytest.mark.parametrize("pad", [40_000, -1])
def test_a_filling_must_fit_the_type_in_a_batch(tmp_path: Path, how: dict[str, Any], pad: int) -> None:
    root = write(tmp_path / "a", [{"tokens": np.ones(3, np.int32)}], {"tokens": "ndarray:int32"})
    dtype = "int16" if pad > 0 else "uint16"
    with raises(SampleError, f"pad={pad}", dtype):
        list(loader([root], KINDS[0], told={"pad": pad, "as_dtype": dtype}, **how))
