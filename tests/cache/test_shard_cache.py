from __future__ import annotations

import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.config import default_cache_directory
from lightning_streaming.cache.file_states import StagingFile, claim
from lightning_streaming.cache.shard_cache import FetchStatus
from lightning_streaming.errors import (
    ConfigError,
    IndexFormatError,
    IntegrityError,
    LockTimeoutError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
)
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import Location
from tests.cache.helpers import cached, fetch_shard, raw_data, write_dataset
from tests.golden import golden_path
from tests.helpers import assert_error
from tests.servers import HttpStore, S3Store


def cache_of(**settings: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="code", **{"download_timeout": 5, **settings}))


def over_http(store: HttpStore, tmp_path: Path, **settings: Any) -> ShardCache:
    return cache_of(remote=store.url, local=tmp_path / "cache", **settings)


def ensure_all(cache: ShardCache) -> list[Path | None]:
    return [fetch_shard(cache, shard) for shard in cache.read_index().shards]


class TestInPlace:
    def test_the_hash_is_checked_only_if_asked_for(self, tmp_path: Path) -> None:
        write_dataset(tmp_path, shards=1, hashes=("sha1",))
        path = tmp_path / "shard.00000.mds"
        path.write_bytes(bytes(path.stat().st_size))
        assert ensure_all(cache_of(local=tmp_path)) == [tmp_path]
        with assert_error(ShardCorruptError, path="shard.00000.mds") as caught:
            ensure_all(cache_of(local=tmp_path, validate_hash="sha1"))
        assert re.search(r"sha1 of .*read in place", str(caught.value))
        with assert_error(ConfigError, option="validate_hash", path="shard.00000.mds") as caught:
            ensure_all(cache_of(local=tmp_path, validate_hash="md5"))
        assert "'md5'" in str(caught.value)

    @pytest.mark.parametrize("place", ["remote", "local", "both"])
    def test_raw_files_are_used_where_they_are(self, tmp_path: Path, place: str) -> None:
        write_dataset(tmp_path)
        before = cached(tmp_path)
        settings = {"remote": str(tmp_path), "local": tmp_path}
        cache = cache_of(**(settings if place == "both" else {place: settings[place]}))
        assert ensure_all(cache) == [tmp_path, tmp_path]
        assert cache.reads_in_place
        assert cached(tmp_path) == before
        assert not default_cache_directory(str(tmp_path)).exists()

    def test_compressed_files_are_decompressed_elsewhere(self, tmp_path: Path) -> None:
        write_dataset(tmp_path, compression="zstd")
        before = cached(tmp_path)
        elsewhere = default_cache_directory(str(tmp_path))
        assert ensure_all(cache_of(local=tmp_path)) == [elsewhere, elsewhere]
        assert cached(elsewhere) == {f"shard.0000{number}.mds": raw_data(number) for number in (0, 1)}
        assert cached(tmp_path) == before

    def test_a_dataset_that_was_written_again_is_read_again(self, tmp_path: Path) -> None:
        write_dataset(tmp_path, compression="zstd", seed=0)
        ensure_all(cache_of(local=tmp_path))
        write_dataset(tmp_path, compression="zstd", seed=1)
        directory = ensure_all(cache_of(local=tmp_path))[0]
        assert directory is not None
        assert (directory / "shard.00000.mds").read_bytes() == raw_data(0, seed=1)

    @pytest.mark.parametrize("dataset", ["scalars", "comp-zstd", "json", "tsv-zstd", "merged", "all-hashes"])
    def test_datasets_of_the_original_writer_are_made_present(self, dataset: str) -> None:
        cache = cache_of(remote=str(golden_path("mds", dataset)))
        for shard in cache.read_index().shards:
            directory = fetch_shard(cache, shard)
            assert directory is not None
            for raw, _ in shard.files:
                assert (directory / raw.basename).stat().st_size == raw.bytes

    @pytest.mark.parametrize("given", ["local", "remote"])
    @pytest.mark.parametrize(
        ("name", "hint"), [(INDEX_BASENAME, "shards like shard.00000.mds"), ("shard.00001.mds", "is read in place")]
    )
    def test_a_missing_file_is_told(self, tmp_path: Path, name: str, hint: str, given: str) -> None:
        write_dataset(tmp_path)
        (tmp_path / name).unlink()
        with assert_error(ObjectNotFoundError, stream="code", path=tmp_path / name, hint=hint):
            ensure_all(cache_of(**{given: str(tmp_path)}))

    def test_a_missing_compressed_file_is_told(self, tmp_path: Path) -> None:
        write_dataset(tmp_path, compression="zstd")
        (tmp_path / "shard.00001.mds.zstd").unlink()
        with assert_error(ObjectNotFoundError, path="shard.00001.mds.zstd"):
            ensure_all(cache_of(local=tmp_path))

    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_a_file_of_the_wrong_size_is_told_and_left(self, tmp_path: Path, compression: str | None) -> None:
        write_dataset(tmp_path, compression=compression)
        damaged = sorted(tmp_path.glob("shard.00000*"))[0]
        damaged.write_bytes(b"short")
        with assert_error(ShardCorruptError, path=damaged) as caught:
            ensure_all(cache_of(local=tmp_path))
        assert "has 5 bytes" in str(caught.value)
        assert damaged.read_bytes() == b"short"

    def test_a_damaged_compressed_file_is_told_and_left(self, tmp_path: Path) -> None:
        write_dataset(tmp_path, compression="zstd")
        damaged = tmp_path / "shard.00000.mds.zstd"
        damaged.write_bytes(bytes(len(damaged.read_bytes())))
        with assert_error(ShardCorruptError, path="shard.00000.mds.zstd") as caught:
            ensure_all(cache_of(local=tmp_path))
        assert re.search(f"sha1 of {damaged}", str(caught.value))
        assert damaged.exists()


