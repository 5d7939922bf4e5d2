"""The fingerprint of a saved position: its data and the settings of its order, and messages about changes of them.

A state describes each stream if there are few. Otherwise one digest stands for all of them, and the list of streams
next to the fingerprint helps to report which of them has changed.

With packing each stream has "lengths", a digest of the lengths of its documents, as far as the position reads the
stream. Packs follow from them, and neither the data nor the name of a function determines them. Earlier states have
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import indent
from types import MappingProxyType
from typing import Any

from lightning_streaming.escaping import in_one_line
from lightning_streaming.resume.differences import Difference, differences, escaped, in_words
from lightning_streaming.resume.saved_fingerprint import (
    SavedFingerprint,
    SavedOrder,
    SavedPacking,
    SavedPhase,
    SavedStream,
    SavedStreams,
)
from lightning_streaming.resume.stream_list import StreamFacts, StreamList, list_streams, stream_changes
from lightning_streaming.selection.catalog import CatalogView
from lightning_streaming.selection.joins import SavedJoin
from lightning_streaming.sequence.base import digest_of
from lightning_streaming.sequence.phases import MixtureSchedule, ResolvedPhase
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import ResolvedWeights

_LONGEST_LIST = 3072
"""Characters up to which a state describes its streams; so it stays below 4 KB, but of a run with phases."""
_LONGEST_MIX = 200
"""Characters up to which the mix of a phase is told by names of streams."""


class Fingerprint:
    """The facts that a position depends on, apart from the seed and the canonical nodes, which the state has itself.

    Only phases that have begun count, and the streams that they read: later ones may change.

    Args:
        catalog: The data, as far as it is read.
        settings: The order settings, resolved.
        weights: The streams' shares of an epoch.
        plan: The phases of an epoch, if it has any.
        phases_begun: How many of them have begun.
        grown: Streams, by place, whose first passes read fewer shards: up to where, in samples of the passes, and how
            many.
        packing: How documents are packed, if they are.
        sequence: The facts of each of the user's steps.
    """

    def __init__(
        self,
        catalog: CatalogView,
        settings: OrderSettings,
        weights: ResolvedWeights,
        plan: MixtureSchedule | None = None,
        phases_begun: int = 0,
        grown: Mapping[int, tuple[tuple[int, int], ...]] = MappingProxyType({}),
        packing: SavedPacking | None = None,
        sequence: tuple[dict[str, Any], ...] = (),
    ) -> None:
        self._catalog = catalog
        stream_of = self._stream_of = {name: stream for stream, name in enumerate(catalog.stream_names)}
        drawn = dict(zip(catalog.stream_names, weights.choose, strict=True))
        if plan is not None:
            drawn = plan.drawn_by(phases_begun - 1) if phases_begun else {}
        self._described = {
            name: _description(catalog, stream_of[name], place, samples, grown.get(stream_of[name], ()))
            for place, (name, samples) in enumerate(drawn.items())
            if name in stream_of
        }
        length = len(json.dumps({name: one.as_state() for name, one in self._described.items()}))
        is_listed = plan is not None or length <= _LONGEST_LIST
        all_streams = None if is_listed else SavedStreams.of(self._described)
        self.saved = SavedFingerprint(
            order=_saved_order(settings, weights.epoch_size),
            packing=packing,
            sequence=sequence,
            schedule=None if plan is None else _saved_schedule(plan, phases_begun),
            streams=self._described if is_listed else {},
            all_streams=all_streams,
        )
        """As a state carries it."""
        room = _LONGEST_LIST - (length if all_streams is None else len(json.dumps(all_streams.as_state())))
        self.stream_list = list_streams(self._facts(), room, with_names=not is_listed)
        """What a state carries beside it, if there is room: never compared, but of help where something differs."""

    def saved_with(self, gone: Mapping[str, SavedStream]) -> SavedFingerprint:
        """Return it with streams that are missing now, as they were saved, so that they may be added again."""
        after = enumerate(gone.items(), len(self._described))
        behind = {name: replace(one, index=index) for index, (name, one) in after}
        return replace(self.saved, streams={**self.saved.streams, **behind}) if gone else self.saved

    def differences(self, saved: SavedFingerprint, listed: StreamList | None) -> list[Difference]:
        """Return each difference between a saved fingerprint and this one.

        Args:
            saved: The saved one.
            listed: The list of streams that was saved beside it.
        """
        then, now = saved.settings(), self.saved.settings()
        both_have_phases = saved.schedule is not None and self.saved.schedule is not None
        if both_have_phases:  # where the epoch ends does not matter
            then, now = ({**of, "order": {**of["order"], "epoch_size": None}} for of in (then, now))
        found = differences(then, now)
        if any(one.setting.startswith("schedule") for one in found):
            return found  # which streams were read, and how much of them, follows from them
        if both_have_phases or saved.all_streams is None:
            return [*found, *self._differences_of_streams(saved, listed, are_drawn=not both_have_phases)]
        together = _differences_together(saved.all_streams, SavedStreams.of(self._described))
        changes = stream_changes(listed, self._facts()) if together and listed is not None else []
        return [*found, *(changes or together)]

    def _differences_of_streams(
        self, saved: SavedFingerprint, listed: StreamList | None, *, are_drawn: bool
    ) -> Iterator[Difference]:
        """Yield the differences of streams that a state describes individually.

        Args:
            saved: The saved fingerprint.
            listed: The list of streams beside it.
            are_drawn: Whether all streams are drawn from; with phases only those matter that both sides have, and
                neither their place, nor how much of them was read.
        """
        then, now = saved.streams, self._described_as(saved.streams)
        if not are_drawn:
            then = {name: one for name, one in then.items() if name in now}
            now = {name: now[name] for name in then}
        before = {name: _compared(one, now.get(name), are_drawn) for name, one in then.items()}
        after = {name: _compared(one, then.get(name), are_drawn) for name, one in now.items()}
        for one in differences({"streams": before}, {"streams": after}):
            yield from self._with_hashes(one, saved.streams, listed)

    def _described_as(self, saved: Mapping[str, SavedStream]) -> dict[str, SavedStream]:
        """Return the description of each stream; joined datasets that have only grown are as they were saved."""
        return {
            name: replace(one, join=_joins_of(self._catalog, self._stream_of[name], saved.get(name)))
            for name, one in self._described.items()
        }

    def _facts(self) -> dict[str, StreamFacts]:
        return {name: self._facts_of(name) for name in self._described}

    def _facts_of(self, name: str) -> StreamFacts:
        one, table = self._described[name], self._catalog.indexes[self._stream_of[name]].shards
        return StreamFacts(
            outline=f"{one.shards} {one.samples_drawn} {table.outline()}{one.outline()}",
            hashes=table.hash_names(),
            samples=one.samples,
        )

    def _with_hashes(
        self, one: Difference, saved: Mapping[str, SavedStream], listed: StreamList | None
    ) -> Iterator[Difference]:
        """Yield a difference; if it is one of digests, also whether other hashes in the index explain it."""
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
            then, is_alike = listed.hashes_of(saved[name].index, facts)
            alike = then if is_alike else None
        if alike is None:
            yield one
        if then is not None:
            yield Difference(f"streams.{name}.hashes", _in_short(then), _in_short(facts.hashes))


def told_mix(phase: ResolvedPhase) -> str:
    """Return the weights of a phase in one line, without names if there are many streams."""
    told = ", ".join(
        f"{name} {begin!r}" + ("" if begin == end else f" to {end!r}")
        for (name, begin), (_, end) in zip(phase.begin, phase.end, strict=True)
    )
    if len(told) <= _LONGEST_MIX:
        return told
    return f"of {len(phase.begin)} streams, {digest_of(phase.begin, phase.end)}"


def _saved_order(settings: OrderSettings, epoch_size: int) -> SavedOrder:
    return SavedOrder(
        epoch_size=epoch_size,
        shuffle=settings.shuffle,
        shuffle_algo=settings.shuffle_algo if settings.shuffle else None,
        shuffle_block_size=settings.shuffle_block_size if settings.shuffle else None,
        sampling_method=settings.sampling_method,
        sampling_granularity=settings.sampling_granularity,
        batching_method=settings.batching_method,
    )


def _saved_schedule(plan: MixtureSchedule, phases_begun: int) -> dict[str, SavedPhase]:
    """Return the phases that have begun; where the last of them ends is still open."""
    return {
        phase.name: SavedPhase(
            end=plan.planned_stops[number],
            mix=told_mix(phase),
            steps=phase.steps,
            ended_at=None if number == phases_begun - 1 else phase.cut,
        )
        for number, phase in enumerate(plan.phases[:phases_begun])
    }


def _description(
    catalog: CatalogView, stream: int, index: int, drawn: int, grown: tuple[tuple[int, int], ...] = ()
) -> SavedStream:
    """Return the description of a stream in a state."""
    return SavedStream(
        index=index,
        samples=catalog.samples_per_stream[stream],
        shards=catalog.shards_per_stream[stream],
        samples_drawn=drawn,
        digest=catalog.indexes[stream].data_digest,
        selection=_selection_of(catalog, stream),
        join=_joins_of(catalog, stream),
        lengths=_lengths_of(catalog, stream),
        grown=grown,
    )


def _selection_of(catalog: CatalogView, stream: int) -> str | None:
    """Return a digest of what is selected of a stream; None if all of it is."""
    selection = catalog.selections[stream]
    return None if selection is None or len(selection) == selection.num_stored else selection.digest


def _joins_of(catalog: CatalogView, stream: int, saved: SavedStream | None = None) -> dict[str, SavedJoin]:
    """Return the description of the datasets that are joined with a stream in a state.

    Args:
        catalog: The data.
        stream: Which stream, by its place.
        saved: What a state said of the stream before. Joined datasets that have only become longer since are described
            as they were then: what belongs to the samples that they had is the same.
    """
    joins = None if catalog.joins is None else catalog.joins.streams.get(stream)
    if joins is None:
        return {}
    known = {} if saved is None else saved.join
    return {
        one.name: known[one.name] if one.name in known and one.began_as(known[one.name]) else one.facts()
        for one in joins.all
    }


def _lengths_of(catalog: CatalogView, stream: int) -> str | None:
    """Return a digest of the lengths of a stream's documents, where documents are packed."""
    if catalog.lengths is None:
        return None
    return catalog.lengths.streams[stream].digest_of_first(catalog.indexes[stream].num_samples)


