"""Long waits, shown to people: a bar on a terminal where bars are asked for, or else a line in the log now and then.

    with progress(len(index), "samples", "evaluating where='...'") as tell:
        tell(1000)

To tell costs an addition: a thread of the wait's own shows it, also where nothing is told for long.
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
from typing import Any

from lightning_streaming.escaping import in_one_line, package_logger

_log = package_logger(__name__)
_FIRST_LINE, _NEXT_LINE = 10.0, 60.0
"""Seconds after which the log is told of a wait, and between two such lines."""
_FIRST_DRAWN, _DRAWN_AGAIN = 0.5, 0.2
"""The same of bars: what takes less is not shown."""
_COUNTING = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
"""tqdm's own bar, but that it shows slow things as 0.5 a second, never as seconds for each."""

Tell = Callable[[int], object]
"""Is told how many steps were taken since it was last told; by any thread."""
Words = Callable[[], str]
Line = Callable[[str | None], object]
"""A line of words: shows others, or for None nothing any more."""


@cache
def _bar_class() -> Any:
    from tqdm.auto import tqdm  # not for --help

    class QuietBar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # without tqdm's thread that watches bars: forked workers should find no threads

    return QuietBar


def bar(what: str, unit: str = "", total: int | None = None, *, shown: bool = True, stays: bool = False) -> Any:
    """A bar of tqdm's on standard error.

    Args:
        what: What is going on, for example ``"copy"``.
        unit: What is counted, for example ``"shard"``; ``"B"`` is shown as KB, MB, and so on. Empty where there are
            only words.
        total: Steps to take, None if it is not known.
        shown: Whether there is anything to be seen.
        stays: Whether it stays on the screen when it is closed.
    """
    in_bytes = unit == "B"
    counting = None if in_bytes or total is None else _COUNTING
    return _bar_class()(
        total=total,
        desc=what,
        unit=unit if in_bytes else f" {unit}",
        unit_scale=in_bytes,
        unit_divisor=1024 if in_bytes else 1000,
        bar_format=counting if unit else "{desc}",
        file=sys.stderr,
        disable=not shown,
        leave=stays,
    )


def _nowhere() -> None:
    """There is no display."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How a process shows its waits. A copy in another one shows none, but for what it does alone for all of a node.

    Args:
        bars: Whether to draw them on standard error, where that is a terminal.
        lines: Whether to tell the log of what all processes of a node wait for alike.
        display: Gives a line within a display that somebody else has drawn on the terminal by now; None where there is
            none, and a bar of its own is drawn.
    """

    bars: bool = False
    lines: bool = True
    display: Callable[[], Line | None] = _nowhere
    process: int = field(default_factory=os.getpid)

    def __reduce__(self) -> tuple[Any, ...]:
        return _shown_by_a_copy, ()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Show the waits of a block in this way."""
        token = _shown.set(self)
        try:
            yield
        finally:
            _shown.reset(token)

    def draws(self) -> bool:
        """Whether bars are drawn."""
        return self.bars and self.process == os.getpid() and sys.stderr.isatty()


def _shown_by_a_copy() -> Shown:
    return Shown(lines=False)


IN_LOG = Shown()
"""How waits are shown unless somebody asks for more: this holds no state, and is what the next line begins with."""
_shown: ContextVar[Shown] = ContextVar("shown", default=IN_LOG)


@contextmanager
def progress(total: int | None, unit: str, what: str, *, by_all: bool = False) -> Iterator[Tell]:
    """Show a wait that can be counted, as long as the block lasts.

    Args:
        total: Steps to take, None if it is not known.
        unit: What is counted, for example ``"samples"``.
        what: What is going on, for example ``"evaluating where='...' of data.train"``.
        by_all: Whether all processes of a node wait for this alike, so that one may tell for all.

    Yields:
        Who is to be told of steps.
    """
    wait = _Counted(total, unit, what)
    with _shown_while(wait, by_all=by_all):
        yield wait.tell


@contextmanager
def waiting(words: Words) -> Iterator[None]:
    """Show a wait of all processes of a node that is told in words alone, from now on.

    Args:
        words: Called in a thread, whenever they are shown.
    """
    with _shown_while(_Wait(words), by_all=True):
        yield


class _Wait:
    """One wait.

    Args:
        words: Say how far it is.
    """

    first_drawn = 0.0

    def __init__(self, words: Words) -> None:
        self._words = words
        self.began = perf_counter()

    def words(self) -> str:
        return in_one_line(self._words())

    def bar(self) -> Any:
        return bar(self.words())

    def draw(self, drawn: Any) -> None:
        drawn.set_description_str(self.words())

    def line(self) -> str:
        return f"{self.words()}, after {perf_counter() - self.began:.0f} s"


class _Counted(_Wait):
    """One whose steps are counted."""

    first_drawn = _FIRST_DRAWN

    def __init__(self, total: int | None, unit: str, what: str) -> None:
        super().__init__(self._in_words)
        self._total, self._unit, self._what = total, unit, in_one_line(what)
        self._done, self._lock = 0, Lock()

    def tell(self, steps: int) -> None:
        with self._lock:
            self._done += steps

    def bar(self) -> Any:
        return bar(self._what, self._unit, self._total)

    def draw(self, drawn: Any) -> None:
        drawn.n = self._done
        drawn.refresh()

    def _in_words(self) -> str:
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._what}: {self._done:,}{of} {self._unit}"


@contextmanager
def _shown_while(wait: _Wait, *, by_all: bool) -> Iterator[None]:
    shown = _shown.get()
    draws = shown.draws()
    if not draws and by_all and not shown.lines:
        yield
        return
    ended = Event()
    work = (_draw, wait, shown, ended) if draws else (_tell_log, wait, ended)
    thread = Thread(target=work[0], args=work[1:], name="lightning-streaming-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw(wait: _Wait, shown: Shown, ended: Event) -> None:
    if ended.wait(wait.first_drawn):
        return
    line = shown.display()
    if line is not None:
        _draw_within(line, wait, ended)
        return
    # tqdm knows of its other bars, Lightning's too, and goes below them.
    with wait.bar() as drawn:
        while not ended.wait(_DRAWN_AGAIN):
            wait.draw(drawn)
        wait.draw(drawn)


def _draw_within(line: Line, wait: _Wait, ended: Event) -> None:
    try:
        line(wait.words())
        while not ended.wait(_DRAWN_AGAIN):
            line(wait.words())
    finally:
        line(None)


def _tell_log(wait: _Wait, ended: Event) -> None:
    if ended.wait(_FIRST_LINE):
        return
    _log.info("%s", wait.line())
    while not ended.wait(_NEXT_LINE):
        _log.info("%s", wait.line())
    _log.info("%s", wait.line())
