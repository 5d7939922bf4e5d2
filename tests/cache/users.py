"""Processes of other users, and directories that they may look into."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_streaming.errors import StreamingError


def open_to_all(directory: Path) -> None:
    """Let every user come as far as ``directory``; pytest keeps its own for one user."""
    shared = Path(tempfile.gettempdir())
    for parent in directory.parents:
        if parent == shared or shared not in parent.parents:
            break
        parent.chmod(0o755)


def as_nobody(look: Callable[[], Any]) -> Any:
    """What a function gives, or the words of the error it raises, in a process of a user without rights."""
    return as_user(65534, look)


def as_user(user: int, look: Callable[[], Any]) -> Any:
    """What a function gives, or the words of the error it raises, in a process of another user, alone in a group."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        try:
            sender.send(look())
        except StreamingError as error:
            sender.send(str(error))

    child = context.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0
    return receiver.recv()
