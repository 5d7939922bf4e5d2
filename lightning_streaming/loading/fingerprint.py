"""What a saved position belongs to: the data, stream by stream, and the settings of its order.

A state carries it as "fingerprint", in full as long as the streams are few. Beyond, one digest stands for all of them,
and a :class:`~lightning_streaming.loading.stream_list.StreamList` helps to tell what has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.differences import Difference, differences
from lightning_streaming.loading.state_fields import Fields
from lightning_streaming.loading.stream_list import StreamFacts, StreamList, list_streams, stream_changes
from lightning_streaming.order.settings import BATCHING_METHODS, SAMPLING_METHODS, SHUFFLE_ALGOS, OrderSettings
from lightning_streaming.order.weights import ResolvedWeights

LONGEST_LIST = 3072
"""Characters up to which a state describes its streams; so it stays below 4 KB."""


class Fingerprint:
    """What a position depends on, apart from the seed and the canonical nodes, which the state carries itself.

    Args:
        catalog: The data.
        settings: The order settings, settled.
        weights: The streams' shares of an epoch.
    """

    def __init__(self, catalog: Catalog, settings: OrderSettings, weights: ResolvedWeights) -> None:
        order = {
            "epoch_size": weights.epoch_size,
            "shuffle": settings.shuffle,
            "shuffle_algo": settings.shuffle_algo if settings.shuffle else None,
            "shuffle_block_size": settings.shuffle_block_size if settings.shuffle else None,
            "sampling_method": settings.sampling_method,
            "sampling_granularity": settings.sampling_granularity,
            "batching_method": settings.batching_method,
        }
        self._indexes = dict(zip(catalog.stream_names, catalog.indexes, strict=True))
        self._described: dict[str, dict[str, Any]] = {
            name: {
                "place": stream,
                "samples": catalog.samples_per_stream[stream],
                "shards": catalog.shards_per_stream[stream],
                "samples drawn": weights.choose[stream],
                "digest": catalog.indexes[stream].data_digest,
            }
            for stream, name in enumerate(catalog.stream_names)
        }
        streams: dict[str, Any] = self._described
        if len(json.dumps(streams)) > LONGEST_LIST:
            whole = {"samples": catalog.num_samples, "digest": _digest(streams)}
            streams = {f"all {len(streams)} streams": whole}
        self.saved: dict[str, Any] = {"order": order, "streams": streams}
        """As a state carries it."""
        room = LONGEST_LIST - len(json.dumps(streams))
        self.stream_list = list_streams(self._facts(), room, with_names=streams is not self._described)
        """What a state carries beside it, if there is room: never compared, but of help where something differs."""

    def differences(self, saved: Mapping[str, Any], listed: StreamList | None) -> list[Difference]:
        """Each difference between a saved fingerprint and this one.

        Args:
            saved: The saved one.
            listed: What was saved beside it.
        """
        order, streams = ({"order": of["order"]} for of in (saved, self.saved)), saved["streams"]
        found = differences(*order)
        if is_listed(streams):
            for one in differences({"streams": streams}, {"streams": self._described}):
                found += self._with_hashes(one, streams, listed)
            return found
        if streams == self.saved["streams"]:
            return found
        changes = [] if listed is None else stream_changes(listed, self._facts())
        return [*found, *(changes or self._in_all(streams))]

    def _facts(self) -> dict[str, StreamFacts]:
        return {name: self._facts_of(name) for name in self._described}

    def _facts_of(self, name: str) -> StreamFacts:
        one, table = self._described[name], self._indexes[name].shards
        return StreamFacts(
            outline=f"{one['shards']} {one['samples drawn']} {table.outline()}",
            hashes=table.hash_names(),
            samples=one["samples"],
        )

    def _in_all(self, streams: Mapping[str, Any]) -> list[Difference]:
        """The difference where the state does not tell one stream from another."""
        whole = {"samples": sum(one["samples"] for one in self._described.values()), "digest": _digest(self._described)}
        return differences({"streams": streams}, {"streams": {f"all {len(self._described)} streams": whole}})

    def _with_hashes(
        self, one: Difference, saved: Mapping[str, Any], listed: StreamList | None
    ) -> Iterator[Difference]:
        """A difference, and where it is one of digests what of it is due to other hashes in the index."""
        name = one.setting.removeprefix("streams.").removesuffix(".digest")
        if not one.setting.endswith(".digest") or name not in self._indexes:
            yield one
            return
        table, facts = self._indexes[name].shards, self._facts_of(name)
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
            yield Difference(f"streams.{name}.hashes", in_short(then), in_short(facts.hashes))


def in_short(hashes: tuple[str, ...]) -> str:
    """Names of hashes as a message shows them.

    >>> in_short(()), in_short(("md5", "sha1"))
    ('none', 'md5, sha1')
    """
    return ", ".join(hashes) or "none"


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
    return {"order": {**read, **more}, "streams": {name: _read_stream(streams.fields(name)) for name in streams}}


def _read_stream(fields: Fields) -> dict[str, Any]:
    counts = ("place", "samples", "shards", "samples drawn") if "place" in fields else ("samples",)
    read = {key: fields.whole_number(key) for key in counts}
    more = {key: fields.get(key) for key in fields if key not in (*counts, "digest")}
    return {**read, "digest": fields.text("digest"), **more}


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
