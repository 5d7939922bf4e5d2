"""What workers say, whatever engine runs them, and the part they run."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_streaming.writing.parts import PartJob


class WorkerTracebackError(Exception):
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class PartProgress:
    """A part is being written."""

    number: int
    samples: int
    """So far."""


@dataclass(frozen=True, slots=True)
class PartDone:
    """A part is finished."""

    number: int
    samples: int
    """All of it."""


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part is not finished."""

    number: int
    summary: str
    """What happened, in a line."""
    trace: str = ""
    """The traceback, if it was an error."""
    pickled_error: bytes | None = None
    """The error itself, if it can travel."""

    def cause(self) -> Exception | None:
        """The original error, whose own cause is its traceback as text; None if there was no error, but a death."""
        if not self.trace:
            return None
        shown = WorkerTracebackError(self.trace)
        try:
            error = pickle.loads(self.pickled_error or b"")  # noqa: S301 - from our own worker
        except Exception:  # noqa: BLE001 - a class that only the worker can import; its text is all there is
            return shown
        if not isinstance(error, Exception):
            return shown
        error.__cause__ = shown
        return error


Event = PartProgress | PartDone | PartFailed


class Workers(Protocol):
    """Writes parts elsewhere, some at a time. Used as a context: leaving it ends all that it began."""

    capacity: int
    """Most parts that may be begun and not ended."""

    def begin(self, number: int, part_input: Any) -> None:
        """Have a part written; at most ``capacity`` of them at a time."""

    def wait(self) -> list[Event]:
        """Wait until something happens; some part must have been begun. A part ends with PartDone or PartFailed."""


def write_part(
    job: PartJob[Any], number: int, part_input: Any, on_sample: Callable[[], None] = lambda: None
) -> PartDone | PartFailed:
    """Write a part; an error becomes a value that can travel."""
    try:
        return PartDone(number, job.write(number, part_input, on_sample))
    except Exception as error:  # noqa: BLE001 - raised by the user's function; raised again where the user looks
        return failure(number, error)


def failure(number: int, error: Exception, words: str = "") -> PartFailed:
    """An error as a value that can travel, with words before it."""
    trace = "".join(traceback.format_exception(error))
    return PartFailed(number, words + summary_of(error), trace, _pickled(error))


def summary_of(error: BaseException) -> str:
    """The last line of a traceback: ``ValueError: bad line``."""
    return "".join(traceback.format_exception_only(error)).strip()


def _pickled(error: Exception) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - many errors can be pickled and not be made again
    except Exception:  # noqa: BLE001 - then its text must do
        return None
    return pickled
