"""What is wrong with a class that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import TracebackType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_streaming.trainer.written import Written

_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def wrong_class(written: Iterable[Written]) -> str | None:
    """Say which class of model or data is none; None if both are fine, or are not named.

    Raises:
        Exception: What a module raised while it was imported; with the traceback of that module alone.
    """
    for field, base in _BASES.items():
        paths = [one.value for one in written if one.name in (field, f"{field}.class_path")]
        named = [path for path in paths if isinstance(path, str) and "." in path]
        words = _wrong(named[-1], base) if named else None
        if words:
            return f"{field}.class_path: {words}"
    return None


def _wrong(path: str, base: type) -> str | None:
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            return f"there is no module {error.name}, in the current directory or installed, as {path} needs it"
        return f"{module_name} imports {error.name}, which is not installed"
    except SyntaxError as error:
        return f"{module_name} cannot be imported: {error.filename}, line {error.lineno}: {error.msg}"
    except Exception as error:  # noqa: BLE001 - whatever a module of the user raises
        failed = error
    else:
        return _not_in(module, path, name, base)
    raise failed.with_traceback(_beyond_import(failed.__traceback__)) from failed.__cause__


def _not_in(module: Any, path: str, name: str, base: type) -> str | None:
    found = getattr(module, name, None)
    if inspect.isclass(found):
        if issubclass(found, base):
            return None
        return f"{path} is no {base.__name__}; its bases are {', '.join(one.__name__ for one in found.__bases__)}"
    if found is not None:
        return None  # a function that makes one, maybe
    known = [other for other, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base)]
    close = get_close_matches(name, known, 1, cutoff=0.5)
    return f"the module {module.__name__} has no {name}" + (f"; did you mean {close[0]}?" if close else "")


def _beyond_import(found: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that only import."""
    while found is not None and (
        "importlib" in found.tb_frame.f_code.co_filename or found.tb_frame.f_globals["__name__"] == __name__
    ):
        found = found.tb_next
    return found
