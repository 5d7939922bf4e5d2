"""Files with positions in the data: read without running code, moved, and replaced as a whole with a backup.

A checkpoint of Lightning contains the state of our callback, by the names of the train loaders, and counters of the fit
loop, which are moved with it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from lightning_streaming.errors import ConfigError, StateError, StorageError
from lightning_streaming.files import appears_whole
from lightning_streaming.resume import lightning_checkpoint
from lightning_streaming.resume import state as saved_state
from lightning_streaming.resume.saved_fields import LARGEST
from lightning_streaming.resume.state import (
    CALLBACK_KEY,
    MOST_EPOCHS,
    Cursor,
    SavedPosition,
    SavedRun,
    SavedTrainer,
)
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
        if name is not None and name in self.loaders:
            return name
        names, why, hint = ", ".join(self.loaders), f"there is no position of {name!r}", "there is"
        if name is None:
            why, hint = f"there are positions of {len(self.loaders)} loaders", "name one with --loader"
        raise ConfigError(why, hint=f"{hint}: {names}", option="--loader")


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


# What a state says of each stream


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSeen:
    """Samples read of one stream, if every epoch was read with the settings in the state."""

    name: str
    samples: int
    drawn: int
    """Samples of it in each epoch; of a run with phases, from an epoch's beginning to the end of those in the state."""
    before: int | None
    """Samples of it in the epochs that are finished; None if the run has skipped some, and maybe of other streams."""
    this_epoch: int | None
    """Samples of it in this epoch; None if it takes the data to count them."""
    tokens: int | None = None
    """Tokens of it in all epochs; None if not counted: only runs that pack, or mix by tokens, know lengths."""

    @property
    def total(self) -> int | None:
        """Samples of it in all epochs."""
        return None if self.this_epoch is None or self.before is None else self.before + self.this_epoch


def seen_by_fingerprint(position: SavedPosition) -> list[StreamSeen]:
    """Return what the state alone says about each stream; empty if it does not list its streams."""
    fingerprint = position.fingerprint
    if fingerprint is None:
        return []
    (epoch, sample), order, schedule = position.cursor, fingerprint.order, fingerprint.schedule
    skipped, is_packed = position.skipped.values(), fingerprint.packing is not None
    nothing = 0 if sample == 0 else None
    has_skipped = any(start < stop and start[0] < epoch for start, stop in skipped)
    skips_here = any(start < stop and start[0] <= epoch <= stop[0] for start, stop in skipped)
    alone = None
    if len(fingerprint.streams) == 1 and not is_packed:
        alone = skipped_in_epoch(skipped, epoch).kept_before(sample)
    listed_to = max((phase.stop for phase in (schedule or {}).values()), default=0)
    seen = []
    for name, stream in fingerprint.streams.items():
        drawn = stream.samples_drawn
        before, now = None if has_skipped else epoch * drawn, 0 if sample == 0 else alone
        if schedule is not None and order.batching_method != "random":  # some samples that are drawn are left out
            before, now = None if epoch else 0, nothing
        elif schedule is not None:
            if epoch and listed_to != order.epoch_size:  # it was moved to an epoch whose phases are not all listed
                before = None
            if is_packed or drawn != listed_to or sample > listed_to:
                now = drawn if sample == listed_to and not skips_here and not is_packed else nothing
            # Else no other stream was read.
        seen.append(StreamSeen(name=name, samples=stream.samples, drawn=drawn, before=before, this_epoch=now))
    return seen


# Moves of positions


