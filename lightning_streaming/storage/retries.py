"""Attempts at a transfer: how many, the delays between them, their errors, and the detection of stalls."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timezone
from email.utils import parsedate_to_datetime
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
from lightning_streaming.escaping import package_logger
from lightning_streaming.storage.secrets import chain_of, describe, option_of, shown_cause

_logger = package_logger(__name__)

_Result = TypeVar("_Result")
# A separate generator: drawing from the training program's would change its random numbers.
_random = random.SystemRandom()

_LONGEST_WAIT = 30.0
"""Seconds; no wait between two attempts is longer, unless the store requests it."""
_LONGEST_REQUESTED_WAIT = 60.0
"""Seconds; a store that requests a longer wait gets the next attempt after this time."""
_FIRST_WAIT = 0.5
_MAX_POSTPONED = 8
"""Times that a store may postpone a transfer without it counting as a failed attempt: about a minute of waits."""
SLOWEST_RATE = 4096
"""Bytes per second; a transfer that is slower than this on average fails at its deadline."""
_RETRY_AFTER_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?")  # fractions are not in the standard, but some send them
_CANCEL_SECONDS = 1.0
_LONGEST_SYSTEM_WAIT = 3600.0  # the system takes no infinite ones

_PERMANENT: dict[type[StreamingError], str] = {
    ObjectNotFoundError: "not found; check the bucket, the path and the endpoint",
    AccessDeniedError: (
        "access denied; check the credentials in {option} or in the environment and what they may read, "
        "or say that none are needed, for example with anon: true"
    ),
    ConfigError: "the request could not be made; check the URL and {option}",
    MissingDependencyError: "a package is missing; install it with pip",
    StorageError: "the store refused, and would refuse again",
}
"""Failures that another attempt would not change: description and, after "; ", the hint."""
_ACCESS_DENIED = {
    "az": (
        "access denied; give account_name with account_key, sas_token or connection_string in {option} or in "
        "the variables AZURE_STORAGE_..., log in with az login, or say that none are needed, with anon: true"
    ),
    "hf": (
        "access denied, which the hub also says of a repository that is not there; check USER/NAME, and give a token "
        "that may read it in HF_TOKEN or as token in {option}"
    ),
    "oci": (
        "access denied; give config (a file, like ~/.oci/config) and profile, or iam_type, in {option}, and "
        "check what they may read"
    ),
}
"""The same for stores whose credentials have other names, by scheme."""
_MISSING = {
    "bucket": "the bucket does not exist; check its name, the endpoint and the account",
    "object": "the bucket has no such object; check the path",
    "repository": "the hub has no such repository, or the token may not read it; check USER/NAME, datasets/ before it",
    "revision": "the repository has no such revision; check what follows the @",
    "entry": "the repository has no such file at this revision; check the path",
}
_TOO_MANY, _UNAVAILABLE = 429, 503
_TEMPORARY_STATUSES = (408, 425, _TOO_MANY)
_RATE_LIMIT_WORDS = ("SlowDown", "ServerBusy")
"""Codes of S3 and Azure, without the spaces that a reason phrase has."""
_STATUS_ERRORS: dict[int, type[StreamingError]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    410: ObjectNotFoundError,
}
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
# Names, not classes: importing the packages of all stores only to recognise their errors would be slow.
_NO_CREDENTIALS = (
    "ClientAuthenticationError",
    "ConfigFileNotFound",
    "DefaultCredentialsError",
    "LocalTokenNotFoundError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
_BAD_OPTIONS = (
    "InvalidConfig",
    "InvalidConfigError",
    "InvalidKeyFilePath",
    "InvalidPrivateKey",
    "InvalidRegionError",
    "ParamValidationError",
    "ProfileNotFound",
)
# Words in the responses of stores, in XML, JSON, plain text or a header.
_MISSING_WORDS = {
    "bucket": ("NoSuchBucket", "specified bucket does not exist", "ContainerNotFound", "BucketNotFound"),
    "object": ("NoSuchKey", "No such object", "specified key does not exist", "BlobNotFound", "ObjectNotFound"),
    "repository": ("RepoNotFound", "repository not found"),
    "revision": ("RevisionNotFound", "revision not found"),
    "entry": ("EntryNotFound",),
}
_QUOTA = re.compile(r"\br=0\b.*?\bt=(\d+)")
"""In the header RateLimit: the seconds until an exhausted quota is renewed."""


@dataclass(slots=True)
class Deadline:
    """The time by which a whole download must be complete."""

    seconds: float
    """Seconds from its first request on."""
    end: float | None = None
    """Time by the monotonic clock; None before the first request."""

    def begin(self) -> None:
        """Start the clock, unless it runs already."""
        if self.end is None:
            self.end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Return the remaining seconds."""
        return self.seconds if self.end is None else self.end - time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The attempts at one transfer, and the contents of its errors."""

    purpose: str
    """The action, with URLs masked: ``"download s3://bucket/key"``."""
    shown: str | None = None
    """The URL alone, masked."""
    options: Mapping[str, Any] = field(repr=False)
    """The storage options, whose texts are masked in errors."""
    total: int
    """Maximum number of attempts."""
    failure: type[StorageError]
    """The error once all attempts have failed."""
    timeout: float | None = None
    """Seconds per attempt, for errors; None for no limit, or for one that the errors of ``action`` report."""
    deadline: Deadline | None = None
    """The deadline of all of them, and of others that share it; None for no limit."""
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """More texts that are masked in errors."""
    store: str = ""
    """The scheme of the URL, for the hints of errors."""
    spent: bool = False
    """Whether all but the last were made just now, for another caller."""

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``, again while that may help.

        Raises:
            StreamingError: The last failure, with a class and a hint that fit it.
        """
        series = Series(self)
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - stores raise errors of any class; pause_after classifies them
                last = error
            threading.Event().wait(series.pause_after(last))

    async def run_async(self, action: Callable[[], Awaitable[_Result]]) -> _Result:
        """Like :meth:`run`, on an event loop."""
        series = Series(self)
        while True:
            try:
                return await action()
            except Exception as error:  # noqa: BLE001 - as above
                last = error
            await asyncio.sleep(series.pause_after(last))

    def error_after(self, last: Exception, kind: type[StreamingError] | None, count: int, late: bool) -> StreamingError:
        """Return the error to raise after the last attempt.

        Args:
            last: The error of the last attempt.
            kind: Its class, if another attempt would not help.
            count: Attempts so far.
            late: Whether there is no time for more.
        """
        cause = describe(last, self.options, self.hidden)
        if kind is not None:
            text = _PERMANENT[kind]
            if kind is ObjectNotFoundError:
                text = _MISSING.get(_what_is_missing(last) or "", text)
            elif kind is AccessDeniedError:
                text = _ACCESS_DENIED.get(self.store, text)
            problem, _, hint = text.format(option=option_of(self.options)).partition("; ")
            return kind(f"could not {self.purpose}: {problem} ({cause})", hint=hint or None, path=self.shown)
        times = "1 attempt" if count == 1 else f"{count} attempts"
        limit = "" if self.timeout is None else f" of up to {self.timeout:g} s"
        if late and self.deadline is not None:
            limit += f", within {self.deadline.seconds:.0f} s in all,"
        settings = " (download_retry, download_timeout)" if self.failure is DownloadError else ""
        check = "the network and the store"
        if _is_postponed(last):
            check = "which other programs send requests to the store, whose rate limit was exceeded"
        return self.failure(
            f"could not {self.purpose}: {times}{limit} failed, the last with {cause}",
            hint=f"check {check}, or allow more attempts or more time{settings}",
            path=self.shown,
        )


