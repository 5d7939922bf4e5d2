"""Write text as Parquet files, to read them in place or in a mixture with MDS.

    python examples/write_parquet.py                          # writes demo_output/parquet/train-0.parquet, ...
    lightning-streaming fit --config configs/other_formats.yaml

Takes a second on two cores, and prints the directory. The configuration also needs `python examples/write_dataset.py`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BLOCK, SAMPLES, FILES, FIRST_ID = 129, 2000, 4, 2_000_000


def write_files(out: Path) -> None:
    """Write modules of the standard library as four Parquet files, with 129 bytes a row."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in modules), np.uint8)
    blocks = list(text[: SAMPLES * BLOCK].reshape(SAMPLES, BLOCK))
    ids = np.arange(FIRST_ID, FIRST_ID + SAMPLES)
    out.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        part = slice(SAMPLES * number // FILES, SAMPLES * (number + 1) // FILES)
        table = pa.table({"id": ids[part], "tokens": blocks[part], "length": [len(block) for block in blocks[part]]})
        pq.write_table(table, out / f"train-{number}.parquet", row_group_size=100)
    print(f"{out}: {SAMPLES} rows in {FILES} files")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/parquet"), metavar="DIR")
    write_files(parser.parse_args().out)


if __name__ == "__main__":
    main()
