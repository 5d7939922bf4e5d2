"""Environment variables in storage options: ``{"secret": "${STORE_SECRET}"}`` takes what the variable holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from lightning_streaming.errors import ConfigError

HIDDEN = "***"
"""What is shown in place of a secret."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options with each ``${NAME}`` in a text, at any depth, replaced by that environment variable.

    To be done when a filesystem is opened, and the result kept nowhere else: the value may be a secret.

    Raises:
        ConfigError: A variable is not set, or a secret was left out when these options were printed.
    """
    expanded: dict[str, Any] = _map_texts(options, _expanded)
    return expanded


def expand_known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Like :func:`expand`, but a variable that is not set stays as it is written."""
    expanded: dict[str, Any] = _map_texts(
        options, lambda text: _REFERENCE.sub(lambda found: os.environ.get(found[1], found[0]), text)
    )
    return expanded


def _expanded(text: str) -> str:
    if text == HIDDEN:
        raise ConfigError(
            f"storage_options hold {HIDDEN}, which stands for a secret that was not printed; write the name of an "
            'environment variable instead, like "${STORE_SECRET}", or leave the option out'
        )
    return _REFERENCE.sub(_value_of, text)


def _value_of(reference: re.Match[str]) -> str:
    value = os.environ.get(reference[1])
    if value is None:
        raise ConfigError(
            f"storage_options take the environment variable {reference[1]}, but it is not set; set it where this "
            "process starts, or leave the option out"
        )
    return value


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_texts(item, change) for item in value)
    return value
