"""Files that hold a position in the data: read without running code, changed, and written again whole with a backup.

A checkpoint of Lightning holds the state of our callback, by the names of the train loaders, and counters of the fit
loop, which move with it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from lightning_streaming import lightning_checkpoint
from lightning_streaming.errors import ConfigError, StateError, StorageError
from lightning_streaming.files import appears_whole
from lightning_streaming.resume import state as saved_state
from lightning_streaming.resume.state import CALLBACK_KEY, Cursor, SavedPosition, SavedRun, SavedTrainer
from lightning_streaming.sequence.skips import SkippedPositions, skipped_in_epoch
from lightning_streaming.storage import is_url, mask_url

_KEYS = {"epoch", "sample_in_epoch", "shuffle_seed", "num_canonical_nodes"}
_DEEPEST = 6
"""Dicts within dicts to look through."""


def settled(trainer: SavedTrainer) -> SavedTrainer:
    """The same place, the end of an epoch written as the beginning of the next."""
    if not 0 < trainer.batches_in_epoch <= trainer.batches:
        return trainer
    return replace(trainer, epoch=trainer.epoch + 1, batches=0)


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
        """Samples per epoch, if the state says; it does not say how many packs these make."""
        fingerprint = self.position.fingerprint
        return None if fingerprint is None or self.is_packed else fingerprint.order.epoch_size

    @property
    def is_packed(self) -> bool:
        """Whether documents are packed, so that its place counts packs."""
        return self.position.fingerprint is not None and self.position.fingerprint.packing is not None

    @property
    def unit(self) -> str:
        """What its place counts."""
        return "pack" if self.is_packed else "sample"

    def skipped(self, epoch: int) -> SkippedPositions:
        """What the run that saved skips of an epoch."""
        return skipped_in_epoch(self.position.skipped.values(), epoch)

    def samples_read(self, cursor: Cursor) -> int:
        """Samples of its epoch that are read before a place, over all ranks."""
        return self.skipped(cursor.epoch).kept_before(cursor.sample_in_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """All that a file says of places."""

    loaders: Mapping[str, SavedLoader]
    trainer: SavedTrainer | None = None
    """None if no trainer saved the file, or not with our callback."""
    global_step: int | None = None

    def choose(self, name: str | None) -> str:
        """The loader that was asked for, or the only one.

        Raises:
            ConfigError: There is no such loader, or several and none was named.
        """
        if name is None and len(self.loaders) == 1:
            return next(iter(self.loaders))
        if name is None:
            names = ", ".join(self.loaders)
            raise ConfigError(
                f"there are places of {len(self.loaders)} loaders",
                hint=f"name one with --loader: {names}",
                option="--loader",
            )
        if name not in self.loaders:
            raise ConfigError(
                f"there is no place of {name!r}",
                hint=f"there are those of {', '.join(self.loaders)}",
                option="--loader",
            )
        return name


def holds_places(content: Any) -> bool:
    """Whether it is a checkpoint with a state of our callback that holds a place.

    Raises:
        StateError: That state cannot be read.
    """
    saved = _callback_state(content)
    return saved is not None and saved_state.read_run(saved).trainer is not None


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
        loaders[name] = _loader(saved_state.read_state(state, f"the saved position {name!r} of {shown}"), keys)
    if not loaders:
        raise StateError(
            f"{shown} holds no place in streaming data",
            hint="it was saved without StreamingStateCallback, or without callbacks",
            path=shown,
        )
    return Places(loaders=loaders)


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
        run = saved_state.read_run(saved)
    except StateError as error:
        raise error.with_context(shown, path=shown) from error
    if run.trainer is None:
        raise StateError(
            f"{shown} was saved before the first batch, so it holds no place in streaming data", path=shown
        )
    step, keys = content.get("global_step"), ("callbacks", CALLBACK_KEY, "loaders")
    loaders = {
        name: _loader(position, (*keys, name), run.samples_per_global_batch.get(name))
        for name, position in run.loaders.items()
    }
    return Places(loaders=loaders, trainer=run.trainer, global_step=step if isinstance(step, int) else None)


def _loader(position: SavedPosition, keys: tuple[str | int, ...], global_batch: int | None = None) -> SavedLoader:
    if position.geometry is not None and global_batch is None:  # that of the epoch's batches, whatever this run's are
        global_batch = position.geometry.global_batch_size
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


def batches_trained(checkpoint: Mapping[str, Any]) -> int:
    """Batches over all epochs that the weights have seen.

    Raises:
        StateError: As for :func:`move_trainer`.
    """
    place = checkpoint["callbacks"][CALLBACK_KEY]["trainer"]
    return lightning_checkpoint.batches_in_weights(checkpoint, place["epoch"], place["batches"])


def move_trainer(checkpoint: MutableMapping[str, Any], epoch: int, batches: int) -> None:
    """Let a checkpoint say that its trainer has done ``batches`` batches of ``epoch``.

    Raises:
        StateError: It was not saved by a Lightning release that this package knows.
    """
    lightning_checkpoint.move_counters(checkpoint, batches_trained(checkpoint), epoch, batches)
    trainer = checkpoint["callbacks"][CALLBACK_KEY]["trainer"]
    trainer.update(epoch=epoch, batches=batches)
    checkpoint["callbacks"][CALLBACK_KEY].pop("validation", None)  # belongs to the position before
    if batches >= trainer["batches_in_epoch"]:
        trainer["batches_in_epoch"] = 0  # the epoch is to go on: how long it is will be seen


def move(state: MutableMapping[str, Any], cursor: Cursor) -> None:
    """Move a saved position; these keys are the same in states of every version and of MosaicML Streaming."""
    state.update({"epoch": cursor.epoch, "sample_in_epoch": cursor.sample_in_epoch})
    if cursor.sample_in_epoch == 0:  # an epoch that begins is batched for the machines that read it
        state.pop("batch_geometry", None)


def add_place(checkpoint: MutableMapping[str, Any], loader: str, position: SavedPosition) -> None:
    """Give a checkpoint the place of a loader, replacing its present state, if any.

    Raises:
        StateError: It is not a checkpoint of Lightning that ``Trainer.fit`` could resume from.
    """
    trainer = lightning_checkpoint.place_of_counters(checkpoint)
    callbacks = checkpoint.setdefault("callbacks", {})
    saved = callbacks.get(CALLBACK_KEY)
    run = SavedRun() if saved is None else saved_state.read_run(saved)
    if run.trainer is None:
        run = SavedRun(trainer=SavedTrainer(**trainer))
    callbacks[CALLBACK_KEY] = replace(run, loaders={**run.loaders, loader: position}).as_state()


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFile:
    """A file of ``torch.save`` or of JSON."""

    path: Path
    """The file itself: of a sharded checkpoint the one that holds its state; of a link, where it leads."""
    is_json: bool

    def peek(self) -> Any:
        """Its plain values; tensors and other objects are left unread.

        Raises:
            StateError: It is damaged.
        """
        return _load_json(self.path) if self.is_json else lightning_checkpoint.read_plain_values(self.path)

    def load(self, *, allow_unsafe_types: bool) -> Any:
        """All of it, tensors mapped rather than read.

        Args:
            allow_unsafe_types: Whether objects may be loaded that only code they name can make.

        Raises:
            StateError: It is damaged, or holds objects that only code of their own could copy.
        """
        if self.is_json:
            return _load_json(self.path)
        import torch  # not for --help

        try:
            return torch.load(self.path, map_location="cpu", mmap=True, weights_only=not allow_unsafe_types)
        except pickle.UnpicklingError as error:
            why = str(error).partition("\n")[0]
            raise StateError(
                f"{self.path} is not loaded, because that could run code",
                hint=f"say --allow-unsafe-types if you trust whoever wrote it. torch says: {why}",
                path=str(self.path),
                option="--allow-unsafe-types",
            ) from error

    def replace(self, value: Any) -> Path:
        """Write ``value`` in its place, and say which file now holds what it held before.

        Raises:
            StorageError: It could not be written; it is as it was.
        """
        backup = _back_up(self.path)
        _write(self.path, value, self.is_json)
        return backup


def find_state_file(path: Path) -> StateFile:
    """Understand what was typed: a checkpoint, the directory of a sharded one, or a file with a state alone.

    Raises:
        StateError: It is none of these.
    """
    if not path.exists():
        url = str(path).replace(":/", "://", 1)  # a path has one slash less
        if is_url(url):
            raise StateError(
                f"{mask_url(url)} is a URL", hint="copy the checkpoint to this machine first", path=mask_url(url)
            )
        raise StateError(f"{path} does not exist", path=str(path))
    if path.is_dir():
        path /= lightning_checkpoint.SHARDED_META
        if not path.is_file():
            raise StateError(
                f"{path.parent} is a directory without {path.name}, so Lightning did not save it", path=str(path.parent)
            )
    path = path.resolve() if path.is_symlink() else path
    return StateFile(path=path, is_json=not is_zipfile(path))


def write_new(path: Path, value: Any, *, is_json: bool) -> None:
    """Write a file that was not there.

    Raises:
        ConfigError: The file exists.
        StorageError: It could not be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists and is not written over", hint="name another file", path=str(path))
    _write(path, value, is_json)


