"""Log of the samples and values of each training step."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_streaming.dataset.line_log import LineLog
from lightning_streaming.dataset.sample_key import SampleKeys, table_of
from lightning_streaming.dataset.step_lines import latest_run
from lightning_streaming.errors import ConfigError, StorageError, UnsupportedError
from lightning_streaming.escaping import short_repr
from lightning_streaming.reading.loader import StreamingDataLoader, collect_keys
from lightning_streaming.signatures import public
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.units import check_path


class _CopiedValues(NamedTuple):
    """Values of a batch on their way to the CPU."""

    batch: int
    values: Mapping[str, torch.Tensor]
    event: torch.cuda.Event | None
    """Event after their copies; None if they are there."""

    @property
    def have_arrived(self) -> bool:
        """Whether they can be read without waiting for the device."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


@public()
class StepLog(Callback):
    """Callback that logs the samples and the loss of each step: for :func:`read_step_log` and ``trace --spike``.

    The log has a line for each training batch: the number of batches before it, over all epochs;
    ``trainer.global_step`` as the batch begins; and the keys of its samples. The line is written before ``backward``,
    so before the batch is in any weights. A second line follows when an optimizer step has used the batch. Every
    global rank writes its own file, ``rank0.jsonl``, ...; a run that resumes appends to the files. Batches are not
    changed, and nothing is saved in checkpoints.

    A line with the ``values`` of a batch follows once the device has computed them: they are copied without waiting for
    the device, so a run that is killed lacks those of its last batches. Each rank logs its own value, or the mean over
    ranks if the model logs it with ``sync_dist=True``; readers average over the ranks and batches of a step.

    The log leaves out batches for which ``training_step`` returns None, and samples that a rank reads a second time
    only to fill the last batch of an epoch. With manual optimization every batch counts as taken when it ends; its line
    is written then, unless the model calls ``manual_backward``.

    Args:
        dirpath: Directory of the log, the same on all ranks; it is created if needed. A run and those that resume it
            share one.
        values: Names of values to log with each batch: "loss", which ``training_step`` returns; other entries of a dict
            that it returns; or metrics that the model logs in the batch with ``self.log(..., on_step=True)``. A batch
            without a value, as of a metric that is logged once per optimizer step, has none. () for none.

    Raises:
        ConfigError: An argument is invalid.
        UnsupportedError: In ``fit``, where ``training_step`` takes ``dataloader_iter``.
        FormatError: In ``fit``, if an existing file is not a log of steps.
        StorageError: In ``fit``, if the log cannot be written.
    """

    def __init__(self, dirpath: str | os.PathLike[str], values: Sequence[str] = ("loss",)) -> None:
        are_names = isinstance(values, Sequence) and all(isinstance(name, str) and name for name in values)
        if isinstance(values, str) or not are_names:
            raise ConfigError(
                f"values must be a list of names like ['train_loss'], but got {short_repr(values)}", option="values"
            )
        self._directory = Path(check_path("dirpath", dirpath, "a directory"))
        self._log: LineLog | None = None
        self._run = 0
        self._loaders: dict[str, tuple[StreamingDataLoader, deque[SampleKeys]]] = {}
        self._under_way: list[dict[str, Any]] = []
        self._names = tuple(dict.fromkeys(values))
        self._copies: deque[_CopiedValues] = deque()
        self._logged_before: Mapping[str, torch.Tensor] = {}
        self._unseen: list[str] = []

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
        self._run = trainer.strategy.broadcast(latest_run(self._directory) + 1 if trainer.is_global_zero else 0)
        with self._storage_errors():
            self._log = LineLog(self._directory / f"rank{trainer.global_rank}.jsonl")
        self._unseen = [name for name in self._names if name != "loss"]
        self._listen(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch loaders that Lightning has recreated; batches left over from the pass before were not trained on."""
        self._listen(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Prepare a line for each loader that contributed to this batch; the model may still skip it."""
        self._logged_before = lightning_internals.step_values(trainer)
        number = {"batch": lightning_internals.batches_completed(trainer), "step": trainer.global_step}
        self._under_way = [
            {"run": self._run, **number, "loader": name, **_samples(waiting.popleft())}
            for name, (_loader, waiting) in self._loaders.items()
            if waiting
        ]

    def on_before_backward(self, *_: Any, **__: Any) -> None:
        """Write the lines, before the batch is in the weights of any rank."""
        self._write_under_way()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log that the batch is in the weights, before other callbacks save them."""
        if pl_module.automatic_optimization:
            self._under_way = []  # without a backward there was no loss
        self._write_under_way()
        completed = lightning_internals.batches_completed(trainer)
        if lightning_internals.weights_have_seen_the_batch(trainer):
            self._write({"run": self._run, "taken": completed + 1})
        if self._names and outputs is not None:
            logged, before = lightning_internals.step_values(trainer), self._logged_before
            values = {name: value for name, value in logged.items() if value is not before.get(name)}
            entries = outputs.items() if isinstance(outputs, Mapping) else ()
            returned = {name: value for name, value in entries if isinstance(value, torch.Tensor)}
            if "loss" in returned and pl_module.automatic_optimization:  # Lightning divides it
                returned["loss"] = returned["loss"] * trainer.accumulate_grad_batches
            values |= returned
            known = (name for name in self._names if name in values and values[name].numel() == 1)
            self._copy_values(completed, {name: values[name] for name in known})
            self._check_names(is_step=lightning_internals.weights_have_seen_the_batch(trainer))
        self._write_values()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the log."""
        for copied in self._copies:
            if copied.event is not None:
                copied.event.synchronize()
        self._write_values()
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the log."""
        with suppress(RuntimeError):  # a lost device has no values; the error to report is the exception
            self._write_values()
        self._close()

    def _listen(self, trainer: Trainer) -> None:
        for name, loader in lightning_internals.streaming_loaders(trainer).items():
            waiting: deque[SampleKeys] = deque()
            collect_keys(loader, waiting)
            self._loaders[name] = loader, waiting

    def _copy_values(self, batch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Begin to copy the values of a batch from their device."""
        self._unseen = [name for name in self._unseen if name not in values]
        devices = {value.device for value in values.values() if value.is_cuda}
        copies = {name: value.detach().to("cpu", non_blocking=value.is_cuda) for name, value in values.items()}
        event = None
        for device in devices:  # of a module's metrics there is one
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
        self._copies.append(_CopiedValues(batch, copies, event))

    def _check_names(self, *, is_step: bool) -> None:
        """Warn of names without a value in the first optimizer step."""
        if is_step and self._unseen:
            rank_zero_warn(
                f"StepLog(values=...): the first step has no value of {', '.join(self._unseen)}; log it with "
                "self.log(..., on_step=True), or return it from training_step"
            )
            self._unseen = []

    def _write_values(self) -> None:
        """Write the values that have arrived, in the order of their batches."""
        while self._copies and self._copies[0].have_arrived:
            batch, values, _ = self._copies.popleft()
            # No mapping: a line has one.
            self._write({"run": self._run, "batch": batch, "values": [(name, float(values[name])) for name in values]})

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
        self._copies.clear()
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
