"""One process makes a selection, and those who wait for it say so."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest

from lightning_streaming.cache import selection_files
from lightning_streaming.cache.selection_files import selection_lock, selection_path
from lightning_streaming.waits import ProgressDisplay
from tests.reading.processes import wait_until

WORK = "evaluates the selection"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_who_waits_for_another_to_make_it_is_shown_that_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selection_files, "_WARN_SECONDS", 0)
    path = selection_path(tmp_path, "0" * 32)
    path.parent.mkdir()
    made: list[str] = []

    def make(who: str) -> None:
        with ProgressDisplay(bars=True).here(), selection_lock(path, tmp_path, WORK):
            made.append(who)

    waits = Thread(target=make, args=("second",))
    with redirect_stderr(Terminal()) as terminal:
        with selection_lock(path, tmp_path, WORK):
            waits.start()
            assert wait_until(lambda: f", which {WORK} that is wanted" in terminal.getvalue())
            made.append("first")
        waits.join()
    assert "\rwaiting for " in terminal.getvalue()
    assert made == ["first", "second"]
    assert len(caplog.messages) == 1
