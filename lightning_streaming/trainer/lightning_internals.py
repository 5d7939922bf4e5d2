"""Every use of Lightning's private state: of its fit loop, progress bars, signals and saving.

The fit loop's counters are derived from the position in the data, which the callback knows, never the other way round.
Lightning resumes correctly from most states of its saved counters, but not from all: saved in ``on_train_epoch_start``
it loses an epoch; saved at the end of a run that ``max_steps`` cut short, it takes the rest of the epoch for the next
one; and its batches are those of the saving run's ranks and batch size. So they are set to the values of an
uninterrupted run at this position. The counters in a checkpoint are in resume/lightning_checkpoint.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loops.evaluation_loop import RestartStage as EvaluationRestartStage
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage as EpochRestartStage
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn

from lightning_streaming.errors import ConfigError
from lightning_streaming.files import PARTIAL_SUFFIX
from lightning_streaming.reading.dataset import run_state_of
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.position import position_of
from lightning_streaming.sequence.skips import TrainProgress

_REPLACED_SUFFIX = ".replaced"
_Handler = Callable[[int, FrameType | None], None]

# Loaders -------------------------------------------------------------------------------------------------------------


def streaming_loaders(trainer: Trainer) -> dict[str, StreamingDataLoader]:
    """Return the streaming loaders that the fit loop reads from now, by name.

    A single loader is "train"; those in a dict or list are named by key or index, nested ones like "text.0".
    """
    return _streaming_among(trainer.train_dataloader)


def validation_loaders(trainer: Trainer) -> list[StreamingDataLoader]:
    """Return the streaming loaders of the validation of ``fit``, as far as Lightning has created them."""
    return list(_streaming_among(trainer.val_dataloaders).values())


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    """Return the data module of this run; ``trainer.datamodule`` stays that of an earlier run if this one has none."""
    selector = trainer._data_connector._datahook_selector
    return None if selector is None else selector.datamodule


def has_loaders(trainer: Trainer) -> bool:
    """Return whether this fit has created its train loaders."""
    return trainer.fit_loop._combined_loader is not None


def on_loaders_created(trainer: Trainer, prepare: Callable[[dict[str, StreamingDataLoader]], None]) -> None:
    """In ``setup``: call ``prepare`` with the streaming loaders, by name, whenever train loaders are created.

    That is before Lightning reads their lengths, from which it computes when epochs end and validation is due.
    """
    source = trainer.fit_loop._data_source
    trainer.fit_loop._data_source = _PreparedSource(source.instance, source.name, prepare)


class _PreparedSource(_DataLoaderSource):
    """Source of Lightning's train loaders that calls a function with them."""

    def __init__(self, instance: Any, name: str, prepare: Callable[[dict[str, StreamingDataLoader]], None]) -> None:
        super().__init__(instance, name)
        self._prepare = prepare

    def dataloader(self) -> Any:
        loaders = super().dataloader()
        self._prepare(_streaming_among(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders))
        return loaders


def _streaming_among(loaders: Any) -> dict[str, StreamingDataLoader]:
    named = named_loaders(loaders)
    return {name or "train": loader for name, loader in named if isinstance(loader, StreamingDataLoader)}


def is_overfitting(trainer: Trainer) -> bool:
    """Return whether every epoch reads the same few batches."""
    return bool(trainer.overfit_batches > 0)  # type: ignore[attr-defined]  # set by Lightning's data connector


