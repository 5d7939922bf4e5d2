"""Data and arguments of the examples that train a line, one for each trainer: a module, not a program."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_streaming import MDSWriter

SAMPLES, BATCH_SIZE, EPOCHS = 240, 8, 2
"""240 samples / 8 samples per batch = 30 batches per epoch."""


def write_samples(out: Path) -> None:
    """Write points of a line as a dataset, unless it exists."""
    if (out / "index.json").exists():
        return
    with MDSWriter(out=out, columns={"id": "int", "x": "float32", "y": "float32"}, size_limit="4kb") as writer:
        for sample in range(SAMPLES):
            x = sample / SAMPLES
            writer.write({"id": sample, "x": x, "y": 2 * x - 1})


def parse_arguments(description: str | None, out: str, stop_after: int) -> tuple[Path, int]:
    """Return the directory to write to, and the steps after which to stop, from the command line.

    Args:
        description: Docstring of the program.
        out: Default of ``--out``.
        stop_after: Default of ``--stop-after``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="default: %(default)s")
    parser.add_argument("--stop-after", type=int, default=stop_after, metavar="STEPS", help="default: %(default)s")
    arguments = parser.parse_args()
    return arguments.out, arguments.stop_after
