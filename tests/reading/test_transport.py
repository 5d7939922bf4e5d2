"""What goes through shared memory must be what a queue would have brought, and no more must live on."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lightning_streaming import MDSWriter
from lightning_streaming.errors import SampleError
from lightning_streaming.reading import transport as shared_memory
from lightning_streaming.reading.transport import BatchMessage, BatchSender, BatchSlots
from tests.helpers import make_loader, raises, write_dataset

LARGE = 4096

BATCHES: dict[str, Callable[[], Any]] = {
    "bytes": lambda: {"small": [b"", b"abc"], "large": [bytes(LARGE), bytes(range(256)) * 20]},
    "text": lambda: ["héllo" * 1000, "", {"n": 1, "f": 0.5, "none": None}],
    "tensors": lambda: {
        "long": torch.arange(1000),
        "bfloat": torch.arange(3000, dtype=torch.bfloat16),
        "bool": torch.ones(50, 70, dtype=torch.bool),
        "complex": torch.full((9, 300), 1 + 2j),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
    },
    "arrays": lambda: (
        np.arange(5000, dtype="i2"),
        np.zeros((0, 5)),
        np.arange(6000).reshape(60, 100).T,
        np.array([("a", 1.5)] * 400, dtype=[("name", "U4"), ("value", "f8")]),
        np.array([{"an": "object"}, None], dtype=object),
        np.float32(2.5),
    ),
}


FOR_TORCH: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(4000).reshape(40, 100).T,
    "strided": lambda: torch.arange(4000)[::2],
    "part": lambda: torch.arange(9000)[10:5000],
    "sparse": lambda: torch.eye(50).to_sparse(),
    "conjugate": lambda: torch.full((2000,), 1 + 2j).conj(),
    "with gradient": lambda: torch.ones(9, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(9)),
}


def same(left: Any, right: Any) -> bool:
    """Whether two batches are equal in values and in types."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        dense = [one.to_dense() if one.layout != torch.strided else one for one in (left, right)]
        return left.dtype == right.dtype and left.layout == right.layout and torch.equal(*dense)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


class Numbers(IterableDataset[int]):
    """As many numbers as asked for, dealt among workers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(range(info.id, self._count, info.num_workers))


class Made:
    """Collates a number into the batch of a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, numbers: list[int]) -> Any:
        return numbers[0], BATCHES[self._name]()


class Sending:
    """A collate function that sends what another makes."""

    def __init__(self, collate: Callable[[Any], Any], batch_slots: BatchSlots) -> None:
        self._collate, self._sender = collate, BatchSender(batch_slots)

    def __call__(self, numbers: list[int]) -> Any:
        return self._sender.send(self._collate(numbers))


def sent(
    collate: Callable[[Any], Any], batch_slots: BatchSlots, count: int, *, is_sent: bool = False, **settings: Any
) -> list[Any]:
    """What torch's loader hands out, messages unopened, with a function that collates, and maybe sends."""
    sending = collate if is_sent else Sending(collate, batch_slots)
    return list(DataLoader(Numbers(count), batch_size=1, collate_fn=sending, **settings))


def slot_of(size: int) -> shared_memory._Slot:
    return shared_memory._Slot(memoryview(bytearray(size)))


