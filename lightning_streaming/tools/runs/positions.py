"""Moves of saved positions with the trainer's counts, samples read of each stream, and phases as lines of YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError
from lightning_streaming.resume.saved_fingerprint import SavedFingerprint, SavedPhase
from lightning_streaming.resume.state import MOST_EPOCHS, Cursor, SavedPosition, SavedTrainer
from lightning_streaming.saved_fields import LARGEST
from lightning_streaming.sequence.skips import skipped_in_epoch
from lightning_streaming.tools.runs.checkpoints import Places, SavedLoader, settled


def placed(loader: SavedLoader, cursor: Cursor) -> Cursor:
    """A place that was asked for; the end of an epoch is the beginning of the next.

    Only where a run with phases is asked to stand at the end of its first epoch it stands there: phases that are
    written after those that it has read go on in it.

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
    """Whether all phases of the first epoch were read there, and others can follow."""
    fingerprint = loader.position.fingerprint
    has_phases = fingerprint is not None and fingerprint.schedule is not None
    return has_phases and not loader.is_packed and cursor == Cursor(0, loader.epoch_size or 0)


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
    """The place ``samples`` later, over all ranks, or of packed documents so many packs; in a later epoch, if the size
    of an epoch is known.

    What the run skips anyway is not counted. A place that lies beyond an epoch of packs is refused when it is read.

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
            f"batching_method={fingerprint.order.batching_method!r} that lies a little before {size}",
            hint="use --batches, or state set",
            option="--samples",
        )
    last_skipped_epoch = max((stop[0] for _, stop in loader.position.skipped.values()), default=0)
    epoch = cursor.epoch
    while epoch <= last_skipped_epoch and entries >= (kept := loader.skipped(epoch).kept_before(size)):
        entries -= kept
        epoch += 1
    epochs, sample = (
        divmod(entries, size) if epoch > last_skipped_epoch else (0, loader.skipped(epoch).position_after(entries))
    )
    return Cursor(epoch + epochs, sample)


def batches_later(places: Places, names: tuple[str, ...], batches: int) -> dict[str, Cursor]:
    """The places of these loaders ``batches`` global batches later.

    Raises:
        ConfigError: How many samples a global batch has is not known; or several loaders would come to the end of an
            epoch, which each of them has elsewhere.
    """
    if len(names) == 1:
        return {names[0]: _one_later(places.loaders[names[0]], places.trainer, batches)}
    later = {name: samples_later(places.loaders[name], batches * _global_batch(places.loaders[name])) for name in names}
    ended = [name for name in names if later[name].epoch != places.loaders[name].position.cursor.epoch]
    trainer = places.trainer and settled(places.trainer)
    if ended or (trainer and 0 < trainer.batches_in_epoch <= trainer.batches + batches):
        raise ConfigError(
            f"{batches} batches later is beyond the end of an epoch, which each of {len(names)} loaders has elsewhere",
            hint="set each with state set --loader",
            option="--batches",
        )
    return later


def trainer_at(places: Places, moved: Mapping[str, Cursor]) -> SavedTrainer | None:
    """Where the trainer stands once these loaders stand there; None if the file is of no trainer.

    Epochs move as the loader's do. Of several loaders, unless all are moved, none says where the trainer is.

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
    # Where it is not known, the callback works it out on resume.
    batches = 0 if loader.global_batch is None else loader.samples_read(cursor) // loader.global_batch
    if _is_end_of_phases(loader, cursor):
        trainer = replace(trainer, batches_in_epoch=0)  # other phases make it longer
    if len(moved) == 1 and 0 < trainer.batches_in_epoch <= batches:
        raise ConfigError(
            f"the trainer reads {trainer.batches_in_epoch} batches of {loader.global_batch} {loader.unit}s in an "
            f"epoch, so it does not come to {loader.unit} {cursor.sample_in_epoch}",
            hint=f"go to the next epoch with --epoch {cursor.epoch + 1}",
            option="--sample",
        )
    return replace(trainer, epoch=max(0, trainer.epoch + cursor.epoch - loader.position.cursor.epoch), batches=batches)


