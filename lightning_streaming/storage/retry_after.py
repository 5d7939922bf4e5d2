"""What a store says about when to come back. Pure but for :func:`asked_wait`, which looks at the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Any

_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?")  # fractions are not in the standard, but some send them
LONGEST_ASKED_WAIT = 60.0
"""Seconds; a store that asks for more is asked again after this long."""


def parse_retry_after(value: str, now: float) -> float | None:
    """Seconds to wait by a Retry-After header, at most :data:`LONGEST_ASKED_WAIT`.

    Args:
        value: Seconds, or a date as HTTP writes it.
        now: Seconds since 1970.

    Returns:
        Seconds; None for a value that is neither.
    """
    value = value.strip()
    if _SECONDS.fullmatch(value):
        seconds = float(value)
    else:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = date.replace(tzinfo=date.tzinfo or timezone.utc).timestamp() - now
    return min(max(seconds, 0.0), LONGEST_ASKED_WAIT)


def asked_wait(error: BaseException) -> float:
    """Seconds that the store asked for when it refused; 0 if it did not."""
    link: BaseException | None = error
    while link is not None:
        for name, value in _headers_of(link).items():
            if str(name).lower() == "retry-after":
                return parse_retry_after(str(value), time.time()) or 0.0
        link = link.__cause__
    return 0.0


def _headers_of(error: BaseException) -> Mapping[Any, Any]:
    """The headers of an answer that became an error of aiohttp, of botocore or of ours."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None)
    return headers if isinstance(headers, Mapping) else {}
