"""Keeps secrets out of error messages, and out of the tracebacks that are printed with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_streaming.errors import StorageError
from lightning_streaming.storage.urls import mask_url

_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_OPTIONS_TO_SHOW = ("endpoint_url", "region_name")
_SHORTEST_SECRET = 4


def redact(text: str, options: Mapping[str, Any]) -> str:
    """Mask every URL in a text, and every text that storage options hold.

    All option values count as secret, whatever their name, except those that say where the store is.
    """
    text = _URL_IN_TEXT.sub(lambda match: mask_url(match[0]), text)
    for secret in sorted(_texts(options), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def shown_cause(error: BaseException, options: Mapping[str, Any]) -> BaseException:
    """The error itself if nothing in its chain needs redacting, else a redacted stand-in without the chain.

    A traceback prints the whole chain, and a DataLoader worker sends it as text: masking our own message is not enough.
    """
    texts = [text for link in _chain_of(error) for text in (str(link), repr(link))]
    if all(redact(text, options) == text for text in texts):
        return error
    return StorageError(describe(error, options))


def describe(error: BaseException, options: Mapping[str, Any]) -> str:
    """Class and words of an error, redacted."""
    return redact(f"{type(error).__name__}: {error}".rstrip(": "), options)


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and all that a traceback would print with it."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def _texts(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, str) and len(value) >= _SHORTEST_SECRET and name not in _OPTIONS_TO_SHOW:
        yield value
