"""What can be seen of processes and shared memory from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def children(pid: int | None = None) -> set[int]:
    """Living child processes of a process; of this one by default."""
    found = set()
    for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ended meanwhile
            found |= {int(child) for child in (thread / "children").read_text().split()}
    return {child for child in found if is_alive(child)}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """The letter that Linux has for the state of a process: R for one that runs, T for one that was stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def wait_until(true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def shared_memory_of(pids: set[int]) -> list[str]:
    """Named shared memory made by torch in these processes: it has the maker's id in its name."""
    return [path.name for path in Path("/dev/shm").glob("torch_*") if int(path.name.split("_")[1]) in pids]
