"""Which tests are fast: those that start no process, no trainer and no store, as their source tells.

A test is slow if it, or what it calls or asks for in ``tests``, names something of :data:`_STARTERS`, gives a loader
workers, or lies in a folder of :data:`_SLOW_FOLDERS` or a file of :data:`_SLOW_FILES`. So no test has to be marked by
hand, and a new one is sorted too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SLOW_FOLDERS = ("trainer", "faults", "examples", "docs", "benchmarks", "servers", "viewing", "planning")
_SLOW_FILES = ("test_budget_runs", "test_inspect_run", "test_select", "test_state_phases", "test_dependencies")
"""Files whose tests make whole runs, or parse every file."""
_SLOW_IMPORTS = ("lightning", "jsonargparse", "accelerate", "transformers", "datasets", "tokenizers", "ray", "pyarrow")
_STARTERS = {
    *("subprocess", "Popen", "multiprocessing", "get_context", "fork", "spawn", "ProcessPoolExecutor", "kill"),
    *("write_parallel", "s3", "gcs", "s3_bucket", "gcs_bucket", "http_store", "sleep"),
    *("azure", "azure_container", "hub", "private_hub"),
    "getfixturevalue",
}
"""Names of what takes seconds to start, or only waits; and of what hides which of them a test asks for."""
_WORKERS = ("workers", "num_workers")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, where only fast tests are asked for, files that have none: importing them takes its time too."""
    if config.option.markexpr == "fast" and collection_path.name in _SLOW_FOLDERS and collection_path.is_dir():
        return True
    if config.option.markexpr != "fast" or collection_path.suffix != ".py":
        return None
    return True if collection_path.name.startswith("test_") and not _fast_tests(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a fast test."""
    workers = [item.callspec.params.get(name) for name in _WORKERS] if hasattr(item, "callspec") else []
    name = getattr(item, "originalname", item.name)
    of_class = getattr(item, "cls", None)
    if (f"{of_class.__name__}.{name}" if of_class else name) in _fast_tests(item.path) and not any(workers):
        item.add_marker(pytest.mark.fast)


@cache
def _fast_tests(path: Path) -> set[str]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if not set(_SLOW_FOLDERS).isdisjoint(parts[:-1]) or parts[-1] in _SLOW_FILES:
        return set()
    module = ".".join(parts)
    if any(_is_slow_import(one) for one, _ in _module(module).imports.values()):
        return set()
    return {name for name in _module(module).tests() if not _is_slow(module, name)}


def _is_slow_import(module: str) -> bool:
    return module.split(".")[0] in _SLOW_IMPORTS


class _Module:
    """What a file of the tests defines and imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions: Mapping[str, ast.AST] = dict(_defined(tree))
        self.imports = dict(_imports(tree))

    def tests(self) -> Iterator[str]:
        """Yield names of tests; those in a class follow its name and a dot."""
        return (name for name in self.functions if name.rpartition(".")[2].startswith("test_"))


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and values; a method of a class of tests with all else that this class holds but its tests."""
    for node in tree.body:
        if isinstance(node, _Function | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            tests = {one for one in node.body if isinstance(one, _Function) and one.name.startswith("test_")}
            shared = [*node.bases, *node.decorator_list, *(one for one in node.body if one not in tests)]
            for test in tests:
                yield f"{node.name}.{test.name}", ast.Module([*shared, test], [])  # type: ignore[list-item]
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name here, and the module and name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, (node.module or "", one.name)) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.asname or one.name, (one.name, "")) for one in node.names)


@cache
def _module(name: str) -> _Module:
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return _Module(ast.parse(path.read_text() if path.is_file() else ""))


_UNDER_WAY: set[tuple[str, str]] = set()  # of functions that call each other


@cache
def _is_slow(module: str, name: str) -> bool:
    """Whether a function or class of the tests starts something, itself or through others."""
    if (module, name) in _UNDER_WAY:
        return False
    _UNDER_WAY.add((module, name))
    found = _find(module, name)
    slow = found is not None and any(
        word in _STARTERS or word == _WORKERS[0] + "=" or _is_slow(found[0], word) for word in _words(found[1])
    )
    slow = slow or _is_slow_import(_module(module).imports.get(name, ("", ""))[0])
    _UNDER_WAY.discard((module, name))
    return slow


def _find(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Where a name is defined, in the tests: here, where it is imported from, or as a fixture of a conftest above."""
    if not module.startswith("tests"):
        return None
    here = _module(module)
    if name in here.functions:
        return module, here.functions[name]
    if name in here.imports:
        return _find(*here.imports[name]) if here.imports[name][1] else None
    parts = module.split(".")
    conftests = (".".join([*parts[:depth], "conftest"]) for depth in range(len(parts) - 1, 0, -1))
    return next(((one, _module(one).functions[name]) for one in conftests if name in _module(one).functions), None)


def _words(tree: ast.AST) -> Iterator[str]:
    """Names that a function mentions; ``workers=`` where it gives something workers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.keyword) and node.arg in _WORKERS:
            yield from [_WORKERS[0] + "="] if _may_be_some(node.value) else []
        elif isinstance(node, ast.Dict):
            given = zip(node.keys, node.values, strict=True)
            values = [value for key, value in given if isinstance(key, ast.Constant) and key.value in _WORKERS]
            yield from [_WORKERS[0] + "="] if any(map(_may_be_some, values)) else []


def _may_be_some(workers: ast.expr) -> bool:
    """Whether a value is not none; of what is passed on under the same name whoever named the number tells."""
    if isinstance(workers, ast.Constant):
        return bool(workers.value)
    return (getattr(workers, "id", None) or getattr(workers, "attr", None)) not in _WORKERS
