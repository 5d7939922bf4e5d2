"""URLs: local or remote, joined, masked, compared without their signatures, and split into directory and file pattern.

Pure: nothing here opens a file or a connection. A location may name files of a directory by wildcards or by one name:

s3://bucket/corpus/train-*.parquet       train-*.parquet of s3://bucket/corpus
data/**/*.tar                            **/*.tar of data, at any depth
data/{train,extra}-{00..07}.tar          16 names
https://host/data/rows.parquet?sig=x     rows.parquet of https://host/data?sig=x
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from urllib.parse import quote, unquote, unquote_plus

from lightning_streaming.errors import ConfigError

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
"""Signature parameters to the prefix of the parameters that belong to them. All in lower case."""
_SIGNED_WITH = {
    # S3 and GCS of old, CloudFront, OSS
    "signature": (
        "signature expires awsaccesskeyid googleaccessid ossaccesskeyid security-token x-amz-security-token "
        "key-pair-id policy hash-algorithm"
    ),
    # shared access signatures of Azure
    "sig": ("sig sv st se sr sp ss srt spr sip si sdd skoid sktid skt ske sks skv saoid suoid scid sduoid skdutid"),
}
"""Signature parameters to the names of the parameters that belong to them."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_NAMES = 1_000_000
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_CLASS = re.compile(r"\[(?:![^]/]|[^]!/])[^]/]*\]")
_PIECES = re.compile(rf"(\*\*/|\*\*|\*|\?|{_CLASS.pattern})")


def scheme_of(location: str) -> str:
    """Return the scheme in lower case, ``"s3"`` for ``s3://bucket/key``; ``"file"`` for a plain path."""
    match = _SCHEME.match(location)
    return match[1].lower() if match else "file"


def store_of(location: str) -> str:
    """Return the scheme, but ``"az"`` for each of Azure's."""
    scheme = scheme_of(location)
    return "az" if scheme in AZURE_SCHEMES else scheme


def is_url(location: str) -> bool:
    """Return whether a location is on a store, like ``s3://bucket/key``; a plain path and ``file://`` are local."""
    return scheme_of(location) not in _LOCAL_SCHEMES


def local_path(location: str) -> Path | None:
    """Return the path of a local location, with ``~`` expanded; None for one on a store."""
    if is_url(location):
        return None
    match = _SCHEME.match(location)
    return Path(location[match.end() :] if match else location).expanduser()


