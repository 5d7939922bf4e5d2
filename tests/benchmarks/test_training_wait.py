"""The benchmark of waiting for data: what it computes."""

from __future__ import annotations

import pytest

from benchmarks.training_wait import summarize


def test_waiting_is_what_a_cached_batch_does_not_take() -> None:
    def run(gaps: float) -> dict[str, float]:
        return {"gaps": gaps, "step": 1.0, "first_batch": 1.0, "pss": 1.0}

    cached = {0.5: [run(0.1), run(0.3)]}
    results = summarize(
        {"cached batch": cached, "slow": {0.5: [run(0.4), run(0.5), run(0.9)]}, "fast": {0.5: [run(0.1)]}}
    )
    assert results["slow"]["waiting"][0.5] == pytest.approx(0.3)
    assert results["fast"]["waiting"][0.5] == 0
