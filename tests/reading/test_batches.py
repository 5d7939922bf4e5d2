"""Batches of untouched samples, which are cut out of tables: they must be those that torch would have collated.

What is said where samples cannot be made a batch: of which column, and what to do.
"""

from __future__ import annotations

import datetime
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import default_collate

from lightning_streaming import MDSWriter, SampleKey, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError, ObjectNotFoundError, SampleError
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.options.packing import PackingConfig
from lightning_streaming.reading.dataset import dataset_world, run_state_of, source_of
from lightning_streaming.reading.plan import by_shard
from lightning_streaming.reading.workers import BatchGroup, SharedEpochStart, WorkerBatches, WorkerChannel
from tests.helpers import ids, make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PLAIN = {"id": "int", "label": "uint8", "share": "float32", "tokens": "ndarray:uint16:5", "box": "ndarray:float64:2,2"}
SAMPLES = 53


def sample_of(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "label": np.uint8(number % 7),
        "share": np.float32(number / 3),
        "tokens": np.arange(number, number + 5, dtype=np.uint16),
        "box": np.full((2, 2), number / 7),
        "text": str(number),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "plain", PLAIN)


def write(root: Path, columns: dict[str, str]) -> Path:
    with MDSWriter(out=str(root), columns=columns, size_limit=900) as writer:
        for number in range(SAMPLES):
            writer.write(sample_of(number))
    return root


@pytest.fixture
def rows_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by each row that this process reads."""
    taken: list[int] = []
    copy_rows = MDSReader.copy_rows

    def counted(reader: MDSReader, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        taken.extend(indexes.tolist())
        copy_rows(reader, indexes, rows)

    monkeypatch.setattr(MDSReader, "copy_rows", counted)
    return taken


class Identity:
    """A transform that changes nothing, for which samples must be decoded."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def batches(dataset: StreamingDataset, workers: int = 0, **settings: Any) -> list[Any]:
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=workers, **settings)
    try:
        return list(loader)
    finally:
        loader.close()


def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if not isinstance(one, torch.Tensor):
            return bool(one == other)
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)

    pairs = list(zip(left, right, strict=True))
    return all(list(one) == list(other) and all(equal(one[name], other[name]) for name in one) for one, other in pairs)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_make_the_batches_that_samples_make(root: Path, workers: int) -> None:
    quick = batches(StreamingDataset(remote=str(root), shuffle=True), workers)
    separately = batches(StreamingDataset(remote=str(root), shuffle=True, transform=Identity()), workers)
    assert same(quick, separately)
    assert [len(batch["id"]) for batch in quick] == [8] * 6 + [5]


def test_plain_samples_are_taken_as_rows(root: Path, rows_taken: list[int]) -> None:
    batches(StreamingDataset(remote=str(root)))
    assert len(rows_taken) == SAMPLES


def test_streams_of_the_same_columns_are_taken_as_rows(root: Path, tmp_path: Path, rows_taken: list[int]) -> None:
    from lightning_streaming import Stream

    streams = {"a": Stream(remote=str(root)), "b": Stream(remote=str(write(tmp_path / "b", PLAIN)))}
    assert sum(len(batch["id"]) for batch in batches(StreamingDataset(streams=streams))) == 2 * SAMPLES
    assert len(rows_taken) == 2 * SAMPLES


