"""Moves of saved positions with the trainer's counts, samples read of each stream, and phases as lines of YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError
from lightning_streaming.resume.saved_fingerprint import SavedPhase
from lightning_streaming.resume.state import MOST_EPOCHS, Cursor, SavedPosition, SavedTrainer
from lightning_streaming.saved_fields import LARGEST
from lightning_streaming.sequence.skips import skipped_in_epoch
from lightning_streaming.tools.runs.checkpoints import Places, SavedLoader, settled

_WEIGHT = r"(?:\d[\d.]*(?:e[+-]?\d+)?)"
_SHARE = re.compile(rf"(?P<name>.*?) (?P<begin>{_WEIGHT})(?: to (?P<end>{_WEIGHT}))?(?:, |$)", re.DOTALL)
_SUMMARY = re.compile(r"of \d+ streams, ")
_STEPS = 16
"""Default steps of a ramp."""


def placed(loader: SavedLoader, cursor: Cursor) -> Cursor:
    """Return a requested position, with the end of an epoch written as the beginning of the next.

    Only the end of the first epoch of a run with phases stays as it is: more phases may follow in that epoch.

    Raises:
        ConfigError: No run has so many epochs, or the epoch is known to have fewer samples.
    """
    size = loader.epoch_size
    if cursor.epoch >= MOST_EPOCHS:
        raise ConfigError(
            f"a saved position has an epoch below {MOST_EPOCHS}, so there is no epoch {cursor.epoch}", option="--epoch"
        )
    if cursor.sample_in_epoch > LARGEST:
        raise ConfigError(
            f"a saved position has {LARGEST} {loader.unit}s at most, so there is no {cursor.sample_in_epoch}",
            option="--sample",
        )
    if size is not None and cursor.sample_in_epoch > size:
        raise ConfigError(
            f"an epoch has {size} samples, so there is no sample {cursor.sample_in_epoch}", option="--sample"
        )
    if size is None or cursor.sample_in_epoch != size or _is_end_of_phases(loader, cursor):
        return cursor
    return cursor.passes_later(1)


def _is_end_of_phases(loader: SavedLoader, cursor: Cursor) -> bool:
    """Return whether all phases of the first epoch were read there, and others can follow."""
    fingerprint = loader.position.fingerprint
    has_phases = fingerprint is not None and fingerprint.schedule is not None
    return has_phases and not loader.is_packed and cursor == Cursor(0, loader.epoch_size or 0)


def imported(position: SavedPosition, before: Places | None, name: str) -> SavedPosition:
    """Return a position from elsewhere for a loader, with the end of an epoch written as the beginning of the next.

    It may count what the reference reads twice: up to one sample for each canonical node, and a batch.

    Args:
        position: The position.
        before: Positions of the checkpoint, if any, which have the size of an epoch.
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
    """Return the position ``samples`` later, over all ranks, or as many packs; also in a later epoch of known size.

    Samples that the run skips anyway are not counted. A position beyond an epoch of packs is an error when the run
    resumes.

    Raises:
        ConfigError: It is in a later epoch, and epochs of composed batches leave out what fills no batch.
    """
    cursor, size = loader.position.cursor, loader.epoch_size
    skipped, entries = loader.skipped(cursor.epoch), loader.samples_read(cursor) + samples
    if size is None or entries < skipped.kept_before(size):
        return Cursor(cursor.epoch, skipped.position_after(entries))
    fingerprint = loader.position.fingerprint
    if fingerprint is not None and fingerprint.order.batching_method != "random":
        raise ConfigError(
            f"{samples} samples later is beyond the end of epoch {cursor.epoch}, and with "
            f"batching_method={fingerprint.order.batching_method!r} that is a little before {size}",
            hint="use --batches, or state set",
            option="--samples",
        )
    last_skipped_epoch = max((stop[0] for _, stop in loader.position.skipped.values()), default=0)
    epoch = cursor.epoch
    while epoch <= last_skipped_epoch and entries >= (kept := loader.skipped(epoch).kept_before(size)):
        entries -= kept
        epoch += 1
    if epoch <= last_skipped_epoch:
        return Cursor(epoch, loader.skipped(epoch).position_after(entries))
    return Cursor(epoch + entries // size, entries % size)


def batches_later(places: Places, names: tuple[str, ...], batches: int) -> dict[str, Cursor]:
    """Return the positions of some loaders ``batches`` global batches later.

    Raises:
        ConfigError: The number of samples in a global batch is not known; or several loaders would come to the end of
            an epoch, whose sizes differ.
    """
    if len(names) == 1:
        return {names[0]: _only_loader_later(places.loaders[names[0]], places.trainer, batches)}
    later = {name: samples_later(places.loaders[name], batches * _global_batch(places.loaders[name])) for name in names}
    ended = [name for name in names if later[name].epoch != places.loaders[name].position.cursor.epoch]
    trainer = places.trainer and settled(places.trainer)
    if ended or (trainer and 0 < trainer.batches_in_epoch <= trainer.batches + batches):
        raise ConfigError(
            f"{batches} batches later is beyond the end of an epoch, which differs among {len(names)} loaders",
            hint="set each with state set --loader",
            option="--batches",
        )
    return later


def _only_loader_later(loader: SavedLoader, trainer: SavedTrainer | None, batches: int) -> Cursor:
    """Return the position of the only loader ``batches`` global batches later."""
    cursor, size = loader.position.cursor, _global_batch(loader)
    trainer, read = trainer and settled(trainer), loader.samples_read(cursor)
    in_epoch: float
    if trainer and trainer.batches_in_epoch:
        done, in_epoch = trainer.batches, trainer.batches_in_epoch
    elif loader.epoch_size:  # the last batch is as large as the others, some of it read twice
        kept = loader.skipped(cursor.epoch).kept_before(loader.epoch_size)
        in_epoch = -(-kept // size)
        done = in_epoch + (read - kept) // size
    else:
        done, in_epoch = 0, math.inf
    if done + batches < in_epoch:
        return Cursor(cursor.epoch, loader.skipped(cursor.epoch).position_after(read + batches * size))
    if loader.is_packed:
        raise ConfigError(
            f"{batches} batches later is beyond the end of epoch {cursor.epoch}, and the state does not contain how "
            "many packs later epochs have",
            hint="use state set",
            option="--batches",
        )
    if any(stop > (cursor.epoch, 0) for _, stop in loader.position.skipped.values()):
        raise ConfigError(
            f"{batches} batches later is beyond the end of epoch {cursor.epoch}, and the run skips others "
            f"({', '.join(loader.position.skipped)}), so epochs have different numbers of batches",
            hint="use --samples, or state set",
            option="--batches",
        )
    epochs, into = divmod(done + batches, int(in_epoch))
    return Cursor(cursor.epoch + epochs, into * size)


def _global_batch(loader: SavedLoader) -> int:
    if loader.global_batch is None:
        raise ConfigError(
            f"the number of {loader.unit}s in a global batch of the run (ranks x batch size) is not saved there",
            hint="pass --samples, the batches times that",
            option="--batches",
        )
    return loader.global_batch


def trainer_at(places: Places, moved: Mapping[str, Cursor]) -> SavedTrainer | None:
    """Return the position of the trainer once some loaders are moved; None if the file is of no trainer.

    Epochs move as the loader's do. Unless all loaders are moved, the trainer stays.

    Raises:
        ConfigError: The trainer reads fewer batches of an epoch.
    """
    if places.trainer is None:
        return None
    trainer = settled(places.trainer)
    name = next(iter(moved))
    if len(moved) < len(places.loaders):
        return trainer
    loader, cursor = places.loaders[name], moved[name]
    # If it is not known, the callback computes it on resume.
    batches = 0 if loader.global_batch is None else loader.samples_read(cursor) // loader.global_batch
    if _is_end_of_phases(loader, cursor):
        trainer = replace(trainer, batches_in_epoch=0)  # more phases make it longer
    if len(moved) == 1 and 0 < trainer.batches_in_epoch <= batches:
        raise ConfigError(
            f"the trainer reads {trainer.batches_in_epoch} batches of {loader.global_batch} {loader.unit}s in an "
            f"epoch, so it does not come to {loader.unit} {cursor.sample_in_epoch}",
            hint=f"move to the next epoch with --epoch {cursor.epoch + 1}",
            option="--sample",
        )
    return replace(trainer, epoch=max(0, trainer.epoch + cursor.epoch - loader.position.cursor.epoch), batches=batches)


# Samples read of each stream


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSeen:
    """Samples read of one stream, if every epoch was read with the settings in the state."""

    name: str
    samples: int
    drawn: int
    """Samples of it in each epoch; of a run with phases, from an epoch's beginning to the end of those in the state."""
    before: int | None
    """Samples of it in the epochs that are finished; None if the run has skipped some, and maybe of other streams."""
    this_epoch: int | None
    """Samples of it in this epoch; None if it takes the data to count them."""

    @property
    def total(self) -> int | None:
        """Samples of it in all epochs."""
        return None if self.this_epoch is None or self.before is None else self.before + self.this_epoch


def seen_by_fingerprint(position: SavedPosition) -> list[StreamSeen]:
    """Return what the state alone says about each stream; empty if it does not list its streams."""
    fingerprint = position.fingerprint
    if fingerprint is None:
        return []
    (epoch, sample), order, schedule = position.cursor, fingerprint.order, fingerprint.schedule
    skipped, is_packed = position.skipped.values(), fingerprint.packing is not None
    nothing = 0 if sample == 0 else None
    has_skipped = any(start < stop and start[0] < epoch for start, stop in skipped)
    skips_here = any(start < stop and start[0] <= epoch <= stop[0] for start, stop in skipped)
    alone = None
    if len(fingerprint.streams) == 1 and not is_packed:
        alone = skipped_in_epoch(skipped, epoch).kept_before(sample)
    listed_to = max((phase.stop for phase in (schedule or {}).values()), default=0)
    seen = []
    for name, stream in fingerprint.streams.items():
        drawn = stream.samples_drawn
        before, now = None if has_skipped else epoch * drawn, 0 if sample == 0 else alone
        if schedule is not None and order.batching_method != "random":  # some of what is drawn is left out
            before, now = None if epoch else 0, nothing
        elif schedule is not None:
            if epoch and listed_to != order.epoch_size:  # it was moved to an epoch whose phases are not all listed
                before = None
            if is_packed or drawn != listed_to or sample > listed_to:
                now = drawn if sample == listed_to and not skips_here and not is_packed else nothing
            # Else no other stream was read.
        seen.append(StreamSeen(name=name, samples=stream.samples, drawn=drawn, before=before, this_epoch=now))
    return seen


# Phases as lines of YAML


def phase_line(name: str, phase: SavedPhase, streams: Collection[str], ended_at: int | None = None) -> str:
    """Return a phase as a line of YAML; its mix is left open if the state does not contain it.

    Args:
        name: Name of the phase.
        phase: The phase in the state.
        streams: Names of the streams that the state lists.
        ended_at: Sample at which it ends early, if it does.
    """
    mix = read_mix(phase.mix, streams)
    ended_at = ended_at if phase.ended_at is None else phase.ended_at
    ramps = mix is None or any(isinstance(weight, list) for weight in mix.values())
    fields = {
        "end": phase.end,
        **({} if ended_at is None else {"ended_at": ended_at}),
        **({"steps": phase.steps} if ramps and phase.steps not in (1, _STEPS) else {}),
        "mix": {} if mix is None else mix,
    }
    flow = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": math.inf}
    key = yaml.safe_dump({name: None}, **flow).strip().removeprefix("{").removesuffix(": null}")
    line = f"{key}: {yaml.safe_dump(fields, **flow).strip()}"
    return line if mix is not None else f"{line.removesuffix('mix: {}}')}mix: ...}}  # as it was: of too many streams"


def read_mix(text: str, streams: Collection[str]) -> dict[str, float | list[float]] | None:
    """Parse the weights of a phase in a state, by stream; return None if it contains only a summary.

    >>> read_mix("code 0.1, web 0.9 to 0.5", ["web", "code"])
    {'code': 0.1, 'web': [0.9, 0.5]}
    """
    mix: dict[str, float | list[float]] = {}
    start = 0
    if _SUMMARY.match(text) or any("," in name for name in streams):  # such a name looks like two
        return None
    while start < len(text):
        share = _SHARE.match(text, start)
        if share is None:
            return None
        weights = [float(weight) for weight in (share["begin"], share["end"]) if weight is not None]
        # Whole numbers without a decimal point, as they are mostly written.
        weights = [int(weight) if weight.is_integer() and weight < 1e15 else weight for weight in weights]
        mix[share["name"]] = weights[0] if len(weights) == 1 else weights
        start = share.end()
    return mix
