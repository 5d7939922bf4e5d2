from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.writing.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from tests.formats.golden_datasets import SPLIT, WRITTEN_BY_ONE_WRITER, expectations, samples_to_write, unpack
from tests.golden import golden_path

EXPECTED = expectations()
WRITERS: dict[str, Any] = {"mds": MDSWriter, "json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": XSVWriter}


@pytest.mark.parametrize("name", [*WRITTEN_BY_ONE_WRITER, *SPLIT])
def test_a_dataset_is_written_byte_for_byte_as_the_original_does(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "ours")
    golden, ours = contents(golden_path("mds", name), tmp_path / "a"), contents(tmp_path / "ours", tmp_path / "b")
    assert ours == golden


def write(name: str, out: Path) -> None:
    expected = EXPECTED[name]
    with WRITERS[expected["format"]](out=out, columns=expected["columns"], **expected["writer"]) as writer:
        for sample in samples_to_write(name):
            writer.write(sample)


def contents(directory: Path, scratch: Path) -> dict[str, Any]:
    """Every file of a dataset. Shards are decompressed, because compressed bytes depend on the library's version."""
    index = unpack(directory, scratch)
    pairs = [pair for shard in index.shards for pair in shard.files]
    stored = [(compressed or raw).basename for raw, compressed in pairs]
    assert sorted(path.name for path in directory.iterdir()) == sorted(["index.json", *stored])
    files: dict[str, Any] = {raw.basename: (scratch / raw.basename).read_bytes() for raw, _ in pairs}
    text = (directory / "index.json").read_bytes()
    is_compressed = any(shard.compression for shard in index.shards)
    return {**files, "index.json": without_compressed_bytes(text) if is_compressed else text}


def without_compressed_bytes(text: bytes) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = json.loads(text)["shards"]
    return [
        {key: file["basename"] if key.startswith("zip_") else file for key, file in shard.items()} for shard in shards
    ]
