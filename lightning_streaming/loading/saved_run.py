"""What the callback saves of a run, read and found sound as a whole: the trainer's place, and that of each loader.

    {"version": 1,
     "trainer": {"epoch": 3, "batches": 100, "batches_in_epoch": 400},
     "loaders": {"train": {...}},
     "samples_per_global_batch": {"train": 512}}

Before the first batch "trainer" is None and "loaders" is empty. Each loader's state is that of
:mod:`~lightning_streaming.loading.state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_streaming.errors import StateError
from lightning_streaming.loading.state import SavedPosition, read_state
from lightning_streaming.loading.state_fields import MOST_EPOCHS, Fields, shown

CALLBACK_KEY = "lightning_streaming.StreamingStateCallback"
"""Under which key of "callbacks" a Lightning checkpoint holds the state of a run."""
RUN_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTrainer:
    """How far the trainer had come."""

    epoch: int
    batches: int
    """Batches of this epoch that are in the weights."""
    batches_in_epoch: int
    """0 if that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """The state of a run that has been read and found sound."""

    trainer: SavedTrainer | None
    """None before the first batch."""
    loaders: Mapping[str, SavedPosition]
    """The place of each train loader, by name."""
    samples_per_global_batch: Mapping[str, int]
    """Of some of the loaders: samples of one batch over all ranks."""


def read_run(state: object) -> SavedRun:
    """Read all of what the callback has saved.

    Raises:
        StateError: It is no such state, was written by a version that is not known here, or one of its values cannot
            be; the message names the field.
    """
    fields = Fields(state, "the checkpoint's streaming state")
    version = fields.get("version")
    if type(version) is not int or version != RUN_VERSION:
        raise StateError(
            f"the checkpoint's streaming state has version {shown(version)} and this release reads {RUN_VERSION}; "
            "resume with the release that wrote it, or a newer one"
        )
    loaders = fields.fields("loaders")
    positions = {name: read_state(loaders.get(name), f"the saved position of {name!r}") for name in loaders}
    batches = Fields({}, "nothing")
    if "samples_per_global_batch" in fields:
        batches = fields.fields("samples_per_global_batch")
    run = SavedRun(
        trainer=None if fields.is_none("trainer") else _read_trainer(fields.fields("trainer")),
        loaders=positions,
        samples_per_global_batch={name: batches.whole_number(name, least=1) for name in batches},
    )
    if run.trainer is None and positions:
        raise fields.contradicts(f"'trainer' is None, as before the first batch, but there are {sorted(positions)}")
    if run.trainer is not None and not positions:
        raise fields.contradicts("'trainer' has a place, and 'loaders' none")
    return run


def _read_trainer(fields: Fields) -> SavedTrainer:
    trainer = SavedTrainer(
        epoch=fields.whole_number("epoch", most=MOST_EPOCHS),
        batches=fields.whole_number("batches"),
        batches_in_epoch=fields.whole_number("batches_in_epoch"),
    )
    if 0 < trainer.batches_in_epoch < trainer.batches:
        raise fields.contradicts(f"'batches' is {trainer.batches} of an epoch of {trainer.batches_in_epoch}")
    return trainer
