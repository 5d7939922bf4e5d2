"""A process that measures one system, as it is told line by line.

Started as ``python -m benchmarks.reading.child SYSTEM``. It imports the system and answers with its versions. Then a
line ``{"probe": ..., "case": ...}`` opens a measurement, in a process forked for it; each line ``turn`` is answered
with what one turn gave, and ``end`` ends it. Every line is answered before the next is sent, so that neither process
reads what is meant for the other. Answers are lines of JSON, {"error": ...} where something failed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from importlib.metadata import distributions, version
from typing import Any, TextIO

from benchmarks.reading.case import Case
from benchmarks.reading.forks import start_fork
from benchmarks.reading.probes import PROBES
from benchmarks.reading.systems import System, load

PACKAGES = ("lightning-streaming", "mosaicml-streaming", "litdata", "torch", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Of the packages that are measured here, and of those that they stand on."""
    installed = {one.name for one in distributions()}
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if name in installed}


def answer(answers: TextIO, found: Any) -> None:
    """Send one line."""
    answers.write(json.dumps(found) + "\n")
    answers.flush()


def measure(system: System, asked: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    """Take turns until told to end."""
    answer(answers, {"opened": asked["probe"]})
    try:
        turns = iter(PROBES[asked["probe"]](system, Case(**asked["case"])))
        while requests.readline() == "turn\n":
            answer(answers, next(turns))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told to the process that asks
        traceback.print_exc()
        answer(answers, {"error": f"{type(error).__name__}: {error}"})


def main(name: str) -> None:
    """Serve until the pipe is closed."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    system = load(name)
    answer(answers, versions())
    while line := requests.readline():
        process = start_fork(measure, system, json.loads(line), requests, answers)
        process.join()
        answer(answers, {"ended": process.exitcode})


if __name__ == "__main__":
    main(sys.argv[1])