def named_loaders(loaders: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the loaders in dicts and lists, with their names joined by dots; a single one has ``name``."""
    if isinstance(loaders, Mapping):
        entries: Any = loaders.items()
    elif isinstance(loaders, (list, tuple)):
        entries = enumerate(loaders)
    else:
        yield name, loaders
        return
    for key, loader in entries:
        yield from named_loaders(loader, f"{name}.{key}" if name else str(key))


def combination_mode(trainer: Trainer) -> str:
    """Return how Lightning combines several train loaders: "min_size", "max_size", "max_size_cycle"."""
    combined = trainer.fit_loop._combined_loader
    return "max_size_cycle" if combined is None else combined._mode


# Hooks ---------------------------------------------------------------------------------------------------------------


def weights_have_seen_the_batch(trainer: Trainer) -> bool:
    """In ``on_train_batch_end``: return whether the batch's gradient is in the weights, not still accumulated."""
    return not trainer.fit_loop._should_accumulate()


def steps_fetch_batches(trainer: Trainer) -> bool:
    """From ``on_train_start`` on: return whether ``training_step`` takes ``dataloader_iter``, and reads batches."""
    return isinstance(_reading(trainer)[0], _DataLoaderIterDataFetcher)


def logging_step(trainer: Trainer) -> int | None:
    """In ``on_train_batch_end``: return the step to log metrics under; None if this step is not logged."""
    if not trainer._logger_connector.should_update_logs or not weights_have_seen_the_batch(trainer):
        return None
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def step_values(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the last values that were logged with ``on_step=True`` in training, by name.

    A value that is logged again is another tensor.
    """
    values: dict[str, torch.Tensor] = {}
    for metric in trainer.fit_loop.epoch_loop._results.result_metrics:
        if metric.meta.on_step and isinstance(metric._forward_cache, torch.Tensor):
            values |= dict.fromkeys((metric.meta.name, metric.meta.forked_name(on_step=True)), metric._forward_cache)
    return values


def put_first(trainer: Trainer, callback: Callback) -> None:
    """Make Lightning call ``callback`` before all others. Safe in its ``setup``: earlier ones are not called again."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def put_last(trainer: Trainer, callback: Callback) -> None:
    """Make Lightning call ``callback`` after all others. Safe in its ``setup``: the list it iterates over is kept."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
    others = [other for other in callbacks if other is not callback]
    trainer.callbacks = [*others, callback]  # type: ignore[attr-defined]


# Counters of epochs and batches --------------------------------------------------------------------------------------


def is_untouched(trainer: Trainer) -> bool:
    """Return whether this trainer has neither started an epoch nor loaded a checkpoint of one."""
    return trainer.fit_loop.epoch_progress.total.ready == 0


def batches_in_epoch(trainer: Trainer) -> int:
    """Return the batches of an epoch on each rank, within the trainer's limit; 0 if another loader has no length."""
    batches = trainer.num_training_batches
    return 0 if batches == float("inf") else int(batches)


def batches_completed(trainer: Trainer) -> int:
    """In hooks of a training batch: return the batches over all epochs that are complete, without this one."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)


def leads_to_another_epoch(trainer: Trainer, epoch: int, batches: int) -> bool:
    """Return whether ``max_epochs`` and ``max_steps`` allow another epoch after the current one.

    Args:
        trainer: The trainer.
        epoch: The current epoch.
        batches: How many batches of it are done.
    """
    if trainer.max_epochs not in (None, -1) and trainer.max_epochs <= epoch + 1:
        return False
    if trainer.max_steps == -1:
        return True
    in_epoch = batches_in_epoch(trainer)
    # A model that steps its optimizers itself may count differently; an epoch without a length may never end.
    if not trainer.lightning_module.automatic_optimization or not in_epoch:
        return False
    accumulate = trainer.accumulate_grad_batches
    steps_left = -(-in_epoch // accumulate) - batches // accumulate
    return trainer.global_step + steps_left < trainer.max_steps


def batches_trained(trainer: Trainer, epoch: int, batches: int) -> int:
    """In ``on_train_start``: return the batches over all epochs in the weights, after these of ``epoch``."""
    done, in_all = _completed_batches(trainer)
    return in_all - (done - batches if _current_epochs(trainer).started > epoch else 0)


def count_batches_of_epoch(trainer: Trainer) -> None:
    """Set the number of batches that the trainer expects to that of the current epochs of its loaders.

    Lightning reads the lengths of loaders once, when they are created: before their position is known, under strategies
    that load checkpoints late; and skipping makes some epochs shorter.

    Raises:
        ConfigError: ``skip`` is combined with overfitting.
    """
    fetcher, combined = _reading(trainer)
    assert combined.limits is not None, "set with the loaders"
    loaders, limits = combined.flattened, combined.limits
    datasets = [loader.dataset for loader in loaders if isinstance(loader, StreamingDataLoader)]
    if is_overfitting(trainer) and any(run_state_of(dataset).request.skip for dataset in datasets):
        raise ConfigError(
            "skip counts batches over a run, but overfit_batches reads the same ones again",
            hint="remove one of the two",
            option="skip",
        )
    counted = TrainProgress(limit=trainer.limit_train_batches)
    combined.limits = [
        counted.limited(position_of(loader).batches_of_epoch()) if isinstance(loader, StreamingDataLoader) else limit
        for loader, limit in zip(loaders, limits, strict=True)
    ]
    length = _length_of_epoch(combined)
    fetcher.length = None if length == float("inf") else int(length)
    if fetcher.length is None:
        return
    trainer.fit_loop.max_batches = fetcher.length
    # Where validation goes by time there is no batch, nor an interval.
    if trainer.val_check_batch is not None and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(fetcher.length * trainer.val_check_interval))


def count_rest_of_epoch(trainer: Trainer) -> None:
    """In the middle of an epoch: set the number of its batches again, and whether the latest one is the last."""
    count_batches_of_epoch(trainer)
    fetcher, _ = _reading(trainer)
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = fetcher.done


def _reading(trainer: Trainer) -> tuple[_DataFetcher, CombinedLoader]:
    """Return Lightning's fetcher and combined train loader, from ``on_train_start`` on."""
    fetcher, combined = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    assert fetcher is not None, "created before on_train_start"
    assert combined is not None, "as well"
    return fetcher, combined


def _length_of_epoch(combined: CombinedLoader) -> int | float:
    """Return the batches of the current epoch: more than ``len``, if it was started with other ranks."""
    assert combined.limits is not None, "set by the caller"
    lengths = [
        limit if isinstance(loader, StreamingDataLoader) else min(_length(loader), limit)
        for loader, limit in zip(combined.flattened, combined.limits, strict=True)
    ]
    return min(lengths) if combined._mode == "min_size" else max(lengths)


def _length(loader: object) -> int | float:
    length = sized_len(loader)
    return float("inf") if length is None else length


def has_fetched_ahead(trainer: Trainer) -> bool:
    """Return whether Lightning has read a batch before training, as it does with a loader without length and limit."""
    fetcher, _ = _reading(trainer)
    return isinstance(fetcher, _PrefetchDataFetcher) and bool(fetcher.batches)


def restart_fetching(trainer: Trainer, finished: Collection[StreamingDataLoader]) -> None:
    """In ``on_train_start``: create Lightning's iterators again, for loaders whose position has changed.

    That matters if it has prefetched a batch, as it does if any of several loaders has no length, and for loaders that
    are finished: in mode "max_size" these are not read until the next epoch.

    Args:
        trainer: The trainer.
        finished: Loaders to leave out of the current epoch.
    """
    fetcher, combined = _reading(trainer)
    if not has_fetched_ahead(trainer) and not finished:
        return
    loaders = combined.flattened
    combined.flattened = [() if any(loader is done for done in finished) else loader for loader in loaders]
    length = fetcher.length
    iter(fetcher)
    combined.flattened, fetcher.length = loaders, length


def count_as_under_way(trainer: Trainer, epoch: int) -> None:
    """Count an epoch that the trainer cut short as not completed, so that ``fit`` continues it."""
    if _current_epochs(trainer).processed > epoch:
        _set_epochs(trainer, begun=epoch + 1, done=epoch)


def lightning_closes_the_epoch(trainer: Trainer) -> bool:
    """In ``on_train_start``: return whether Lightning is about to end a finished epoch without reading data.

    It does so after a checkpoint from the validation at an epoch's end: only the hooks of that end are missing.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    if not (loop.restarting and loop.restarted_on_last and trainer.fit_loop.restarted_mid_epoch):
        return False
    if not progress.is_last_batch or not trainer.enable_validation:
        return False
    _set_counters(progress.current, trainer.num_training_batches)
    return loop._should_check_val_fx(_reading(trainer)[0])


def begin_epoch(trainer: Trainer, epoch: int) -> None:
    """In ``on_train_start``: make the trainer start ``epoch`` at its first batch."""
    fit_loop = trainer.fit_loop
    was_under_way = _current_epochs(trainer).started > epoch
    _set_epochs(trainer, begun=epoch, done=epoch)
    _settle_total(trainer, 0 if was_under_way else _completed_batches(trainer)[0])
    if fit_loop.epoch_loop.restarted_on_train_batch_end and not was_under_way:
        fit_loop.epoch_loop._batches_that_stepped += 1  # saved before the last batch's step was counted for loggers
    fit_loop.epoch_loop.batch_progress.reset_on_run()
    fit_loop.reset_restart_stage()
    fit_loop.epoch_loop.reset_restart_stage()
    fit_loop._restarting = fit_loop.epoch_loop._restarting = False
    _keep_loaders(trainer)


def resume_epoch(trainer: Trainer, epoch: int, batches_then: int, batches: int) -> None:
    """In ``on_train_start``: make the trainer resume in the middle of ``epoch``.

    Args:
        trainer: The trainer.
        epoch: The epoch.
        batches_then: Completed batches of it, in those of the run that saved.
        batches: The same position in batches of this run, which may have other ranks or another batch size.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    _set_epochs(trainer, begun=epoch + 1, done=epoch)
    fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
    as_saved = epoch_loop.restarting and _completed_batches(trainer)[0] == batches_then
    if as_saved and epoch_loop.restarted_on_train_batch_end:
        _set_counters(epoch_loop.batch_progress.current, batches)
        epoch_loop.batch_progress.current.completed -= 1  # Lightning completes it itself
    elif as_saved and epoch_loop.restarted_on_last:
        _set_counters(epoch_loop.batch_progress.current, batches)
        _settle_steps_of_loggers(trainer)
    else:
        # Some later batches are read again, or a batch was incomplete. Lightning has nothing to complete; and the step
        # that it adds to the loggers' count, for a batch that it takes for completed, is subtracted beforehand.
        _settle_total(trainer, batches_then)
        _set_counters(epoch_loop.batch_progress.current, batches)
        epoch_loop.reset_restart_stage()
        if not epoch_loop._should_accumulate():  # with Lightning's factor: that of a scheduler is set at the next batch
            epoch_loop._batches_that_stepped -= 1
    epoch_loop.batch_progress.is_last_batch = False
    fit_loop._restarting = epoch_loop._restarting = True
    _keep_loaders(trainer)


def set_accumulation(trainer: Trainer) -> None:
    """Set the accumulation of a GradientAccumulationScheduler for this epoch, which it sets only when epochs start."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)


# Validations during training ----------------------------------------------------------------------------------------


def is_validation_of_fit(trainer: Trainer) -> bool:
    """Return whether the validation under way belongs to training, and is not the sanity check."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def is_validation_due(trainer: Trainer) -> bool:
    """In ``on_train_batch_end``: return whether the trainer validates before the next batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(_reading(trainer)[0])


def skip_validation(trainer: Trainer) -> None:
    """In ``on_train_batch_end``: leave out the validation that may be due after this batch."""
    trainer.fit_loop.epoch_loop._skip_next_val = True


def validate_first(trainer: Trainer, epoch: int, batches_then: int, batches: int) -> None:
    """In ``on_train_start``: make the trainer validate, in the middle or at the end of ``epoch``, before it continues.

    Lightning continues a validation at the batch at which it was saved, but its loaders start over, so the last batches
    are left out. And it skips a validation that was due but had not begun. So the counters of the validation are set to
    its beginning, and those of the epoch to what they are after a training batch.

    Args:
        trainer: The trainer.
        epoch: The epoch under way.
        batches_then: Batches done of it, in those of the run that saved.
        batches: The same position in batches of this run; all of them at the epoch's end.
    """
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    _settle_total(trainer, batches_then)
    _set_counters(loop.batch_progress.current, batches)
    loop.batch_progress.is_last_batch = 0 < batches_in_epoch(trainer) <= batches
    _set_epochs(trainer, begun=epoch + 1, done=epoch)
    fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
    loop._restart_stage = EpochRestartStage.RESTARTED_ON_LAST
    loop.val_loop._restart_stage = EvaluationRestartStage.RESTARTED_MID_EVALUATION
    fit_loop._restarting, loop._restarting, loop.val_loop._restarting = False, True, False
    loop.val_loop.batch_progress.total.reset_on_restart()
    loop.val_loop.batch_progress.reset_on_run()
    # The interval of this run may count other batches, or time.
    loop._should_check_val_fx = lambda data_fetcher: True  # type: ignore[method-assign]  # noqa: ARG005
    _keep_loaders(trainer)


def validate_when_due(trainer: Trainer) -> None:
    """Let Lightning decide again when to validate, after :func:`validate_first`."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_should_check_val_fx", None)


# Parts of the counters -----------------------------------------------------------------------------------------------


def _settle_steps_of_loggers(trainer: Trainer) -> None:
    """Count the last batch's step for loggers once: a checkpoint does not record whether that was done.

    Lightning counts it if the validation that followed was a regular one, and not the one before an early stop.
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization and not loop._should_accumulate():
        loop._batches_that_stepped = trainer.global_step - int(loop._should_check_val_fx(_reading(trainer)[0]))


def _completed_batches(trainer: Trainer) -> tuple[int, int]:
    """Return the batches that Lightning would count as completed when it resumes: of this epoch, and in total."""
    loop = trainer.fit_loop.epoch_loop
    progress, more = loop.batch_progress, int(loop.restarted_on_train_batch_end)
    return progress.current.completed + more, progress.total.completed + more


def _settle_total(trainer: Trainer, batches_then: int) -> None:
    """Set the batches over all epochs to the completed ones, without those that are read again."""
    done, in_all = _completed_batches(trainer)
    _set_counters(trainer.fit_loop.epoch_loop.batch_progress.total, in_all - (done - batches_then))


def _current_epochs(trainer: Trainer) -> Any:  # Lightning's own annotations name a base class
    return trainer.fit_loop.epoch_progress.current


def _set_epochs(trainer: Trainer, begun: int, done: int) -> None:
    total: Any = trainer.fit_loop.epoch_progress.total
    for tracker in (_current_epochs(trainer), total):
        _set_counters(tracker, done)
        tracker.ready = tracker.started = begun


def _set_counters(tracker: Any, done: int | float) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = int(done)


def _keep_loaders(trainer: Trainer) -> None:
    # They were created just now; the changed epoch number must not make Lightning create them again.
    trainer.fit_loop._last_train_dl_reload_epoch = trainer.current_epoch


# Progress bars in a resumed epoch ------------------------------------------------------------------------------------


def show_epoch_from(trainer: Trainer, pl_module: LightningModule, batches: int) -> None:
    """Set the epoch's number and total in the progress bar, and the completed batches.

    Lightning does not call ``on_train_epoch_start`` when it resumes an epoch. Its bars then have no total, or that of
    the previous epoch, and their speed would count batches of an earlier run.
    """
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    bar.on_train_epoch_start(trainer, pl_module)
    if isinstance(bar, TQDMProgressBar):
        shown = bar.train_progress_bar
        shown.initial = shown.n = batches
        shown.refresh()
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.reset(bar.train_progress_bar_id, completed=batches)


def line_in_rich_bar(trainer: Trainer) -> Callable[[str | None], object] | None:
    """Add a line to Lightning's display of rich, which overwrites other output to the terminal.

    Returns:
        A function that changes the text, or hides the line for None; None without such a display.
    """
    bar = trainer.progress_bar_callback
    display = bar.progress if isinstance(bar, RichProgressBar) else None
    if display is None or not display.live.is_started or not display.console.is_terminal:
        return None
    line = display.add_task("", total=float("inf"))

    def show(words: str | None) -> None:
        # Hidden, not removed: Lightning uses a task's number as its index in the list of tasks.
        display.update(line, description=words or "", visible=words is not None)
        display.refresh()

    return show


def show_next_epoch(trainer: Trainer) -> None:
    """Before the bar starts the next epoch: reset its first batch."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.initial = 0


# Signals: Lightning sets its handlers after on_fit_start, and restores the former ones at the end of every fit --------


def take_over(trainer: Trainer, signals: Iterable[signal.Signals], handler: _Handler) -> None:
    """Replace Lightning's handler by ``handler`` as soon as it is set; Lightning restores the former one.

    Outside the main thread signals cannot be handled, by Lightning either.
    """
    connector = trainer._signal_connector

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        for signum in signals:
            connector._register_signal(signum, handler)

    connector.register_signal_handlers = register  # type: ignore[method-assign]


def give_back(trainer: Trainer) -> None:
    """Let Lightning's next ``fit`` set its own handlers."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def in_this_process_alone(note: Callable[[signal.Signals], None]) -> _Handler:
    """Return a handler that forked children do not inherit: other children of a program still end on SIGTERM."""
    owner = os.getpid()

    def handle(signum: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            note(signal.Signals(signum))
        elif signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    return handle


def needs_requeue(trainer: Trainer, signals: Iterable[signal.Signals]) -> bool:
    """Return whether SLURM has sent the signal on which Lightning would requeue the job."""
    environment = trainer._accelerator_connector.cluster_environment
    return (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and environment.requeue_signal in {*signals}
    )


def requeue() -> None:
    """Requeue this SLURM job, or this task of an array. On one rank only."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        rank_zero_warn(f"cannot requeue SLURM job {job}: scontrol is not on the PATH; the checkpoint is saved")
        return
    result = subprocess.run([scontrol, "requeue", job], check=False, capture_output=True, text=True)  # noqa: S603
    if result.returncode:
        rank_zero_warn(f"SLURM did not requeue job {job} (status {result.returncode}): {result.stderr.strip()}")
    else:
        rank_zero_info(f"Requeued SLURM job {job}.")


def exit_status(trainer: Trainer, signum: signal.Signals) -> int:
    """Return the exit status of the process: as if the signal had ended it, or 0 if another process reports it.

    Lightning kills all ranks that it started, its own process first, when one of them ends with another status than 0.
    """
    environment = trainer._accelerator_connector.cluster_environment
    started_by_lightning = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
    return 0 if started_by_lightning else 128 + signum


# Saving --------------------------------------------------------------------------------------------------------------


def save_whole(trainer: Trainer, path: str) -> None:
    """Save a checkpoint next to ``path``, sync it to the disk, and rename it. Call it on all ranks.

    A checkpoint in a directory, as sharded strategies write it, cannot replace another atomically: the previous one is
    renamed to ``*.replaced`` first, and removed afterwards. A URL is written to directly: an object store shows an
    object once it is complete.
    """
    if "://" in path:
        trainer.save_checkpoint(path)
        _wait_until_written(trainer)
        trainer.strategy.barrier("checkpoint in place")
        return
    final = Path(path)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)  # the same for all ranks, which may all write to it
    if trainer.is_global_zero:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # a killed run's
    trainer.strategy.barrier("checkpoint begun")
    trainer.save_checkpoint(partial)
    _wait_until_written(trainer)
    trainer.strategy.barrier("checkpoint written")
    if trainer.is_global_zero:
        _bring_to_disk(partial)
        _put_in_place(partial, final)
    trainer.strategy.barrier("checkpoint in place")


