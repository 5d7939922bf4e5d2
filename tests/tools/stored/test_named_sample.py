from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.stored.sample_reader import named_sample

_NUMBERS = st.integers(0, 10**18 - 1)


@given(stream=st.text(), shard=_NUMBERS, index=_NUMBERS)
def test_stream_shard_and_index_are_found_whatever_the_stream_is_called(stream: str, shard: int, index: int) -> None:
    if stream.lstrip().startswith("{"):
        return
    named = named_sample(f"{stream}:{shard}:{index}")
    assert named is not None
    assert (named.stream, named.shard, named.index, named.key) == (stream, shard, index, None)


@pytest.mark.parametrize(
    ("text", "stream", "shard", "index"),
    [
        ("7", None, None, 7),
        ("3:7", None, 3, 7),
        ("web:7", "web", None, 7),
        ("a:b:7", "a:b", None, 7),
        ('{"sample_index": 7, "shard": 3}', None, 3, 7),
        ('{"sample_index": 7, "shard": 3, "stream": "web", "position": 1}', "web", 3, 7),
    ],
)
def test_less_may_be_said(text: str, stream: str | None, shard: int | None, index: int) -> None:
    named = named_sample(text)
    assert named is not None
    assert (named.stream, named.shard, named.index, named.key) == (stream, shard, index, None)


def test_a_whole_key_is_one() -> None:
    key = SampleKey(stream="web", shard=3, sample_index=7, epoch=1, position=2, shuffle_seed=5)
    named = named_sample(json.dumps(key.as_dict()))
    assert named is not None
    assert (named.stream, named.shard, named.index, named.key) == ("web", 3, 7, key)


@pytest.mark.parametrize("text", ["", "x", "web:", "3:x", "-1", "٣", "9" * 30])
def test_other_texts_name_none(text: str) -> None:
    assert named_sample(text) is None


@pytest.mark.parametrize("name", ["shard", "sample_index", "epoch", "position", "shuffle_seed"])
def test_a_truth_value_is_no_number_of_a_whole_key(name: str) -> None:
    key = SampleKey(stream="web", shard=1, sample_index=1, epoch=1, position=1, shuffle_seed=1)
    with pytest.raises(ConfigError, match="the key of a sample has"):
        named_sample(json.dumps({**key.as_dict(), name: True}))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{" * 10**5,
        '{"shard": 3}',
        '{"shard": "3", "sample_index": 7}',
        '{"shard": true, "sample_index": 7}',
        '{"a": 1}',
    ],
)
def test_what_begins_like_a_key_and_is_none_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not JSON|the key of a sample has"):
        named_sample(text)
