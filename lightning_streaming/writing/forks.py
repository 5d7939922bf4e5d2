"""A process that was forked has copies of its parent's writers, whose files are the parent's."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakMethod

from lightning_streaming.errors import ConfigError

# Of the whole process, because a fork copies all of it. So a copy knows what it is with its first sample, and no sample
# costs a question.
_REFUSALS: set[WeakMethod[Callable[[str], None]]] = set()


def refuse_in_forks(refuse: Callable[[str], None]) -> None:
    """Have a method of an object called in forked processes, as soon as they are there, with the reason."""
    _REFUSALS.add(WeakMethod(refuse, _REFUSALS.discard))


def check_process(owner: int) -> None:
    """Refuse to go on in another process than the one that began.

    Raises:
        ConfigError: It is another one.
    """
    if os.getpid() != owner:
        raise ConfigError(_of_another(owner))


def _of_another(owner: int) -> str:
    return (
        f"this writer is of process {owner}, from which this one was forked; make another one here, or leave the "
        "process with os._exit()"
    )


def _tell_copies() -> None:
    for refusal in list(_REFUSALS):
        refuse = refusal()
        if refuse is not None:
            refuse(_of_another(os.getppid()))


os.register_at_fork(after_in_child=_tell_copies)
