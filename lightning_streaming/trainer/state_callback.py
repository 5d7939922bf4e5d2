"""The callback that owns the position in the data: counts batches in the weights, saves it, resumes from it.

Read it in the order of a run: ``on_load_checkpoint`` reads the position from the checkpoint, ``on_train_start`` moves
loaders and trainer there, ``on_train_batch_end`` counts, ``state_dict`` saves.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.escaping import short_repr
from lightning_streaming.reading.dataset import StreamingDataset, run_state_of, saved_at
from lightning_streaming.reading.loader import (
    StreamingDataLoader,
    keep_length_of_first_epoch,
    no_batch_error,
    watch_length,
)
from lightning_streaming.reading.other_trainers import datasets_within
from lightning_streaming.reading.position import check_same_data, position_of, run_of
from lightning_streaming.reading.ranks import can_ask_others
from lightning_streaming.resume import lightning_checkpoint
from lightning_streaming.resume.run import OnMismatch
from lightning_streaming.resume.state import (
    CALLBACK_KEY,
    Cursor,
    SavedPosition,
    SavedRun,
    SavedTrainer,
    SavedValidation,
    read_run,
)
from lightning_streaming.sequence.skips import TrainProgress
from lightning_streaming.signatures import public
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.trainer.config import shown
from lightning_streaming.units import is_one_of


@public()
class StreamingStateCallback(Callback):
    """Callback that saves the position in the data in every checkpoint, and restores it in ``fit(ckpt_path=...)``.

    The data module adds one itself. Without it, pass one to the trainer: it finds every
    :class:`~lightning_streaming.StreamingDataLoader` among the train loaders, by name.

    For each loader it saves epoch, sample offset, shuffle seed, number of canonical nodes, and a fingerprint of data
    and order. These are the same on every rank, so the checkpoint of rank 0 is enough. A batch counts as read once its
    gradient is in the weights: with gradient accumulation, at the step of the optimizer.

    Args:
        on_mismatch: "error" or "warn" if data or order have changed since the checkpoint. With "warn" the run continues
            from the same position.
    """

    def __init__(self, on_mismatch: OnMismatch = "error") -> None:
        if not is_one_of(on_mismatch, ("error", "warn")):
            raise ConfigError(
                f'on_mismatch must be "error" or "warn", but got {short_repr(on_mismatch)}', option="on_mismatch"
            )
        self._on_mismatch: OnMismatch = on_mismatch
        self._place: _TrainedSoFar | None = None
        self._restored: SavedRun | None = None
        self._put_back: dict[str, tuple[StreamingDataset, Cursor]] = {}
        self._first: dict[str, Cursor] = {}
        self._is_placed = self._resumes_mid_epoch = False
        self._begins_again = False
        self._batches_trained = 0
        self._ends: dict[str, Cursor] = {}
        self._pass_epochs: dict[str, int] = {}
        self._known: dict[str, _Known] = {}
        self._batches_not_shown: int | None = None

    @property
    def state_key(self) -> str:
        """The key of the state: fixed, so that a renamed subclass still finds it."""
        return CALLBACK_KEY

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as plain values that load with ``weights_only=True``."""
        if self._restored is not None:  # saved again before training continued
            return self._restored.as_state()
        place = self._place
        if place is None:
            return SavedRun().as_state()
        return SavedRun(
            trainer=SavedTrainer(epoch=place.epoch, batches=place.batches, batches_in_epoch=place.batches_in_epoch),
            loaders={name: saved_at(self._known[name].dataset, cursor) for name, cursor in place.cursors.items()},
            samples_per_global_batch={name: self._known[name].global_batch for name in place.cursors},
            validation=place.validation if place.validation_matters else SavedValidation(),
        ).as_state()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the front of the callbacks, so that others save the new position, and prepare train loaders."""
        lightning_internals.put_first(trainer, self)
        if stage == "fit":
            self._restored, self._put_back = None, {}
            lightning_internals.validate_when_due(trainer)
            if lightning_internals.is_untouched(trainer):  # a callback may serve one trainer after another
                self._place = None
            elif self._place is not None and not self._place.is_finished:
                lightning_internals.count_as_under_way(trainer, self._place.epoch)
            lightning_internals.on_loaders_created(trainer, partial(self._put_loaders_back, trainer))
        # Lightning warns about the length of every iterable dataset; ours is exact, on every rank.
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined", category=UserWarning)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove secrets from hyperparameters, also from streams in those of a model."""
        for module in (pl_module, trainer.datamodule):  # type: ignore[attr-defined]
            name = getattr(module, "CHECKPOINT_HYPER_PARAMS_KEY", "")
            if name in checkpoint:
                checkpoint[name] = shown(checkpoint[name])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the saved position from a checkpoint that ``fit`` resumes from."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            if not lightning_checkpoint.has_loader_states(checkpoint):
                rank_zero_warn(
                    "The checkpoint holds no place in the streaming data: it was saved without StreamingStateCallback. "
                    "Its epoch begins again at the first sample."
                )
            return
        run = read_run(state)
        lightning_checkpoint.drop_loader_states(checkpoint)
        if run.trainer is None:  # saved before the first batch, as Lightning's tuners do
            self._place, self._begins_again = None, True
            return
        self._restored, self._put_back = run, {}
        place = _TrainedSoFar.of(run)
        lightning_checkpoint.check_trained(checkpoint, place.epoch, place.batches)
        if not place.is_finished:
            lightning_checkpoint.reopen_epoch(checkpoint, place.epoch)
        if lightning_internals.has_loaders(
            trainer
        ):  # strategies that load checkpoints late: a schedule has read lengths
            self._put_loaders_back(trainer, lightning_internals.streaming_loaders(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move trainer and loaders to the saved position, or record where they start."""
        if lightning_internals.is_untouched(trainer):  # Lightning's tuners run steps and undo them
            self._place = None
        loaders = lightning_internals.streaming_loaders(trainer)
        _check_loaders(trainer, loaders)
        self._put_loaders_back(trainer, loaders)
        self._check_data(loaders)
        self._know(trainer, loaders)
        if self._restored is not None:
            restored, self._restored = self._restored, None
            self._place = _TrainedSoFar.of(restored)
            self._place.cursors = {name: self._put_back[name][1] for name in loaders}
            self._go_to_place(trainer, loaders)
            _report_resume(trainer, self._place.cursors, loaders, restored.samples_per_global_batch)
            _check_cut_is_read_once(trainer, self._place, loaders)
            return
        if not loaders:
            rank_zero_warn(
                "StreamingStateCallback finds no StreamingDataLoader among the train loaders, so no place in the data "
                "is saved: a resumed epoch begins again at its first sample."
            )
            return
        if self._place is None:
            # What Lightning's tuners read before the first batch is read again.
            begins = {name: Cursor(0, 0) for name in loaders} | self._first if self._begins_again else {}
            is_ahead = lightning_internals.has_fetched_ahead(trainer)  # what is read again
            at = {
                name: run_state_of(loader.dataset).began() if is_ahead else position_of(loader).cursor()
                for name, loader in loaders.items()
            }
            self._first = at | {name: cursor for name, cursor in begins.items() if name in at}
            self._place = _TrainedSoFar(epoch=trainer.current_epoch, cursors=dict(self._first))
        self._begins_again = False
        self._go_to_place(trainer, loaders)
        _check_cut_is_read_once(trainer, self._place, loaders)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start an epoch of the data in every loader."""
        lightning_internals.show_next_epoch(trainer)
        loaders = lightning_internals.streaming_loaders(trainer)
        known = {name: known.dataset for name, known in self._known.items()}
        self._check_data({name: loader for name, loader in loaders.items() if known.get(name) is not loader.dataset})
        self._know(trainer, loaders)
        if not loaders or self._place is None:
            return
        if self._is_placed:  # this is the epoch that on_train_start prepared
            self._is_placed = False
            return
        place = self._place
        place.cursors = {name: self._next_beginning(trainer, name) for name in loaders}
        place.begin(trainer.current_epoch)
        self._note_beginnings()
        self._seek(trainer, loaders)
        if self._read_appended(trainer, loaders):
            self._seek(trainer, loaders)
        place.batches_in_epoch = lightning_internals.batches_in_epoch(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Show the resumed epoch in the progress bar."""
        self._show_place(trainer, pl_module)
        if self._resumes_mid_epoch:
            self._resumes_mid_epoch = False
            lightning_internals.set_accumulation(trainer)
        if self._place is not None and self._place.validation.is_due:  # there was nothing to validate on
            lightning_internals.validate_when_due(trainer)
            self._place.validation = replace(self._place.validation, is_due=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the resumed epoch, too; until its end, a checkpoint records that this validation is due.

        After this callback counted the batch, another may have stopped the run, or the time to validate may have come.
        """
        self._show_place(trainer, pl_module)
        if not lightning_internals.is_validation_of_fit(trainer):
            return
        lightning_internals.validate_when_due(trainer)
        if self._place is not None and self._place.batches == self._batches_trained:
            self._place.validation = replace(self._place.validation, is_due=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that the validation is done."""
        if self._place is not None and lightning_internals.is_validation_of_fit(trainer):
            self._place.validation = SavedValidation(done_after=self._batches_trained)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Count a batch, and commit its end if the weights have seen it."""
        if self._place is None:
            return
        self._is_placed = False
        self._batches_trained += 1
        for name, loader in lightning_internals.streaming_loaders(trainer).items():
            end = position_of(loader).claim()
            if end is not None:
                self._ends[name] = end
        if lightning_internals.weights_have_seen_the_batch(trainer):
            self._place.batches = self._batches_trained
            self._place.cursors = dict(self._ends)
        if self._batches_trained <= self._place.validation.done_after:  # trained again, and validated before
            lightning_internals.skip_validation(trainer)
        elif self._place.batches == self._batches_trained and lightning_internals.is_validation_due(trainer):
            self._place.validation = replace(self._place.validation, is_due=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the epoch, unless a limit on steps or an early stop cut it short."""
        self._show_place(trainer, pl_module)
        place = self._place
        if place is None or not trainer.is_last_batch:
            return
        place.cursors = {name: self._next_beginning(trainer, name) for name in place.cursors}
        place.begin(trainer.current_epoch + 1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if no epoch has a batch."""
        loaders = lightning_internals.streaming_loaders(trainer)
        for loader in loaders.values():
            watch_length(loader, None)
        _check_for_batches(trainer, loaders)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the workers of the train loaders. The position stays, for callbacks that save it now.

        Lightning keeps its iterators if the exception was raised in a validation during training.
        """
        for loader in lightning_internals.streaming_loaders(trainer).values():
            loader.close()

    def _put_loaders_back(self, trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
        """Move new datasets to the position of the previous ones, or of the checkpoint.

        Their canonical nodes determine the batches of an epoch, so this happens before Lightning reads lengths.
        """
        for name, loader in loaders.items():
            reader = f"train loader {name!r}" if len(loaders) > 1 else ""
            run_state_of(loader.dataset).set_labels(
                reader, None if trainer.ckpt_path is None else str(trainer.ckpt_path)
            )
        for name, position in self._positions_to_load(loaders).items():
            loader = loaders[name]
            if name not in self._put_back or self._put_back[name][0] is not loader.dataset:
                loader.load_state_dict(position.as_state(), self._on_mismatch)
                self._put_back[name] = loader.dataset, position_of(loader).cursor()
            if self._restored is not None and trainer.max_epochs != -1:
                keep_length_of_first_epoch(loader)

    def _positions_to_load(self, loaders: Mapping[str, StreamingDataLoader]) -> Mapping[str, SavedPosition]:
        if self._restored is not None:
            saved = self._restored.loaders
            if saved.keys() != loaders.keys():
                raise StateError(
                    f"the checkpoint holds places for the train loaders {sorted(saved)}, but now there are "
                    f"{sorted(loaders)}",
                    hint="give them the names they had",
                )
            return saved
        known = {} if self._place is None else self._place.cursors
        return {
            name: saved_at(self._known[name].dataset, known[name])
            for name, loader in loaders.items()
            if name in known and not self._begins_with_own(name, known[name], loader.dataset)
        }

    def _begins_with_own(self, name: str, cursor: Cursor, dataset: StreamingDataset) -> bool:
        """Return whether a dataset needs no state: it is known, or has other data or another order for a new epoch.

        A module that creates a loader for each epoch may return such a dataset.
        """
        known = self._known[name].dataset
        if known is dataset:
            return True
        return cursor.sample_in_epoch == 0 and not run_state_of(dataset).continues(run_state_of(known))

    def _check_data(self, loaders: Mapping[str, StreamingDataLoader]) -> None:
        """Raise an error for train loaders whose data differs between ranks."""
        for loader in loaders.values():
            check_same_data(loader, run_state_of(loader.dataset).reader)

    def _know(self, trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
        for name, loader in loaders.items():
            # Weak references: after an exception, a loader would keep the trainer and the model.
            weak = weakref.ref(self), weakref.ref(trainer), weakref.ref(loader)
            watch_length(loader, partial(_count_again, name, *weak))
        self._known = {
            name: _Known(loader.dataset, position_of(loader).samples_per_global_batch)
            for name, loader in loaders.items()
        }

    def _go_to_place(self, trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
        """Move trainer and loaders to the position of training."""
        place = self._place
        assert place is not None, "set by the caller"
        known = {name: place.cursors.get(name, position_of(loader).cursor()) for name, loader in loaders.items()}
        for name, loader in loaders.items():
            run_state_of(loader.dataset).keep(run_of(loader).counted_from(_counted(trainer, place, known[name])))
        place.cursors = {name: position_of(loader).normalised(known[name]) for name, loader in loaders.items()}
        ended = {name for name, cursor in place.cursors.items() if cursor.epoch > known[name].epoch}
        self._seek(trainer, loaders)
        # A loader may be read more than once in one epoch of the trainer; overfitting goes back to the first time.
        passes = {name: place.batches // max(1, len(loader)) for name, loader in loaders.items()}
        self._pass_epochs = {name: max(0, cursor.epoch - passes[name]) for name, cursor in place.cursors.items()}
        batches = 0 if place.is_finished else _batches_done(trainer, place, loaders, ended)
        in_epoch = lightning_internals.batches_in_epoch(trainer)
        if place.is_finished or 0 < in_epoch <= batches:
            place.cursors = {name: self._next_beginning(trainer, name) for name in loaders}
            self._note_beginnings()
            if self._still_ends_epoch(trainer, place, in_epoch):
                self._seek(trainer, loaders)
                return
            place.epoch, place.validation, batches = place.epoch + 1, SavedValidation(), 0
        finished: list[StreamingDataLoader] = []
        # An epoch that was begun with smaller batches may have as many left as it would have had in these.
        if batches or any(cursor.sample_in_epoch for cursor in place.cursors.values()):
            self._resume_epoch(trainer, place, batches)
            self._resumes_mid_epoch = True
            if lightning_internals.combination_mode(trainer) == "max_size":
                finished = [loaders[name] for name, cursor in place.cursors.items() if cursor.sample_in_epoch == 0]
        else:
            lightning_internals.begin_epoch(trainer, place.epoch)
            self._is_placed = True
        place.batches = batches
        self._batches_not_shown = batches or None
        self._seek(trainer, loaders)
        place.batches_in_epoch = lightning_internals.batches_in_epoch(trainer)
        lightning_internals.restart_fetching(trainer, finished)

    def _still_ends_epoch(self, trainer: Trainer, place: _TrainedSoFar, in_epoch: int) -> bool:
        """Return whether a validation or hooks of the finished epoch's end are left; prepare the trainer for them."""
        if place.validation.is_due:
            lightning_internals.validate_first(trainer, place.epoch, place.batches, in_epoch)
            place.batches = place.batches_in_epoch = in_epoch
        elif not lightning_internals.lightning_closes_the_epoch(trainer):
            return False
        self._batches_not_shown = in_epoch
        return True

    def _resume_epoch(self, trainer: Trainer, place: _TrainedSoFar, batches: int) -> None:
        """Continue in mid-epoch, after ``batches`` batches of this run; first with the validation that is due."""
        if place.validation.is_due:
            lightning_internals.validate_first(trainer, place.epoch, place.batches, batches)
        else:
            lightning_internals.resume_epoch(trainer, place.epoch, place.batches, batches)
        if batches != place.batches:  # batches of another size
            place.validation = replace(place.validation, done_after=0)

    def _read_appended(self, trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> bool:
        """Before an epoch: read data appended to followed streams; return whether there was any."""
        place = self._place
        assert place is not None, "set by the caller"
        if lightning_internals.is_overfitting(trainer) or not can_ask_others():
            return False
        grown = [name for name, loader in loaders.items() if loader.refresh()]
        for name in grown:
            counted = run_of(loaders[name]).counted_from(_counted(trainer, place, place.cursors[name]))
            run_state_of(loaders[name].dataset).keep(counted)
        return bool(grown)

    def _count_rest_of_epoch(self, trainer: Trainer, name: str, loader: StreamingDataLoader) -> None:
        """Let the trainer count the batches of the epoch again, as a loader's weights have changed."""
        place = self._place
        if place is None or name not in self._pass_epochs:
            return
        if position_of(loader).cursor() == Cursor(self._pass_epochs[name], 0):
            lightning_internals.count_batches_of_epoch(trainer)
        elif not trainer.is_last_batch:  # after it, the next epoch is counted when it begins
            lightning_internals.count_rest_of_epoch(trainer)
            self._batches_not_shown = self._batches_trained or None
        else:
            return
        place.batches_in_epoch = lightning_internals.batches_in_epoch(trainer)

    def _note_beginnings(self) -> None:
        assert self._place is not None, "set by the caller"
        self._pass_epochs = {name: cursor.epoch for name, cursor in self._place.cursors.items()}

    def _seek(self, trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
        place = self._place
        assert place is not None, "set by the caller"
        for name, loader in loaders.items():
            position_of(loader).seek(place.cursors[name])
        lightning_internals.count_batches_of_epoch(trainer)
        self._ends = dict(place.cursors)
        self._batches_trained = place.batches

    def _next_beginning(self, trainer: Trainer, name: str) -> Cursor:
        """Return the start of the loader's next epoch; when overfitting, that of the current one."""
        assert self._place is not None, "set by the caller"
        cursor = self._place.cursors.get(name)
        if cursor is None:
            return run_state_of(self._known[name].dataset).next_cursor()
        if lightning_internals.is_overfitting(trainer):
            return Cursor(self._pass_epochs.get(name, cursor.epoch), 0)
        return cursor if cursor.sample_in_epoch == 0 else Cursor(cursor.epoch + 1, 0)

    def _show_place(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batches_not_shown is not None:
            lightning_internals.show_epoch_from(trainer, pl_module, self._batches_not_shown)
            self._batches_not_shown = None


class _Known(NamedTuple):
    """A train loader that is being read."""

    dataset: StreamingDataset
    global_batch: int
    """Samples of one batch over all ranks."""


@dataclass(slots=True)
class _TrainedSoFar:
    """The position of training, in the trainer's counts and in the data."""

    epoch: int = 0
    """The trainer's current epoch."""
    batches: int = 0
    """Batches of it whose gradients are in the weights."""
    batches_in_epoch: int = 0
    """Batches that this epoch has for the trainer, on each rank."""
    cursors: dict[str, Cursor] = field(default_factory=dict)
    """For each loader, the end of what the weights have seen."""
    validation: SavedValidation = field(default_factory=SavedValidation)

    @classmethod
    def of(cls, run: SavedRun) -> _TrainedSoFar:
        """Return the place of a run that was saved after its first batch, without those of its loaders."""
        trainer = run.trainer
        assert trainer is not None, "there was a batch"
        return cls(
            epoch=trainer.epoch,
            batches=trainer.batches,
            batches_in_epoch=trainer.batches_in_epoch,
            validation=run.validation,
        )

    def begin(self, epoch: int) -> None:
        """Move to the beginning of an epoch."""
        self.epoch, self.batches, self.validation = epoch, 0, SavedValidation()

    @property
    def validation_matters(self) -> bool:
        """Whether a resumed run must know of validations: one is due, or one ran after batches that it trains again."""
        return self.validation.is_due or self.validation.done_after > self.batches

    @property
    def is_finished(self) -> bool:
        """Whether the weights have seen the whole epoch, though the trainer may not have closed it yet."""
        return 0 < self.batches_in_epoch <= self.batches


def _counted(trainer: Trainer, place: _TrainedSoFar, cursor: Cursor) -> TrainProgress:
    """Return the number of the next batch of a loader, as loggers count."""
    return TrainProgress(
        steps=lightning_internals.batches_trained(trainer, place.epoch, place.batches),
        place=cursor,
        steps_in_epoch=place.batches if cursor.sample_in_epoch else 0,
        limit=trainer.limit_train_batches,
    )


def _batches_done(
    trainer: Trainer, place: _TrainedSoFar, loaders: Mapping[str, StreamingDataLoader], ended: Collection[str] = ()
) -> int:
    """Return the completed batches of the trainer's epoch, in batches of this run.

    They are computed from the remaining batches of the loader that determines the end of the epoch, because ranks and
    batch size may have changed since the position was saved.

    Args:
        trainer: The trainer.
        place: The position of training.
        loaders: The streaming ones, by name.
        ended: Those at the end of their epoch, as the current data or ``skip`` leaves no batches of it.
    """
    decides = min if lightning_internals.combination_mode(trainer) == "min_size" else max
    name = decides(loaders, key=lambda name: position_of(loaders[name]).batches_of_epoch())
    loader, cursor = loaders[name], place.cursors[name]
    run = run_of(loader)
    left, whole = run.batches_left(cursor), position_of(loader).batches_of_epoch()
    limit = lightning_internals.batches_in_epoch(trainer)
    if limit > whole or limit == 0:  # another kind of loader decides
        return place.batches
    if name in ended and place.batches:
        return limit
    if limit == whole:
        return limit - left
    if isinstance(trainer.limit_train_batches, int):
        return max(place.batches, limit - left)
    global_batch = position_of(loader).samples_per_global_batch
    return limit - ceil(max(0, limit * global_batch - run.samples_before(cursor)) / global_batch)


def _report_resume(
    trainer: Trainer,
    cursors: Mapping[str, Cursor],
    loaders: Mapping[str, StreamingDataLoader],
    global_batches_then: Mapping[str, int],
) -> None:
    """Log a line for each loader, and another if its global batch size has changed."""
    for name, cursor in cursors.items():
        loader = loaders[name]
        run = run_of(loader)
        rank_zero_info(
            f"Resumed {name!r} at epoch {cursor.epoch}, {run.order.unit} {cursor.sample_in_epoch} "
            f"(step {trainer.global_step}, {trainer.ckpt_path})."
        )
        then, now = global_batches_then.get(name), position_of(loader).samples_per_global_batch
        if then is not None and then != now:
            rank_zero_info(
                f"The global batch of {name!r} was {then} {run.order.unit}s and is {now} now: "
                f"{run.batches_left(cursor)} batches are left of epoch {cursor.epoch}, "
                f"and a whole epoch has {len(loader)}."
            )


def _check_loaders(trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
    """Raise an error for train loaders without a known position, or with one that other loaders would change.

    Raises:
        ConfigError: A loader of torch's own reads a StreamingDataset; a CombinedLoader within other train loaders holds
            streaming ones; or two train loaders, or one and a validation loader, read the same dataset.
    """
    for name, loader in lightning_internals.named_loaders(trainer.train_dataloader):
        within = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
        if any(_reads_past_us(inner) for inner in within):
            raise ConfigError(
                f"the train loader {name or 'train'!r} is a torch DataLoader that reads a StreamingDataset: no "
                "checkpoint would hold its place in the data, and a resumed run would read samples again",
                hint="use StreamingDataLoader; what a dataset around it does, a transform or the loader's collate_fn "
                "can do",
            )
        if isinstance(loader, CombinedLoader) and any(isinstance(inner, StreamingDataLoader) for inner in within):
            raise ConfigError(
                f"the train loader {name!r} is a CombinedLoader within other train loaders, and the place of the "
                "streaming loaders in it is unknown",
                hint="pass one CombinedLoader of all loaders",
            )
    readers = [(f"train loader {name!r}", loader) for name, loader in loaders.items()]
    for name, loader in lightning_internals.named_loaders(trainer.val_dataloaders):
        if isinstance(loader, StreamingDataLoader):
            readers.append((f"validation loader {name or 'val'!r}", loader))
    first_readers: dict[int, str] = {}
    for reader, loader in readers:
        first = first_readers.setdefault(id(loader.dataset), reader)
        if first != reader and first.startswith("train"):
            raise ConfigError(
                f"the {first} and the {reader} read one dataset, so each would change the position of the other",
                hint="pass a separate StreamingDataset to each",
            )


def _reads_past_us(loader: object) -> bool:
    """Return whether a loader of another class iterates over a StreamingDataset; it may read single samples."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(loader, StreamingDataLoader) or not isinstance(dataset, IterableDataset):
        return False
    return any(isinstance(inner, StreamingDataset) for inner in datasets_within(dataset))


def _check_cut_is_read_once(trainer: Trainer, place: _TrainedSoFar, loaders: Mapping[str, StreamingDataLoader]) -> None:
    """Check that a run does not read a schedule again that was cut, before it trains an epoch.

    Raises:
        ConfigError: The trainer's limits lead to an epoch after the one under way.
    """
    # Reloaded loaders may have another schedule in the next epoch, and overfitting reads no next epoch.
    is_open = trainer.reload_dataloaders_every_n_epochs or lightning_internals.is_overfitting(trainer)  # type: ignore[attr-defined]
    if is_open or not lightning_internals.leads_to_another_epoch(trainer, place.epoch, place.batches):
        return
    for name, loader in loaders.items():
        mixture = run_of(loader).order.mixture
        if mixture is not None and mixture.is_cut:
            raise mixture.read_again_error(1).with_context(f"train loader {name!r}")


def _count_again(
    name: str,
    callback: weakref.ref[StreamingStateCallback],
    trainer: weakref.ref[Trainer],
    loader: weakref.ref[StreamingDataLoader],
) -> None:
    """Let the trainer of a loader whose weights have changed count its batches again, if it is still there."""
    ours, its, watched = callback(), trainer(), loader()
    if ours is not None and its is not None and watched is not None:
        ours._count_rest_of_epoch(its, name, watched)


def _check_for_batches(trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
    """In ``on_fit_end``: raise an error if there were no batches, which Lightning treats as a completed run.

    Raises:
        ConfigError: An epoch of a train loader has fewer samples than a batch, and ``drop_last`` is set.
    """
    if lightning_internals.batches_in_epoch(trainer) or not trainer.limit_train_batches:
        return
    for name, loader in loaders.items():
        error = no_batch_error(loader)
        if error is not None:
            raise error.with_context(f"train loader {name!r}")
