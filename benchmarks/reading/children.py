"""The processes that measure, as the one that tells them what to do sees them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.reading.case import Case

ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"
LONGEST_TURN = 120
"""Seconds after which a turn has failed; some peers wait for ever where they fail."""
ERRORS_SHOWN = 2000


class TurnFailedError(Exception):
    """A system could not do what was asked."""


class Child:
    """A process that imports one system, and measures it in forks of itself.

    Args:
        system: Name of the system.
        python: Interpreter of an environment that has its packages.
        log: File for what it writes to stderr.
        is_peer: Whether stand-ins for packages that peers import for nothing are put in their place.

    Raises:
        TurnFailedError: The system cannot be imported there.
    """

    def __init__(self, system: str, python: str, log: Path, is_peer: bool) -> None:
        self.system = system
        paths = [str(STUBS)] if is_peer else []
        # litdata would ask the internet for a newer one whenever a dataset is made.
        wanted = {
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "LITDATA_DISABLE_VERSION_CHECK": "1",
        }
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.reading.child", system],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, **wanted},
                start_new_session=True,  # so that its workers and forks can be ended with it
            )
        try:
            self.versions: dict[str, str] = self._answer()
        except TurnFailedError:
            self.close()
            raise

    def open(self, probe: str, case: Case) -> None:
        """Begin a measurement; what it prepares belongs to the first turn."""
        self._tell(json.dumps({"probe": probe, "case": case.plain()}))
        self._answer()

    def turn(self) -> dict[str, float]:
        """What one turn gave.

        Raises:
            TurnFailedError: The system failed, or took too long. It must be started anew.
        """
        self._tell("turn")
        found = self._answer()
        if "error" in found or "ended" in found:
            raise TurnFailedError(found.get("error") or f"it died with {found['ended']}; {self._last_words()}")
        return {name: float(value) for name, value in found.items()}

    def end(self) -> None:
        """End the measurement that is open."""
        self._tell("end")
        self._answer()

    def close(self) -> None:
        """End the process, its forks and their workers."""
        with suppress(ProcessLookupError):  # where it has ended, with all that it had started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise TurnFailedError(self._last_words()) from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not _is_ready(self._process.stdout, LONGEST_TURN):
            raise TurnFailedError(f"no answer after {LONGEST_TURN} s")
        line = self._process.stdout.readline()
        if not line:
            raise TurnFailedError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace").strip()
        return text[-ERRORS_SHOWN:].splitlines()[-1] if text else "it said nothing"


def _is_ready(pipe: Any, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(seconds))
