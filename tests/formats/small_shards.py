"""Small shards on disk, of one file and of two, for tests that read them or break them; and damage to their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lightning_streaming.formats.algorithms import compress, extension, hash_bytes
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, dump_index
from lightning_streaming.formats.mds import compile_layout, encode_config, head_bytes
from lightning_streaming.formats.split import SplitLayout, make_split_layout, meta_bytes


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes, *, fewest: int = 1, most: int = 4, longest: int = 40) -> bytes:
    """``data`` with a few pieces overwritten, cut out or doubled: how many, and of at most how many bytes each."""
    for _ in range(draw(st.integers(fewest, most))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, longest)))
        piece = draw(st.sampled_from([b"", data[start:stop] * 2]) | st.binary(max_size=8))
        data = data[:start] + piece + data[stop:]
    return data


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


FORMATS = ("json", "csv", "tsv", "xsv")
SPLIT_COLUMNS = {"id": "int", "score": "float", "text": "str"}


def layout_of(split_format: str, columns: Mapping[str, str] = SPLIT_COLUMNS, **settings: Any) -> SplitLayout:
    """A layout, with a separator of two characters where one must be given."""
    if split_format == "xsv":
        settings = {"separator": "||", **settings}
    return make_split_layout(split_format, columns, **settings)


def sample_of(index: int) -> dict[str, Any]:
    """The sample of this number."""
    return {"id": index, "score": index / 4, "text": f"é {index}"}


def shard_files(rows: Sequence[bytes], layout: SplitLayout, config: bytes) -> tuple[bytes, bytes]:
    """The meta file and the data file that hold these rows."""
    offsets = list(accumulate(map(len, rows), initial=len(layout.header)))
    return meta_bytes(offsets, config), b"".join([layout.header, *rows])


def put_split_shard(
    directory: Path,
    layout: SplitLayout,
    samples: Sequence[Mapping[str, Any]],
    *,
    number: int = 0,
    compression: str | None = None,
    hashes: tuple[str, ...] = (),
) -> ShardInfo:
    """Write the files of a shard, and say what its index would."""
    config = encode_config(layout.schema, layout.format, compression=compression, hashes=hashes, size_limit=None)
    meta, data = shard_files([layout.encode(sample) for sample in samples], layout, config)
    directory.mkdir(parents=True, exist_ok=True)
    name = f"shard.{number:05}.{layout.format}"
    raw_meta, zip_meta = _put_file(directory, f"{name}.meta", meta, compression, hashes)
    raw_data, zip_data = _put_file(directory, name, data, compression, hashes)
    return ShardInfo(
        format=layout.format,
        samples=len(samples),
        compression=compression,
        hashes=hashes,
        size_limit=None,
        raw_data=raw_data,
        zip_data=zip_data,
        raw_meta=raw_meta,
        zip_meta=zip_meta,
        schema=layout.schema,
    )


def put_dataset(directory: Path, split_format: str, sizes: Sequence[int] = (5, 0, 5, 3), **shard: Any) -> DatasetIndex:
    """Write samples whose ``id`` counts from 0, in shards of these sizes, and their index."""
    layout, infos, first = layout_of(split_format), [], 0
    for number, size in enumerate(sizes):
        samples = [sample_of(index) for index in range(first, first + size)]
        infos.append(put_split_shard(directory, layout, samples, number=number, **shard))
        first += size
    (directory / INDEX_BASENAME).write_bytes(dump_index(infos))
    return DatasetIndex(tuple(infos))


def _put_file(
    directory: Path, basename: str, data: bytes, compression: str | None, hashes: tuple[str, ...]
) -> tuple[FileInfo, FileInfo | None]:
    """Store a file, compressed if so asked; gives its raw form and its compressed one."""
    raw = _describe(basename, data, hashes)
    if compression is None:
        (directory / basename).write_bytes(data)
        return raw, None
    stored_name = f"{basename}.{extension(compression)}"
    stored = compress(compression, data)
    (directory / stored_name).write_bytes(stored)
    return raw, _describe(stored_name, stored, hashes)


def _describe(basename: str, data: bytes, hashes: tuple[str, ...]) -> FileInfo:
    return FileInfo(basename=basename, bytes=len(data), hashes={name: hash_bytes(name, data) for name in hashes})
