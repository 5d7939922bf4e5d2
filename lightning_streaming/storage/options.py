"""Storage options as users give them."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_streaming.errors import ConfigError


def check_options(options: object, whose: str = "") -> None:
    """Refuse what is no mapping from names to values. What it holds is not shown: it may be secret.

    Args:
        options: What was given; None for none.
        whose: Words after their name in an error, like " of stream 'a'".

    Raises:
        ConfigError: It is something else.
    """
    if options is None or (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        return
    found = f"is of type {type(options).__name__}"
    if isinstance(options, Mapping):
        found = f"has a name of type {next(type(name).__name__ for name in options if not isinstance(name, str))}"
    raise ConfigError(f"storage_options{whose} must map names to values, like {{'anon': True}}, but {found}")
