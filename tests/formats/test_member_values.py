from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import zipfile
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes
from PIL import Image

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats import webdataset
from lightning_streaming.formats.webdataset import decoder, is_image, is_never_read, is_unsafe_member, kind_of


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), version)
    return file.getvalue()


def decode(column: str, data: bytes) -> Any:
    return decoder(column)(memoryview(data))


@pytest.mark.parametrize(
    ("column", "data", "value"),
    [
        ("txt", "é".encode(), "é"),
        ("caption", b"x", "x"),
        ("left.txt", b"x", "x"),
        ("txt.gz", gzip.compress("é".encode(), mtime=0), "é"),
        ("gz", gzip.compress(b"x", mtime=0), b"x"),
        ("cls", b" 12\n", 12),
        ("id", b"-3", -3),
        ("json", b'{"a": [1, NaN]}', {"a": [1, pytest.approx(float("nan"), nan_ok=True)]}),
        ("json", "é".join('""').encode("utf-16"), "é"),
        ("meta.json", b"\xef\xbb\xbf[1]", [1]),
        ("", b"x", b"x"),
        ("json.txt", b"{", "{"),
        ("mp4", b"\0\1", b"\0\1"),
    ],
)
def test_the_last_ending_says_what_a_value_is(column: str, data: bytes, value: Any) -> None:
    assert decode(column, data) == value


@pytest.mark.parametrize(
    ("column", "data", "said"),
    [
        ("txt", b"\xff", "expected UTF-8 text"),
        ("cls", b"1.5", "expected an integer, but found b'1.5'"),
        ("cls", b"", "expected an integer"),
        ("cls", b"1" * 5000, "expected an integer"),
        ("json", b"{" * 100_000, "expected JSON"),
        ("json", b"[" * 100_000, "expected JSON"),
        ("txt.gz", b"plain", "expected gz data"),
        ("txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-2], "expected gz data"),
        ("npy", b"", "expected a .npy file"),
        ("npy", npy([1, 2])[:-1], "expected 144 bytes of int64 of shape .2,., but found 143"),
        ("npy", npy([1, 2]) + b"x", "expected 144 bytes"),
        ("npy", npy([1])[:40], "expected a .npy file"),
        ("npy", npy(np.asarray([{}], object)), "Python objects, which can run any code"),
        ("npy", npy([1]).replace(b"(1,)", b"(9,)"), "expected 200 bytes"),
        ("npy", npy([1]).replace(b"(1,), }   ", b"(0, 8**99)"), "expected a .npy file"),
        ("npy", npy([1]).replace(b"(1,), }                   ", b"(0, 9999999999999999999)}"), "expected"),
        ("npz", b"PK", "expected a .npz file"),
        ("jpg", b"\xff\xd8\xff", "expected a whole JPEG file"),
        ("jpg", b"GIF89a", "expected a JPEG or PNG or WEBP file"),
        ("webp", b"RIFF1234WEBPVP8 ", "expected a"),
        ("pth", b"", "0 bytes are a pickle of torch"),
    ],
)
def test_what_is_no_such_value_is_refused(column: str, data: bytes, said: str) -> None:
    with pytest.raises(EncodingError, match=said):
        decode(column, data)


@given(
    array=arrays(scalar_dtypes(), array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)), fortran=st.booleans()
)
def test_arrays_come_back(array: Any, fortran: bool) -> None:
    array = np.asfortranarray(array) if fortran else array
    for version in ((1, 0), (2, 0), (3, 0)):
        found = decode("npy", npy(array, version))
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable
        assert found.base is None or found.base.flags.owndata


def test_records_come_back() -> None:
    array = np.zeros(3, [("a", "<i4"), ("é", "<f8", (2,))])
    assert decode("npy", npy(array, (3, 0))).dtype == array.dtype


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_several_arrays_come_back(save: Any) -> None:
    file = io.BytesIO()
    save(file, np.arange(3), x=np.ones((2, 2)))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("note", b"text")
    found = decode("npz", file.getvalue())
    assert (found["arr_0"].tolist(), found["x"].tolist(), found["note"]) == ([0, 1, 2], [[1, 1], [1, 1]], b"text")
    broken = bytearray(file.getvalue())
    broken[60:70] = bytes(10)
    with pytest.raises(EncodingError, match=r"expected a .npz file"):
        decode("npz", bytes(broken))


def zipped(arrays: list[Any], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for number, array in enumerate(arrays):
            archive.writestr(f"{number}.npy", npy(array))
    return file.getvalue()


@pytest.mark.parametrize(
    ("column", "data"),
    [
        ("txt.gz", gzip.compress(bytes(100_001))),
        ("gz", gzip.compress(bytes(60_000)) * 2),
        ("npz", zipped([np.zeros(100_001, np.uint8)])),
        ("npz", zipped([np.zeros(60_000, np.uint8)] * 2)),
        ("npz", zipped([np.zeros(60_000, np.uint8)] * 2, zipfile.ZIP_BZIP2)),
    ],
)
def test_a_member_that_expands_beyond_bounds_is_refused_before_it_does(
    column: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset, "MAX_UNPACKED_BYTES", 100_000)
    tracemalloc.start()
    with pytest.raises(EncodingError, match="more than 100000 bytes when it is decompressed"):
        decode(column, data)
    assert tracemalloc.get_traced_memory()[1] < 2_500_000
    tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_says_too_small_a_size_does_not_expand_beyond_it(compression: int) -> None:
    data = bytearray(zipped([np.zeros(5_000_000, np.uint8)], compression))
    said = data.index(b"PK\1\2") + 24
    data[said : said + 4] = (1000).to_bytes(4, "little")
    tracemalloc.start()
    with pytest.raises(EncodingError, match=r"expected a \.npz file"):
        decode("npz", bytes(data))
    assert compression != zipfile.ZIP_DEFLATED or tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_members_within_the_bound_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "MAX_UNPACKED_BYTES", 100_000)
    assert decode("gz", gzip.compress(bytes(50_000)) * 2) == bytes(100_000)
    assert decode("npz", zipped([np.ones(90_000, np.uint8)]))["0"].sum() == 90_000


@given(data=st.binary(max_size=200), column=st.sampled_from(["npy", "npz", "json", "jpg", "webp", "cls", "txt.gz"]))
def test_any_bytes_are_a_value_or_refused(data: bytes, column: str) -> None:
    for head in (b"", b"\x93NUMPY\1\0", b"PK\3\4", gzip.compress(b"")[:4], b"RIFF" + data[:4] + b"WEBP"):
        with suppress(EncodingError):
            decode(column, head + data)


@pytest.mark.parametrize(("column", "kind"), [("jpg", "JPEG"), ("jpeg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")])
def test_images_are_opened_whatever_their_ending_says(column: str, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (7, 5), (1, 2, 3)).save(file, kind)
    for name in (column, "jpg", "mask.png"):
        image = decode(name, file.getvalue())
        assert (image.size, image.mode, image.format) == ((7, 5), "RGB", kind)
        image.load()
        assert is_image(name)


def test_what_is_refused_and_what_it_would_be() -> None:
    names = ("pkl", "a.pth", "pt.gz", "pkl.txt", "gz")
    assert [is_unsafe_member(name) for name in names] == [True, True, True, False, False]
    assert [is_never_read(name) for name in names] == [False, True, True, False, False]
    assert [kind_of(name) for name in ("pth", "a.jpg", "webp", "npy.gz", "x")] == [
        "pkl",
        "jpeg",
        "pil",
        "ndarray",
        "bytes",
    ]
    assert json.dumps([kind_of("json"), kind_of("inx")]) == '["json", "int"]'
