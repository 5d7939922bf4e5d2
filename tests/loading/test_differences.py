from __future__ import annotations

from typing import Any

import pytest

from lightning_streaming.loading.differences import Difference, differences, in_words


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, [("a", "1", "2")]),
        ({"a": {"b": None}}, {"a": {"b": 0}}, [("a.b", "None", "0")]),
        ({"a": 1}, {}, [("a", "1", "'absent'")]),
        ({}, {"a": {"samples": 3}}, [("a", "'absent'", "3 samples")]),
        ({"a": 1, "b": 2}, {"b": 3, "a": 4}, [("a", "1", "4"), ("b", "2", "3")]),
    ],
)
def test_every_difference_is_found(
    saved: dict[str, Any], now: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    assert differences(saved, now) == [Difference(*one) for one in expected]


def test_one_difference_is_a_phrase() -> None:
    assert in_words([Difference("order.shuffle", "True", "False")]) == "order.shuffle: saved True, now False"


def test_several_differences_are_a_table() -> None:
    found = [Difference("order.shuffle_algo", "'py1e'", "'naive'"), Difference("streams.0.samples", "29", "30")]
    assert in_words(found).splitlines() == [
        "setting             saved   now",
        "order.shuffle_algo  'py1e'  'naive'",
        "streams.0.samples   29      30",
    ]
