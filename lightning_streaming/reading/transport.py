"""Communication of a loader and its workers through unnamed shared memory: batches, and counts of passes.

torch sends objects through a pipe, 64 KiB at a time, and creates a shared memory segment for each tensor. Here tensors,
arrays and bytes objects lie in a reused slot of shared memory, followed by the rest of the batch, pickled. Workers
gather numbers from shards straight into the slot. The loader copies batches out at once, so they never change later.

    worker 0   | batch 3 | batch 1 | batch 2 |       batch 3 has taken the place of batch 0,
    worker 1   | batch 0 | batch 1 | batch 2 |       which the loader has copied by now

A worker that finds no free slot does not wait: it sends its batch in torch's way.
"""

from __future__ import annotations

import copy
import io
import mmap
import multiprocessing
import os
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from math import prod
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lightning_streaming.dataset.collation import is_plain
from lightning_streaming.errors import ConfigError, SampleError
from lightning_streaming.resume.state import Cursor

_FEWEST_BYTES = 2048
"""Size of an object that is sent outside the pickled part, in bytes."""
_ALIGNMENT = 64
_MOST_LEVELS = 4
"""Nested containers in which bytes objects are searched."""
_SLOT_BYTES = 512 << 20
"""Address space of a slot, not memory: it takes as much room as its largest batch. A larger batch goes torch's way."""
_WORD = 8


class BatchMessage(NamedTuple):
    """The location of a batch in the loader's slots."""

    worker: int
    number: int
    """Among this worker's."""
    pickled: slice
    """Where in the slot its pickled part is."""
    places: list[_Place]
    """Where the rest is, in the order in which the pickled part wants it."""

    def open(self, slots: BatchSlots) -> Any:
        """Copy the batch out. Call it once: then the slot is reused."""
        batch = _unpack(slots.slot(self.worker, self.number), self.pickled, self.places)
        slots.done_before(self.worker, self.number + 1)
        return batch


class _Place(NamedTuple):
    """The location of an object's bytes in a slot."""

    start: int
    stop: int
    is_writable: bool