def _compared(one: SavedStream, other: SavedStream | None, are_drawn: bool) -> dict[str, Any]:
    """Return the parts of a description that are compared with another: lengths of documents only if both have them.

    Without ``are_drawn`` its number, the samples drawn, which follow from the phases, and its truncated passes, which
    are taken over, do not matter.
    """
    no_lengths = other is None or other.lengths is None
    state = replace(one, lengths=None if no_lengths else one.lengths).as_state()
    return {key: state[key] for key in state if are_drawn or key not in ("index", "samples_drawn", "grown")}


def _differences_together(saved: SavedStreams, now: SavedStreams) -> list[Difference]:
    """Compare descriptions of all streams; lengths of documents only if both have them."""
    if saved.lengths is None or now.lengths is None:
        saved, now = replace(saved, lengths=None), replace(now, lengths=None)
    return differences({"all_streams": saved.as_state()}, {"all_streams": now.as_state()})


def _in_short(hashes: tuple[str, ...]) -> str:
    """Return names of hashes as a message shows them.

    >>> _in_short(()), _in_short(("md5", "sha1"))
    ('none', 'md5, sha1')
    """
    return ", ".join(hashes) or "none"


def is_same_data(saved: SavedStream, catalog: CatalogView, stream: int) -> bool:
    """Return whether a stream's data is that of a saved fingerprint, regardless of its location and the samples drawn.

    Lengths of documents are not compared: if only they differ, that is the difference to report.
    """
    now = replace(_description(catalog, stream, 0, 0), join=_joins_of(catalog, stream, saved))
    return _compared(saved, None, are_drawn=False) == _compared(now, None, are_drawn=False)


def refusal(found: Sequence[Difference], saved: SavedFingerprint | None = None, of_phases: str = "") -> str:
    """Return the message for a saved position that is refused for these differences, with the fix.

    Args:
        found: What differs.
        saved: The saved fingerprint.
        of_phases: What to say of phases that differ, each sentence with a space before it.
    """
    found, of_phases = escaped(found), in_one_line(of_phases)
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
    if any(one.setting.endswith(".lengths") and one.setting.startswith(("streams.", "all_streams")) for one in found):
        way_out += (
            " Packs follow from the lengths of documents. What says them (lengths= or the transform's tokenizer) "
            "returns other lengths of its documents than before: put it back, or start a new epoch with the other "
            'lengths: `lightning-streaming state set CKPT --epoch N --sample 0`, then resume with on_mismatch="warn".'
        )
    if not hashes and saved is not None and saved.all_streams is not None:
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
