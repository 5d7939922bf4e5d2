"""How often a transfer is tried, how long to wait before each attempt, and when one has stalled."""

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
# Its own generator: the random numbers of the training program are not ours to draw.
_random = random.SystemRandom()

_LONGEST_WAIT = 30.0
"""Seconds; no wait between two attempts is longer, unless the store asks for it."""
_LONGEST_ASKED_WAIT = 60.0
"""Seconds; a store that asks for more is asked again after this long."""
_FIRST_WAIT = 0.5
_MOST_PUT_OFF = 8
"""Times that a store may put off one transfer without it counting as a failed attempt: about a minute of waits."""
SLOWEST_RATE = 4096
"""Bytes per second; a transfer that goes on slower than this ends at last."""
_RETRY_AFTER_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?")  # fractions are not in the standard, but some send them
_FAREWELL_SECONDS = 1.0
_LONGEST_SYSTEM_WAIT = 3600.0  # the system takes no infinite ones

_WAYS_OUT: dict[type[StreamingError], str] = {
    ObjectNotFoundError: "not found; check the bucket, the path and the endpoint",
    AccessDeniedError: (
        "access denied; check the credentials in {option} or in the environment and what they may read, "
        "or say that none are needed, for example with anon: true"
    ),
    ConfigError: "the request could not be made; check the URL and {option}",
    MissingDependencyError: "a package is missing; install it with pip",
    StorageError: "the store refused, and would refuse again",
}
_ACCESS_WAYS_OUT = {
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
"""The same for stores whose credentials have names of their own, by scheme."""
_MISSING = {
    "bucket": "the bucket does not exist; check its name, the endpoint and the account",
    "object": "the bucket has no such object; check the path",
    "repository": "the hub has no such repository, or the token may not read it; check USER/NAME, datasets/ before it",
    "revision": "the repository has no such revision; check what follows the @",
    "entry": "the repository has no such file at this revision; check the path",
}
_TOO_MANY, _UNAVAILABLE = 429, 503
_HEALING_STATUSES = (408, 425, _TOO_MANY)
_PUT_OFF_WORDS = ("SlowDown", "ServerBusy")
"""Of S3 and Azure, without spaces: a reason phrase has them."""
_STATUS_ERRORS: dict[int, type[StreamingError]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    410: ObjectNotFoundError,
}
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
"""What the system says where nothing leads to a store."""
# Names, not classes: importing every package a store might need only to recognise its errors would be slow.
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
# What stores write into their answer, in XML, JSON, plain text or a header.
_MISSING_WORDS = {
    "bucket": ("NoSuchBucket", "specified bucket does not exist", "ContainerNotFound", "BucketNotFound"),
    "object": ("NoSuchKey", "No such object", "specified key does not exist", "BlobNotFound", "ObjectNotFound"),
    "repository": ("RepoNotFound", "repository not found"),
    "revision": ("RevisionNotFound", "revision not found"),
    "entry": ("EntryNotFound",),
}
_QUOTA = re.compile(r"\br=0\b.*?\bt=(\d+)")
"""Of the header RateLimit: the seconds until a quota that is used up is renewed."""


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
    shown: str | None = None
    """The URL alone, masked."""
    options: Mapping[str, Any] = field(repr=False)
    """The storage options, whose texts are kept out of errors."""
    total: int
    """How many there may be."""
    failure: type[StorageError]
    """The error once all attempts have failed."""
    timeout: float | None = None
    """Seconds that each attempt is given, as errors tell it; None for no limit, or for one that ``action`` tells of."""
    deadline: Deadline | None = None
    """When all of them, and others that share it, must be done; None for no limit."""
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """More texts that are kept out of errors."""
    store: str = ""
    """The scheme of the URL, for what errors advise."""
    spent: bool = False
    """Whether all but the last were made just now, for another caller."""

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``, again while that may help.

        Raises:
            StreamingError: The last failure, in a class and with words that say what to do about it.
        """
        series = Series(self)
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - stores raise what they like; it is judged below
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

    def error_after(self, last: Exception, kind: type[StreamingError] | None, made: int, late: bool) -> StreamingError:
        """The error that says that there is no other attempt.

        Args:
            last: What the last one raised.
            kind: What it is, if trying again is of no use.
            made: How many there were.
            late: Whether there is no time for more.
        """
        cause = describe(last, self.options, self.hidden)
        if kind is not None:
            wrong, _, hint = self._wrong_and_hint(last, kind).format(option=option_of(self.options)).partition("; ")
            return kind(f"could not {self.purpose}: {wrong} ({cause})", hint=hint or None, path=self.shown)
        times = "1 attempt" if made == 1 else f"{made} attempts"
        limit = "" if self.timeout is None else f" of up to {self.timeout:g} s"
        if late and self.deadline is not None:
            limit += f", within {self.deadline.seconds:.0f} s in all,"
        settings = " (download_retry, download_timeout)" if self.failure is DownloadError else ""
        check = "the network and the store"
        if _is_put_off(last):
            check = "who else asks the store as often, as it refuses what is beyond its limit"
        return self.failure(
            f"could not {self.purpose}: {times}{limit} failed, the last with {cause}",
            hint=f"check {check}, or allow more attempts or more time{settings}",
            path=self.shown,
        )

    def _wrong_and_hint(self, last: Exception, kind: type[StreamingError]) -> str:
        if kind is ObjectNotFoundError:
            return _MISSING.get(_what_is_missing(last) or "", _WAYS_OUT[kind])
        if kind is AccessDeniedError:
            return _ACCESS_WAYS_OUT.get(self.store, _WAYS_OUT[kind])
        return _WAYS_OUT[kind]


@dataclass(slots=True)
class Series:
    """The attempts at one transfer, one after another."""

    attempts: Attempts
    """How many there may be."""
    failed: int = 0
    """How many have failed."""
    put_off: int = 0
    """How many were refused by a store that is asked too often: it is there, and takes them later."""

    def __post_init__(self) -> None:
        if self.attempts.spent:
            self.failed = self.attempts.total - 1

    def pause_after(self, last: Exception) -> float:
        """Seconds to wait before another attempt.

        Args:
            last: What the last one raised.

        Raises:
            StreamingError: There is to be no other.
        """
        is_put_off = _is_put_off(last) and self.put_off < _MOST_PUT_OFF and not self.attempts.spent
        self.put_off += is_put_off
        self.failed += not is_put_off
        of, made, kind = self.attempts, self.failed + self.put_off, _final_class(last)
        pause = _wait_seconds(made, _random.random()) + _asked_wait(last)
        late = of.deadline is not None and of.deadline.left() <= pause
        if kind is None and self.failed < of.total and not late:
            came_of_it = "was put off by the store" if is_put_off else "failed"
            told = "attempt %d of %d to %s %s, the next begins in %.1f s: %s"
            shown = describe(last, of.options, of.hidden)
            _logger.debug(told, self.failed + is_put_off, of.total, of.purpose, came_of_it, pause, shown)
            return pause
        if isinstance(last, IntegrityError):
            fix = getattr(last, "fix", "write the object and its index again")
            raise IntegrityError(f"{last.args[0]} (attempt {self.failed} of {of.total})", hint=fix, path=last.path)
        if isinstance(last, StreamingError):
            raise last
        raise of.error_after(last, kind, made, late) from shown_cause(last, of.options, of.hidden)


class PageError(IntegrityError):
    """An answer with a page for people in place of the object."""

    fix = "check the URL, and whether a proxy or a login page answers in place of the store"


def _is_put_off(error: BaseException) -> bool:
    """Whether the store refused because it is asked too often, or says when to come again."""
    status = status_of(error)
    if status == _TOO_MANY:
        return True
    words = "".join(map(str, _causes(error))).replace(" ", "")
    return status == _UNAVAILABLE and (_asked_wait(error) > 0 or any(word in words for word in _PUT_OFF_WORDS))


def is_of_store(error: BaseException) -> bool:
    """Whether a failure is of the whole store: not reached, silent, or asked too often; another object would wait, too.

    Any other answer says something of the one object that was asked for.
    """
    silent = (TimeoutError, ConnectionRefusedError, socket.gaierror)
    is_silent = any(isinstance(one, silent) or getattr(one, "errno", None) in _NO_WAY for one in chain_of(error))
    return is_silent or _is_put_off(error)


def _final_class(error: Exception) -> type[StreamingError] | None:
    """What kind of failure this is, if trying again is of no use; None if another attempt may heal it.

    Stores raise what they like, so whatever is not known to be final counts as passing: 5xx and 429, resets,
    truncated bodies, timeouts, bytes that arrived damaged.
    """
    if isinstance(error, StreamingError):
        return None if isinstance(error, IntegrityError) else type(error)
    if isinstance(error, TimeoutError):
        return None
    if isinstance(error, ImportError):
        return MissingDependencyError
    status = status_of(error)
    if status is not None and (status in _HEALING_STATUSES or status >= 500):
        return None
    if isinstance(error, FileNotFoundError):
        return _STATUS_ERRORS.get(status or 0, ObjectNotFoundError)  # the hub's filesystem takes a refusal for one
    # gcsfs tells 403 only in words.
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
    """Whether there is more missing than a directory: access, or the repository or revision that it would be in."""
    names = ("RepositoryNotFoundError", "RevisionNotFoundError")
    return status_of(error) in (401, 403) or any(_is_any(link, names) for link in _causes(error))


def status_of(error: BaseException) -> int | None:
    """The HTTP status the store answered with, if that is what failed.

    Only classes known to carry the store's answer are asked. aiohttp's errors for a truncated body, and for an answer
    that is no HTTP, have a cause whose ``code`` is 400, which no server ever sent.
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
    """``"bucket"`` or ``"object"`` if the store told which of them there is none of; None if it did not."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        words = str(code or link)
        for what, tokens in _MISSING_WORDS.items():
            if any(token in words for token in tokens):
                return what
    return None


def _asked_wait(error: BaseException) -> float:
    """Seconds that the store asked for when it refused; 0 if it did not."""
    for link in _causes(error):
        for name, value in headers_of(link).items():
            if str(name).lower() == "retry-after":
                return _parse_retry_after(str(value), time.time()) or 0.0
            if str(name).lower() == "ratelimit" and (quota := _QUOTA.search(str(value))):
                return min(float(quota[1]), _LONGEST_ASKED_WAIT)
    return 0.0


def _parse_retry_after(value: str, now: float) -> float | None:
    """Seconds to wait by a Retry-After header, at most :data:`_LONGEST_ASKED_WAIT`.

    Args:
        value: Seconds, or a date as HTTP writes it.
        now: Seconds since 1970.

    Returns:
        Seconds; None for a value that is neither.
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
    return min(max(seconds, 0.0), _LONGEST_ASKED_WAIT)


def _wait_seconds(failed_attempts: int, jitter: float) -> float:
    """Seconds to wait before the next attempt: doubling, up to half of it random, so that readers do not march in step.

    For example after the third failure 1 to 2 seconds.

    Args:
        failed_attempts: Attempts made so far, at least 1.
        jitter: A random number in [0, 1).
    """
    longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (failed_attempts - 1))
    return longest * (1 + jitter) / 2