class TestFetching:
    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_files_come_over_http(self, http_store: HttpStore, tmp_path: Path, compression: str | None) -> None:
        write_dataset(http_store.root, compression=compression)
        cache = over_http(http_store, tmp_path)
        assert ensure_all(cache) == [tmp_path / "cache"] * 2
        assert not cache.reads_in_place
        index = (http_store.root / INDEX_BASENAME).read_bytes()
        raw = {f"shard.0000{number}.mds": raw_data(number) for number in (0, 1)}
        assert cached(tmp_path / "cache") == {INDEX_BASENAME: index, **raw}

    def test_files_come_from_s3_into_the_default_directory(self, s3: S3Store, tmp_path: Path) -> None:
        write_dataset(tmp_path, compression="zstd", hashes=("xxh64", "md5"))
        bucket = s3.make_bucket()
        for path in tmp_path.iterdir():
            Location(f"{bucket}/train/{path.name}", s3.options).upload(path)
        cache = cache_of(remote=f"{bucket}/train", storage_options=s3.options, validate_hash="md5")
        directory = default_cache_directory(f"{bucket}/train", s3.options)
        assert ensure_all(cache) == [directory, directory]
        assert (directory / "shard.00001.mds").read_bytes() == raw_data(1)

    def test_files_of_a_remote_path_are_copied(self, tmp_path: Path) -> None:
        write_dataset(tmp_path / "remote")
        cache = cache_of(remote=str(tmp_path / "remote"), local=tmp_path / "cache")
        assert ensure_all(cache) == [tmp_path / "cache"] * 2
        assert cached(tmp_path / "cache") == cached(tmp_path / "remote")

    def test_what_is_present_is_not_fetched_again(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root, compression="zstd")
        ensure_all(over_http(http_store, tmp_path))
        requests = http_store.requests()
        ensure_all(over_http(http_store, tmp_path))
        assert http_store.requests() == [*requests, INDEX_BASENAME]
        assert sorted(requests) == [INDEX_BASENAME, "shard.00000.mds.zstd", "shard.00001.mds.zstd"]

    def test_an_index_that_was_cut_short_is_fetched_again(self, http_store: HttpStore, tmp_path: Path) -> None:
        index = write_dataset(http_store.root)
        cache = over_http(http_store, tmp_path)
        cache.read_index()
        (tmp_path / "cache" / INDEX_BASENAME).write_bytes(b'{"shards": [')
        assert cache.read_index() == index

    def test_a_remote_index_that_cannot_be_used_is_told_and_not_kept(
        self, http_store: HttpStore, tmp_path: Path
    ) -> None:
        (http_store.root / INDEX_BASENAME).write_bytes(b"no index")
        with assert_error(IndexFormatError, path="index.json"):
            over_http(http_store, tmp_path).read_index()
        assert not (tmp_path / "cache" / INDEX_BASENAME).exists()

    def test_a_file_of_the_wrong_size_in_the_cache_is_replaced(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root)
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "shard.00000.mds").write_bytes(b"short")
        ensure_all(over_http(http_store, tmp_path))
        assert (tmp_path / "cache" / "shard.00000.mds").read_bytes() == raw_data(0)

    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_damage_on_the_way_is_fetched_again_and_logged(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_dataset(http_store.root, compression=compression)
        http_store.fail("shard.00000", "corrupt", times=1)
        with caplog.at_level(logging.DEBUG, "lightning_streaming"):
            ensure_all(over_http(http_store, tmp_path))
        assert (tmp_path / "cache" / "shard.00000.mds").read_bytes() == raw_data(0)
        (told,) = [message for message in caplog.messages if message.startswith("attempt 1 of ")]
        assert f"to download {http_store.url}/shard.00000.mds" in told

    @pytest.mark.rotate(1)
    @pytest.mark.parametrize(("fault", "word"), [("corrupt", "sha1"), ("short", "bytes")])
    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_damage_that_stays_is_told_and_not_kept(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, fault: str, word: str
    ) -> None:
        write_dataset(http_store.root, compression=compression)
        http_store.fail("shard.00000", fault)
        name = f"shard.00000.mds{'' if compression is None else f'.{compression}'}"
        with assert_error(IntegrityError, stream="code", path=f"{http_store.url}/{name}") as caught:
            ensure_all(over_http(http_store, tmp_path))
        assert word in str(caught.value)
        assert list(cached(tmp_path / "cache")) == [INDEX_BASENAME]
        assert len([name for name in http_store.requests() if name != INDEX_BASENAME]) == 3

    def test_damage_shows_in_decompression_where_no_hash_is_recorded(
        self, http_store: HttpStore, tmp_path: Path
    ) -> None:
        write_dataset(http_store.root, compression="zstd", hashes=())
        http_store.fail("shard.00000", "corrupt")
        with assert_error(IntegrityError, path="shard.00000.mds.zstd") as caught:
            ensure_all(over_http(http_store, tmp_path))
        assert "decompressed" in str(caught.value)

    def test_a_hash_that_is_not_recorded_is_refused(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root, hashes=("md5", "sha1"))
        with assert_error(ConfigError, option="validate_hash", path="shard.00000.mds") as caught:
            ensure_all(over_http(http_store, tmp_path, validate_hash="xxh64"))
        assert "'xxh64'" in str(caught.value)

    def test_a_missing_shard_is_told_with_its_stream(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root)
        (http_store.root / "shard.00001.mds").unlink()
        with assert_error(ObjectNotFoundError, path="shard.00001.mds", stream="code"):
            ensure_all(over_http(http_store, tmp_path))

    def test_a_directory_serves_one_remote_only(self, http_store: HttpStore, tmp_path: Path) -> None:
        for name in ("one", "other"):
            (http_store.root / name).mkdir()
            write_dataset(http_store.root / name, shards=1)
        caches = [
            ShardCache(CacheConfig(name=name, remote=f"{http_store.url}/{name}", local=tmp_path / "cache"))
            for name in ("one", "other")
        ]
        caches[0].read_index()
        with assert_error(ConfigError, option="remote", path="cache", stream="other"):
            caches[1].read_index()

    def test_a_discarded_shard_is_fetched_again(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root, shards=1)
        cache = over_http(http_store, tmp_path)
        ensure_all(cache)
        (shard,) = cache.read_index().shards
        path = tmp_path / "cache" / shard.raw_data.basename
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)))
        cache.discard(shard)
        fetch_shard(cache, shard)
        assert path.read_bytes() == whole


