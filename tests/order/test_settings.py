from __future__ import annotations

from typing import Any

import pytest

from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.order.settings import OrderSettings


@pytest.mark.parametrize(
    ("said", "served"),
    [
        ({"shuffle_algo": "py9"}, "naive, py1e, py1s"),
        ({"sampling_method": "loose"}, "balanced, fixed"),
        ({"partition_algo": "strict"}, "orig, relaxed"),
        ({"batching_method": "any"}, "random"),
    ],
    ids=str,
)
def test_an_unknown_name_is_refused_at_birth_with_the_names_there_are(said: dict[str, Any], served: str) -> None:
    with pytest.raises(ConfigError, match=served) as caught:
        OrderSettings(**said)
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("algo", ["py2s", "py1b", "py1br", "blockwise"])
def test_a_known_shuffle_that_is_not_served_says_so(algo: str) -> None:
    with pytest.raises(UnsupportedError, match="not served yet; use one of: naive, py1e, py1s"):
        OrderSettings(shuffle_algo=algo)


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_a_known_batching_that_is_not_served_says_so(method: str) -> None:
    with pytest.raises(UnsupportedError, match="not served yet; use one of: random"):
        OrderSettings(batching_method=method)


@pytest.mark.parametrize(
    "said",
    [{"shuffle_seed": -1}, {"shuffle_block_size": 0}, {"num_canonical_nodes": -1}, {"sampling_granularity": 0}],
    ids=str,
)
def test_a_number_that_cannot_work_is_refused_at_birth(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(said))):
        OrderSettings(**said)


@pytest.mark.parametrize(
    ("said", "canonical", "block"),
    [
        ({}, 2, 2_000_000),
        ({"shuffle_algo": "py1s"}, 128, 262_144),  # 64 a node, shuffled or not
        ({"num_canonical_nodes": 0}, 2, 2_000_000),  # 0 is None
        ({"num_canonical_nodes": 5}, 5, 800_000),
        ({"num_canonical_nodes": 5, "shuffle_block_size": 7}, 5, 7),
    ],
    ids=str,
)
def test_settling_fills_in_what_was_not_said(said: dict[str, Any], canonical: int, block: int) -> None:
    settled = OrderSettings(**said).settled(num_nodes=2)
    assert (settled.num_canonical_nodes, settled.shuffle_block_size) == (canonical, block)


def test_settling_again_on_other_nodes_changes_nothing() -> None:
    settled = OrderSettings(shuffle=True).settled(num_nodes=2)
    assert settled.settled(num_nodes=16) == settled
