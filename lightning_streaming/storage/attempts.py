"""Runs one transfer until it succeeds, fails for good, or has had all its attempts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
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
from lightning_streaming.storage.retry import final_class, wait_seconds
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """How often and how long one transfer is tried, and what its errors say."""

    purpose: str
    """What is tried, with URLs masked: ``"download s3://bucket/key"``."""
    options: Mapping[str, Any] = field(repr=False)
    """The storage options, whose texts are kept out of errors."""
    retry: int
    """Attempts in total."""
    timeout: float | None
    """Seconds that each attempt is given, as errors tell it; None for no limit."""
    failure: type[StorageError]
    """The error once all attempts have failed."""

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``, again while that may help.

        Raises:
            StreamingError: The last failure, in a class and with words that say what to do about it.
        """
        for attempts in count(1):
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - stores raise what they like; it is judged, then raised below
                last = error
            kind = final_class(last)
            if kind is not None or attempts >= self.retry:
                break
            threading.Event().wait(wait_seconds(attempts, _random.random()))
        if isinstance(last, IntegrityError):
            raise IntegrityError(f"{last} (attempt {attempts} of {self.retry}); write the object and its index again")
        if isinstance(last, StreamingError):
            raise last
        raise self._failed(last, kind, attempts) from shown_cause(last, self.options)

    def _failed(self, last: Exception, kind: type[StreamingError] | None, attempts: int) -> StreamingError:
        cause = describe(last, self.options)
        if kind is not None:
            return kind(f"could not {self.purpose}: {_WAYS_OUT[kind]} ({cause})")
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        limit = "" if self.timeout is None else f" of up to {self.timeout:g} s"
        settings = " (download_retry, download_timeout)" if self.failure is DownloadError else ""
        return self.failure(
            f"could not {self.purpose}: {times}{limit} failed, the last with {cause}; "
            f"check the network and the store, or allow more attempts or more time{settings}"
        )