class TestKeepZip:
    def test_the_compressed_file_is_kept_and_used_again(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root, shards=1, compression="zstd")
        ensure_all(over_http(http_store, tmp_path, keep_zip=True))
        assert (tmp_path / "cache" / "shard.00000.mds.zstd").exists()
        (tmp_path / "cache" / "shard.00000.mds").unlink()
        ensure_all(over_http(http_store, tmp_path))
        assert (tmp_path / "cache" / "shard.00000.mds").read_bytes() == raw_data(0)
        assert http_store.requests() == [INDEX_BASENAME, "shard.00000.mds.zstd", INDEX_BASENAME]

    @pytest.mark.parametrize("same_size", [True, False])
    @pytest.mark.parametrize("keep_zip", [True, False])
    def test_a_damaged_compressed_file_is_fetched_again(
        self, http_store: HttpStore, tmp_path: Path, keep_zip: bool, same_size: bool
    ) -> None:
        index = write_dataset(http_store.root, shards=1, compression="zstd")
        file = index.shards[0].zip_data
        assert file is not None
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / file.basename).write_bytes(bytes(file.bytes if same_size else 5))
        ensure_all(over_http(http_store, tmp_path, keep_zip=keep_zip))
        kept = {file.basename: (http_store.root / file.basename).read_bytes()} if keep_zip else {}
        found = cached(tmp_path / "cache")
        del found[INDEX_BASENAME]
        assert found == {"shard.00000.mds": raw_data(0), **kept}