class BatchSender:
    """Sends the batches of a worker through shared memory, if there is room."""

    def __init__(self, slots: BatchSlots) -> None:
        self._slots = slots
        self._sent = 0
        self._next: _Slot | None = None

    def begin_pass(self) -> None:
        """Note that no earlier batch will be opened."""
        self._next = None
        self._slots.done_before(self._worker, self._sent)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised array for the next batch, in its slot if there is room, so that it is sent as it is.

        Args:
            shape: Its shape.
            dtype: Its dtype, without Python objects.
        """
        slot = self._slot()
        size = prod(shape) * dtype.itemsize
        memory = None if slot is None or size < _FEWEST_BYTES else slot.take(size)
        return np.empty(shape, dtype) if memory is None else np.frombuffer(memory, dtype).reshape(shape)

    def send(self, batch: Any) -> Any:
        """Return what to send through the pipe: a :class:`BatchMessage`, or the batch itself for torch to send.

        Raises:
            SampleError: It has a tensor that no process can be sent.
        """
        slot, self._next = self._slot(), None
        if slot is None:
            return batch
        packed = _pack(batch, slot)
        if packed is None:
            # A thread of torch pickles it later, when the next batch may be in the slot.
            return copy.deepcopy(batch) if slot.has_arrays else batch
        self._sent += 1
        return BatchMessage(self._worker, self._sent - 1, *packed)

    def _slot(self) -> _Slot | None:
        """Return the slot of the next batch; None if an earlier batch is still in it."""
        if self._next is None:
            memory = self._slots.free(self._worker, self._sent)
            self._next = None if memory is None else _Slot(memory)
        return self._next

    @property
    def _worker(self) -> int:
        info = get_worker_info()
        assert info is not None, "only workers send batches"
        return info.id


def _pack(batch: Any, slot: _Slot) -> tuple[slice, list[_Place]] | None:
    """Copy a batch into a slot; return its location, or None if torch must send it."""
    pickled = io.BytesIO()
    try:
        _Pickler(pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=slot.refuses).dump(_with_buffers(batch, {}))
    except _UnfitError:
        return None
    start, stop = slot.used, slot.used + pickled.tell()
    if stop > len(slot.memory):
        return None
    slot.memory[start:stop] = pickled.getbuffer()
    return slice(start, stop), slot.places


def _unpack(memory: memoryview, pickled: slice, places: list[_Place]) -> Any:
    """Return a copy of the batch in a slot."""
    copies = (bytearray(memory[a:b]) if is_writable else bytes(memory[a:b]) for a, b, is_writable in places)
    return pickle.loads(memory[pickled], buffers=copies)  # noqa: S301  # from our own worker


class _Slot:
    """A slot that the next batch of a worker is written to.

    Args:
        memory: Its memory.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.used = 0
        """Bytes used from the start on."""
        self.places: list[_Place] = []
        """The location of each buffer that pickling has left out."""
        self.has_arrays = False
        """Whether arrays were placed in it before it was sent."""
        self._address = _address_of(memory)

    def take(self, size: int) -> memoryview | None:
        """Return the next bytes of the slot; None if it has too few left."""
        start, stop = self.used, self.used + size
        if stop > len(self.memory):
            return None
        self.used, self.has_arrays = _aligned(stop), True
        return self.memory[start:stop]

    def refuses(self, buffer: pickle.PickleBuffer) -> bool:
        """Copy a buffer into the slot unless it is there; return True if it must be pickled with the rest."""
        data = buffer.raw()
        if len(data) < _FEWEST_BYTES:
            return True
        start = _address_of(data) - self._address if self.has_arrays else -1
        if not 0 <= start < len(self.memory):
            start, stop = self.used, self.used + len(data)
            if stop > len(self.memory):
                return True
            self.memory[start:stop] = data
            self.used = _aligned(stop)
        self.places.append(_Place(start, start + len(data), not data.readonly))
        return False


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _address_of(memory: memoryview) -> int:
    """Return the address of a memory view's first byte; 0 if it is empty."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if len(memory) else 0


class _UnfitError(Exception):
    """What only torch can send: storages, and tensors that are a view of another, on a device, or with a gradient."""


class _Pickler(pickle.Pickler):
    """Leaves out the values of tensors, as pickle itself does with those of arrays."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.UntypedStorage):
            raise _UnfitError
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if thing.requires_grad and not thing.is_leaf:
            # Torch would fail in its own thread and lose the batch, so the loader would wait for ever.
            raise SampleError(
                f"a batch has a tensor of shape {tuple(thing.shape)} that was computed from one with requires_grad, "
                "which no worker can send",
                hint="detach() it in transform= or collate_fn=, or set num_workers=0",
            )
        if not is_plain(thing):
            raise _UnfitError
        values = thing.reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(values.data), thing.dtype, tuple(thing.shape))


