"""Log of the samples of each training step, and reading which of them are in the weights."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_streaming.dataset.line_log import LineLog, whole_lines
from lightning_streaming.dataset.sample_key import SampleKey, SampleKeys, table_of
from lightning_streaming.errors import ConfigError, FormatError, StorageError, UnsupportedError
from lightning_streaming.reading.loader import StreamingDataLoader, collect_keys
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.units import check_path


class StepLog(Callback):
    """Callback that logs the samples of each step, to compare runs with :func:`read_step_log`.

    The log has a line for each training batch: the number of batches before it, over all epochs;
    ``trainer.global_step`` as the batch begins; and the keys of its samples. The line is written before ``backward``,
    so before the batch is in any weights. A second line follows when an optimizer step has used the batch. Every
    global rank writes its own file, ``rank0.jsonl``, ...; a run that resumes appends to the files. Batches are not
    changed, and nothing is saved in checkpoints.

    The log leaves out batches for which ``training_step`` returns None, and samples that a rank reads a second time
    only to fill the last batch of an epoch. With manual optimization every batch counts as taken when it ends; its line
    is written then, unless the model calls ``manual_backward``.

    Args:
        dirpath: Directory of the log, the same on all ranks; it is created if needed. A run and those that resume it
            share one.

    Raises:
        UnsupportedError: In ``fit``, where ``training_step`` takes ``dataloader_iter``.
        FormatError: In ``fit``, if an existing file is not a log of steps.
        StorageError: In ``fit``, if the log cannot be written.
    """

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self._directory = Path(check_path("dirpath", dirpath, "a directory"))
        self._log: LineLog | None = None
        self._run = 0
        self._loaders: dict[str, tuple[StreamingDataLoader, deque[SampleKeys]]] = {}
        self._under_way: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run before callbacks that save at the end of a batch."""
        lightning_internals.put_first(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the log. It numbers the runs, because the clocks of machines differ."""
        if lightning_internals.steps_fetch_batches(trainer):
            raise UnsupportedError(
                f"StepLog cannot log the batches of {type(pl_module).__name__}: its training_step takes "
                "dataloader_iter and may read more or fewer than it trains on",
                hint="take batch, batch_idx, or drop StepLog",
            )
        self._run = trainer.strategy.broadcast(_latest_run(self._directory) + 1 if trainer.is_global_zero else 0)
        with self._storage_errors():
            self._log = LineLog(self._directory / f"rank{trainer.global_rank}.jsonl")
        self._listen(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch loaders that Lightning has recreated; batches left over from the pass before were not trained on."""
        self._listen(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Prepare a line for each loader that contributed to this batch; the model may still skip it."""
        number = {"batch": lightning_internals.batches_completed(trainer), "step": trainer.global_step}
        self._under_way = [
            {"run": self._run, **number, "loader": name, **_samples(waiting.popleft())}
            for name, (_loader, waiting) in self._loaders.items()
            if waiting
        ]

    def on_before_backward(self, *_: Any, **__: Any) -> None:
        """Write the lines, before the batch is in the weights of any rank."""
        self._write_under_way()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Log that the batch is in the weights, before other callbacks save them."""
        if pl_module.automatic_optimization:
            self._under_way = []  # without a backward there was no loss
        self._write_under_way()
        if lightning_internals.weights_have_seen_the_batch(trainer):
            self._write({"run": self._run, "taken": lightning_internals.batches_completed(trainer) + 1})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the log."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the log."""
        self._close()

    def _listen(self, trainer: Trainer) -> None:
        for name, loader in lightning_internals.streaming_loaders(trainer).items():
            waiting: deque[SampleKeys] = deque()
            collect_keys(loader, waiting)
            self._loaders[name] = loader, waiting

    def _write_under_way(self) -> None:
        lines, self._under_way = self._under_way, []
        self._write(*lines)

    def _write(self, *lines: Mapping[str, Any]) -> None:
        if self._log is not None:
            with self._storage_errors():
                for line in lines:
                    self._log.write(line)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the log of StepLog(dirpath={str(self._directory)!r}) cannot be written: {error}",
                hint="free disk space, or pass a directory that can be written to",
                option="dirpath",
                path=str(self._directory),
            ) from error

    def _close(self) -> None:
        for loader, _ in self._loaders.values():
            collect_keys(loader, None)
        self._loaders.clear()
        self._under_way = []
        if self._log is not None:
            self._log.close()
            self._log = None


def _samples(keys: SampleKeys) -> dict[str, Any]:
    table = table_of(keys)
    names, epoch, seed = table.of_pass
    samples = [
        (position, names[stream], shard, index, first_token)
        for position, stream, shard, index, first_token in table.rows[keys.valid.numpy()].tolist()
    ]
    return {"epoch": epoch, "shuffle_seed": seed, "samples": samples}


def _latest_run(directory: Path) -> int:
    """The largest number of a run; files are added to in turn, so it is in a last line. 0 where there is none."""
    last_lines = [line for path in _files(directory) for line in deque(whole_lines(path), maxlen=1)]
    return max((_parsed(*line).run for line in last_lines), default=0)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("rank*.jsonl"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartKey(SampleKey):
    """Key of a later part of a document that was split; the first part has a plain :class:`SampleKey`."""

    first_token: int
    """Position in the document of the first token of the part."""


class _LoggedBatch(NamedTuple):
    """A batch of one loader on one rank."""

    run: int
    batch: int
    loader: str
    keys: tuple[SampleKey, ...]


class _StepTaken(NamedTuple):
    """An optimizer step that took all batches before the ``batch``-th."""

    run: int
    batch: int


def read_step_log(dirpath: str | os.PathLike[str], loader: str = "train") -> list[SampleKey]:
    """Return the samples that the final weights of a run were trained on, from its :class:`StepLog`.

    Where a run resumed from a checkpoint, the batches that an earlier run had read after that checkpoint are not in the
    weights, and are dropped. So are batches at the end that no optimizer step used. Two runs have trained on the same
    samples in the same order if these lists are equal, with any number of ranks and any batch size. A sample that was
    read twice in an epoch is listed twice, unless the second time only filled the last batch of the epoch. A document
    that was split is listed once for each part: all but the first are a :class:`PartKey`.

    Args:
        dirpath: Directory of the log, with the files of all ranks.
        loader: Name of the train loader; "train" if there is only one.

    Returns:
        A key for each sample, by epoch and position. Ranks that read the same samples count as one.

    Raises:
        ConfigError: There is no log, or none of that loader.
        FormatError: A complete line is not one of a step log.
    """
    runs: dict[int, list[_LoggedBatch]] = {}
    taken: dict[int, int] = {}
    for path in _files(Path(dirpath)):
        for text, where in whole_lines(path):
            line = _parsed(text, where)
            if isinstance(line, _StepTaken):
                taken[line.run] = max(line.batch, taken.get(line.run, 0))
            else:
                runs.setdefault(line.run, []).append(line)
    kept: list[_LoggedBatch] = []
    for _, lines in sorted(runs.items()):
        begins = min(line.batch for line in lines)
        kept = [line for line in kept if line.batch < begins] + lines  # in the checkpoint that this run resumed from
    last = max(runs, default=0)
    kept = [line for line in kept if line.run != last or line.batch < taken.get(last, 0)]
    if not any(line.loader == loader for line in kept):
        names = ", ".join(sorted({line.loader for line in kept})) or "none"
        raise ConfigError(
            f"{os.fspath(dirpath)} has no log of steps of the train loader {loader!r}",
            hint=f"loaders in it: {names}. It is written by lightning_streaming.StepLog, a callback of the trainer",
            option="loader",
            path=os.fspath(dirpath),
        )
    read = {(line.run, line.batch, key) for line in kept if line.loader == loader for key in line.keys}
    return sorted((key for *_, key in read), key=_place)


def _place(key: SampleKey) -> tuple[Any, ...]:
    first_token = key.first_token if isinstance(key, PartKey) else 0
    return key.epoch, key.position, key.stream, key.shard, key.sample_index, first_token


def _key(common: Mapping[str, Any], position: int, stream: str, shard: int, index: int, first_token: int) -> SampleKey:
    values = {"position": position, "stream": stream, "shard": shard, "sample_index": index, **common}
    return PartKey.from_dict({**values, "first_token": first_token}) if first_token else SampleKey.from_dict(values)


def _parsed(text: bytes, where: str) -> _LoggedBatch | _StepTaken:
    try:
        values: Mapping[str, Any] = json.loads(text)
        if "taken" in values:
            return _StepTaken(int(values["run"]), int(values["taken"]))
        common = {"epoch": values["epoch"], "shuffle_seed": values["shuffle_seed"]}
        keys = tuple(_key(common, *sample) for sample in values["samples"])
        return _LoggedBatch(int(values["run"]), int(values["batch"]), str(values["loader"]), keys)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{where} is not one of a log of steps, but {text[:200]!r}", path=where.rpartition(", line ")[0]
        ) from error
