"""Caches of a tool's own: what it fetches leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from lightning_streaming.cache.config import CACHE_VARIABLE


@contextmanager
def own_caches() -> Iterator[None]:
    """Keep all that is fetched in a directory of our own, which is gone in the end."""
    before = os.environ.get(CACHE_VARIABLE)
    with TemporaryDirectory(prefix="lightning_streaming_", ignore_cleanup_errors=True) as scratch:
        os.environ[CACHE_VARIABLE] = scratch
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before
