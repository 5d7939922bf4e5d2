"""What several files of tests read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.formats.every_format import FORMS


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the samples lie in a form, which nobody may change; or in MDS as "mds of" it."""
    root = tmp_path_factory.mktemp("every")

    def write(name: str) -> Path:
        path = root / name
        if name.startswith("mds of "):
            return path if path.exists() else FORMS[name.removeprefix("mds of ")].write_as_mds(path)
        if not path.exists():
            path.mkdir()
            FORMS[name].write(path)
        return path

    return write


@pytest.fixture
def copied(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """The same, in a copy to be damaged."""
    return lambda name: Path(shutil.copytree(written(name), tmp_path / "copy"))
