"""The saved position: a small dict of plain values, the same on every rank; read from untrusted input as a whole.

    {"version": 2, "library_version": "0.1.0", "epoch": 3, "sample_in_epoch": 51200, "shuffle_seed": 9176,
     "num_canonical_nodes": 2, "initial_physical_nodes": 2, "fingerprint": {...}, "stream_list": {...}}

The callback saves the trainer's own numbers around the states of all train loaders. Before the first batch "trainer" is
None and "loaders" is empty:

    {"version": 2, "library_version": "0.1.0",
     "trainer": {"epoch": 3, "batches": 100, "batches_in_epoch": 400},
     "loaders": {"train": {...}},
     "samples_per_global_batch": {"train": 512}}

docs/internals/state.md describes every key. Each class here reads itself from such a dict and writes it, with keys that
do not depend on names of attributes. All of it loads with ``torch.load(..., weights_only=True)``.

States of earlier versions, and of MosaicML Streaming, are first brought under the keys of the current version by
:func:`upgraded`, the only function that knows the earlier keys. It passes values on unchanged, also invalid ones, which
the parser of the current version reports. Version 1 describes streams with "place", "samples drawn" and "joins", many
of them by one entry "all 12 streams"; it has "phases" with "until" and "cut", and "pack" within "order". MosaicML
Streaming writes no version and four or five keys; it calls the time before the first epoch "epoch -1".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning_streaming
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.escaping import short_repr
from lightning_streaming.resume.appended_data import NO_GROWTH, Growth
from lightning_streaming.resume.mismatch import StreamList
from lightning_streaming.resume.saved_fields import DAMAGED, Fields
from lightning_streaming.resume.saved_fingerprint import SavedFingerprint
from lightning_streaming.sequence.packing.settings import named_facts
from lightning_streaming.sequence.partition import LARGEST_BATCH, BatchGeometry
from lightning_streaming.sequence.settings import LARGEST_SEED, MOST_CANONICAL_NODES
from lightning_streaming.sequence.skips import NOTHING_SKIPPED, SkippedPositions, SkippedRange, parse_batch_ranges
from lightning_streaming.world import World

STATE_VERSION = 2
"""The version that this release writes."""
MOST_EPOCHS = 2**31 - 1
"""Far more epochs than a run can have: a larger number was not written by a run."""
_MOST_NODES = 2**20
"""Far more nodes than there are machines in one place."""
CALLBACK_KEY = "lightning_streaming.StreamingStateCallback"
"""Key in "callbacks" of a Lightning checkpoint that holds the state of a run."""


class Cursor(NamedTuple):
    """A position in the data: everything before it has been read, everything from it on has not."""

    epoch: int
    """Passes over the data before this one."""
    sample_in_epoch: int
    """Position in the epoch's global sequence, over all ranks; replicated ranks count once."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, sample {self.sample_in_epoch}"

    def passes_later(self, passes: int) -> Cursor:
        """Return where the pass begins that is ``passes`` after the one that begins here."""
        return self if passes == 0 else Cursor(self.epoch + passes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStart:
    """The facts that a process needs to read its share of one pass."""

    cursor: Cursor
    world: World
    """The world in which samples are divided: ranks that read the same samples count as one."""
    batch_size: int
    """Samples per batch on each rank."""
    geometry: BatchGeometry
    """Geometry that the epoch's batches are composed for; another one than this world's after a resume in an epoch."""
    shuffle_seed: int
    num_canonical_nodes: int
    shuffle_block_size: int
    skipped: SkippedPositions = NOTHING_SKIPPED
    """Positions of the epoch that the pass leaves out."""
    growth: Growth = NO_GROWTH
    """Shards that epochs read of streams that have grown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPosition:
    """A state that was read and checked."""

    cursor: Cursor
    shuffle_seed: int
    num_canonical_nodes: int
    initial_physical_nodes: int | None
    """Nodes of the run's first start; states of MosaicML Streaming 0.2 do not hold them."""
    geometry: BatchGeometry | None
    """The geometry that the epoch's batches are composed for, where they are composed."""
    fingerprint: SavedFingerprint | None
    """The data and the order that it belongs to; None if it was saved by MosaicML Streaming."""
    skipped: Mapping[str, SkippedRange] = field(default_factory=dict)
    """The first and the last position of the samples of skipped ranges of batches, by the text of the range."""
    streams: StreamList | None = None
    """A few bytes for each stream, to report which has changed where the fingerprint alone would not."""

    def as_state(self) -> dict[str, Any]:
        """Return the dict that :func:`read_state` turns back into this value."""
        return {
            **_head(),
            "epoch": self.cursor.epoch,
            "sample_in_epoch": self.cursor.sample_in_epoch,
            "shuffle_seed": self.shuffle_seed,
            "num_canonical_nodes": self.num_canonical_nodes,
            "initial_physical_nodes": self.initial_physical_nodes,
            **({} if self.geometry is None else {"batch_geometry": self.geometry.facts}),
            **(
                {"skipped": {name: [*start, *stop] for name, (start, stop) in self.skipped.items()}}
                if self.skipped
                else {}
            ),
            "fingerprint": None if self.fingerprint is None else self.fingerprint.as_state(),
            **({} if self.streams is None else {"stream_list": self.streams.as_state()}),
        }


def _head() -> dict[str, Any]:
    return {"version": STATE_VERSION, "library_version": lightning_streaming.__version__}


def read_state(state: object, of: str = "a saved position") -> SavedPosition:
    """Read a whole saved state, ours or one of MosaicML Streaming.

    Args:
        state: The state.
        of: Its name in messages.

    Raises:
        StateError: It is not a state, lacks a key, was written by an unknown version, or has an invalid value; the
            message names the field.
    """
    fields = upgraded(Fields(state, of))
    position = SavedPosition(
        cursor=Cursor(fields.whole_number("epoch", most=MOST_EPOCHS), fields.whole_number("sample_in_epoch")),
        shuffle_seed=fields.whole_number("shuffle_seed", most=LARGEST_SEED),
        num_canonical_nodes=fields.whole_number("num_canonical_nodes", least=1, most=MOST_CANONICAL_NODES),
        initial_physical_nodes=None
        if fields.is_none("initial_physical_nodes")
        else fields.whole_number("initial_physical_nodes", least=1, most=_MOST_NODES),
        geometry=_geometry(fields.fields("batch_geometry")) if fields.has("batch_geometry") else None,
        fingerprint=None if fields.is_none("fingerprint") else SavedFingerprint.read(fields.fields("fingerprint")),
        skipped=_skipped(fields.fields("skipped")) if "skipped" in fields else {},
        streams=StreamList.read(fields.fields("stream_list")) if fields.has("stream_list") else None,
    )
    _check_sizes(fields, position)
    return position


def _geometry(fields: Fields) -> BatchGeometry:
    nodes = fields.whole_number("num_nodes", least=1, most=_MOST_NODES)
    ranks = fields.whole_number("ranks_per_node", least=1, most=min(_MOST_NODES, LARGEST_BATCH // nodes))
    most = LARGEST_BATCH // (nodes * ranks)
    return BatchGeometry(
        num_nodes=nodes, ranks_per_node=ranks, batch_size=fields.whole_number("batch_size", least=1, most=most)
    )


def _skipped(fields: Fields) -> dict[str, SkippedRange]:
    read: dict[str, SkippedRange] = {}
    batches = 0
    for name in fields:
        try:
            (batch_range,) = parse_batch_ranges([name], "skipped")
        except ConfigError as error:
            raise fields.contradicts(
                f"a range of batches is written like '12-20', but got {short_repr(name)}"
            ) from error
        batches += len(batch_range)
        first, start, last, stop = fields.whole_numbers(name, 4)
        read[name] = (first, start), (last, stop)
    for name, (begin, end) in read.items():
        # Each epoch that a range goes through has at least one batch, of this range or of another.
        if end < begin or end[0] - begin[0] > batches:
            raise fields.wrong(name, f"a range of {batches} batches at most, from a position to a later one")
    return read


def _check_sizes(fields: Fields, position: SavedPosition) -> None:
    """Check counts of samples of an epoch against the size in the fingerprint."""
    fingerprint, geometry = position.fingerprint, position.geometry
    if fingerprint is None:
        return
    size = fingerprint.order.epoch_size
    # Each stream repeats some samples, even for canonical nodes and ranks; each draws a sample at least.
    num_streams = len(fingerprint.streams) if fingerprint.all_streams is None else size
    if geometry is not None and geometry.global_batch_size > size + num_streams * (
        position.num_canonical_nodes + geometry.num_ranks
    ):
        raise fields.contradicts(
            f"'batch_geometry' has batches of {geometry.global_batch_size} samples, of an epoch of {size}"
        )
    for name, (begin, end) in position.skipped.items():
        # Epochs to come may be longer, of data that has grown.
        farthest = max((sample for epoch, sample in (begin, end) if epoch <= position.cursor.epoch), default=0)
        if farthest > size + MOST_CANONICAL_NODES + _MOST_NODES:
            raise fields.contradicts(f"'skipped' has {name!r} at sample {farthest} of an epoch of {size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTrainer:
    """The trainer's progress."""

    epoch: int
    batches: int
    """Batches of this epoch that are in the weights."""
    batches_in_epoch: int
    """0 if unknown."""

    @classmethod
    def read(cls, fields: Fields) -> SavedTrainer:
        """Read the mapping that :meth:`as_state` returns."""
        trainer = cls(
            epoch=fields.whole_number("epoch", most=MOST_EPOCHS),
            batches=fields.whole_number("batches"),
            batches_in_epoch=fields.whole_number("batches_in_epoch"),
        )
        if 0 < trainer.batches_in_epoch < trainer.batches:
            raise fields.contradicts(f"'batches' is {trainer.batches} of an epoch of {trainer.batches_in_epoch}")
        return trainer

    def as_state(self) -> dict[str, int]:
        """Return it as a state holds it."""
        return {"epoch": self.epoch, "batches": self.batches, "batches_in_epoch": self.batches_in_epoch}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedValidation:
    """Validations of an epoch under way."""

    is_due: bool = False
    """True if one is due, or was running, before the trainer's next batch."""
    done_after: int = 0
    """Batches of the epoch before the last validation that finished."""

    @classmethod
    def read(cls, fields: Fields) -> SavedValidation:
        """Read the mapping that :meth:`as_state` returns."""
        return cls(is_due=fields.choice("is_due", (False, True)), done_after=fields.whole_number("done_after"))

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {"is_due": self.is_due, "done_after": self.done_after}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """The state of a run that was read and checked."""

    trainer: SavedTrainer | None = None
    """None before the first batch."""
    loaders: Mapping[str, SavedPosition] = field(default_factory=dict)
    """The position of each train loader, by name."""
    samples_per_global_batch: Mapping[str, int] = field(default_factory=dict)
    """Samples of one batch over all ranks, for some of the loaders."""
    validation: SavedValidation = field(default_factory=SavedValidation)

    def as_state(self) -> dict[str, Any]:
        """Return the dict that :func:`read_run` turns back into this value."""
        return {
            **_head(),
            "trainer": None if self.trainer is None else self.trainer.as_state(),
            "loaders": {name: position.as_state() for name, position in self.loaders.items()},
            "samples_per_global_batch": dict(self.samples_per_global_batch),
            **({} if self.validation == SavedValidation() else {"validation": self.validation.as_state()}),
        }


def read_run(state: object) -> SavedRun:
    """Read the whole state of the callback.

    Raises:
        StateError: It is no such state, was written by an unknown version, or has an invalid value; the message names
            the field.
    """
    fields = Fields(state, "the checkpoint's streaming state")
    version_of(fields)  # version 1 has the same keys around the positions, which have versions themselves
    loaders = fields.fields("loaders")
    batches = fields.fields("samples_per_global_batch") if "samples_per_global_batch" in fields else Fields({}, "")
    run = SavedRun(
        trainer=None if fields.is_none("trainer") else SavedTrainer.read(fields.fields("trainer")),
        loaders={name: read_state(loaders.get(name), f"the saved position of {name!r}") for name in loaders},
        samples_per_global_batch={name: batches.whole_number(name, least=1) for name in batches},
        validation=SavedValidation.read(fields.fields("validation")) if "validation" in fields else SavedValidation(),
    )
    if run.trainer is None and run.loaders:
        names = sorted(run.loaders)
        raise fields.contradicts(f"'trainer' is None, as before the first batch, but there are {names}")
    if run.trainer is not None and not run.loaders:
        raise fields.contradicts("'trainer' has a position, and 'loaders' is empty")
    return run


def version_of(fields: Fields) -> int:
    """Return the version of a state, which this release can read.

    Raises:
        StateError: It is no version, or a newer one; the hint names the release that reads it.
    """
    version = fields.get("version")
    if type(version) is not int or version < 1:
        raise StateError(f"{fields.of} has version {short_repr(version)}, and versions are whole numbers", hint=DAMAGED)
    if version > STATE_VERSION:
        release = fields.get("library_version") if "library_version" in fields else None
        known = isinstance(release, str) and len(release) < 20 and re.fullmatch(r"\d+(\.\w+)*", release)
        raise StateError(
            f"{fields.of} has version {short_repr(version)}, and this release reads versions up to {STATE_VERSION}",
            hint=f"install lightning-streaming {release} or a newer release"
            if known
            else "resume with the release that wrote it, or a newer one",
        )
    return version


def upgraded(fields: Fields) -> Fields:
    """Return a saved position under the keys of the current version.

    Args:
        fields: Of any version up to the current one, or of MosaicML Streaming.

    Raises:
        StateError: Its version cannot be read.
    """
    if "version" in fields:
        state = fields.values
    else:  # of MosaicML Streaming; states of its release 0.2 have no nodes
        for key in ("epoch", "sample_in_epoch"):
            fields.get(key)  # before others are added: the error names the keys that the state has
        state = {"initial_physical_nodes": None, "fingerprint": None, **fields.values, "version": 1}
        epoch, sample = state["epoch"], state["sample_in_epoch"]
        if type(epoch) is int and epoch == -1 and type(sample) is int and sample >= 0:
            state |= {"epoch": 0, "sample_in_epoch": 0}
    if version_of(Fields(state, fields.of)) == 1:
        state = _renamed(state, {"streams": "stream_list"})
        state = _with(state, "stream_list", lambda value: _renamed(value, {"named digests": "named_digests"}))
        state = _with(state, "fingerprint", _fingerprint)
    return Fields(state, fields.of)


def _fingerprint(value: Any) -> Any:
    def stream(value: Any) -> Any:
        new = _renamed(value, {"place": "index", "samples drawn": "samples_drawn", "joins": "join"})
        return _with(new, "join", lambda joins: _each(joins, lambda join: _renamed(join, {"on": "key"})))

    def phase(value: Any) -> Any:
        return _renamed(value, {"until": "end", "cut": "ended_at"})

    new = _renamed(value, {"phases": "schedule"})
    new = _with(new, "schedule", lambda phases: _each(phases, phase))
    new = _with(new, "streams", lambda streams: _each(streams, stream))
    streams = new.get("streams") if isinstance(new, Mapping) else None
    if isinstance(streams, Mapping) and len(streams) == 1:
        ((name, described),) = streams.items()
        together = re.fullmatch(r"all (\d{1,9}) streams", name) if isinstance(name, str) else None
        if together and isinstance(described, Mapping) and "index" not in described:
            new = {key: of for key, of in new.items() if key != "streams"}
            new["all_streams"] = {"count": int(together[1]), **described}
    order = new.get("order") if isinstance(new, Mapping) else None
    if isinstance(order, Mapping) and "pack" in order:
        new = {**new, **_packing(order["pack"]), "order": {key: order[key] for key in order if key != "pack"}}
    return new


def _packing(value: Any) -> dict[str, Any]:
    """Return the settings of version 1, a list that begins with the method, by their names."""
    facts = value.get("method") if isinstance(value, Mapping) else None
    if not isinstance(facts, list | tuple) or not facts or not isinstance(facts[0], str):
        return {"packing": value}
    settings = named_facts(facts)
    is_budget = settings["method"] == "budget"
    if is_budget:
        del settings["method"]
    others = {key: of for key, of in value.items() if key != "method"}
    return {"token_budget" if is_budget else "packing": {**settings, **others}}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    return {names.get(key, key): of for key, of in value.items()} if isinstance(value, Mapping) else value


def _with(value: Any, key: str, change: Callable[[Any], Any]) -> Any:
    return {**value, key: change(value[key])} if isinstance(value, Mapping) and key in value else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return {key: change(of) for key, of in value.items()} if isinstance(value, Mapping) else value
