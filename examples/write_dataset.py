"""Write text as MDS datasets: samples of a fixed number of bytes, each with an id.

    python examples/write_dataset.py                                     # texts of the Python installation
    python examples/write_dataset.py --texts my_texts --out my_dataset   # the *.txt files of a folder
    python examples/write_dataset.py --append 2000                       # appends more samples of the same texts

The first writes demo_output/data/code from the source files of the standard library, and demo_output/data/docs from the
licences and readmes of installed packages, with unique ids: the data of most files in configs/. Takes 5 seconds on two
cores, and prints the samples of each dataset.
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
"""Bytes in a sample: 128, and one more because the targets are the inputs shifted by one."""
FIRST_ID = {"code": 0, "docs": 1_000_000}
MOST_BLOCKS_PER_FILE = 64
"""Limit, so that a few long files do not fill a small dataset."""
_DOCUMENT_SUFFIXES = {".md", ".rst", ".txt"}
_DOCUMENT_NAMES = ("METADATA", "LICENSE", "LICENCE", "NOTICE", "COPYING", "AUTHORS")


def code_files() -> Iterator[Path]:
    """Yield the source files of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"}.intersection(path.relative_to(root).parts):
            yield path


def document_files() -> Iterator[Path]:
    """Yield the documents of installed packages, in a fixed order."""
    for package in [package for directory in sys.path for package in sorted(Path(directory).glob("*.dist-info"))]:
        for path in sorted(package.rglob("*")):
            is_document = path.suffix in _DOCUMENT_SUFFIXES or path.name.upper().startswith(_DOCUMENT_NAMES)
            if is_document and path.is_file():
                yield path


def blocks_of(path: Path) -> Iterator[NDArray[np.uint8]]:
    """Yield a file as arrays of BLOCK bytes; an incomplete last one is dropped."""
    text = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        yield text[start : start + BLOCK]


def write_blocks(files: Iterable[Path], out: Path, *, most: int, first_id: int = 0, append: bool = False) -> int:
    """Write the blocks of some files as one dataset; return its number of samples.

    Args:
        files: Files to read, in this order.
        out: Directory of the dataset; an existing one is replaced.
        most: Largest number of samples to write.
        first_id: Id of the first sample; later ids count up.
        append: Whether to append to the existing dataset.
    """
    blocks = (block for path in files for block in islice(blocks_of(path), MOST_BLOCKS_PER_FILE))
    with MDSWriter(
        out=out,
        # With dtype and shape in the encoding, samples store only the values.
        columns={"tokens": f"ndarray:uint8:{BLOCK}", "id": "int"},
        compression="zstd",
        hashes=["sha1"],
        size_limit="64kb",  # for a tiny dataset; keep the default for a real one
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
    """Print the progress: over the previous line on a terminal, else only at the end."""
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
    parser.add_argument("--append", type=int, metavar="N", help="append up to N samples to each dataset")
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
