"""Arguments of a filesystem: whole for whoever looks one up, without secrets for whoever prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage.urls import mask_url
from lightning_streaming.storage.variables import HIDDEN

_PUBLIC = ("endpoint_url", "region_name", "profile", "project")
"""Texts that are no secrets: they say where a store is, or which credentials to look up."""
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:key|secret|token|pass|passwd|password|pin|auth|authorization|sig|signature|cookie|credentials?)"
    r"(?:$|[_-])",
    re.IGNORECASE,
)
_MUST = "storage_options must map names to values, like {'anon': True}"
_REFERENCES = re.compile(r"(?:(?:bearer|basic|token) +)?(?:\$\{[A-Za-z_]\w*\})+", re.IGNORECASE)


class StorageOptions(Mapping[str, Any]):
    """Storage options that print, log and represent themselves without secrets.

    Looked up, iterated over or pickled they are what was given: a filesystem, and a worker process, need that.

    Args:
        options: By name, as fsspec's filesystem takes them. None: none.

    Raises:
        ConfigError: They are no mapping from names to values. What they are is not shown: it may be secret.
    """

    __slots__ = ("_options",)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"{_MUST}, but are of type {type(options).__name__}")
        for name in options or ():
            if not isinstance(name, str):
                raise ConfigError(f"{_MUST}, but have a name of type {type(name).__name__}")
        self._options = dict(options or {})

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(shown_options(self))


def is_public(name: str) -> bool:
    """Whether a text under this name is harmless, but for what a URL in it may hold."""
    return name in _PUBLIC


def is_secret_name(name: str) -> bool:
    """Whether a name sounds like that of a secret, so that a number under it is one."""
    return _SECRET_NAME.search(name) is not None


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options as they may be shown, at any depth: ``***`` for each text that is not known to be harmless.

    Texts of nothing but environment variables, like ``"${STORE_SECRET}"``, stay: they name the secret only.
    """
    return {str(name): _shown(option, str(name)) for name, option in options.items()}


def without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as :func:`shown_options` gives them, without what is hidden in them."""
    kept = {name: without_hidden(one) if isinstance(one, Mapping) else one for name, one in options.items()}
    return {name: one for name, one in kept.items() if one != HIDDEN and not (isinstance(one, list) and HIDDEN in one)}


def _shown(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return shown_options(value)
    if isinstance(value, list | tuple):
        return [_shown(one, name) for one in value]
    if isinstance(value, str) and is_public(name):
        return mask_url(value)
    if isinstance(value, str) and _REFERENCES.fullmatch(value):
        return value
    if value is None or isinstance(value, bool):
        return value
    return value if isinstance(value, int | float) and not is_secret_name(name) else HIDDEN
