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

LONGEST_WAIT = 30.0
"""Seconds; no wait between two attempts is longer."""
_FIRST_WAIT = 0.5

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
        if _is_any(link, ("ClientResponseError",)):  # aiohttp
            return int(getattr(link, "status", 0)) or None
        if _is_any(link, ("HttpError",)):  # gcsfs, whose code may be text
            code = str(getattr(link, "code", ""))
            return int(code) if code.isdigit() else None
        if _is_any(link, ("ClientError",)) and isinstance(response, dict):  # botocore
            status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status
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


def longest_series(retry: int, timeout: float) -> float:
    """Seconds that ``retry`` attempts of ``timeout`` seconds each may take, with the waits between them."""
    return retry * timeout + sum(wait_seconds(failed, 1.0) for failed in range(1, retry))


def _is_any(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)
