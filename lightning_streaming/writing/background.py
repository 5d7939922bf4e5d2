"""Work that goes on while samples are written: many pieces at a time, finished in order, bounded in number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Result = TypeVar("_Result")


class Background:
    """Runs pieces of work in threads, which start with the first piece and end with :meth:`close`.

    One thread gives the work. Where it waits, it may be interrupted, and nothing has changed.
    """

    def __init__(self, max_workers: int) -> None:
        """Nothing is started yet.

        Args:
            max_workers: Pieces at work at a time. One more may wait.
        """
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="shard-writer")
        self._most = max_workers + 1
        self._unfinished: deque[Future[None]] = deque()
        self.failure: BaseException | None = None
        """What went wrong first; all that was to finish later fails with it."""

    def wait_for_room(self) -> None:
        """Wait while ``max_workers + 1`` pieces are not finished."""
        unfinished = self._unfinished
        while len(unfinished) >= self._most:
            wait([unfinished[0]])
            unfinished.popleft()

    def submit(self, work: Callable[[], _Result], commit: Callable[[_Result], None]) -> None:
        """Take a piece of work, for which there is room.

        Args:
            work: Runs beside others.
            commit: Takes its result, when all pieces before have been committed.
        """
        previous = self._unfinished[-1] if self._unfinished else None
        self._unfinished.append(self._pool.submit(self._run, work, commit, previous))

    def wait(self) -> None:
        """Wait until all is committed, or has failed, or was dropped."""
        wait([one for one in self._unfinished if not one.done()])

    def drop(self) -> None:
        """What waits is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Finish all that was not dropped, and end the threads."""
        self.wait()  # first: a thread whose end is waited for counts as ended once that is interrupted
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

    def _stop_after_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
