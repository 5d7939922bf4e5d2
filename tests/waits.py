"""For tests of long waits: no test should take as long as these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_streaming import waits
from lightning_streaming.loading.scanning import ShardScan
from tests.loading.processes import wait_until

LOGGER = "lightning_streaming.waits"


@contextmanager
def told_at_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this lasts, the log is told of every look at a dataset's columns: none ends before."""
    look = ShardScan.columns

    def told(self: ShardScan, *args: object) -> object:
        assert wait_until(lambda: any(one.name == LOGGER for one in caplog.records))
        return look(self, *args)  # type: ignore[arg-type]

    caplog.set_level("INFO", LOGGER)
    monkeypatch.setattr(waits, "_FIRST_LINE", 0.01)
    monkeypatch.setattr(ShardScan, "columns", told)
    yield
    monkeypatch.undo()
