"""Locations: which are local, how they are joined, and how they are shown to people."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning_streaming.storage.signatures import without_signature
from lightning_streaming.storage.variables import expand_known

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_LOCAL_SCHEMES = ("file", "local")
_HTTP_SCHEMES = ("http", "https")
# In these the part before "@" names a container, as in abfs://container@account.dfs.core.windows.net/path.
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
_HOSTS_WITH_COLONS = ("[", "arn:")
_PORT = re.compile(r"\d*")


def scheme_of(location: str) -> str:
    """The scheme in lower case, ``"s3"`` of ``s3://bucket/key``; ``"file"`` for a plain path."""
    match = _SCHEME.match(location)
    return match[1].lower() if match else "file"


def is_url(location: str) -> bool:
    """Whether a location is on a store, like ``s3://bucket/key``; a plain path and ``file://`` are local."""
    return scheme_of(location) not in _LOCAL_SCHEMES


def local_path(location: str) -> Path | None:
    """The path of a local location, with ``~`` expanded; None for one on a store."""
    if is_url(location):
        return None
    match = _SCHEME.match(location)
    return Path(location[match.end() :] if match else location).expanduser()


def join_url(url: str, *parts: str) -> str:
    """Join names to the URL or path of a directory.

    Over HTTP the query stays at the end, where the server looks for it, and names are quoted: ``join_url(
    "https://host/data?sig=x", "a b.mds")`` is ``https://host/data/a%20b.mds?sig=x``.
    """
    query = ""
    if scheme_of(url) in _HTTP_SCHEMES:
        url, mark, rest = url.partition("?")
        query, parts = mark + rest, tuple(quote(part) for part in parts)
    match = _SCHEME.match(url)
    start = url[: match.end()] if match else ""
    return start + "/".join([url[len(start) :].rstrip("/"), *(part.strip("/") for part in parts if part)]) + query


def mask_url(url: str) -> str:
    """The URL as it may be shown: without user, password, query and fragment. A local path is shown as it is."""
    if not is_url(url):
        return url
    scheme, separator, rest = url.partition("://")
    user = user_of(url)
    return scheme + separator + re.split("[?#]", rest[len(user) + 1 :] if user else rest, maxsplit=1)[0]


def user_of(url: str) -> str:
    """User and password as a URL has them before its "@"; "" if it has none.

    A password that should have been quoted, because there is "/" in it, is found as well.
    """
    scheme, _, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if scheme.lower() in _CONTAINER_SCHEMES or not is_url(url):
        return ""
    if "@" not in host and not host.startswith(_HOSTS_WITH_COLONS) and not _PORT.fullmatch(host.partition(":")[2]):
        host = re.split("[?#]", rest, maxsplit=1)[0]
    return host.rpartition("@")[0]


def location_key(location: str, options: Mapping[str, Any]) -> str:
    """A text that differs where data may differ: for telling locations apart, never for showing.

    User and password are left out. The query stays in, because it may select the data; but over HTTP without what signs
    it, which is another one each time that it is renewed. The endpoint and the account
    stay in, because ``s3://data`` is another bucket on another endpoint.

    Args:
        location: URL or path; a path is made absolute.
        options: The storage options it is opened with.
    """
    path = local_path(location)
    if path is not None:
        return os.path.normpath(path.absolute())
    place = [endpoint_of(location, options), expand_known(options).get("account_name")]
    shown = _without_user(location)
    if scheme_of(location) in _HTTP_SCHEMES:
        start, _, query = shown.partition("?")
        query = without_signature(query.partition("#")[0])
        shown = f"{start.rstrip('/')}?{query}" if query else start
    return "\n".join([shown.rstrip("/"), *(str(part) for part in place if part)])


def endpoint_of(url: str, options: Mapping[str, Any]) -> str | None:
    """The endpoint that storage options or AWS variables choose for a URL; None for the store's own."""
    options = expand_known(options)
    chosen = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    if chosen is None and scheme_of(url) in ("s3", "s3a"):
        chosen = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return chosen


def _without_user(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    if scheme.lower() not in _CONTAINER_SCHEMES:
        host = host.rpartition("@")[2]
    return scheme + separator + host + path
