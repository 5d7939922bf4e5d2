"""Write the datasets of ``litdata_0_2_76``, and what litData itself reads of them. For a Python that has litData:

    LITDATA_DISABLE_VERSION_CHECK=1 python -m tests.golden.make_litdata tests/golden/litdata_0_2_76

Each dataset is a directory; ``expected.json`` has its samples, as the module ``litdata_values`` describes values. It
is made of what a reader of litData gave, so nothing in it is of our own making. Without torchvision litData reads JPEG
files only if they have EXIF data.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataset, TokensLoader  # of an environment of its own
from litdata.streaming.writer import BinaryWriter
from litdata.types import File, Image, Jpeg, JpegArray, Text
from PIL import Image as Pillow

from tests.golden.litdata_values import describe

BLOCK = 5
NUMBERS = [np.int8, np.int64, np.uint8, np.uint32, np.float16, np.float32, np.float64, np.complex64, np.bool_]


def _image(number: int, mode: str = "RGB") -> Pillow.Image:
    channels = {"RGB": 3, "L": 1, "RGBA": 4}[mode]
    pixels = np.random.default_rng(number).integers(0, 256, (6, 4 + number, channels), np.uint8)
    return Pillow.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode)


def _file(number: int, kind: str, mode: str = "RGB") -> bytes:
    out, exif = io.BytesIO(), Pillow.Exif()
    exif[0x0112] = 1 + number
    _image(number, mode).save(out, kind, **({"exif": exif, "quality": 90} if kind == "JPEG" else {}))
    return out.getvalue()


def _rows(number: int) -> dict[str, Any]:
    return {
        "text": f"text {number} é" * (number % 3),
        "number": number * 7**17,
        "share": number / 3,
        "raw": bytes([number % 256]),
    }


def _mixed(number: int) -> dict[str, Any]:
    return {**_rows(number), "yes": number % 2 == 0, "array": np.arange(number, dtype=np.int16)}


def _suite(number: int) -> dict[str, Any]:
    """What the tests of all formats have in each."""
    tokens = np.arange(5 * number, 5 * number + 1 + number % 5, dtype=np.int32)
    return {"id": number, "text": f"text {number} é " * (number % 3), "tokens": tokens}


def _arrays(number: int) -> dict[str, Any]:
    made: dict[str, Any] = {np.dtype(one).name: np.arange(number % 4, dtype=np.int64).astype(one) for one in NUMBERS}
    made |= {f"{name}_2d": np.stack([one, one]) for name, one in made.items()}
    return made


def _tensors(number: int) -> dict[str, Any]:
    kinds = (torch.int32, torch.float64, torch.half, torch.bool, torch.complex64, torch.uint8)
    made = {str(one)[6:]: torch.arange(number % 3 + 1).to(one) for one in kinds}
    return {**made, **{f"{name}_3d": one.reshape(1, -1, 1) for name, one in made.items()}, "empty": torch.empty(2, 0)}


def _nested(number: int) -> dict[str, Any]:
    return {
        "x": {"left": np.array([number]), "right": (number, torch.tensor([[number]]))},
        "list": ["a", number],
        "many": {"words": ["x"] * number, "numbers": [number] * 2, "shares": [0.5], "yes": [True, False]},
        "record": [{"a": 1, "b": "two", "c": None, "d": 0.25, "e": True}] * number,
        "odd": [[number, None], {"k": [1, "x"]}],
    }


def _media(number: int) -> dict[str, Any]:
    return {
        "jpeg": Jpeg(bytes=_file(number, "JPEG")),
        "grey": Jpeg(bytes=_file(number, "JPEG", "L")),
        "pil": _image(number, ("RGB", "L", "RGBA")[number % 3]),
        "several": JpegArray(images=[Jpeg(bytes=_file(one, "JPEG")) for one in range(1 + number)]),
        "image": Image(bytes=_file(number, "JPEG"), path="x.jpg"),
        "file": File(bytes=b"x" * number, path="x.dat"),
        "text": Text(text="é" * number),
    }


DATASETS: dict[str, tuple[Callable[[int], Any], int, dict[str, Any]]] = {
    "rows": (_rows, 270, {"chunk_size": 260}),
    "rows_zstd": (_rows, 12, {"chunk_size": 7, "compression": "zstd"}),
    "records": (
        lambda n: {"id": n, "turns": [{"role": "user", "text": "é" * n}], "maybe": None if n % 2 else "x"},
        9,
        {},
    ),
    "mixed": (_mixed, 9, {}),
    "mixed_chunk": (_mixed, 9, {"compression": "zstd:4", "compression_level": "chunk"}),
    "mixed_batch": (_mixed, 9, {"compression": "zstd", "compression_batch_size": 2}),
    "mixed_sample": (_mixed, 9, {"compression": "zstd", "compression_level": "sample"}),
    "numbers": (lambda n: (n, n / 7, n % 2 == 0), 9, {}),
    "arrays": (_arrays, 5, {}),
    "tensors": (_tensors, 5, {}),
    "one_tensor": (lambda n: torch.arange(n), 5, {}),
    "one_text": (lambda n: f"text {n}", 5, {}),
    "pair": (lambda n: (np.full((2, 2), n, np.uint8), n), 9, {}),
    "nested": (_nested, 5, {}),
    "media": (_media, 3, {}),
    "pickled": (lambda n: {"id": n, "array": np.arange(2), "odd": {1, 2}}, 2, {}),
    "tokens": (lambda n: torch.arange(n * 10, n * 11 + 1, dtype=torch.int32), 12, {"item_loader": TokensLoader()}),
    "suite": (_suite, 34, {"chunk_size": 7}),
    "tokens_zstd": (
        lambda n: np.arange(n * 10, n * 11 + 1, dtype=np.uint16),
        12,
        {"item_loader": TokensLoader(), "compression": "zstd", "compression_level": "chunk"},
    ),
}


def write(out: Path) -> None:
    """All datasets, and what litData reads of them."""
    expected = {}
    for name, (make, count, how) in DATASETS.items():
        options = {"chunk_size": 40 if "item_loader" in how else 4, **how}
        writer = BinaryWriter(str(out / name), **options)
        for number in range(count):
            writer[number] = make(number)
        writer.done()
        writer.merge()
        loader = {"item_loader": TokensLoader(block_size=BLOCK)} if "item_loader" in how else {}
        copy = Path("/tmp/made-by-litdata") / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(out / name, copy)  # it unpacks beside what it reads
        dataset = StreamingDataset(str(copy), shuffle=False, drop_last=False, **loader)
        expected[name] = [describe(dataset[place]) for place in range(len(dataset))]
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(samples)}" for name, samples in expected.items())
    (out / "expected.json").write_text("{" + text + "}\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    write(target)
