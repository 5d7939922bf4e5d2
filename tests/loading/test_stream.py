"""One stream's own settings, and those it takes from the dataset."""

from __future__ import annotations

import pickle

import pytest

from lightning_streaming import Stream
from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.stream import StreamDefaults, named_streams

DEFAULTS = StreamDefaults(split="train", download_retry=5, download_timeout=7.0, validate_hash="sha1", keep_zip=True)


def test_what_a_stream_leaves_open_is_the_datasets() -> None:
    config = Stream(remote="s3://bucket/a", local="/cache").cache_config("code", DEFAULTS)
    assert (config.name, config.remote, config.local) == ("code", "s3://bucket/a/train", "/cache/train")
    assert (config.download_retry, config.download_timeout) == (5, 7.0)
    assert (config.validate_hash, config.keep_zip) == ("sha1", True)


def test_what_a_stream_says_itself_wins() -> None:
    stream = Stream(
        remote="s3://bucket/a", split="", download_retry=1, download_timeout=2.0, validate_hash="", keep_zip=False
    )
    config = stream.cache_config("code", DEFAULTS)
    assert (config.remote, config.download_retry, config.download_timeout) == ("s3://bucket/a", 1, 2.0)
    assert (config.validate_hash, config.keep_zip) == ("", False)


def test_a_stream_needs_a_place() -> None:
    with pytest.raises(ConfigError, match="remote=, local=, or both"):
        Stream(split="train")


@pytest.mark.parametrize("name", ["get_shards", "prepare_shard", "set_up_local", "apply_default", "_download_file"])
def test_a_stream_that_would_fetch_in_its_own_way_is_refused(name: str) -> None:
    own = type("Table", (Stream,), {name: lambda self, *_: None})
    with pytest.raises(ConfigError, match=f"stream 'a' is a Table, whose {name} nobody would call"):
        named_streams({"a": own(remote="s3://bucket/a")}, None, None)


def test_secrets_are_not_shown() -> None:
    stream = Stream(remote="s3://bucket/a", storage_options={"secret": "hunter2"})
    assert "hunter2" not in repr(stream)
    assert "hunter2" not in repr(named_streams({"a": stream}, None, None))
    with pytest.raises(ConfigError) as caught:
        named_streams({"a": {"remote": "x", "secret": "hunter2"}}, None, None)  # type: ignore[dict-item]
    assert "hunter2" not in str(caught.value)


def test_a_stream_is_a_value_that_pickles() -> None:
    stream = Stream(remote="s3://bucket/a", proportion=0.5, storage_options={"anon": True})
    assert pickle.loads(pickle.dumps(stream)) == stream
