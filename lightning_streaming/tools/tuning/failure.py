"""What to say where the run's own functions fail while its data is read."""

from __future__ import annotations

import traceback

from lightning_streaming.errors import ConfigError, SampleError
from lightning_streaming.tools.console import counted

_TRACEBACK = "Traceback (most recent call last):\n"


def reading_failed(workers: int, error: Exception) -> ConfigError:
    """An error that says in its first line what went wrong, and where in those after it.

    Args:
        workers: With how many it was read.
        error: What reading raised: an error of ours, whose cause is what a transform or collate function raised; or one
            of torch's, whose message is the traceback of its worker process.
    """
    raised = (error.__cause__ if isinstance(error, SampleError) else None) or error
    lines = "".join(traceback.format_exception(error))
    _, found, last = str(raised).rpartition(_TRACEBACK)
    if found:
        lines = found + last
        where = last.splitlines()
        first = next((line for line in where if not line.startswith(" ")), where[-1])
    else:
        first = traceback.format_exception_only(raised)[0].splitlines()[0]
        lines = lines[max(0, lines.find(_TRACEBACK)) :]
    return ConfigError(f"reading with {counted(workers, 'worker')} failed: {first}\n{lines.rstrip()}")