def known_checkpoints(trainer: Trainer) -> list[Path]:
    """Return the checkpoints on this machine that the trainer's callbacks have saved, and the resumed one."""
    names = ("ckpt_path", "best_model_path", "_last_checkpoint_saved", "last_model_path")
    saved = [getattr(callback, name, None) for callback in trainer.checkpoint_callbacks for name in names]
    return [Path(path) for path in (trainer.ckpt_path, *saved) if path and Path(path).exists()]


def existing_checkpoints(trainer: Trainer) -> list[Path]:
    """Return the checkpoints where a trainer's callbacks will save, before it fits, if that is a local directory.

    None are returned if Lightning will choose a new directory, or resumes automatically: from a checkpoint of an
    OnExceptionCheckpoint, or of a SLURM job that was requeued.
    """
    callbacks = trainer.checkpoint_callbacks
    if any(isinstance(callback, OnExceptionCheckpoint) for callback in callbacks) or (
        SLURMEnvironment.detect() and trainer._checkpoint_connector._hpc_resume_path is not None
    ):
        return []
    default = None if trainer.loggers else f"{trainer.default_root_dir}/checkpoints"
    directories = {str(getattr(callback, "dirpath", None) or default or "://") for callback in callbacks}
    return [path for name in directories if "://" not in name for path in Path(name).glob("*.ckpt")]


def _wait_until_written(trainer: Trainer) -> None:
    writer = getattr(trainer.strategy, "_checkpoint_io", None)  # strategies without one raise errors
    if isinstance(writer, AsyncCheckpointIO):
        writer.teardown()  # waits, and raises what went wrong; the next save sets it up again


def _bring_to_disk(path: Path) -> None:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(partial: Path, final: Path) -> None:
    replaced = final.with_name(final.name + _REPLACED_SUFFIX)
    if partial.is_dir() or final.is_dir():
        _remove(replaced)
        with suppress(FileNotFoundError):
            os.replace(final, replaced)
    os.replace(partial, final)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