class TestObject:
    def test_making_one_touches_nothing(self, tmp_path: Path) -> None:
        cache_of(remote="s3://no-such-bucket/x", local=tmp_path / "cache")
        cache_of(remote="s3://no-such-bucket/x")
        assert list(tmp_path.iterdir()) == []
        assert not default_cache_directory("s3://no-such-bucket/x").exists()

    def test_a_shard_once_found_is_not_looked_for_again(self, tmp_path: Path) -> None:
        index = write_dataset(tmp_path)
        cache = cache_of(local=tmp_path)
        fetch_shard(cache, index.shards[0])
        (tmp_path / "shard.00000.mds").unlink()
        assert fetch_shard(cache, index.shards[0]) == tmp_path

    def test_a_copy_in_another_process_looks_for_itself(self, tmp_path: Path) -> None:
        index = write_dataset(tmp_path)
        cache = cache_of(local=tmp_path)
        fetch_shard(cache, index.shards[0])
        (tmp_path / "shard.00000.mds").unlink()
        with pytest.raises(ObjectNotFoundError):
            fetch_shard(pickle.loads(pickle.dumps(cache)), index.shards[0])

    def test_who_does_not_wait_gets_nothing_while_another_fetches(self, http_store: HttpStore, tmp_path: Path) -> None:
        write_dataset(http_store.root)
        cache = over_http(http_store, tmp_path)
        shard = cache.read_index().shards[0]
        part = claim(tmp_path / "cache", "shard.00000.mds")
        assert part is not None
        assert cache.fetch_ahead(shard) is FetchStatus.FETCHED_ELSEWHERE
        cache.directory.drop([part])
        assert cache.fetch_ahead(shard) is None

    def test_a_failure_ahead_shortens_the_attempts_of_one_reader_alone(
        self, http_store: HttpStore, tmp_path: Path
    ) -> None:
        write_dataset(http_store.root)
        cache = over_http(http_store, tmp_path, download_retry=1)
        shard = cache.read_index().shards[0]
        http_store.fail("shard.00000", "status", times=3)
        with pytest.raises(StorageError):
            cache.fetch_ahead(shard)
        with pytest.raises(StorageError), cache.hold(shard, release=list):
            pass
        http_store.fail("shard.00000", "status", times=1)
        with cache.hold(shard, release=list) as directory:
            assert (directory / "shard.00000.mds").read_bytes() == raw_data(0)

    def test_what_is_removed_as_soon_as_it_is_there_is_fetched_ahead_again(
        self, http_store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By somebody who asks no lock."""
        write_dataset(http_store.root)
        cache = over_http(http_store, tmp_path)
        keep_shared = StagingFile.keep_shared

        def remove_once(part: StagingFile) -> None:
            monkeypatch.setattr(StagingFile, "keep_shared", keep_shared)
            (tmp_path / "cache" / "shard.00000.mds").unlink()
            keep_shared(part)

        monkeypatch.setattr(StagingFile, "keep_shared", remove_once)
        assert cache.fetch_ahead(cache.read_index().shards[0]) is None
        assert (tmp_path / "cache" / "shard.00000.mds").read_bytes() == raw_data(0)
        assert http_store.requests().count("shard.00000.mds") == 2

    def test_who_waits_in_vain_is_told_for_whom(
        self, http_store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lightning_streaming.cache.shard_cache._UNPACK_SECONDS", 0.0)
        write_dataset(http_store.root)
        cache = over_http(http_store, tmp_path, download_retry=0, download_timeout=0.2)
        shard = cache.read_index().shards[0]
        part = claim(tmp_path / "cache", "shard.00000.mds")
        assert part is not None
        with assert_error(LockTimeoutError, stream="code"):
            fetch_shard(cache, shard)
        part.close()

    def test_it_shows_no_secret(self) -> None:
        cache = cache_of(remote="https://me:hunter2@host/x?sig=hunter2", storage_options={"token": "hunter2"})
        assert "hunter2" not in repr(cache) + repr(cache.__dict__)


@pytest.mark.parametrize("has_local", [False, True])
def test_a_renewed_signature_fetches_nothing_again(has_local: bool, http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root)
    local = {"local": tmp_path / "cache"} if has_local else {}
    for signature in ("X-Amz-Date=1&X-Amz-Signature=2", "X-Amz-Date=3&X-Amz-Signature=4"):
        ensure_all(cache_of(remote=f"{http_store.url}?{signature}", **local))
    fetched = [name for name in http_store.requests() if name.startswith("shard.")]
    assert sorted(fetched) == ["shard.00000.mds", "shard.00001.mds"]
    other = cache_of(remote=f"{http_store.url}?version=2", **local)
    if has_local:
        with assert_error(ConfigError, option="remote", path="cache"):
            other.read_index()
    else:
        assert other.directory.path != cache_of(remote=http_store.url).directory.path
