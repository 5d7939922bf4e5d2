"""Runs one transfer until it succeeds, fails for good, or has had all its attempts."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage.retry import final_class, wait_seconds, what_is_missing
from lightning_streaming.storage.retry_after import asked_wait
from lightning_streaming.storage.secrets import describe, shown_cause

_Result = TypeVar("_Result")
# Its own generator: the random numbers of the training program are not ours to draw.
_random = random.SystemRandom()

_WAYS_OUT: dict[type[StreamingError], str] = {
    ObjectNotFoundError: "not found; check the bucket, the path and the endpoint",
    AccessDeniedError: (
        "access denied; check the credentials in storage_options or in the environment and what they may read, "
        "or say that none are needed, for example with anon: true"
    ),
    ConfigError: "the request could not be made; check the URL and storage_options",
    MissingDependencyError: "a package is missing; install it with pip",
    StorageError: "the store refused, and would refuse again",
}
_MISSING = {
    "bucket": "the bucket does not exist; check its name, the endpoint and the account",
    "object": "the bucket has no such object; check the path",
}


@dataclass(slots=True)
class Deadline:
    """When a whole download must be done."""

    seconds: float
    """From its first request on."""
    end: float | None = None
    """By the monotonic clock; None before the first request."""

    def begin(self) -> None:
        """Start the clock, unless it runs already."""
        if self.end is None:
            self.end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds if self.end is None else self.end - time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """How often one transfer is tried, and what its errors say."""

    purpose: str
    """What is tried, with URLs masked: ``"download s3://bucket/key"``."""
    options: Mapping[str, Any] = field(repr=False)
    """The storage options, whose texts are kept out of errors."""
    retry: int
    """Attempts in total."""
    failure: type[StorageError]
    """The error once all attempts have failed."""
    timeout: float | None = None
    """Seconds that each attempt is given, as errors tell it; None for no limit, or for one that ``action`` tells of."""
    deadline: Deadline | None = None
    """When all of them, and others that share it, must be done; None for no limit."""
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """More texts that are kept out of errors."""

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``, again while that may help.

        Raises:
            StreamingError: The last failure, in a class and with words that say what to do about it.
        """
        for made in count(1):
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - stores raise what they like; it is judged below
                last = error
            threading.Event().wait(self.pause_after(last, made))
        raise AssertionError

    async def run_async(self, action: Callable[[], Awaitable[_Result]]) -> _Result:
        """Like :meth:`run`, on an event loop."""
        for made in count(1):
            try:
                return await action()
            except Exception as error:  # noqa: BLE001 - as above
                last = error
            await asyncio.sleep(self.pause_after(last, made))
        raise AssertionError

    def pause_after(self, last: Exception, made: int) -> float:
        """Seconds to wait before another attempt.

        Args:
            last: What the last one raised.
            made: Attempts made so far.

        Raises:
            StreamingError: There is to be no other.
        """
        kind = final_class(last)
        pause = wait_seconds(made, _random.random()) + asked_wait(last)
        late = self.deadline is not None and self.deadline.left() <= pause
        if kind is None and made < self.retry and not late:
            return pause
        if isinstance(last, IntegrityError):
            raise IntegrityError(f"{last} (attempt {made} of {self.retry}); write the object and its index again")
        if isinstance(last, StreamingError):
            raise last
        raise self._failed(last, kind, made, late) from shown_cause(last, self.options, self.hidden)

    def _failed(self, last: Exception, kind: type[StreamingError] | None, made: int, late: bool) -> StreamingError:
        cause = describe(last, self.options, self.hidden)
        if kind is not None:
            missing = what_is_missing(last) if kind is ObjectNotFoundError else None
            return kind(f"could not {self.purpose}: {_MISSING.get(missing or '', _WAYS_OUT[kind])} ({cause})")
        times = "1 attempt" if made == 1 else f"{made} attempts"
        limit = "" if self.timeout is None else f" of up to {self.timeout:g} s"
        if late and self.deadline is not None:
            limit += f", within {self.deadline.seconds:.0f} s in all,"
        settings = " (download_retry, download_timeout)" if self.failure is DownloadError else ""
        return self.failure(
            f"could not {self.purpose}: {times}{limit} failed, the last with {cause}; "
            f"check the network and the store, or allow more attempts or more time{settings}"
        )
