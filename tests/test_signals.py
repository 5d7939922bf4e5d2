"""A run that was started in the background tests the same: its children can be interrupted, and none outlives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, signals
from tests.reading.processes import is_alive
from tests.tools.running import write_texts
from tests.tools.viewing import asking

ROOT = Path(__file__).parents[1]
CHILD = """\
import signal, subprocess, sys
import pytest

@pytest.mark.parametrize("name", ["SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM"])
def test_a_child_ends(name):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(getattr(signal, name))
        child.wait()
        assert child.returncode != 0

def test_an_interrupt():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.nightly
def test_a_run_in_the_background_can_interrupt_its_children(tmp_path: Path) -> None:
    (tmp_path / "test_child.py").write_text(CHILD)
    inner = [sys.executable, "-m", "pytest", "-q", "-p", "tests.signals", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command = ["sh", "-c", 'trap "" INT QUIT HUP TERM; exec "$@"', "sh", *inner, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "5 passed" in done.stdout, done.stdout
    assert getattr(conftest, "pytest_sessionstart", None) is signals.pytest_sessionstart


def test_a_viewer_that_does_not_end_when_told_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "data")
    with pytest.raises(subprocess.TimeoutExpired), asking.viewer(tmp_path / "data", ends=0) as one:
        monkeypatch.setattr(asking, "_SECONDS", 0.01)
    assert not is_alive(one.process.pid)
