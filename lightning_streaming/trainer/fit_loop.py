"""Lightning's own count of epochs and batches: read, and put right after a resume.

All that this package knows of Lightning's private state is in this file. The fit loop counts epochs and batches as
``ready``, ``started``, ``processed`` and ``completed``, each raised in turn as one unit of work goes on, and a
checkpoint holds the counters as they stood in the hook that saved it. Lightning goes on well from most of those shapes,
not from all: saved in ``on_train_epoch_start`` it loses an epoch; saved at the end of a run that ``max_steps`` cut, it
calls the rest of the epoch the next one; and its batches are those of the ranks and the batch size of then. The
callback knows the place in the data, so it has the counters set to what an uninterrupted run would have had there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.order.batch_ranges import Counted


def streaming_loaders(trainer: Trainer) -> dict[str, StreamingDataLoader]:
    """The streaming loaders that the fit loop reads from now, by name.

    A single loader is "train"; those in a dict or list are named by key or place, nested ones like "text.0".
    """
    return _streaming_among(trainer.train_dataloader)


def has_loaders(trainer: Trainer) -> bool:
    """Whether this fit has made its train loaders."""
    return trainer.fit_loop._combined_loader is not None


def when_loaders_are_made(trainer: Trainer, prepare: Callable[[dict[str, StreamingDataLoader]], None]) -> None:
    """In ``setup``: have ``prepare`` called with the streaming loaders, by name, whenever train loaders are made.

    That is before Lightning asks for their lengths, from which it works out when epochs end and validation is due.
    """
    source = trainer.fit_loop._data_source
    trainer.fit_loop._data_source = _PreparedSource(source.instance, source.name, prepare)


class _PreparedSource(_DataLoaderSource):
    """Where Lightning has train loaders from."""

    def __init__(self, instance: Any, name: str, prepare: Callable[[dict[str, StreamingDataLoader]], None]) -> None:
        super().__init__(instance, name)
        self._prepare = prepare

    def dataloader(self) -> Any:
        made = super().dataloader()
        self._prepare(_streaming_among(made.iterables if isinstance(made, CombinedLoader) else made))
        return made


def _streaming_among(loaders: Any) -> dict[str, StreamingDataLoader]:
    named = named_loaders(loaders)
    return {name or "train": loader for name, loader in named if isinstance(loader, StreamingDataLoader)}


def is_overfitting(trainer: Trainer) -> bool:
    """Whether every epoch is to read the same few batches."""
    return bool(trainer.overfit_batches > 0)  # type: ignore[attr-defined]  # set by Lightning's data connector


def named_loaders(loaders: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The loaders in dicts and lists, with their names joined by dots; a single one has the name given."""
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
    """How Lightning combines several train loaders: "min_size", "max_size", "max_size_cycle"."""
    combined = trainer.fit_loop._combined_loader
    return "max_size_cycle" if combined is None else combined._mode


def weights_have_seen_the_batch(trainer: Trainer) -> bool:
    """In ``on_train_batch_end``: whether the batch's gradient is in the weights, not still being accumulated."""
    return not trainer.fit_loop._should_accumulate()


def logging_step(trainer: Trainer) -> int | None:
    """In ``on_train_batch_end``: the step under which loggers are to be told; None if they are not to be told now."""
    if not trainer._logger_connector.should_update_logs or not weights_have_seen_the_batch(trainer):
        return None
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def put_first(trainer: Trainer, callback: Callback) -> None:
    """Have Lightning call ``callback`` before all others. Safe in its ``setup``: those passed already stay passed."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def is_untouched(trainer: Trainer) -> bool:
    """Whether this trainer has neither begun an epoch nor loaded a checkpoint that has."""
    return trainer.fit_loop.epoch_progress.total.ready == 0


def batches_in_epoch(trainer: Trainer) -> int:
    """Batches of an epoch on each rank, as the trainer is limited to; 0 where some other loader has no length."""
    batches = trainer.num_training_batches
    return 0 if batches == float("inf") else int(batches)


def batches_trained(trainer: Trainer, epoch: int, batches: int) -> int:
    """In ``on_train_start``: batches over all epochs that the weights have seen who stand after these of ``epoch``."""
    is_under_way = _current_epochs(trainer).started > epoch
    return _batches_done_in_all(trainer) - (_batches_done(trainer) - batches if is_under_way else 0)


def count_batches_of_epoch(trainer: Trainer) -> None:
    """Have the trainer expect the batches of the epochs in which its loaders stand.

    Lightning asks loaders for their length once, when they are made: before their place is known, under strategies
    that load checkpoints late; and skipping makes some epochs shorter.

    Raises:
        ConfigError: Batches are to be skipped while overfitting.
    """
    fetcher, combined = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    assert fetcher is not None, "made before on_train_start"
    assert combined is not None, "made before on_train_start"
    assert combined.limits is not None, "set with the loaders"
    loaders, limits = combined.flattened, combined.limits
    if is_overfitting(trainer) and any(_skips(loader) for loader in loaders):
        raise ConfigError("skip counts batches over a run, and overfit_batches reads the same again; drop one of them")
    counted = Counted(limit=trainer.limit_train_batches)
    combined.limits = [
        counted.limited(loader.batches_of_epoch()) if isinstance(loader, StreamingDataLoader) else limit
        for loader, limit in zip(loaders, limits, strict=True)
    ]
    assert combined._iterator is not None, "made before on_train_start"
    combined._iterator.limits = combined.limits
    length = _length_of_epoch(combined)
    fetcher.length = None if length == float("inf") else int(length)
    if fetcher.length is None:
        return
    trainer.fit_loop.max_batches = fetcher.length
    # Where validation goes by time there is no batch, nor an interval.
    if trainer.val_check_batch is not None and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(fetcher.length * trainer.val_check_interval))


def _length_of_epoch(combined: CombinedLoader) -> int | float:
    """Batches of the epoch under way: more than ``len``, which bounds Lightning's count, if it was begun elsewhere."""
    assert combined.limits is not None, "set by the caller"
    lengths = [
        limit if isinstance(loader, StreamingDataLoader) else min(_length(loader), limit)
        for loader, limit in zip(combined.flattened, combined.limits, strict=True)
    ]
    return min(lengths) if combined._mode == "min_size" else max(lengths)