def longest_attempt(timeout: float, size: int) -> float:
    """Seconds that one attempt to transfer ``size`` bytes may take, stalling for up to ``timeout`` seconds."""
    return timeout + size / SLOWEST_RATE


def longest_series(attempts: int, timeout: float, size: int = 0) -> float:
    """Seconds that a whole download may take: its one deadline.

    Args:
        attempts: How many there may be.
        timeout: Seconds that each may stall.
        size: Bytes of the object, of which each attempt may fetch all, slowly.

    Returns:
        Seconds for the attempts and for the waits between them, as long as a store may ask for.
    """
    waits = sum(_wait_seconds(failed, 1.0) + _LONGEST_ASKED_WAIT for failed in range(1, attempts))
    return attempts * longest_attempt(timeout, size) + waits


def headers_of(error: BaseException) -> Mapping[Any, Any]:
    """The headers of an answer that became an error of a store's client or of ours; none if there was no answer."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    return headers if isinstance(headers, Mapping) else {}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_any(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)


class StallClock:
    """When something last arrived."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def mark(self) -> None:
        """Something arrived just now."""
        self.last = time.monotonic()

    def left(self, timeout: float) -> float:
        """Seconds until it is ``timeout`` seconds ago."""
        return self.last + timeout - time.monotonic()


