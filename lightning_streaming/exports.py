"""Public names of a module, imported when they are first used.

The imports under ``TYPE_CHECKING`` of the module are its only list of names. Type checkers and editors understand them,
and :func:`lazy_exports` reads them from the source. So a writer loads no torch, and a worker process no Lightning.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lightning_streaming.replaced_names import unknown_name


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
            raise unknown_name(module, name, names)
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: names, names
