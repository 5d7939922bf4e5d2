"""Block sizes of the shuffles that work in blocks."""

from __future__ import annotations

from lightning_streaming.errors import ConfigError


def block_bounds(algo: str, block_size: int, least: int) -> tuple[int, int]:
    """Between which lengths an algorithm draws its blocks: a quarter below and above ``block_size``.

    Args:
        algo: Who asks, for the error.
        block_size: What the user or the stream's share of it says.
        least: The smallest block size that the algorithm can work with.

    Returns:
        The shortest length, and the first that is too long.

    Raises:
        ConfigError: The block is smaller than ``least``.
    """
    require_block(algo, block_size, least)
    return int(0.75 * block_size), int(1.25 * block_size)


def require_block(algo: str, block_size: int, least: int) -> None:
    """Refuse a block that an algorithm cannot work with.

    Raises:
        ConfigError: The block is smaller than ``least``.
    """
    if block_size < least:
        raise ConfigError(
            f"shuffle_algo={algo!r} needs blocks of at least {least} samples, but got {block_size}; raise "
            "shuffle_block_size (where streams have batches of their own, each gets its proportion of it) or use "
            "shuffle_algo='py1s'"
        )
