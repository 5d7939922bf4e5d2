"""What a saved position belongs to, data and settings of its order, and how to say what has changed of them.

A state carries it as "fingerprint", in full as long as the streams are few. Beyond, one digest stands for all of them,
and "streams" beside it helps to tell which of them has changed:

    {"hashes": "sha1", "digests": "q83vEjRW...", "width": 4, "names": "eJyLVipWslJQKk5V..."}

"digests" are a few bytes for each stream, in their order, in Base64: of its shards and samples where the names are
there too, otherwise of its name as well. "names" are a JSON list, compressed. Where there is no room for that they are
left out, and a change is told by what the stream's neighbours are called.

Of packs each stream has "lengths", a digest of the lengths of its documents, as far as the position reads the stream.
Packs follow from them, and neither the data nor the name of a function says what they are. Earlier states have none.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_streaming.escaping import in_one_line
from lightning_streaming.loading.catalog import Extent
from lightning_streaming.order.packing import named_facts
from lightning_streaming.order.phases import SettledPhase, StepPlan
from lightning_streaming.order.sequence import digest_of
from lightning_streaming.order.settings import BATCHING_METHODS, SAMPLING_METHODS, SHUFFLE_ALGOS, OrderSettings
from lightning_streaming.order.weights import ResolvedWeights

if TYPE_CHECKING:
    from lightning_streaming.loading.state import Fields


_LONGEST_LIST = 3072
"""Characters up to which a state describes its streams; so it stays below 4 KB, but of a run with phases."""
_WIDTHS = (4, 3, 2)
"""Bytes of a stream's digest, as many as there is room for."""
_MOST_NAMES = 1 << 20
"""Bytes of JSON up to which names are unpacked: many times what a state has room for."""
_LONGEST_MIX = 200
"""Characters up to which the mix of a phase is told by names of streams."""
_VARIOUS = "various"
"""Where streams have different hashes, and there are too many to tell each."""
_MOST_ROWS = 24
"""Differences that are told one by one."""


