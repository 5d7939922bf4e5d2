"""Reading some of the columns only.

Datasets of json, csv, tsv and xsv shards, read as users read them.

Encodings of the user's own, in the worker processes of a loader.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, Stream, StreamingConfig, StreamingDataLoader, StreamingDataset
from lightning_streaming.cache.config import default_cache_directory
from lightning_streaming.dataset import open_shards
from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    IndexFormatError,
    IntegrityError,
    ShardCorruptError,
)
from lightning_streaming.formats import encodings
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.storage import Location
from lightning_streaming.writing.merging import merge
from tests.formats.golden_datasets import SPLIT, expectations, read_index, value_of
from tests.formats.small_shards import FORMATS, put_dataset, sample_of
from tests.golden import golden_path
from tests.helpers import (
    assert_resumes_at_every_step,
    descriptors_under,
    ids,
    make_dataset,
    make_loader,
    raises,
    write_dataset,
)
from tests.servers import HttpStore, S3Store

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

COLUMNS = {"id": "int", "image": "ndarray:uint8:4", "note": "json", "text": "str"}


def write(root: Path, columns: dict[str, str] = COLUMNS, *, first_id: int = 0, **values: Any) -> Path:
    """Twelve samples in shards of a few; ``values`` stand in for the usual ones."""
    usual = {"image": np.zeros(4, np.uint8), "note": {"a": 1}, "text": "é", "extra": 1.5}
    with MDSWriter(out=str(root), columns=columns, size_limit=450) as writer:
        for index in range(12):
            writer.write({**usual, "id": first_id + index, **values})
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_have_the_wanted_columns_in_the_usual_order(tmp_path: Path, workers: int) -> None:
    root = write(tmp_path / "a")
    everything = [batch["id"].tolist() for batch in make_loader(root, workers=workers)]
    loader = make_loader(root, workers=workers, columns=["text", "id"])
    batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == everything
    assert {tuple(batch) for batch in batches} == {("id", "text")}
    assert make_dataset(root, columns=["note"])[3] == {"note": {"a": 1}}


def test_the_rest_is_not_decoded(tmp_path: Path) -> None:
    root = write(tmp_path / "a", text=b"\xff", note=b"{")  # neither text nor JSON
    assert make_dataset(root, columns=["id"])[11] == {"id": 11}
    for name in ("text", "note"):
        with pytest.raises(EncodingError, match=f"column '{name}'"):
            make_dataset(root, columns=["id", name])[11]


def test_unsafe_columns_need_no_permission_where_they_are_not_read(tmp_path: Path) -> None:
    root = write(tmp_path / "a", {"id": "int", "extra": "pkl"})
    assert make_dataset(root, columns=["id"])[0] == {"id": 0}
    assert make_dataset(root, allow_unsafe_types=True)[0] == {"id": 0, "extra": 1.5}
    for columns in (None, ["extra"]):
        with pytest.raises(ConfigError, match="allow_unsafe_types"):
            make_dataset(root, columns=columns)[0]


def test_shards_may_differ_beside_the_wanted_columns(tmp_path: Path) -> None:
    streams = {
        "old": Stream(remote=str(write(tmp_path / "old", {"id": "int", "text": "str"}))),
        "new": Stream(remote=str(write(tmp_path / "new", {"extra": "float64", "id": "int"}, first_id=100))),
    }
    found = {sample["id"] for sample in StreamingDataset(streams=streams, batch_size=4, columns=["id"])}
    assert found == {*range(12), *range(100, 112)}
    for columns in (["extra"], ["id", "extra"]):
        dataset = StreamingDataset(streams=streams, batch_size=4, columns=columns)
        with pytest.raises(
            ConfigError, match=r"stream 'old': shard\.00000\.mds has no column 'extra'; it has 'id', 'text'"
        ):
            len(dataset)  # before the first sample, though only some shards lack it


def test_an_unknown_column_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    dataset = make_dataset(root, local=str(tmp_path / "cache"), columns=["label"])
    with raises(ConfigError, "no column 'label'", "'id', 'image', 'note', 'text'"):
        next(iter(dataset))
    assert not list((tmp_path / "cache").glob("shard*"))


def test_a_saved_position_does_not_depend_on_the_columns(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    before = make_loader(root)
    batches = iter(before)
    seen = [next(batches)["id"].tolist()]
    after = make_loader(root, columns=["id"])
    after.load_state_dict(before.state_dict())
    assert seen + [batch["id"].tolist() for batch in after] == [batch["id"].tolist() for batch in make_loader(root)]


def test_the_config_of_a_stage_takes_columns(tmp_path: Path) -> None:
    arguments = StreamingConfig(remote=str(write(tmp_path / "a")), columns=["id"]).dataset_arguments(
        shuffle_by_default=False
    )
    loader = StreamingDataLoader(StreamingDataset(**arguments), batch_size=12)
    assert [{name: values.tolist() for name, values in batch.items()} for batch in loader] == [{"id": list(range(12))}]


@pytest.mark.parametrize("stream", ["alone", "second"])
def test_an_unsafe_column_of_the_last_shard_is_refused_when_the_index_is_read(stream: str, tmp_path: Path) -> None:
    write(tmp_path / "all" / "a", {"id": "int"})
    write(tmp_path / "all" / "b", {"id": "int", "extra": "pkl"})
    merge([str(tmp_path / "all" / "a"), str(tmp_path / "all" / "b")], str(tmp_path / "all"))
    streams = {"x": Stream(remote=str(tmp_path / "all"))}
    if stream == "second":
        streams = {"first": Stream(remote=str(tmp_path / "all" / "a")), **streams}
    with pytest.raises(ConfigError, match=r"stream 'x': .* encoding pkl.*allow_unsafe_types=True"):
        make_dataset(streams=streams).size  # noqa: B018  # it reads the index
    assert make_dataset(streams=streams, columns=["id"]).size
    assert make_dataset(streams=streams, allow_unsafe_types=True).size


EXPECTED = expectations()
EVERY = pytest.mark.parametrize("split_format", FORMATS)
COMPRESSIONS = pytest.mark.parametrize("compression", [None, "zstd"])
SUFFIXES = pytest.mark.parametrize("suffix", [".meta", ""])
COUNT = 13
"""Samples of a dataset of :func:`put_dataset`, in shards of 5, 0, 5 and 3."""


def golden_samples(name: str) -> list[dict[str, Any]]:
    return [{column: value_of(value) for column, value in sorted(one.items())} for one in EXPECTED[name]["samples"]]


def read_all(dataset: StreamingDataset) -> list[dict[str, Any]]:
    return [dataset[index] for index in range(dataset.size)]


def upload_all(directory: Path, url: str, options: dict[str, Any]) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            Location(f"{url}/{path.relative_to(directory).as_posix()}", options).upload(path)


class TestGolden:
    @pytest.mark.parametrize("name", [*SPLIT, "merged"])
    def test_read_in_place(self, name: str) -> None:
        assert read_all(StreamingDataset(local=str(golden_path("mds", name)))) == golden_samples(name)

    @pytest.mark.rotate(2)
    @pytest.mark.parametrize("keep_zip", [True, False])
    @pytest.mark.parametrize("name", [*SPLIT, "merged"])
    def test_read_from_s3(self, s3: S3Store, tmp_path: Path, name: str, keep_zip: bool) -> None:
        bucket = s3.make_bucket()
        upload_all(golden_path("mds", name), bucket, s3.options)
        settings: dict[str, Any] = {"remote": bucket, "storage": {"options": s3.options}, "local": str(tmp_path)}
        assert read_all(StreamingDataset(**settings, keep_zip=keep_zip)) == golden_samples(name)
        wanted = {
            compressed.basename
            for shard in read_index(golden_path("mds", name)).shards
            for _, compressed in shard.files
            if compressed and keep_zip and shard.samples
        }
        kept = [path for path in tmp_path.rglob("*") if path.suffix in (".gz", ".zstd")]
        assert {path.relative_to(tmp_path).as_posix() for path in kept} == wanted

    @pytest.mark.parametrize(("name", "hash_name"), [("csv", "sha1"), ("json", "sha1"), ("tsv-zstd", "xxh64")])
    def test_hashes_of_both_files_are_checked(
        self, http_store: HttpStore, tmp_path: Path, name: str, hash_name: str
    ) -> None:
        upload_all(golden_path("mds", name), str(http_store.root), {})
        settings: dict[str, Any] = {"remote": http_store.url, "validate_hash": hash_name, "download_retry": 0}
        assert read_all(StreamingDataset(**settings, local=str(tmp_path / "a"))) == golden_samples(name)
        for raw, compressed in read_index(golden_path("mds", name)).shards[1].files:
            stored = (compressed or raw).basename
            http_store.fail(f"{stored}$", "corrupt", times=1)
            with pytest.raises(IntegrityError, match=f"{hash_name} of {http_store.url}/{stored} must be"):
                read_all(StreamingDataset(**settings, local=str(tmp_path / stored)))


class TestLoader:
    @pytest.mark.rotate(2)
    @EVERY
    @pytest.mark.parametrize("workers", [0, 2])
    def test_every_sample_of_a_dataset_on_s3_is_read_once(
        self, s3: S3Store, tmp_path: Path, split_format: str, workers: int
    ) -> None:
        put_dataset(tmp_path / "made", split_format, compression="zstd", hashes=("sha1",))
        bucket = s3.make_bucket()
        upload_all(tmp_path / "made", bucket, s3.options)
        loader = make_loader(bucket, workers=workers, storage={"options": s3.options}, local=str(tmp_path / "cache"))
        batches = list(loader)
        assert sorted(one for batch in ids(batches) for one in batch) == list(range(COUNT))
        for batch in batches:
            of_batch = [sample_of(index) for index in batch["id"].tolist()]
            assert batch["text"] == [sample["text"] for sample in of_batch]
            assert batch["score"].tolist() == [sample["score"] for sample in of_batch]

    @pytest.mark.rotate(2)
    @EVERY
    @COMPRESSIONS
    def test_it_resumes_exactly_at_every_step(self, tmp_path: Path, split_format: str, compression: str | None) -> None:
        put_dataset(tmp_path, split_format, compression=compression)
        assert_resumes_at_every_step(partial(make_loader, tmp_path))

    def test_it_resumes_exactly_where_streams_have_formats_of_their_own(self, tmp_path: Path) -> None:
        put_dataset(tmp_path / "csv", "csv")
        put_dataset(tmp_path / "json", "json", compression="zstd")
        write_dataset(tmp_path / "mds", 11)
        streams = {name: Stream(remote=str(tmp_path / name)) for name in ("csv", "json", "mds")}
        make = partial(make_loader, streams=streams, columns=["id"], workers=2, batch_size=8)
        assert_resumes_at_every_step(make, partial(make, workers=0))

    @EVERY
    def test_only_the_columns_asked_for_are_read(self, tmp_path: Path, split_format: str) -> None:
        put_dataset(tmp_path, split_format)
        dataset = StreamingDataset(remote=str(tmp_path), columns=["text", "id"])
        assert dataset[7] == {"id": 7, "text": sample_of(7)["text"]}
        with pytest.raises(ConfigError, match="has no column 'weight'"):
            len(StreamingDataset(remote=str(tmp_path), columns=["weight"], batch_size=1))

    def test_open_shards_are_counted_by_their_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(open_shards, "_MOST_FILES", 4)
        put_dataset(tmp_path, "csv", [1] * 8)
        dataset = StreamingDataset(remote=str(tmp_path))
        assert read_all(dataset) == [sample_of(index) for index in range(8)]
        assert descriptors_under(tmp_path) == 4


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda data: bytes(len(data)),
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + data,
}


class TestDamage:
    @pytest.mark.rotate
    @COMPRESSIONS
    @SUFFIXES
    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("keep_zip", [False, True])
    def test_damage_in_the_cache_is_fetched_again(
        self, http_store: HttpStore, tmp_path: Path, compression: str | None, suffix: str, damage: str, keep_zip: bool
    ) -> None:
        put_dataset(http_store.root, "csv", compression=compression)
        settings: dict[str, Any] = {"remote": http_store.url, "local": str(tmp_path), "keep_zip": keep_zip}
        read_all(StreamingDataset(**settings))
        path = tmp_path / f"shard.00002.csv{suffix}"
        whole = path.read_bytes()
        path.write_bytes(DAMAGES[damage](whole))
        assert read_all(StreamingDataset(**settings)) == [sample_of(index) for index in range(COUNT)]
        assert path.read_bytes() == whole

    def test_a_damaged_compressed_file_that_was_kept_is_fetched_again(
        self, http_store: HttpStore, tmp_path: Path
    ) -> None:
        """It decompresses to the right size, no hash is recorded of it, and what is in it is another shard's."""
        index = put_dataset(http_store.root, "csv", (5, 5), compression="zstd")
        settings: dict[str, Any] = {"remote": http_store.url, "local": str(tmp_path), "keep_zip": True}
        read_all(StreamingDataset(**settings))
        meta = index.shards[1].zip_meta
        assert meta is not None
        whole = (tmp_path / meta.basename).read_bytes()
        foreign = (tmp_path / "shard.00000.csv.meta.zstd").read_bytes()
        assert len(foreign) == len(whole)
        assert foreign != whole
        (tmp_path / meta.basename).write_bytes(foreign)
        (tmp_path / "shard.00001.csv.meta").unlink()
        assert read_all(StreamingDataset(**settings)) == [sample_of(index) for index in range(10)]
        assert (tmp_path / meta.basename).read_bytes() == whole

    @SUFFIXES
    def test_foreign_files_are_fetched_once_more_and_then_told(
        self, http_store: HttpStore, tmp_path: Path, suffix: str
    ) -> None:
        """The remote itself holds the files of another dataset, of the same sizes, and no hashes tell."""
        put_dataset(http_store.root, "csv", (4,))
        name = f"shard.00000.csv{suffix}"
        path = http_store.root / name
        path.write_bytes(path.read_bytes()[::-1])
        dataset = StreamingDataset(remote=http_store.url, local=str(tmp_path))
        with pytest.raises(ShardCorruptError, match=rf"stream '0': {tmp_path}/shard\.00000\.csv"):
            dataset[0]
        assert http_store.requests().count(name) == 2

    @SUFFIXES
    def test_a_file_removed_while_in_use_is_fetched_again(
        self, http_store: HttpStore, tmp_path: Path, suffix: str
    ) -> None:
        put_dataset(http_store.root, "csv", (4,))
        dataset = StreamingDataset(remote=http_store.url, local=str(tmp_path), batch_size=1)
        assert len(dataset) == 4
        dataset._source.fetch(0)  # is seen to be here
        (tmp_path / f"shard.00000.csv{suffix}").unlink()
        assert read_all(dataset) == [sample_of(index) for index in range(4)]

    @SUFFIXES
    def test_a_decompressed_file_of_a_dataset_read_in_place_is_made_anew(self, tmp_path: Path, suffix: str) -> None:
        put_dataset(tmp_path, "csv", (4,), compression="zstd")
        dataset = StreamingDataset(remote=str(tmp_path), batch_size=1)
        assert len(dataset) == 4
        dataset._source.fetch(0)
        path = default_cache_directory(str(tmp_path)) / f"shard.00000.csv{suffix}"
        path.write_bytes(path.read_bytes()[::-1])
        assert read_all(dataset) == [sample_of(index) for index in range(4)]

    @pytest.mark.rotate(2)
    @EVERY
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_bad_row_fails_the_step_that_needs_it(self, tmp_path: Path, split_format: str, workers: int) -> None:
        put_dataset(tmp_path, split_format)
        path = tmp_path / f"shard.00002.{split_format}"
        path.write_bytes(path.read_bytes().replace(b"1.75", b"one "))  # of sample 7
        loader = make_loader(tmp_path, shuffle=False, batch_size=1, workers=workers)
        found = []
        with raises(EncodingError, "stream '0'", f"{path}, sample 2: "):
            for batch in loader:
                found += batch["id"].tolist()
        assert found == list(range(7))

    def test_a_dataset_whose_files_share_a_name_ends_in_a_typed_error(self, tmp_path: Path) -> None:
        put_dataset(tmp_path / "made", "csv", (4,))
        index = tmp_path / "made" / "index.json"
        index.write_text(index.read_text().replace("shard.00000.csv.meta", "shard.00000.csv"))
        for local in (None, str(tmp_path / "cache")):
            with pytest.raises((FormatError, IntegrityError), match=r"stream '0'.*shard\.00000\.csv"):
                StreamingDataset(remote=str(tmp_path / "made"), local=local)[0]