@dataclass(slots=True)
class Series:
    """The attempts at one transfer, one after another."""

    attempts: Attempts
    failed: int = 0
    """Attempts that failed."""
    postponed: int = 0
    """Attempts that a store refused because of its rate limit: it works, and takes them later."""

    def __post_init__(self) -> None:
        if self.attempts.spent:
            self.failed = self.attempts.total - 1

    def pause_after(self, last: Exception) -> float:
        """Return the seconds to wait before another attempt.

        Args:
            last: The error of the last attempt.

        Raises:
            StreamingError: There is no other attempt.
        """
        is_postponed = _is_postponed(last) and self.postponed < _MAX_POSTPONED and not self.attempts.spent
        self.postponed += is_postponed
        self.failed += not is_postponed
        of, count, kind = self.attempts, self.failed + self.postponed, _permanent_class(last)
        pause = _wait_seconds(count, _random.random()) + _requested_wait(last)
        late = of.deadline is not None and of.deadline.left() <= pause
        if kind is None and self.failed < of.total and not late:
            _logger.debug(
                "attempt %d of %d to %s %s, the next begins in %.1f s: %s",
                self.failed + is_postponed,
                of.total,
                of.purpose,
                "was postponed by the store" if is_postponed else "failed",
                pause,
                describe(last, of.options, of.hidden),
            )
            return pause
        if isinstance(last, IntegrityError):
            fix = getattr(last, "fix", "write the object and its index again")
            raise IntegrityError(f"{last.args[0]} (attempt {self.failed} of {of.total})", hint=fix, path=last.path)
        if isinstance(last, StreamingError):
            raise last
        raise of.error_after(last, kind, count, late) from shown_cause(last, of.options, of.hidden)


