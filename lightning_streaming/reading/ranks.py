"""Communication with the other ranks: gathering the values of samples, and one state for all loaders.

A loader's ``state_dict()`` is the same on every rank, so each rank, or one alone, can save it without these functions.
:func:`save_state_global` checks that all ranks are at the same position, :func:`restore_state_global` sends it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_streaming.dataset.sample_key import Pass, SampleKeys, join_keys, table_of
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.world import World

if TYPE_CHECKING:
    from lightning_streaming.reading.loader import StreamingDataLoader

_Answer = TypeVar("_Answer")


class _Failure(NamedTuple):
    """The error of a rank that has no answer."""

    error: Exception


class _Part(NamedTuple):
    """The values of one rank."""

    of_pass: Pass
    rows: NDArray[np.int64]
    values: Tensor


def all_gather_samples(values: Tensor | Sequence[Tensor], keys: SampleKeys | Sequence[SampleKeys]) -> Tensor:
    """Gather the values of all samples from all ranks, for a metric that does not depend on the number of ranks.

    Each sample counts once: repeats that fill up ranks are dropped, and so are the copies of replicated ranks. The
    values are in the order of the data (stream, shard, index), regardless of the order of reading. So a metric of the
    result equals that of a single process bit for bit, if the value of each sample does: with a model in ``eval`` mode
    that treats the samples of a batch independently.

    Call it on all ranks if ``torch.distributed`` is initialised, with any backend. Otherwise it returns the values of
    this process.

    Args:
        values: One value for each sample, of shape (samples, ...); or a list of these, batch by batch.
        keys: The keys of the samples, batch by batch if the values are.

    Returns:
        The values of all ranks, of shape (samples, ...), the same on each rank, on the device of ``values``.

    Raises:
        ConfigError: The number of values and keys differ, or the keys are of several passes; raised on all ranks.
    """
    tensors = [values] if isinstance(values, Tensor) else list(values)
    listed = [keys] if isinstance(keys, SampleKeys) else list(keys)
    parts = from_all(lambda _: _part(tensors, listed))
    if len({part.of_pass for part in parts}) != 1:
        raise ConfigError(
            "ranks brought values of different epochs or datasets", hint="gather those of one pass on all ranks"
        )
    rows = np.concatenate([part.rows for part in parts])
    # Replicated ranks read the same positions.
    _, kept = np.unique(rows[:, 0], return_index=True)
    in_order = kept[np.lexsort(rows[kept].T[[0, 3, 2, 1]])]
    gathered = torch.cat([part.values for part in parts])
    return gathered[torch.from_numpy(in_order)].to(tensors[0].device)


def _part(values: list[Tensor], listed: list[SampleKeys]) -> _Part:
    if not values:
        raise ConfigError(
            "there are no values to gather", hint="collect one value for each sample of every batch", option="values"
        )
    shapes, counts = [tuple(tensor.shape) for tensor in values], [len(keys) for keys in listed]
    if [shape[:1] for shape in shapes] != [(count,) for count in counts]:
        raise ConfigError(
            f"values must have one row for each key, but got shapes {_shortened(shapes)} for {_shortened(counts)} keys",
            hint='a loss, for example, needs reduction="none"',
            option="values",
        )
    keys = join_keys(listed)
    valid = keys.valid
    rows = table_of(keys).rows[valid.numpy()]
    if len(np.unique(rows[:, 0])) < len(rows):
        raise ConfigError(
            "several values belong to one sample",
            hint="begin new lists at the start of every evaluation",
            option="keys",
        )
    return _Part(table_of(keys).of_pass, rows, torch.cat([tensor.detach().cpu() for tensor in values])[valid])


def _shortened(items: Sequence[object]) -> str:
    return f"{list(items[:4])}"[:-1] + (", ...]" if len(items) > 4 else "]")


def save_state_global(loader: StreamingDataLoader, dst_rank: int = 0) -> dict[str, Any] | None:
    """Return the state of a loader on one rank, after checking that it is the same on all ranks.

    Call it on all ranks, with ``torch.distributed`` initialised if there are several. Under Lightning it is not needed:
    checkpoints contain the position.

    Args:
        loader: This rank's loader.
        dst_rank: The rank that gets the state.

    Returns:
        The state on ``dst_rank``, None on the others. It can be loaded on any number of ranks.

    Raises:
        StateError: Ranks are at different positions; raised on all ranks.
        ConfigError: There is no such rank, or the other ranks cannot be reached.
    """
    rank = _connected_rank(dst_rank)
    states = from_all(lambda _: loader.state_dict())
    if any(state != states[0] for state in states):
        places = [(state["epoch"], state["sample_in_epoch"]) for state in states]
        raise StateError(
            f"the ranks' loaders are at different positions: (epoch, sample) {places} by rank",
            hint="save when all have taken as many batches, from one dataset and with one batch size",
        )
    return states[rank] if rank == dst_rank else None


def restore_state_global(
    loader: StreamingDataLoader, state: Mapping[str, Any] | None, src_rank: int | None = None
) -> None:
    """Load a state into the loaders of all ranks.

    Args:
        loader: This rank's loader.
        state: From :func:`save_state_global` or ``loader.state_dict()``, saved by any number of ranks.
        src_rank: The rank that has the state and sends it; the others pass None for ``state``. None: all have it.

    Raises:
        StateError: ``state`` is not a saved position.
        ConfigError: A rank other than ``src_rank`` passes a state, there is no such rank, or it cannot be reached;
            raised on all ranks.
    """
    if src_rank is not None:
        _connected_rank(src_rank)
        states = from_all(lambda _: state)
        too_many = [rank for rank, other in enumerate(states) if other is not None and rank != src_rank]
        if too_many:
            raise ConfigError(
                f"rank {src_rank} sends the state, so ranks {too_many} must pass None",
                hint="or leave src_rank out",
                option="src_rank",
            )
        state = states[src_rank]
    if state is None:
        raise StateError("there is no state to load: it is None on the rank that must have it", option="state")
    loader.load_state_dict(state)


def can_ask_others() -> bool:
    """Return whether the other ranks can be reached, or there are none."""
    return _is_connected() or World.detect().num_ranks == 1


def _is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def from_all(compute: Callable[[int], _Answer]) -> list[_Answer]:
    """Return the result of each rank, in order; if one fails, raise its error on all, so that no rank waits for it."""
    if not _is_connected():
        return [compute(0)]
    try:
        answer: _Answer | _Failure = compute(dist.get_rank())
    except Exception as error:  # noqa: BLE001  # raised below, here as on the others
        answer = _Failure(error)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    for failure in answers:
        if isinstance(failure, _Failure):
            raise failure.error
    return answers


def _connected_rank(partner: int) -> int:
    """Return this rank, after checking that ``partner`` exists.

    Raises:
        ConfigError: It is not, or the ranks cannot speak to each other.
    """
    world = World.detect()
    if not 0 <= partner < world.num_ranks:
        raise ConfigError(f"there is no rank {partner}, but {world.num_ranks} from 0 on", option="src_rank")
    if world.num_ranks > 1 and not _is_connected():
        raise ConfigError(
            f"{world.num_ranks} ranks can exchange a state only when torch.distributed is initialised",
            hint="without it, save and load loader.state_dict() on each rank: it is the same on all",
        )
    return world.rank
