from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.arrival import claim
from lightning_streaming.cache.index_lock import held_index
from lightning_streaming.cache.inspection import FileKind, find_index, is_cache, list_cache
from lightning_streaming.cache.layout import ORIGIN_BASENAME
from lightning_streaming.cache.marks import make_mark
from lightning_streaming.cache.origin import Origin, write_origin
from lightning_streaming.cache.stamps import stamp_finished, stamp_used
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, dump_index, parse_index
from lightning_streaming.formats.mapping import map_file
from tests.cache.datasets import cached, write_dataset


def read_again(directory: Path) -> Iterable[ShardInfo]:
    """The shards of the index there."""
    return parse_index((directory / INDEX_BASENAME).read_bytes(), "index").shards


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache directory of an index, two shards of ours, and a foreign file."""
    write_dataset(tmp_path / "remote", shards=2)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    for shard in cache.read_index().shards:
        cache.ensure(shard)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def test_every_file_is_listed_with_what_it_is(filled: Path) -> None:
    view = map_file(filled / "shard.00000.mds", 3000)
    part = claim(filled, "shard.00005.mds")
    assert part is not None
    part.resize(7)
    found = {file.name: (file.kind, file.bytes, file.in_use) for file in list_cache(filled)}
    assert found == {
        f".arriving/{part.path.name}": (FileKind.ARRIVING, 7, True),
        INDEX_BASENAME: (FileKind.INDEX, (filled / INDEX_BASENAME).stat().st_size, False),
        "notes.txt": (FileKind.FOREIGN, 4, False),
        "shard.00000.mds": (FileKind.OURS, 3000, True),
        "shard.00001.mds": (FileKind.OURS, 3000, False),
    }
    last_used = {file.name: file.last_used for file in list_cache(filled)}["shard.00001.mds"]
    assert last_used is not None
    assert last_used <= time.time()
    part.close()
    view.release()
    assert not any(file.in_use for file in list_cache(filled))


def test_a_shard_that_was_finished_with_is_known_to_have_been_used(filled: Path) -> None:
    before = time.time()
    for name in ("shard.00000.mds", "shard.00001.mds"):
        os.utime(filled / name, ns=(0, (filled / name).stat().st_mtime_ns))
    stamp_used(filled / "shard.00000.mds")
    stamp_finished(filled / "shard.00001.mds")
    for file in list_cache(filled):
        if file.kind is FileKind.OURS:
            assert file.last_used is not None
            assert before - 1 <= file.last_used <= time.time() + 1


def test_what_an_index_is_fetched_into_is_in_use_as_long_as_its_part_is_locked(filled: Path) -> None:
    with held_index(filled, 1) as lock:
        lock.scratch.write_bytes(b"half")
        assert {file.name: file.in_use for file in list_cache(filled)}[lock.scratch.name]
        (filled / "kept").write_bytes(b"half")
    (filled / "kept").rename(lock.scratch)
    assert not {file.name: file.in_use for file in list_cache(filled)}[lock.scratch.name]


@pytest.mark.parametrize("shards", [3, 6000])
def test_the_index_is_found_whether_it_has_a_parsed_form_or_not(filled: Path, shards: int) -> None:
    index = DatasetIndex(tuple(replace(one, samples=1) for one in list(read_again(filled)) * (shards // 2)))
    text = dump_index(index.shards)
    (filled / INDEX_BASENAME).write_bytes(text)
    found = find_index(filled)
    assert found is not None
    assert found.digest == hashlib.sha256(text).hexdigest()
    assert len(found.index.shards) == len(index.shards)


@pytest.mark.parametrize("text", [None, b"{"])
def test_an_index_that_is_missing_or_damaged_is_none(filled: Path, text: bytes | None) -> None:
    (filled / INDEX_BASENAME).unlink()
    if text is not None:
        (filled / INDEX_BASENAME).write_bytes(text)
    assert find_index(filled) is None


def test_decompressed_shards_of_a_dataset_in_place_are_listed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=2, compression="zstd")
    cache = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    before = cached(tmp_path / "data")
    for shard in cache.read_index().shards:
        cache.ensure(shard)
    root = cache.place.directory
    assert [(file.name, file.kind) for file in list_cache(root)] == [
        ("shard.00000.mds", FileKind.OURS),
        ("shard.00001.mds", FileKind.OURS),
    ]
    assert cached(tmp_path / "data") == before
    mark = make_mark()
    digest = root.name.rpartition("-")[2]
    write_origin(root, Origin(remote=digest, mark=mark, check=None), root / "scratch")  # as for a large index
    assert {file.kind for file in list_cache(root)} == {FileKind.OURS}


def test_without_an_index_only_a_default_directory_is_taken_to_be_of_data_in_place(filled: Path) -> None:
    """Elsewhere people keep files of their own, and old ones have times of the same years."""
    os.utime(filled / "notes.txt", ns=(0, make_mark()))
    (filled / INDEX_BASENAME).unlink()
    kinds = {file.name: file.kind for file in list_cache(filled)}
    assert kinds["notes.txt"] is FileKind.FOREIGN
    assert kinds["shard.00000.mds"] is FileKind.OURS
    (filled / ORIGIN_BASENAME).write_text("0123456789abcdef")  # as an early version did
    assert not is_cache(filled)


def test_another_directory_is_refused_and_left(tmp_path: Path) -> None:
    write_dataset(tmp_path, shards=1)
    before = cached(tmp_path)
    assert not is_cache(tmp_path)
    with pytest.raises(ConfigError, match="is not a cache directory of one stream"):
        list_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)
