"""The saved position: a small dict of plain values, the same on every rank.

    {"version": 1, "epoch": 3, "sample_in_epoch": 51200, "shuffle_seed": 9176, "num_canonical_nodes": 2,
     "initial_physical_nodes": 2, "fingerprint": {...}}

Within an epoch whose batches are composed, "batch_geometry" also says for which nodes, ranks and batch size. Where
batches are skipped, "skipped" says which samples these are, as {"12000-12100": [epoch, sample, epoch, sample]}: from
the first place up to the second. "streams" helps to say what has changed of many streams; nothing depends on it. All
loads with ``torch.load(..., weights_only=True)``. The four or five keys that MosaicML Streaming writes are accepted
too; such a state carries no fingerprint, so it cannot be checked against the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.fingerprint import is_listed, read_fingerprint
from lightning_streaming.loading.state_fields import MOST_EPOCHS, MOST_NODES, Fields, shown
from lightning_streaming.loading.stream_list import StreamList, read_stream_list
from lightning_streaming.order.batch_ranges import parse_ranges
from lightning_streaming.order.gaps import Stretch
from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.order.settings import LARGEST_SEED, MOST_CANONICAL_NODES

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPosition:
    """A state that has been read and found sound."""

    cursor: Cursor
    shuffle_seed: int
    num_canonical_nodes: int
    initial_physical_nodes: int | None
    geometry: BatchGeometry | None
    """What the batches of the epoch are made for, where they are composed."""
    fingerprint: Mapping[str, Any] | None
    skipped: Mapping[str, Stretch] = field(default_factory=dict)
    """Where the samples of skipped ranges of batches are, by how the range is written."""
    streams: StreamList | None = None
    """What helps to say which stream has changed, where the fingerprint alone would not."""

    def as_state(self) -> dict[str, Any]:
        """The dict that :func:`read_state` turns back into this value."""
        return {
            "version": STATE_VERSION,
            "epoch": self.cursor.epoch,
            "sample_in_epoch": self.cursor.sample_in_epoch,
            "shuffle_seed": self.shuffle_seed,
            "num_canonical_nodes": self.num_canonical_nodes,
            "initial_physical_nodes": self.initial_physical_nodes,
            **({} if self.geometry is None else {"batch_geometry": asdict(self.geometry)}),
            **(
                {"skipped": {name: [*start, *stop] for name, (start, stop) in self.skipped.items()}}
                if self.skipped
                else {}
            ),
            "fingerprint": self.fingerprint,
            **({} if self.streams is None else {"streams": self.streams.as_state()}),
        }


def read_state(state: object, of: str = "a saved position") -> SavedPosition:
    """Read a saved state, ours or one of MosaicML Streaming; all of it, so that whoever loads it can do so whole.

    Args:
        state: What was saved.
        of: What messages call it.

    Raises:
        StateError: It is not a state, lacks a key, was written by a version that is not known here, or one of its
            values cannot be; the message names the field.
    """
    fields = Fields(state, of)
    is_ours = "version" in fields
    if is_ours:
        _check_version(fields)
    # MosaicML Streaming calls the time before the first epoch "epoch -1".
    epoch = fields.whole_number("epoch", least=0 if is_ours else -1, most=MOST_EPOCHS)
    sample_in_epoch = fields.whole_number("sample_in_epoch")
    has_fingerprint = (is_ours or "fingerprint" in fields) and not fields.is_none("fingerprint")
    position = SavedPosition(
        cursor=Cursor(epoch, sample_in_epoch) if epoch >= 0 else Cursor(0, 0),
        shuffle_seed=fields.whole_number("shuffle_seed", most=LARGEST_SEED),
        num_canonical_nodes=fields.whole_number("num_canonical_nodes", least=1, most=MOST_CANONICAL_NODES),
        initial_physical_nodes=_initial_nodes(fields, is_ours),
        geometry=_geometry(fields.fields("batch_geometry")) if _has(fields, "batch_geometry") else None,
        fingerprint=read_fingerprint(fields.fields("fingerprint")) if has_fingerprint else None,
        skipped=_skipped(fields.fields("skipped")) if "skipped" in fields else {},
        streams=read_stream_list(fields.fields("streams")) if _has(fields, "streams") else None,
    )
    _check_sizes(fields, position)
    return position


def _check_version(fields: Fields) -> None:
    version = fields.get("version")
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"{fields.of} has version {shown(version)} and this release reads version {STATE_VERSION}; "
            "resume with the release that wrote it, or a newer one"
        )


def _has(fields: Fields, key: str) -> bool:
    return key in fields and not fields.is_none(key)


def _initial_nodes(fields: Fields, is_ours: bool) -> int | None:
    """Those that the run began with; states of MosaicML Streaming 0.2, as they were or imported, do not tell."""
    if (not is_ours and "initial_physical_nodes" not in fields) or fields.is_none("initial_physical_nodes"):
        return None
    return fields.whole_number("initial_physical_nodes", least=1, most=MOST_NODES)


def _geometry(fields: Fields) -> BatchGeometry:
    return BatchGeometry(
        num_nodes=fields.whole_number("num_nodes", least=1, most=MOST_NODES),
        ranks_per_node=fields.whole_number("ranks_per_node", least=1, most=MOST_NODES),
        batch_size=fields.whole_number("batch_size", least=1),
    )


def _skipped(fields: Fields) -> dict[str, Stretch]:
    read: dict[str, Stretch] = {}
    batches = 0
    for name in fields:
        try:
            (asked,) = parse_ranges([name], "skipped")
        except ConfigError as error:
            raise fields.contradicts(f"a range of batches is written like '12-20', but one is {shown(name)}") from error
        batches += len(asked)
        first, start, last, stop = fields.whole_numbers(name, 4)
        read[name] = (first, start), (last, stop)
    for name, (begin, end) in read.items():
        # Each epoch that a stretch goes through has at least one batch, of this range or of another.
        if end < begin or end[0] - begin[0] > batches:
            raise fields.wrong(name, f"a stretch of {batches} batches at most, from a place to a later one")
    return read


def _check_sizes(fields: Fields, position: SavedPosition) -> None:
    """Hold what counts samples of an epoch against the size that the fingerprint tells."""
    if position.fingerprint is None:
        return
    size = position.fingerprint["order"]["epoch_size"]
    geometry, most = position.geometry, size + MOST_CANONICAL_NODES + MOST_NODES
    if geometry is not None and geometry.global_batch_size > _most_composed(position, geometry, size):
        raise fields.contradicts(
            f"'batch_geometry' has batches of {geometry.global_batch_size} samples, of an epoch of {size}"
        )
    for name, (begin, end) in position.skipped.items():
        if max(begin[1], end[1]) > most:
            raise fields.contradicts(f"'skipped' has {name!r} at sample {max(begin[1], end[1])} of an epoch of {size}")


def _most_composed(position: SavedPosition, geometry: BatchGeometry, size: int) -> int:
    """Entries of an epoch of composed batches at most: each stream repeats some, even for canonical nodes and ranks."""
    assert position.fingerprint is not None, "looked at by the caller"
    streams = position.fingerprint["streams"]
    num_streams = len(streams) if is_listed(streams) else size  # each draws a sample at least
    return size + num_streams * (position.num_canonical_nodes + geometry.num_ranks)
