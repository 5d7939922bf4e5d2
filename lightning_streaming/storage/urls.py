"""URLs: which locations are local, how they are joined, shown, and told apart from a signature. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote_plus

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_LOCAL_SCHEMES = ("file", "local")
HTTP_SCHEMES = ("http", "https")
AZURE_SCHEMES = ("az", "abfs", "abfss")
HUB_SCHEMES = ("hf",)
OCI_SCHEMES = ("oci",)
# In these the part before "@" is no user: abfs://container@account.dfs.core.windows.net/path, oci://bucket@namespace/path,
# hf://datasets/USER/NAME@revision/path.
_USERLESS_SCHEMES = (*AZURE_SCHEMES, "wasb", "wasbs", *OCI_SCHEMES, *HUB_SCHEMES)
_HOSTS_WITH_COLONS = ("[", "arn:")
_PORT = re.compile(r"\d*")
_SIGNED_BY = {
    "x-amz-signature": "x-amz-",
    "x-goog-signature": "x-goog-",
    "q-signature": "q-",
}
"""Of a parameter that is a signature: what the names of those that go with it begin with. All in lower case."""
_SIGNED_WITH = {
    # S3 and GCS of old, CloudFront, OSS
    "signature": (
        "signature expires awsaccesskeyid googleaccessid ossaccesskeyid security-token x-amz-security-token "
        "key-pair-id policy hash-algorithm"
    ),
    # shared access signatures of Azure
    "sig": ("sig sv st se sr sp ss srt spr sip si sdd skoid sktid skt ske sks skv saoid suoid scid sduoid skdutid"),
}
"""Of a parameter that is a signature: the names of those that go with it."""


def scheme_of(location: str) -> str:
    """The scheme in lower case, ``"s3"`` of ``s3://bucket/key``; ``"file"`` for a plain path."""
    match = _SCHEME.match(location)
    return match[1].lower() if match else "file"


def store_of(location: str) -> str:
    """The scheme, but ``"az"`` for every one of Azure's."""
    scheme = scheme_of(location)
    return "az" if scheme in AZURE_SCHEMES else scheme


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
    if scheme_of(url) in HTTP_SCHEMES:
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
    if scheme.lower() in _USERLESS_SCHEMES or not is_url(url):
        return ""
    if "@" not in host and not host.startswith(_HOSTS_WITH_COLONS) and not _PORT.fullmatch(host.partition(":")[2]):
        host = re.split("[?#]", rest, maxsplit=1)[0]
    return host.rpartition("@")[0]


def without_user(url: str) -> str:
    """The URL without user and password."""
    scheme, separator, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    if scheme.lower() not in _USERLESS_SCHEMES:
        host = host.rpartition("@")[2]
    return scheme + separator + host + path


def without_signature(query: str) -> str:
    """What a query says but for a signature of a known kind, and what goes with that.

    Parameters of these names stay where there is no signature: there they may select the data.

    Args:
        query: What follows the question mark of a URL.
    """
    pieces = query.split("&")
    names = [unquote_plus(piece.partition("=")[0]).lower() for piece in pieces]
    begins = tuple(begin for kind, begin in _SIGNED_BY.items() if kind in names)
    signed = {name for kind, all_of in _SIGNED_WITH.items() if kind in names for name in all_of.split()}
    return "&".join(
        piece for piece, name in zip(pieces, names, strict=True) if name not in signed and not name.startswith(begins)
    )
