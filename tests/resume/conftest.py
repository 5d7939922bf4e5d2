"""What several files of tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.phased import phased_loader, read, write_streams


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The streams of ``tests.resume.phased``, each in a directory of its name; nobody changes them."""
    return write_streams(tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="session")
def whole(root: Path) -> list[int]:
    """The first epoch of its phases, uncut."""
    return read(phased_loader(root))
