"""How many canonical nodes an epoch may have: they cost time and memory, and beyond its samples they mean nothing."""

from __future__ import annotations

from lightning_streaming.errors import ConfigError, StateError

ALWAYS_FINE = 2**16
"""Canonical nodes that an epoch may have however few its samples: this many take seconds at most."""


def check_canonical_nodes(nodes: int, epoch_size: int, *, is_asked: bool, told: str) -> None:
    """Refuse many more canonical nodes than samples.

    Args:
        nodes: Canonical nodes.
        epoch_size: Samples of an epoch.
        is_asked: Whether the user asked for them, rather than a saved position.
        told: What a message about the saved position begins with.

    Raises:
        ConfigError: There are too many, and they were asked for.
        StateError: There are too many, and a saved position has them.
    """
    most = max(ALWAYS_FINE, epoch_size)
    if nodes <= most:
        return
    words = f"{nodes}, and an epoch of {epoch_size} samples has {most} at most"
    if is_asked:
        raise ConfigError(f"num_canonical_nodes is {words}; ask for fewer")
    raise StateError(
        f"{told}'num_canonical_nodes' of the saved position is {words}; it is of other data, or was edited: go on from "
        "another checkpoint"
    )
