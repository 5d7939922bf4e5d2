"""Which failures another attempt may heal, and how long to wait before it. Pure: nothing here waits or transfers."""

from __future__ import annotations

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage.retry_after import LONGEST_ASKED_WAIT

LONGEST_WAIT = 30.0
"""Seconds; no wait between two attempts is longer, unless the store asks for it."""
_FIRST_WAIT = 0.5
SLOWEST_RATE = 4096
"""Bytes per second; a transfer that goes on slower than this ends at last."""

_HEALING_STATUSES = (408, 425, 429)
_STATUS_ERRORS: dict[int, type[StreamingError]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    410: ObjectNotFoundError,
}
# Names, not classes: importing every package a store might need only to recognise its errors would be slow.
_NO_CREDENTIALS = (
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
_BAD_OPTIONS = ("InvalidConfigError", "InvalidRegionError", "ParamValidationError", "ProfileNotFound")
# What stores write into their answer; S3 and GCS, in XML, JSON or plain text.
_MISSING_WORDS = {
    "bucket": ("NoSuchBucket", "specified bucket does not exist"),
    "object": ("NoSuchKey", "No such object", "specified key does not exist"),
}


def final_class(error: Exception) -> type[StreamingError] | None:
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
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError
    # gcsfs tells 403 only in words.
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden") or _is_any(error, _NO_CREDENTIALS):
        return AccessDeniedError
    status = status_of(error)
    if status is not None:
        healing = status in _HEALING_STATUSES or status >= 500
        return None if healing else _STATUS_ERRORS.get(status, StorageError)
    if isinstance(error, OSError):
        return None
    if isinstance(error, TypeError | ValueError | NotImplementedError) or _is_any(error, _BAD_OPTIONS):
        return ConfigError
    return None


def status_of(error: BaseException) -> int | None:
    """The HTTP status the store answered with, if that is what failed.

    Only classes known to carry the store's answer are asked. aiohttp's error for a truncated body has a cause whose
    ``code`` is 400, which no server ever sent.
    """
    link: BaseException | None = error
    while link is not None:
        response = getattr(link, "response", None)
        if _is_any(link, ("ClientResponseError", "RefusedError")):  # aiohttp, and ours
            return int(getattr(link, "status", 0)) or None
        if _is_any(link, ("HttpError",)):  # gcsfs, whose code may be text
            code = str(getattr(link, "code", ""))
            return int(code) if code.isdigit() else None
        if _is_any(link, ("ClientError",)) and isinstance(response, dict):  # botocore
            status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status
        link = link.__cause__
    return None


def what_is_missing(error: BaseException) -> str | None:
    """``"bucket"`` or ``"object"`` if the store told which of them there is none of; None if it did not."""
    link: BaseException | None = error
    while link is not None:
        response = getattr(link, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        words = str(code or link)
        for what, tokens in _MISSING_WORDS.items():
            if any(token in words for token in tokens):
                return what
        link = link.__cause__
    return None


def wait_seconds(failed_attempts: int, jitter: float) -> float:
    """Seconds to wait before the next attempt: doubling, up to half of it random, so that readers do not march in step.

    For example after the third failure 1 to 2 seconds.

    Args:
        failed_attempts: Attempts made so far, at least 1.
        jitter: A random number in [0, 1).
    """
    longest = min(LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (failed_attempts - 1))
    return longest * (1 + jitter) / 2


def longest_attempt(timeout: float, size: int) -> float:
    """Seconds that one attempt to transfer ``size`` bytes may take, stalling for up to ``timeout`` seconds."""
    return timeout + size / SLOWEST_RATE


def longest_series(retry: int, timeout: float, size: int = 0) -> float:
    """Seconds that a whole download may take: its one deadline.

    Args:
        retry: Attempts in total.
        timeout: Seconds that each may stall.
        size: Bytes of the object, of which each attempt may fetch all, slowly.

    Returns:
        Seconds for the attempts and for the waits between them, as long as a store may ask for.
    """
    waits = sum(wait_seconds(failed, 1.0) + LONGEST_ASKED_WAIT for failed in range(1, retry))
    return retry * longest_attempt(timeout, size) + waits


def _is_any(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)
