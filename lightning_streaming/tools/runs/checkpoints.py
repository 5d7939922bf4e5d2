"""Files with positions in the data: read without running code, edited, and replaced as a whole with a backup.

A checkpoint of Lightning contains the state of our callback, by the names of the train loaders, and counters of the fit
loop, which are moved with it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
"""Levels of dicts and lists that are searched for states."""


def settled(trainer: SavedTrainer) -> SavedTrainer:
    """Return the same position of a trainer, with the end of an epoch written as the beginning of the next."""
    if not 0 < trainer.batches_in_epoch <= trainer.batches:
        return trainer
    return replace(trainer, epoch=trainer.epoch + 1, batches=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLoader:
    """The saved position of one loader."""

    keys: tuple[str | int, ...]
    """Keys that lead to its state in the file."""
    position: SavedPosition
    global_batch: int | None
    """Samples of one batch over all ranks of the run that saved; None if the file does not say."""

    @property
    def epoch_size(self) -> int | None:
        """Samples per epoch; None if the state does not say, as of packs."""
        fingerprint = self.position.fingerprint
        return None if fingerprint is None or self.is_packed else fingerprint.order.epoch_size

    @property
    def is_packed(self) -> bool:
        """Whether documents are packed, so that its position counts packs."""
        return self.position.fingerprint is not None and self.position.fingerprint.packing is not None

    @property
    def unit(self) -> str:
        """What its position counts."""
        return "pack" if self.is_packed else "sample"

    def skipped(self, epoch: int) -> SkippedPositions:
        """Return the positions of an epoch that the run that saved skips."""
        return skipped_in_epoch(self.position.skipped.values(), epoch)

    def samples_read(self, cursor: Cursor) -> int:
        """Return the samples of its epoch that are read before a cursor, over all ranks."""
        return self.skipped(cursor.epoch).kept_before(cursor.sample_in_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """All positions in a file."""

    loaders: Mapping[str, SavedLoader]
    trainer: SavedTrainer | None = None
    """None if no trainer saved the file, or not with our callback."""
    global_step: int | None = None

    def choose(self, name: str | None) -> str:
        """Return the name of the requested loader, or of the only one.

        Raises:
            ConfigError: There is no such loader, or several and none was named.
        """
        if name is None and len(self.loaders) == 1:
            return next(iter(self.loaders))
        names = ", ".join(self.loaders)
        if name is None:
            raise ConfigError(
                f"there are positions of {len(self.loaders)} loaders",
                hint=f"name one with --loader: {names}",
                option="--loader",
            )
        if name not in self.loaders:
            raise ConfigError(f"there is no position of {name!r}", hint=f"there is: {names}", option="--loader")
        return name


def read_places(path: str) -> Places:
    """Read every position in a file, without its tensors and other objects.

    Args:
        path: A checkpoint, the directory of a sharded one, or a file with only a state.

    Raises:
        StateError: It is none of these, or contains no position, or one that cannot be read.
    """
    return find_places(find_state_file(Path(path)).peek(), path)


def find_places(content: Any, shown: str) -> Places:
    """Find every position in the content of a file.

    In a Lightning checkpoint these are the positions of our callback, by the names of the train loaders. Else they are
    in every dict that looks like a state of ours or of MosaicML Streaming, named by the keys that lead to it, like
    "state.dataset_state.train".

    Args:
        content: The content.
        shown: The file, for messages.

    Raises:
        StateError: There is none, or one that cannot be read.
    """
    saved = _callback_state(content)
    loaders = {}
    if saved is None:
        for keys, state in _states_in(content, ()):
            name = ".".join(map(str, keys)) or "state"
            loaders[name] = _loader(saved_state.read_state(state, f"the saved position {name!r} of {shown}"), keys)
        if not loaders:
            raise StateError(
                f"{shown} contains no position in streaming data",
                hint="it was saved without StreamingStateCallback, or without callbacks",
                path=shown,
            )
        return Places(loaders=loaders)
    try:
        run = saved_state.read_run(saved)
    except StateError as error:
        raise error.with_context(shown, path=shown) from error
    if run.trainer is None:
        raise StateError(
            f"{shown} was saved before the first batch, so it contains no position in streaming data", path=shown
        )
    for name, position in run.loaders.items():
        keys = ("callbacks", CALLBACK_KEY, "loaders", name)
        loaders[name] = _loader(position, keys, run.samples_per_global_batch.get(name))
    step = content.get("global_step")
    return Places(loaders=loaders, trainer=run.trainer, global_step=step if isinstance(step, int) else None)


def has_positions(content: Any) -> bool:
    """Return whether it is a checkpoint with a state of our callback that contains a position.

    Raises:
        StateError: That state cannot be read.
    """
    saved = _callback_state(content)
    return saved is not None and saved_state.read_run(saved).trainer is not None


def _callback_state(content: Any) -> Any:
    callbacks = content.get("callbacks") if isinstance(content, Mapping) else None
    return callbacks.get(CALLBACK_KEY) if isinstance(callbacks, Mapping) else None


def _loader(position: SavedPosition, keys: tuple[str | int, ...], global_batch: int | None = None) -> SavedLoader:
    if position.geometry is not None and global_batch is None:  # that of the epoch's batches
        global_batch = position.geometry.global_batch_size
    return SavedLoader(keys=keys, position=position, global_batch=global_batch)


def _states_in(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield what looks like a state, with the keys that lead to it."""
    if isinstance(value, Mapping) and value.keys() >= _KEYS:
        yield keys, value
    elif isinstance(value, (Mapping, list, tuple)) and len(keys) < _DEEPEST:
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _states_in(inner, (*keys, key))