def _one_later(loader: SavedLoader, trainer: SavedTrainer | None, batches: int) -> Cursor:
    cursor, size = loader.position.cursor, _global_batch(loader)
    place = trainer and settled(trainer)
    if loader.is_packed and place and place.batches + batches >= place.batches_in_epoch > 0:
        raise ConfigError(
            f"{batches} batches later is beyond the end of epoch {cursor.epoch}, and epochs differ in their packs, of "
            "which the state tells nothing",
            hint="use state set",
            option="--batches",
        )
    if place and place.batches_in_epoch:
        done, in_epoch = place.batches, place.batches_in_epoch
    elif loader.epoch_size:  # the last batch is as large as the others, some of it read twice
        kept = loader.skipped(cursor.epoch).kept_before(loader.epoch_size)
        in_epoch = -(-kept // size)
        done = in_epoch + (loader.samples_read(cursor) - kept) // size
    else:
        return _in_epoch(loader, batches * size)
    if done + batches < in_epoch:
        return _in_epoch(loader, batches * size)
    if any(stop > (cursor.epoch, 0) for _, stop in loader.position.skipped.values()):
        raise ConfigError(
            f"{batches} batches later is beyond the end of epoch {cursor.epoch}, and the run skips others "
            f"({', '.join(loader.position.skipped)}), so epochs have not as many",
            hint="use --samples, or state set",
            option="--batches",
        )
    epochs, into = divmod(done + batches, in_epoch)
    return Cursor(cursor.epoch + epochs, into * size)


def _in_epoch(loader: SavedLoader, samples: int) -> Cursor:
    """The place so many samples later, in the same epoch."""
    cursor = loader.position.cursor
    entries = loader.samples_read(cursor) + samples
    return Cursor(cursor.epoch, loader.skipped(cursor.epoch).position_after(entries))


def _global_batch(loader: SavedLoader) -> int:
    if loader.global_batch is None:
        raise ConfigError(
            f"how many {loader.unit}s a global batch of the run has (ranks x batch size) is not saved there",
            hint="say --samples, the batches times that",
            option="--batches",
        )
    return loader.global_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSeen:
    """What was read of one stream, if every epoch was read with the settings that the state tells."""

    name: str
    samples: int
    drawn: int
    """Samples of it in each epoch; of a run with phases, from an epoch's beginning to the end of those that the state
    tells."""
    before: int | None
    """Samples of it in the epochs that are finished; None where the run has skipped some, and maybe of others."""
    this_epoch: int | None
    """Samples of it in this epoch; None where only the data could tell."""

    @property
    def total(self) -> int | None:
        """In all epochs."""
        return None if self.this_epoch is None or self.before is None else self.before + self.this_epoch


def seen_by_fingerprint(position: SavedPosition) -> list[StreamSeen]:
    """What the state alone tells. Empty if it does not list its streams: it has none, or is too long for that."""
    fingerprint = position.fingerprint
    if fingerprint is None:
        return []
    epoch, sample = position.cursor
    skipped, streams = position.skipped.values(), fingerprint.streams
    counts_samples = fingerprint.packing is None
    alone = skipped_in_epoch(skipped, epoch).kept_before(sample) if len(streams) == 1 and counts_samples else None
    has_skipped = any(start < stop and start[0] < epoch for start, stop in skipped)
    seen = [
        StreamSeen(
            name=name,
            samples=stream.samples,
            drawn=stream.samples_drawn,
            before=None if has_skipped else epoch * stream.samples_drawn,
            this_epoch=0 if sample == 0 else alone,
        )
        for name, stream in streams.items()
    ]
    if fingerprint.schedule is None:
        return seen
    return [_in_phases(one, position, fingerprint, fingerprint.schedule) for one in seen]


def _in_phases(
    one: StreamSeen, position: SavedPosition, fingerprint: SavedFingerprint, schedule: Mapping[str, SavedPhase]
) -> StreamSeen:
    """What the state of a run with phases alone tells of a stream.

    Args:
        one: What it would tell if there were no phases.
        position: The state.
        fingerprint: Its fingerprint.
        schedule: The phases of that.
    """
    order, (epoch, sample) = fingerprint.order, position.cursor
    nothing = 0 if sample == 0 else None
    if order.batching_method != "random":  # some of what is drawn is left out
        return replace(one, before=None if epoch else 0, this_epoch=nothing)
    told_to = max((phase.stop for phase in schedule.values()), default=0)
    # The place may have been moved to an epoch of which the state does not tell all phases.
    before = one.before if epoch == 0 or told_to == order.epoch_size else None
    if fingerprint.packing is not None:
        return replace(one, before=before, this_epoch=nothing)
    if one.drawn == told_to >= sample:
        return replace(one, before=before)  # no other stream was read
    skips_here = any(start < stop and start[0] <= epoch <= stop[0] for start, stop in position.skipped.values())
    return replace(one, before=before, this_epoch=one.drawn if sample == told_to and not skips_here else nothing)


_WEIGHT = r"(?:\d[\d.]*(?:e[+-]?\d+)?)"
_SHARE = re.compile(rf"(?P<name>.*?) (?P<begin>{_WEIGHT})(?: to (?P<end>{_WEIGHT}))?(?:, |$)", re.DOTALL)
_IN_SHORT = re.compile(r"of \d+ streams, ")
_STEPS = 16
"""Steps of a ramp that says nothing of them."""


def phase_line(name: str, told: SavedPhase, streams: Collection[str], ended_at: int | None = None) -> str:
    """Return a phase as a line of YAML, by name; its mix is left open if the state does not have it.

    Args:
        name: What it is called.
        told: What the state says of it.
        streams: Names of the streams that the state lists.
        ended_at: Where it is to be ended, if it is.
    """
    mix = read_mix(told.mix, streams)
    ended_at = ended_at if told.ended_at is None else told.ended_at
    ramps = mix is None or any(isinstance(weight, list) for weight in mix.values())
    phase = {
        "end": told.end,
        **({} if ended_at is None else {"ended_at": ended_at}),
        **({"steps": told.steps} if ramps and told.steps not in (1, _STEPS) else {}),
        "mix": {} if mix is None else mix,
    }
    flow = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": math.inf}
    key = yaml.safe_dump({name: None}, **flow).strip().removeprefix("{").removesuffix(": null}")
    line = f"{key}: {yaml.safe_dump(phase, **flow).strip()}"
    return line if mix is not None else f"{line.removesuffix('mix: {}}')}mix: ...}}  # as it was: of too many streams"


def read_mix(told: str, streams: Collection[str]) -> dict[str, float | list[float]] | None:
    """The weights of a phase as a state tells them, by name of stream; None where it tells them in short.

    >>> read_mix("code 0.1, web 0.9 to 0.5", ["web", "code"])
    {'code': 0.1, 'web': [0.9, 0.5]}
    """
    mix: dict[str, float | list[float]] = {}
    place = 0
    if _IN_SHORT.match(told) or any("," in name for name in streams):  # such a name cannot be told from two
        return None
    while place < len(told):
        share = _SHARE.match(told, place)
        if share is None:
            return None
        begin = _weight(share["begin"])
        mix[share["name"]] = begin if share["end"] is None else [begin, _weight(share["end"])]
        place = share.end()
    return mix


def _weight(text: str) -> float:
    """A weight; whole ones as they are written mostly."""
    weight = float(text)
    return int(weight) if weight.is_integer() and weight < 1e15 else weight
