from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.weights import StreamWeight, resolve_weights
from tests.sequence.reference import load

CASES = load("order_components.json")["weights"]
EVEN = [StreamWeight(proportion=1)] * 3


def resolve_case(case: dict[str, Any]) -> dict[str, Any]:
    weights = [StreamWeight(**stream) for stream in case["streams"]]
    resolved = resolve_weights(weights, case["sizes"], case["epoch_size"], case["seed"])
    return {
        "epoch_size": resolved.epoch_size,
        "choose": list(resolved.choose),
        "proportion_hex": [share.hex() for share in resolved.proportion],
        "repeat_hex": [times.hex() for times in resolved.repeat],
    }


def test_all_golden_weights_are_here() -> None:
    assert len(CASES) == 12
    assert sum("error" in case["out"] for case in CASES) == 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["streams"]))
def test_weights_resolve_as_in_the_reference(case: dict[str, Any]) -> None:
    if "error" in case["out"]:
        with pytest.raises(ConfigError):
            resolve_case(case)
    else:
        assert resolve_case(case) == case["out"]


@pytest.mark.parametrize(
    "said",
    [
        {"proportion": 1, "repeat": 2},
        {"repeat": 1, "choose": 2},
        {"proportion": 0, "choose": 0},
        {"proportion": -0.1},
        {"repeat": -1},
        {"choose": -1},
        {"proportion": math.nan},
        {"repeat": math.inf},
        {"repeat": 10**400},
        {"repeat": "2"},
        {"repeat": True},
        {"choose": 2.0},
        {"choose": True},
        {"choose": 10**400},
    ],
    ids=str,
)
def test_a_weight_that_makes_no_sense_is_refused_at_birth(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StreamWeight(**said)


@pytest.mark.parametrize(
    ("weights", "sizes", "epoch_size", "words"),
    [
        ([], [], None, "one weight each"),
        (EVEN, [1, 2], None, "one weight each"),
        (EVEN, [1, 0, 2], None, "stream 1 has no samples"),
        (EVEN, [1, 1, 2], -1, "negative"),
        ([*EVEN, StreamWeight()], [1, 1, 1, 1], None, "for all 4 streams or for none, but 3"),
        ([StreamWeight(choose=2)], [1], 5, "drop epoch_size"),
        ([StreamWeight(proportion=0)], [1], None, "above 0"),
        ([StreamWeight(proportion=1e308)] * 2, [1, 1], None, "scale them down"),
        ([StreamWeight(repeat=0.5)], [1], None, "no sample at all"),
        ([StreamWeight(repeat=2**63)], [20], None, "would draw"),
        ([StreamWeight(choose=2**61)] * 2, [1, 1], None, "would draw"),
    ],
)
def test_weights_that_cannot_work_are_refused_in_words(
    weights: list[StreamWeight], sizes: list[int], epoch_size: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_weights(weights, sizes, epoch_size, seed=0)


def test_weights_may_be_numbers_of_numpy() -> None:
    given = StreamWeight(proportion=np.float32(0.5)), StreamWeight(repeat=np.int64(2)), StreamWeight(choose=np.uint8(3))
    assert given == (StreamWeight(proportion=0.5), StreamWeight(repeat=2), StreamWeight(choose=3))
    assert [type(one.proportion or one.repeat or one.choose) for one in given] == [float, int, int]


def test_an_epoch_size_of_zero_counts_as_not_given() -> None:
    assert resolve_weights([StreamWeight()], [7], 0, seed=0).choose == (7,)


@given(
    proportions=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    epoch_size=st.integers(1, 10**9),
    seed=st.integers(0, 2**60),
)
def test_relative_streams_fill_the_epoch_to_the_last_sample(
    proportions: list[float], epoch_size: int, seed: int
) -> None:
    weights = [StreamWeight(proportion=proportion) for proportion in proportions]
    resolved = resolve_weights(weights, [10] * len(weights), epoch_size, seed)
    assert resolved.epoch_size == sum(resolved.choose) == epoch_size
    for chosen, share in zip(resolved.choose, resolved.proportion, strict=True):
        assert abs(chosen - share * epoch_size) <= 1 + 1e-6