class Doubling(StreamingDataset):
    """A dataset of a user's, which looks at what it hands out."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for sample in super().__iter__():
            yield {"double": 2 * sample["id"]}


def test_whoever_looks_at_samples_gets_samples(root: Path, tmp_path: Path, rows_taken: list[int]) -> None:
    numbers = list(range(SAMPLES))
    plain = StreamingDataset(remote=str(root))
    seen = [int(one) for batch in batches(plain, collate_fn=lambda some: [one["id"] for one in some]) for one in batch]
    assert seen == numbers
    seen = [number for batch in batches(Doubling(remote=str(root))) for number in batch["double"].tolist()]
    assert seen == [2 * number for number in numbers]
    assert [sample["id"] for sample in StreamingDataset(remote=str(root), batch_size=8)] == numbers
    mixed = write(tmp_path / "text", {"id": "int", "text": "str"})
    assert batches(StreamingDataset(remote=str(mixed)))[0]["text"] == [str(number) for number in range(8)]
    assert rows_taken == []


def test_columns_are_cut_out_of_rows(root: Path, rows_taken: list[int]) -> None:
    chosen = batches(StreamingDataset(remote=str(root), shuffle=True, columns=["box", "id"]))
    assert len(rows_taken) == SAMPLES
    separately = StreamingDataset(remote=str(root), shuffle=True, columns=["box", "id"], transform=Identity())
    assert same(chosen, batches(separately))
    assert all(list(batch) == ["box", "id"] for batch in chosen)  # as they are stored


def test_columns_that_are_plain_may_be_among_others_of_fixed_size(tmp_path: Path, rows_taken: list[int]) -> None:
    root = write(tmp_path / "mixed", {**PLAIN, "text": "str"})
    assert len(batches(StreamingDataset(remote=str(root), columns=["id"]))) == 7
    assert rows_taken == []  # the text has no fixed size


@pytest.mark.parametrize("workers", [0, 2])
def test_a_last_batch_that_is_not_full_may_be_dropped(root: Path, workers: int) -> None:
    quick = batches(StreamingDataset(remote=str(root), shuffle=True), workers, drop_last=True)
    transformed = StreamingDataset(remote=str(root), shuffle=True, transform=Identity())
    assert same(quick, batches(transformed, workers, drop_last=True))
    assert [len(batch["id"]) for batch in quick] == [8] * 6


def test_a_batch_may_be_changed_while_another_is_needed(root: Path) -> None:
    first, second, *_ = batches(StreamingDataset(remote=str(root)))
    factor = torch.ones(1, dtype=torch.float64, requires_grad=True)
    loss = (first["box"] * factor).sum()
    second["box"].mul_(0)
    loss.backward()
    assert factor.grad is not None
    assert factor.grad.item() == pytest.approx(first["box"].sum().item())
    assert second["box"].untyped_storage().nbytes() == 8 * 4 * 8


def test_arrays_of_any_shape_are_a_table_as_long_as_they_are_alike(tmp_path: Path, rows_taken: list[int]) -> None:
    root = write(tmp_path / "free", {"id": "int", "tokens": "ndarray:uint16", "box": "ndarray", "share": "float32"})
    quick = batches(StreamingDataset(remote=str(root), shuffle=True))
    assert len(rows_taken) == SAMPLES
    assert same(quick, batches(StreamingDataset(remote=str(root), shuffle=True, transform=Identity())))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_whose_arrays_differ_from_those_of_others_come_all_the_same(
    tmp_path: Path, workers: int, drop_last: bool
) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int", "x": "ndarray:int32"}, size_limit=400) as writer:
        for number in range(100):
            shape = (number // 8 % 3 + 1, 2) if number < 56 else (2, 3) if number < 80 else (3, 2)
            writer.write({"id": number, "x": np.full(shape, number, np.int32)})
    quick = batches(StreamingDataset(remote=str(tmp_path)), workers, drop_last=drop_last)
    separately = StreamingDataset(remote=str(tmp_path), transform=Identity())
    assert same(quick, batches(separately, workers, drop_last=drop_last))
    assert len(quick) == (12 if drop_last else 13)


def test_a_batch_of_arrays_that_differ_cannot_be_collated(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "ndarray:int32"}) as writer:
        for number in range(16):
            writer.write({"x": np.zeros(2 if number < 10 else 3, np.int32)})
    loader = StreamingDataLoader(StreamingDataset(remote=str(tmp_path)), batch_size=8)
    under_way = iter(loader)
    assert next(under_way)["x"].shape == (8, 2)
    with pytest.raises(RuntimeError, match="equal size"):
        next(under_way)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_values_are_aligned(root: Path, batch_size: int) -> None:
    loader = StreamingDataLoader(StreamingDataset(remote=str(root), shuffle=True), batch_size=batch_size)
    for batch in loader:
        assert all(values.numpy().flags.aligned for values in batch.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_is_told_of_where_it_is_needed(root: Path, workers: int) -> None:
    dataset = StreamingDataset(remote=str(root))
    before = sum(source_of(dataset).catalog.samples_per_shard[:3])
    (root / "shard.00003.mds").unlink()
    loader = StreamingDataLoader(dataset, batch_size=2, num_workers=workers)
    seen: list[int] = []
    with pytest.raises(ObjectNotFoundError, match="00003"):
        seen.extend(number for batch in loader for number in batch["id"].tolist())
    assert seen == list(range(before - before % 2))
    loader.close()


@given(st.lists(st.sampled_from([0, 1, 2, 3, 70_000]), min_size=1, max_size=40))
def test_samples_are_sorted_by_shard_in_order_of_first_use(shards: list[int]) -> None:
    found = {shards[places[0]]: places.tolist() for places in by_shard(np.array(shards, np.int64))}
    assert found == {one: [place for place, shard in enumerate(shards) if shard == one] for one in shards}
    assert list(found) == list(dict.fromkeys(shards))


@pytest.mark.parametrize("workers", [0, 2])
def test_large_samples_go_straight_to_their_place(tmp_path: Path, workers: int) -> None:
    columns = {"id": "int", "image": "ndarray:uint8:3,110,100"}
    with MDSWriter(out=str(tmp_path), columns=columns, size_limit=300_000) as writer:
        for number in range(40):
            writer.write({"id": number, "image": np.full((3, 110, 100), number, np.uint8)})
    read = batches(StreamingDataset(remote=str(tmp_path), shuffle=True), workers)
    assert sorted(number for batch in read for number in batch["id"].tolist()) == list(range(40))
    assert all((batch["image"] == batch["id"][:, None, None, None]).all() for batch in read)


def groups_of(dataset: StreamingDataset, pinned: bool) -> list[BatchGroup]:
    """Read the groups of an epoch, in batches of 8."""
    start = run_state_of(dataset).begin(dataset_world(dataset), 8)
    channel = WorkerChannel(SharedEpochStart(), None)
    channel.pass_start.assign(start)
    return list(WorkerBatches(dataset, channel, default_collate, drop_last=False, separately=pinned))


def test_where_batches_are_pinned_each_comes_alone_and_as_tensors(root: Path) -> None:
    dataset = StreamingDataset(remote=str(root))
    groups = groups_of(dataset, pinned=True)
    assert [len(group.measures) for group in groups] == [1] * 7
    assert all(isinstance(group.batches, list) for group in groups)
    assert same([batch for group in groups for batch in group.batches], batches(dataset))


def test_packs_are_read_many_at_a_time_also_where_batches_are_pinned(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"tokens": "ndarray:uint16"}) as writer:
        for length in [16] * 64:
            writer.write({"tokens": np.arange(length, dtype=np.uint16)})
    packing = PackingConfig(column="tokens", capacity=16)
    groups = [
        [len(group.measures) for group in groups_of(StreamingDataset(remote=str(tmp_path), packing=packing), pinned)]
        for pinned in (False, True)
    ]
    assert max(groups[0]) > 1
    assert groups[0] == groups[1]


def test_the_default_written_out_is_the_default(root: Path, rows_taken: list[int]) -> None:
    batches(StreamingDataset(remote=str(root)), collate_fn=default_collate)
    assert len(rows_taken) == SAMPLES


class Fewer(StreamingDataset):
    """A dataset of a user's, which leaves samples out."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(super().__iter__(), 5)