def placed(loader: SavedLoader, cursor: Cursor) -> Cursor:
    """Return a requested position, with the end of an epoch written as the beginning of the next.

    Only the end of the first epoch of a run with phases stays as it is: more phases may follow in that epoch.

    Raises:
        ConfigError: No run has so many epochs, or the epoch is known to have fewer samples.
    """
    size, (epoch, sample) = loader.epoch_size, cursor
    if epoch >= MOST_EPOCHS:
        raise ConfigError(f"positions have epochs below {MOST_EPOCHS}, so there is no epoch {epoch}", option="--epoch")
    if sample > LARGEST:
        raise ConfigError(
            f"positions have {LARGEST} {loader.unit}s at most, so there is no {sample}", option="--sample"
        )
    if size is not None and sample > size:
        raise ConfigError(f"an epoch has {size} samples, so there is no sample {sample}", option="--sample")
    if size is None or sample != size or _is_end_of_phases(loader, cursor):
        return cursor
    return cursor.passes_later(1)


def _is_end_of_phases(loader: SavedLoader, cursor: Cursor) -> bool:
    """Return whether all phases of the first epoch were read there, and others can follow."""
    fingerprint = loader.position.fingerprint
    has_phases = fingerprint is not None and fingerprint.schedule is not None
    return has_phases and not loader.is_packed and cursor == Cursor(0, loader.epoch_size or 0)


