"""Cuts what stalls, not what is slow: a transfer may take its time as long as something arrives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_FAREWELL_SECONDS = 1.0
_LONGEST_WAIT = 3600.0  # the system takes no infinite ones


class Progress:
    """When something last arrived."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def mark(self) -> None:
        """Something arrived just now."""
        self.last = time.monotonic()

    def left(self, timeout: float) -> float:
        """Seconds until it is ``timeout`` seconds ago."""
        return self.last + timeout - time.monotonic()


async def watched(work: Coroutine[Any, Any, _Result], progress: Progress, timeout: float, longest: float) -> _Result:
    """Await some work; cancel it once it has stalled, or takes too long in all.

    Args:
        work: What to await.
        progress: Marked by it.
        timeout: Seconds without progress.
        longest: Seconds in all.

    Raises:
        TimeoutError: It was cancelled.
    """
    end = time.monotonic() + longest
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            # What arrived while another transfer kept this thread busy is read before the judgement.
            await asyncio.wait({task}, timeout=_left(progress, timeout, end))
            if not task.done():
                _judge(progress, timeout, end, longest)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_FAREWELL_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # seen, though perhaps of no interest any more


def run_watched(work: Callable[[], _Result], progress: Progress, timeout: float, longest: float) -> _Result:
    """Run some work in a thread; abandon it once it has stalled, or takes too long in all.

    The thread cannot be stopped. It dies with the process at the latest, and what it goes on to do must do no harm.

    Args:
        work: What to run.
        progress: Marked by it.
        timeout: Seconds without progress.
        longest: Seconds in all.

    Raises:
        TimeoutError: It was abandoned.
    """
    done, outcome = threading.Event(), list[Any]()
    end = time.monotonic() + longest

    def run() -> None:
        try:
            outcome.extend((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            outcome[:] = (None, error)
        done.set()

    threading.Thread(target=run, name="lightning-streaming-transfer", daemon=True).start()
    while not done.wait(_left(progress, timeout, end)):
        _judge(progress, timeout, end, longest)
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _left(progress: Progress, timeout: float, end: float) -> float:
    return max(0.0, min(progress.left(timeout), end - time.monotonic(), _LONGEST_WAIT))


def _judge(progress: Progress, timeout: float, end: float, longest: float) -> None:
    if progress.left(timeout) <= 0:
        raise TimeoutError(f"nothing arrived for {timeout:g} s")
    if time.monotonic() >= end:
        raise TimeoutError(f"not done after {longest:g} s")
