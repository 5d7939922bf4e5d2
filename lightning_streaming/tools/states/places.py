"""The places in the data that a file holds, and how far its trainer has come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.saved_run import CALLBACK_KEY, read_run
from lightning_streaming.loading.state import SavedPosition, read_state
from lightning_streaming.order.gaps import Gaps, gaps_in

_KEYS = {"epoch", "sample_in_epoch", "shuffle_seed", "num_canonical_nodes"}
_DEEPEST = 6
"""Dicts within dicts to look through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPlace:
    """How far a trainer has come, as its checkpoint says."""

    epoch: int
    batches: int
    """Batches of this epoch that are in the weights."""
    batches_in_epoch: int
    """0 if that is not known."""
    global_step: int | None

    @property
    def settled(self) -> TrainerPlace:
        """The same, the end of an epoch written as the beginning of the next."""
        if not 0 < self.batches_in_epoch <= self.batches:
            return self
        return TrainerPlace(
            epoch=self.epoch + 1, batches=0, batches_in_epoch=self.batches_in_epoch, global_step=self.global_step
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLoader:
    """One loader's place."""

    keys: tuple[str | int, ...]
    """Where its state lies in the file."""
    position: SavedPosition
    global_batch: int | None
    """Samples of one batch over all ranks of the run that saved, if the file says."""

    @property
    def epoch_size(self) -> int | None:
        """Samples per epoch, if the state says."""
        fingerprint = self.position.fingerprint
        return None if fingerprint is None else int(fingerprint["order"]["epoch_size"])

    def gaps(self, epoch: int) -> Gaps:
        """What the run that saved skips of an epoch."""
        return gaps_in(self.position.skipped.values(), epoch)

    def samples_read(self, cursor: Cursor) -> int:
        """Samples of its epoch that are read before a place, over all ranks."""
        return self.gaps(cursor.epoch).kept_before(cursor.sample_in_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """All that a file says of places."""

    loaders: Mapping[str, SavedLoader]
    trainer: TrainerPlace | None
    """None if no trainer saved the file, or not with our callback."""

    def choose(self, name: str | None) -> str:
        """The loader that was asked for, or the only one.

        Raises:
            ConfigError: There is no such loader, or several and none was named.
        """
        if name is None and len(self.loaders) == 1:
            return next(iter(self.loaders))
        if name is None:
            raise ConfigError(f"there are places of {len(self.loaders)} loaders; name one: {', '.join(self.loaders)}")
        if name not in self.loaders:
            raise ConfigError(f"there is no place of {name!r}; there are those of {', '.join(self.loaders)}")
        return name


def holds_places(content: Any) -> bool:
    """Whether it is a checkpoint with a state of our callback that holds a place.

    Raises:
        StateError: That state cannot be read.
    """
    saved = _callback_state(content)
    return saved is not None and read_run(saved).trainer is not None


def find_places(content: Any, shown: str) -> Places:
    """Find every place in what a file holds.

    In a Lightning checkpoint those of our callback, by the names of the train loaders. Else every dict that looks like
    a state of ours or of MosaicML Streaming, named by the keys that lead to it, like "state.dataset_state.train".

    Args:
        content: What the file holds.
        shown: The file, for messages.

    Raises:
        StateError: There is none, or one that cannot be read.
    """
    saved = _callback_state(content)
    if saved is not None:
        return _callback_places(content, saved, shown)
    loaders = {}
    for keys, state in _walk(content, ()):
        name = ".".join(map(str, keys)) or "state"
        loaders[name] = _loader(read_state(state, f"the saved position {name!r} of {shown}"), keys)
    if not loaders:
        raise StateError(
            f"{shown} holds no place in streaming data; it was saved without StreamingStateCallback, or without "
            "callbacks"
        )
    return Places(loaders=loaders, trainer=None)


def at(content: Any, keys: Sequence[str | int]) -> Any:
    """What lies in a file under these keys."""
    for key in keys:
        content = content[key]
    return content


def _callback_state(content: Any) -> Any:
    callbacks = content.get("callbacks") if isinstance(content, Mapping) else None
    return callbacks.get(CALLBACK_KEY) if isinstance(callbacks, Mapping) else None


def _callback_places(content: Mapping[str, Any], saved: object, shown: str) -> Places:
    try:
        run = read_run(saved)
    except StateError as error:
        raise StateError(f"{shown}: {error}") from error
    if run.trainer is None:
        raise StateError(f"{shown} was saved before the first batch, so it holds no place in streaming data")
    step = content.get("global_step")
    keys = ("callbacks", CALLBACK_KEY, "loaders")
    return Places(
        loaders={
            name: _loader(position, (*keys, name), run.samples_per_global_batch.get(name))
            for name, position in run.loaders.items()
        },
        trainer=TrainerPlace(**asdict(run.trainer), global_step=step if isinstance(step, int) else None),
    )


def _loader(position: SavedPosition, keys: tuple[str | int, ...], global_batch: int | None = None) -> SavedLoader:
    if position.geometry is not None:  # that of the epoch's batches, whatever this run's are
        global_batch = position.geometry.global_batch_size if global_batch is None else global_batch
    return SavedLoader(keys=keys, position=position, global_batch=global_batch)


def _walk(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if value.keys() >= _KEYS:
            yield keys, value
            return
        entries: Any = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    else:
        return
    if len(keys) < _DEEPEST:
        for key, inner in entries:
            yield from _walk(inner, (*keys, key))
