"""Datasets of random columns, samples and settings, each made from its number alone, the same in any environment.

Big-endian arrays and empty lists of JPEG files are left out: the reference reads them back wrong, or not at all.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FORMATS = ("mds", "mds", "mds", "json", "csv", "tsv", "xsv")
"""With the shares that they have."""
HASHES = ("sha1", "md5", "sha3_256", "blake2b", "xxh64", "xxh128", "xxh3_64")
COMPRESSIONS = (None, None, None, "zstd", "zstd:7", "gz", "gz:1", "bz2", "br:3")
NUMBERS = tuple(f"{kind}{width}" for kind in ("int", "uint") for width in (8, 16, 32, 64))
FLOATS = ("float16", "float32", "float64")
_NAMES = ("a", "b", "ä", "Z", "col 1", "日本", "x.y", "_")
_LETTERS = "abcXYZ 0129éä日🙂\"'{}\\:/"
_BYTES_OF_PIXEL = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}

Make = Callable[[random.Random], Any]


@dataclass(frozen=True, kw_only=True)
class RandomDataset:
    """What a writer is told."""

    format: str
    columns: dict[str, str]
    samples: list[dict[str, Any]]
    settings: dict[str, Any]
    """More arguments, which the writers of both libraries take."""


def make_dataset(seed: int, number: int) -> RandomDataset:
    """The dataset of this number."""
    rng = random.Random(f"{seed} {number}")
    shard_format = rng.choice(FORMATS)
    makers: dict[str, Make] = _MDS if shard_format == "mds" else _TEXT
    names = dict.fromkeys(rng.choice(_NAMES) + str(rng.randrange(3)) for _ in range(rng.randint(1, 5)))
    columns = {name: rng.choice(list(makers)) for name in names}
    made = {name: _settled(rng, encoding, makers) for name, encoding in columns.items()}
    settings: dict[str, Any] = {
        "compression": rng.choice(COMPRESSIONS),
        "hashes": sorted(rng.sample(HASHES, rng.randrange(3))),
        "size_limit": rng.choice([1, 100, 1000, 3000, 20_000, 2**26, None]),
    }
    if shard_format != "mds":
        settings["newline"] = rng.choice(["\n", "\n", "\r\n"])
    if shard_format == "xsv":
        settings["separator"] = rng.choice([" | ", ";", "::="])
    return RandomDataset(
        format=shard_format,
        columns={name: encoding for name, (encoding, _) in made.items()},
        samples=[
            {name: make(rng) for name, (_, make) in made.items()} for _ in range(rng.choice([0, 1, 2, 10, 40, 100]))
        ],
        settings=settings,
    )


def _settled(rng: random.Random, encoding: str, makers: Mapping[str, Make]) -> tuple[str, Make]:
    """An encoding with its dtype and shape, and what makes its values."""
    if encoding not in ("ndarray:dtype", "ndarray:dtype:shape"):
        return encoding, makers[encoding]
    dtype = rng.choice([*NUMBERS, *FLOATS])
    if encoding == "ndarray:dtype":
        return f"ndarray:{dtype}", lambda rng: _array(rng, dtype, _shape(rng))
    shape = _shape(rng)
    return f"ndarray:{dtype}:{','.join(map(str, shape))}", lambda rng: _array(rng, dtype, shape)


def _shape(rng: random.Random) -> list[int]:
    return [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]


def _array(rng: random.Random, dtype: str, shape: list[int]) -> NDArray[Any]:
    """Random bytes as an array: contiguous, in the order of Fortran, or a view of every second row."""
    item = np.dtype(dtype)
    array = np.frombuffer(rng.randbytes(int(np.prod(shape)) * item.itemsize), item).reshape(shape)
    layouts: list[Callable[[], NDArray[Any]]] = [
        lambda: array,
        lambda: np.asfortranarray(array),
        lambda: np.repeat(array, 2, axis=0)[::2],
    ]
    return rng.choice(layouts)()


def _any_array(rng: random.Random) -> NDArray[Any]:
    return _array(rng, rng.choice([*NUMBERS, *FLOATS]), [rng.choice([1, 3, 300]), *_shape(rng)[1:]])


def _text(rng: random.Random) -> str:
    """Without what separates rows and fields of any format."""
    return "".join(rng.choice(_LETTERS.replace(":", "")) for _ in range(rng.choice([0, 1, 5, 50, 300])))


def _long_text(rng: random.Random) -> str:
    return _text(rng) + rng.choice(["", "\n", ",\t;", "\0", "\u2028"])


def _integer(rng: random.Random) -> int:
    return rng.choice([0, -1, 2**63 - 1, -(2**63), rng.randrange(-(2**63), 2**63)])


def _float(rng: random.Random) -> float:
    return rng.choice([rng.random(), -0.0, 1e300, 1e-7, rng.random() * 10.0 ** rng.randrange(-300, 300)])


def _number(dtype: str) -> Make:
    limits = np.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    return lambda rng: rng.choice([least, most, rng.randint(least, most), np.dtype(dtype).type(rng.randrange(100))])


def _real(dtype: str) -> Make:
    return lambda rng: rng.choice([rng.random(), -1.5, 3, float("inf"), float("nan"), np.dtype(dtype).type(0.1)])


def _json(rng: random.Random) -> Any:
    some = [None, True, 1.5, float("inf"), "é\n", {"ä": [1, 2, {"b": None}], "a": {}}, [1] * rng.randrange(30)]
    return rng.choice(some)


def _image(*modes: str) -> Make:
    def make(rng: random.Random) -> Image.Image:
        mode, width, height = rng.choice(modes), rng.randint(1, 20), rng.randint(1, 20)
        return Image.frombytes(mode, (width, height), rng.randbytes(width * height * _BYTES_OF_PIXEL[mode]))

    return make


def jpeg_file(image: Image.Image) -> bytes:
    """An image as Pillow writes it if nothing is said."""
    file = io.BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


def _some(make: Make) -> Make:
    return lambda rng: [make(rng) for _ in range(rng.randint(1, 3))]


_TEXT: dict[str, Make] = {"str": _text, "int": _integer, "float": _float}
_MDS: dict[str, Make] = {
    "bytes": lambda rng: rng.randbytes(rng.choice([0, 1, 10, 300, 1000])),
    "str": _long_text,
    "int": _integer,
    **{name: _number(name) for name in NUMBERS},
    **{name: _real(name) for name in FLOATS},
    "str_int": lambda rng: rng.randrange(-(10**40), 10**40),
    "str_float": lambda rng: rng.choice([_float(rng), float("inf")]),
    "str_decimal": lambda rng: Decimal(f"{rng.randrange(10**30)}.{rng.randrange(10**9)}"),
    "json": _json,
    "pkl": lambda rng: {"a": (1, None, rng.random())},
    "ndarray": _any_array,
    "ndarray:dtype": _any_array,
    "ndarray:dtype:shape": _any_array,
    "pil": _image("L", "RGB", "RGBA", "CMYK"),
    "png": _image("L", "RGB", "RGBA"),
    "jpeg": _image("L", "RGB", "CMYK"),
    "jpeg_array": _some(lambda rng: jpeg_file(_image("L", "RGB")(rng))),
    "list[pil]": _some(_image("RGB")),
    "list[png]": _some(_image("RGB")),
    "list[jpeg]": _some(_image("RGB")),
}
