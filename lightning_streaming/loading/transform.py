"""The user's transform of each sample, with randomness that belongs to the sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.utils.data import get_worker_info

from lightning_streaming.loading.rng import global_generators_kept, rng_for, seed_global_generators


def keyed_transform(
    transform: Callable[..., Any] | None, seed_global_rng: bool, shuffle_seed: int, epoch: int
) -> Callable[[dict[str, Any], int], Any] | None:
    """The user's transform as a function of sample and position, its randomness keyed by the position.

    Args:
        transform: A function of a decoded sample; if it has a parameter ``rng``, it is given the sample's generator.
        seed_global_rng: Whether to seed the global generators too, before each call. Outside of worker processes, which
            have nothing else to draw, they are put back after it.
        shuffle_seed: Seed of the order; belongs to the key.
        epoch: Epoch of the samples; belongs to the key.
    """
    if transform is None:
        return None
    wants_rng = _wants_rng(transform)
    kept = nullcontext if get_worker_info() is not None else global_generators_kept

    def apply(sample: dict[str, Any], position: int) -> Any:
        if not (wants_rng or seed_global_rng):
            return transform(sample)
        rng = rng_for(shuffle_seed, epoch, position)
        if not seed_global_rng:
            return transform(sample, rng=rng)
        with kept():
            seed_global_generators(rng)
            return transform(sample, rng=rng) if wants_rng else transform(sample)

    return apply


def _wants_rng(transform: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(transform).parameters
    except ValueError:  # a builtin like dict, which does not tell
        return False
