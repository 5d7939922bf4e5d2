"""The files that hold a place in the data: read, and written again whole or not at all, with a backup."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from lightning_streaming.errors import ConfigError, StateError, StorageError
from lightning_streaming.files import appears_whole
from lightning_streaming.storage import is_url, mask_url
from lightning_streaming.tools.states.unpickling import read_plain_values

_SHARDED_META = "meta.pt"
"""What Lightning calls the part of a sharded checkpoint that is no tensor."""


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
        return _load_json(self.path) if self.is_json else read_plain_values(self.path)

    def load(self, *, allow_unsafe_types: bool) -> Any:
        """All of it, tensors mapped rather than read.

        Args:
            allow_unsafe_types: Whether objects may be loaded that only code they name can make.

        Raises:
            StateError: It is damaged, or holds objects that only code of their own could copy.
        """
        if self.is_json:
            return _load_json(self.path)
        try:
            return torch.load(self.path, map_location="cpu", mmap=True, weights_only=not allow_unsafe_types)
        except pickle.UnpicklingError as error:
            why = str(error).partition("\n")[0]
            raise StateError(
                f"{self.path} is not loaded, because that could run code; say --allow-unsafe-types if you trust "
                f"whoever wrote it. torch says: {why}"
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
            raise StateError(f"{mask_url(url)} is a URL; copy the checkpoint to this machine first")
        raise StateError(f"{path} does not exist")
    if path.is_dir():
        if not (path / _SHARDED_META).is_file():
            raise StateError(f"{path} is a directory without {_SHARDED_META}, so Lightning did not save it")
        path /= _SHARDED_META
    path = path.resolve() if path.is_symlink() else path
    return StateFile(path=path, is_json=not is_zipfile(path))


def write_new(path: Path, value: Any, *, is_json: bool) -> None:
    """Write a file that was not there.

    Raises:
        ConfigError: The file exists.
        StorageError: It could not be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists and is not written over; name another file")
    _write(path, value, is_json)


def _write(path: Path, value: Any, is_json: bool) -> None:
    save: Callable[[Any, Path], object] = _save_json if is_json else torch.save
    if not path.parent.is_dir():
        raise StorageError(f"{path} cannot be written, because there is no directory {path.parent}; make it first")
    try:
        with appears_whole(path) as partial:
            save(value, partial)
            if path.exists():
                shutil.copymode(path, partial)
    except (OSError, RuntimeError) as error:  # torch says in a RuntimeError what the system refuses
        why = str(error).partition("\n")[0]
        raise StorageError(f"{path} could not be written: {why}; make room there, or name another place") from error


def _save_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # bytes that are no text are one, too
        raise StateError(f"{path} is neither a checkpoint, nor a file of torch.save, nor JSON") from error


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
