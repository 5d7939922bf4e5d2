"""Keeps secrets out of error messages, and out of the tracebacks that are printed with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from lightning_streaming.errors import StorageError
from lightning_streaming.storage.urls import is_url, mask_url
from lightning_streaming.storage.variables import expand_known

_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_OPTIONS_TO_SHOW = ("endpoint_url", "region_name")
_SHORTEST_SECRET = 4
# Values in a query that are shorter are rather names, like "train", which occur elsewhere too.
_SHORTEST_QUERY_SECRET = 12


def redact(text: str, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> str:
    """Mask every URL in a text, every text that storage options hold, and more.

    All option values count as secret, whatever their name, except those that say where the store is. What they take
    from environment variables is masked as well.

    Args:
        text: What to show.
        options: Storage options.
        hidden: More texts to mask.
    """
    text = _URL_IN_TEXT.sub(lambda match: mask_url(match[0]), text)
    for secret in sorted({*_texts(options), *_texts(expand_known(options)), *hidden}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def secrets_of(url: str) -> tuple[str, ...]:
    """What is secret in a URL: its password, its query and the long values in that, as written and decoded."""
    if not is_url(url):
        return ()
    userinfo, mark, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    query = urlsplit(url).query
    found = [userinfo.partition(":")[2], query] if mark else [query]
    found = [text for text in found if len(text) >= _SHORTEST_SECRET]
    found += [value for _, value in parse_qsl(query) if len(value) >= _SHORTEST_QUERY_SECRET]
    return tuple({*found, *map(unquote, found)})


def shown_cause(error: BaseException, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> BaseException:
    """The error itself if nothing in its chain needs redacting, else a redacted stand-in without the chain.

    A traceback prints the whole chain, and a DataLoader worker sends it as text: masking our own message is not enough.
    """
    texts = [text for link in _chain_of(error) for text in (str(link), repr(link))]
    if all(redact(text, options, hidden) == text for text in texts):
        return error
    return StorageError(describe(error, options, hidden))


def describe(error: BaseException, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> str:
    """Class and words of an error, redacted."""
    return redact(f"{type(error).__name__}: {error}".rstrip(": "), options, hidden)


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