class PageError(IntegrityError):
    """An error for an HTML page instead of the object."""

    fix = "check the URL, and whether a proxy or a login page answers instead of the store"


def _is_postponed(error: BaseException) -> bool:
    """Return whether the store refused because of its rate limit, or says when to send the request again."""
    status = status_of(error)
    if status == _TOO_MANY:
        return True
    words = "".join(map(str, _causes(error))).replace(" ", "")
    return status == _UNAVAILABLE and (_requested_wait(error) > 0 or any(word in words for word in _RATE_LIMIT_WORDS))


def is_of_store(error: BaseException) -> bool:
    """Return whether a failure is of the whole store, not of one object: unreachable, silent, or its rate limit."""
    silent = (TimeoutError, ConnectionRefusedError, socket.gaierror)
    is_silent = any(isinstance(link, silent) or getattr(link, "errno", None) in _NO_ROUTE for link in chain_of(error))
    return is_silent or _is_postponed(error)


def _permanent_class(error: Exception) -> type[StreamingError] | None:
    """Return the class of a failure that another attempt would not change; None if one may succeed.

    Stores raise errors of any class, so those not known to be permanent count as temporary: 5xx and 429, resets,
    truncated bodies, timeouts, bytes that arrived damaged.
    """
    if isinstance(error, StreamingError):
        return None if isinstance(error, IntegrityError) else type(error)
    if isinstance(error, TimeoutError):
        return None
    if isinstance(error, ImportError):
        return MissingDependencyError
    status = status_of(error)
    if status is not None and (status in _TEMPORARY_STATUSES or status >= 500):
        return None
    if isinstance(error, FileNotFoundError):
        return _STATUS_ERRORS.get(status or 0, ObjectNotFoundError)  # the hub's filesystem raises it for refusals, too
    # gcsfs reports 403 only in the message.
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden") or _is_any(error, _NO_CREDENTIALS):
        return AccessDeniedError
    if status is not None:
        return _STATUS_ERRORS.get(status, StorageError)
    if isinstance(error, OSError):
        return None
    if isinstance(error, TypeError | ValueError | NotImplementedError) or _is_any(error, _BAD_OPTIONS):
        return ConfigError
    return None


def is_more_missing(error: FileNotFoundError) -> bool:
    """Return whether not only a directory is missing, but access, or its repository or revision."""
    names = ("RepositoryNotFoundError", "RevisionNotFoundError")
    return status_of(error) in (401, 403) or any(_is_any(link, names) for link in _causes(error))


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the store's response; None if the failure is another one.

    Only classes known to hold a response are read. aiohttp's errors for a truncated body, and for a response that is no
    HTTP, have a cause whose ``code`` is 400, which no server sent.
    """
    for link in _causes(error):
        response = getattr(link, "response", None)
        if link.__cause__ is not None and _is_any(link.__cause__, ("HttpProcessingError",)):
            return None
        if _is_any(link, ("ClientResponseError", "RefusedError")):  # aiohttp, and ours
            return int(getattr(link, "status", 0)) or None
        if _is_any(link, ("HttpError",)):  # gcsfs, whose code may be text
            code = str(getattr(link, "code", ""))
            return int(code) if code.isdigit() else None
        if _is_any(link, ("ClientError",)) and isinstance(response, dict):  # botocore
            status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status
        if _is_any(link, ("HttpResponseError", "HfHubHTTPError")) and response is not None:  # Azure's and the hub's
            return int(getattr(response, "status_code", 0)) or None
        if _is_any(link, ("ServiceError",)):  # OCI's
            return int(getattr(link, "status", 0)) or None
    return None


def _what_is_missing(error: BaseException) -> str | None:
    """Return the missing part by its name in ``_MISSING``, if the store reports it; else None."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        words = str(code or link)
        for what, tokens in _MISSING_WORDS.items():
            if any(token in words for token in tokens):
                return what
    return None


def _requested_wait(error: BaseException) -> float:
    """Return the seconds to wait that the store requested when it refused; 0 if it requested none."""
    for link in _causes(error):
        for name, value in headers_of(link).items():
            if str(name).lower() == "retry-after":
                return _parse_retry_after(str(value), time.time()) or 0.0
            if str(name).lower() == "ratelimit" and (quota := _QUOTA.search(str(value))):
                return min(float(quota[1]), _LONGEST_REQUESTED_WAIT)
    return 0.0