def _length(loader: object) -> int | float:
    length = sized_len(loader)
    return float("inf") if length is None else length


def _skips(loader: object) -> bool:
    return isinstance(loader, StreamingDataLoader) and bool(passes_of(loader.dataset).epochs.skipped)


def fetch_anew(trainer: Trainer, finished: Collection[StreamingDataLoader]) -> None:
    """In ``on_train_start``: have Lightning read anew from loaders that have been moved since it made its iterators.

    That matters where it has fetched one batch ahead, as it does if any of several loaders has no length, and where
    some are not to be read: in mode "max_size" a loader that has come to its end rests until the next epoch.

    Args:
        trainer: The trainer.
        finished: Loaders to leave out of the epoch that goes on.
    """
    fetcher, combined = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    assert fetcher is not None, "made before on_train_start"
    assert combined is not None, "as well"
    has_fetched = isinstance(fetcher, _PrefetchDataFetcher) and bool(fetcher.batches)
    if not has_fetched and not finished:
        return
    loaders = combined.flattened
    combined.flattened = [() if any(loader is one for one in finished) else loader for loader in loaders]
    length = fetcher.length
    iter(fetcher)
    combined.flattened, fetcher.length = loaders, length


def has_loader_states(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds what our loaders themselves told Lightning of their place."""
    fit_state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = fit_state.get("combined_loader", [])
    return bool(states) and all(isinstance(state, Mapping) and "sample_in_epoch" in state for state in states)


def keep_loader_states_from_lightning(checkpoint: dict[str, Any]) -> None:
    """Take our loaders' states out of what Lightning would give to loaders by their place in a list.

    It does so too late for some loaders and too early for others, and fails when their number changed.
    """
    if has_loader_states(checkpoint):
        _fit_loop_state(checkpoint)["state_dict"]["combined_loader"] = []


def check_trained(checkpoint: Mapping[str, Any], epoch: int, batches: int) -> None:
    """Refuse a checkpoint whose trainer has not come to the place that it holds.

    Raises:
        StateError: Lightning has trained fewer batches of the epoch than we have counted, has not begun it, or is
            beyond it.
    """
    state = _fit_loop_state(checkpoint)
    trained = state["epoch_loop.batch_progress"]["current"]["processed"]
    begun, ended = (state["epoch_progress"]["current"][count] for count in ("ready", "processed"))
    # An epoch that was cut short counts as ended for Lightning.
    if batches > trained or not ended - 1 <= epoch <= begun:
        raise StateError(
            f"the checkpoint's place in the data is after batch {batches} of epoch {epoch}, but its trainer had "
            f"begun {begun} epochs, and trained {trained} batches of the last; the two were not saved together. Either "
            "it was saved in on_fit_start of a run that resumed, where Lightning has not restored its counters and "
            "optimizers yet: resume from the checkpoint that this run resumed from, and save in on_train_start or "
            "later. Or another checkpoint was restored since, as LearningRateFinder and BatchSizeFinder do in a run "
            "that resumes: leave those out of it"
        )


def reopen_epoch(checkpoint: dict[str, Any], epoch: int) -> None:
    """Let a checkpoint whose epoch was cut short, but counted as done, say that it is under way."""
    progress = _fit_loop_state(checkpoint)["epoch_progress"]
    for tracker in (progress["current"], progress["total"]):
        if tracker["processed"] > epoch:
            tracker.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)


def count_as_under_way(trainer: Trainer, epoch: int) -> None:
    """The same before a trainer fits again that has cut its epoch short; else it may end at once."""
    if _current_epochs(trainer).processed > epoch:
        _set_epochs(trainer, begun=epoch + 1, done=epoch)


def _fit_loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    missing = {"epoch_progress", "epoch_loop.batch_progress"} - state.keys()
    if missing:
        raise StateError(
            f"the checkpoint's fit loop has no {', '.join(sorted(missing))}; "
            "it was not saved by a Lightning release that this package knows (2.6 or newer)"
        )
    return state


def lightning_closes_the_epoch(trainer: Trainer) -> bool:
    """In ``on_train_start``: whether Lightning is about to end a finished epoch without asking for data.

    So it does after a checkpoint from the validation at an epoch's end: the hooks of that end are still to run.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    if not (loop.restarting and loop.restarted_on_last and trainer.fit_loop.restarted_mid_epoch):
        return False
    if not progress.is_last_batch or not trainer.enable_validation:
        return False
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None, "made before on_train_start"
    _set_counters(progress.current, trainer.num_training_batches)
    return loop._should_check_val_fx(fetcher)


def begin_epoch(trainer: Trainer, epoch: int) -> None:
    """In ``on_train_start``: have the trainer begin ``epoch`` at its first batch."""
    fit_loop = trainer.fit_loop
    was_under_way = _current_epochs(trainer).started > epoch
    _set_epochs(trainer, begun=epoch, done=epoch)
    _settle_total(trainer, 0 if was_under_way else _batches_done(trainer))
    if fit_loop.epoch_loop.restarted_on_train_batch_end and not was_under_way:
        fit_loop.epoch_loop._batches_that_stepped += 1  # saved before the last batch's step was counted for loggers
    fit_loop.epoch_loop.batch_progress.reset_on_run()
    fit_loop.reset_restart_stage()
    fit_loop.epoch_loop.reset_restart_stage()
    fit_loop._restarting = fit_loop.epoch_loop._restarting = False
    _keep_loaders(trainer)


def resume_epoch(trainer: Trainer, epoch: int, batches_then: int, batches: int) -> None:
    """In ``on_train_start``: have the trainer go on in the middle of ``epoch``.

    Args:
        trainer: The trainer.
        epoch: Epoch to go on in.
        batches_then: Batches done of it, counted in those of the run that saved.
        batches: The same place in batches of this run: other ranks or another batch size make another number.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    _set_epochs(trainer, begun=epoch + 1, done=epoch)
    fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
    as_saved = epoch_loop.restarting and _batches_done(trainer) == batches_then
    if as_saved and epoch_loop.restarted_on_train_batch_end:
        _set_counters(epoch_loop.batch_progress.current, batches)
        epoch_loop.batch_progress.current.completed -= 1  # Lightning completes it itself
    elif as_saved and epoch_loop.restarted_on_last:
        _set_counters(epoch_loop.batch_progress.current, batches)
        _settle_steps_of_loggers(trainer)
    else:
        # Some batches since are to be read again, or a batch was under way. There is nothing to finish for Lightning;
        # and the step it adds to the loggers' count, for a batch that it takes to be finished, is taken off beforehand.
        _settle_total(trainer, batches_then)
        _set_counters(epoch_loop.batch_progress.current, batches)
        epoch_loop.reset_restart_stage()
        if not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1
    epoch_loop.batch_progress.is_last_batch = False
    fit_loop._restarting = epoch_loop._restarting = True
    _keep_loaders(trainer)


def _settle_steps_of_loggers(trainer: Trainer) -> None:
    """Count the last batch's step for loggers once: a checkpoint does not tell whether that was done.

    Lightning does so where the validation that followed was one of its rhythm, and not the one before an early stop.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None, "made before on_train_start"
    if trainer.lightning_module.automatic_optimization and not loop._should_accumulate():
        loop._batches_that_stepped = trainer.global_step - int(loop._should_check_val_fx(fetcher))


def _batches_done(trainer: Trainer) -> int:
    """Batches of the current epoch that Lightning would count as completed once it goes on."""
    loop = trainer.fit_loop.epoch_loop
    done: int = loop.batch_progress.current.completed
    return done + 1 if loop.restarted_on_train_batch_end else done


def _settle_total(trainer: Trainer, batches_then: int) -> None:
    """Count over all epochs what is done, less what will be read again; nothing is under way."""
    again = _batches_done(trainer) - batches_then
    _set_counters(trainer.fit_loop.epoch_loop.batch_progress.total, _batches_done_in_all(trainer) - again)


def _batches_done_in_all(trainer: Trainer) -> int:
    loop = trainer.fit_loop.epoch_loop
    done: int = loop.batch_progress.total.completed
    return done + 1 if loop.restarted_on_train_batch_end else done


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
    # They were made a moment ago; an epoch number that changes under Lightning must not make it load them again.
    trainer.fit_loop._last_train_dl_reload_epoch = trainer.current_epoch
