"""Batches on their way from a worker to the loader: their bytes through shared memory, little through a pipe.

torch sends what is no tensor through a pipe, 64 KiB at a time, and makes a shared memory segment for each tensor. Here
tensors, arrays and bytes objects are copied into a slot of shared memory that is used again and again, followed by what
is left of the batch, pickled. The loader copies them out at once, so a batch never changes later.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_streaming.loading.slots import BatchSlots

_FEWEST_BYTES = 2048
"""Of what is worth a place of its own."""
_ALIGNMENT = 64


class Parcel(NamedTuple):
    """Says where in the loader's slots a batch is."""

    worker: int
    number: int
    """Among this worker's."""
    start: int
    """Where in the slot its pickled part begins."""
    stop: int

    def open(self, slots: BatchSlots) -> Any:
        """Copy the batch out. To be called once: then the slot is used again."""
        slot = slots.slot(self.worker, self.number)
        batch = _Unpacker(slot, slot[self.start : self.stop]).load()
        slots.done_before(self.worker, self.number + 1)
        return batch


class ParcelledCollate:
    """A collate function for workers, whose batches go through shared memory where they find room in it.

    Args:
        collate: Makes the batches.
        slots: The loader's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], slots: BatchSlots) -> None:
        self._collate = collate
        self._slots = slots
        self._sent = 0

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        info = get_worker_info()
        assert info is not None, "only workers send batches"
        slot = self._slots.free(info.id, self._sent)
        packed = None if slot is None else _pack(batch, slot)
        if packed is None:
            return batch
        self._sent += 1
        return Parcel(info.id, self._sent - 1, *packed)


class _Place(NamedTuple):
    """Where in a slot something is, and what it was."""

    start: int
    stop: int
    dtype: Any
    """torch's or numpy's; None for bytes."""
    shape: tuple[int, ...]


def _pack(batch: Any, slot: memoryview) -> tuple[int, int] | None:
    """Put a batch into a slot; says where its pickled part is, or None if it must go in torch's way."""
    pickled = io.BytesIO()
    packer = _Packer(slot, pickled)
    try:
        packer.dump(batch)
    except _UnfitError:
        return None
    start, stop = packer.used, packer.used + pickled.tell()
    if stop > len(slot):
        return None
    slot[start:stop] = pickled.getbuffer()
    return start, stop


class _UnfitError(Exception):
    """There is a tensor that only torch can send: a view of another, one on a device, or one too large for a slot."""


class _Packer(pickle.Pickler):
    """Pickles a batch, but for what is put into a slot as it is."""

    def __init__(self, slot: memoryview, pickled: io.BytesIO) -> None:
        super().__init__(pickled, pickle.HIGHEST_PROTOCOL)
        self.used = 0
        self._slot = slot
        self._places: dict[int, _Place] = {}

    def persistent_id(self, thing: Any) -> _Place | None:
        if id(thing) in self._places:  # the same thing again, as it shall be on the other side
            return self._places[id(thing)]
        plain = _PLAIN.get(type(thing))
        found = plain and plain(thing)
        if found is None or self.used + len(found.data) > len(self._slot):
            if isinstance(thing, torch.Tensor):
                raise _UnfitError
            return None
        stop = self.used + len(found.data)
        self._slot[self.used : stop] = found.data
        place = self._places[id(thing)] = _Place(self.used, stop, found.dtype, found.shape)
        self.used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, slot: memoryview, pickled: memoryview) -> None:
        super().__init__(io.BytesIO(pickled))
        self._slot = slot
        self._made: dict[_Place, Any] = {}

    def persistent_load(self, place: _Place) -> Any:
        if place not in self._made:
            self._made[place] = _copy_of(self._slot[place.start : place.stop], place.dtype, place.shape)
        return self._made[place]


def _copy_of(data: memoryview, dtype: Any, shape: tuple[int, ...]) -> Any:
    if dtype is None:
        return bytes(data)
    if isinstance(dtype, torch.dtype):
        return torch.frombuffer(data, dtype=dtype).reshape(shape).clone() if data else torch.empty(shape, dtype=dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()


class _Plain(NamedTuple):
    """Something that is but its bytes."""

    data: memoryview
    dtype: Any
    shape: tuple[int, ...]


def _plain_bytes(thing: bytes) -> _Plain | None:
    return _Plain(memoryview(thing), None, ()) if len(thing) >= _FEWEST_BYTES else None


def _plain_array(array: np.ndarray[Any, Any]) -> _Plain | None:
    if array.nbytes < _FEWEST_BYTES or array.dtype.hasobject or not array.flags.c_contiguous:
        return None
    return _Plain(array.reshape(-1).view(np.uint8).data, array.dtype, array.shape)


def _plain_tensor(tensor: torch.Tensor) -> _Plain | None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_quantized:
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # maybe shared with another one
        return None
    return _Plain(tensor.reshape(-1).view(torch.uint8).numpy().data, tensor.dtype, tuple(tensor.shape))


_PLAIN: dict[type, Callable[[Any], _Plain | None]] = {
    bytes: _plain_bytes,
    np.ndarray: _plain_array,
    torch.Tensor: _plain_tensor,
}
