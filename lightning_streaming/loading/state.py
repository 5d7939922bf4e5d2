"""The saved position: a small dict of plain values, the same on every rank.

    {"version": 1, "epoch": 3, "sample_in_epoch": 51200, "shuffle_seed": 9176, "num_canonical_nodes": 2,
     "initial_physical_nodes": 2, "fingerprint": {...}}

Within an epoch whose batches are composed, "batch_geometry" also says for which nodes, ranks and batch size. Where
batches are skipped, "skipped" says which samples these are, as {"12000-12100": [epoch, sample, epoch, sample]}: from
the first place up to the second. All loads with
``torch.load(..., weights_only=True)``. The four or five keys that MosaicML Streaming writes are accepted too; such a
state carries no fingerprint, so it cannot be checked against the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_streaming.errors import StateError
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.order.gaps import Stretch
from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.weights import ResolvedWeights

STATE_VERSION = 1
_LONGEST_LIST = 3072
"""Characters up to which a fingerprint describes each stream; beyond, one digest covers them all, so that the state
stays small."""
_MOST = 2**63 - 1
"""The largest number that training processes and their workers can tell each other."""


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
        }


def read_state(state: Mapping[str, Any]) -> SavedPosition:
    """Read a saved state, ours or one of MosaicML Streaming.

    Raises:
        StateError: It is not a state, lacks a key, or was written by a version that is not known here.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a saved position is a dict, but got {type(state).__name__}")
    version = state.get("version", STATE_VERSION)
    if version != STATE_VERSION:
        raise StateError(
            f"this saved position has version {version!r} and this release reads version {STATE_VERSION}; "
            "resume with the release that wrote it, or a newer one"
        )
    epoch = _whole_number(state, "epoch", least=-1)
    sample_in_epoch = _whole_number(state, "sample_in_epoch", least=0)
    initial_nodes = state.get("initial_physical_nodes")
    saved_fingerprint = state.get("fingerprint")
    if not isinstance(saved_fingerprint, Mapping | None):
        raise StateError(f"'fingerprint' of a saved position is a dict, but got {type(saved_fingerprint).__name__}")
    return SavedPosition(
        # MosaicML Streaming calls the time before the first epoch "epoch -1".
        cursor=Cursor(epoch, sample_in_epoch) if epoch >= 0 else Cursor(0, 0),
        shuffle_seed=_whole_number(state, "shuffle_seed", least=0),
        num_canonical_nodes=_whole_number(state, "num_canonical_nodes", least=1),
        initial_physical_nodes=None
        if initial_nodes is None
        else _whole_number(state, "initial_physical_nodes", least=1),
        geometry=_geometry(state.get("batch_geometry")),
        fingerprint=saved_fingerprint,
        skipped=_skipped(state.get("skipped", {})),
    )


def _geometry(saved: object) -> BatchGeometry | None:
    if saved is None:
        return None
    if not isinstance(saved, Mapping):
        raise StateError(f"'batch_geometry' of a saved position is a dict, but got {type(saved).__name__}")
    return BatchGeometry(**{field.name: _whole_number(saved, field.name, least=1) for field in fields(BatchGeometry)})


def _skipped(saved: object) -> dict[str, Stretch]:
    if not isinstance(saved, Mapping):
        raise StateError(f"'skipped' of a saved position is a dict, but got {type(saved).__name__}")
    read = {}
    for name, numbers in saved.items():
        if not isinstance(numbers, list | tuple) or len(numbers) != 4 or any(type(one) is not int for one in numbers):
            raise StateError(f"'skipped' of a saved position has four whole numbers for {name!r}, but got {numbers!r}")
        read[str(name)] = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    return read


def _whole_number(state: Mapping[str, Any], key: str, least: int) -> int:
    if key not in state:
        raise StateError(f"a saved position needs {key!r}, but this one only has {', '.join(map(repr, state))}")
    value = state[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise StateError(f"{key!r} of a saved position must be a whole number in [{least}, {_MOST}], but is {value!r}")
    return value


def fingerprint(catalog: Catalog, settings: OrderSettings, weights: ResolvedWeights) -> dict[str, Any]:
    """What a position depends on, apart from the seed and the canonical nodes, which the state carries itself.

    Args:
        catalog: The data.
        settings: The order settings, settled.
        weights: The streams' shares of an epoch.
    """
    order = {
        "epoch_size": weights.epoch_size,
        "shuffle": settings.shuffle,
        "shuffle_algo": settings.shuffle_algo if settings.shuffle else None,
        "shuffle_block_size": settings.shuffle_block_size if settings.shuffle else None,
        "sampling_method": settings.sampling_method,
        "sampling_granularity": settings.sampling_granularity,
        "batching_method": settings.batching_method,
    }
    return {"order": order, "streams": _describe_streams(catalog, weights.choose)}


def _describe_streams(catalog: Catalog, choose: Sequence[int]) -> dict[str, Any]:
    described: dict[str, Any] = {
        name: {
            "place": stream,
            "samples": catalog.samples_per_stream[stream],
            "shards": catalog.shards_per_stream[stream],
            "samples drawn": choose[stream],
            "digest": catalog.indexes[stream].data_digest,
        }
        for stream, name in enumerate(catalog.stream_names)
    }
    if len(json.dumps(described)) <= _LONGEST_LIST:
        return described
    return {f"all {len(described)} streams": {"samples": catalog.num_samples, "digest": _digest(described)}}


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