class Twice(StreamingDataset):
    """A dataset of a user's, which hands out more than its share."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for sample in super().__iter__():
            yield sample
            yield sample


class LookingAhead(StreamingDataset):
    """A dataset of a user's, which reads some samples before it hands out the first."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ahead = []
        for sample in super().__iter__():
            ahead.append(sample)
            if len(ahead) > 4:
                yield ahead.pop(0)
        yield from ahead


@pytest.mark.parametrize("workers", [0, 1])
def test_whoever_hands_out_more_than_a_share_is_told(root: Path, workers: int) -> None:
    with pytest.raises(ConfigError, match="the pass has more batches than its epoch"):
        batches(Twice(remote=str(root)), workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_whoever_hands_out_less_than_a_share_is_told(root: Path, workers: int) -> None:
    with pytest.raises(ConfigError, match="the pass has fewer batches than its epoch"):
        batches(Fewer(remote=str(root)), workers)


def test_whoever_looks_ahead_loses_nothing(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int"}) as writer:
        for number in range(2 * 8192 + 100):  # more than a window of samples
            writer.write({"id": number})
    read = [number for batch in batches(LookingAhead(remote=str(tmp_path))) for number in batch["id"].tolist()]
    assert read == list(range(2 * 8192 + 100))


def test_rows_keep_the_cache_limit(tmp_path: Path) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    with MDSWriter(out=str(remote), columns={"id": "ndarray:int64:100"}, size_limit=16000) as writer:
        for number in range(600):
            writer.write({"id": np.full(100, number)})
    dataset = StreamingDataset(remote=str(remote), local=str(local), shuffle=True, cache_limit="90kb")
    read = sorted(number for batch in batches(dataset) for number in batch["id"][:, 0].tolist())
    assert read == list(range(600))
    assert sum(path.stat().st_size for path in local.rglob("*") if path.is_file()) <= 90 << 10


ODD = 5
"""A sample that is unlike those before it."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _image(number: int) -> Image.Image:
    return Image.new("RGB", (8 + number % 2, 8))


Make = Callable[[int], Any]
NO_BATCH: dict[str, tuple[Make, list[str], bool]] = {
    "image": (lambda number: {"x": _image(number)}, ["column 'x' is a PIL image (Image)", "make an array"], False),
    "image alone": (_image, ["each sample is a PIL image", "make an array"], False),
    "image in a tuple": (lambda number: (_image(number), number), ["column [0] is a PIL image", "transform="], False),
    "none": (lambda number: {"x": None}, ["column 'x' is None,", "put a value there"], False),
    "a none": (
        lambda number: {"x": None if number == ODD else number},
        ["column 'x' is None in 1 of 4 samples", "put a value there"],
        True,
    ),
    "object": (lambda number: {"x": {"y": datetime.date(2024, 1, 1)}}, ["column 'x'['y'] is an object", "date"], False),
    "shapes": (
        lambda number: {"id": number, "x": np.zeros((2, number % 3))},
        ["column 'x' is an array of different shapes", "(2, 1), (2, 2), (2, 0)", "pad them"],
        False,
    ),
    "tensors": (lambda number: {"x": torch.zeros(number + 1)}, ["of different shapes", "(5,), (6,)"], False),
    "byte order": (lambda number: {"x": np.full(2, number, ">i4")}, ["dtype >i4", "convert it to int32"], False),
    "dtype": (lambda number: {"x": np.array(["a", "b"])}, ["column 'x' is an array of dtype <U1"], False),
    "lengths": (lambda number: {"x": [0] * number}, ["column 'x' is a list of different lengths (4, 5, 6, 7)"], False),
    "columns": (
        lambda number: {"x": 1} if number == ODD else {"x": 1, "y": 2},
        [
            "each sample has different columns: ['x', 'y'] in number 0 of the batch, ['x'] in number 1",
            "name those that all have with columns=['x'], give all samples the same",
        ],
        True,
    ),
    "types": (
        lambda number: {"x": "text" if number == ODD else number},
        ["column 'x' is of different types, int and str"],
        True,
    ),
}


@pytest.mark.rotate(6)
@pytest.mark.parametrize("name", NO_BATCH)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_torch_cannot_collate_is_told_in_a_paragraph(records: Path, workers: int, name: str) -> None:
    make, words, names_a_sample = NO_BATCH[name]

    def transform(sample: dict[str, Any]) -> Any:
        return sample["id"] if sample["id"] < 4 else make(sample["id"])

    with closing(make_loader(records, workers=workers, shuffle=False, transform=transform)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(SampleError) as caught:
            next(batches)
    told = str(caught.value)
    assert [word for word in words if word not in told] == []
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    assert len(told.splitlines()) == 1 + names_a_sample
    if names_a_sample:
        key = json.loads(told[told.index("restore_sample(") + len("restore_sample(") : -1])
        assert StreamingDataset(remote=str(records)).restore_sample(key) == {"id": ODD}


def test_images_as_they_are_stored_are_told_of(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"image": "jpeg", "label": "int"}) as writer:
        for number in range(4):
            written = io.BytesIO()
            _image(number).save(written, "JPEG")
            writer.write({"image": Image.open(written), "label": number})
    loader = StreamingDataLoader(StreamingDataset(remote=str(tmp_path)), batch_size=2)
    with pytest.raises(
        SampleError,
        match=r"^column 'image' is a PIL image \(JpegImageFile\), which torch's default collate cannot batch",
    ):
        next(iter(loader))


def test_arrays_that_are_read_as_tables_are_told_of_too(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "ndarray:int32"}) as writer:
        for number in range(4):
            writer.write({"x": np.zeros(1 + number, np.int32)})
    with pytest.raises(SampleError, match=r"column 'x' is an array of different shapes, .* \(1,\), \(2,\)"):
        next(iter(StreamingDataLoader(StreamingDataset(remote=str(tmp_path)), batch_size=4)))


def test_what_goes_with_torch_is_left_to_it(records: Path) -> None:
    kinds = {"text": "a", "bytes": b"a", "bool": True, "float": 1.5, "numpy": np.float32(1), "list": [1, 2], "none": {}}
    (batch, *_) = make_loader(records, transform=lambda sample: {**sample, **kinds})
    assert list(batch) == ["id", *kinds]


def _refuse(samples: list[Any]) -> list[Any]:
    if any(sample["id"] == 9 for sample in samples):
        raise LookupError("no nine")
    return samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, 10])
def test_a_collate_function_that_fails_names_its_samples(records: Path, workers: int, batch_size: int) -> None:
    settings: dict[str, Any] = {"batch_size": batch_size, "loader": {"collate_fn": _refuse, "return_keys": True}}
    with closing(make_loader(records, workers=workers, **settings)) as loader:
        with pytest.raises(SampleError, match="collate_fn failed on a batch: LookupError: no nine") as caught:
            list(loader)
        cause = caught.value.__cause__
        assert (type(cause), str(cause)) == (LookupError, "no nine")
        *_, last = str(caught.value).splitlines()
        keys = [SampleKey.from_dict(json.loads(line)) for line in str(caught.value).splitlines() if line[:3] == "  {"]
        (batch,) = [batch for batch in ids(make_loader(records, batch_size=batch_size)) if 9 in batch]
        assert [loader.dataset.restore_sample(key)["id"] for key in keys] == batch[:8]
        assert (last == f"  and {len(batch) - 8} more") == (len(batch) > 8)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
