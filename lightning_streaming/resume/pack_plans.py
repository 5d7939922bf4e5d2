"""An epoch's packs: planned once on a node, and mapped by all of its processes."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import package_logger
from lightning_streaming.options.packing import Packing
from lightning_streaming.resume.order_files import made_once
from lightning_streaming.resume.saved_fingerprint import SavedPacking
from lightning_streaming.selection.document_lengths import CatalogLengths
from lightning_streaming.sequence.base import digest_of
from lightning_streaming.sequence.packing.packs import PackedEpoch, PackedPart, plan_epoch
from lightning_streaming.sequence.packing.plan import PackPlan
from lightning_streaming.sequence.packing.settings import AnyPackSettings, named_facts
from lightning_streaming.waits import progress

_log = package_logger(__name__)
_LONG = 1.0
"""Seconds of planning of which the user is told."""
_SMALL = 1 << 16
"""Documents up to which each process plans for itself."""
_ALIGNMENT, _WORD = 64, 8
_VERSION = 2
"""Raised when the same settings come to mean other packs, or other bytes: releases may share a node."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPacker:
    """Plans the packs of epochs."""

    pack: Packing
    lengths: CatalogLengths

    def saved(self) -> SavedPacking:
        """Return the facts that a saved position depends on; a digest of the lengths is saved with each stream."""
        return SavedPacking.of(named_facts(self.pack.settings().facts), self.pack.request().in_words())

    def epoch(self, parts: Sequence[PackedPart]) -> PackedEpoch:
        """Return the packs of an epoch; plan them if no process of this node has.

        Args:
            parts: The epoch's documents.

        Raises:
            ConfigError: A document is longer than a pack, and is not to be cut; or there is nothing to pack.
            StorageError: There is no room for the plan.
        """
        found = self._found(parts)
        if not len(found):
            # Whoever looks for the next epoch that has batches would never end.
            of = sum(len(part.order) for part in parts)
            raise ConfigError(
                f"epoch {parts[0].order.epoch} has no pack: none of its {of} documents has a token that is kept",
                hint=f"look at {self.pack.option}.lengths and {self.pack.option}.longer, and at what is selected",
                option=f"{self.pack.option}.lengths",
            )
        return found

    def _found(self, parts: Sequence[PackedPart]) -> PackedEpoch:
        settings = self.pack.settings()
        digest = digest_of(
            "packs", _VERSION, list(settings.facts), [part.order.digest for part in parts], list(self.lengths.digests)
        )
        if sum(len(part.order) for part in parts) <= _SMALL:
            return PackedEpoch(parts, list(self._planned(parts)), self.lengths)
        what = f"plan the packs of epoch {parts[0].order.epoch}"
        mapped = made_once(digest, lambda path: _write(path, self._planned(parts)), what, _is_whole)
        return PackedEpoch(parts, _read(mapped, settings), self.lengths)

    def _planned(self, parts: Sequence[PackedPart]) -> list[list[PackPlan]]:
        began, documents = perf_counter(), sum(len(part.order) for part in parts)
        self.lengths.gather()
        try:
            plans = self._shown(parts, documents)
        finally:
            self.lengths.let_go()
        took = perf_counter() - began
        if took > _LONG:
            _log.info("packs of %d documents were planned in %.1f s", documents, took)
        return plans

    def _shown(self, parts: Sequence[PackedPart], documents: int) -> list[list[PackPlan]]:
        """Return the plans of an epoch's parts, with a progress bar."""
        if documents <= _SMALL:
            return list(plan_epoch(parts, self.lengths, self.pack.settings()))
        what = f"planning the packs of epoch {parts[0].order.epoch}"
        with self.lengths.shown.here(), progress(documents, "documents", what) as tell:
            return list(plan_epoch(parts, self.lengths, self.pack.settings(), progress=tell))


def _write(path: Path, plans: list[list[PackPlan]]) -> None:
    """Write a file of plans: the lengths of the file and of a header, the header in JSON, and arrays."""
    places, stop = list[list[dict[str, Any]]](), 0
    for of_part in plans:
        places.append([])
        for plan in of_part:
            told = {}
            for name, array in plan.arrays().items():
                told[name] = [array.dtype.str, len(array), stop]
                stop += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
            places[-1].append(told)
    head = json.dumps(places).encode()
    first = -(-(2 * _WORD + len(head)) // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.write((first + stop).to_bytes(_WORD, "little") + len(head).to_bytes(_WORD, "little") + head)
        for of_part, of_places in zip(plans, places, strict=True):
            for plan, told in zip(of_part, of_places, strict=True):
                for name, array in plan.arrays().items():
                    file.seek(first + told[name][2])
                    file.write(np.ascontiguousarray(array).data)
        file.truncate(first + stop)


def _is_whole(mapped: mmap.mmap) -> bool:
    return int.from_bytes(mapped[:_WORD], "little") == len(mapped)


def _read(mapped: mmap.mmap, settings: AnyPackSettings) -> list[list[PackPlan]]:
    size, begin = int.from_bytes(mapped[_WORD : 2 * _WORD], "little"), 2 * _WORD
    places, first = json.loads(mapped[begin : begin + size]), -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT

    def array(dtype: str, length: int, start: int) -> NDArray[Any]:
        return np.frombuffer(mapped, dtype, length, first + start)

    return [
        [PackPlan.of_arrays(settings, {name: array(*told[name]) for name in told}) for told in of_part]
        for of_part in places
    ]
