"""Phases in lists, which tests change more easily than mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_streaming import MixturePhase


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase with its name."""

    name: str
    mix: Mapping[str, Any]
    end: int | float | str | None = None
    steps: int = 16
    max_repeats: Mapping[str, float] = field(default_factory=dict)
    ended_at: int | None = None

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> MixturePhase:
        """Return the phase as a dataset takes it."""
        return MixturePhase(**{name: value for name, value in vars(self).items() if name != "name"})


def schedule(phases: Iterable[Any]) -> dict[str, Any]:
    """Return phases by name: objects of each :class:`Phase`, and plain values of mappings."""
    by_name: dict[str, Any] = {}
    for phase in phases:
        name = phase.name if isinstance(phase, Phase) else phase["name"]
        assert name not in by_name
        if isinstance(phase, Phase):
            by_name[name] = phase.options()
        else:
            by_name[name] = {key: value for key, value in phase.items() if key != "name"}
    return by_name
