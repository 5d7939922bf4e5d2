"""Write text as MDS datasets: fixed blocks of bytes, each with an id.

From the repository's root:

    python -m examples.write_dataset                                     # texts that every machine has
    python -m examples.write_dataset --texts my_texts --out my_dataset   # a folder of your own
    python -m examples.write_dataset --append 2000                       # more of the same, behind what is there

The first makes two datasets: DIR/code from the source files of Python's standard library, and DIR/docs from the
licences, readmes and other documents of the packages installed beside it. Ids are unique over both.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_streaming import MDSWriter

BLOCK = 129
"""Bytes in a sample: 128 to predict from, and one more because the targets are the inputs shifted by one."""
FIRST_ID = {"code": 0, "docs": 1_000_000}
MOST_BLOCKS_PER_FILE = 64
"""So that a few long files do not fill a small dataset."""
_DOCUMENT_SUFFIXES = {".md", ".rst", ".txt"}
_DOCUMENT_NAMES = ("METADATA", "LICENSE", "LICENCE", "NOTICE", "COPYING", "AUTHORS")


def code_files() -> Iterator[Path]:
    """Source files of the standard library, always in the same order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"}.intersection(path.relative_to(root).parts):
            yield path


def document_files() -> Iterator[Path]:
    """Documents that installed packages bring along, always in the same order."""
    for package in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info")):
        for path in sorted(package.rglob("*")):
            is_document = path.suffix in _DOCUMENT_SUFFIXES or path.name.upper().startswith(_DOCUMENT_NAMES)
            if is_document and path.is_file():
                yield path


def blocks_of(path: Path) -> Iterator[NDArray[np.uint8]]:
    """A file as arrays of BLOCK bytes; what is left over at its end is dropped."""
    text = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        yield text[start : start + BLOCK]


def write_blocks(files: Iterable[Path], out: Path, *, most: int, first_id: int = 0, append: bool = False) -> int:
    """Write the blocks of some files as one dataset.

    Args:
        files: What to read, in this order.
        out: Directory of the dataset; one that lies there is replaced.
        most: Most samples to write.
        first_id: Id of the first sample; the others count on from there.
        append: Whether to go on where the dataset that lies there ends.

    Returns:
        How many samples the dataset has.
    """
    blocks = (block for path in files for block in islice(blocks_of(path), MOST_BLOCKS_PER_FILE))
    with MDSWriter(
        out=out,
        # A fixed dtype and shape in the encoding take no room in the samples.
        columns={"tokens": f"ndarray:uint8:{BLOCK}", "id": "int"},
        compression="zstd",
        hashes=["sha1"],
        size_limit="64kb",  # tiny shards, for a tiny dataset; leave the default for a real one
        exist_ok=not append,
        mode="append" if append else "create",
    ) as writer:
        written = writer.num_samples
        for block in islice(blocks, written, written + most):
            writer.write({"tokens": block, "id": first_id + written})
            written += 1
            if written % 500 == 0:
                show_progress(out, written)
    show_progress(out, written, end="\n")
    return written


def show_progress(out: Path, written: int, end: str = "") -> None:
    """Print how far writing has come: over the line before on a terminal, else only where it ends."""
    back = "\r" if sys.stdout.isatty() else ""
    if back or end:
        print(f"{back}  {out}: {written} samples of {BLOCK} bytes", end=end, flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output/data"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--texts", type=Path, metavar="DIR", help="write the *.txt files of this folder, as one dataset"
    )
    parser.add_argument("--append", type=int, metavar="N", help="write up to N samples more to each dataset")
    parser.add_argument("--most", type=int, default=4000, help="most samples per dataset (default: %(default)s)")
    arguments = parser.parse_args()
    how = {"most": arguments.append or arguments.most, "append": arguments.append is not None}
    if arguments.texts is None:
        write_blocks(code_files(), arguments.out / "code", first_id=FIRST_ID["code"], **how)
        write_blocks(document_files(), arguments.out / "docs", first_id=FIRST_ID["docs"], **how)
    elif write_blocks(sorted(arguments.texts.rglob("*.txt")), arguments.out, **how) == 0:
        sys.exit(f"no file {arguments.texts}/**/*.txt has {BLOCK} bytes")


if __name__ == "__main__":
    main()
