"""Directories for tests in which processes of other users look."""

from __future__ import annotations

import tempfile
from pathlib import Path


def open_to_all(directory: Path) -> None:
    """Let every user come as far as ``directory``; pytest keeps its own for one user."""
    shared = Path(tempfile.gettempdir())
    for parent in directory.parents:
        if parent == shared or shared not in parent.parents:
            break
        parent.chmod(0o755)
