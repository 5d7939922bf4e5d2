"""Two small streams of documents, the run that packs them, and what its batches say is in each pack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.trainer.config import config_of

CAPACITY = 64
_ROOM = 250
"""Tokens tell their document, by its number over all streams, and their place in it."""
LENGTHS: dict[str, list[int]] = {
    name: [int(one) for one in np.minimum(np.random.default_rng(size).lognormal(3, 1, size), 240)]
    for name, size in (("books", 40), ("web", 90))
}
FIRST = {"books": 0, "web": 40}
TOKENS = sum(map(sum, LENGTHS.values()))


def write_documents(root: Path) -> Path:
    """The streams, in a directory each."""
    for name, lengths in LENGTHS.items():
        with MDSWriter(
            out=str(root / name), columns={"tokens": "ndarray:uint16", "size": "int"}, size_limit=2000
        ) as of:
            for number, length in enumerate(lengths, FIRST[name]):
                of.write({"tokens": (number * _ROOM + np.arange(length)).astype(np.uint16), "size": length})
    return root


def packed_train(root: Path, *, packing: Any = None, **changes: Any) -> dict[str, Any]:
    """The data of a run, as a configuration has it."""
    streams = {name: {"remote": str(root / name)} for name in LENGTHS}
    told = {"column": "tokens", "capacity": CAPACITY, "window": 32, **(packing or {})}
    return {"streams": streams, "packing": told, "shuffle": True, "num_canonical_nodes": 2, **changes}


def packed_loader(
    train: dict[str, Any], batch_size: int, *, world: World | None = None, dataset: Any = None, **options: Any
) -> StreamingDataLoader:
    """What a rank reads of such a run."""
    config = config_of(train)
    assert config is not None
    settings = {**config.dataset_arguments(shuffle_by_default=True), **(dataset or {})}
    return StreamingDataLoader(StreamingDataset(**settings, batch_size=batch_size, world=world or World()), **options)


class Piece(NamedTuple):
    """What a pack has of a document."""

    place: int
    """Of the pack in its batch."""
    document: int
    """Which of its documents."""
    number: int
    """Of the document, over all streams."""
    start: int
    stop: int


def pieces(batch: dict[str, Any]) -> Iterator[Piece]:
    """What is in a batch, by its tokens."""
    for place, (tokens, of) in enumerate(zip(batch["input_ids"].tolist(), batch["document_ids"].tolist(), strict=True)):
        for document in range(max(of) + 1):
            mine = [token for token, one in zip(tokens, of, strict=True) if one == document]
            assert mine == list(range(mine[0], mine[-1] + 1))
            number, start = divmod(mine[0], _ROOM)
            yield Piece(place, document, number, start, start + len(mine))