def imported(position: SavedPosition, before: Places | None, name: str) -> SavedPosition:
    """Return a position from elsewhere for a loader, with the end of an epoch written as the beginning of the next.

    It may count what the reference reads twice: up to one sample for each canonical node, and a batch.

    Args:
        position: The position.
        before: Positions of the checkpoint, if any, which have the size of an epoch.
        name: The loader.

    Raises:
        ConfigError: The epoch is known to have fewer samples, or the trainer to read fewer batches of it.
    """
    loader = None if before is None else before.loaders.get(name)
    size = None if loader is None else loader.epoch_size
    if before is None or loader is None or size is None:
        return position
    epoch, sample = position.cursor
    whole = -(-size // position.num_canonical_nodes) * position.num_canonical_nodes
    if sample > whole + (loader.global_batch or 0):
        raise ConfigError(
            f"an epoch of {name!r} has {size} samples in the checkpoint, or {whole} with those read twice, and the "
            f"state to import is at sample {sample} of epoch {epoch}: it is of other data, or another epoch size"
        )
    position = replace(position, cursor=Cursor(epoch, sample) if sample < whole else Cursor(epoch + 1, 0))
    trainer_at(before, {name: position.cursor})
    return position


def samples_later(loader: SavedLoader, samples: int) -> Cursor:
    """Return the position ``samples`` later, over all ranks, or as many packs; also in a later epoch of known size.

    Samples that the run skips anyway are not counted. A position beyond an epoch of packs is an error when the run
    resumes.

    Raises:
        ConfigError: It is in a later epoch, and epochs of composed batches leave out what fills no batch.
    """
    cursor, size = loader.position.cursor, loader.epoch_size
    skipped, entries = loader.skipped(cursor.epoch), loader.samples_read(cursor) + samples
    if size is None or entries < skipped.kept_before(size):
        return Cursor(cursor.epoch, skipped.position_after(entries))
    fingerprint = loader.position.fingerprint
    if fingerprint is not None and fingerprint.order.batching_method != "random":
        raise ConfigError(
            f"{samples} samples later is beyond the end of epoch {cursor.epoch}, and with "
            f"batching_method={fingerprint.order.batching_method!r} that is a little before {size}",
            hint="use --batches, or state set",
            option="--samples",
        )
    last_skipped_epoch = max((stop[0] for _, stop in loader.position.skipped.values()), default=0)
    epoch = cursor.epoch
    while epoch <= last_skipped_epoch and entries >= (kept := loader.skipped(epoch).kept_before(size)):
        entries -= kept
        epoch += 1
    if epoch <= last_skipped_epoch:
        return Cursor(epoch, loader.skipped(epoch).position_after(entries))
    return Cursor(epoch + entries // size, entries % size)


def batches_later(places: Places, names: tuple[str, ...], batches: int) -> dict[str, Cursor]:
    """Return the positions of some loaders ``batches`` global batches later.

    Raises:
        ConfigError: The number of samples in a global batch is not known; or several loaders would come to the end of
            an epoch, whose sizes differ.
    """
    if len(names) == 1:
        return {names[0]: _only_loader_later(places.loaders[names[0]], places.trainer, batches)}
    later = {name: samples_later(places.loaders[name], batches * _global_batch(places.loaders[name])) for name in names}
    ended = [name for name in names if later[name].epoch != places.loaders[name].position.cursor.epoch]
    trainer = places.trainer and settled(places.trainer)
    if ended or (trainer and 0 < trainer.batches_in_epoch <= trainer.batches + batches):
        raise ConfigError(
            f"{batches} batches later is beyond the end of an epoch, which differs among {len(names)} loaders",
            hint="set each with state set --loader",
            option="--batches",
        )
    return later


def _only_loader_later(loader: SavedLoader, trainer: SavedTrainer | None, batches: int) -> Cursor:
    """Return the position of the only loader ``batches`` global batches later."""
    cursor, size = loader.position.cursor, _global_batch(loader)
    trainer, read = trainer and settled(trainer), loader.samples_read(cursor)
    in_epoch: float
    if trainer and trainer.batches_in_epoch:
        done, in_epoch = trainer.batches, trainer.batches_in_epoch
    elif loader.epoch_size:  # the last batch is as large as the others, some of it read twice
        kept = loader.skipped(cursor.epoch).kept_before(loader.epoch_size)
        in_epoch = -(-kept // size)
        done = in_epoch + (read - kept) // size
    else:
        done, in_epoch = 0, math.inf
    if done + batches < in_epoch:
        return Cursor(cursor.epoch, loader.skipped(cursor.epoch).position_after(read + batches * size))
    skips_others = any(stop > (cursor.epoch, 0) for _, stop in loader.position.skipped.values())
    if loader.is_packed or skips_others:
        why, hint = "and the state does not contain how many packs later epochs have", "use state set"
        if not loader.is_packed:
            others = ", ".join(loader.position.skipped)
            why, hint = f"and the run skips others ({others}), so epochs differ", "use --samples, or state set"
        beyond = f"{batches} batches later is beyond the end of epoch {cursor.epoch}"
        raise ConfigError(f"{beyond}, {why}", hint=hint, option="--batches")
    epochs, into = divmod(done + batches, int(in_epoch))
    return Cursor(cursor.epoch + epochs, into * size)


def _global_batch(loader: SavedLoader) -> int:
    if loader.global_batch is None:
        raise ConfigError(
            f"the number of {loader.unit}s in a global batch of the run (ranks x batch size) is not saved there",
            hint="pass --samples, the batches times that",
            option="--batches",
        )
    return loader.global_batch


def trainer_at(places: Places, moved: Mapping[str, Cursor]) -> SavedTrainer | None:
    """Return the position of the trainer once some loaders are moved; None if the file is of no trainer.

    Epochs move as the loader's do. Unless all loaders are moved, the trainer stays.

    Raises:
        ConfigError: The trainer reads fewer batches of an epoch.
    """
    if places.trainer is None:
        return None
    trainer = settled(places.trainer)
    name = next(iter(moved))
    if len(moved) < len(places.loaders):
        return trainer
    loader, cursor = places.loaders[name], moved[name]
    # If it is not known, the callback computes it on resume.
    batches = 0 if loader.global_batch is None else loader.samples_read(cursor) // loader.global_batch
    if _is_end_of_phases(loader, cursor):
        trainer = replace(trainer, batches_in_epoch=0)  # more phases make it longer
    if len(moved) == 1 and 0 < trainer.batches_in_epoch <= batches:
        raise ConfigError(
            f"the trainer reads {trainer.batches_in_epoch} batches of {loader.global_batch} {loader.unit}s in an "
            f"epoch, so it does not come to {loader.unit} {cursor.sample_in_epoch}",
            hint=f"move to the next epoch with --epoch {cursor.epoch + 1}",
            option="--sample",
        )
    return replace(trainer, epoch=max(0, trainer.epoch + cursor.epoch - loader.position.cursor.epoch), batches=batches)


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
