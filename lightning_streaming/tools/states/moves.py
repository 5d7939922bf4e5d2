"""From one place to another: arithmetic on cursors, and what it makes of a trainer's epoch and batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.state import SavedPosition
from lightning_streaming.loading.state_fields import LARGEST, MOST_EPOCHS
from lightning_streaming.tools.states.places import Places, SavedLoader, TrainerPlace


def placed(loader: SavedLoader, cursor: Cursor) -> Cursor:
    """A place that was asked for; the end of an epoch is the beginning of the next.

    Raises:
        ConfigError: No run has so many epochs, or the epoch is known to have fewer samples.
    """
    size = loader.epoch_size
    if cursor.epoch >= MOST_EPOCHS:
        raise ConfigError(f"a saved position has an epoch below {MOST_EPOCHS}, so there is no epoch {cursor.epoch}")
    if cursor.sample_in_epoch > LARGEST:
        raise ConfigError(f"a saved position has {LARGEST} samples at most, so there is no {cursor.sample_in_epoch}")
    if size is not None and cursor.sample_in_epoch > size:
        raise ConfigError(f"an epoch has {size} samples, so there is no sample {cursor.sample_in_epoch}")
    return cursor.passes_later(1) if cursor.sample_in_epoch == size else cursor


def imported(position: SavedPosition, before: Places | None, name: str) -> SavedPosition:
    """A place from elsewhere that is to be a loader's; the end of an epoch is the beginning of the next.

    It may count what the reference reads twice: up to one sample for each canonical node, and a batch.

    Args:
        position: The place.
        before: Those that the checkpoint holds, if any: they tell the size of an epoch.
        name: The loader.

    Raises:
        ConfigError: The epoch is known to have fewer samples, or the trainer to read fewer batches of it.
    """
    loader = None if before is None else before.loaders.get(name)
    size = None if loader is None else loader.epoch_size
    if before is None or loader is None or size is None:
        return position
    epoch, sample = position.cursor
    whole = -(-size // position.num_canonical_nodes) * position.num_canonical_nodes
    if sample > whole + (loader.global_batch or 0):
        raise ConfigError(
            f"an epoch of {name!r} has {size} samples in the checkpoint, or {whole} with those read twice, and the "
            f"state to import is at sample {sample} of epoch {epoch}: it is of other data, or another epoch size"
        )
    position = replace(position, cursor=Cursor(epoch, sample) if sample < whole else Cursor(epoch + 1, 0))
    trainer_at(before, {name: position.cursor})
    return position


def samples_later(loader: SavedLoader, samples: int) -> Cursor:
    """The place ``samples`` later, over all ranks; in a later epoch, if the size of an epoch is known.

    What the run skips anyway is not counted.

    Raises:
        ConfigError: It is in a later epoch, and epochs of composed batches leave out what fills no batch.
    """
    cursor, size = loader.position.cursor, loader.epoch_size
    gaps, entries = loader.gaps(cursor.epoch), loader.samples_read(cursor) + samples
    if size is None or entries < gaps.kept_before(size):
        return Cursor(cursor.epoch, gaps.position_after(entries))
    if _order(loader).get("batching_method", "random") != "random":
        raise ConfigError(
            f"{samples} samples later is beyond the end of epoch {cursor.epoch}, and with batching_method="
            f"{_order(loader)['batching_method']!r} that lies a little before {size}; use --batches, or state set"
        )
    last_gap = max((stop[0] for _, stop in loader.position.skipped.values()), default=0)
    epoch = cursor.epoch
    while epoch <= last_gap and entries >= (kept := loader.gaps(epoch).kept_before(size)):
        entries -= kept
        epoch += 1
    epochs, sample = divmod(entries, size) if epoch > last_gap else (0, loader.gaps(epoch).position_after(entries))
    return Cursor(epoch + epochs, sample)


def batches_later(places: Places, names: tuple[str, ...], batches: int) -> dict[str, Cursor]:
    """The places of these loaders ``batches`` global batches later.

    Raises:
        ConfigError: How many samples a global batch has is not known; or several loaders would come to the end of an
            epoch, which each of them has elsewhere.
    """
    if len(names) == 1:
        return {names[0]: _one_later(places.loaders[names[0]], places.trainer, batches)}
    later = {name: samples_later(places.loaders[name], batches * _global_batch(name, places)) for name in names}
    ended = [name for name in names if later[name].epoch != places.loaders[name].position.cursor.epoch]
    trainer = places.trainer and places.trainer.settled
    if ended or (trainer and 0 < trainer.batches_in_epoch <= trainer.batches + batches):
        raise ConfigError(
            f"{batches} batches later is beyond the end of an epoch, which each of {len(names)} loaders has elsewhere; "
            "set each with state set --loader"
        )
    return later


def trainer_at(places: Places, moved: Mapping[str, Cursor]) -> TrainerPlace | None:
    """Where the trainer stands once these loaders stand there; None if the file is of no trainer.

    Epochs move as the loader's do. Of several loaders, unless all are moved, none says where the trainer is.

    Raises:
        ConfigError: The trainer reads fewer batches of an epoch.
    """
    if places.trainer is None:
        return None
    trainer = places.trainer.settled
    name = next(iter(moved))
    if len(moved) < len(places.loaders):
        return trainer
    loader, cursor = places.loaders[name], moved[name]
    # Where it is not known, the callback works it out on resume.
    batches = 0 if loader.global_batch is None else loader.samples_read(cursor) // loader.global_batch
    if len(moved) == 1 and 0 < trainer.batches_in_epoch <= batches:
        raise ConfigError(
            f"the trainer reads {trainer.batches_in_epoch} batches of {loader.global_batch} samples in an epoch, so it "
            f"does not come to sample {cursor.sample_in_epoch}; go to the next epoch with --epoch {cursor.epoch + 1}"
        )
    return TrainerPlace(
        epoch=max(0, trainer.epoch + cursor.epoch - loader.position.cursor.epoch),
        batches=batches,
        batches_in_epoch=trainer.batches_in_epoch,
        global_step=trainer.global_step,
    )


def _one_later(loader: SavedLoader, trainer: TrainerPlace | None, batches: int) -> Cursor:
    cursor, size = loader.position.cursor, loader.global_batch
    if size is None:
        raise ConfigError(_NO_BATCH)
    place = trainer and trainer.settled
    if place and place.batches_in_epoch:
        done, in_epoch = place.batches, place.batches_in_epoch
    elif loader.epoch_size:  # the last batch is as large as the others, some of it read twice
        kept = loader.gaps(cursor.epoch).kept_before(loader.epoch_size)
        in_epoch = -(-kept // size)
        done = in_epoch + (loader.samples_read(cursor) - kept) // size
    else:
        return _in_epoch(loader, batches * size)
    if done + batches < in_epoch:
        return _in_epoch(loader, batches * size)
    if any(stop > (cursor.epoch, 0) for _, stop in loader.position.skipped.values()):
        raise ConfigError(
            f"{batches} batches later is beyond the end of epoch {cursor.epoch}, and the run skips others "
            f"({', '.join(loader.position.skipped)}), so epochs have not as many; use --samples, or state set"
        )
    epochs, into = divmod(done + batches, in_epoch)
    return Cursor(cursor.epoch + epochs, into * size)


def _in_epoch(loader: SavedLoader, samples: int) -> Cursor:
    """The place so many samples later, in the same epoch."""
    cursor = loader.position.cursor
    entries = loader.samples_read(cursor) + samples
    return Cursor(cursor.epoch, loader.gaps(cursor.epoch).position_after(entries))


_NO_BATCH = (
    "how many samples a global batch of the run has (ranks x batch size) is not saved there; "
    "say --samples, the batches times that"
)


def _global_batch(name: str, places: Places) -> int:
    size = places.loaders[name].global_batch
    if size is None:
        raise ConfigError(_NO_BATCH)
    return size


def _order(loader: SavedLoader) -> Mapping[str, str]:
    order: Mapping[str, str] = (loader.position.fingerprint or {}).get("order", {})
    return order
