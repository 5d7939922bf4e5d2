from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import pytest

from lightning_streaming.storage.progress import Progress, run_watched, watched

Run = Callable[[Callable[[Progress], Any], float, float], Any]


def test_what_ends_in_time_gives_its_result_or_raises() -> None:
    async def work(error: Exception | None) -> str:
        if error:
            raise error
        return "done"

    assert asyncio.run(watched(work(None), Progress(), 5, 5)) == "done"
    with pytest.raises(KeyError):
        asyncio.run(watched(work(KeyError("x")), Progress(), 5, 5))
    assert run_watched(lambda: "done", Progress(), inf, inf) == "done"
    with pytest.raises(KeyError):
        run_watched({}.popitem, Progress(), 5, 5)


async def _marking(progress: Progress, stopped: list[bool]) -> None:
    try:
        for _ in range(40):
            await asyncio.sleep(0.05)
            progress.mark()
    except asyncio.CancelledError:
        stopped.append(True)
        raise


def test_what_stalls_is_cancelled() -> None:
    ended: list[bool] = []

    async def stall() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError, match=r"nothing arrived for 0\.1 s"):
        asyncio.run(watched(stall(), Progress(), 0.1, inf))
    assert ended


def test_what_is_slow_is_not_cancelled() -> None:
    progress, stopped = Progress(), list[bool]()
    asyncio.run(watched(_marking(progress, stopped), progress, 1.5, inf))
    assert not stopped


def test_what_is_too_slow_is_cancelled_in_the_end() -> None:
    progress, stopped = Progress(), list[bool]()
    with pytest.raises(TimeoutError, match=r"not done after 0\.2 s"):
        asyncio.run(watched(_marking(progress, stopped), progress, 60, 0.2))
    assert stopped


def test_a_cancelled_watch_cancels_what_it_watches() -> None:
    progress, stopped = Progress(), list[bool]()

    async def cancel(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel(watched(_marking(progress, stopped), progress, 60, inf)))
    assert stopped


@pytest.mark.parametrize(("timeout", "longest", "words"), [(0.1, inf, "nothing arrived"), (inf, 0.1, "not done")])
def test_a_thread_that_stalls_is_left_behind(timeout: float, longest: float, words: str) -> None:
    release, ended = threading.Event(), threading.Event()

    def stall() -> None:
        release.wait()
        ended.set()

    with pytest.raises(TimeoutError, match=words):
        run_watched(stall, Progress(), timeout, longest)
    assert not ended.is_set()
    release.set()
    assert ended.wait(10)


def test_a_thread_that_is_slow_is_waited_for() -> None:
    progress, pause = Progress(), threading.Event()

    def work() -> str:
        for _ in range(20):
            pause.wait(0.05)
            progress.mark()
        return "done"

    assert run_watched(work, progress, 0.9, inf) == "done"
