"""The tools by name, and how one of them is run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn, Protocol

from lightning_streaming.errors import ConfigError, FormatError, IntegrityError, StreamingError
from lightning_streaming.tools.console import BAD, INTERRUPTED, TERMINATED, UNREAD, UNUSABLE, print_error

PROGRAM = "lightning-streaming"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One tool, whose module is not imported before it is asked for."""

    name: str
    """What is typed after ``lightning-streaming``."""
    help: str
    """What it does, in one line."""
    module: str
    """Where it is: a :class:`Tool`."""


class Tool(Protocol):
    """What the module of a tool has. Its docstring is the tool's description."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Say what the tool can be told."""
        ...

    def run(self, args: Namespace) -> int:
        """Do the work, and return an exit code of :mod:`~lightning_streaming.tools.console`.

        Args:
            args: What it was told; ``given`` are the words themselves.

        Raises:
            StreamingError: It could not be done; shown without a traceback.
        """
        ...


COMMANDS = (
    Command(
        name="convert",
        help="make a dataset of JSON lines, CSV, Parquet, tar files, images or texts",
        module="lightning_streaming.tools.convert",
    ),
    Command(
        name="inspect",
        help="show what a dataset holds: columns, sizes, first samples",
        module="lightning_streaming.tools.inspect",
    ),
    Command(
        name="verify",
        help="check every file and every sample of a dataset, and repair it",
        module="lightning_streaming.tools.verify",
    ),
    Command(
        name="copy",
        help="copy a dataset to another directory or store, checked",
        module="lightning_streaming.tools.copy",
    ),
    Command(
        name="merge",
        help="join datasets under one index, without copying",
        module="lightning_streaming.tools.merge",
    ),
    Command(
        name="state",
        help="show and move the place in the data that a checkpoint holds",
        module="lightning_streaming.tools.state",
    ),
    Command(
        name="trace",
        help="tell which samples a step of training reads, and when a sample is read",
        module="lightning_streaming.tools.trace",
    ),
    Command(
        name="tune",
        help="measure how fast a run's data is read here, and recommend settings for it",
        module="lightning_streaming.tools.tune",
    ),
    Command(
        name="cache",
        help="show what caches hold, and make room in them",
        module="lightning_streaming.tools.cache",
    ),
)


def find_command(name: str) -> Command | None:
    """The tool of this name."""
    return next((command for command in COMMANDS if command.name == name), None)


def run_command(command: Command, args: Sequence[str]) -> int:
    """Run a tool.

    Args:
        command: Which.
        args: The arguments after its name.

    Returns:
        The exit code of the process.

    Raises:
        SystemExit: The arguments cannot be parsed, or ask for help; or the process was told to end.
    """
    tool = import_module(command.module)
    parser = _CommandParser(
        prog=f"{PROGRAM} {command.name}",
        description=tool.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tool.add_arguments(parser)
    _print_whatever_comes()
    try:
        with _flushed(), _ended_in_order():
            code: int = tool.run(parser.parse_args(args, Namespace(given=tuple(args))))
    except StreamingError as error:
        print_error(parser.prog, error)
        return BAD if isinstance(error, FormatError | IntegrityError) else UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, head for example, has seen enough
        # Python would fail to flush what is left when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except OSError as error:  # the system refused a path, or a disk is full
        print_error(parser.prog, error)
        return UNUSABLE
    return code


class _CommandParser(ArgumentParser):
    """A parser that answers a mistake with what is wrong and where to read on, not with all there is to read."""

    def error(self, message: str) -> NoReturn:
        words, unknown, given = message.partition("unrecognized arguments: ")
        names = [one.partition("=")[0] for one in given.split()]
        # Not what follows a misspelt option: it may be a secret.
        told = f"{words}{unknown}{' '.join([one for one in names if one.startswith('-')] or names)}"
        print_error(self.prog, ConfigError(f"{told}; see {self.prog} --help"))
        sys.exit(UNUSABLE)


@contextmanager
def _flushed() -> Iterator[None]:
    """Find out here, and not when Python exits, that nobody reads the output any more."""
    try:
        yield
    finally:
        sys.stdout.flush()


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Leave all ``with`` blocks when told to end by SIGTERM, so that temporary files and worker processes go away."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_: int, __: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def _print_whatever_comes() -> None:
    """Show a question mark where a terminal's encoding lacks a character of the data, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
