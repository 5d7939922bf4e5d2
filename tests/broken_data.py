"""Datasets of which some samples really cannot be decoded, and loaders that replace these."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_streaming import StreamingDataLoader
from tests.helpers import make_loader, write_shards

SIZES = [5, 7, 6, 8, 5]
BROKEN = (3, 9, 10, 25)
"""Of shard 0, 1, 1 and 3."""


def shard_of(number: int, sizes: Sequence[int] = SIZES) -> int:
    """The shard that has a sample."""
    return int(np.searchsorted(np.cumsum(sizes), number, side="right"))


def write_broken_json(
    root: Path, sizes: Sequence[int] = SIZES, broken: Collection[int] = BROKEN, first_id: int = 0
) -> Path:
    """Samples with an ``id`` and a column of JSON, which is none where they are broken."""

    def make(number: int) -> dict[str, Any]:
        return {"id": first_id + number, "meta": {"name": f"name-{number:04}"}}

    write_shards(root, sizes, {"id": "int", "meta": "json"}, make)
    return _overwritten(root, {f'"name-{number:04}"'.encode(): b"?" for number in broken})


def write_broken_images(root: Path, sizes: Sequence[int] = SIZES, broken: Collection[int] = BROKEN) -> Path:
    """Samples with an ``id`` and a JPEG file, the head of which is lost where they are broken."""
    files = [_jpeg(number) for number in range(sum(sizes))]
    write_shards(root, sizes, {"id": "int", "image": "jpeg"}, lambda number: {"id": number, "image": files[number]})
    return _overwritten(root, {files[number]: b"\0" * 20 for number in broken})


def write_broken_arrays(root: Path, sizes: Sequence[int] = SIZES, broken: Collection[int] = BROKEN) -> Path:
    """Plain samples: an ``id`` and an array whose head says no type where they are broken."""

    def make(number: int) -> dict[str, Any]:
        return {"id": number, "x": np.arange(4, dtype=np.int64) + 1000 * (number + 1)}

    write_shards(root, sizes, {"id": "int", "x": "ndarray"}, make)
    for number in broken:
        (path,) = (path for path in root.glob("*.mds") if make(number)["x"].tobytes() in path.read_bytes())
        data = bytearray(path.read_bytes())
        # A byte for the type, one for the number of axes, one for the size of the only one.
        data[data.index(make(number)["x"].tobytes()) - 3] = 0xFF
        path.write_bytes(data)
    return root


def ids(batches: Iterable[Any]) -> list[int]:
    """The ids of all batches, one after another."""
    return [number for batch in batches for number in batch["id"].tolist()]


def replacing(log: Path | str, most: int | str = "100%") -> dict[str, Any]:
    """The group ``bad_samples`` of a dataset that replaces them."""
    return {"action": "replace", "max": most, "log": str(log)}


def replacing_loader(
    root: Path | str | None, log: Path, *, most: int | str = "100%", **settings: Any
) -> StreamingDataLoader:
    """A loader that replaces bad samples."""
    return make_loader(root, bad_samples=replacing(log, most), **settings)


def _jpeg(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file, "JPEG", comment=f"number {number}")
    return file.getvalue()


def _overwritten(root: Path, changes: dict[bytes, bytes]) -> Path:
    """Change what is found in shard files, in place and without a change of size."""
    for old, new in changes.items():
        (path,) = (path for path in root.glob("*.mds") if old in path.read_bytes())
        path.write_bytes(path.read_bytes().replace(old, new + old[len(new) :]))
    return root
