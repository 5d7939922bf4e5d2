"""Where the golden files are: what the original library wrote, byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE = "LIGHTNING_STREAMING_GOLDEN"
_BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[2] / "shared" / "spec" / "golden"


def golden_path(*parts: str) -> Path:
    """Find a golden file or folder; ``golden_path("mds", "scalars")`` is one dataset.

    Raises:
        FileNotFoundError: It is not there; a test that needs it must fail, never be skipped.
    """
    path = Path(os.environ.get(_VARIABLE) or _BESIDE_THE_REPOSITORY).joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"the golden files are not at {path}; set {_VARIABLE} to the folder that holds them")
    return path
