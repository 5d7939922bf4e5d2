"""The user's transform of each sample, with randomness that belongs to the sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.rng import global_generators_kept, rng_for, seed_global_generators

KeyedTransform = Callable[[dict[str, Any], int], Any]
"""Turns a decoded sample, and its position in the epoch, into what is handed out."""
KeyedSample = Callable[[int, int], Any]
"""Makes what is handed out of a sample's id and its position in the epoch."""


class SampleTransform:
    """A transform, maybe none, whose randomness is keyed by the sample.

    Args:
        function: A function of a decoded sample; if it has a parameter ``rng``, it is given the sample's generator.
        seed_global_rng: Whether to seed the global generators too, before each call. Outside of worker processes, which
            have nothing else to draw, they are put back after it.

    Raises:
        ConfigError: ``function`` is no function.
    """

    def __init__(self, function: Callable[..., Any] | None, seed_global_rng: bool) -> None:
        if function is not None and not callable(function):
            raise ConfigError(f"transform must be a function of a sample, but got {function!r}")
        self.function = function
        self._seeds = seed_global_rng
        self._wants_rng = function is not None and _wants_rng(function)

    def replaced(self, function: Callable[..., Any] | None) -> SampleTransform:
        """The same with another function."""
        return SampleTransform(function, self._seeds)

    def keyed(self, shuffle_seed: int, epoch: int) -> KeyedTransform | None:
        """The transform as a function of sample and position; None if there is none.

        Args:
            shuffle_seed: Seed of the order; belongs to the key.
            epoch: Epoch of the samples; belongs to the key.
        """
        function, wants_rng = self.function, self._wants_rng
        if function is None:
            return None
        if not self._seeds:
            if not wants_rng:
                return lambda sample, _position: function(sample)
            return lambda sample, position: function(sample, rng=rng_for(shuffle_seed, epoch, position))
        kept = _kept()

        def apply(sample: dict[str, Any], position: int) -> Any:
            rng = rng_for(shuffle_seed, epoch, position)
            with kept():
                seed_global_generators(rng)
                return function(sample, rng=rng) if wants_rng else function(sample)

        return apply

    def asked(self, sample: Callable[[int], Any], shuffle_seed: int, epoch: int) -> KeyedSample:
        """A sample by its id as a function of id and position: :meth:`apply` then draws what :meth:`keyed` would.

        Args:
            sample: Gives a sample by its id, and may call :meth:`apply` meanwhile.
            shuffle_seed: Seed of the order; belongs to the key.
            epoch: Epoch of the samples; belongs to the key.
        """
        if not (self._seeds or self._wants_rng):
            return lambda sample_id, _position: sample(sample_id)
        kept = _kept() if self._seeds else nullcontext

        def make(sample_id: int, position: int) -> Any:
            draws = _Draws(shuffle_seed, epoch, position)
            token = _under_way.set(draws)
            try:
                with kept():
                    if self._seeds:
                        seed_global_generators(draws.rng)
                    return sample(sample_id)
            finally:
                _under_way.reset(token)

        return make

    def apply(self, sample: Any, sample_id: int, shuffle_seed: int) -> Any:
        """The transform of a sample that somebody asked for by its id.

        In the middle of :meth:`asked` it draws from the generator of the sample that is being made. Elsewhere the
        sample belongs to no epoch, and its randomness is that of position ``sample_id`` of epoch 0.
        """
        draws = _under_way.get()
        if draws is None:
            keyed = self.keyed(shuffle_seed, 0)
            return sample if keyed is None else keyed(sample, sample_id)
        function = self.function
        if function is None:
            return sample
        return function(sample, rng=draws.rng) if self._wants_rng else function(sample)


class _Draws:
    """The generator of the sample that is being made, for all that is made of it; one is made if somebody draws."""

    def __init__(self, *key: int) -> None:
        self._key = key

    @cached_property
    def rng(self) -> np.random.Generator:
        return rng_for(*self._key)


_under_way: ContextVar[_Draws | None] = ContextVar("sample under way", default=None)
"""Not a field of the dataset: two threads may each be at a sample of their own."""


def _kept() -> Callable[[], AbstractContextManager[None]]:
    return nullcontext if get_worker_info() is not None else global_generators_kept


def _wants_rng(transform: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(transform).parameters
    except ValueError:  # a builtin like dict, which does not tell
        return False
