"""The fingerprint of a saved state, typed: the data and the settings that decide which samples a position reads.

Each class reads itself from the mapping of a state and writes that mapping again, under keys that are written out here:
a renamed attribute changes no state. Digests are computed over the keys of the first version of the state, which
:meth:`SavedStream.digested` lists, so a state of any version describes the same data by the same digest.

A later release may add keys to any of these mappings. They are kept, so that a comparison reports them as differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_streaming.resume.saved_fields import Fields
from lightning_streaming.sequence.phases import WeightChange
from lightning_streaming.sequence.settings import BATCHING_METHODS, SAMPLING_METHODS, SHUFFLE_ALGOS
from lightning_streaming.units import plain_number

_PACKINGS = ("packing", "token_budget")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOrder:
    """The settings of an epoch's order, apart from the seed and the canonical nodes."""

    epoch_size: int
    """Samples of an epoch."""
    shuffle: bool
    shuffle_algo: str | None
    """None where nothing is shuffled."""
    shuffle_block_size: int | None
    """None where nothing is shuffled."""
    sampling_method: str
    sampling_granularity: int
    batching_method: str
    more: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a later release has added."""

    @classmethod
    def read(cls, fields: Fields) -> SavedOrder:
        """Read the mapping that :meth:`as_state` returns."""
        return cls(
            epoch_size=fields.whole_number("epoch_size", least=1),
            shuffle=fields.choice("shuffle", (True, False)),
            shuffle_algo=fields.choice("shuffle_algo", (None, *SHUFFLE_ALGOS)),
            shuffle_block_size=None
            if fields.is_none("shuffle_block_size")
            else fields.whole_number("shuffle_block_size", least=1),
            sampling_method=fields.choice("sampling_method", SAMPLING_METHODS),
            sampling_granularity=fields.whole_number("sampling_granularity", least=1),
            batching_method=fields.choice("batching_method", BATCHING_METHODS),
            more=fields.others(*_ORDER),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {
            "epoch_size": self.epoch_size,
            "shuffle": self.shuffle,
            "shuffle_algo": self.shuffle_algo,
            "shuffle_block_size": self.shuffle_block_size,
            "sampling_method": self.sampling_method,
            "sampling_granularity": self.sampling_granularity,
            "batching_method": self.batching_method,
            **self.more,
        }


_ORDER = (
    "epoch_size",
    "shuffle",
    "shuffle_algo",
    "shuffle_block_size",
    "sampling_method",
    "sampling_granularity",
    "batching_method",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPacking:
    """The packing of documents."""

    option: str
    """The name of the option: "packing" or "token_budget"."""
    settings: Mapping[str, Any]
    """The fields that determine which documents share a pack, by name."""
    lengths: str
    """The source of the documents' lengths, in words."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], lengths: str) -> SavedPacking:
        """Create it from the named settings of a packing, whose method determines the option."""
        is_budget = settings["method"] == "budget"
        of_option = {name: value for name, value in settings.items() if not is_budget or name != "method"}
        return cls(option=_PACKINGS[is_budget], settings=of_option, lengths=lengths)

    @classmethod
    def read(cls, fields: Fields) -> SavedPacking | None:
        """Read it from a fingerprint; None if nothing is packed."""
        options = [option for option in _PACKINGS if option in fields]
        if len(options) > 1:
            raise fields.contradicts("it has both 'packing' and 'token_budget'")
        if not options:
            return None
        settings = fields.fields(options[0])
        return cls(option=options[0], settings=settings.others("lengths"), lengths=settings.text("lengths"))

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {**self.settings, "lengths": self.lengths}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedJoin:
    """A dataset that is joined with a stream."""

    samples: int
    digest: str
    """Digest of the names, sizes and hashes of its shards."""
    key: str | None = None
    """The column of ids; None where samples are joined by position."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Fields) -> SavedJoin:
        """Read the mapping that :meth:`as_state` returns."""
        return cls(
            samples=fields.whole_number("samples"),
            digest=fields.text("digest"),
            key=fields.text("key") if "key" in fields else None,
            more=fields.others("samples", "digest", "key"),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {
            "samples": self.samples,
            "digest": self.digest,
            **({} if self.key is None else {"key": self.key}),
            **self.more,
        }

    def digested(self) -> dict[str, Any]:
        """Return it under the keys of the first version, which digests are computed over."""
        return {
            "samples": self.samples,
            "digest": self.digest,
            **({} if self.key is None else {"on": self.key}),
            **self.more,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStream:
    """The data of a stream, and the number of samples that an epoch reads."""

    index: int
    """Its number among the streams, from 0."""
    samples: int
    shards: int
    samples_drawn: int
    """Its samples in an epoch; with a schedule, in the phases that have begun."""
    digest: str
    """A digest of the names, sizes and hashes of its shards."""
    selection: str | None = None
    """A digest of the samples that are selected; None where all are."""
    join: Mapping[str, SavedJoin] = field(default_factory=dict)
    """The datasets that are joined with it, by name of the join."""
    lengths: str | None = None
    """A digest of the lengths of its documents, where documents are packed."""
    grown: tuple[tuple[int, int], ...] = ()
    """With a schedule: the samples of passes up to which they read fewer shards, and the number of these shards."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Fields) -> SavedStream:
        """Read the mapping that :meth:`as_state` returns."""
        joins = fields.fields("join") if "join" in fields else ()
        return cls(
            index=fields.whole_number("index"),
            samples=fields.whole_number("samples"),
            shards=fields.whole_number("shards"),
            samples_drawn=fields.whole_number("samples_drawn"),
            digest=fields.text("digest"),
            selection=fields.text("selection") if "selection" in fields else None,
            join={name: SavedJoin.read(joins.fields(name)) for name in joins} if isinstance(joins, Fields) else {},
            lengths=fields.text("lengths") if "lengths" in fields else None,
            grown=_read_grown(fields) if "grown" in fields else (),
            more=fields.others(*_STREAM),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {
            "index": self.index,
            "samples": self.samples,
            "shards": self.shards,
            "samples_drawn": self.samples_drawn,
            "digest": self.digest,
            **({} if self.selection is None else {"selection": self.selection}),
            **({"join": {name: join.as_state() for name, join in self.join.items()}} if self.join else {}),
            **({} if self.lengths is None else {"lengths": self.lengths}),
            **({"grown": [list(pair) for pair in self.grown]} if self.grown else {}),
            **self.more,
        }

    def digested(self) -> dict[str, Any]:
        """Return it, without the lengths of documents, under the keys of the first version.

        Digests of several streams are computed over these, so they never change.
        """
        return {
            "place": self.index,
            "samples": self.samples,
            "shards": self.shards,
            "samples drawn": self.samples_drawn,
            "digest": self.digest,
            **({} if self.selection is None else {"selection": self.selection}),
            **self._digested_joins(),
        }

    def outline(self) -> str:
        """Return a text that differs where the stream's selection or joined datasets do; it never changes either."""
        return f"{self.selection or ''}{self._digested_joins().get('joins', '')}"

    def _digested_joins(self) -> dict[str, Any]:
        return {"joins": {name: join.digested() for name, join in self.join.items()}} if self.join else {}


_STREAM = ("index", "samples", "shards", "samples_drawn", "digest", "selection", "join", "lengths", "grown")


def _read_grown(fields: Fields) -> tuple[tuple[int, int], ...]:
    """Read where passes of a stream end that read fewer shards, and how many these read; both must increase."""
    grown, before = fields.pairs("grown"), (0, 0)
    for pair in grown:
        if pair[0] <= before[0] or pair[1] <= before[1]:
            raise fields.wrong("grown", "pairs of rising numbers")
        before = pair
    if not grown or before[1] >= fields.whole_number("shards"):
        raise fields.wrong("grown", f"pairs of samples and fewer than {fields.get('shards')} shards")
    return grown


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStreams:
    """All streams together, where a state has no room to describe each."""

    count: int
    samples: int
    digest: str
    """A digest of :meth:`SavedStream.digested` of each."""
    lengths: str | None = None
    """A digest of the lengths of all documents, where documents are packed."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, streams: Mapping[str, SavedStream]) -> SavedStreams:
        """Describe streams together."""
        lengths = [stream.lengths for stream in streams.values() if stream.lengths is not None]
        return cls(
            count=len(streams),
            samples=sum(stream.samples for stream in streams.values()),
            digest=_digest({name: stream.digested() for name, stream in streams.items()}),
            lengths=_digest(lengths) if lengths else None,
        )

    @classmethod
    def read(cls, fields: Fields) -> SavedStreams:
        """Read the mapping that :meth:`as_state` returns."""
        return cls(
            count=fields.whole_number("count", least=1),
            samples=fields.whole_number("samples"),
            digest=fields.text("digest"),
            lengths=fields.text("lengths") if "lengths" in fields else None,
            more=fields.others("count", "samples", "digest", "lengths"),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {
            "count": self.count,
            "samples": self.samples,
            "digest": self.digest,
            **({} if self.lengths is None else {"lengths": self.lengths}),
            **self.more,
        }


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPhase:
    """A phase of the schedule that has begun."""

    end: int
    """The planned end, a sample of the epoch."""
    mix: str
    """The weights of its streams, in words."""
    steps: int
    ended_at: int | None = None
    """The sample at which it ended, if that was earlier."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The sample at which it ended, or will end."""
        return self.end if self.ended_at is None else self.ended_at

    @classmethod
    def read(cls, fields: Fields) -> SavedPhase:
        """Read the mapping that :meth:`as_state` returns."""
        return cls(
            end=fields.whole_number("end", least=1),
            mix=fields.text("mix"),
            steps=fields.whole_number("steps", least=1),
            ended_at=fields.whole_number("ended_at", least=1) if "ended_at" in fields else None,
            more=fields.others("end", "mix", "steps", "ended_at"),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {
            "end": self.end,
            "mix": self.mix,
            "steps": self.steps,
            **({} if self.ended_at is None else {"ended_at": self.ended_at}),
            **self.more,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFingerprint:
    """The data and the order that a saved position belongs to."""

    order: SavedOrder
    packing: SavedPacking | None = None
    """None where nothing is packed."""
    sequence: tuple[Mapping[str, Any], ...] = ()
    """The user's steps: class, version and arguments of each."""
    mixing: Mapping[str, Any] = field(default_factory=dict)
    """The unit of weights, where it is not the sample, and limits that change what is read."""
    weights_set: tuple[WeightChange, ...] = ()
    """Weights that the run has set, in order."""
    schedule: Mapping[str, SavedPhase] | None = None
    """The phases that have begun, by name, in their order; None where there is no schedule."""
    streams: Mapping[str, SavedStream] = field(default_factory=dict)
    """Each stream by name; with a schedule, those that the phases have read. Empty if ``all_streams`` is there."""
    all_streams: SavedStreams | None = None
    """All streams together, where there are too many to describe each."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Fields) -> SavedFingerprint:
        """Read the mapping that :meth:`as_state` returns.

        Raises:
            StateError: A value is invalid; the message names the field.
        """
        streams = None if "all_streams" in fields else fields.fields("streams")
        phases = fields.fields("schedule") if "schedule" in fields else None
        if phases is not None and streams is None:
            raise fields.contradicts("it has both 'schedule' and 'all_streams'")
        return cls(
            order=SavedOrder.read(fields.fields("order")),
            packing=SavedPacking.read(fields),
            sequence=fields.mappings("sequence") if "sequence" in fields else (),
            mixing=_read_mixing(fields.fields("mixing")) if "mixing" in fields else {},
            weights_set=_read_changes(fields.fields("weights_set")) if "weights_set" in fields else (),
            schedule=None if phases is None else {name: SavedPhase.read(phases.fields(name)) for name in phases},
            streams={} if streams is None else {name: SavedStream.read(streams.fields(name)) for name in streams},
            all_streams=SavedStreams.read(fields.fields("all_streams")) if streams is None else None,
            more=fields.others(
                "order", *_PACKINGS, "sequence", "mixing", "weights_set", "schedule", "streams", "all_streams"
            ),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {**self.settings(), **self.described_streams()}

    def settings(self) -> dict[str, Any]:
        """Return all of it but the streams, as a state holds it."""
        return {
            "order": self.order.as_state(),
            **({} if self.packing is None else {self.packing.option: self.packing.as_state()}),
            **({"sequence": [dict(step) for step in self.sequence]} if self.sequence else {}),
            **({"mixing": dict(self.mixing)} if self.mixing else {}),
            **({"weights_set": _saved_changes(self.weights_set)} if self.weights_set else {}),
            **(
                {}
                if self.schedule is None
                else {"schedule": {name: phase.as_state() for name, phase in self.schedule.items()}}
            ),
            **self.more,
        }

    def described_streams(self) -> dict[str, Any]:
        """Return the streams as a state holds them."""
        if self.all_streams is not None:
            return {"all_streams": self.all_streams.as_state()}
        return {"streams": {name: stream.as_state() for name, stream in self.streams.items()}}


def _saved_changes(changes: Sequence[WeightChange]) -> dict[str, Any]:
    """Return weights that a run has set as a state holds them: names of streams once, and numbers for each change."""
    names = sorted({name for change in changes for name, _ in change.mix})
    rows = [[change.epoch, change.step, *(dict(change.mix).get(name, 0.0) for name in names)] for change in changes]
    return {"streams": names, "changes": rows}


def _read_changes(fields: Fields) -> tuple[WeightChange, ...]:
    """Read the mapping that :func:`_saved_changes` returns."""
    names, rows = fields.get("streams"), fields.get("changes")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise fields.wrong("streams", "a list of texts")
    changes = list[WeightChange]()
    for row in rows if isinstance(rows, list | tuple) else [None]:
        is_row = isinstance(row, list | tuple) and len(row) == 2 + len(names)
        if row is None or not is_row or not all(isinstance(number, int) and number >= 0 for number in row[:2]):
            raise fields.wrong("changes", "a list of changes, each of an epoch, a step, and a weight for each stream")
        weights = [plain_number(weight) for weight in row[2:]]
        if any(weight is None or weight < 0 for weight in weights) or not any(weights):
            raise fields.wrong("changes", "a list of changes with weights that are not negative, and not all 0")
        mix = tuple((name, float(weight)) for name, weight in zip(names, weights, strict=True) if weight)
        changes.append(WeightChange(epoch=int(row[0]), step=int(row[1]), mix=mix))
    if sorted(changes, key=lambda change: (change.epoch, change.step)) != changes:
        raise fields.wrong("changes", "in ascending order")
    return tuple(changes)


def _read_mixing(fields: Fields) -> dict[str, Any]:
    """Read the options of a mixture from a fingerprint."""
    if "weights_in" in fields:
        fields.choice("weights_in", ("tokens",))
    if "lengths" in fields:
        fields.text("lengths")
    if "longest_step" in fields:
        fields.whole_number("longest_step", least=1)
    if "max_repeats" in fields:
        limits = fields.fields("max_repeats")
        for name in limits:
            limits.text(name)
    return fields.others()
