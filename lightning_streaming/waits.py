"""Progress of long waits: a bar on a terminal where bars are enabled, otherwise a line in the log at intervals.

    with progress(len(index), "samples", "evaluating where='...'") as callback:
        callback(1000)

A call costs an addition: a separate thread shows the progress, also where there is no call for long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any, Protocol

from lightning_streaming.escaping import in_one_line, package_logger

_log = package_logger(__name__)
_FIRST_LINE, _NEXT_LINE = 10.0, 60.0
"""Seconds until the first line in the log, and between two lines."""
_FIRST_DRAWN, _DRAWN_AGAIN = 0.5, 0.2
"""The same for bars: a shorter wait is not shown."""
_COUNTING = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
"""The bar of tqdm with rates per second also for slow steps, instead of seconds per step."""

Message = Callable[[], str]
Line = Callable[[str | None], object]
"""A line of a display: shows another text, or for None nothing any more."""


class ProgressCallback(Protocol):
    """Callback of a long operation, called by any of its threads."""

    def __call__(self, steps: int, /) -> object:
        """Report how many steps were done since the last call."""


@cache
def _bar_class() -> Any:
    from tqdm.auto import tqdm  # not for --help

    class QuietBar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # without tqdm's thread that watches bars: forked workers should find no threads

    return QuietBar


def bar(label: str, unit: str = "", total: int | None = None, *, shown: bool = True, stays: bool = False) -> Any:
    """Return a progress bar of tqdm on standard error.

    Args:
        label: The operation, for example ``"copy"``.
        unit: Unit of the steps, for example ``"shard"``; ``"B"`` is shown as KB, MB, and so on. Empty for a bar of text
            only.
        total: Number of steps; None if unknown.
        shown: Whether to show it.
        stays: Whether it stays on the screen when it is closed.
    """
    in_bytes = unit == "B"
    counting = None if in_bytes or total is None else _COUNTING
    return _bar_class()(
        total=total,
        desc=label,
        unit=unit if in_bytes else f" {unit}",
        unit_scale=in_bytes,
        unit_divisor=1024 if in_bytes else 1000,
        bar_format=counting if unit else "{desc}",
        file=sys.stderr,
        disable=not shown,
        leave=stays,
    )


def _no_line() -> None:
    """Return no line: there is no display."""


@dataclass(frozen=True, kw_only=True)
class ProgressDisplay:
    """Settings of how a process shows progress. A pickled copy shows only operations of one process per node.

    Args:
        bars: Whether to draw bars on standard error, if that is a terminal.
        lines: Whether to log operations for which all processes of a node wait alike.
        display: Function that returns a line of a display that another library draws on the terminal at this time;
            None if there is none, and a separate bar is drawn.
    """

    bars: bool = False
    lines: bool = True
    display: Callable[[], Line | None] = _no_line
    process: int = field(default_factory=os.getpid)

    def __reduce__(self) -> tuple[Any, ...]:
        return _display_of_copy, ()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Use these settings in a block."""
        token = _display.set(self)
        try:
            yield
        finally:
            _display.reset(token)

    def draws(self) -> bool:
        """Return whether bars are drawn."""
        return self.bars and self.process == os.getpid() and sys.stderr.isatty()


def _display_of_copy() -> ProgressDisplay:
    return ProgressDisplay(lines=False)


IN_LOG = ProgressDisplay()
"""The default settings. This holds no state, and is the value with which each context starts."""
_display: ContextVar[ProgressDisplay] = ContextVar("progress_display", default=IN_LOG)


@contextmanager
def progress(total: int | None, unit: str, label: str, *, by_all: bool = False) -> Iterator[ProgressCallback]:
    """Show the progress of an operation with countable steps, for the duration of the block.

    Args:
        total: Number of steps; None if unknown.
        unit: Unit of the steps, for example ``"samples"``.
        label: The operation, for example ``"evaluating where='...' of data.train"``.
        by_all: Whether all processes of a node wait for it alike, so that one of them shows it.

    Yields:
        The callback for steps.
    """
    wait = _Counted(total, unit, label)
    with _shown_while(wait, by_all=by_all):
        yield wait.count


@contextmanager
def waiting(message: Message) -> Iterator[None]:
    """Show a wait of all processes of a node by a message only, from now on.

    Args:
        message: Function that returns the current message; called in a thread.
    """
    with _shown_while(_Wait(message), by_all=True):
        yield


class _Wait:
    """A wait with a message of its progress."""

    first_drawn = 0.0

    def __init__(self, message: Message) -> None:
        self._message = message
        self.started = perf_counter()

    def message(self) -> str:
        return in_one_line(self._message())

    def bar(self) -> Any:
        return bar(self.message())

    def draw(self, drawn: Any) -> None:
        drawn.set_description_str(self.message())

    def line(self) -> str:
        return f"{self.message()}, after {perf_counter() - self.started:.0f} s"


class _Counted(_Wait):
    """A wait whose steps are counted."""

    first_drawn = _FIRST_DRAWN

    def __init__(self, total: int | None, unit: str, label: str) -> None:
        super().__init__(self._counts)
        self._total, self._unit, self._label = total, unit, in_one_line(label)
        self._done, self._lock = 0, Lock()

    def count(self, steps: int, /) -> None:
        with self._lock:
            self._done += steps

    def bar(self) -> Any:
        return bar(self._label, self._unit, self._total)

    def draw(self, drawn: Any) -> None:
        drawn.n = self._done
        drawn.refresh()

    def _counts(self) -> str:
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._label}: {self._done:,}{of} {self._unit}"


@contextmanager
def _shown_while(wait: _Wait, *, by_all: bool) -> Iterator[None]:
    display = _display.get()
    draws = display.draws()
    if not draws and by_all and not display.lines:
        yield
        return
    ended = Event()
    work = (_draw, wait, display, ended) if draws else (_log_lines, wait, ended)
    thread = Thread(target=work[0], args=work[1:], name="lightning-streaming-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw(wait: _Wait, display: ProgressDisplay, ended: Event) -> None:
    if ended.wait(wait.first_drawn):
        return
    line = display.display()
    if line is not None:
        try:
            line(wait.message())
            while not ended.wait(_DRAWN_AGAIN):
                line(wait.message())
        finally:
            line(None)
        return
    # tqdm places the bar below its other ones, including Lightning's.
    with wait.bar() as drawn:
        while not ended.wait(_DRAWN_AGAIN):
            wait.draw(drawn)
        wait.draw(drawn)


def _log_lines(wait: _Wait, ended: Event) -> None:
    if ended.wait(_FIRST_LINE):
        return
    _log.info("%s", wait.line())
    while not ended.wait(_NEXT_LINE):
        _log.info("%s", wait.line())
    _log.info("%s", wait.line())
