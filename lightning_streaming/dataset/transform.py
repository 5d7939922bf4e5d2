"""The user's transform of each sample, with randomness keyed by the sample; and errors of it.

The generator of a sample is a function of seed, epoch and position. So augmentation is the same after any resume, with
any number of workers or ranks, and for a single sample that is restored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_streaming.dataset.collation import is_image
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError, SampleError, StreamingError
from lightning_streaming.escaping import in_one_line, short_repr
from lightning_streaming.signatures import check_accepts, has_keyword

_TRANSFORM_KEY = 0x7472616E  # keeps these streams apart from those that shuffle, which are keyed by seed + epoch
_WORKER_KEY = 0x776F726B
_MOST_KEYS = 8
"""Keys that an error names."""
_MOST_COLUMNS = 20
"""Columns that it describes."""
_KeyedTransform = Callable[[dict[str, Any], int], Any]
"""Transforms a decoded sample, by its position in the epoch."""
KeyedSample = Callable[[int, int], Any]
"""Creates a sample from its id and its position in the epoch."""


def rng_for(seed: int, epoch: int, position: int) -> np.random.Generator:
    """Return the random generator of one sample.

    Args:
        seed: The dataset's shuffle seed.
        epoch: Epoch the sample is read in.
        position: The sample's place in the epoch's global sequence.
    """
    return np.random.default_rng([_TRANSFORM_KEY, seed, epoch, position])


def rng_of_worker(seed: int, epoch: int, position: int, rank: int, worker: int) -> np.random.Generator:
    """Return the initial random generator of a worker process: no two workers of a run draw the same numbers.

    Args:
        seed: The dataset's shuffle seed.
        epoch: Epoch of the pass that it is started for.
        position: Where in the epoch's global sequence that pass begins.
        rank: Among the ranks that read different samples.
        worker: Among the workers of that rank.
    """
    return np.random.default_rng([_WORKER_KEY, seed, epoch, position, rank, worker])


def seed_global_generators(rng: np.random.Generator) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator from ``rng``, for transforms that use those."""
    first, second, third = (int(word) for word in rng.integers(0, 2**32, size=3))
    random.seed(first)
    np.random.seed(second)  # noqa: NPY002  the legacy generator is what such transforms draw from
    torch.default_generator.manual_seed(third)


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore those generators at the end: this process may be the one that trains."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])


class SampleTransform:
    """An optional transform whose randomness is keyed by the sample.

    Args:
        function: A function of a decoded sample; if it has a parameter ``rng``, it is given the sample's generator.
        seed_global_rng: Whether to seed the global generators too, before each call. Outside of worker processes, which
            have nothing else to draw, they are put back after it.

    Raises:
        ConfigError: ``function`` is no function, or accepts other arguments.
    """

    def __init__(self, function: Callable[..., Any] | None, seed_global_rng: bool) -> None:
        if function is not None and not callable(function):
            raise ConfigError(
                f"transform must be a function of a sample, but got {short_repr(function)}", option="transform"
            )
        self.function = function
        self._seeds = seed_global_rng
        self._wants_rng = function is not None and has_keyword(function, "rng")
        if function is not None:
            rng = {"rng": None} if self._wants_rng else {}
            check_accepts(function, "transform", "(sample), optionally with rng=...", {}, **rng)

    def replaced(self, function: Callable[..., Any] | None) -> SampleTransform:
        """Return the same with another function."""
        return SampleTransform(function, self._seeds)

    def keyed(self, shuffle_seed: int, epoch: int) -> _KeyedTransform | None:
        """Return the transform as a function of sample and position; None if there is none.

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

    def by_id(self, sample: Callable[[int], Any], shuffle_seed: int, epoch: int) -> KeyedSample:
        """Return a sample by id as a function of id and position: :meth:`apply` then draws what :meth:`keyed` would.

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
        """Return the transform of a sample that is read by its id.

        In the middle of :meth:`by_id` it draws from the generator of the sample that is being made. Elsewhere the
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
    """The generator of the current sample, created at the first draw."""

    def __init__(self, *key: int) -> None:
        self._key = key

    @cached_property
    def rng(self) -> np.random.Generator:
        return rng_for(*self._key)


_under_way: ContextVar[_Draws | None] = ContextVar("sample under way", default=None)
"""Not a field of the dataset: two threads may each be at a sample of their own."""


def _kept() -> Callable[[], AbstractContextManager[None]]:
    return nullcontext if get_worker_info() is not None else global_generators_kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFactory:
    """How the samples of a pass are created. The user's code is in ``transform`` or ``make``, or in neither."""

    transform: _KeyedTransform | None
    """Applied to the decoded sample."""
    make: KeyedSample | None
    """Creates a sample from its id and position, where a subclass of the dataset overrides that."""
    name: str
    """Name of the user's code in errors."""

    @property
    def keeps_samples(self) -> bool:
        """Return whether samples are yielded as they are decoded."""
        return self.transform is None and self.make is None


def failed_sample(error: Exception, name: str, key: SampleKey, sample: Any = None) -> StreamingError:
    """Return the error to raise for a failure of the user's code on a sample, with a description of the sample."""
    columns = _described_columns(sample) if isinstance(sample, Mapping) else ""
    words = in_one_line(str(error) if isinstance(error, StreamingError) else f"{type(error).__name__}: {error}")
    message = (
        f"{name} failed on sample {key.sample_index} of shard {key.shard} of stream {key.stream!r}: {words}\n"
        f"{columns}This sample alone, as it failed: dataset.restore_sample({json.dumps(key.as_dict())})"
    )
    known = error.fields if isinstance(error, StreamingError) else {}
    return kind_of(error)(message=message, **{**known, "hint": None, "stream": key.stream, "sample": key.sample_index})


def _described_columns(sample: Mapping[Any, Any]) -> str:
    """Return a line with name and kind of each column, without values, which may be long or private."""
    names = list(sample)
    columns = [f"{in_one_line(str(name))} ({_kind(sample[name])})" for name in names[:_MOST_COLUMNS]]
    more = f" and {len(names) - _MOST_COLUMNS} more" if len(names) > _MOST_COLUMNS else ""
    return f"When it failed, the sample had {', '.join(columns) or 'no column'}{more}\n"


def _kind(value: Any) -> str:
    """Return a value's type; for arrays and tensors dtype and shape, for images mode and size."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{value.dtype}[{'×'.join(map(str, value.shape))}]"
    if is_image(type(value)):
        return f"picture {value.mode} {value.width}×{value.height}"
    return type(value).__name__


def describe_keys(keys: Sequence[SampleKey]) -> str:
    """Return how an error names samples of a batch."""
    if len(keys) == 1:
        return f"\nThis sample alone: dataset.restore_sample({json.dumps(keys[0].as_dict())})"
    shown = "\n".join(f"  {json.dumps(key.as_dict())}" for key in keys[:_MOST_KEYS])
    more = f"\n  and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"\nIts samples, by the keys with which dataset.restore_sample(key) gives each alone:\n{shown}{more}"


def kind_of(error: Exception) -> type[StreamingError]:
    """Return the class to raise an error with: its own if it is one of ours."""
    if isinstance(error, StreamingError) and type(error).__module__ == StreamingError.__module__:
        return type(error)  # one of a user's may want other arguments
    return SampleError
