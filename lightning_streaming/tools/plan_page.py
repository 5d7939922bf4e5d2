"""The page of a plan: one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page."""
