"""Public names of a module, imported when they are first used, and hints for those that a module does not have.

The imports under ``TYPE_CHECKING`` of the module are its only list of names. Type checkers and editors understand them,
and :func:`lazy_exports` reads them from the source. So a writer loads no torch, and a worker process no Lightning.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from lightning_streaming.signatures import SUBCLASS_HINT, did_you_mean

TOPICS = ("distributed", "formats", "logs", "sequence", "writing")
"""Modules of public names that only some programs need."""

MODULE_HINTS: Mapping[str, str] = {
    "clean_stale_shared_memory": "there is no shared memory to clean up: a new run can start at any time",
    "merge_index": "writing.merge(parts, out) joins datasets, writing.merge_recursive(out) all in a directory",
    "get_list_arg": "text.split(',') does it",
    "streams_registry": "create each Stream, and pass streams=[...]",
    "dataframe_to_mds": "write_parallel writes parts on a cluster; docs/writing.md",
    **dict.fromkeys(("text", "vision", "multimodal", "StreamingVisionDataset"), SUBCLASS_HINT),
    **dict.fromkeys(("StreamingCIFAR10", "StreamingImageNet", "StreamingCOCO", "StreamingADE20K"), SUBCLASS_HINT),
    **dict.fromkeys(("StreamingC4", "StreamingPile", "StreamingEnWiki"), SUBCLASS_HINT),
    "base": "public names are in lightning_streaming itself, or in its modules " + ", ".join(TOPICS),
    **dict.fromkeys(("optimize", "map"), "write_parallel writes a dataset from many inputs, MDSWriter from one"),
    "CombinedStreamingDataset": "StreamingDataset(streams={name: Stream(remote=..., proportion=...)}) mixes datasets",
}
"""Names of other libraries' modules."""


def lazy_exports(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module.

    Args:
        module: Its ``__name__``.
    """
    guarded = (
        node
        for block in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    )
    homes = {name.name: str(node.module) for node in guarded if isinstance(node, ast.ImportFrom) for name in node.names}
    names = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise _unknown_name(module, name, names)
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: names, names


def _unknown_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error to raise where a module has no such name."""
    homes = [f"{__name__.partition('.')[0]}.{topic}" for topic in TOPICS]
    home = next((home for home in homes if name in import_module(home).__all__), None)
    hint = f"from {home} import {name}" if home else MODULE_HINTS.get(name) or did_you_mean(name, known)
    return AttributeError(f"module {module!r} has no attribute {name!r}{f': {hint}' if hint else ''}")