def _write(path: Path, value: Any, is_json: bool) -> None:
    import torch

    save: Callable[[Any, Path], object] = _save_json if is_json else torch.save
    if not path.parent.is_dir():
        raise StorageError(
            f"{path} cannot be written, because there is no directory {path.parent}",
            hint="make it first",
            path=str(path),
        )
    try:
        with appears_whole(path) as partial:
            save(value, partial)
            if path.exists():
                shutil.copymode(path, partial)
    except (OSError, RuntimeError) as error:  # torch says in a RuntimeError what the system refuses
        why = str(error).partition("\n")[0]
        raise StorageError(
            f"{path} could not be written: {why}", hint="make room there, or name another place", path=str(path)
        ) from error


def _save_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError, too
        raise StateError(
            f"{path} is neither a checkpoint, nor a file of torch.save, nor JSON", path=str(path)
        ) from error


def _back_up(path: Path) -> Path:
    """Give the file a second name that nothing else has: ``last.ckpt.bak``, or ``last.ckpt.bak2``, and so on."""
    for number in count(1):
        backup = path.with_name(f"{path.name}.bak{'' if number == 1 else number}")
        try:
            os.link(path, backup)
        except FileExistsError:
            continue
        except OSError:  # a filesystem without hard links
            if backup.exists():
                continue
            with appears_whole(backup) as partial:
                shutil.copy2(path, partial)
        return backup
    raise AssertionError("numbers do not end")
