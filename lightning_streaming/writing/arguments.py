"""What a writer is told besides what its shards have in common."""

from __future__ import annotations

import os
from numbers import Integral
from typing import get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.start import Mode


def check_counts(max_workers: int | None, retry: int) -> int:
    """Refuse numbers that cannot be; gives how many workers there are.

    Raises:
        ConfigError: One is not a whole number from 1.
    """
    check_count(retry, "retry")
    if max_workers is None:
        return max(2, min(8, os.cpu_count() or 1))
    return check_count(max_workers, "max_workers")


def check_count(count: object, what: str) -> int:
    """Refuse what is no whole number from 1.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{what} must be a whole number from 1, but got {count!r}")
    return int(count)


def check_mode(mode: str, exist_ok: bool) -> None:
    """Refuse a mode that there is not, or that contradicts ``exist_ok``.

    Raises:
        ConfigError: Says which.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, but got {mode!r}")
    if exist_ok and mode != "create":
        raise ConfigError(
            f"exist_ok=True replaces what is there, but mode={mode!r} goes on with it; choose one of both"
        )
