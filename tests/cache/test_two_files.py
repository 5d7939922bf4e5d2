"""Shards of a meta file and a data file: both are here, whole and checked, or the shard is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.config import default_cache_directory
from lightning_streaming.cache.file_states import StagingFile, claim
from lightning_streaming.cache.shard_cache import FetchStatus
from lightning_streaming.errors import ConfigError, IntegrityError, ObjectNotFoundError, ShardCorruptError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex
from lightning_streaming.storage import Location
from tests.cache.helpers import cached, fetch_shard
from tests.formats.small_shards import FORMATS, put_dataset
from tests.helpers import assert_error
from tests.servers import HttpStore, S3Store

COMPRESSIONS = pytest.mark.parametrize("compression", [None, "zstd"])
WHICH = pytest.mark.parametrize("which", ["csv.meta", "csv"])


def cache_of(**settings: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="code", **{"download_timeout": 5, **settings}))


def over_http(store: HttpStore, tmp_path: Path, **settings: Any) -> ShardCache:
    return cache_of(remote=store.url, local=tmp_path / "cache", **settings)


def files_in(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in cached(directory).items() if name != INDEX_BASENAME}


def stored_name(which: str, compression: str | None) -> str:
    return f"shard.00000.{which}" + (f".{compression}" if compression else "")


def put_csv(directory: Path, compression: str | None, **shard: Any) -> DatasetIndex:
    """A dataset of one shard."""
    return put_dataset(directory, "csv", (4,), compression=compression, **{"hashes": ("sha1",), **shard})


def ensure_all(cache: ShardCache) -> list[Path | None]:
    return [fetch_shard(cache, shard) for shard in cache.read_index().shards]


def same_size_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


class TestFetching:
    @pytest.mark.rotate(2)
    @pytest.mark.parametrize("split_format", FORMATS)
    def test_both_files_come_from_s3(self, s3: S3Store, tmp_path: Path, split_format: str) -> None:
        put_dataset(tmp_path / "made", split_format, (3, 0, 2), compression="zstd", hashes=("md5", "sha1"))
        bucket = s3.make_bucket()
        for path in (tmp_path / "made").iterdir():
            Location(f"{bucket}/{path.name}", s3.options).upload(path)
        cache = cache_of(
            remote=bucket, local=tmp_path / "cache", storage_options=s3.options, validate_hash="md5", keep_zip=True
        )
        assert ensure_all(cache) == [tmp_path / "cache"] * 3
        found = files_in(tmp_path / "cache")
        kept = {name: found.pop(name) for name in sorted(found) if name.endswith(".zstd")}
        assert kept == files_in(tmp_path / "made")
        assert found.keys() == {name.removesuffix(".zstd") for name in kept}
        put_dataset(tmp_path / "raw", split_format, (3, 0, 2))  # its meta files differ: they name the compression
        for name, data in files_in(tmp_path / "raw").items():
            assert name.endswith(".meta") or found[name] == data

    @COMPRESSIONS
    def test_the_meta_file_is_asked_for_first_and_neither_twice(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None
    ) -> None:
        put_csv(http_store.root, compression)
        ensure_all(over_http(http_store, tmp_path))
        ensure_all(over_http(http_store, tmp_path))
        files = [stored_name(which, compression) for which in ("csv.meta", "csv")]
        assert http_store.requests() == [INDEX_BASENAME, *files, INDEX_BASENAME]

    @COMPRESSIONS
    @WHICH
    def test_the_one_that_is_missing_is_fetched_alone(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, which: str
    ) -> None:
        put_csv(http_store.root, compression)
        ensure_all(over_http(http_store, tmp_path))
        whole = files_in(tmp_path / "cache")
        asked = http_store.requests()
        (tmp_path / "cache" / f"shard.00000.{which}").unlink()
        ensure_all(over_http(http_store, tmp_path))
        assert files_in(tmp_path / "cache") == whole
        assert http_store.requests() == [*asked, INDEX_BASENAME, stored_name(which, compression)]

    @COMPRESSIONS
    @WHICH
    def test_one_of_the_wrong_size_is_replaced(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, which: str
    ) -> None:
        put_csv(http_store.root, compression)
        ensure_all(over_http(http_store, tmp_path))
        whole = files_in(tmp_path / "cache")
        (tmp_path / "cache" / f"shard.00000.{which}").write_bytes(b"short")
        ensure_all(over_http(http_store, tmp_path))
        assert files_in(tmp_path / "cache") == whole

    @pytest.mark.rotate(2)
    @COMPRESSIONS
    @WHICH
    @pytest.mark.parametrize(("fault", "word"), [("corrupt", "sha1"), ("short", "bytes")])
    def test_damage_on_the_way_is_fetched_again_and_told_if_it_stays(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, which: str, fault: str, word: str
    ) -> None:
        put_csv(http_store.root, compression)
        name = stored_name(which, compression)
        http_store.fail(f"{name}$", fault, times=1)
        ensure_all(over_http(http_store, tmp_path))
        assert http_store.requests().count(name) == 2
        http_store.fail(f"{name}$", fault)
        other = cache_of(remote=http_store.url, local=tmp_path / "other", download_retry=0)
        with assert_error(IntegrityError, stream="code", path=f"{http_store.url}/{name}") as caught:
            ensure_all(other)
        assert word in str(caught.value)
        assert f"shard.00000.{which}" not in files_in(tmp_path / "other")

    @COMPRESSIONS
    @WHICH
    def test_a_missing_object_is_told(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, which: str
    ) -> None:
        put_csv(http_store.root, compression)
        name = stored_name(which, compression)
        (http_store.root / name).unlink()
        with assert_error(ObjectNotFoundError, path=name, stream="code"):
            ensure_all(over_http(http_store, tmp_path))

    def test_a_hash_that_one_of_them_lacks_is_refused(self, http_store: HttpStore, tmp_path: Path) -> None:
        put_csv(http_store.root, None, hashes=("md5",))
        with assert_error(ConfigError, option="validate_hash", path="shard.00000.csv.meta") as caught:
            ensure_all(over_http(http_store, tmp_path, validate_hash="sha1"))
        assert "'sha1'" in str(caught.value)

    def test_one_lock_covers_both(self, http_store: HttpStore, tmp_path: Path) -> None:
        (shard,) = put_csv(http_store.root, None).shards
        cache = over_http(http_store, tmp_path)
        cache.read_index()
        part = claim(tmp_path / "cache", "shard.00000.csv")
        assert part is not None
        assert cache.fetch_ahead(shard) is FetchStatus.FETCHED_ELSEWHERE
        assert files_in(tmp_path / "cache") == {}
        part.close()


class TestKeepZip:
    @pytest.mark.parametrize("keep_zip", [True, False])
    def test_both_compressed_files_are_kept_or_neither(
        self, http_store: HttpStore, tmp_path: Path, keep_zip: bool
    ) -> None:
        put_csv(http_store.root, "zstd")
        ensure_all(over_http(http_store, tmp_path, keep_zip=keep_zip))
        kept = {name for name in files_in(tmp_path / "cache") if name.endswith(".zstd")}
        assert kept == ({"shard.00000.csv.meta.zstd", "shard.00000.csv.zstd"} if keep_zip else set())

    @WHICH
    def test_a_kept_file_makes_its_raw_one_again(self, http_store: HttpStore, tmp_path: Path, which: str) -> None:
        put_csv(http_store.root, "zstd")
        ensure_all(over_http(http_store, tmp_path, keep_zip=True))
        whole, asked = files_in(tmp_path / "cache"), http_store.requests()
        (tmp_path / "cache" / f"shard.00000.{which}").unlink()
        ensure_all(over_http(http_store, tmp_path, keep_zip=True))
        assert (files_in(tmp_path / "cache"), http_store.requests()) == (whole, [*asked, INDEX_BASENAME])


class TestDiscard:
    @COMPRESSIONS
    def test_both_files_are_fetched_again(self, http_store: HttpStore, tmp_path: Path, compression: str | None) -> None:
        (shard,) = put_csv(http_store.root, compression).shards
        cache = over_http(http_store, tmp_path)
        ensure_all(cache)
        whole, asked = files_in(tmp_path / "cache"), http_store.requests()
        same_size_zeros(tmp_path / "cache" / "shard.00000.csv.meta")
        assert cache.discard(shard)
        assert files_in(tmp_path / "cache") == {}
        fetch_shard(cache, shard)
        assert files_in(tmp_path / "cache") == whole
        assert http_store.requests() == [*asked, *asked[1:]]

    def test_kept_compressed_files_go_too(self, http_store: HttpStore, tmp_path: Path) -> None:
        """Without a recorded hash, what they decompress to is all that shows their damage."""
        (shard,) = put_csv(http_store.root, "zstd", hashes=()).shards
        cache = over_http(http_store, tmp_path, keep_zip=True)
        ensure_all(cache)
        assert len(files_in(tmp_path / "cache")) == 4
        assert cache.discard(shard)
        assert files_in(tmp_path / "cache") == {}

    @WHICH
    def test_where_one_has_vanished_nothing_else_is_removed(
        self, http_store: HttpStore, tmp_path: Path, which: str
    ) -> None:
        (shard,) = put_csv(http_store.root, "zstd").shards
        cache = over_http(http_store, tmp_path, keep_zip=True)
        ensure_all(cache)
        whole, asked = files_in(tmp_path / "cache"), http_store.requests()
        (tmp_path / "cache" / f"shard.00000.{which}").unlink()
        assert cache.discard(shard)
        fetch_shard(cache, shard)
        assert (files_in(tmp_path / "cache"), http_store.requests()) == (whole, asked)

    def test_what_another_process_made_anew_meanwhile_stays(
        self, http_store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (shard,) = put_csv(http_store.root, None).shards
        cache = over_http(http_store, tmp_path)
        ensure_all(cache)
        whole = files_in(tmp_path / "cache")
        path = tmp_path / "cache" / "shard.00000.csv"
        same_size_zeros(path)

        def claimed_after_another_process(root: Path, basename: str) -> StagingFile | None:
            (tmp_path / "anew").write_bytes(whole[path.name])
            (tmp_path / "anew").replace(path)
            return claim(root, basename)

        monkeypatch.setattr("lightning_streaming.cache.shard_cache.claim", claimed_after_another_process)
        assert cache.discard(shard)
        assert files_in(tmp_path / "cache") == whole


class TestInPlace:
    @pytest.mark.parametrize("split_format", FORMATS)
    def test_raw_files_are_left_where_they_are(self, tmp_path: Path, split_format: str) -> None:
        index = put_dataset(tmp_path / "made", split_format, hashes=("sha1",))
        before = files_in(tmp_path / "made")
        cache = cache_of(local=tmp_path / "made", validate_hash="sha1")
        assert ensure_all(cache) == [tmp_path / "made"] * 4
        assert not cache.discard(index.shards[0])
        assert files_in(tmp_path / "made") == before

    @WHICH
    def test_both_are_decompressed_elsewhere_where_either_must_be(self, tmp_path: Path, which: str) -> None:
        """The reader wants them side by side."""
        put_csv(tmp_path / "made", "zstd")
        ensure_all(cache_of(remote=str(tmp_path / "made"), local=tmp_path / "cache"))
        raw = files_in(tmp_path / "cache")
        (tmp_path / "made" / f"shard.00000.{which}").write_bytes(raw[f"shard.00000.{which}"])
        before = files_in(tmp_path / "made")
        elsewhere = default_cache_directory(str(tmp_path / "made"))
        assert ensure_all(cache_of(local=tmp_path / "made")) == [elsewhere]
        assert files_in(elsewhere) == raw
        assert files_in(tmp_path / "made") == before

    @WHICH
    def test_one_that_was_decompressed_and_damaged_is_made_anew(self, tmp_path: Path, which: str) -> None:
        (shard,) = put_csv(tmp_path / "made", "zstd").shards
        before = files_in(tmp_path / "made")
        cache = cache_of(local=tmp_path / "made")
        (elsewhere,) = ensure_all(cache)
        assert elsewhere is not None
        whole = files_in(elsewhere)
        same_size_zeros(elsewhere / f"shard.00000.{which}")
        assert cache.discard(shard)
        fetch_shard(cache, shard)
        assert (files_in(elsewhere), files_in(tmp_path / "made")) == (whole, before)

    @WHICH
    def test_one_that_was_written_again_is_decompressed_again(self, tmp_path: Path, which: str) -> None:
        put_csv(tmp_path / "made", "zstd")
        (elsewhere,) = ensure_all(cache_of(local=tmp_path / "made"))
        assert elsewhere is not None
        whole = files_in(elsewhere)
        same_size_zeros(elsewhere / f"shard.00000.{which}")  # which also changes its time
        ensure_all(cache_of(local=tmp_path / "made"))
        assert files_in(elsewhere) == whole

    @COMPRESSIONS
    @WHICH
    def test_a_missing_or_damaged_file_is_told_and_left(
        self, tmp_path: Path, compression: str | None, which: str
    ) -> None:
        put_csv(tmp_path, compression)
        path = tmp_path / stored_name(which, compression)
        same_size_zeros(path)
        with assert_error(ShardCorruptError, path=path) as caught:
            ensure_all(cache_of(local=tmp_path, validate_hash="sha1"))
        assert "sha1" in str(caught.value)
        path.write_bytes(b"short")
        with assert_error(ShardCorruptError, path=path) as caught:
            ensure_all(cache_of(local=tmp_path))
        assert "has 5 bytes" in str(caught.value)
        assert path.read_bytes() == b"short"
        path.unlink()
        with assert_error(ObjectNotFoundError, path=path):
            ensure_all(cache_of(local=tmp_path))
