"""What to say where the run's own functions fail while its data is read."""

from __future__ import annotations

import traceback

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import counted

_TRACEBACK = "Traceback (most recent call last):\n"


def reading_failed(workers: int, error: Exception) -> ConfigError:
    """An error that says in its first line what went wrong, and where in those after it.

    Args:
        workers: With how many it was read.
        error: What a transform or collate function raised. torch hands on the error of a worker process with the
            traceback of that process as its message.
    """
    lines = "".join(traceback.format_exception(error))
    _, found, last = str(error).rpartition(_TRACEBACK)
    if found:
        lines = found + last
        where = last.splitlines()
        first = next((line for line in where if not line.startswith(" ")), where[-1])
    else:
        first = traceback.format_exception_only(error)[0].splitlines()[0]
    return ConfigError(f"reading with {counted(workers, 'worker')} failed: {first}\n{lines.rstrip()}")
