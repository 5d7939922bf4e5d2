"""Disks so small that they are full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def disk_of(path: Path, kib: int) -> Iterator[Path]:
    """A new directory on a disk of so many KiB of its own, in pages of 4 KiB; skips the test where that may not be."""
    path.mkdir()
    command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", path]
    mount = subprocess.run(command, capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
