"""The house as the design draws it: imports point down, rooms on one floor know nothing of each other."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "lightning_streaming"
ROOT = Path(__file__).parents[1] / PACKAGE
FLOORS = {
    "__main__": 9,
    "distributed": 9,
    "logs": 9,
    "trainer": 8,
    "tools": 8,
    "reading": 7,
    "dataset": 6,
    "resume": 5,
    "selection": 4,
    "cache": 3,
    "writing": 3,
    "options": 2,
    "formats": 1,
    "storage": 1,
    "tokenizing": 1,
    "sequence": 1,
    "errors": 0,
    "escaping": 0,
    "exports": 0,
    "units": 0,
    "world": 0,
    "files": 0,
    "signatures": 0,
    "terminal": 0,
    "waits": 0,
}
FLOORS_OF_TOOLS = {
    "viewing": 3,
    "planning": 3,
    "tuning": 3,
    "starting": 3,
    "converting": 3,
    "runs": 2,
    "stored": 1,
    "report": 1,
    "commands": 0,
    "console": 0,
}
"""Of the rooms within ``tools``; the tools themselves stand above them all."""


class Import(NamedTuple):
    """One import statement."""

    file: str
    """Under the package, with its folder."""
    module: str
    in_function: bool
    for_types_only: bool

    @property
    def room(self) -> str:
        """Where it stands."""
        return self.file.removesuffix(".py").split("/")[0]

    @property
    def target(self) -> str:
        """The room it imports from; empty for the package itself, or another package."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else ""


_PACKAGES = {PACKAGE, f"{PACKAGE}.tools"} | {f"{PACKAGE}.tools.{room}" for room in FLOORS_OF_TOOLS}
"""What modules are imported from by name: the module is meant."""


def _file_of(module: str) -> str | None:
    """Return the file of a module, under the package; None if it is none, or a package, whose file only passes on."""
    path = ROOT.parent / f"{module.replace('.', '/')}.py"
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) and path.is_file() else None


def _imports_in(tree: ast.AST, file: str, in_function: bool = False, types: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(file, alias.name, in_function, types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            module = node.module or ""
            names = [
                f"{module}.{alias.name}" if module in _PACKAGES or _file_of(f"{module}.{alias.name}") else module
                for alias in node.names
            ]
            yield from (Import(file, name, in_function, types) for name in names)
        else:
            function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            yield from _imports_in(node, file, in_function or function, types or checking)


def _files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


FRONT_DOOR = "__init__.py"
IMPORTS = [
    one
    for path in _files()
    for one in _imports_in(_tree(path), path.relative_to(ROOT).as_posix())
    if path != ROOT / FRONT_DOOR
]


def _told(imports: Iterator[Import]) -> list[str]:
    return sorted({f"{one.file} imports {one.module}" for one in imports})


def test_every_file_is_in_a_room_of_the_design() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in _files()} - {"__init__"}
    assert rooms == set(FLOORS)
    assert len(IMPORTS) > 200


def test_imports_point_down() -> None:
    assert not _told(item for item in IMPORTS if item.target and FLOORS[item.target] > FLOORS[item.room])


def test_rooms_on_one_floor_do_not_import_each_other() -> None:
    same_floor = (one for one in IMPORTS if one.target and FLOORS[one.target] == FLOORS[one.room] > 0)
    assert not _told(one for one in same_floor if one.target != one.room)


def _circles(edges: set[tuple[str, str]]) -> set[str]:
    """Return the nodes that are part of a circle, or on a way between two."""
    while True:
        sources, targets = {source for source, _ in edges}, {target for _, target in edges}
        inner = {(source, target) for source, target in edges if source in targets and target in sources}
        if inner == edges:
            return sources
        edges = inner


def test_files_do_not_import_each_other_in_a_circle_not_even_for_types() -> None:
    edges = {(found.file, file) for found in IMPORTS if (file := _file_of(found.module))}
    assert len(edges) > 500
    # A loader has a position, which reads the loader; data that is appended in mid-run is agreed on by all ranks.
    assert _circles(edges) == {"reading/loader.py", "reading/position.py", "reading/ranks.py"}
    assert _circles({("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"), ("d", "e")}) == {"b", "c", "d"}


def test_rooms_of_tools_keep_to_their_floors() -> None:
    named = {path.relative_to(ROOT / "tools").parts[0] for path in (ROOT / "tools").glob("*/*.py")}
    assert named | {"commands", "console"} == set(FLOORS_OF_TOOLS)
    found = set()
    for one in IMPORTS:
        if one.room != "tools" or one.target != "tools":
            continue
        here, there = one.file.split("/")[1].removesuffix(".py"), one.module.split(".")[2:3]
        assert there, f"{one.file} imports through the door of tools"
        below, above = FLOORS_OF_TOOLS.get(there[0], 4), FLOORS_OF_TOOLS.get(here, 4)
        if here != there[0] and (below > above or below == above > 0):
            found.add(f"{one.file} imports {one.module}")
    assert not found


def _rooms_named(path: Path) -> set[str]:
    """Rooms other than its own whose modules a file names in texts, to import them when they are wanted."""
    texts = (node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant))
    named = {text.split(".")[1] for text in texts if isinstance(text, str) and text.startswith(f"{PACKAGE}.")}
    return named & set(FLOORS) - {path.relative_to(ROOT).parts[0].removesuffix(".py")}


