"""litdata as it reads tokens for language models: one long row of tokens, cut into blocks by its ``TokensLoader``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from litdata import StreamingDataset, TokensLoader

from benchmarks.reading.case import Case
from benchmarks.reading.systems.litdata import batches, store
from benchmarks.reading.works import samples


def write(case: Case) -> None:
    """Store the samples one after another."""
    rows = (torch.from_numpy(sample["tokens"]) for sample in samples(case.kind, case.samples, case.size))
    store(rows, case.folder("litdata_tokens"), item_loader=TokensLoader(block_size=case.size))


def dataset(case: Case) -> Any:
    """The blocks."""
    return StreamingDataset(str(case.folder("litdata_tokens")), item_loader=TokensLoader(block_size=case.size))


def loader(case: Case) -> Iterable[Any]:
    """Batches of blocks."""
    return batches(case, case.folder("litdata_tokens"), item_loader=TokensLoader(block_size=case.size))
