"""Names a setting may have: those that are served, those that are only known, and all others."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_streaming.errors import ConfigError, UnsupportedError


def require_served(setting: str, name: str, served: Iterable[str], later: Iterable[str] = ()) -> None:
    """Refuse a name that is unknown, or known and not served.

    Args:
        setting: The setting that got the name, as the user spells it.
        name: What the user wrote.
        served: Names that work.
        later: Names that are sound and do not work yet.

    Raises:
        UnsupportedError: ``name`` is one of ``later``.
        ConfigError: Nobody knows ``name``.
    """
    served, later = sorted(served), sorted(later)
    if name in served:
        return
    if name in later:
        raise UnsupportedError(f"{setting}={name!r} is not served yet; use one of: {', '.join(served)}")
    raise ConfigError(f"{setting} must be one of {', '.join(served + later)}, but got {name!r}")
