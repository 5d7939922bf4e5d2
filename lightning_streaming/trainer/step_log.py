"""Writes down which samples each step of training is given, and tells of such a log which are in the weights."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.loading.dataloader import StreamingDataLoader, tell_keys
from lightning_streaming.loading.line_log import LineLog, whole_lines
from lightning_streaming.loading.sample_key import SampleKey, SampleKeys
from lightning_streaming.trainer import lightning_internals


class StepLog(Callback):
    """Logs the samples of each step, so that runs can be compared by :func:`read_step_log`.

    The log has a line for each batch, written before it is trained on: the step, which is ``trainer.global_step`` then,
    and the keys of its samples. Every global rank writes a file of its own, ``rank0.jsonl``, ...; a run that goes on
    adds to what is there. Batches stay as they are, and nothing is saved in checkpoints.

    Args:
        dirpath: Directory for the log, the same on all ranks; it is made where there is none. A run and those that go
            on from it have one together.
    """

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self._directory = Path(dirpath)
        self._log: LineLog | None = None
        self._run = 0
        self._loaders: dict[str, tuple[StreamingDataLoader, deque[SampleKeys]]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen. All ranks call their run by the time at which the first one is here."""
        self._run = trainer.strategy.broadcast(time.time_ns())
        self._log = LineLog(self._directory / f"rank{trainer.global_rank}.jsonl")
        self._listen(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to loaders that Lightning has made anew; what a pass gave that was ended early was not trained on."""
        self._listen(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Write a line for each loader that gave something for this batch."""
        for name, (_loader, waiting) in self._loaders.items():
            if waiting and self._log is not None:
                keys = waiting.popleft()
                self._log.write(
                    {
                        "run": self._run,
                        "step": trainer.global_step,
                        "loader": name,
                        "epoch": keys.of_pass.epoch,
                        "shuffle_seed": keys.of_pass.shuffle_seed,
                        "samples": list(_samples(keys)),
                    }
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the log."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the log."""
        self._close()

    def _listen(self, trainer: Trainer) -> None:
        for name, loader in lightning_internals.streaming_loaders(trainer).items():
            waiting: deque[SampleKeys] = deque()
            tell_keys(loader, waiting)
            self._loaders[name] = loader, waiting

    def _close(self) -> None:
        for loader, _ in self._loaders.values():
            tell_keys(loader, None)
        self._loaders.clear()
        if self._log is not None:
            self._log.close()
            self._log = None


def _samples(keys: SampleKeys) -> Iterator[tuple[int, str, int, int]]:
    """Position, stream, shard and index of those that are not read again to fill up a batch."""
    names = keys.of_pass.stream_names
    for (position, stream, shard, index), is_first in zip(keys.rows.tolist(), keys.valid.tolist(), strict=True):
        if is_first:
            yield position, names[stream], shard, index


class _Line(NamedTuple):
    run: int
    step: int
    loader: str
    keys: tuple[SampleKey, ...]


def read_step_log(dirpath: str | os.PathLike[str], loader: str = "train") -> list[SampleKey]:
    """The samples in the weights that a run ended with, by the log that :class:`StepLog` wrote of it.

    A run that went on from a checkpoint began with a step; what an earlier one had read in that step and after it is in
    no weights any more, and is left out. Two runs have trained on the same samples in the same order if these lists are
    equal, whatever the number of ranks and the batch size. A sample that was read twice in an epoch is there twice.

    Args:
        dirpath: Directory of the log, with the files of all ranks.
        loader: Name of the train loader; "train" where there is one.

    Returns:
        A key for each sample, by epoch and position. Ranks that read the same samples count as one.

    Raises:
        ConfigError: No log is there, or none of that loader.
        FormatError: A whole line is not one of a step log.
    """
    files = sorted(Path(dirpath).glob("rank*.jsonl"))
    runs: dict[int, list[_Line]] = {}
    for path in files:
        for text, where in whole_lines(path):
            line = _parsed(text, where)
            runs.setdefault(line.run, []).append(line)
    kept: list[_Line] = []
    for _, lines in sorted(runs.items()):
        begins = min(line.step for line in lines)
        kept = [line for line in kept if line.step < begins] + lines
    if not any(line.loader == loader for line in kept):
        found = ", ".join(sorted({line.loader for line in kept})) or "none"
        raise ConfigError(
            f"{os.fspath(dirpath)} has no log of steps of the train loader {loader!r}; loaders in it: {found}. It is "
            "written by lightning_streaming.StepLog, a callback of the trainer"
        )
    read = {(line.run, line.step, key) for line in kept if line.loader == loader for key in line.keys}
    return sorted((key for *_, key in read), key=attrgetter("epoch", "position", "stream", "shard", "index"))


def _parsed(text: bytes, where: str) -> _Line:
    try:
        values: Mapping[str, Any] = json.loads(text)
        common = {"epoch": values["epoch"], "shuffle_seed": values["shuffle_seed"]}
        keys = tuple(
            SampleKey.from_dict({"position": position, "stream": stream, "shard": shard, "index": index, **common})
            for position, stream, shard, index in values["samples"]
        )
        return _Line(int(values["run"]), int(values["step"]), str(values["loader"]), keys)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{where} is not one of a log of steps, but {text[:200]!r}") from error
