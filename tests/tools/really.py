"""A planned run that is really read: nodes one after another, the ranks of each in processes that go step by step
together, each with worker processes and with the cache of its node, from a server that logs what it sends."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.reading.dataset import run_state_of
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.skips import TrainProgress
from lightning_streaming.trainer.config import config_of
from tests.packed_data import pieces

_FORK = multiprocessing.get_context("fork")
_BYTES = 4000
_STEP_SECONDS = 0.01
"""What a model would take: time for what is fetched ahead."""
ROOM = 250
"""Tokens of a document tell it, by its number over all streams, as in :mod:`tests.packed_data`."""


def write_stream(root: Path, samples: int, first: int, *, lengths: Sequence[int] = (), **settings: Any) -> None:
    """A stream of samples with an id and some tokens, in shards of some kilobytes."""
    columns = {"id": "int", **({"tokens": "ndarray:uint16"} if len(lengths) else {"text": "bytes"})}
    with MDSWriter(out=str(root), columns=columns, **{"size_limit": 100_000, **settings}) as writer:
        for number in range(samples):
            begin = (first + number) * ROOM % 2**16
            tokens = (begin + np.arange(lengths[number] if len(lengths) else 0)).astype(np.uint16)
            writer.write({"id": first + number, **({"tokens": tokens} if len(lengths) else {"text": bytes(_BYTES)})})


@dataclass(kw_only=True)
class Really:
    """What really happened."""

    reads: Counter[int] = field(default_factory=Counter)
    """How often each sample was read, by id; by ranks that read the same as one."""
    order: list[list[int]] = field(default_factory=list)
    """Ids of each global batch of the first node, in order."""
    batches: list[int] = field(default_factory=list)
    """Of each epoch."""
    downloads: Counter[str] = field(default_factory=Counter)
    """How often each file was sent."""
    bytes: int = 0
    """Of shards that were sent."""
    tokens: int = 0
    """Of documents, in packs."""
    packs: int = 0
    peak: int = 0
    """The most bytes that the cache of a node held, as far as somebody looked."""


def write_config(path: Path, train: Mapping[str, Any], trainer: Mapping[str, Any], **data: Any) -> Path:
    """A configuration whose model is never imported."""
    content = {"model": {"class_path": "not.imported"}, "data": {"init_args": {"train": dict(train), **data}}}
    path.write_text(yaml.safe_dump({**content, "trainer": dict(trainer)}, sort_keys=False))
    return path


def read_run(config: Path, url: str, scratch: Path) -> Really:
    """Read all epochs that the trainer of a configuration would read.

    Args:
        config: What :func:`write_config` has written; streams are relative to the server.
        url: Of the server.
        scratch: Where caches are put.
    """
    told = yaml.safe_load(config.read_text())
    trainer, found, names = told["trainer"], Really(), list(told["data"]["init_args"]["train"]["streams"])
    forget(url)
    for node in range(trainer.get("num_nodes", 1)):
        local = {name: str(scratch / f"node{node}" / name) for name in names}
        asked = Asked(told=told, local=local, node=node)
        in_step, results = _FORK.Barrier(asked.ranks), _FORK.SimpleQueue()
        ranks = [_FORK.Process(target=_read_rank, args=(asked, rank, in_step, results)) for rank in range(asked.ranks)]
        for one in ranks:
            one.start()
        watch = Watch([Path(path) for path in local.values()])
        with watch:
            batches = [results.get() for _ in ranks]
        for one in ranks:
            one.join()
            assert one.exitcode == 0
        found.batches = batches[0][3]
        for of_rank, tokens, packs, _ in (of for of in batches if of[0] is not None):
            found.reads.update(sample for batch in of_rank for sample in batch)
            found.tokens, found.packs = found.tokens + tokens, found.packs + packs
        found.peak = max(found.peak, watch.peak)
        if not node:
            of_ranks = [of[0] for of in batches if of[0] is not None]
            found.order = [[sample for one in step for sample in one] for step in zip(*of_ranks, strict=True)]
    log = sent(url)
    found.downloads, found.bytes = Counter(name for name, _ in log), sum(size for _, size in log)
    return found


@dataclass(kw_only=True)
class Asked:
    """What the ranks of a node are to read."""

    told: Mapping[str, Any]
    local: Mapping[str, str]
    node: int

    @property
    def ranks(self) -> int:
        """Of the node."""
        return int(self.told["trainer"].get("devices", 1))

    def is_copy(self, rank: int) -> bool:
        """Whether a rank reads what one before it reads."""
        replication = self.told["data"]["init_args"]["train"].get("replication", 1)
        return bool((self.node * self.ranks + rank) % replication)

    def loader(self, rank: int) -> StreamingDataLoader:
        """What one of them reads."""
        data, trainer = dict(self.told["data"]["init_args"]), self.told["trainer"]
        train = dict(data.pop("train"))
        train["streams"] = {name: {**stream, "local": self.local[name]} for name, stream in train["streams"].items()}
        config = config_of(train)
        assert config is not None
        nodes = trainer.get("num_nodes", 1)
        world = World(num_nodes=nodes, ranks_per_node=self.ranks, rank=self.node * self.ranks + rank)
        arguments = config.dataset_arguments(shuffle_by_default=True)
        arguments["replication"] = config.replication
        dataset = StreamingDataset(**arguments, batch_size=data.get("batch_size", 1), world=world)
        loader = StreamingDataLoader(
            dataset, num_workers=data.get("num_workers", 0), drop_last=data.get("drop_last", False)
        )
        if "limit_train_batches" in trainer:  # as a trainer tells
            counted = run_of(loader).counted_from(TrainProgress(limit=trainer["limit_train_batches"]))
            run_state_of(dataset).keep(counted)
        return loader


def _read_rank(asked: Asked, rank: int, in_step: Any, results: Any) -> None:
    loader, trainer, batches = asked.loader(rank), asked.told["trainer"], list[list[int]]()
    most, tokens, packs, of_epochs = trainer.get("max_steps", -1), 0, 0, list[int]()
    for _ in range(trainer.get("max_epochs", most if most > 0 else 1)):
        if len(batches) == most:
            break
        before = len(batches)
        for number, batch in enumerate(loader, 1):
            batches.append(_ids(batch))
            if "document_ids" in batch:
                tokens, packs = tokens + int((batch["document_ids"] >= 0).sum()), packs + len(batch["document_ids"])
            in_step.wait()  # as ranks that train wait for each other
            time.sleep(_STEP_SECONDS)
            if len(batches) == most or number == trainer.get("limit_train_batches"):
                break
        of_epochs.append(len(batches) - before)
        cursor = position_of(loader).cursor()
        position_of(loader).seek(cursor if not cursor.sample_in_epoch else Cursor(cursor.epoch + 1, 0))
    loader.close()
    results.put((None if asked.is_copy(rank) else batches, tokens, packs, of_epochs))


def _ids(batch: Mapping[str, Any]) -> list[int]:
    if "id" in batch:
        return [int(one) for one in batch["id"]]
    return [piece.number for piece in pieces(dict(batch)) if piece.start == 0]


class Watch:
    """Looks how much caches hold, again and again.

    Args:
        directories: Of one node.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories, self.peak, self._ended = directories, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            used = [_used(directory) for directory in self._directories]
            # One may have shrunk and another grown in between: what is seen twice was so.
            if used == [_used(directory) for directory in self._directories]:
                self.peak = max(self.peak, sum(used))


def _used(directory: Path) -> int:
    """The count that a cache directory keeps of itself, and its index, which is not in it."""
    try:
        used = int((directory / ".usage").read_text() or 0)
        return used + (directory / "index.json").stat().st_size
    except (FileNotFoundError, ValueError):
        return 0


def forget(url: str) -> None:
    """Remember where the log of the server ends."""
    _BEGINS[url] = len(_log(url))


def sent(url: str) -> list[tuple[str, int]]:
    """Name and bytes of each shard that was sent since; not of what was looked at to count lengths, in ranges."""
    asked = (one for one in _log(url)[_BEGINS[url] :] if one["method"] == "GET" and one["range"] is None)
    return [(one["path"], one["sent"]) for one in asked]


_BEGINS: dict[str, int] = {}


def _log(url: str) -> list[dict[str, Any]]:
    asked = urllib.request.Request(f"{url}/__log", data=b"shard", method="POST")
    with urllib.request.urlopen(asked) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())
    return found
