"""The systems that are measured, each a module with the functions of :class:`System`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.reading.case import Case


class System(Protocol):
    """What a module of this folder has. Its packages are imported with it, so that no import is measured."""

    def write(self, case: Case) -> None:
        """Store the samples, with the system's own writer, in ``case.folder`` of its name."""

    def dataset(self, case: Case) -> Any:
        """What gives ``[i]``; never iterated over."""

    def loader(self, case: Case) -> Iterable[Any]:
        """What gives an epoch of batches each time that it is iterated over, shuffled."""


@dataclass(frozen=True)
class Known:
    """A system by its name."""

    title: str
    is_peer: bool = False
    """Whether it is another library, in an environment of its own."""
    is_limit: bool = False
    """Whether it does less than a reader of datasets does."""


SYSTEMS = {
    "ours": Known("ours"),
    "reference": Known("MosaicML Streaming", is_peer=True),
    "litdata": Known("litdata", is_peer=True),
    "litdata_tokens": Known("litdata, `TokensLoader`", is_peer=True),
    "plain": Known("plain `Dataset`"),
    "copying": Known("copying", is_limit=True),
}


def load(name: str) -> System:
    """Import a system."""
    system: System = importlib.import_module(f"{__name__}.{name}")
    return system
