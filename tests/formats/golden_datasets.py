"""The golden datasets: what was written into them, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_streaming.formats.algorithms import decompress
from lightning_streaming.formats.index import DatasetIndex, parse_index
from lightning_streaming.formats.shard import open_shard
from tests.golden import golden_path

WRITTEN_BY_ONE_WRITER = (
    "all-hashes",
    "comp-br",
    "comp-br-1",
    "comp-bz2",
    "comp-bz2-1",
    "comp-gz",
    "comp-gz-1",
    "comp-snappy",
    "comp-zstd",
    "comp-zstd-19",
    "empty-first-shard",
    "images",
    "ndarray",
    "no-samples",
    "pickle",
    "preencoded",
    "scalars",
    "scalars-unlimited",
)
SPLIT = ("csv", "json", "json-gz", "json-newline", "tsv-zstd", "xsv")
"""Those of two files a shard, each written by one writer."""
SERVED = (*WRITTEN_BY_ONE_WRITER, *SPLIT, "merged")
MADE_BY_PILLOW = ("png", "list[png]", "list[jpeg]")
"""Encodings whose bytes depend on the version of Pillow."""


def expectations() -> dict[str, Any]:
    """What was written into each dataset, by its name."""
    expected: dict[str, Any] = json.loads(golden_path("mds", "expected.json").read_bytes())
    return expected


def samples_to_write(name: str) -> list[dict[str, Any]]:
    """What a writer must be given to make the same files; where Pillow would encode, the payload itself."""
    expected = expectations()[name]
    samples = [{column: value_of(one) for column, one in sample.items()} for sample in expected["samples"]]
    for sample, payloads in zip(samples, expected.get("payload", ()), strict=False):
        for column, encoding_name in expected["columns"].items():
            if encoding_name in MADE_BY_PILLOW:
                sample[column] = bytes.fromhex(payloads[column])
    return samples


def value_of(description: Mapping[str, Any]) -> Any:
    """The Python value that a description in expected.json stands for."""
    kind = description["py"]
    if kind == "ndarray":
        flat = np.frombuffer(bytes.fromhex(description["hex"]), np.dtype(description["dtype"]))
        return flat.reshape(description["shape"])
    if kind == "image":
        size = description["width"], description["height"]
        return Image.frombytes(description["mode"], size, bytes.fromhex(description["hex"]))
    if kind == "list":
        return [value_of(one) for one in description["v"]]
    readers: dict[str, Any] = {
        "bytes": lambda: bytes.fromhex(description["hex"]),
        "str": lambda: description["v"],
        "int": lambda: int(description["v"]),
        "bool": lambda: description["v"],
        "float": lambda: float.fromhex(description["hex"]),
        "decimal": lambda: Decimal(description["v"]),
        "json": lambda: description["v"],
    }
    return readers[kind]()


def read_index(directory: Path) -> DatasetIndex:
    """The index of a dataset that lies in a directory."""
    path = directory / "index.json"
    return parse_index(path.read_bytes(), str(path))


def unpack(directory: Path, scratch: Path) -> DatasetIndex:
    """Put the raw files of every shard into ``scratch``, decompressed where they are stored compressed."""
    index = read_index(directory)
    for shard in index.shards:
        for raw, compressed in shard.files:
            stored = (directory / (compressed or raw).basename).read_bytes()
            if shard.compression is not None:
                stored = decompress(shard.compression, stored, raw.bytes)
            path = scratch / raw.basename
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stored)
    return index


def read_samples(directory: Path, scratch: Path) -> list[dict[str, Any]]:
    """All samples of a dataset, in order."""
    samples = []
    for shard in unpack(directory, scratch).shards:
        reader = open_shard(shard, scratch, allow_unsafe_types=True)
        samples += [reader[index] for index in range(len(reader))]
        reader.close()
    return samples
