"""Long waits are shown: bars to who asked for them and looks at a terminal, lines in the log to others."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from lightning_streaming import StreamingDataset, waits
from lightning_streaming.cache import generated_index
from lightning_streaming.cache.config import RUNTIME_VARIABLE
from lightning_streaming.formats.index import dump_index
from lightning_streaming.resume import order_files
from lightning_streaming.sequence.packing import packs
from lightning_streaming.sequence.packing.plan import plan_packs
from lightning_streaming.waits import IN_LOG, ProgressDisplay, bar, progress, waiting
from tests.packed_data import packed_loader, packed_train, write_documents
from tests.reading.processes import wait_until
from tests.waits import held_until_told


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    """Standard error is a terminal meanwhile."""
    with redirect_stderr(Terminal()) as terminal:
        yield terminal


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the log is told, where waits count as long after a moment."""
    for name in ("_FIRST_LINE", "_NEXT_LINE", "_FIRST_DRAWN", "_DRAWN_AGAIN"):
        monkeypatch.setattr(waits, name, 0.02)
    caplog.set_level("INFO", "lightning_streaming")
    return caplog


def without_seconds(told: pytest.LogCaptureFixture) -> list[str]:
    """What the log was told of waits, but for how long they had taken."""
    found = [re.fullmatch(r"(.*), after \d+ s", one.getMessage()) for one in told.records if one.name == waits.__name__]
    return [one[1] for one in found if one is not None]


def test_the_log_is_told_after_a_while_and_then_now_and_then(soon: pytest.LogCaptureFixture) -> None:
    with progress(2000, "samples", "evaluating") as tell:
        assert wait_until(lambda: len(soon.messages) == 1)
        tell(1500)
        assert wait_until(lambda: len(soon.messages) > 2)
        tell(500)
    first, *_, last = without_seconds(soon)
    assert first == "evaluating: 0 of 2,000 samples"
    assert last == "evaluating: 2,000 of 2,000 samples"
    assert {record.levelname for record in soon.records} == {"INFO"}


def test_a_line_comes_after_ten_seconds_and_then_each_minute() -> None:
    assert (waits._FIRST_LINE, waits._NEXT_LINE) == (10, 60)


def test_of_a_short_wait_nobody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_streaming")
    with on_terminal() as terminal:
        for shown in (IN_LOG, ProgressDisplay(bars=True)):
            with shown.here(), progress(3, "samples", "evaluating") as tell:
                tell(3)
    assert not caplog.messages
    assert not terminal.getvalue()
    assert not [one for one in threading.enumerate() if one.name == "lightning-streaming-waits"]


def test_a_library_draws_nothing_that_nobody_asked_for(soon: pytest.LogCaptureFixture) -> None:
    with on_terminal() as terminal, progress(None, "shards", "looking"):
        assert wait_until(lambda: bool(soon.messages))
    assert without_seconds(soon)[0] == "looking: 0 shards"
    assert not terminal.getvalue()


def test_a_terminal_is_shown_a_bar_that_goes_on_by_itself(soon: pytest.LogCaptureFixture) -> None:
    with on_terminal() as terminal, ProgressDisplay(bars=True).here(), progress(2000, "samples", "evaluating") as tell:
        assert wait_until(lambda: "evaluating:   0%" in terminal.getvalue())
        tell(1500)
        assert wait_until(lambda: "1500/2000" in terminal.getvalue())
    assert not soon.messages


def test_what_all_of_a_node_wait_for_one_of_them_tells(soon: pytest.LogCaptureFixture) -> None:
    with ProgressDisplay(lines=False).here():
        with progress(None, "datasets", "reading", by_all=True), progress(None, "samples", "alone"):
            assert wait_until(lambda: bool(soon.messages))
        with waiting(lambda: "fetching"):
            pass
    assert {one.split(":")[0] for one in soon.messages} == {"alone"}


def test_words_are_shown_as_they_change(soon: pytest.LogCaptureFixture) -> None:
    said = "fetching 1"
    with waiting(lambda: said):
        assert wait_until(lambda: bool(soon.messages))
    assert without_seconds(soon)[0] == "fetching 1"
    with on_terminal() as terminal, ProgressDisplay(bars=True).here(), waiting(lambda: said):
        assert wait_until(lambda: "fetching 1" in terminal.getvalue())
        said = "fetching 2"
        assert wait_until(lambda: "fetching 2" in terminal.getvalue())


def test_a_display_of_others_shows_it_and_is_told_of_the_end(soon: pytest.LogCaptureFixture) -> None:
    told: list[str | None] = []
    shown = ProgressDisplay(bars=True, display=lambda: told.append)
    with on_terminal() as terminal, shown.here(), progress(5, "samples", "evaluating") as tell:
        assert wait_until(lambda: bool(told))
        tell(5)
        assert wait_until(lambda: told[-1] == "evaluating: 5 of 5 samples")
    assert told[0] == "evaluating: 0 of 5 samples"
    assert told[-1] is None
    assert not terminal.getvalue()


def test_the_log_is_told_while_packs_are_planned(
    tmp_path: Path, soon: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = packed_train(write_documents(tmp_path / "documents"))
    monkeypatch.setattr(order_files, "_SMALL_PLAN", 1)
    monkeypatch.setattr(packs, "plan_packs", held_until_told(plan_packs, soon, "planning"))
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "orders"))
    assert len(packed_loader(train, 3))
    told = without_seconds(soon)
    assert "planning the packs of epoch 0: 65 of 130 documents" in told
    assert told[-1] == "planning the packs of epoch 0: 130 of 130 documents"


def test_the_log_is_told_while_data_of_another_format_is_looked_at(
    tmp_path: Path, soon: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for name in "ab":
        np.save(tmp_path / "data" / f"{name}.npy", np.arange(100, dtype=np.uint16))
    monkeypatch.setattr(generated_index, "dump_index", held_until_told(dump_index, soon, "reading the npy"))
    local = str(tmp_path / "cache")
    dataset = StreamingDataset(remote=str(tmp_path / "data"), local=local, format="npy", block_length=10, batch_size=1)
    assert dataset.size == 20
    assert f"reading the npy files of {tmp_path / 'data'}: 2 shards" in without_seconds(soon)


def test_a_copy_in_another_process_shows_nothing_that_others_wait_for_too() -> None:
    copied = pickle.loads(pickle.dumps(ProgressDisplay(bars=True, display=lambda: None)))
    assert (copied.bars, copied.lines) == (False, False)


def test_a_bar_has_no_thread_that_watches_it() -> None:
    before = set(threading.enumerate())
    with on_terminal() as terminal, bar("copy", "shard", 10) as drawn:
        drawn.update(10)
        assert set(threading.enumerate()) == before
    assert "0/10" in terminal.getvalue()


def test_nothing_is_imported_for_it_before_something_is_drawn() -> None:
    asks = "import sys, lightning_streaming.waits; print('tqdm' in sys.modules, 'numpy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout
    assert told.split()[0] == "False", told
