"""The text of a .npy header, which threads read: as Python and NumPy read it, or not at all."""

from __future__ import annotations

import ast
import gc
import io
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.arrays.npy_header import NpyHeader, _Literal, read_header
from tests.helpers import assert_error

literals = st.recursive(
    st.integers(-(10**20), 10**20) | st.booleans() | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=20,
)


def header_of(data: bytes) -> NpyHeader:
    return read_header(lambda start, stop: data[start:stop], len(data), "it")


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


@given(literals)
def test_a_text_has_the_value_that_python_gives_it(value: Any) -> None:
    assert _Literal(repr(value)).whole() == ast.literal_eval(repr(value)) == value


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning", "ignore:invalid escape:SyntaxWarning")
@given(st.text("()[]{},:'\"\\ 01TrueFals-x\n", max_size=30))
def test_any_text_is_read_as_python_reads_it_or_refused(text: str) -> None:
    try:
        found = _Literal(text).whole()
    except (ValueError, TypeError):  # TypeError where a list is a key
        return
    assert found == ast.literal_eval(text.strip())


def test_a_number_may_be_one_of_python_2() -> None:
    assert _Literal("(12L, 'L')").whole() == (12, "L")


@pytest.mark.parametrize(
    "text", ["", "(", "{1 2}", "[1 2]", "{'a' 1}", "1 2", "print()", "[,]", "{,}", "None", "1.5", "b'x'", "[" * 99]
)
def test_what_is_no_such_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"header|brackets|stands|begins|follows"):
        _Literal(text).whole()


@pytest.mark.filterwarnings("ignore:Stored array in format")
@given(arrays.array_dtypes() | arrays.nested_dtypes() | arrays.scalar_dtypes(), st.sampled_from([(), (2,), (3, 0, 1)]))
def test_it_says_of_each_array_what_numpy_says(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    data = saved(array)
    with io.BytesIO(data) as file:
        version = np.lib.format.read_magic(file)
        read: Any = getattr(np.lib.format, f"read_array_header_{version[0]}_0", None)
        expected = read(file, max_header_size=10**6) if read is not None else (shape, False, dtype)
    found = header_of(data)
    assert (found.shape, found.is_fortran, found.dtype) == expected
    assert data[found.stop :] == array.tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_each_version_and_names_of_all_letters(version: tuple[int, int]) -> None:
    name = "é'\"\\" if version != (3, 0) else "日本'\"\\"
    array = np.zeros(3, [(name, "<f4", (2,)), ("b", [("c", "u1"), ("d", "S3")])])
    assert header_of(saved(array, version)).dtype == array.dtype


def test_many_threads_read_headers_at_once() -> None:
    """Python's own parser fails in a few of such reads, up to 3.12."""
    data, failures = saved(np.zeros((3, 4), [("a", "<f4"), ("b", "u1", (2,))])), list[BaseException]()

    def read() -> None:
        try:
            for _ in range(300):
                header_of(data)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    def look(*_: object) -> None:  # where Python runs, another thread may go on
        sum(range(200))

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.callbacks.append(look)
    gc.set_threshold(5)
    try:
        threads = [threading.Thread(target=read) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert not failures


@pytest.mark.parametrize("stop", [0, 5, 8, 9, 40, 100])
def test_a_header_that_is_cut_is_refused(stop: int) -> None:
    with assert_error(ShardCorruptError, path="it"):
        header_of(saved(np.zeros(3))[:stop])
