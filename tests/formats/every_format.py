"""The same samples in every format, each as its real writer lays it out; and thousands of damaged files of each.

    python -m tests.formats.every_format --format parquet --cases 10000

Every sample has tokens, the first of which tells its number; most have an ``id`` and a text too. All forms have the
same number of samples, and say how many lie in each shard, so that MDS shards of the same sizes can be written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.formats.test_megatron import write as write_megatron
from tests.golden import golden_path
from tests.helpers import write_shards

LENGTH = 5
"""Tokens of a sample where all have as many; others have up to so many."""
SIZES = (7, 1, 12, 5, 9)
COUNT = sum(SIZES)

Sample = dict[str, Any]


def row_of(number: int) -> NDArray[np.int32]:
    """As many tokens as every other sample has."""
    return np.arange(LENGTH * number, LENGTH * (number + 1), dtype=np.int32)


def document_of(number: int) -> NDArray[np.int32]:
    """Tokens, some more or less than other samples have."""
    return row_of(number)[: 1 + number % LENGTH]


def text_of(number: int) -> str:
    """A text, or none."""
    return f"text {number} é " * (number % 3)


@dataclass(frozen=True)
class Form:
    """One way in which samples lie."""

    write: Callable[[Path], None]
    """Writes all samples into a directory that is there."""
    sample: Callable[[int], Sample]
    """What a sample must be read as, by its number."""
    columns: Mapping[str, str]
    """Its columns, and the MDS encodings that give the very same values."""
    options: Mapping[str, Any]
    """What a stream is told."""
    plain: tuple[str, ...]
    """Columns that batches are made of without a look at each sample; none where there are no such."""
    tokens: str
    """The column of tokens."""
    packs: bool
    """Whether samples are documents that can be packed without an option of their lengths."""
    sizes: Sequence[int] = SIZES
    """Samples of each shard."""

    def number(self, sample: Sample) -> int:
        """Which sample one is."""
        return int(sample[self.tokens][0]) // LENGTH

    def write_as_mds(self, root: Path) -> Path:
        """The same samples in MDS shards of the same sizes."""
        return write_shards(root, self.sizes, dict(self.columns), self.sample)


def ranges(sizes: Sequence[int]) -> list[range]:
    """The numbers of the samples of each shard."""
    return [range(first, stop) for first, stop in pairwise(accumulate(sizes, initial=0))]


# --- Parquet ---

PARQUET_SIZES = (7, 5, 1, 12, 9)
_PARQUET_FILES = ((0, 2), (2, 3), (3, 5))
"""Which shards lie in which file."""


def record_of(number: int) -> Sample:
    """A number, a text and an array."""
    return {"id": np.int64(number), "text": text_of(number), "tokens": document_of(number)}


def arrow_table(numbers: Sequence[int]) -> Any:
    """Samples as a table of pyarrow."""
    import pyarrow

    schema = {"id": pyarrow.int64(), "text": pyarrow.string(), "tokens": pyarrow.list_(pyarrow.int32())}
    rows = [{**record_of(number), "id": number, "tokens": document_of(number).tolist()} for number in numbers]
    return pyarrow.Table.from_pylist(rows, pyarrow.schema(list(schema.items())))


def write_parquet(root: Path, **how: Any) -> None:
    """By pyarrow, row group by row group."""
    import pyarrow.parquet

    groups = ranges(PARQUET_SIZES)
    for first, stop in _PARQUET_FILES:
        with pyarrow.parquet.ParquetWriter(root / f"{first}.parquet", arrow_table([0]).schema, **how) as writer:
            for group in groups[first:stop]:
                writer.write_table(arrow_table(group))


def write_datasets(root: Path) -> None:
    """By Hugging Face datasets."""
    import datasets

    groups = ranges(PARQUET_SIZES)
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "text": datasets.Value("string"),
            "tokens": datasets.List(datasets.Value("int32")),
        }
    )
    for first, stop in _PARQUET_FILES:
        numbers = [number for group in groups[first:stop] for number in group]
        rows = {name: [record_of(number)[name] for number in numbers] for name in features}
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(root / f"{first}.parquet", batch_size=max(map(len, groups[first:stop])))


# --- WebDataset ---


def members_of(number: int) -> Sample:
    """A key, a number, a text and an array."""
    return {
        "__key__": f"some/{number:06}",
        "id": number,
        "text": text_of(number),
        "tokens.npy": document_of(number),
    }


def write_tars(root: Path, ending: str = ".tar") -> None:
    """By webdataset."""
    import webdataset

    for shard, numbers in enumerate(ranges(SIZES)):
        with webdataset.TarWriter(str(root / f"{shard:03}{ending}")) as writer:
            for number in numbers:
                writer.write({**members_of(number), "id": str(number).encode()})


# --- rows and blocks ---

_ROW = np.dtype([("id", "<i8"), ("text", "<U24"), ("tokens", "<i4", (LENGTH,))])


def write_rows(root: Path) -> None:
    """By numpy, as records."""
    for shard, numbers in enumerate(ranges(SIZES)):
        rows = np.zeros(len(numbers), _ROW)
        for place, number in enumerate(numbers):
            rows[place] = (number, text_of(number), row_of(number))
        np.save(root / f"{shard}.npy", rows)


def write_long_rows(root: Path) -> None:
    """By numpy, all of a file as one long row and a little more."""
    for shard, numbers in enumerate(ranges(SIZES)):
        tokens = np.concatenate([row_of(number) for number in numbers])
        np.save(root / f"{shard}.npy", np.append(tokens, [0, 0]).astype(np.int32))


def write_documents(root: Path) -> None:
    """As Megatron-LM lays documents out, some of them of two sequences."""
    for shard, numbers in enumerate(ranges(SIZES)):
        told = [document_of(number).tolist() for number in numbers]
        write_megatron(root, [[one] if len(one) % 2 else [one[:1], one[1:]] for one in told], str(shard), 4)


def write_blocks(root: Path) -> None:
    """As Megatron-LM lays documents out, which do not begin where blocks do."""
    for shard, numbers in enumerate(ranges(SIZES)):
        tokens = [token for number in numbers for token in row_of(number).tolist()]
        write_megatron(root, [[tokens[:3]], [tokens[3:], [0, 0]]], str(shard), 4)


# --- litData ---

LITDATA_SIZES = (7, 7, 7, 7, 6)


def item_of(number: int) -> Sample:
    """A number, a text and an array."""
    return {"id": number, "text": text_of(number), "tokens": document_of(number)}


def copy_golden(name: str) -> Callable[[Path], None]:
    """What litData itself wrote."""

    def copy(root: Path) -> None:
        shutil.copytree(golden_path("litdata_0_2_76", name), root, dirs_exist_ok=True)

    return copy


_INT32, _ROW_INT32 = "ndarray:int32", f"ndarray:int32:{LENGTH}"
_RECORD = {"id": "int64", "text": "str", "tokens": _INT32}

FORMS: Mapping[str, Form] = {
    "parquet": Form(write_parquet, record_of, _RECORD, {"format": "parquet"}, ("id",), "tokens", True, PARQUET_SIZES),
    "datasets": Form(write_datasets, record_of, _RECORD, {"format": "parquet"}, ("id",), "tokens", True, PARQUET_SIZES),
    "webdataset": Form(
        write_tars,
        members_of,
        {"__key__": "str", "id": "int", "text": "str", "tokens.npy": _INT32},
        {"format": "webdataset"},
        (),
        "tokens.npy",
        False,
    ),
    "tar.gz": Form(
        lambda root: write_tars(root, ".tar.gz"),
        members_of,
        {"__key__": "str", "id": "int", "text": "str", "tokens.npy": _INT32},
        {"format": "webdataset"},
        (),
        "tokens.npy",
        False,
    ),
    "npy": Form(
        write_rows,
        lambda number: {**record_of(number), "tokens": row_of(number)},
        {"id": "int64", "text": "str", "tokens": _ROW_INT32},
        {"format": "npy"},
        ("id", "tokens"),
        "tokens",
        False,
    ),
    "npy blocks": Form(
        write_long_rows,
        lambda number: {"tokens": row_of(number)},
        {"tokens": _ROW_INT32},
        {"format": "npy", "block_length": LENGTH},
        ("tokens",),
        "tokens",
        False,
    ),
    "megatron": Form(
        write_documents,
        lambda number: {"tokens": document_of(number)},
        {"tokens": _INT32},
        {"format": "megatron"},
        (),
        "tokens",
        True,
    ),
    "megatron blocks": Form(
        write_blocks,
        lambda number: {"tokens": row_of(number)},
        {"tokens": _ROW_INT32},
        {"format": "megatron", "block_length": LENGTH},
        ("tokens",),
        "tokens",
        False,
    ),
    "litdata": Form(
        copy_golden("suite"),
        item_of,
        {"id": "int", "text": "str", "tokens": _INT32},
        {"format": "litdata"},
        ("id",),
        "tokens",
        False,
        LITDATA_SIZES,
    ),
}


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same, of the same types; of arrays also dtype and shape."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if hasattr(left, "dtype") and hasattr(left, "equal"):  # a tensor
        return left.dtype == right.dtype and bool(left.equal(right))
    return bool(left == right)
