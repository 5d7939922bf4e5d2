"""Small shards on disk, for tests that read them or break them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.mds import encode_config, head_bytes
from lightning_streaming.formats.mds_sample import compile_layout

SAMPLES: list[dict[str, Any]] = [{"id": 0, "text": "zero"}, {"id": 1, "text": ""}, {"id": 2, "text": "twó"}]
COLUMNS = {"id": "int", "text": "str"}


def shard_data(samples: list[dict[str, Any]], columns: dict[str, str]) -> bytes:
    """The bytes of a shard file."""
    layout = compile_layout(tuple(columns), tuple(columns.values()))
    config = encode_config(layout.schema, compression=None, hashes=(), size_limit=None)
    encoded = [layout.encode(sample) for sample in samples]
    return b"".join([head_bytes(list(accumulate(map(len, encoded))), config), *encoded])


def shard_info(data: bytes, **changes: Any) -> ShardInfo:
    """What an index says of ``data``, or, with ``changes``, what it falsely says."""
    columns = changes.pop("columns", COLUMNS)
    layout = compile_layout(tuple(columns), tuple(columns.values()))
    whole: dict[str, Any] = {
        "format": "mds",
        "samples": len(SAMPLES),
        "compression": None,
        "hashes": (),
        "size_limit": None,
        "raw_data": FileInfo(basename="shard.mds", bytes=len(data), hashes={}),
        "zip_data": None,
        "schema": layout.schema,
    }
    return ShardInfo(**(whole | changes))


def put_shard(
    directory: Path,
    samples: list[dict[str, Any]] = SAMPLES,
    columns: dict[str, str] = COLUMNS,
) -> ShardInfo:
    """Write a shard file, and say what its index would."""
    data = shard_data(samples, columns)
    (directory / "shard.mds").write_bytes(data)
    return shard_info(data, samples=len(samples), columns=columns)
