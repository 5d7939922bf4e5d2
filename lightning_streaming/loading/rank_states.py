"""The state of a loader on all ranks: one that they agree on, and one that a single rank has read from a file.

A loader's ``state_dict()`` is the same on every rank, so saving on each rank, or on one alone, needs no help from here.
These two speak to the other ranks: to make sure that they stand at the same place, and to tell them where to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.world import World


def save_state_global(loader: StreamingDataLoader, dst_rank: int = 0) -> dict[str, Any] | None:
    """The state of a loader on one rank, once all ranks have been found to have the same.

    To be called on all ranks, with ``torch.distributed`` initialised if there are several; not while Lightning trains,
    whose checkpoints hold the place anyway.

    Args:
        loader: This rank's loader.
        dst_rank: The rank that gets the state.

    Returns:
        The state on ``dst_rank``, None on the others. It goes on on any number of ranks.

    Raises:
        StateError: Ranks stand at different places, so that no state is right for all; on all ranks alike.
        ConfigError: There is no such rank, or no way to ask the others.
    """
    rank, num_ranks = _connected_rank(dst_rank)
    if num_ranks == 1:
        return loader.state_dict()
    states = _from_all(loader.state_dict, num_ranks)
    if any(one != states[0] for one in states):
        places = [(one["epoch"], one["sample_in_epoch"]) for one in states]
        raise StateError(
            f"the ranks' loaders stand at different places: (epoch, sample) {places} by rank; save when all "
            "have taken as many batches, from one dataset and with one batch size"
        )
    return states[rank] if rank == dst_rank else None


def restore_state_global(
    loader: StreamingDataLoader, state: Mapping[str, Any] | None, src_rank: int | None = None
) -> None:
    """Let a loader go on where a state was taken, on every rank.

    Args:
        loader: This rank's loader.
        state: From :func:`save_state_global` or ``loader.state_dict()``, of any number of ranks.
        src_rank: The rank that has the state and sends it; the others pass None for ``state``. None: all have it.

    Raises:
        StateError: This is not a saved position.
        ConfigError: A rank that is to be sent the state brings one, or there is no such rank, or no way to ask it; on
            all ranks alike.
    """
    if src_rank is not None:
        _, num_ranks = _connected_rank(src_rank)
        if num_ranks > 1:
            states = _from_all(lambda: state, num_ranks)
            too_many = [rank for rank, one in enumerate(states) if one is not None and rank != src_rank]
            if too_many:
                raise ConfigError(
                    f"rank {src_rank} sends the state, so ranks {too_many} must pass None; or leave src_rank out"
                )
            state = states[src_rank]
    if state is None:
        raise StateError("there is no state to go on from: it is None on the rank that is to have it")
    loader.load_state_dict(state)


def _from_all(ask: Callable[[], Any], num_ranks: int) -> list[Any]:
    """What each rank has; where one fails, its error on all of them, so that nobody waits for it."""
    try:
        answer: tuple[Any, Exception | None] = ask(), None
    except Exception as error:  # noqa: BLE001  # raised below, here as on the others
        answer = None, error
    answers: list[tuple[Any, Exception | None]] = [(None, None)] * num_ranks
    dist.all_gather_object(answers, answer)
    for _, failure in answers:
        if failure is not None:
            raise failure
    return [one for one, _ in answers]


def _connected_rank(partner: int) -> tuple[int, int]:
    """This rank and the number of ranks, of which ``partner`` is one.

    Raises:
        ConfigError: It is not, or the ranks cannot speak to each other.
    """
    world = World.detect()
    if not 0 <= partner < world.num_ranks:
        raise ConfigError(f"there is no rank {partner}, but {world.num_ranks} from 0 on")
    if world.num_ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{world.num_ranks} ranks can exchange a state only when torch.distributed is initialised; without it, "
            "save and load loader.state_dict() on each rank: it is the same on all"
        )
    return world.rank, world.num_ranks
