"""Names and bytes of files that are kept in a cache: a later release must find what an earlier one wrote."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SELECTION_AND_LENGTHS = {
    "61f59983b339e813a76fe734cba8c342": "134bf22464f5708e",
    "6a2ddab5f5bdf15a3207efd42f6335ca": "1090d798a42aed6f",
}
IDS_OF_A_JOIN = {"fe1bfe4d4b2ba78f8fe6d9ba0943c874": "93c92180f8d9cde5"}


def _write(root: Path, columns: dict[str, str]) -> str:
    values: dict[str, Callable[[int], Any]] = {
        "tokens": lambda number: np.arange(number + 1, dtype=np.uint16),
        "text": str,
    }
    with MDSWriter(out=root, columns={"id": "int", **columns}, hashes=["sha1"], size_limit=400) as writer:
        for number in range(20):
            writer.write({"id": number, **{name: values[name](number) for name in columns}})
    return str(root)


def _kept(cache: Path) -> dict[str, str]:
    """Digests of kept files by name."""
    return {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in cache.glob("selections/*.npy")}


@pytest.mark.skipif(sys.byteorder != "little", reason="the names include the byte order")
def test_kept_selections_lengths_and_ids_keep_their_names(tmp_path: Path) -> None:
    """A failure means that every user computes them again: find out which name changed, and change it back."""
    tokens = _write(tmp_path / "tokens", {"tokens": "ndarray:uint16"})
    texts = _write(tmp_path / "texts", {"text": "str"})
    dataset = StreamingDataset(
        remote=tokens,
        local=str(tmp_path / "kept"),
        selection={"where": "id < 15", "fraction": "0%:90%", "group_by": "id", "seed": 3},
        join={"texts": {"remote": texts, "local": str(tmp_path / "kept_ids"), "key": "id", "columns": ["text"]}},
        packing={"column": "tokens", "capacity": 32},
        batch_size=2,
    )
    assert len(list(StreamingDataLoader(dataset))) > 1
    assert _kept(tmp_path / "kept") == SELECTION_AND_LENGTHS
    assert _kept(tmp_path / "kept_ids") == IDS_OF_A_JOIN
