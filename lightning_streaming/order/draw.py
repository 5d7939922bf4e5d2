"""An epoch's order: the samples it draws, shuffled. The part of planning that depends on what the data holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.sampling import resample
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.shuffle import shuffle_map

_ORDER_VERSION = 1
"""Raised when the same settings come to mean another order, so that files made before are not taken for it."""


class Order(Protocol):
    """The sample id at each place of an epoch's order; an array is one, and so is what works ids out when asked."""

    def __len__(self) -> int:
        """Places: the samples that an epoch draws."""

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Sample ids at these places, of the same shape."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """Streams that are drawn and shuffled together."""

    shard_sizes: tuple[NDArray[np.int64], ...]
    choose: tuple[int, ...]
    first_id: int
    block_size: int


def _groups(settings: OrderSettings, shape: DatasetShape) -> Iterator[_Group]:
    """All streams in one group where they share batches freely; otherwise each by itself, in a block of its share."""
    assert settings.shuffle_block_size, "settle the settings first"
    if settings.batching_method == "random":
        yield _Group(
            shard_sizes=shape.shard_sizes,
            choose=shape.weights.choose,
            first_id=0,
            block_size=settings.shuffle_block_size,
        )
        return
    first_id = 0
    for sizes, choose, proportion in zip(
        shape.shard_sizes, shape.weights.choose, shape.weights.proportion, strict=True
    ):
        block_size = int(settings.shuffle_block_size * proportion)
        yield _Group(shard_sizes=(sizes,), choose=(choose,), first_id=first_id, block_size=block_size)
        first_id += int(sizes.sum())


def draw_order(settings: OrderSettings, shape: DatasetShape, epoch: int) -> Order | None:
    """Draw and shuffle the samples of one epoch: the part of planning that takes time and memory for each sample.

    Args:
        settings: Settled; see :meth:`OrderSettings.settled`.
        shape: The data.
        epoch: Counts from 0.

    Returns:
        The samples of the epoch, one group of streams after another; None where each place reads the sample of its
        own number.

    Raises:
        ConfigError: The epoch is negative, or the samples are too few for the shuffle algorithm.
    """
    if epoch < 0:
        raise ConfigError(f"epochs count from 0, but got {epoch}")
    if is_identity(settings, shape):
        return None
    return np.concatenate([_draw_group(group, settings, epoch) for group in _groups(settings, shape)])


def is_identity(settings: OrderSettings, shape: DatasetShape) -> bool:
    """Whether an epoch reads every sample once, in the order of the ids."""
    return not settings.shuffle and list(shape.weights.choose) == [int(sizes.sum()) for sizes in shape.shard_sizes]


def _draw_group(group: _Group, settings: OrderSettings, epoch: int) -> NDArray[np.int64]:
    assert settings.num_canonical_nodes, "settle the settings first"
    drawn = resample(group.shard_sizes, group.choose, settings, epoch)
    ids = np.arange(drawn.units.sum()) if drawn.sample_ids is None else drawn.sample_ids
    if settings.shuffle:
        ids = ids[
            shuffle_map(
                settings.shuffle_algo,
                drawn.units,
                settings.num_canonical_nodes,
                settings.shuffle_seed,
                epoch,
                group.block_size,
            )
        ]
    return group.first_id + ids


def order_digest(settings: OrderSettings, shape: DatasetShape, epoch: int) -> str:
    """Name what :func:`draw_order` would give, without drawing it.

    Returns:
        32 hexadecimal digits; equal digests mean equal orders.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    assert settings.shuffle_block_size, "settle the settings first"
    facts = {
        "version": _ORDER_VERSION,
        "settings": asdict(settings),
        "shards": [len(sizes) for sizes in shape.shard_sizes],
        "choose": shape.weights.choose,
        "proportion": shape.weights.proportion,
        "epoch": epoch,
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for sizes in shape.shard_sizes:
        digest.update(sizes.astype("<i8").tobytes())
    return digest.hexdigest()
