"""For tests of long waits: no test should take as long as these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_streaming import waits
from lightning_streaming.selection import scanning
from tests.reading.processes import wait_until


def held_until_told(make: Callable[..., Any], told: pytest.LogCaptureFixture, words: str = "") -> Callable[..., Any]:
    """A function that ends when the log was told of a wait, in these words among others, after its work was done."""

    def held(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        before = len(told.records)
        assert wait_until(
            lambda: any(one.name == waits.__name__ and words in one.getMessage() for one in told.records[before:])
        )
        return made

    return held


@contextmanager
def told_at_once(told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this lasts, the log is told of every look at a dataset's shards: none ends before."""
    told.set_level("INFO", waits.__name__)
    with monkeypatch.context() as patch:
        patch.setattr(waits, "_FIRST_LINE", 0.01)
        patch.setattr(waits, "_NEXT_LINE", 0.01)
        patch.setattr(scanning, "_outcome_of", held_until_told(scanning._outcome_of, told))
        yield