class Backwards:
    """A text, backwards."""

    size = None

    def encode(self, value: str) -> bytes:
        return value[::-1].encode()

    def decode(self, data: bytes) -> str:
        return data.decode()[::-1]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset whose writer registered an encoding, which is forgotten when the test is over."""
    monkeypatch.setattr(encodings, "_REGISTERED", {})
    register_encoding("backwards", Backwards)
    with MDSWriter(out=str(tmp_path / "a"), columns={"id": "int", "text": "backwards"}) as writer:
        for index in range(12):
            writer.write({"id": index, "text": f"text {index}"})
    assert b"3 txet" in (tmp_path / "a" / "shard.00000.mds").read_bytes()
    return tmp_path / "a"


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_was_registered_reaches_the_workers(root: Path, method: str) -> None:
    loader = make_loader(root, workers=2, loader={"multiprocessing_context": method})
    found = {key: text for batch in loader for key, text in zip(batch["id"].tolist(), batch["text"], strict=True)}
    assert found == {index: f"text {index}" for index in range(12)}


def test_it_travels_with_the_dataset(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(make_dataset(root))
    monkeypatch.setattr(encodings, "_REGISTERED", {})
    assert pickle.loads(sent)[3] == {"id": 3, "text": "text 3"}
    assert registered_encodings() == {"backwards": Backwards}


def test_without_it_the_column_cannot_be_read(root: Path) -> None:
    index = root / "index.json"
    index.write_text(index.read_text().replace("backwards", "sideways"))
    with pytest.raises(IndexFormatError, match="but got 'sideways'; if it is your own, call register_encoding first"):
        make_dataset(root)[0]
    assert make_dataset(root, columns=["id"])[3] == {"id": 3}
