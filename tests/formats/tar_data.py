"""Tar files of samples, as webdataset, tarfile and GNU tar write them; and what webdataset itself reads of them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from PIL import Image

from lightning_streaming.cache.generated_index import FilesAt
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.webdataset import WebDatasetFormat
from lightning_streaming.storage import Location


def text_samples(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Samples of json, txt and cls."""
    made = random.Random(count * 1000 + first)
    return [
        {
            "__key__": f"some/{number:06}",
            "json": {"number": number, "words": ["ä", None, 1.5]},
            "txt": "tö" * made.randrange(600),
            "cls": number % 10,
        }
        for number in range(first, first + count)
    ]


def image_sample(number: int) -> dict[str, Any]:
    """A sample of a member of each kind that webdataset can write and read."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (8 + number, 9, 3), np.uint8)
    return {
        "__key__": f"{number:04}",
        "png": pixels,
        "left.jpg": pixels,
        "npy": rng.standard_normal((3, number + 1)).astype(np.float32),
        "npz": {"a": np.arange(number), "b": np.asarray(2.5)},
        "text": "é" * number,
        "more.json": [number],
        "index": str(number).encode(),
        "bin": rng.bytes(number),
    }


def write_samples(path: Path, samples: Iterable[Mapping[str, Any]], **options: Any) -> Path:
    """Have webdataset write a tar file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), **options) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path


def write_members(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """Have tarfile write a tar file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def theirs(path: Path) -> list[dict[str, Any]]:
    """The samples that webdataset reads of a file, decoded by it; images as it gives them, in RGB."""
    decode = webdataset.Decoder([webdataset.imagehandler("pil")])
    with path.open("rb") as file:
        members = webdataset.tariterators.tar_file_expander([{"url": str(path), "stream": file}])
        read = webdataset.tariterators.group_by_keys(members)
        return [{name: value for name, value in decode(one).items() if name != "__url__"} for one in read]


def described(place: Path | str, known: Mapping[str, ShardInfo] | None = None) -> list[ShardInfo]:
    """What our index says of a place."""
    return list(WebDatasetFormat().describe(FilesAt(Location(str(place))), known or {}))


def ours(place: Path, columns: list[str] | None = None) -> list[list[dict[str, Any]]]:
    """The samples of each shard of a directory that is not compressed."""
    readers = [WebDatasetFormat().open(info, place, columns) for info in described(place)]
    samples = [[one[number] for number in range(len(one))] for one in readers]
    for one in readers:
        one.close()
    return samples


def as_plain(value: Any) -> Any:
    """Something that can be compared: of images their pixels in RGB."""
    if isinstance(value, Image.Image):
        return np.asarray(value.convert("RGB")).tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: as_plain(one) for name, one in value.items()}
    return value