def join_url(url: str, *parts: str) -> str:
    """Join names to the URL or path of a directory.

    Over HTTP the query stays at the end, where the server expects it, and names are quoted: ``join_url(
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
    """Return a URL without user, password, query and fragment, to show it; a local path as it is."""
    if not is_url(url):
        return url
    scheme, separator, rest = url.partition("://")
    user = user_of(url)
    return scheme + separator + re.split("[?#]", rest[len(user) + 1 :] if user else rest, maxsplit=1)[0]


def user_of(url: str) -> str:
    """Return user and password as a URL has them before its "@"; "" if it has none.

    A password that contains "/", and should have been quoted, is found as well.
    """
    scheme, _, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if scheme.lower() in _USERLESS_SCHEMES or not is_url(url):
        return ""
    if "@" not in host and not host.startswith(_HOSTS_WITH_COLONS) and not _PORT.fullmatch(host.partition(":")[2]):
        host = re.split("[?#]", rest, maxsplit=1)[0]
    return host.rpartition("@")[0]


def without_user(url: str) -> str:
    """Return a URL without user and password."""
    scheme, separator, rest = url.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    if scheme.lower() not in _USERLESS_SCHEMES:
        host = host.rpartition("@")[2]
    return scheme + separator + host + path


def without_signature(query: str) -> str:
    """Return a query without a signature of a known kind and the parameters that belong to it.

    Parameters of these names stay where there is no signature: there they may select the data.

    Args:
        query: Text after the question mark of a URL.
    """
    pieces = query.split("&")
    names = [unquote_plus(piece.partition("=")[0]).lower() for piece in pieces]
    prefixes = tuple(prefix for signature, prefix in _SIGNED_BY.items() if signature in names)
    signed = {name for signature, known in _SIGNED_WITH.items() if signature in names for name in known.split()}
    return "&".join(
        piece for piece, name in zip(pieces, names, strict=True) if name not in signed and not name.startswith(prefixes)
    )


def without_query(location: str) -> str:
    """Return a location without the "?" and all after it, where that is no wildcard."""
    return location.partition("?")[0] if scheme_of(location) in HTTP_SCHEMES else location


def split_location(location: str, suffixes: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the directory of a location, and the pattern of its files below that; None for all files.

    Args:
        location: URL or path of a directory, or of files in it.
        suffixes: Endings by which a name is that of a single file.
    """
    is_http = scheme_of(location) in HTTP_SCHEMES
    bare = without_query(location)
    query = location[len(bare) :]
    wildcards = "*{[" if is_http else "*{?["
    head, scheme, rest = bare.partition("://")
    start, path = (head + scheme, rest) if scheme else ("", bare)
    parts = path.split("/")
    host = 1 if is_http else 0  # a host may have brackets, as [::1] has
    first = next(
        (number for number, part in enumerate(parts[host:], host) if any(sign in part for sign in wildcards)), None
    )
    if first is None and parts[-1].lower().endswith(suffixes) and suffixes:
        first = len(parts) - 1
    if first is None:
        return location, None
    directory = "/".join(parts[:first])
    if not directory and not start:
        directory = "/" if path.startswith("/") else "."
    pattern = "/".join(parts[first:])
    if is_http and is_plain_name(pattern) and is_plain_name(unquote(pattern)):
        pattern = unquote(pattern)  # names of files are not quoted
    return start + directory + query, pattern


def is_plain_name(pattern: str) -> bool:
    """Return whether a pattern is just the name of a file, or of a directory with such a name."""
    return not any(sign in pattern for sign in "*{?[")


def match_names(pattern: str, names: list[str]) -> list[str]:
    """Return the names that match a pattern. A plain name also matches all files in a directory of that name.

    Args:
        pattern: Like "train-*.parquet"; ``*`` matches anything but a slash, ``**`` anything, ``?`` one character,
            ``[ab]`` one of these, ``{a,b}`` one of several texts, and ``{00..15}`` a number in a range.
        names: Paths with forward slashes.

    Raises:
        ConfigError: It names more than a million files, or a range that runs backwards.
    """
    if is_plain_name(pattern):
        return [name for name in names if name == pattern or name.startswith(f"{pattern}/")]
    compiled = _compile_pattern(pattern)
    return [name for name in names if compiled.fullmatch(name)]


@lru_cache(maxsize=64)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    pieces = _BRACES.split(pattern)  # text and contents of braces by turns
    choices = [_choices(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    if (total := prod(map(len, choices))) > _MAX_NAMES:
        raise ConfigError(f"{pattern!r} names {total} files", hint="use * instead of braces", option="remote")
    names = ("".join(chosen) for chosen in product(*choices))
    try:
        return re.compile("|".join(f"(?:{''.join(map(_as_regular, _PIECES.split(name)))})" for name in names))
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no pattern of files: {error.msg}", option="remote") from error


def _as_regular(piece: str) -> str:
    """Return the regular expression of a wildcard, a class of characters, or a text between those."""
    if piece in _WILDCARDS:
        return _WILDCARDS[piece]
    if not _CLASS.fullmatch(piece):
        return re.escape(piece)
    is_negated = piece.startswith("[!")
    characters = re.escape(piece[2 if is_negated else 1 : -1]).replace(r"\-", "-")
    return f"[^/{characters}]" if is_negated else f"[{characters}]"


def _choices(inside: str) -> list[str]:
    """Return the texts that the contents of braces stand for."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",")
    first, last = match.groups()
    if int(last) - int(first) >= _MAX_NAMES:
        raise ConfigError(
            f"{{{inside}}} names more than {_MAX_NAMES} files", hint="use * instead of braces", option="remote"
        )
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
