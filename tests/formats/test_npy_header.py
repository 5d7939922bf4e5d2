"""Headers of .npy files, read by threads: as NumPy reads them, or not at all."""

from __future__ import annotations

import gc
import io
import os
import struct
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.npy import NpyHeader, read_header
from tests.helpers import assert_error


def header_of(data: bytes) -> NpyHeader:
    return read_header(lambda start, stop: data[start:stop], len(data), "it")


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode("latin-1")


def test_a_number_may_be_one_of_python_2() -> None:
    with pytest.warns(UserWarning, match="Python 2"):
        assert header_of(header("{'descr': '<f4', 'fortran_order': False, 'shape': (12L,)}")).shape == (12,)


@pytest.mark.parametrize(
    "shape",
    ["", "(", "(1 2,)", "{'a' 1}", "print()", "(,)", "None", "(1.5,)", "(b'x',)", "[" * 999, "(-1,)"],
)
def test_a_text_that_is_not_a_header_is_refused(shape: str) -> None:
    with assert_error(ShardCorruptError, path="it") as caught:
        header_of(header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}"))
    assert "invalid header" in str(caught.value)


@pytest.mark.parametrize("operators", ["-", "1+", "not ", "a.", "f(", "(", "[", "{1:", "'x'"])
def test_deep_expressions_do_not_reach_the_parser_of_python(operators: str) -> None:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {operators * 10_000}1}}"
    with assert_error(ShardCorruptError, path="it"):
        header_of(header(text[: 2**16 - 1]))


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
    """Python's parser fails in a few of such reads, up to 3.12."""
    data, failures = saved(np.zeros((3, 4), [("a", "<f4"), ("b", "u1", (2,))])), list[BaseException]()

    def read() -> None:
        try:
            for _ in range(300):
                header_of(data)
        except BaseException as error:  # noqa: BLE001 - checked below
            failures.append(error)

    def switch(*_: object) -> None:  # other threads may run here
        sum(range(200))

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.callbacks.append(switch)
    gc.set_threshold(5)
    try:
        threads = [threading.Thread(target=read) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        gc.callbacks.remove(switch)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert not failures


@pytest.mark.parametrize("stop", [0, 5, 8, 9, 40, 100])
def test_a_header_that_is_cut_is_refused(stop: int) -> None:
    with assert_error(ShardCorruptError, path="it"):
        header_of(saved(np.zeros(3))[:stop])


def test_a_process_is_forked_while_threads_read_headers() -> None:
    data, stopped = saved(np.zeros((3, 4))), threading.Event()

    def read() -> None:
        while not stopped.is_set():
            header_of(data)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                header_of(data)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
