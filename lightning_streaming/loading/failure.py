"""An error of ours on its way from a worker to the loader, which raises it as it was: its words, and its cause."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from typing import Any

from lightning_streaming.errors import SampleError, StreamingError


class _WorkerError(Exception):
    """What was raised in a worker process; its message is the traceback there."""


class Failure:
    """Stands for the batches that a worker could not make: whoever wants the first of them gets the error.

    torch sends an error's words only, below the traceback of the worker, and no cause.

    Args:
        error: What the worker raised.
        worker: Which worker it was.
    """

    def __init__(self, error: StreamingError, worker: int) -> None:
        self._kind, self._told = kind_of(error), str(error)
        self._cause = None if error.__cause__ is None else _pickled(error.__cause__)
        is_all_told = error.__cause__ is None and error.__suppress_context__
        lines = "".join(traceback.format_exception(error))
        self._traceback = None if is_all_told else f"in worker process {worker}:\n{lines}"

    def __iter__(self) -> Iterator[Any]:
        raise self._error()
        yield

    def _error(self) -> StreamingError:
        error = self._kind(self._told)
        cause = None if self._cause is None else _unpickled(self._cause)
        where = None if self._traceback is None else _WorkerError(self._traceback)
        if cause is None:
            error.__cause__ = where
        else:
            error.__cause__, cause.__cause__ = cause, where
        return error


def kind_of(error: Exception) -> type[StreamingError]:
    """The class that an error is told with: its own if it is ours, which says best what is wrong."""
    if isinstance(error, StreamingError) and type(error).__module__ == StreamingError.__module__:
        return type(error)  # one of a user's may want other arguments
    return SampleError


def _pickled(error: BaseException) -> bytes | None:
    """The error, if it can go to another process and back; many of other packages cannot."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301  # what was pickled right here
    except Exception:  # noqa: BLE001  # whatever an exception of the user's own makes of it
        return None
    return data


def _unpickled(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data)  # noqa: S301  # from a worker of our own
    except Exception:  # noqa: BLE001  # as above
        return None
    return found if isinstance(found, BaseException) else None
