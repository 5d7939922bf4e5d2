"""Batches on their way from a worker to the loader: their bytes through shared memory, little through a pipe.

torch sends what is no tensor through a pipe, 64 KiB at a time, and makes a shared memory segment for each tensor. Here
tensors, arrays and bytes objects are copied into a slot of shared memory that is used again and again, followed by what
is left of the batch, pickled. The loader copies them out at once, so a batch never changes later.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from lightning_streaming.loading.slots import BatchSlots

_FEWEST_BYTES = 2048
"""Of what is worth a place of its own."""
_ALIGNMENT = 64
_MOST_LEVELS = 4
"""Of containers in which bytes objects are looked for."""


class _Place(NamedTuple):
    """Where in a slot the bytes of something are."""

    start: int
    stop: int
    is_writable: bool


class Parcel(NamedTuple):
    """Says where in the loader's slots a batch is."""

    worker: int
    number: int
    """Among this worker's."""
    pickled: slice
    """Where in the slot its pickled part is."""
    places: list[_Place]
    """Where the rest is, in the order in which the pickled part wants it."""

    def open(self, slots: BatchSlots) -> Any:
        """Copy the batch out. To be called once: then the slot is used again."""
        batch = _unpack(slots.slot(self.worker, self.number), self.pickled, self.places)
        slots.done_before(self.worker, self.number + 1)
        return batch


class Sender:
    """A worker's way of sending batches: through shared memory, where they find room in it."""

    def __init__(self, slots: BatchSlots) -> None:
        self._slots = slots
        self._sent = 0

    def begin_pass(self) -> None:
        """Say that nobody opens any more what was sent before."""
        self._slots.done_before(self._worker, self._sent)

    def send(self, batch: Any) -> Any:
        """What is to go through the pipe: a :class:`Parcel`, or the batch itself for torch to send."""
        worker = self._worker
        slot = self._slots.free(worker, self._sent)
        packed = None if slot is None else _pack(batch, slot)
        if packed is None:
            return batch
        self._sent += 1
        return Parcel(worker, self._sent - 1, *packed)

    @property
    def _worker(self) -> int:
        info = get_worker_info()
        assert info is not None, "only workers send batches"
        return info.id


def _pack(batch: Any, slot: memoryview) -> tuple[slice, list[_Place]] | None:
    """Put a batch into a slot; says where it is, or None if it must go in torch's way."""
    pickled, shelf = io.BytesIO(), _Shelf(slot)
    try:
        _Pickler(pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=shelf.refuses).dump(_with_buffers(batch))
    except _UnfitError:
        return None
    start, stop = shelf.used, shelf.used + pickled.tell()
    if stop > len(slot):
        return None
    slot[start:stop] = pickled.getbuffer()
    return slice(start, stop), shelf.places


def _unpack(slot: memoryview, pickled: slice, places: list[_Place]) -> Any:
    return pickle.loads(slot[pickled], buffers=_copies(slot, places))  # noqa: S301  # what our own worker has put there


def _copies(slot: memoryview, places: list[_Place]) -> Iterator[bytes | bytearray]:
    for start, stop, is_writable in places:
        yield bytearray(slot[start:stop]) if is_writable else bytes(slot[start:stop])


class _Shelf:
    """Takes what pickling leaves out, as far as there is room."""

    def __init__(self, slot: memoryview) -> None:
        self.places: list[_Place] = []
        self.used = 0
        self._slot = slot

    def refuses(self, buffer: pickle.PickleBuffer) -> bool:
        """Copy a buffer into the slot; True if it is to be pickled with the rest."""
        data = buffer.raw()
        stop = self.used + len(data)
        if len(data) < _FEWEST_BYTES or stop > len(self._slot):
            return True
        self._slot[self.used : stop] = data
        self.places.append(_Place(self.used, stop, not data.readonly))
        self.used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return False


class _UnfitError(Exception):
    """There is a tensor that only torch can send: a view of another, one on a device, one with a gradient."""


class _Pickler(pickle.Pickler):
    """Leaves the values of tensors out of what is pickled, as pickle itself does with those of arrays."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if not _is_plain(thing):
            raise _UnfitError
        values = thing.reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(values.data), thing.dtype, tuple(thing.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is but its bytes, and these are its own."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _tensor_of(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _with_buffers(thing: Any, levels: int = _MOST_LEVELS) -> Any:
    """The same, but for bytes objects, which pickle does not leave out by itself.

    Only containers that begin with bytes, or with a container, are looked through: a list of a million numbers is not.
    """
    kind = type(thing)
    if kind is bytes:
        return pickle.PickleBuffer(thing) if len(thing) >= _FEWEST_BYTES else thing
    if kind is dict and levels:
        return {key: _with_buffers(value, levels - 1) for key, value in thing.items()}
    if kind in (list, tuple) and levels and thing and type(thing[0]) in (bytes, dict, list, tuple):
        return kind([_with_buffers(one, levels - 1) for one in thing])
    return thing
