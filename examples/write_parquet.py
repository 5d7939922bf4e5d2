"""Write text as Parquet files: data as others have it, for a mixture with MDS.

From the repository's root:

    python -m examples.write_parquet            # demo_output/parquet/train-0.parquet, train-1.parquet, ...

The texts are the documents of ``examples.write_dataset``, with ids of their own.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.write_dataset import blocks_of, document_files

FIRST_ID = 2_000_000
FILES = 4


def write_files(out: Path, samples: int = 2000) -> None:
    """Write some blocks of documents as four Parquet files.

    Args:
        out: Their directory.
        samples: How many blocks.
    """
    blocks = list(islice((block for path in document_files() for block in blocks_of(path)), samples))
    ids = np.arange(FIRST_ID, FIRST_ID + len(blocks))
    out.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        part = slice(len(blocks) * number // FILES, len(blocks) * (number + 1) // FILES)
        table = pa.table({"id": ids[part], "tokens": blocks[part], "bytes_in_all": [len(one) for one in blocks[part]]})
        pq.write_table(table, out / f"train-{number}.parquet", row_group_size=100)


if __name__ == "__main__":
    write_files(Path("demo_output/parquet"))
