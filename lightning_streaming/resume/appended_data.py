"""Streams that have grown since a position was saved: which of their shards are read, and for how long.

An epoch that has started keeps the shards that it started with. Later epochs read the same shards, or, if a stream is
followed, all that existed when the run was resumed. With a schedule the same holds for the passes over a stream, which
continue over phases and epochs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_streaming.resume.fingerprint import is_same_data
from lightning_streaming.resume.saved_fingerprint import SavedFingerprint, SavedStream
from lightning_streaming.selection.catalog import Catalog

_MOST_STREAMS = 5
"""Streams that a message tells one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The shards that are read of streams that have grown, by number of the stream."""

    shards: tuple[tuple[int, int], ...] = ()
    """Each stream that has grown, and how many of its shards are read."""
    last_epoch: int = -1
    """The last epoch that reads no more of a stream that is followed."""
    followed: tuple[int, ...] = ()
    """The streams of which later epochs read all shards."""
    passes: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """With phases: streams whose first passes do not read all shards. For each time that one has grown: samples of its
    passes up to where they read less, and the shards that they read."""

    def shards_in(self, epoch: int) -> dict[int, int]:
        """Return the number of shards that an epoch reads of streams that it does not read completely."""
        return {
            stream: count for stream, count in self.shards if epoch <= self.last_epoch or stream not in self.followed
        }

    def in_passes(self, beginnings: Mapping[int, int]) -> Growth:
        """Return the growth of a run with a schedule.

        Args:
            beginnings: Of each stream that is followed, where its first pass begins that has not begun yet: samples
                of its passes before.
        """
        left = dict(self.shards)
        passes = dict(self.passes)
        for stream, beginning in beginnings.items():
            count, before = left.pop(stream), passes.get(stream, ())
            if beginning > (before[-1][0] if before else 0):
                passes[stream] = (*before, (beginning, count))
        return replace(self, shards=tuple(left.items()), followed=(), passes=tuple(passes.items()))

    def notes(self, catalog: Catalog, *, has_phases: bool) -> Iterator[str]:
        """Yield lines for the user: what is not read, and until when."""
        told = [self._told(catalog, stream, count, has_phases) for stream, count in self.shards[:_MOST_STREAMS]]
        more = len(self.shards) - len(told)
        if told:
            others = [f"{more} more streams have grown, too"] if more else []
            yield f"data was appended: {'; '.join([*told, *others])}"

    def _told(self, catalog: Catalog, stream: int, count: int, has_phases: bool) -> str:
        sizes = catalog.shard_sizes_per_stream[stream]
        name, left = catalog.stream_names[stream], len(sizes) - count
        what = (
            f"stream {name!r} has {left} more shard{'s' if left > 1 else ''}, of {int(sizes[count:].sum())} samples, "
        )
        if stream not in self.followed:
            part = "pass over the stream" if has_phases else "epoch"
            return f"{what}left out from now on (follow_appends=True reads them from the next {part} on)"
        if has_phases:
            return f"{what}read from the next pass over the stream on"
        return f"{what}left out before epoch {self.last_epoch + 1}, and read from then on"


NO_GROWTH = Growth()


def growth_since(
    fingerprint: SavedFingerprint | None, place: tuple[int, int], catalog: Catalog, followed: Collection[int]
) -> Growth:
    """Return which streams have more shards than a saved position, if their earlier shards are the same.

    Args:
        fingerprint: What was saved with it, if anything was.
        place: Its epoch, and its position in that epoch.
        catalog: The data as it is now.
        followed: Streams, by place, of which later epochs are to read all shards.
    """
    saved = {} if fingerprint is None else fingerprint.streams  # empty where it does not describe each
    grown, passes = {}, {}
    for stream, name in enumerate(catalog.stream_names):
        then, most = saved.get(name), catalog.shards_per_stream[stream]
        if then is None or not 0 < then.shards <= most or not (then.shards < most or then.grown):
            continue
        if _began_as(then, catalog, stream):
            if then.shards < most:
                grown[stream] = then.shards
            if then.grown:
                passes[stream] = then.grown
    if not grown and not passes:
        return NO_GROWTH
    epoch, position = place
    return Growth(
        shards=tuple(grown.items()),
        # An epoch of which nothing has been read has not begun.
        last_epoch=epoch if position else epoch - 1,
        followed=tuple(stream for stream in grown if stream in followed),
        passes=tuple(passes.items()),
    )


def _began_as(saved: SavedStream, catalog: Catalog, stream: int) -> bool:
    """Return whether the first shards of a stream, and what is selected of them, are what was saved."""
    count = saved.shards
    selection = catalog.selections[stream]
    stored = int(catalog.indexes[stream].samples_per_shard()[:count].sum())
    if not stored or (selection is not None and not int(catalog.shard_sizes_per_stream[stream][:count].sum())):
        return False
    return is_same_data(saved, catalog.head({stream: count}), stream)