def test_modules_are_imported_by_name_only_where_it_takes_lightning() -> None:
    """Importing it takes seconds: so the command line asks for it late, and so do the tools that read runs."""
    found = {path.relative_to(ROOT).as_posix(): _rooms_named(path) for path in _files() if path != ROOT / FRONT_DOOR}
    assert {file: rooms for file, rooms in found.items() if rooms} == {
        "__main__.py": {"trainer"},
        "tools/commands.py": {"trainer"},
    }


def test_floor_0_imports_only_what_its_errors_need() -> None:
    below = ("", "errors", "escaping", "signatures")
    assert not _told(one for one in IMPORTS if FLOORS[one.room] == 0 and one.target not in below)


def test_tools_print_through_the_console_alone() -> None:
    """It escapes what is printed: names of files and columns are not checked by anybody."""
    calls = [
        (path.relative_to(ROOT).as_posix(), ast.unparse(node))
        for path in _files()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert {file for file, _ in calls} == {"tools/console.py", "tools/cache.py", "tools/viewing/server.py"}
    assert [call for file, call in calls if file == "tools/viewing/server.py"] == ["print(url, flush=True)"]
    assert all("file=sys.stderr" in call for file, call in calls if file == "tools/cache.py")


def test_every_logger_escapes_its_arguments() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in _files() if "getLogger(__name__)" in path.read_text()}
    assert not files, "use package_logger"


def test_nobody_imports_through_the_front_door() -> None:
    """The version is defined there, and saved states name it."""
    assert _told(one for one in IMPORTS if one.module == PACKAGE) == ["resume/state.py imports lightning_streaming"]


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("lightning", {"trainer"}),
        ("jsonargparse", {"trainer"}),
        ("torch", {"trainer", "tools", "reading", "dataset", "world", "formats"}),
        ("fsspec", {"storage"}),
        ("filelock", {"files"}),
        ("matplotlib", {"tools"}),
        ("aiohttp", {"storage", "tools"}),
        ("jinja2", {"tokenizing", "tools"}),
        ("markupsafe", {"tools"}),
        ("pyarrow", {"formats", "selection", "tools"}),
        ("duckdb", {"selection"}),
        ("tokenizers", {"tokenizing"}),
        ("ray", {"writing"}),
        ("tqdm", {"waits"}),
        ("numba", {"sequence"}),
        ("PIL", {"formats"}),
        ("simplejpeg", {"formats"}),
        ("zstandard", {"formats"}),
        ("xxhash", {"formats"}),
    ],
)
def test_a_package_is_imported_in_its_rooms_only(package: str, rooms: set[str]) -> None:
    users = (one for one in IMPORTS if one.module.split(".")[0] == package)
    assert not _told(one for one in users if one.room not in rooms)


@pytest.mark.parametrize(
    ("package", "files"), [("torch", ("formats/litdata/", "formats/images.py")), ("pyarrow", ("formats/arrow/",))]
)
def test_of_the_formats_only_those_with_such_values_import_these_when_they_are_read(
    package: str, files: tuple[str, ...]
) -> None:
    found = [one for one in IMPORTS if one.module.split(".")[0] == package and one.room == "formats"]
    assert found
    assert all(one.file.startswith(files) and (one.in_function or one.for_types_only) for one in found)


def test_the_package_is_not_imported_inside_functions() -> None:
    assert not _told(one for one in IMPORTS if one.target and one.in_function)


def test_the_front_door_imports_the_trainer_for_types_only() -> None:
    imports = list(_imports_in(_tree(ROOT / FRONT_DOOR), FRONT_DOOR))
    assert {one.for_types_only for one in imports if one.target == "trainer"} == {True}


def test_each_file_says_what_it_is_and_hides_no_error() -> None:
    for path in _files():
        tree = _tree(path)
        assert ast.get_docstring(tree) or not tree.body, path
        functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        assert "__del__" not in {function.name for function in functions}, path
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), path


def test_no_two_classes_have_one_name() -> None:
    trees = [_tree(path) for path in _files()]
    classes = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} == set()
