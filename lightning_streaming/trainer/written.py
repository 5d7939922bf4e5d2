"""What the user wrote, in files and on the command line: which fields have which values, and what is secret there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_streaming.storage.options import is_secret_name
from lightning_streaming.storage.secrets import secrets_of, secrets_of_options
from lightning_streaming.trainer.help import SUBCOMMANDS

_OPTIONS = re.compile(r"storage.?opt", re.IGNORECASE)
"""How a field of storage options begins, also one that is misspelt."""


@dataclass(frozen=True, slots=True)
class Written:
    """One field of a configuration or of the command line."""

    name: str
    """Dotted, without ``init_args``."""
    value: Any


def written_in(args: Sequence[str]) -> list[Written]:
    """The fields that arguments, and the files that they name, give a value."""
    return [field for name, value in _given(args) for field in _flat(value, name)]


def secrets_in(args: Sequence[str]) -> set[str]:
    """All that may be secret in arguments, and in the files that they name, wherever it was written.

    Whatever stands below storage options, under a name like that of a secret, or in a URL.
    """
    return {text for name, value in _given(args) for text in _secrets(value, name)}


def files_in(args: Sequence[str]) -> list[str]:
    """The configuration files that arguments name."""
    pairs = zip(args, [*args[1:], ""], strict=True)
    values = [(arg.partition("=")[2] or after) for arg, after in pairs if _is_config(arg.partition("=")[0])]
    return [value for value in values if Path(value).is_file()]


def without_lines(error: yaml.YAMLError) -> str:
    """What is wrong with a text that is no YAML, and where; not the lines themselves, which may hold secrets."""
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or 'no YAML'}{place}"


def _given(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and value of each argument; those of a file have no name."""
    for place, arg in enumerate(args):
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("-"):
            continue
        value = value if equals else next(iter(args[place + 1 :]), "")
        yield ("", _content(value)) if _is_config(arg.partition("=")[0]) else (_short(name), value)


def _is_config(option: str) -> bool:
    return option in ("--config", "-c")


def _content(file: str) -> Any:
    path = Path(file)
    try:
        return yaml.safe_load(path.read_text() if path.is_file() else file)
    except (OSError, ValueError, yaml.YAMLError):  # whoever parses it says so
        return None


def _flat(value: Any, name: str) -> Iterator[Written]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, _short(f"{name}.{key}" if name else str(key)))
    if name:
        yield Written(name, value)


def _secrets(value: Any, name: str) -> Iterator[str]:
    """What may be secret in a value, and in one that is written as text, as arguments are."""
    below, _, last = name.rpartition(".")
    if isinstance(value, Mapping):
        if _OPTIONS.search(name):
            yield from secrets_of_options(value)
        for key, inner in value.items():
            yield from _secrets(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, name)
    elif value is not None and not isinstance(value, bool):
        is_secret = _OPTIONS.search(below) or is_secret_name(last)
        text = str(value)
        yield from secrets_of(text)
        inner = _content(text) if isinstance(value, str) and text[:1] in "{[" else None
        if inner is not None:
            yield from _secrets(inner, name)
        elif _OPTIONS.search(last):
            yield from secrets_of_options(text)
        elif is_secret:
            yield from secrets_of_options(text, last)


def _short(name: str) -> str:
    """Without the levels of a configuration that a field's name may leave out."""
    first, *others = [part for part in name.split(".") if part != "init_args"] or [name]
    return ".".join(others) if first in SUBCOMMANDS and others else ".".join([first, *others])
