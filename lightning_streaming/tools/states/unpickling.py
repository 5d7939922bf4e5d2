"""What a file of ``torch.save`` says, read without running any code that it names, and without its tensors.

Such a file is a zip archive whose record ``data.pkl`` is a pickle; tensors refer to other records. A class or function
that the pickle names is not imported. Its place is taken by :class:`Unread`, which accepts whatever is done to it.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from lightning_streaming.errors import StateError


class Unread:
    """Stands for a value that is no plain one: a tensor, or an object of somebody's class."""

    def __new__(cls, *_: object, **__: object) -> Unread:
        """Take any arguments, and look at none."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        """Keep nothing."""

    def __call__(self, *_: object, **__: object) -> Unread:
        """What a function that was not read would give."""
        return self

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        """Keep nothing."""

    def append(self, value: object) -> None:
        """Keep nothing."""

    def extend(self, values: object) -> None:
        """Keep nothing."""


class _Cautious(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else Unread

    def persistent_load(self, _: object) -> Any:
        return Unread()


def read_plain_values(path: Path) -> Any:
    """What was given to ``torch.save``: dicts, lists, numbers and strings as they are, all else as :class:`Unread`.

    Raises:
        StateError: It is a zip archive, but not one of ``torch.save``, or it is damaged.
    """
    with ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise StateError(f"{path} is a zip archive, but torch.save did not write it")
        try:
            with archive.open(pickles[0]) as file:
                return _Cautious(file, encoding="utf-8").load()
        except (BadZipFile, pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError) as error:
            raise StateError(f"{path} is damaged: {error}") from error