class Fingerprint:
    """What a position depends on, apart from the seed and the canonical nodes, which the state carries itself.

    Of phases only those count that have begun, and of the streams those that they read: what comes later may change.

    Args:
        catalog: The data, as far as it is read.
        settings: The order settings, settled.
        weights: The streams' shares of an epoch.
        plan: The phases of an epoch, if it has any.
        phases_begun: How many of them have begun.
        grown: Streams, by place, whose first passes read fewer shards: up to where, in samples of the passes, and how
            many.
        pack: How samples are brought together, if they are.
    """

    def __init__(
        self,
        catalog: Extent,
        settings: OrderSettings,
        weights: ResolvedWeights,
        plan: StepPlan | None = None,
        phases_begun: int = 0,
        grown: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
        pack: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        order = {
            "epoch_size": weights.epoch_size,
            "shuffle": settings.shuffle,
            "shuffle_algo": settings.shuffle_algo if settings.shuffle else None,
            "shuffle_block_size": settings.shuffle_block_size if settings.shuffle else None,
            "sampling_method": settings.sampling_method,
            "sampling_granularity": settings.sampling_granularity,
            "batching_method": settings.batching_method,
            **({"pack": dict(pack)} if pack else {}),
        }
        self._catalog = catalog
        stream_of = self._stream_of = {name: stream for stream, name in enumerate(catalog.stream_names)}
        drawn = dict(zip(catalog.stream_names, weights.choose, strict=True))
        if plan is not None:
            drawn = plan.drawn_by(phases_begun - 1) if phases_begun else {}
        self._described: dict[str, dict[str, Any]] = {
            name: _description(catalog, stream_of[name], place, samples, grown.get(stream_of[name], ()))
            for place, (name, samples) in enumerate(drawn.items())
            if name in stream_of
        }
        streams: dict[str, Any] = self._described
        if plan is None and len(json.dumps(streams)) > _LONGEST_LIST:
            streams = _as_a_whole(streams)
        self.saved: dict[str, Any] = {"order": order, "streams": streams}
        """As a state carries it."""
        if plan is not None:
            self.saved["phases"] = {
                one.name: {
                    "until": plan.planned_stops[number],
                    "mix": told_mix(one),
                    "steps": one.steps,
                    # Where the last one ends is still open.
                    **({} if one.cut is None or number == phases_begun - 1 else {"cut": one.cut}),
                }
                for number, one in enumerate(plan.phases[:phases_begun])
            }
        room = _LONGEST_LIST - len(json.dumps(streams))
        self.stream_list = _list_streams(self._facts(), room, with_names=streams is not self._described)
        """What a state carries beside it, if there is room: never compared, but of help where something differs."""

    def saved_with(self, gone: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The same with streams that are not there now, as they were saved: they go on from there if they come back."""
        behind = {name: {**one, "place": place} for place, (name, one) in enumerate(gone.items(), len(self._described))}
        return {**self.saved, "streams": {**self.saved["streams"], **behind}} if gone else self.saved

    def differences(self, saved: Mapping[str, Any], listed: StreamList | None) -> list[Difference]:
        """Each difference between a saved fingerprint and this one.

        Args:
            saved: The saved one.
            listed: What was saved beside it.
        """
        streams = saved["streams"]
        if "phases" in saved and "phases" in self.saved:
            return self._differences_of_phases(saved, listed)
        found = differences(*({name: of[name] for name in of if name != "streams"} for of in (saved, self.saved)))
        if any(one.setting.startswith("phases") for one in found):
            return found  # which streams were read, and how much of them, follows from them
        if is_listed(streams):
            for one in _differences_of_streams(streams, self._described_as(streams)):
                found += self._with_hashes(one, streams, listed)
            return found
        if not self._in_all(streams):
            return found
        changes = [] if listed is None else _stream_changes(listed, self._facts())
        return [*found, *(changes or self._in_all(streams))]

    def _differences_of_phases(self, saved: Mapping[str, Any], listed: StreamList | None) -> list[Difference]:
        """The same with phases: where the epoch ends does not matter, nor what was read of streams that are gone."""
        then, now = (
            {"order": {**of["order"], "epoch_size": None}, "phases": of["phases"]} for of in (saved, self.saved)
        )
        found = differences(then, now)
        if any(one.setting.startswith("phases") for one in found):
            return found  # which streams were read follows from them
        both = [name for name in saved["streams"] if name in self._described]
        described = self._described_as(saved["streams"])
        streams, here = ({name: _undrawn(of[name]) for name in both} for of in (saved["streams"], described))
        for one in _differences_of_streams(streams, here):
            found += self._with_hashes(one, saved["streams"], listed)
        return found

    def _described_as(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what a state says of each stream, joined datasets that have only become longer as they were saved."""
        return {
            name: {**one, **_joins_of(self._catalog, self._stream_of[name], saved.get(name))}
            for name, one in self._described.items()
        }

    def _facts(self) -> dict[str, _StreamFacts]:
        return {name: self._facts_of(name) for name in self._described}

    def _facts_of(self, name: str) -> _StreamFacts:
        one, table = self._described[name], self._catalog.indexes[self._stream_of[name]].shards
        more = f"{one.get('selection', '')}{one.get('joins', '')}"
        return _StreamFacts(
            outline=f"{one['shards']} {one['samples drawn']} {table.outline()}{more}",
            hashes=table.hash_names(),
            samples=one["samples"],
        )

    def _in_all(self, streams: Mapping[str, Any]) -> list[Difference]:
        """The difference where the state does not tell one stream from another."""
        return _differences_of_streams(streams, _as_a_whole(self._described))

    def _with_hashes(
        self, one: Difference, saved: Mapping[str, Any], listed: StreamList | None
    ) -> Iterator[Difference]:
        """A difference, and where it is one of digests what of it is due to other hashes in the index."""
        name = one.setting.removeprefix("streams.").removesuffix(".digest")
        if not one.setting.endswith(".digest") or name not in self._stream_of:
            yield one
            return
        table, facts = self._catalog.indexes[self._stream_of[name]].shards, self._facts_of(name)
        # What was saved may be today's data with fewer hashes, or as the list tells with others.
        fewer = [kinds for kinds in ((), *((kind,) for kind in facts.hashes)) if kinds != facts.hashes]
        alike = next((kinds for kinds in fewer if one.saved == repr(table.digest(kinds))), None)
        then = alike
        if then is None and listed is not None:
            then, is_alike = listed.hashes_of(saved[name]["place"], facts)
            alike = then if is_alike else None
        if alike is None:
            yield one
        if then is not None:
            yield Difference(f"streams.{name}.hashes", _in_short(then), _in_short(facts.hashes))


def told_mix(phase: SettledPhase) -> str:
    """The weights of a phase in one line, without names where streams are many: different where the weights are."""
    told = ", ".join(
        f"{name} {begin!r}" + ("" if begin == end else f" to {end!r}")
        for (name, begin), (_, end) in zip(phase.begin, phase.end, strict=True)
    )
    if len(told) <= _LONGEST_MIX:
        return told
    return f"of {len(phase.begin)} streams, {digest_of(phase.begin, phase.end)}"


def _description(
    catalog: Extent, stream: int, place: int, drawn: int, grown: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """What a state says of a stream."""
    return {
        "place": place,
        "samples": catalog.samples_per_stream[stream],
        "shards": catalog.shards_per_stream[stream],
        "samples drawn": drawn,
        "digest": catalog.indexes[stream].data_digest,
        **_selection_of(catalog, stream),
        **_joins_of(catalog, stream),
        **_lengths_of(catalog, stream),
        **({"grown": [list(one) for one in grown]} if grown else {}),
    }


def _undrawn(one: Mapping[str, Any]) -> dict[str, Any]:
    """A stream without its place, which does not matter, how much is drawn of it, which follows from the phases, and
    which of its passes read less, which is taken over."""
    return {key: value for key, value in one.items() if key not in ("place", "samples drawn", "grown")}


def _selection_of(catalog: Extent, stream: int) -> dict[str, str]:
    """What a state says of a stream of which not all samples are read."""
    selection = catalog.selections[stream]
    return {} if selection is None or len(selection) == selection.num_stored else {"selection": selection.digest}


def _joins_of(catalog: Extent, stream: int, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a state says of the datasets that are joined with a stream, if any are.

    Args:
        catalog: The data.
        stream: Which stream, by its place.
        saved: What a state said of the stream before. Joined datasets that have only become longer since are described
            as they were then: what belongs to the samples that they had is the same.
    """
    joins = None if catalog.joins is None else catalog.joins.streams.get(stream)
    if joins is None:
        return {}
    then = {} if saved is None else saved.get("joins")
    known = then if isinstance(then, Mapping) else {}
    return {
        "joins": {
            one.name: known[one.name] if one.name in known and one.began_as(known[one.name]) else one.facts()
            for one in joins.all
        }
    }


def _lengths_of(catalog: Extent, stream: int) -> dict[str, str]:
    """Return what a state says of the lengths of a stream's documents, where documents are packed."""
    if catalog.lengths is None:
        return {}
    return {"lengths": catalog.lengths.streams[stream].digest_of_first(catalog.indexes[stream].num_samples)}


def _as_a_whole(described: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Describe all streams by one digest; the lengths of documents by another one."""
    lengths = [one["lengths"] for one in described.values() if "lengths" in one]
    whole = {
        "samples": sum(one["samples"] for one in described.values()),
        "digest": _digest({name: _without_lengths(one) for name, one in described.items()}),
        **({"lengths": _digest(lengths)} if lengths else {}),
    }
    return {f"all {len(described)} streams": whole}


def _without_lengths(one: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key != "lengths"}


def _differences_of_streams(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[Difference]:
    """Compare descriptions of streams; lengths of documents only where both say them."""
    told = {name for name in saved if "lengths" in saved[name] and "lengths" in now.get(name, ())}
    then, here = (
        {name: one if name in told else _without_lengths(one) for name, one in of.items()} for of in (saved, now)
    )
    return differences({"streams": then}, {"streams": here})


def _in_short(hashes: tuple[str, ...]) -> str:
    """Names of hashes as a message shows them.

    >>> _in_short(()), _in_short(("md5", "sha1"))
    ('none', 'md5, sha1')
    """
    return ", ".join(hashes) or "none"


def is_same_data(saved: Mapping[str, Any], catalog: Extent, stream: int) -> bool:
    """Return whether a stream's data is what a saved fingerprint says, wherever it is and however much is drawn of it.

    Lengths of documents are not compared: where they alone differ, that is the difference to report.
    """
    now = _description(catalog, stream, 0, 0) | _joins_of(catalog, stream, saved)
    return _undrawn(_without_lengths(saved)) == _undrawn(_without_lengths(now))


def is_listed(streams: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a saved fingerprint describes each stream, rather than all of them by one digest."""
    return all("place" in one for one in streams.values())


def read_fingerprint(fields: Fields) -> dict[str, Any]:
    """A saved fingerprint that has been found sound.

    Raises:
        StateError: One of its values cannot be; the message names the field.
    """
    order, streams = fields.fields("order"), fields.fields("streams")
    read = {
        "epoch_size": order.whole_number("epoch_size", least=1),
        "shuffle": order.one_of("shuffle", (True, False)),
        "shuffle_algo": order.one_of("shuffle_algo", (None, *SHUFFLE_ALGOS)),
        "shuffle_block_size": None
        if order.is_none("shuffle_block_size")
        else order.whole_number("shuffle_block_size", least=1),
        "sampling_method": order.one_of("sampling_method", SAMPLING_METHODS),
        "sampling_granularity": order.whole_number("sampling_granularity", least=1),
        "batching_method": order.one_of("batching_method", BATCHING_METHODS),
    }
    # What a later release may have added stays, to be told as a difference.
    more = {key: order.get(key) for key in order if key not in read}
    return {
        "order": {**read, **more},
        "streams": {name: _read_stream(streams.fields(name)) for name in streams},
        **({"phases": _read_phases(fields.fields("phases"))} if "phases" in fields else {}),
    }


def _read_phases(fields: Fields) -> dict[str, Any]:
    phases = {name: fields.fields(name) for name in fields}
    return {
        name: {
            "until": one.whole_number("until", least=1),
            "mix": one.text("mix"),
            "steps": one.whole_number("steps", least=1),
            **({"cut": one.whole_number("cut", least=1)} if "cut" in one else {}),
        }
        for name, one in phases.items()
    }


def _read_stream(fields: Fields) -> dict[str, Any]:
    counts = ("place", "samples", "shards", "samples drawn") if "place" in fields else ("samples",)
    read = {key: fields.whole_number(key) for key in counts}
    more = {key: fields.get(key) for key in fields if key not in (*counts, "digest", "grown")}
    grown = {"grown": _read_grown(fields)} if "grown" in fields else {}
    return {**read, "digest": fields.text("digest"), **more, **grown}


def _read_grown(fields: Fields) -> list[list[int]]:
    """Where passes of a stream end that read fewer shards, and how many these read: both rise."""
    grown, before = fields.pairs("grown"), (0, 0)
    for one in grown:
        if one[0] <= before[0] or one[1] <= before[1]:
            raise fields.wrong("grown", "pairs of rising numbers")
        before = one
    if not grown or before[1] >= fields.whole_number("shards"):
        raise fields.wrong("grown", f"pairs of samples and fewer than {fields.get('shards')} shards")
    return [list(one) for one in grown]


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _StreamFacts:
    """What tells a stream from what it was."""

    outline: str
    """Of its shards and samples; nothing of its name or of hashes."""
    hashes: tuple[str, ...]
    """Names of the hashes in its index."""
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamList:
    """The streams of a saved position."""

    digests: tuple[bytes, ...]
    """One for each stream, all of one length."""
    names: tuple[str, ...] | None
    """None if they are within the digests, or told elsewhere."""
    of_names: bool
    """Whether names are within the digests."""
    hashes: str
    """Names of the hashes of all streams, with commas between."""

    def as_state(self) -> dict[str, Any]:
        """The dict that :func:`read_stream_list` turns back into this value."""
        return {
            "hashes": self.hashes,
            ("named digests" if self.of_names else "digests"): b64encode(b"".join(self.digests)).decode(),
            "width": len(self.digests[0]),
            **({} if self.names is None else {"names": _packed(self.names)}),
        }

    def hashes_of(self, place: int, now: _StreamFacts) -> tuple[tuple[str, ...] | None, bool]:
        """The hashes that a stream had, None if nobody knows or they are the same; and whether all else is the same."""
        if self.of_names or self.hashes == _VARIOUS or place >= len(self.digests):
            return None, False
        then = tuple(self.hashes.split(",")) if self.hashes else ()
        is_alike = self.digests[place] == _short(now.outline, len(self.digests[place]))
        return (None if then == now.hashes else then), is_alike


def _list_streams(streams: Mapping[str, _StreamFacts], room: int, *, with_names: bool) -> StreamList | None:
    """As much as there is room for; None if that is nothing, or if no stream has been read.

    Args:
        streams: By name, in their order.
        room: Characters that it may have.
        with_names: Whether nothing else tells their names.
    """
    if not streams:  # no phase has begun
        return None
    kinds = {one.hashes for one in streams.values()}
    hashes = ",".join(kinds.pop()) if len(kinds) == 1 else _VARIOUS
    for names in (tuple(streams), None) if with_names else (None,):
        of_names = with_names and names is None
        for width in _WIDTHS:
            digests = tuple(_short(_told(name, one, of_names), width) for name, one in streams.items())
            listed = StreamList(digests=digests, names=names, of_names=of_names, hashes=hashes)
            if len(json.dumps(listed.as_state())) <= room:
                return listed
    return None


def read_stream_list(fields: Fields) -> StreamList:
    """A saved list that has been found sound.

    Raises:
        StateError: It was not written by :meth:`StreamList.as_state`.
    """
    of_names = "named digests" in fields
    key = "named digests" if of_names else "digests"
    width = fields.whole_number("width", min(_WIDTHS), max(_WIDTHS))
    text = fields.text(key)
    try:
        joined = b64decode(text, validate=True)
    except ValueError:
        raise fields.wrong(key, "Base64") from None
    if not joined or len(joined) % width:
        raise fields.wrong(key, f"{width} bytes for each stream, in Base64")
    digests = tuple(joined[start : start + width] for start in range(0, len(joined), width))
    names = _unpacked(fields) if "names" in fields else None
    if names is not None and (of_names or len(names) != len(digests)):
        raise fields.contradicts(f"there are {len(names)} 'names' and {len(digests)} digests")
    return StreamList(digests=digests, names=names, of_names=of_names, hashes=fields.text("hashes"))


def _stream_changes(then: StreamList, now: Mapping[str, _StreamFacts]) -> list[Difference]:
    """Which streams have left, come, changed, or been renamed or moved; empty where the list does not tell."""
    if then.names is not None:
        return _changes_by_name(then.names, then, now)
    return _changes_by_place(then, now) if then.of_names else []


def _changes_by_name(names: Sequence[str], then: StreamList, now: Mapping[str, _StreamFacts]) -> list[Difference]:
    width = len(then.digests[0])
    digests = dict(zip(names, then.digests, strict=True))
    data = {name: _short(one.outline, width) for name, one in now.items()}
    left, come = [name for name in names if name not in now], [name for name in now if name not in digests]
    found = []
    for name in left:
        # The same data under another name; of several with the same data, the one that comes first.
        renamed = next((other for other in come if data[other] == digests[name]), None)
        if renamed is not None:
            come.remove(renamed)
        found.append(Difference(f"streams.{name}", "there", "'absent'" if renamed is None else f"named {renamed!r}"))
    found += [Difference(f"streams.{name}", "'absent'", f"{now[name].samples} samples") for name in come]
    stayed = [name for name in names if name in now]
    for name in stayed:
        if digests[name] != data[name]:
            found.append(Difference(f"streams.{name}.digest", digests[name].hex(), data[name].hex()))
    if not left and not come and list(now) != stayed:
        places = dict(zip(now, range(len(now)), strict=True))
        moved = [(name, place) for place, name in enumerate(names) if places[name] != place]
        found += [Difference(f"streams.{name}.place", str(place), str(places[name])) for name, place in moved]
    return [*found, *_changes_of_hashes(then, now)]


def _changes_of_hashes(then: StreamList, now: Mapping[str, _StreamFacts]) -> list[Difference]:
    kinds = {",".join(one.hashes) for one in now.values()}
    if kinds == {then.hashes} or then.hashes == _VARIOUS:
        return []
    were, are = (" or ".join(one.replace(",", ", ") or "none" for one in sorted(of)) for of in ({then.hashes}, kinds))
    return [Difference("streams.*.hashes", were, are)]


def _changes_by_place(then: StreamList, now: Mapping[str, _StreamFacts]) -> list[Difference]:
    width = len(then.digests[0])
    digests = {name: _short(_told(name, one, True), width) for name, one in now.items()}
    names = {digest: name for name, digest in digests.items()}
    known = Counter(then.digests)
    found, before = [], ""
    for place, digest in enumerate(then.digests):
        if digest in names:
            before = f", after {names[digest]!r}"
        else:
            found.append(Difference(f"streams[{place}]", f"a stream{before}", "changed, renamed or 'absent'"))
    come = [name for name, digest in digests.items() if digest not in known]
    found += [Difference(f"streams.{name}", "'absent', or other", f"{now[name].samples} samples") for name in come]
    return [*found, *_changes_of_hashes(then, now)]


def _told(name: str, one: _StreamFacts, of_names: bool) -> str:
    return f"{json.dumps(name)} {one.outline}" if of_names else one.outline


def _short(text: str, width: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=width).digest()


def _packed(names: Sequence[str]) -> str:
    return b64encode(zlib.compress(json.dumps(names).encode(), 9)).decode()


def _unpacked(fields: Fields) -> tuple[str, ...]:
    packed = fields.text("names")
    try:
        names: Any = json.loads(zlib.decompressobj().decompress(b64decode(packed, validate=True), _MOST_NAMES))
    except (ValueError, zlib.error, RecursionError):
        raise fields.wrong("names", "a compressed list of texts") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong("names", "a compressed list of texts")
    return tuple(names)


class Difference(NamedTuple):
    """One setting, or one number of the data, that is not what it was."""

    setting: str
    """Where it is in the fingerprint, like "order.shuffle"."""
    saved: str
    """What it was, in few words."""
    now: str
    """What it is."""


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Each difference between two fingerprints.

    >>> differences({"order": {"shuffle": True}}, {"order": {"shuffle": False}})
    [Difference(setting='order.shuffle', saved='True', now='False')]
    """
    return list(_differences(saved, now, ""))


def in_words(found: Sequence[Difference]) -> str:
    """Return differences as plain text: one as a phrase, several as a table whose columns are two spaces apart.

    Names and values of a saved state are escaped, so that they add no lines.

    >>> in_words([Difference("order.shuffle", "True", "False")])
    'order.shuffle: saved True, now False'
    >>> print(in_words([Difference("order.shuffle", "True", "False"), Difference("streams.0.shards", "6", "3")]))
    setting           saved  now
    order.shuffle     True   False
    streams.0.shards  6      3
    """
    found = _escaped(found)
    if len(found) == 1:
        return f"{found[0].setting}: saved {found[0].saved}, now {found[0].now}"
    rows = [("setting", "saved", "now"), *found[:_MOST_ROWS]]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    more = len(found) - _MOST_ROWS
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _escaped(found: Sequence[Difference]) -> list[Difference]:
    return [Difference(*map(in_one_line, one)) for one in found]


def refusal(found: Sequence[Difference], saved: Mapping[str, Any] | None = None, of_phases: str = "") -> str:
    """What to say of a saved position that is refused for these differences, with the way out.

    Args:
        found: What differs.
        saved: The saved fingerprint.
        of_phases: What to say of phases that differ, each sentence with a space before it.
    """
    found, of_phases = _escaped(found), in_one_line(of_phases)
    table = f"the saved position belongs to other data or another order:\n{indent(in_words(found), '  ')}"
    way_out = 'resume with on_mismatch="warn" to go on from the same position all the same.'
    hashes = [one for one in found if one.setting.endswith(".hashes")]
    way_out += of_phases
    more = [one for one in found if one.setting.endswith(".samples") and one.saved.isdigit() and one.now.isdigit()]
    if any(int(one.saved) < int(one.now) for one in more):
        way_out += (
            " Data may be appended behind the shards that were there, as mode='append' of the writers does it; the "
            "shards before must stay as they are."
        )
    if any(one.setting.endswith(".lengths") and one.setting.startswith("streams.") for one in found):
        way_out += (
            " Packs follow from the lengths of documents. What says them (lengths= or the transform's tokenizer) "
            "returns other lengths of its documents than before: put it back, or start a new epoch with the other "
            'lengths: `lightning-streaming state set CKPT --epoch N --sample 0`, then resume with on_mismatch="warn".'
        )
    if not hashes and saved is not None and not is_listed(saved["streams"]):
        way_out += (
            " Of so many streams a state does not tell the shards of each: data must not be appended to any, nor to "
            "datasets joined with them."
        )
    if not hashes:
        return f"{table}\nPut these back, or {way_out}"
    changes = "; ".join(dict.fromkeys(f"{one.saved} → {one.now}" for one in hashes))
    if len(hashes) == len(found):
        return (
            f"{table}\nOnly what the indexes tell of the shards differs (hashes: {changes}); their names, samples and "
            f"sizes are the same. If the shards were not written anew, {way_out}"
        )
    anew = f"Data that is written anew with other hashes (hashes: {changes}) has other shards."
    return f"{table}\n{anew} Put it back, or {way_out}"


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> Iterator[Difference]:
    for key in [*saved, *(key for key in now if key not in saved)]:
        name = f"{where}.{key}" if where else str(key)
        before, after = saved.get(key, "absent"), now.get(key, "absent")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, name)
        elif name == "order.pack.method" and before != after and isinstance(before, list) and isinstance(after, list):
            yield from _differences(named_facts(before), named_facts(after), "order.pack")
        elif before != after:
            yield Difference(name, _brief(before), _brief(after))


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{value['samples']} samples" if "samples" in value else "there"
    return repr(value)