def sent_through(slot: shared_memory._Slot, batch: Any) -> Any:
    """The batch that a loader gets through a slot, copied out of it; the next batch has taken the slot by then."""
    packed = shared_memory._pack(batch, slot)
    assert packed is not None
    opened = shared_memory._unpack(slot.memory, *packed)
    slot.memory[:] = bytes(len(slot.memory))
    return opened


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_comes_out_as_it_was(name: str) -> None:
    batch_slots = BatchSlots(2, 3)
    arrived = sent(Made(name), batch_slots, 4, num_workers=2)
    assert all(isinstance(one, BatchMessage) for one in arrived)
    for number, message in enumerate(arrived):
        assert same(message.open(batch_slots), (number, BATCHES[name]()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_and_storages_are_left_to_torch() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.strided)
    for value in (nested, torch.ones(2000).untyped_storage()):
        assert shared_memory._pack({"a": [value]}, slot_of(1 << 16)) is None


@pytest.mark.parametrize("name", FOR_TORCH)
def test_tensors_that_are_more_than_their_bytes_are_left_to_torch(name: str) -> None:
    assert shared_memory._pack({"a": [FOR_TORCH[name]()]}, slot_of(1 << 16)) is None


@pytest.mark.parametrize("collate", [None, torch.stack])
def test_a_tensor_computed_from_one_that_requires_gradients_is_an_error_rather_than_a_wait(
    collate: Callable[[Any], Any] | None, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data", 4)
    loader = make_loader(tmp_path / "data", transform=_with_gradient, workers=1, loader={"collate_fn": collate})
    with raises(SampleError, "requires_grad", "detach() it in transform="):
        next(iter(loader))


def _with_gradient(sample: dict[str, Any]) -> torch.Tensor:
    return torch.full((2,), float(sample["id"]), requires_grad=True)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_slots_reach_workers_of_every_start_method(method: str) -> None:
    batch_slots = BatchSlots(1, 3)
    context = multiprocessing.get_context(method)
    (message,) = sent(Made("tensors"), batch_slots, 1, num_workers=1, multiprocessing_context=context)
    assert same(message.open(batch_slots), (0, BATCHES["tensors"]()))


def test_a_batch_of_some_hundred_megabytes_fits_into_a_slot() -> None:
    batch_slots, values = BatchSlots(1, 2), torch.arange(40 << 20)
    memory = batch_slots.free(0, 0)
    assert memory is not None
    packed = shared_memory._pack({"values": values}, shared_memory._Slot(memory))
    assert packed is not None
    assert torch.equal(shared_memory._unpack(memory, *packed)["values"], values)


def test_what_finds_no_free_slot_comes_in_another_way() -> None:
    batch_slots = BatchSlots(1, 2)
    arrived = sent(Made("bytes"), batch_slots, 4, num_workers=1)  # none is opened before all are made
    assert [isinstance(one, BatchMessage) for one in arrived] == [True, True, False, False]
    opened = [one.open(batch_slots) if isinstance(one, BatchMessage) else one for one in arrived]
    assert all(same(one, (number, BATCHES["bytes"]())) for number, one in enumerate(opened))


def test_a_lost_batch_frees_its_slot_with_the_next_one() -> None:
    batch_slots = BatchSlots(1, 2)
    _lost, second = sent(Made("bytes"), batch_slots, 2, num_workers=1)
    second.open(batch_slots)
    assert batch_slots.free(0, 2) is not None
    assert batch_slots.free(0, 3) is not None
    assert batch_slots.free(0, 4) is None


@pytest.mark.rotate(2)
@pytest.mark.parametrize("room", [0, 100, 5000, 9000, 30000])
def test_what_does_not_fit_comes_in_another_way(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", room)
    batch_slots = BatchSlots(1, 3)
    for name in ("bytes", "tensors", "arrays"):
        (arrived,) = sent(Made(name), batch_slots, 1, num_workers=1)
        opened = arrived.open(batch_slots) if isinstance(arrived, BatchMessage) else arrived
        assert same(opened, (0, BATCHES[name]()))


@given(st.recursive(
    st.one_of(
        st.integers(), st.text(max_size=20), st.binary(max_size=10), st.sampled_from([bytes(LARGE), b"x" * 5000]),
        st.integers(0, 2000).map(torch.arange), st.integers(0, 2000).map(np.arange),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_batch_comes_out_as_it_was(batch: Any) -> None:
    assert same(sent_through(slot_of(1 << 18), batch), batch)


class Encoded:
    """Gives its state as bytes that nobody else holds, as objects of extension types do."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> bytes:
        return self.number.to_bytes(4, "big") * 2000

    def __setstate__(self, state: bytes) -> None:
        self.number = int.from_bytes(state[:4], "big")


def test_state_that_lives_only_while_it_is_pickled_is_each_objects_own() -> None:
    opened = sent_through(slot_of(1 << 20), {"list": [Encoded(number) for number in range(20)]})
    assert [encoded.number for encoded in opened["list"]] == list(range(20))


def test_one_thing_twice_stays_one_thing() -> None:
    tensor = torch.arange(1000)
    opened = sent_through(slot_of(1 << 16), {"a": tensor, "b": [tensor]})
    assert opened["a"] is opened["b"][0]


@pytest.mark.parametrize("container", [[b"x" * 5000], ([b"x" * 5000],), {"bytes": b"x" * 5000}, [{"a": 1}], {}, []])
def test_one_container_twice_stays_one_container(container: Any) -> None:
    opened = sent_through(slot_of(1 << 16), {"a": container, "b": {"c": container}, "d": [[], container]})
    assert opened["a"] == container
    assert opened["a"] is opened["b"]["c"] is opened["d"][1]


class Gathering:
    """A collate function that makes an array in the slot it is sent in, and others next to it."""

    def __init__(self, batch_slots: BatchSlots, sizes: Sequence[int]) -> None:
        self._sender, self._sizes = BatchSender(batch_slots), sizes

    def __call__(self, numbers: list[int]) -> Any:
        arrays = [self._sender.empty((size, 2), np.dtype(np.int64)) for size in self._sizes]
        for place, array in enumerate(arrays):
            array[...] = 100 * numbers[0] + place
        tensors = [torch.from_numpy(array) for array in arrays]
        return self._sender.send({"tensors": tensors, "between": np.arange(3000), "parts": [arrays[-1][1:]]})


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("sizes", [[1], [500], [1, 500, 3, 700, 900], [4000, 500]])
def test_what_is_gathered_in_a_slot_comes_out_as_it_was(
    sizes: list[int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 48_000)  # too few for some
    batch_slots = BatchSlots(1, 3)
    arrived = sent(Gathering(batch_slots, sizes), batch_slots, count, is_sent=True, num_workers=1)
    for number, message in enumerate(arrived):
        opened = message.open(batch_slots) if isinstance(message, BatchMessage) else message
        arrays = [np.full((size, 2), 100 * number + place) for place, size in enumerate(sizes)]
        wanted = {"tensors": list(map(torch.from_numpy, arrays)), "between": np.arange(3000), "parts": [arrays[-1][1:]]}
        assert same(opened, wanted)


def test_what_is_gathered_in_a_slot_is_not_copied_there() -> None:
    slot = slot_of(1 << 16)
    memory = slot.take(8000)
    assert memory is not None
    array = np.frombuffer(memory, np.int64)
    array[...] = 7
    packed = shared_memory._pack({"a": array[:900], "b": np.arange(1000)}, slot)
    assert packed is not None
    assert [(place.start, place.stop) for place in packed[1]] == [(0, 7200), (8000, 16000)]


@pytest.mark.rotate(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_that_are_kept_for_any_time_never_change(seed: int, workers: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    columns = {"id": "int64", "x": "ndarray:float32:700"}
    with MDSWriter(out=tmp_path, columns=columns, size_limit=90_000) as writer:
        for number in range(400):
            writer.write({"id": number, "x": np.full(700, number, np.float32)})
    loader = make_loader(tmp_path, workers=workers, batch_size=generator.choice([1, 3, 20]))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    count = 0
    for batch in loader:
        count += len(batch["id"])
        batch["x"] += batch["id"][:, None]
        kept.append((batch["x"], batch["id"].clone()))
        generator.shuffle(kept)
        for values, numbers in kept[: generator.randrange(4)]:
            assert torch.equal(values, 2 * numbers[:, None].expand(-1, 700).float())
        del kept[generator.randrange(12) :]
    assert count == 400
    loader.close()
    assert all(torch.equal(values, 2 * numbers[:, None].expand(-1, 700).float()) for values, numbers in kept)


def test_batches_of_a_loader_are_its_own(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    loader = make_loader(tmp_path, workers=2, batch_size=4)
    batches = list(loader)
    copies = pickle.loads(pickle.dumps(batches))
    list(loader)  # whose batches go through the same slots
    assert all(map(same, batches, copies))
    loader.close()


def test_passes_given_up_early_take_no_slot_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(message: BatchMessage, batch_slots: BatchSlots) -> Any:
        from_slots.append(message.worker)
        return open_(message, batch_slots)

    from_slots: list[int] = []
    open_ = BatchMessage.open
    monkeypatch.setattr(BatchMessage, "open", opened)
    write_dataset(tmp_path)
    settings: dict[str, Any] = {"shuffle": False, "transform": dict}  # each batch is a message of its own
    loader = make_loader(tmp_path, workers=2, batch_size=2, loader={"persistent_workers": True}, **settings)
    for _ in range(5):
        next(iter(loader))
    del from_slots[:]
    whole = [number for batch in loader for number in batch["id"].tolist()]
    assert sorted(whole) == list(range(29))
    assert sorted(from_slots) == [0] * 8 + [1] * 7
    loader.close()


def test_a_pass_that_is_closed_leaves_a_loader_that_begins_again(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    loader = make_loader(tmp_path, workers=2, batch_size=2, loader={"persistent_workers": True})
    under_way = iter(loader)
    next(under_way)
    under_way.close()
    assert len(list(loader)) == 15
    loader.close()


def test_without_a_loader_or_its_pass_the_memory_is_gone(tmp_path: Path) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:batches")

    write_dataset(tmp_path)
    gc.collect()  # loaders of other tests
    assert maps() == 0
    loader = make_loader(tmp_path, workers=1, batch_size=2)
    for _batch in loader:
        assert maps() == 1
    assert maps() == 0
    lives_on = make_loader(tmp_path, workers=1, batch_size=2, loader={"persistent_workers": True})
    list(lives_on)
    assert maps() == 1
    lives_on.close()
    assert maps() == 0


def test_without_shared_memory_torch_sends_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 1 << 60)  # more than any file may have
    write_dataset(tmp_path)
    loader = make_loader(tmp_path, workers=1, batch_size=2, shuffle=False)
    with pytest.warns(UserWarning, match="no shared memory"):
        assert len(list(loader)) == 15
    loader.close()
