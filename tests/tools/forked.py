"""Programs of the documents, forked from a process that has imported what they need: no interpreter starts for each."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_streaming.__main__ import main
from tests.tools.running import Outcome

_FORK = multiprocessing.get_context("fork")
_ASK = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [asked.encode()], [0, 1, 2])
    sys.exit(int(server.recv(8)))
"""


@contextmanager
def command_line() -> Iterator[str]:
    """Serve ``lightning-streaming`` to shells; gives the line of shell that defines it there."""
    with TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = f"{directory}/commands"
        listener.bind(path)
        listener.listen()
        server = _FORK.Process(target=_serve, args=(listener,))
        server.start()
        try:
            yield f"lightning-streaming() {{ '{sys.executable}' -I -S -c '{_ASK}' '{path}' \"$@\"; }}\n"
        finally:
            server.kill()
            server.join()


def run_forked(program: str, *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Outcome:
    """Run ``lightning-streaming`` with these arguments in a process of its own, in which nothing is imported again.

    Args:
        program: What :func:`command_line` gives.
        *args: Arguments of the command.
        cwd: Where to run it.
        env: Its environment.
    """
    script = ["bash", "-c", f"{program}lightning-streaming {shlex.join(map(str, args))}"]
    done = subprocess.run(script, capture_output=True, text=True, encoding="utf-8", cwd=cwd, env=env, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_program(text: str, directory: Path) -> None:
    """Run a Python program there; it must end well."""
    program = _FORK.Process(target=_run_program, args=(text, directory))
    program.start()
    program.join()
    assert program.exitcode == 0


def _run_program(text: str, directory: Path) -> None:
    _be_as_new(str(directory))
    exec(compile(text, "<document>", "exec"), {"__name__": "__main__"})


def _serve(listener: socket.socket) -> None:
    while True:
        request, _ = listener.accept()
        asked, streams, _, _ = socket.recv_fds(request, 1 << 20, 3)
        _FORK.Process(target=_run_command, args=(request, streams, *json.loads(asked))).start()
        request.close()
        for stream in streams:
            os.close(stream)


def _run_command(
    request: socket.socket, streams: list[int], words: list[str], directory: str, environment: dict[str, str]
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)  # 1: by lines, as always
    os.environ.clear()
    os.environ.update(environment)
    _be_as_new(directory)
    for logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:  # it was made where this was imported, with that stderr
                handler.stream = sys.stderr  # setStream would flush what a test before may have closed
    code = 1
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        request.sendall(str(code).encode())


def _be_as_new(directory: str) -> None:
    """Start there, and warn as an interpreter does that has just started; without the parent's pool of threads."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.chdir(directory)
    sys.path.insert(0, directory)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
