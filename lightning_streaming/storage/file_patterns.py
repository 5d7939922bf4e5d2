"""Locations that name some files of a directory, by wildcards or by one name: which directory, and which files. Pure.

s3://bucket/corpus/train-*.parquet       train-*.parquet of s3://bucket/corpus
data/**/*.tar                            **/*.tar of data, at any depth
data/{train,extra}-{00..07}.tar          16 names
https://host/data/rows.parquet?sig=x     rows.parquet of https://host/data?sig=x
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from urllib.parse import unquote

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage.urls import HTTP_SCHEMES, scheme_of

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_NAMES = 1_000_000
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_CLASS = re.compile(r"\[(?:![^]/]|[^]!/])[^]/]*\]")
_PIECES = re.compile(rf"(\*\*/|\*\*|\*|\?|{_CLASS.pattern})")


def split_location(location: str, suffixes: tuple[str, ...]) -> tuple[str, str | None]:
    """The directory of a location, and the pattern of its files below it; None for all files.

    Args:
        location: URL or path of a directory, or of files in it.
        suffixes: What the names of single files end in.
    """
    is_http = scheme_of(location) in HTTP_SCHEMES
    place = without_query(location)
    query = location[len(place) :]
    wild = "*{[" if is_http else "*{?["
    head, scheme, rest = place.partition("://")
    start, path = (head + scheme, rest) if scheme else ("", place)
    parts = path.split("/")
    host = 1 if is_http else 0  # which may have brackets of its own, as [::1] has
    first = next((number for number, part in enumerate(parts[host:], host) if any(one in part for one in wild)), None)
    if first is None and parts[-1].lower().endswith(suffixes) and suffixes:
        first = len(parts) - 1
    if first is None:
        return location, None
    directory = "/".join(parts[:first])
    if not directory and not start:
        directory = "/" if path.startswith("/") else "."
    pattern = "/".join(parts[first:])
    if is_http and is_one_name(pattern) and is_one_name(unquote(pattern)):
        pattern = unquote(pattern)  # names of files are not quoted
    return start + directory + query, pattern


def without_query(location: str) -> str:
    """A location without what follows "?", where that is no wildcard."""
    return location.partition("?")[0] if scheme_of(location) in HTTP_SCHEMES else location


def is_one_name(pattern: str) -> bool:
    """Whether a pattern is just the name of a file, or of a directory that is called like one."""
    return not any(one in pattern for one in "*{?[")


def matching(pattern: str, names: list[str]) -> list[str]:
    """Those of some names that a pattern is of. Where it is just a name, also what lies in a directory of that name.

    Args:
        pattern: Like "train-*.parquet"; ``*`` is anything but a slash, ``**`` anything, ``?`` one character, ``[ab]``
            one of some, ``{a,b}`` one of several, and ``{00..15}`` a number in a range. One without any of these is the
            name of a file, or of a directory, and then of all below it.
        names: Paths with forward slashes.

    Raises:
        ConfigError: It names more than a million, or a range that runs backwards.
    """
    if is_one_name(pattern):
        return [name for name in names if name == pattern or name.startswith(f"{pattern}/")]
    found = _regular(pattern)
    return [name for name in names if found.fullmatch(name)]


@lru_cache(maxsize=64)
def _regular(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile("|".join(f"(?:{_translated(one)})" for one in _without_braces(pattern)))
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no pattern of files: {error.msg}", option="remote") from error


def _translated(pattern: str) -> str:
    pieces = _PIECES.split(pattern)
    return "".join(_WILDCARDS.get(one) or _class_or_text(one) for one in pieces)


def _class_or_text(piece: str) -> str:
    if not _CLASS.fullmatch(piece):
        return re.escape(piece)
    is_other = piece.startswith("[!")
    some = re.escape(piece[2 if is_other else 1 : -1]).replace(r"\-", "-")
    return f"[^/{some}]" if is_other else f"[{some}]"


def _without_braces(pattern: str) -> Iterator[str]:
    pieces = _BRACES.split(pattern)
    choices = [_choices(one) if number % 2 else [one] for number, one in enumerate(pieces)]
    total = 1
    for one in choices:
        total *= len(one)
    if total > _MOST_NAMES:
        raise ConfigError(f"{pattern!r} names {total} files", hint="use * instead of braces", option="remote")
    return ("".join(one) for one in product(*choices))


def _choices(inside: str) -> list[str]:
    found = _RANGE.fullmatch(inside)
    if found is None:
        return inside.split(",")
    first, last = found.groups()
    if int(last) - int(first) >= _MOST_NAMES:
        raise ConfigError(
            f"{{{inside}}} names more than {_MOST_NAMES} files", hint="use * instead of braces", option="remote"
        )
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
