"""Waiting for whoever is at an index: as long as it lives, and no longer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lightning_streaming.cache import arrival
from lightning_streaming.cache.arrival import claim
from lightning_streaming.cache.index_lock import held_index
from lightning_streaming.errors import LockTimeoutError
from lightning_streaming.formats.index import INDEX_BASENAME


def test_a_holder_that_lives_is_waited_for_though_nothing_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its download waits for others of its process: several times the patience of who waits for it."""
    monkeypatch.setattr(arrival, "_BEAT_SECONDS", 0.02)
    is_held, done = threading.Event(), list[str]()

    def hold() -> None:
        with held_index(tmp_path, 1):
            is_held.set()
            threading.Event().wait(1.5)
            done.append("holder")

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(30)
    with held_index(tmp_path, 0.4):
        done.append("waiter")
    holder.join()
    assert done == ["holder", "waiter"]


def test_a_holder_that_is_stopped_is_given_up(tmp_path: Path) -> None:
    part = claim(tmp_path, INDEX_BASENAME)
    assert part is not None
    with pytest.raises(LockTimeoutError, match=rf"waited 0\.1 s .* process {os.getpid()}"), held_index(tmp_path, 0.1):
        pass
    part.close()