# Editing the content


def batches_trained(checkpoint: Mapping[str, Any]) -> int:
    """Return the batches over all epochs that the weights have seen.

    Raises:
        StateError: As for :func:`move_trainer`.
    """
    trainer = checkpoint["callbacks"][CALLBACK_KEY]["trainer"]
    return lightning_checkpoint.batches_in_weights(checkpoint, trainer["epoch"], trainer["batches"])


def move_trainer(checkpoint: MutableMapping[str, Any], epoch: int, batches: int) -> None:
    """Move the trainer of a checkpoint to the end of ``batches`` batches of ``epoch``.

    Raises:
        StateError: The checkpoint was not saved by a supported Lightning release.
    """
    lightning_checkpoint.move_counters(checkpoint, batches_trained(checkpoint), epoch, batches)
    state = checkpoint["callbacks"][CALLBACK_KEY]
    state["trainer"].update(epoch=epoch, batches=batches)
    state.pop("validation", None)  # belongs to the position before
    if batches >= state["trainer"]["batches_in_epoch"]:
        state["trainer"]["batches_in_epoch"] = 0  # the epoch continues, and its length is not known


def move(content: Any, keys: Sequence[str | int], cursor: Cursor) -> None:
    """Move a position in the content of a file; its keys are the same in states of every version.

    Args:
        content: The content.
        keys: Keys that lead to its state.
        cursor: The new cursor.
    """
    state = content
    for key in keys:
        state = state[key]
    state.update({"epoch": cursor.epoch, "sample_in_epoch": cursor.sample_in_epoch})
    if cursor.sample_in_epoch == 0:  # batches of a new epoch are composed for the nodes that read it
        state.pop("batch_geometry", None)


def add_position(checkpoint: MutableMapping[str, Any], loader: str, position: SavedPosition) -> None:
    """Add the position of a loader to a checkpoint, replacing its present one, if any.

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


# The file


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFile:
    """A file of ``torch.save`` or of JSON."""

    path: Path
    """The file itself: of a sharded checkpoint the one with its state; the target of a link."""
    is_json: bool

    def peek(self) -> Any:
        """Read its plain values, without tensors and other objects.

        Raises:
            StateError: It is damaged.
        """
        return _load_json(self.path) if self.is_json else lightning_checkpoint.read_plain_values(self.path)

    def load(self, *, allow_unsafe_types: bool) -> Any:
        """Read all of it; tensors are mapped.

        Args:
            allow_unsafe_types: Whether objects of any class may be loaded, which can run code.

        Raises:
            StateError: It is damaged, or contains such objects.
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
                hint=f"pass --allow-unsafe-types if you trust its author. torch says: {why}",
                path=str(self.path),
                option="--allow-unsafe-types",
            ) from error

    def replace(self, value: Any) -> Path:
        """Replace its content, and return the file that has the earlier content.

        Raises:
            StorageError: It could not be written; it is unchanged.
        """
        for number in count(1):  # last.ckpt.bak, last.ckpt.bak2, and so on
            backup = self.path.with_name(f"{self.path.name}.bak{'' if number == 1 else number}")
            try:
                os.link(self.path, backup)
            except FileExistsError:
                continue
            except OSError:  # a filesystem without hard links
                if backup.exists():
                    continue
                with appears_whole(backup) as partial:
                    shutil.copy2(self.path, partial)
            break
        _write(self.path, value, self.is_json)
        return backup


def find_state_file(path: Path) -> StateFile:
    """Find the file of an argument: a checkpoint, the directory of a sharded one, or a file with only a state.

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
    """Write a new file.

    Raises:
        ConfigError: The file exists.
        StorageError: It could not be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists and is not overwritten", hint="name another file", path=str(path))
    _write(path, value, is_json)


def _write(path: Path, value: Any, is_json: bool) -> None:
    import torch

    if not path.parent.is_dir():
        raise StorageError(
            f"{path} cannot be written, because there is no directory {path.parent}", hint="create it", path=str(path)
        )
    try:
        with appears_whole(path) as partial:
            if is_json:
                partial.write_text(json.dumps(value, indent=2) + "\n")
            else:
                torch.save(value, partial)
            if path.exists():
                shutil.copymode(path, partial)
    except (OSError, RuntimeError) as error:  # torch reports errors of the system as RuntimeError
        why = str(error).partition("\n")[0]
        raise StorageError(
            f"{path} could not be written: {why}", hint="free space there, or name another place", path=str(path)
        ) from error


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError, too
        raise StateError(
            f"{path} is neither a checkpoint, nor a file of torch.save, nor JSON", path=str(path)
        ) from error
