"""NumPy and Megatron files as streams: the samples, order, batches and packs that the same data gives as MDS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.cache.generated_index import generated_index
from lightning_streaming.errors import ConfigError, IntegrityError
from lightning_streaming.formats import npy
from lightning_streaming.formats.columns import flat_column
from lightning_streaming.formats.npy import RowsReader
from lightning_streaming.reading.packs import assemblers
from lightning_streaming.storage import Location
from tests.formats.test_megatron import write as write_megatron
from tests.helpers import make_loader, raises, read_epochs, write_shards
from tests.servers import S3Store
from tests.tiers import some

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
SIZES = [9, 30, 1, 17]
LENGTH = 5


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


def on_store(s3: S3Store, root: Path) -> dict[str, Any]:
    """Where a directory's files are in a bucket."""
    bucket = s3.make_bucket()
    for path in root.iterdir():
        Location(f"{bucket}/{path.name}", s3.options).upload(path)
    return {"remote": bucket, "storage": {"options": s3.options}}


def rows(first: int, count: int) -> NDArray[np.int32]:
    return np.arange(LENGTH * first, LENGTH * (first + count), dtype=np.int32).reshape(count, LENGTH)


def write_npy(root: Path, first: int = 0, *, flat: bool = False) -> Path:
    """Rows that follow each other, in files of :data:`SIZES`; or all of a file as one long row, and a little more."""
    root.mkdir(parents=True)
    for number, size in enumerate(SIZES):
        values = rows(first, size)
        np.save(root / f"{number}.npy", np.append(values, [0, 0]).astype(np.int32) if flat else values)
        first += size
    return root


def write_blocks(root: Path, first: int = 0) -> Path:
    """The same of long rows as pairs of files, in documents that do not begin where blocks do."""
    for number, size in enumerate(SIZES):
        tokens = rows(first, size).ravel().tolist()
        write_megatron(root, [[tokens[:3]], [tokens[3:], [0, 0]]], str(number), 4)
        first += size
    return root


def write_mds(root: Path, column: str, first: int = 0) -> Path:
    values = rows(first, sum(SIZES))
    return write_shards(root, SIZES, {column: f"ndarray:int32:{LENGTH}"}, lambda number: {column: values[number]})


WAYS: dict[str, tuple[str, Callable[..., Path], dict[str, Any]]] = {
    "npy": ("values", write_npy, {"format": "npy"}),
    "npy blocks": ("tokens", partial(write_npy, flat=True), {"format": "npy", "block_length": LENGTH}),
    "megatron blocks": ("tokens", write_blocks, {"format": "megatron", "block_length": LENGTH}),
}


def batches(dataset: StreamingDataset, **options: Any) -> list[dict[str, torch.Tensor]]:
    loader = StreamingDataLoader(dataset, batch_size=4, **options)
    try:
        return list(loader)
    finally:
        loader.close()


def same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(
        list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one) for one, other in pairs
    )


