"""Write the datasets of ``litdata_0_2_17``, and what that release itself reads of them. For a Python that has it, and
setuptools before 81, from the root of the repository:

    python -m tests.golden.make_early_litdata tests/golden/litdata_0_2_17
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataset, TokensLoader  # of an environment of its own
from litdata.streaming.writer import BinaryWriter

from tests.golden.litdata_values import describe


def _mixed(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "share": number / 7,
        "text": f"é{number}",
        "raw": bytes([number]),
        "array": np.arange(number, dtype=np.int16),
        "two": np.arange(4.0).reshape(2, 2) + number,
        "t1": torch.arange(number),
        "t2": torch.arange(2 * number).reshape(2, number),
    }


def _row(number: int) -> dict[str, Any]:
    return {"id": number, "text": f"é{number}"}


def _plain(value: Any) -> Any:
    """It gives ints and floats as numpy's."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


DATASETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixed": (_mixed, {}),
    "pair": (lambda n: (torch.full((2, 2), n), n), {}),
    "zipped": (_row, {"compression": "zstd"}),
    "tokens": (lambda n: torch.arange(n * 10, n * 11 + 1), {"chunk_size": 40}),
}


def write(out: Path) -> None:
    """All datasets, and what litData reads of them."""
    expected = {}
    for name, (make, how) in DATASETS.items():
        loader = {"item_loader": TokensLoader(block_size=5)} if name == "tokens" else {}
        writer = BinaryWriter(str(out / name), **{"chunk_size": 4, **how})
        for number in range(8):
            writer[number] = make(number + 1)
        writer.done()
        writer.merge()
        with tempfile.TemporaryDirectory() as scratch:
            copy = shutil.copytree(out / name, Path(scratch) / name)  # it unpacks beside what it reads
            dataset = StreamingDataset(str(copy), shuffle=False, drop_last=False, **loader)
            expected[name] = [describe(_plain(dataset[place])) for place in range(len(dataset))]
    (out / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    write(target)
