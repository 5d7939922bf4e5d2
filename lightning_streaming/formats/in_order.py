"""A look at each of many files, by several threads at once, told in the order of the files.

A look waits for a store, or a disk, far longer than it works; so one after the other, a thousand files take a thousand
times the way to the store and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import closing
from itertools import islice
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeVar

from lightning_streaming.formats.other_formats import StoredFiles

_THREADS = 16
_AHEAD = 2 * _THREADS
"""Items that are begun or waited for: a slow one does not stop the others soon, and few are lost to a kill."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(
    look: Callable[[StoredFiles, _Item], _Result], files: StoredFiles, items: Iterable[_Item]
) -> Generator[_Result, None, None]:
    """What a function finds in each of some items, in the order of the items.

    Items are taken, and results given, in the thread that asks; the function is called in threads of its own. These
    have ended when the generator has: at its end, by an error, or because it was closed. Where nobody will ask any
    more, close it: ``yield from`` does, as does ``contextlib.closing``.

    Args:
        look: Given the files to read from, and an item; called by up to 16 threads.
        files: What is read. In ``look`` the next read after the end raises CancelledError, which is to be let through.
        items: Of each one result.

    Raises:
        Exception: What ``look`` raised of the first item of which it raised anything, after the results before that.
    """
    files.sizes()  # which imports what it takes, and lists: both by one thread
    stopped, threads = Event(), list[Thread]()
    # Ctrl-C cannot leave these queues locked, as it can what concurrent.futures waits with.
    todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    waiting = deque[SimpleQueue[tuple[_Result | None, BaseException | None]]]()
    watched, left = _WatchedFiles(files, stopped), iter(items)
    try:
        while True:
            for item in islice(left, _AHEAD - len(waiting)):
                answer: SimpleQueue[tuple[_Result | None, BaseException | None]] = SimpleQueue()
                waiting.append(answer)
                todo.put(lambda item=item, answer=answer: answer.put(_tried(look, watched, item)))  # type: ignore[misc]
                if len(threads) < _THREADS:
                    threads.append(Thread(target=_work_off, args=(todo,), name="look-at-files", daemon=True))
                    threads[-1].start()
            if not waiting:
                return
            found, error = waiting[0].get()
            if error is not None:
                raise error
            waiting.popleft()
            yield found  # type: ignore[misc]  # there is one where there is no error
    finally:
        stopped.set()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            thread.join()


def known_or_found(
    look: Callable[[StoredFiles, _Item], _Result], files: StoredFiles, items: Iterable[tuple[_Item, _Result | None]]
) -> Generator[_Result, None, None]:
    """What is known of items, and of others what :func:`in_order` finds.

    Args:
        look: As for :func:`in_order`; not called of what is known.
        files: What is read.
        items: Each with what is known of it; None for nothing.

    Raises:
        Exception: As for :func:`in_order`.
    """
    asked = list(items)
    with closing(in_order(look, files, (item for item, known in asked if known is None))) as found:
        for _, known in asked:
            yield next(found) if known is None else known


def _work_off(todo: SimpleQueue[Callable[[], None] | None]) -> None:
    """What each thread does."""
    while (work := todo.get()) is not None:
        work()


def _tried(
    look: Callable[[StoredFiles, _Item], _Result], files: _WatchedFiles, item: _Item
) -> tuple[_Result | None, BaseException | None]:
    try:
        files.go_on()
        return look(files, item), None
    except BaseException as error:  # noqa: BLE001  raised again where it is waited for
        return None, error


class _WatchedFiles:
    """Files that can be read until nobody wants to know any more; see :class:`StoredFiles`."""

    def __init__(self, files: StoredFiles, stopped: Event) -> None:
        self._files, self._stopped = files, stopped

    def go_on(self) -> None:
        """End whoever reads, where nobody waits for it."""
        if self._stopped.is_set():
            raise CancelledError

    @property
    def shown(self) -> str:
        return self._files.shown

    def shown_file(self, name: str) -> str:
        return self._files.shown_file(name)

    def sizes(self) -> Mapping[str, int]:
        return self._files.sizes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        self.go_on()
        return self._files.read_range(name, start, stop)

    def read_if_there(self, name: str) -> bytes | None:
        self.go_on()
        return self._files.read_if_there(name)
