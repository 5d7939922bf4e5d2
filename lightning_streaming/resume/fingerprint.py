"""The fingerprint of a saved position: its data and the settings of its order.

A state describes each stream if there are few. Otherwise one digest covers all of them, and the list of streams next to
the fingerprint helps to report which of them has changed.

With packing each stream has "lengths", a digest of the lengths of its documents, as far as the position reads the
stream. Packs follow from them, and neither the data nor the name of a function determines them. Earlier states have
none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.options.mixing import MixingConfig
from lightning_streaming.resume.mismatch import (
    Difference,
    StreamFacts,
    StreamList,
    differences,
    list_streams,
    stream_changes,
)
from lightning_streaming.resume.saved_fingerprint import (
    SavedFingerprint,
    SavedJoin,
    SavedOrder,
    SavedPacking,
    SavedPhase,
    SavedStream,
    SavedStreams,
)
from lightning_streaming.selection.catalog import CatalogView
from lightning_streaming.selection.joins import JoinedDataset
from lightning_streaming.sequence.base import digest_of
from lightning_streaming.sequence.phases import MixtureSchedule, ResolvedPhase, WeightChange
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import ResolvedWeights

_LONGEST_LIST = 3072
"""Characters up to which a state describes its streams, so that it stays below 4 KB, except for runs with phases."""
_LONGEST_MIX = 200
"""Characters up to which the mix of a phase is described by names of streams."""


class Fingerprint:
    """The facts that a position depends on, apart from the seed and the canonical nodes, which the state has itself.

    Only phases that have begun count, and the streams that they read: later ones may change.

    Args:
        catalog: The data, as far as it is read.
        settings: The order settings, resolved.
        weights: The streams' shares of an epoch.
        plan: The phases of an epoch, if there is a schedule.
        phases_begun: The number of phases that have begun.
        grown: Streams, by number, whose first passes read fewer shards: the samples of the passes up to which they do,
            and how many shards these are.
        packing: How documents are packed, if they are.
        sequence: The facts of each of the user's steps.
        mixing: The unit and the limits of weights, if there are such options.
        weights_set: Weights that the run has set.
    """

    saved: SavedFingerprint
    """The fingerprint as a state holds it."""
    stream_list: StreamList | None
    """The list of streams that a state holds next to it, if there is room; used for reports only."""

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
        mixing: MixingConfig | None = None,
        weights_set: tuple[WeightChange, ...] = (),
    ) -> None:
        self._catalog = catalog
        numbers = self._numbers = {name: stream for stream, name in enumerate(catalog.stream_names)}
        drawn = dict(zip(catalog.stream_names, weights.choose, strict=True))
        if plan is not None:
            drawn = plan.drawn_by(phases_begun - 1) if phases_begun else {}
        self._described = {
            name: _description(catalog, numbers[name], index, samples, grown.get(numbers[name], ()))
            for index, (name, samples) in enumerate(drawn.items())
            if name in numbers
        }
        length = len(json.dumps({name: stream.as_state() for name, stream in self._described.items()}))
        is_listed = plan is not None or length <= _LONGEST_LIST
        all_streams = None if is_listed else SavedStreams.of(self._described)
        self.saved = SavedFingerprint(
            order=SavedOrder(
                epoch_size=weights.epoch_size,
                shuffle=settings.shuffle,
                shuffle_algo=settings.shuffle_algo if settings.shuffle else None,
                shuffle_block_size=settings.shuffle_block_size if settings.shuffle else None,
                sampling_method=settings.sampling_method,
                sampling_granularity=settings.sampling_granularity,
                batching_method=settings.batching_method,
            ),
            packing=packing,
            sequence=sequence,
            mixing=_saved_mixing(mixing, drawn),
            weights_set=weights_set,
            schedule=None
            if plan is None
            else {
                phase.name: SavedPhase(
                    end=plan.planned_stops[number],
                    mix=format_mix(phase),
                    steps=phase.steps,
                    ended_at=None if number == phases_begun - 1 else phase.cut,  # the last one's end is still open
                )
                for number, phase in enumerate(plan.phases[:phases_begun])
            },
            streams=self._described if is_listed else {},
            all_streams=all_streams,
        )
        room = _LONGEST_LIST - (length if all_streams is None else len(json.dumps(all_streams.as_state())))
        self.stream_list = list_streams(self._facts, room, with_names=not is_listed)

    def saved_with(self, missing: Mapping[str, SavedStream]) -> SavedFingerprint:
        """Return the saved fingerprint with streams that are missing now, so that they may be added again."""
        after = enumerate(missing.items(), len(self._described))
        more = {name: replace(stream, index=index) for index, (name, stream) in after}
        return replace(self.saved, streams={**self.saved.streams, **more}) if missing else self.saved

    def differences(self, saved: SavedFingerprint, listed: StreamList | None) -> list[Difference]:
        """Return each difference between a saved fingerprint and this one.

        Args:
            saved: The saved fingerprint.
            listed: The list of streams next to it.
        """
        then, now = saved.settings(), self.saved.settings()
        both_have_phases = saved.schedule is not None and self.saved.schedule is not None
        if both_have_phases:  # where the epoch ends does not matter
            then, now = ({**of, "order": {**of["order"], "epoch_size": None}} for of in (then, now))
        changes = differences(then, now)
        if any(change.setting.startswith("schedule") for change in changes):
            return changes  # the streams that were read, and how much of them, follow from the schedule
        if both_have_phases or saved.all_streams is None:
            return [*changes, *self._changes_of_each(saved, listed, are_drawn=not both_have_phases)]
        all_then, all_now = saved.all_streams, SavedStreams.of(self._described)
        if all_then.lengths is None or all_now.lengths is None:  # compared only if both have them
            all_then, all_now = replace(all_then, lengths=None), replace(all_now, lengths=None)
        of_all = differences({"all_streams": all_then.as_state()}, {"all_streams": all_now.as_state()})
        of_each = stream_changes(listed, self._facts) if of_all and listed is not None else []
        return [*changes, *(of_each or of_all)]

    def _changes_of_each(
        self, saved: SavedFingerprint, listed: StreamList | None, *, are_drawn: bool
    ) -> Iterator[Difference]:
        """Yield the differences of streams that a state describes individually.

        Args:
            saved: The saved fingerprint.
            listed: The list of streams next to it.
            are_drawn: All streams are drawn from. With phases only streams that both sides have are compared, and
                neither their indexes, nor how much of them was read.
        """
        then = saved.streams
        now = {  # joined datasets that have only grown are as they were saved
            name: replace(stream, join=_joins_of(self._catalog, self._numbers[name], then.get(name)))
            for name, stream in self._described.items()
        }
        if not are_drawn:
            then = {name: stream for name, stream in then.items() if name in now}
            now = {name: now[name] for name in then}
        before = {name: _compared(stream, now.get(name), are_drawn) for name, stream in then.items()}
        after = {name: _compared(stream, then.get(name), are_drawn) for name, stream in now.items()}
        for change in differences({"streams": before}, {"streams": after}):
            name = change.setting.removeprefix("streams.").removesuffix(".digest")
            if change.setting.endswith(".digest") and name in self._numbers:
                yield from self._with_hashes(change, name, saved.streams[name].index, listed)
            else:
                yield change

    def _with_hashes(
        self, change: Difference, name: str, index: int, listed: StreamList | None
    ) -> Iterator[Difference]:
        """Yield the change of a stream's digest, and whether other hashes in the index explain it.

        Args:
            change: The change.
            name: The stream.
            index: The saved index of the stream.
            listed: The list of streams next to the saved fingerprint.
        """
        table, facts = self._catalog.indexes[self._numbers[name]].shards, self._facts[name]
        # The saved digest may be of today's data with fewer hashes, or with others, which the list of streams shows.
        fewer = [kinds for kinds in ((), *((kind,) for kind in facts.hashes)) if kinds != facts.hashes]
        alike = next((kinds for kinds in fewer if change.saved == repr(table.digest(kinds))), None)
        then = alike
        if then is None and listed is not None:
            then, is_alike = listed.hashes_of(index, facts)
            alike = then if is_alike else None
        if alike is None:
            yield change
        if then is not None:
            shown = (", ".join(hashes) or "none" for hashes in (then, facts.hashes))
            yield Difference(f"streams.{name}.hashes", *shown)

    @cached_property
    def _facts(self) -> dict[str, StreamFacts]:
        facts = {}
        for name, stream in self._described.items():
            table = self._catalog.indexes[self._numbers[name]].shards
            outline = f"{stream.shards} {stream.samples_drawn} {table.outline()}{stream.outline()}"
            facts[name] = StreamFacts(outline=outline, hashes=table.hash_names(), samples=stream.samples)
        return facts


def _saved_mixing(mixing: MixingConfig | None, drawn: Collection[str]) -> dict[str, Any]:
    """Return the options of a mixture that determine what was read, without limits of streams that were not."""
    if mixing is None:
        return {}
    lengths = mixing.request()
    limits = {name: repr(float(mixing.max_repeats[name])) for name in sorted(mixing.max_repeats) if name in drawn}
    return {
        **({"weights_in": mixing.weights_in} if mixing.in_tokens else {}),
        **({} if lengths is None else {"lengths": lengths.in_words()}),
        **({} if mixing.longest_step is None else {"longest_step": mixing.longest_step}),
        **({"max_repeats": limits} if limits and mixing.beyond == "redistribute" else {}),
    }


def format_mix(phase: ResolvedPhase) -> str:
    """Return the weights of a phase in one line, without names if there are many streams."""
    mix = ", ".join(
        f"{name} {begin!r}" + ("" if begin == end else f" to {end!r}")
        for (name, begin), (_, end) in zip(phase.begin, phase.end, strict=True)
    )
    if len(mix) <= _LONGEST_MIX:
        return mix
    return f"of {len(phase.begin)} streams, {digest_of(phase.begin, phase.end)}"


def is_same_data(saved: SavedStream, catalog: CatalogView, stream: int) -> bool:
    """Return whether a stream's data is that of a saved fingerprint, regardless of its location and the samples drawn.

    Lengths of documents are not compared: if only they differ, that is the difference to report.
    """
    now = replace(_description(catalog, stream, 0, 0), join=_joins_of(catalog, stream, saved))
    return _compared(saved, None, are_drawn=False) == _compared(now, None, are_drawn=False)


def _description(
    catalog: CatalogView, stream: int, index: int, drawn: int, grown: tuple[tuple[int, int], ...] = ()
) -> SavedStream:
    """Return the description of a stream in a state."""
    selection, lengths = catalog.selections[stream], catalog.lengths
    is_whole = selection is None or len(selection) == selection.num_stored
    return SavedStream(
        index=index,
        samples=catalog.samples_per_stream[stream],
        shards=catalog.shards_per_stream[stream],
        samples_drawn=drawn,
        digest=catalog.indexes[stream].data_digest,
        selection=None if selection is None or is_whole else selection.digest,
        join=_joins_of(catalog, stream),
        lengths=None
        if lengths is None
        else lengths.streams[stream].digest_of_first(catalog.indexes[stream].num_samples),
        grown=grown,
    )


def _joins_of(catalog: CatalogView, stream: int, saved: SavedStream | None = None) -> dict[str, SavedJoin]:
    """Return the description of the datasets that are joined with a stream in a state.

    Args:
        catalog: The data.
        stream: The number of the stream.
        saved: An earlier description of the stream. Joined datasets that have only grown since are described as they
            were then: the values that belong to the samples are the same.
    """
    joins = None if catalog.joins is None else catalog.joins.streams.get(stream)
    if joins is None:
        return {}
    known = {} if saved is None else saved.join
    return {
        join.name: known[join.name]
        if join.name in known and _began_as(join, known[join.name])
        else _saved_join(join, join.index)
        for join in joins.all
    }


def _saved_join(joined: JoinedDataset, index: DatasetIndex) -> SavedJoin:
    return SavedJoin(samples=index.num_samples, digest=index.data_digest, key=joined.config.key)


def _began_as(joined: JoinedDataset, saved: SavedJoin) -> bool:
    """Return whether a joined dataset is the saved one, or has only grown since."""
    counted = np.cumsum(joined.index.samples_per_shard())
    # Empty shards may follow; the state does not hold how many there were.
    ends = {int(np.searchsorted(counted, saved.samples, side)) + (side == "left") for side in ("left", "right")}
    heads = (joined.index.head(shards) for shards in ends if 0 < shards <= len(counted))
    return any(saved == _saved_join(joined, head) for head in heads)


def _compared(stream: SavedStream, other: SavedStream | None, are_drawn: bool) -> dict[str, Any]:
    """Return the parts of a description that are compared with another: lengths of documents only if both have them.

    Without ``are_drawn`` neither the index, nor the samples drawn, which follow from the phases, nor the truncated
    passes, which are taken over, matter.
    """
    no_lengths = other is None or other.lengths is None
    state = replace(stream, lengths=None if no_lengths else stream.lengths).as_state()
    return {key: state[key] for key in state if are_drawn or key not in ("index", "samples_drawn", "grown")}
