from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.writing.writer import MDSWriter
from tests.formats.golden_datasets import WRITTEN_BY_ONE_WRITER, expectations, unpack, value_of
from tests.golden import golden_path

EXPECTED = expectations()


@pytest.mark.parametrize("name", WRITTEN_BY_ONE_WRITER)
def test_a_dataset_is_written_byte_for_byte_as_the_original_does(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "ours")
    golden, ours = contents(golden_path("mds", name), tmp_path / "a"), contents(tmp_path / "ours", tmp_path / "b")
    assert ours == golden


def write(name: str, out: Path) -> None:
    expected = EXPECTED[name]
    with MDSWriter(out=out, columns=expected["columns"], **expected["writer"]) as writer:
        for descriptions in expected["samples"]:
            writer.write({column: value_of(description) for column, description in descriptions.items()})


def contents(directory: Path, scratch: Path) -> dict[str, Any]:
    """Every file of a dataset. Shards are decompressed, because compressed bytes depend on the library's version."""
    index = unpack(directory, scratch)
    files: dict[str, Any] = {shard.raw_data.basename: (scratch / shard.raw_data.basename) for shard in index.shards}
    files = {basename: path.read_bytes() for basename, path in files.items()}
    text = (directory / "index.json").read_bytes()
    stored = [(shard.zip_data or shard.raw_data).basename for shard in index.shards]
    assert sorted(path.name for path in directory.iterdir()) == sorted(["index.json", *stored])
    if any(shard.compression for shard in index.shards):
        files["index.json"] = without_zip_data(text)
    else:
        files["index.json"] = text
    return files


def without_zip_data(text: bytes) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = json.loads(text)["shards"]
    return [shard | {"zip_data": shard["zip_data"]["basename"]} for shard in shards]