async def watched(work: Coroutine[Any, Any, _Result], clock: StallClock, timeout: float, longest: float) -> _Result:
    """Await some work; cancel it once it has stalled, or takes too long in all.

    Args:
        work: What to await.
        clock: Marked by it.
        timeout: Seconds without progress.
        longest: Seconds in all.

    Raises:
        TimeoutError: It was cancelled.
    """
    end = time.monotonic() + longest
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            # What arrived while another transfer kept this thread busy is read before the judgement.
            await asyncio.wait({task}, timeout=_left(clock, timeout, end))
            if not task.done():
                _judge(clock, timeout, end, longest)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_FAREWELL_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # seen, though perhaps of no interest any more


def run_watched(work: Callable[[], _Result], clock: StallClock, timeout: float, longest: float) -> _Result:
    """Run some work in a thread; abandon it once it has stalled, or takes too long in all.

    The thread cannot be stopped. It dies with the process at the latest, and what it goes on to do must do no harm.

    Args:
        work: What to run.
        clock: Marked by it.
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
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            outcome[:] = (None, error)
        done.set()

    threading.Thread(target=run, name="lightning-streaming-transfer", daemon=True).start()
    while not done.wait(_left(clock, timeout, end)):
        _judge(clock, timeout, end, longest)
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _left(clock: StallClock, timeout: float, end: float) -> float:
    return max(0.0, min(clock.left(timeout), end - time.monotonic(), _LONGEST_SYSTEM_WAIT))


def _judge(clock: StallClock, timeout: float, end: float, longest: float) -> None:
    if clock.left(timeout) <= 0:
        raise TimeoutError(f"nothing arrived for {timeout:g} s")
    if time.monotonic() >= end:
        raise TimeoutError(f"not done after {longest:g} s")
