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
from lightning_streaming.order.blockwise import blockwise_order, joined
from lightning_streaming.order.sampling import resample
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.shuffle import shuffle_into
from lightning_streaming.order.shuffle.task import ShuffleTask

_ORDER_VERSION = 2
"""Raised when the same settings come to mean another order, or other bytes, so that files made before are not taken
for it."""

_CHUNK = 1 << 20
"""Ids that are looked up at once: what is needed besides the order itself stays small."""


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

    @property
    def num_samples(self) -> int:
        """Samples that an epoch draws from these streams."""
        return sum(self.choose)


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
        The samples of the epoch, one group of streams after another, as an array of :func:`order_dtype` or as what
        works ids out when asked; None where each place reads the sample of its own number.

    Raises:
        ConfigError: The epoch is negative, or the samples or the block are too few for the shuffle algorithm.
    """
    _check_epoch(epoch)
    if is_identity(settings, shape):
        return None
    if is_on_demand(settings):
        return _order_on_demand(settings, shape, epoch)
    order = np.empty(shape.epoch_size, order_dtype(shape))
    draw_into(settings, shape, epoch, order)
    return order


def draw_into(settings: OrderSettings, shape: DatasetShape, epoch: int, out: NDArray[np.integer[Any]]) -> None:
    """Fill an array, which may be a mapped file, with what :func:`draw_order` returns as one of its own.

    Besides ``out`` this takes memory for one canonical node's blocks, and where streams are weighted for one more array
    of the size of ``out``.

    Args:
        settings: Settled; of an order that is not on demand.
        shape: The data.
        epoch: Counts from 0.
        out: One dimension, ``shape.epoch_size`` long, of :func:`order_dtype` or wider.

    Raises:
        ConfigError: The epoch is negative, or the samples or the block are too few for the shuffle algorithm.
    """
    _check_epoch(epoch)
    stop = 0
    for group in _groups(settings, shape):
        start, stop = stop, stop + group.num_samples
        _draw_group(group, settings, epoch, out[start:stop])


def order_dtype(shape: DatasetShape) -> np.dtype[np.integer[Any]]:
    """The smallest dtype of an order: 4 bytes wherever they hold every sample id and every place."""
    return np.dtype(np.uint32 if max(shape.num_samples, shape.epoch_size) <= 1 << 32 else np.int64)


def is_identity(settings: OrderSettings, shape: DatasetShape) -> bool:
    """Whether an epoch reads every sample once, in the order of the ids."""
    return not settings.shuffle and list(shape.weights.choose) == [int(sizes.sum()) for sizes in shape.shard_sizes]


def is_on_demand(settings: OrderSettings) -> bool:
    """Whether ids are worked out when asked for, so that nothing is drawn beforehand."""
    return settings.shuffle and settings.shuffle_algo == "blockwise"


def _check_epoch(epoch: int) -> None:
    if epoch < 0:
        raise ConfigError(f"epochs count from 0, but got {epoch}")


def _draw_group(group: _Group, settings: OrderSettings, epoch: int, out: NDArray[np.integer[Any]]) -> None:
    assert settings.num_canonical_nodes, "settle the settings first"
    drawn = resample(group.shard_sizes, group.choose, settings, epoch, out.dtype)
    if settings.shuffle:
        task = ShuffleTask(
            units=drawn.units,
            num_canonical_nodes=settings.num_canonical_nodes,
            seed=settings.shuffle_seed,
            epoch=epoch,
            block_size=group.block_size,
        )
        shuffle_into(settings.shuffle_algo, task, out)
        if drawn.sample_ids is not None:
            _look_up(drawn.sample_ids, out)
    elif drawn.sample_ids is not None:
        out[:] = drawn.sample_ids
    else:
        out[:] = np.arange(len(out), dtype=out.dtype)
    if group.first_id:
        out += group.first_id


def _look_up(sample_ids: NDArray[np.integer[Any]], out: NDArray[np.integer[Any]]) -> None:
    """``out[:] = sample_ids[out]`` in little memory."""
    for start in range(0, len(out), _CHUNK):
        chunk = out[start : start + _CHUNK]
        chunk[:] = sample_ids[chunk]


def _order_on_demand(settings: OrderSettings, shape: DatasetShape, epoch: int) -> Order:
    return joined(
        [
            blockwise_order(group.shard_sizes, group.choose, settings, epoch, group.first_id, group.block_size)
            for group in _groups(settings, shape)
        ]
    )


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
