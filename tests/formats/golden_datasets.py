"""The golden MDS datasets: which of them this version serves, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming.formats.compression import decompress
from lightning_streaming.formats.index import DatasetIndex, parse_index
from lightning_streaming.formats.shard import open_shard
from tests.golden import golden_path

WRITTEN_BY_ONE_WRITER = (
    "all-hashes",
    "comp-zstd",
    "comp-zstd-19",
    "empty-first-shard",
    "ndarray",
    "no-samples",
    "preencoded",
    "scalars",
    "scalars-unlimited",
)
SERVED = (*WRITTEN_BY_ONE_WRITER, "merged")
NOT_SERVED = {
    "comp-br": "br",
    "comp-br-1": "br",
    "comp-bz2": "bz2",
    "comp-bz2-1": "bz2",
    "comp-gz": "gz",
    "comp-gz-1": "gz",
    "comp-snappy": "snappy",
    "csv": "csv",
    "images": "jpeg_array",
    "json": "json",
    "json-gz": "json",
    "json-newline": "json",
    "pickle": "pkl",
    "tsv-zstd": "tsv",
    "xsv": "xsv",
}
"""Dataset to the first thing in it that this version does not serve."""


def expectations() -> dict[str, Any]:
    """What was written into each dataset, by its name."""
    expected: dict[str, Any] = json.loads(golden_path("mds", "expected.json").read_bytes())
    return expected


def value_of(description: Mapping[str, Any]) -> Any:
    """The Python value that a description in expected.json stands for."""
    kind = description["py"]
    if kind == "ndarray":
        flat = np.frombuffer(bytes.fromhex(description["hex"]), np.dtype(description["dtype"]))
        return flat.reshape(description["shape"])
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
    """Put the raw file of every shard into ``scratch``, decompressed where it is stored compressed."""
    index = read_index(directory)
    for shard in index.shards:
        stored = (directory / (shard.zip_data or shard.raw_data).basename).read_bytes()
        if shard.compression is not None:
            stored = decompress(shard.compression, stored, shard.raw_data.bytes)
        raw = scratch / shard.raw_data.basename
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.write_bytes(stored)
    return index


def read_samples(directory: Path, scratch: Path) -> list[dict[str, Any]]:
    """All samples of a dataset, in order."""
    samples = []
    for shard in unpack(directory, scratch).shards:
        reader = open_shard(shard, scratch)
        samples += [reader[index] for index in range(len(reader))]
        reader.close()
    return samples
