"""Directories that litData wrote, read as litData itself reads them; and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.formats.compression import decompress
from lightning_streaming.formats.litdata import LitDataFormat
from lightning_streaming.formats.other_formats import ShardReader
from lightning_streaming.formats.shard_table import ShardInfo
from tests.golden import golden_path
from tests.golden.litdata_values import describe

EXPECTED: dict[str, list[Any]] = json.loads(golden_path("litdata_0_2_76", "expected.json").read_bytes())
BLOCK = 5
READABLE = sorted(set(EXPECTED) - {"pickled"})


class Files:
    """A directory, as a format sees it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shown = str(directory)

    def sizes(self) -> Mapping[str, int]:
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file())
        return {path.relative_to(self.directory).as_posix(): path.stat().st_size for path in paths}

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return (self.directory / name).read_bytes()[start:stop]


def format_of(name: str) -> LitDataFormat:
    return LitDataFormat(BLOCK if name.startswith("tokens") else None)


def unpacked(info: ShardInfo, directory: Path, into: Path) -> Path:
    """Where the raw file of a chunk is."""
    if info.zip_data is None:
        return directory
    data = (directory / info.zip_data.basename).read_bytes()
    (into / info.raw_data.basename).write_bytes(decompress(info.compression or "", data, info.raw_data.bytes))
    return into


def readers(name: str, tmp_path: Path, columns: list[str] | None = None) -> list[ShardReader]:
    directory, this = golden_path("litdata_0_2_76", name), format_of(name)
    shards = list(this.describe(Files(directory), {}))
    return [this.open(info, unpacked(info, directory, tmp_path), columns) for info in shards]


def as_column(sample: Any) -> Any:
    """What we make of a sample that litData gave: one that is no dict is one column."""
    kind, held = sample[:2]
    return held if kind == "dict" else [[["str", "sample"], sample]]


@pytest.mark.parametrize("name", READABLE)
def test_samples_are_those_that_litdata_reads(name: str, tmp_path: Path) -> None:
    found = [reader[place] for reader in readers(name, tmp_path) for place in range(len(reader))]
    assert len(found) == len(EXPECTED[name])
    for mine, theirs in zip(found, EXPECTED[name], strict=True):
        assert sorted(describe(mine)[1]) == sorted(as_column(theirs))