def _tensor_of(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _with_buffers(thing: Any, known: dict[int, Any], levels: int = _MOST_LEVELS) -> Any:
    """Return the value with bytes objects as buffers, which pickle does not leave out otherwise.

    Only containers that begin with bytes, or with a container, are searched: a list of a million numbers is not. One
    that occurs twice stays one object, except with an object of another kind that holds it too.

    Args:
        thing: The value.
        known: Copies of containers by ``id``, which is added to.
        levels: How many levels of containers to search.
    """
    kind = type(thing)
    if id(thing) in known:
        return known[id(thing)]
    if kind is bytes:
        return pickle.PickleBuffer(thing) if len(thing) >= _FEWEST_BYTES else thing
    if kind is dict and levels:
        copied: Any = {key: _with_buffers(value, known, levels - 1) for key, value in thing.items()}
    elif kind in (list, tuple) and levels and thing and type(thing[0]) in (bytes, dict, list, tuple):
        copied = kind([_with_buffers(item, known, levels - 1) for item in thing])
    else:
        return thing
    known[id(thing)] = copied
    return copied


def make_slots(workers: int, slots: int) -> BatchSlots | None:
    """Return slots for the workers of a loader; None without workers, or if the system refuses the address space."""
    if not workers:
        return None
    try:
        return BatchSlots(workers, slots)
    except OSError as error:
        warnings.warn(f"batches come from workers in torch's slower way: no shared memory ({error})", stacklevel=2)
        return None


class BatchSlots:
    """Some slots for each worker, reused in turn, in shared memory that has no name.

    It reaches workers by inheritance or through their start-up pickle, and is gone with the last process that has it.

    Args:
        workers: How many workers there are.
        slots: Slots of each: enough if as many batches of one worker may be under way.
    """

    def __init__(self, workers: int, slots: int) -> None:
        self._workers, self._slots = workers, slots
        self._first = -(-workers * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map(_unnamed_file(self._first + workers * slots * _SLOT_BYTES))

    def free(self, worker: int, number: int) -> memoryview | None:
        """Return the slot for a worker's batch by number, from 0; None if an earlier batch is still in it."""
        return self.slot(worker, number) if number - self._done[worker] < self._slots else None

    def slot(self, worker: int, number: int) -> memoryview:
        """Return the slot that holds this batch."""
        start = self._first + (worker * self._slots + number % self._slots) * _SLOT_BYTES
        return self._memory[start : start + _SLOT_BYTES]

    def done_before(self, worker: int, number: int) -> None:
        """Note that a worker's batches before this one are no longer needed."""
        self._done[worker] = number

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("_workers", "_slots", "_first")}
        return {**state, "descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        descriptor = state.pop("descriptor").detach()
        self.__dict__.update(state)
        self._map(descriptor)

    def _map(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._memory = memoryview(mmap.mmap(descriptor, 0))
        self._done = self._memory[: self._workers * _WORD].cast("q")


def _unnamed_file(size: int) -> int:
    if hasattr(os, "memfd_create"):  # Linux: memory that no limit of /dev/shm is about
        descriptor = os.memfd_create("batches")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.truncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class PassCounter:
    """Counts the passes that workers of a plain ``torch`` DataLoader begin, which have no loader of ours.

    The counts lie in shared memory that has no name, and is gone with the last process that holds it.
    """

    _MAX_WORKERS = 1024

    def __init__(self) -> None:
        self._words = _shared_words(3 + self._MAX_WORKERS)
        self._owner = os.getpid()
        self._resets, self._has_counted = 0, False

    def reset(self, cursor: Cursor) -> None:
        """Count passes from ``cursor``."""
        if self._owner != os.getpid():
            # Ranks that were forked or spawned with one dataset must not count each other's passes.
            self._words, self._owner = _shared_words(3 + self._MAX_WORKERS), os.getpid()
        self._words.zero_()
        self._resets += 1
        self._words[:3] = torch.tensor([*cursor, self._resets])

    def count_pass(self, worker: int) -> Cursor:
        """Begin a worker's next pass, and return where it begins. Call it in the worker.

        Raises:
            ConfigError: There are too many workers, or this is a worker of another process than the one that counts.
        """
        if worker >= self._MAX_WORKERS:
            raise ConfigError(
                f"a DataLoader may have up to {self._MAX_WORKERS} workers, but this is worker {worker}",
                option="num_workers",
            )
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != self._owner:
            raise ConfigError(
                f"the dataset was made in process {self._owner} and is read by a plain DataLoader in process "
                f"{parent.pid}",
                hint="make it in the process that reads it, or use StreamingDataLoader",
            )
        begins = Cursor(int(self._words[0]), int(self._words[1]))
        is_first, self._has_counted = not self._has_counted, True
        if is_first and int(self._words[2]) != self._resets:
            return begins  # started before the reset, for a pass that was given up
        slot = 3 + worker
        passes = int(self._words[slot])
        self._words[slot] = passes + 1
        return begins.passes_later(passes)

    def passes_counted(self) -> int:
        """Return the passes begun since the last reset."""
        return int(self._words[3:].max())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._words.untyped_storage().is_shared():  # a copy, and not a worker's start, which brings the memory
            self._words, self._owner = shared(self._words), os.getpid()


def _shared_words(count: int) -> torch.Tensor:
    """Return zeros of dtype int64 in memory that is shared with child processes."""
    return shared(torch.zeros(count, dtype=torch.int64))


def shared(words: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in memory that is shared with child processes."""
    words.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return words
