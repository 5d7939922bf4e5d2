"""How much of the package runs before the first batch: its files and functions, as a reader of the code meets them.

    python -m benchmarks.code_paths
    python -m benchmarks.code_paths --list        # with the names

Writes 64 samples into zstd-compressed MDS shards, and counts the files and functions of the package that are entered by
constructing a dataset with a loader, by the first batch of 8 samples without workers, and by the second batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

PACKAGE = str(Path(__file__).parents[1] / "lightning_streaming")


def entered(call: Callable[[], Any]) -> tuple[Any, set[tuple[str, str]]]:
    """Return what a call returns, and the functions of the package that it enters, each with its file."""
    functions = set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
            functions.add((code.co_filename[len(PACKAGE) + 1 :], name))

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, functions


def construct(root: Path) -> StreamingDataLoader:
    """Return a loader over the data."""
    return StreamingDataLoader(StreamingDataset(local=str(root), shuffle=True), batch_size=8)


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description="Count the files and functions that a first batch enters.")
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        columns = {"tokens": "ndarray:int32", "text": "str"}
        with MDSWriter(out=root, columns=columns, compression="zstd", size_limit=1024) as writer:
            for number in range(64):
                writer.write({"tokens": np.arange(16, dtype=np.int32), "text": f"sample {number}"})
        construct(root).close()  # imports are not counted
        loader, constructing = entered(lambda: construct(root))
        batches = iter(loader)
        _, first = entered(lambda: next(batches))
        _, second = entered(lambda: next(batches))
        loader.close()
    print("| step | files | functions |\n|---|--:|--:|")
    for name, functions in (("construct", constructing), ("first batch", first), ("second batch", second)):
        print(f"| {name} | {len({file for file, _ in functions})} | {len(functions)} |")
        for file, function in sorted(functions) if options.list else ():
            print(f"    {file}: {function}")


if __name__ == "__main__":
    main()
