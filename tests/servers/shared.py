"""Servers of a whole run: the first process of the tests that needs one starts it, the others use the same.

The input of a server is a named pipe that each of these processes holds open. So the server ends with the last of
them, whatever ends it; and :func:`end_servers`, at the end of a run, ends what forgotten children still hold.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from tests.servers.processes import REPOSITORY

_PATIENCE = 60.0


class Launch(NamedTuple):
    """How a server is started."""

    command: Sequence[str]
    """A program that ends with its input, and prints its URL unless this is known beforehand."""
    wait: Callable[[], str] | None = None
    """Waits until it answers, and gives the URL that is known beforehand."""


@contextmanager
def shared_server(directory: Path, name: str, launch: Callable[[], Launch]) -> Iterator[str]:
    """Give the URL of a server of this run, and start it if no process has.

    Args:
        directory: What the processes of a run share.
        name: Of the server.
        launch: Says how to start it.
    """
    pipe, address = directory / f"{name}.pipe", directory / f"{name}.url"
    with FileLock(directory / f"{name}.lock"):
        held = _hold(pipe)
        if held is None:
            held = _start(pipe, address, launch())
        url = address.read_text().strip()
    try:
        yield url
    finally:
        os.close(held)


def end_servers(directory: Path) -> None:
    """End the servers of a run that have not ended by themselves."""
    for pipe in directory.glob("*.pipe"):
        held = _hold(pipe)
        if held is not None:
            os.close(held)
            os.killpg(int(pipe.with_suffix(".pid").read_text()), signal.SIGKILL)


def _hold(pipe: Path) -> int | None:
    """Open the input of a server; None if no server reads it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def _start(pipe: Path, address: Path, launch: Launch) -> int:
    """Start a server, wait until it answers, and give what holds its input open."""
    if not pipe.exists():
        os.mkfifo(pipe)
    read = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    held = os.open(pipe, os.O_WRONLY)
    os.set_blocking(read, True)
    try:
        with address.open("w") as printed:
            process = subprocess.Popen(
                launch.command,
                stdin=read,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                cwd=REPOSITORY,
                start_new_session=True,
            )
    finally:
        os.close(read)
    pipe.with_suffix(".pid").write_text(str(process.pid))
    if launch.wait is not None:
        address.write_text(f"{launch.wait()}\n")
    deadline = time.monotonic() + _PATIENCE
    while not address.read_text().endswith("\n"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(launch.command)} does not serve")
        time.sleep(0.005)
    process.returncode = 0  # it may outlive this process, which then is not to complain of it
    return held
