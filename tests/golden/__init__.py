"""Golden files: what MosaicML Streaming 0.13 and release 0.1 themselves wrote; see the README beside this file."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def golden_path(*parts: str) -> Path:
    """Find a golden file or folder; ``golden_path("mds", "scalars")`` is one dataset.

    Raises:
        FileNotFoundError: There is none of this name.
    """
    path = _HERE.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"there is no golden file {path}")
    return path
