"""Work that goes on while samples are written: many pieces at a time, finished in order, bounded in number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Result = TypeVar("_Result")


class Background:
    """Runs pieces of work in threads, which start with the first piece and end with :meth:`close`."""

    def __init__(self, max_workers: int) -> None:
        """Nothing is started yet.

        Args:
            max_workers: Pieces at work at a time. One more may wait.
        """
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="shard-writer")
        self._free = threading.Semaphore(max_workers + 1)
        self._last: Future[None] | None = None
        self.failure: BaseException | None = None
        """What went wrong first; all that was to finish later fails with it."""

    def submit(self, work: Callable[[], _Result], commit: Callable[[_Result], None]) -> None:
        """Take a piece of work; wait while ``max_workers + 1`` are not finished.

        Args:
            work: Runs beside others.
            commit: Takes its result, when all pieces before have been committed.
        """
        self._free.acquire()
        try:
            self._last = self._pool.submit(self._run, work, commit, self._last)
        except BaseException:
            self._free.release()
            raise

    def wait(self) -> None:
        """Wait until all is committed, or has failed."""
        if self._last is not None:
            wait([self._last])

    def drop(self) -> None:
        """What waits is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Finish all that was not dropped, and end the threads."""
        self._pool.shutdown(wait=True)

    def _run(
        self, work: Callable[[], _Result], commit: Callable[[_Result], None], previous: Future[None] | None
    ) -> None:
        try:
            self._stop_after_failure()
            result = work()
            if previous is not None:  # it was submitted before, so it is at work or done: no deadlock
                previous.result()
            commit(result)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        finally:
            self._free.release()

    def _stop_after_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
