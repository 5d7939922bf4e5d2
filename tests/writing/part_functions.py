"""What parts are made of, in a module of its own, so that spawned workers import no test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE_LIMIT = 400


def count(numbers: range) -> Iterator[dict[str, Any]]:
    """A sample for each number."""
    for number in numbers:
        yield {"id": number, "text": "x" * (number % 7)}


def count_one(number: int) -> Iterator[dict[str, Any]]:
    """One sample."""
    yield {"id": int(number), "text": ""}


def count_slowly(numbers: range) -> Iterator[dict[str, Any]]:
    """The same, at a pace at which a kill finds it anywhere."""
    for sample in count(numbers):
        time.sleep(0.001)
        yield sample


def count_slowly_to_the_last(last: range, numbers: range) -> Iterator[dict[str, Any]]:
    """The same, but the last part is not finished as long as the program runs."""
    yield from count_slowly(numbers)
    program = os.getppid()
    while numbers == last and os.getppid() == program:
        time.sleep(0.005)


def count_last_first(numbers: range) -> Iterator[dict[str, Any]]:
    """The same; the earlier the input, the longer it takes."""
    time.sleep(0.3 / (1 + numbers.start / 10))
    yield from count(numbers)


class PickyError(Exception):
    """Pickles, but cannot be made again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class LocalOnlyError(ValueError):
    """Travels well."""


def fail_at_20(numbers: range) -> Iterator[dict[str, Any]]:
    """Fails in the part that holds 20, half way."""
    for sample in count(numbers):
        if sample["id"] == 25:
            raise LocalOnlyError("cannot make number 25")
        yield sample


def fail_with_a_picky_error(numbers: range) -> Iterator[dict[str, Any]]:
    """Fails with an error that does not travel."""
    raise PickyError("not", "here")
    yield {}


def give_another_type(numbers: range) -> Iterator[dict[str, Any]]:
    """Columns that differ from part to part."""
    for number in numbers:
        yield {"id": number if number < 20 else float(number)}


def record_calls(task: tuple[str, range]) -> Iterator[dict[str, Any]]:
    """Notes each call in a file named by the input and the process."""
    directory, numbers = task
    Path(directory, f"{numbers.start}-{os.getpid()}-{time.monotonic_ns()}").touch()
    yield from count(numbers)


def fail_unless_mended(task: tuple[str, range]) -> Iterator[dict[str, Any]]:
    """Fails at 25 while the file ``mended`` is missing; notes each call."""
    for sample in record_calls(task):
        if sample["id"] == 25 and not Path(task[0], "mended").exists():
            raise LocalOnlyError("cannot make number 25")
        yield sample


def die_in_the_middle(numbers: range) -> Iterator[dict[str, Any]]:
    """Kills its own process in the part that holds 20."""
    for sample in count(numbers):
        if sample["id"] == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        yield sample


def exit_in_the_middle(numbers: range) -> Iterator[dict[str, Any]]:
    """Ends its own process in the part that holds 20."""
    for sample in count(numbers):
        if sample["id"] == 25:
            os._exit(3)
        yield sample


def die_once(task: tuple[str, range]) -> Iterator[dict[str, Any]]:
    """Kills its own process half way in the part that holds 20, but only once."""
    directory, numbers = task
    for sample in count(numbers):
        marker = Path(directory, "died")
        if sample["id"] == 27 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield sample


def wait_for_ever(task: tuple[str, range]) -> Iterator[dict[str, Any]]:
    """Notes that it has begun, and never gives a sample."""
    directory, numbers = task
    Path(directory, f"{numbers.start}-{os.getpid()}").touch()
    multiprocessing.Event().wait()
    yield {}


def count_slowly_and_note(task: tuple[str, range]) -> Iterator[dict[str, Any]]:
    """Notes which process begins, and gives samples at a pace at which a kill finds it anywhere."""
    directory, numbers = task
    Path(directory, f"{numbers.start}-{os.getpid()}-{time.monotonic_ns()}").touch()
    yield from count_slowly(numbers)
