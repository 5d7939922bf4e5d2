"""Streams that have grown since a position was saved: the shards that are read of them, and up to which epoch.

An epoch that has started keeps the shards that it started with. Later epochs read the same shards, or, if a stream is
followed, all that existed when the run was resumed. With a schedule the same holds for the passes over a stream, which
continue over all epochs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_streaming.resume.fingerprint import is_same_data
from lightning_streaming.resume.saved_fingerprint import SavedFingerprint
from lightning_streaming.selection.catalog import Catalog

_MOST_STREAMS = 5
"""Streams that a message lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The shards that are read of streams that have grown; streams are given by number."""

    shards: tuple[tuple[int, int], ...] = ()
    """Each stream that has grown, and the number of its shards that are read."""
    last_epoch: int = -1
    """The last epoch that does not read appended data."""
    followed: tuple[int, ...] = ()
    """The streams of which later epochs read all shards."""
    passes: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """With a schedule: streams whose first passes do not read all shards. For each time that a stream has grown:
    samples of its passes up to which they read fewer shards, and the number of these shards."""

    def shards_in(self, epoch: int) -> dict[int, int]:
        """Return the number of shards that an epoch reads of streams that it does not read completely."""
        return {
            stream: count for stream, count in self.shards if epoch <= self.last_epoch or stream not in self.followed
        }

    def in_passes(self, beginnings: Mapping[int, int]) -> Growth:
        """Return the growth of a run with a schedule.

        Args:
            beginnings: The beginning of the next pass of each stream that is followed, in samples of its passes.
        """
        shards, passes = dict(self.shards), dict(self.passes)
        for stream, beginning in beginnings.items():
            count, before = shards.pop(stream), passes.get(stream, ())
            if beginning > (before[-1][0] if before else 0):
                passes[stream] = (*before, (beginning, count))
        return replace(self, shards=tuple(shards.items()), followed=(), passes=tuple(passes.items()))

    def notes(self, catalog: Catalog, *, has_schedule: bool) -> Iterator[str]:
        """Yield a line for the user: the appended data that is not read, and until when."""
        part = "pass over the stream" if has_schedule else "epoch"
        notes = []
        for stream, count in self.shards[:_MOST_STREAMS]:
            sizes = catalog.shard_sizes_per_stream[stream]
            more = len(sizes) - count
            if stream not in self.followed:
                fate = f"left out from now on (follow_appends=True reads them from the next {part} on)"
            elif has_schedule:
                fate = f"read from the next {part} on"
            else:
                fate = f"left out before epoch {self.last_epoch + 1}, and read from then on"
            shards = f"{more} more shard{'s' if more > 1 else ''}, of {int(sizes[count:].sum())} samples"
            notes.append(f"stream {catalog.stream_names[stream]!r} has {shards}, {fate}")
        if len(self.shards) > len(notes):
            notes.append(f"{len(self.shards) - len(notes)} more streams have grown, too")
        if notes:
            yield f"data was appended: {'; '.join(notes)}"


NO_GROWTH = Growth()


def growth_since(
    fingerprint: SavedFingerprint | None, cursor: tuple[int, int], catalog: Catalog, followed: Collection[int]
) -> Growth:
    """Return which streams have more shards than a saved position, if their earlier shards are the same.

    Args:
        fingerprint: The fingerprint of the saved position, if it has one.
        cursor: The saved epoch, and position in that epoch.
        catalog: The current data.
        followed: Streams, by number, of which later epochs read all shards.
    """
    saved = {} if fingerprint is None else fingerprint.streams  # empty where it does not describe each
    grown, passes = {}, {}
    for stream, name in enumerate(catalog.stream_names):
        then, most = saved.get(name), catalog.shards_per_stream[stream]
        if then is None or not 0 < then.shards <= most or not (then.shards < most or then.grown):
            continue
        # Its first shards, and what is selected of them, must be those that were saved.
        stored = catalog.indexes[stream].samples_per_shard()[: then.shards].sum()
        selected = catalog.shard_sizes_per_stream[stream][: then.shards].any() or catalog.selections[stream] is None
        if stored and selected and is_same_data(then, catalog.head({stream: then.shards}), stream):
            if then.shards < most:
                grown[stream] = then.shards
            if then.grown:
                passes[stream] = then.grown
    if not grown and not passes:
        return NO_GROWTH
    epoch, position = cursor
    return Growth(
        shards=tuple(grown.items()),
        # An epoch of which no sample was read has not begun.
        last_epoch=epoch if position else epoch - 1,
        followed=tuple(stream for stream in grown if stream in followed),
        passes=tuple(passes.items()),
    )
