"""Documents that are cut between packs: a worker creates each once, and cuts its pieces from that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch

from lightning_streaming.dataset.sample_key import Row, SampleKey
from lightning_streaming.dataset.transform import global_generators_kept, rng_for, seed_global_generators

KEPT_BYTES = 1 << 26
"""Bytes of documents that a worker keeps for their other pieces; the latest is always kept."""
_OBJECT_BYTES = 64
"""Size that is assumed for a value of unknown size."""


class CutDocuments:
    """The latest documents that are cut between packs, kept for their other pieces.

    Before a document is created, ``random``, ``numpy.random`` and torch are seeded from its key, as with
    ``seed_global_rng``: so the pieces that other workers and ranks read are of the same document. Afterwards the
    generators are what they were.

    Args:
        columns: The columns that are packed; nothing else is kept.
        key: Returns the key of a sample; None to seed nothing, as where several threads make samples.
    """

    def __init__(self, columns: Sequence[str], key: Callable[[Row], SampleKey] | None) -> None:
        self._columns, self._key = columns, key
        self._kept = OrderedDict[tuple[int, int, int], _Document]()
        self._bytes = 0
        self._lock = Lock()

    def made(self, row: Row, make: Callable[[], Any]) -> Any:
        """Return the document of a piece; made now, unless it was made for another piece.

        Several threads may call it: one makes a document, the others wait for it.

        Args:
            row: Of the piece.
            make: Makes the document; what it raises is raised, and the next piece tries again.
        """
        name = row[:3]
        with self._lock:
            document = self._kept.setdefault(name, _Document())
            self._kept.move_to_end(name)
        with document.lock:
            if not document.is_made:
                try:
                    if self._key is None:
                        sample = make()
                    else:
                        key = self._key(row)
                        with global_generators_kept():
                            seed_global_generators(rng_for(key.shuffle_seed, key.epoch, key.position))
                            sample = make()
                    # Anything else is refused where it is packed.
                    if isinstance(sample, Mapping) and all(name in sample for name in self._columns):
                        sample = {name: sample[name] for name in self._columns}
                    document.sample = sample
                except BaseException:
                    with self._lock:
                        if self._kept.get(name) is document:  # else it was dropped, and another thread makes it again
                            del self._kept[name]
                    raise
                document.is_made = True
                self._make_room(name, document)
        return document.sample

    def _make_room(self, name: tuple[int, int, int], latest: _Document) -> None:
        """Drop the oldest documents where all together have too many bytes, but for the one just made."""
        num_bytes = _bytes_of(latest.sample)
        with self._lock:
            if self._kept.get(name) is not latest:  # it was dropped meanwhile, for those of other threads
                return
            latest.num_bytes = num_bytes  # only now: dropping it subtracts them
            self._bytes += num_bytes
            self._kept.move_to_end(name)
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].num_bytes


class _Document:
    """A document, once it is made."""

    __slots__ = ("is_made", "lock", "num_bytes", "sample")

    def __init__(self) -> None:
        self.lock = Lock()
        self.is_made, self.num_bytes = False, 0
        self.sample: Any = None


def _bytes_of(value: Any) -> int:
    """Return about how many bytes a value has."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return _OBJECT_BYTES * len(value)
    return _OBJECT_BYTES
