"""Forked processes that live for one measurement, and have imported what the process has that forks them."""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def start_fork(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a function in a process of its own, and then the exit handlers that were registered there."""
    process = multiprocessing.get_context("fork").Process(target=_live, args=(function, arguments))
    process.start()
    return process


def in_fork(function: Callable[[], Any]) -> Any:
    """What a function gives in a process of its own.

    Raises:
        RuntimeError: It died.
    """
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = start_fork(_send, function, sender)
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the process of a turn died; what it said is on stderr") from None
    finally:
        process.join()
        receiver.close()


def _live(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # multiprocessing ends its forks without exit handlers, with which MosaicML Streaming frees its shared memory.
    atexit._clear()
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()


def _send(function: Callable[[], Any], sender: Connection) -> None:
    sender.send(function())
    sender.close()