def _parse_retry_after(value: str, now: float) -> float | None:
    """Return the seconds of a Retry-After header, at most :data:`_LONGEST_REQUESTED_WAIT`; None if it has none.

    Args:
        value: Seconds, or a date as HTTP writes it.
        now: Seconds since 1970.
    """
    value = value.strip()
    if _RETRY_AFTER_SECONDS.fullmatch(value):
        seconds = float(value)
    else:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = date.replace(tzinfo=date.tzinfo or timezone.utc).timestamp() - now
    return min(max(seconds, 0.0), _LONGEST_REQUESTED_WAIT)


def _wait_seconds(failed_attempts: int, jitter: float) -> float:
    """Return the seconds to wait before the next attempt: doubling, up to half of it random, to spread out readers.

    For example after the third failure 1 to 2 seconds.

    Args:
        failed_attempts: Attempts made so far, at least 1.
        jitter: A random number in [0, 1).
    """
    longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (failed_attempts - 1))
    return longest * (1 + jitter) / 2


def longest_attempt(timeout: float, size: int) -> float:
    """Return the seconds that one attempt to transfer ``size`` bytes may take, with stalls of up to ``timeout``."""
    return timeout + size / SLOWEST_RATE


def longest_series(attempts: int, timeout: float, size: int = 0) -> float:
    """Return the seconds that a whole download may take, its deadline: all attempts, and the longest waits between.

    Args:
        attempts: Maximum number of attempts.
        timeout: Seconds that each may stall.
        size: Bytes of the object, all of which each attempt may fetch at the slowest rate.
    """
    waits = sum(_wait_seconds(failed, 1.0) + _LONGEST_REQUESTED_WAIT for failed in range(1, attempts))
    return attempts * longest_attempt(timeout, size) + waits


def headers_of(error: BaseException) -> Mapping[Any, Any]:
    """Return the headers of the response that an error of a store's client or of ours has; empty without one."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    return headers if isinstance(headers, Mapping) else {}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_any(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)


class StallClock:
    """The time of the last progress."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def mark(self) -> None:
        """Record that bytes arrived just now."""
        self.last = time.monotonic()

    def left(self, timeout: float) -> float:
        """Return the seconds until the last progress is ``timeout`` seconds ago."""
        return self.last + timeout - time.monotonic()


async def watched(work: Coroutine[Any, Any, _Result], clock: StallClock, timeout: float, longest: float) -> _Result:
    """Await a coroutine; cancel it once it has stalled, or takes too long in all.

    Args:
        work: The coroutine.
        clock: The clock that it marks.
        timeout: Seconds without progress.
        longest: Seconds in all.

    Raises:
        TimeoutError: It was cancelled.
    """
    end = time.monotonic() + longest
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            # Bytes that arrived while another transfer kept this thread busy are read before the check.
            await asyncio.wait({task}, timeout=_left(clock, timeout, end))
            if not task.done():
                _check_progress(clock, timeout, end, longest)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs nothing


def run_watched(work: Callable[[], _Result], clock: StallClock, timeout: float, longest: float) -> _Result:
    """Run a function in a thread; abandon it once it has stalled, or takes too long in all.

    The thread cannot be stopped. It ends with the process at the latest, and until then must do no harm.

    Args:
        work: The function.
        clock: The clock that it marks.
        timeout: Seconds without progress.
        longest: Seconds in all.

    Raises:
        TimeoutError: It was abandoned.
    """
    done, outcome = threading.Event(), list[Any]()
    end = time.monotonic() + longest

    def run() -> None:
        try:
            outcome.extend((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            outcome[:] = (None, error)
        done.set()

    threading.Thread(target=run, name="lightning-streaming-transfer", daemon=True).start()
    while not done.wait(_left(clock, timeout, end)):
        _check_progress(clock, timeout, end, longest)
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _left(clock: StallClock, timeout: float, end: float) -> float:
    return max(0.0, min(clock.left(timeout), end - time.monotonic(), _LONGEST_SYSTEM_WAIT))


def _check_progress(clock: StallClock, timeout: float, end: float, longest: float) -> None:
    if clock.left(timeout) <= 0:
        raise TimeoutError(f"nothing arrived for {timeout:g} s")
    if time.monotonic() >= end:
        raise TimeoutError(f"not done after {longest:g} s")
