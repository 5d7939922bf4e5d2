"""What the command line says of a run that failed: one paragraph, or nothing where the traceback is what helps."""

from __future__ import annotations

import errno
import os
import re
import site
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jsonargparse
import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_streaming import errors
from lightning_streaming.errors import FormatError, IntegrityError, StreamingError

_TRACEBACK = "Traceback (most recent call last):"
_OURS = re.compile(rf"^{re.escape(errors.__name__)}\.(\w+): ", re.MULTILINE)
_FILE = re.compile(r'^ +File "([^"]+)", line \d+', re.MULTILINE)
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_LOADS_CHECKPOINTS = ("checkpoint_connector.py", "torch_io.py")
_PARSES_CHECKPOINT = "_parse_ckpt_path"
_LONGEST = 600


def _folder(module: ModuleType) -> str:
    return str(Path(module.__file__ or "").parent)


_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages())
_LIBRARIES = (*map(_folder, (lightning, torch, jsonargparse)), str(Path(__file__).parents[1]))


class Failure(NamedTuple):
    """A failure that needs no traceback."""

    words: str
    """What went wrong, and the way out."""
    is_of_data: bool = False
    """Whether the data is damaged; else something could not be done as asked."""


def failure_of(error: BaseException, checkpoint: str | None = None) -> Failure | None:
    """Tell a failure in words; None for one that comes out of the user's own code, or that nobody foresaw.

    Args:
        error: What ended the run.
        checkpoint: The checkpoint that it was to go on from, if any.
    """
    if isinstance(error, StreamingError):
        return None if _is_caused_by_user(error) else _of_ours(type(error), str(error))
    if isinstance(error, ProcessRaisedException):  # a rank that was spawned: its traceback, as text
        *_, last = [None, *_OURS.finditer(str(error))]
        return last and _of_ours(getattr(errors, last[1]), str(error))
    if _has_foreign_frames(error) or _TRACEBACK in str(error):
        return None
    if _is_of_checkpoint(error):
        return Failure(_words_of_checkpoint(error, checkpoint))
    if isinstance(error, MisconfigurationException | OSError):
        return Failure(_whole_words(error))
    return None


def _of_ours(kind: type[StreamingError], text: str) -> Failure | None:
    """One of our errors, also as it comes out of a worker: with its traceback as text."""
    if any(not _is_library(file) for file in _files_behind(text)):
        return None
    if _TRACEBACK in text:
        *_, last = [None, *_OURS.finditer(text)]
        text = text[last.end() :] if last else text
    return Failure(text.strip(), issubclass(kind, FormatError | IntegrityError))


def _is_caused_by_user(error: BaseException) -> bool:
    links = _causes_of(error)
    return any(not _is_library(file) for link in links for file in (*_files(link), *_files_behind(str(link))))


def _files_behind(text: str) -> list[str]:
    """The files that the causes of an error went through, of which a worker's traceback tells as text."""
    return _FILE.findall(text.rpartition(_CAUSED)[0])


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _is_library(file: str) -> bool:
    return file.startswith(("<", _STANDARD, *_INSTALLED, *_LIBRARIES))


def _has_foreign_frames(error: BaseException) -> bool:
    """Whether an error came through code that belongs neither to Lightning and what it stands on, nor to us."""
    installed = [file for file in _files(error) if not file.startswith(_LIBRARIES) and not _is_of(file, "fsspec")]
    return any(file.startswith(_INSTALLED) or not _is_library(file) for file in installed)


def _is_of(file: str, package: str) -> bool:
    return package in Path(file).parts


def _is_of_checkpoint(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    loads = any(Path(frame.filename).name in _LOADS_CHECKPOINTS and "load" in frame.name for frame in frames)
    return loads or any(
        frame.name == _PARSES_CHECKPOINT or (frame.name.startswith("restore") and _is_of(frame.filename, "connectors"))
        for frame in frames
    )


def _words_of_checkpoint(error: BaseException, checkpoint: str | None) -> str:
    shown = "the checkpoint" if checkpoint is None else f"the checkpoint {checkpoint}"
    words = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, FileNotFoundError):
        return f"there is no {shown.removeprefix('the ')}; correct --ckpt_path ({words})"
    if "loading state_dict" in words:
        return f"{shown} is of another model or optimizer: {words}"
    if isinstance(error, OSError):
        return f"{shown} cannot be read: {words}"
    return f"{shown} does not fit, or is damaged, or no checkpoint at all ({type(error).__name__}: {words})"


def _whole_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" where {os.fsdecode(error.filename)} belongs" if error.filename else ""
        return f"the disk is full{place}; make room, or choose another trainer.default_root_dir"
    return " ".join(str(error).split()) or type(error).__name__