@pytest.mark.rotate(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_same_shards_of_mds(tmp_path: Path, way: str, workers: int) -> None:
    column, write, options = WAYS[way]
    other, mds = write(tmp_path / "other"), write_mds(tmp_path / "mds", column)
    how: dict[str, Any] = {"shuffle": True, "shuffle_block_size": 20, "num_canonical_nodes": 2}
    found = batches(StreamingDataset(remote=str(other), **options, **how), num_workers=workers)
    expected = batches(StreamingDataset(remote=str(mds), **how), num_workers=workers)
    assert same(found, expected)
    assert found[0][column].dtype == torch.int32
    assert {int(row[0]) for batch in found for row in batch[column]} == set(rows(0, sum(SIZES))[:, 0].tolist())


@pytest.mark.parametrize("way", WAYS)
def test_samples_are_those_of_mds(tmp_path: Path, way: str) -> None:
    column, write, options = WAYS[way]
    other = StreamingDataset(remote=str(write(tmp_path / "other")), **options)
    mds = StreamingDataset(remote=str(write_mds(tmp_path / "mds", column)))
    assert len(other) == len(mds) == sum(SIZES)
    for number in range(-3, len(mds), 7):
        assert np.array_equal(other[number][column], mds[number][column])
        assert other[number][column].dtype == np.int32


def test_a_mixture_with_mds_is_taken_as_rows_where_columns_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    copy_rows = RowsReader.copy_rows

    def counted(reader: RowsReader, indexes: NDArray[np.int64], to: NDArray[np.void]) -> None:
        taken.extend(indexes.tolist())
        copy_rows(reader, indexes, to)

    monkeypatch.setattr(RowsReader, "copy_rows", counted)
    streams = {
        "blocks": Stream(remote=str(write_blocks(tmp_path / "blocks")), format="megatron", block_length=LENGTH),
        "npy": Stream(remote=str(write_npy(tmp_path / "npy", 100, flat=True)), format="npy", block_length=LENGTH),
    }
    found = batches(StreamingDataset(streams=streams))
    assert len(taken) == 2 * sum(SIZES) == sum(len(batch["tokens"]) for batch in found)
    streams["mds"] = Stream(remote=str(write_mds(tmp_path / "mds", "tokens", 200)))
    mixed = batches(StreamingDataset(streams=streams, shuffle=True))
    assert len({int(row[0]) for batch in mixed for row in batch["tokens"]}) == 3 * sum(SIZES)


# --- parts of large files ---


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 10 rows at most."""
    monkeypatch.setattr(npy, "PART_BYTES", 10 * 4 * LENGTH)


@pytest.mark.rotate(2)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_large_file_are_shards(s3: S3Store, tmp_path: Path, way: str) -> None:
    column, write, options = WAYS[way]
    root = write(tmp_path / "other")
    sizes = [9, 10, 10, 10, 1, 8, 9]
    values = rows(0, sum(SIZES))
    mds = write_shards(
        tmp_path / "mds", sizes, {column: f"ndarray:int32:{LENGTH}"}, lambda number: {column: values[number]}
    )
    how: dict[str, Any] = {"shuffle": True, "shuffle_block_size": 20, "num_canonical_nodes": 2}
    expected = batches(StreamingDataset(remote=str(mds), **how))
    here = StreamingDataset(remote=str(root), **options, **how)
    assert [shard.samples for shard in here.streams[0].get_shards()] == sizes
    assert same(batches(here), expected)
    assert not list((tmp_path / "caches").glob("**/*.rows/*"))
    place = on_store(s3, root)
    for workers in (0, 2):
        assert same(batches(StreamingDataset(**place, **options, **how), num_workers=workers), expected)
    found = {path.name: path.stat().st_size for path in (tmp_path / "caches").glob("**/*.rows/*")}
    assert len(found) == 5
    assert found["0-10"] == 10 * 4 * LENGTH
    assert not [path for path in (tmp_path / "caches").glob("**/1.*") if path.is_file()]


@pytest.mark.usefixtures("small_parts")
def test_only_the_part_of_a_sample_is_fetched(s3: S3Store, tmp_path: Path) -> None:
    place = on_store(s3, write_npy(tmp_path / "other"))
    dataset = StreamingDataset(**{**place, "remote": f"{place['remote']}/1.npy"}, format="npy")
    assert np.array_equal(dataset[15]["values"], rows(9, 30)[15])
    assert [path.name for path in (tmp_path / "caches").glob("**/*.rows/*")] == ["10-20"]


@pytest.mark.usefixtures("small_parts")
def test_a_large_file_that_was_changed_is_told_by_its_name(s3: S3Store, tmp_path: Path) -> None:
    root = write_npy(tmp_path / "other")
    place = on_store(s3, root)
    datasets = [StreamingDataset(**one, format="npy", batch_size=1) for one in ({"remote": str(root)}, place)]
    assert [len(dataset) for dataset in datasets] == [sum(SIZES)] * 2
    np.save(root / "1.npy", rows(9, 30).astype(np.float32))
    Location(f"{place['remote']}/1.npy", s3.options).upload(root / "1.npy")
    for dataset in datasets:
        with raises(IntegrityError, "1.npy", "was replaced since it was indexed"):
            list(dataset)


@pytest.mark.usefixtures("small_parts")
def test_an_index_made_ahead_serves_who_names_some_files(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "other")
    text = generated_index(Location(str(root)), "npy")
    (root / "index.json").write_bytes(text)
    dataset = StreamingDataset(remote=f"{root}/[13].npy", format="npy")
    assert [shard.samples for shard in dataset.streams[0].get_shards()] == [10, 10, 10, 8, 9]
    with raises(ConfigError, "index.json has no file that matches '7*.npy'"):
        StreamingDataset(remote=f"{root}/7*.npy", format="npy").size  # noqa: B018


def test_a_run_goes_on_exactly(tmp_path: Path) -> None:
    """As :func:`assert_resumes_at_every_step`, of samples that have no id of their own."""
    root = tmp_path / "data"
    root.mkdir()
    for number, size in enumerate(SIZES):
        records = np.zeros(size, [("id", "<i8"), ("more", "<f4", (2,))])
        records["id"] = np.arange(size) + sum(SIZES[:number])
        np.save(root / f"{number}.npy", records)
    make = partial(make_loader, root, format="npy")
    made, states = read_epochs(make(), 2)
    for place in some(range(0, len(states), 5), 4):
        loader = make()
        loader.load_state_dict(states[place])
        assert read_epochs(loader, 2) == (made[place:], states[place:])


def test_records_may_be_selected(tmp_path: Path) -> None:
    records = np.zeros(20, [("label", "u1"), ("lang", "U2")])
    records["label"], records["lang"] = np.arange(20) % 3, np.where(np.arange(20) < 10, "en", "de")
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", records)
    dataset = StreamingDataset(
        remote=str(tmp_path / "data"), format="npy", selection={"where": "label == 2 and lang == 'de'"}, batch_size=1
    )
    assert [(int(one["label"]), one["lang"]) for one in dataset] == [(2, "de")] * 3


def test_a_file_that_was_changed_ends_the_run_by_its_name(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "data")
    dataset = StreamingDataset(remote=str(root), format="npy", batch_size=1)
    assert len(dataset) == sum(SIZES)
    np.save(root / "1.npy", rows(9, 30).astype(np.float32))
    with raises(IntegrityError, "1.npy", "was replaced since it was indexed"):
        list(dataset)


# --- packing ---

LENGTHS = [int(one) for one in np.minimum(np.random.default_rng(5).lognormal(2, 1, 60).astype(int), 90)]


def document(number: int) -> NDArray[np.uint16]:
    return (number * 100 + np.arange(LENGTHS[number])).astype(np.uint16)


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, Path]:
    """The same documents in shards of 40 and 20: as pairs of files, and as MDS."""
    told = [[document(number).tolist()] for number in range(60)]
    for name, part in (("a", told[:40]), ("b", told[40:])):
        write_megatron(tmp_path / "megatron", part, name)
    columns = {"tokens": "ndarray:uint16"}
    mds = write_shards(tmp_path / "mds", [40, 20], columns, lambda number: {"tokens": document(number)})
    return tmp_path / "megatron", mds


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the name of each column that packs are joined of by bytes."""
    names: list[str] = []

    def noted(reader: Any, info: Any, name: str, dtype: str | None = None) -> Any:
        names.append(info.format)
        return flat_column(reader, info, name, dtype)

    monkeypatch.setattr(assemblers, "flat_column", noted)
    return names


PACKINGS: dict[str, dict[str, Any]] = {
    "packs": {"packing": {"capacity": 64}, "batch_size": 2},
    "rows of blocks": {"packing": {"capacity": 64, "method": "concat"}, "batch_size": 2},
    "groups": {"token_budget": {"tokens": 128}},
}


def packed(remote: Path, column: str, *, packing: Any = None, token_budget: Any = None, **how: Any) -> list[Any]:
    option: dict[str, Any] = (
        {"packing": {"column": column, **packing}} if packing else {"token_budget": {"column": column, **token_budget}}
    )
    batch_size = how.pop("batch_size", None)
    dataset = StreamingDataset(remote=str(remote), shuffle=True, num_canonical_nodes=1, **option, **how)
    loader = StreamingDataLoader(dataset, batch_size=batch_size)
    return [{name: np.asarray(value).tolist() for name, value in batch.items()} for batch in loader]


@pytest.mark.parametrize("way", PACKINGS)
def test_documents_are_packed_as_those_of_mds(documents: tuple[Path, Path], way: str, joined: list[str]) -> None:
    megatron, mds = documents
    found = packed(megatron, "tokens", format="megatron", **PACKINGS[way])
    assert set(joined) == {"megatron"}
    assert found == packed(mds, "tokens", **PACKINGS[way])
    assert len(found) > 3


@pytest.mark.parametrize("way", PACKINGS)
def test_rows_are_packed_as_those_of_mds(tmp_path: Path, way: str, joined: list[str]) -> None:
    found = packed(write_npy(tmp_path / "npy"), "values", format="npy", **PACKINGS[way])
    assert set(joined) == {"npy"}
    assert found == packed(write_mds(tmp_path / "mds", "values"), "values", **PACKINGS[way])


def test_what_torch_has_no_tensors_of_is_packed_document_by_document(tmp_path: Path, joined: list[str]) -> None:
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "a.npy", rows(0, 20).astype(">i4"))
    how: dict[str, Any] = {"packing": {"capacity": 20}, "batch_size": 2}
    found = packed(tmp_path / "npy", "values", format="npy", **how)
    assert joined == []
    assert sorted(token for batch in found for row in batch["input_ids"] for token in row) == list(range(100))
