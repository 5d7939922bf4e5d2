from __future__ import annotations

from typing import Any

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.names import BatchingMethod, ShuffleAlgo
from lightning_streaming.order.settings import BATCHING_METHODS, SHUFFLE_ALGOS, OrderSettings
from lightning_streaming.order.shuffle import SHUFFLES


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ({"shuffle_algo": "py9"}, "blockwise, naive, py1b, py1br, py1e, py1s, py2s"),
        ({"sampling_method": "loose"}, "balanced, fixed"),
        ({"partition_algo": "strict"}, "orig, relaxed"),
        ({"batching_method": "any"}, "device_per_stream, per_stream, random, stratified"),
    ],
    ids=str,
)
def test_an_unknown_name_is_refused_at_birth_with_the_names_there_are(said: dict[str, Any], known: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one of {known}, but got"):
        OrderSettings(**said)


def test_the_shuffles_there_are_have_these_names() -> None:
    assert set(SHUFFLE_ALGOS) == {"blockwise", *SHUFFLES}


@pytest.mark.parametrize("algo", SHUFFLE_ALGOS)
@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_every_known_name_goes_with_every_other(algo: ShuffleAlgo, method: BatchingMethod) -> None:
    settings = OrderSettings(shuffle=True, shuffle_algo=algo, batching_method=method)
    assert (settings.shuffle_algo, settings.batching_method) == (algo, method)


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
