"""Read a run of the oracle, and note what was read: ``python -m tests.oracle.record`` writes the golden file anew.

Write it anew only where an order is to change, which the changelog then says loudly: runs in progress would change too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_streaming import StreamingDataLoader
from lightning_streaming.errors import StreamingError
from tests.golden import golden_path
from tests.oracle.cases import Case, Geometry, cases, dataset_of, write_data

GOLDEN = golden_path() / "oracle.json.xz"
_DIGITS = 32


def read(case: Case, root: Path) -> dict[str, Any]:
    """Read the epochs of a run, and what is left of them from the middle of the first on another world.

    Returns:
        ``read`` and ``resumed``: a digest of all batches of all ranks, or the name of the error; ``state``: the saved
        position between the two.
    """
    try:
        digest, state = _read_through(case, case.start, root)
    except StreamingError as error:
        return {"read": type(error).__name__}
    return {"read": digest, "state": state, "resumed": resume(case, state, root)}


def resume(case: Case, state: dict[str, Any], root: Path) -> str:
    """Return the digest of what a resume from a state reads, or the name of its error."""
    try:
        loaders = _loaders(case, case.resumed, root)
        for loader in loaders:
            loader.load_state_dict(state)
        return _digest(step for epoch in _rest(loaders, case.epochs) for step in epoch)
    except StreamingError as error:
        return type(error).__name__


def _loaders(case: Case, geometry: Geometry, root: Path) -> list[StreamingDataLoader]:
    return [StreamingDataLoader(dataset_of(case, geometry, world, root)) for world in geometry.worlds()]


def _rest(loaders: Sequence[StreamingDataLoader], epochs: int) -> Iterator[Iterator[Sequence[Any]]]:
    """Yield the epochs that are left, each as its steps: the batches of all ranks."""
    while loaders[0].state_dict()["epoch"] < epochs:
        yield zip(*loaders, strict=True)


def _read_through(case: Case, geometry: Geometry, root: Path) -> tuple[str, dict[str, Any]]:
    loaders = _loaders(case, geometry, root)
    steps, states = [], []
    for epoch in _rest(loaders, case.epochs):
        for step in epoch:
            steps.append(step)
            states.append(loaders[0].state_dict())
    in_first = sum(state["epoch"] == 0 for state in states)
    return _digest(steps), json.loads(json.dumps(states[in_first // 2]))


def _digest(steps: Any) -> str:
    digest = hashlib.sha256()
    for step in steps:
        for batch in step:
            for piece in _plain(batch):
                digest.update(piece)
    return digest.hexdigest()[:_DIGITS]


def _plain(value: Any, name: str = "") -> Iterator[bytes]:
    """Yield names, types, shapes and bytes of all that a batch holds."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _plain(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _plain(one, f"{name}[{number}]")
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        array = np.asarray(value)
        yield f"{name}:{array.dtype}{array.shape}".encode() + array.tobytes()
    else:
        yield f"{name}={value!r}".encode()


def known() -> dict[str, dict[str, Any]]:
    """Return the golden file, by name of the case."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress(GOLDEN.read_bytes()))
    return found


def main() -> int:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as directory:
        write_data(Path(directory))
        found = {case.name: read(case, Path(directory)) for case in cases()}
    failed = {name: one for name, one in found.items() if len(one["read"]) < _DIGITS or len(one["resumed"]) < _DIGITS}
    if failed:
        raise SystemExit(f"these runs end in an error: {failed}")
    GOLDEN.write_bytes(lzma.compress(json.dumps(found, indent=0, sort_keys=True).encode(), preset=9))
    return 0


if __name__ == "__main__":
    sys.exit(main())
