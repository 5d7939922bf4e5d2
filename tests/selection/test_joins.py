"""Joined datasets: their columns are in the samples of the stream, by position or by id, whatever reads them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import (
    CSVWriter,
    JoinConfig,
    JSONWriter,
    MDSWriter,
    SampleKey,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
)
from lightning_streaming.cache.eviction import FINISHED_BEFORE
from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    ObjectNotFoundError,
    SampleError,
    ShardCorruptError,
    StateMismatchError,
    UnknownArgumentError,
)
from lightning_streaming.writing import merge
from tests.helpers import (
    assert_error,
    assert_resumes_at_every_step,
    json_copy,
    make_dataset,
    make_loader,
    write_shards,
)
from tests.reading.processes import wait_until
from tests.servers import HttpStore
from tests.tiers import examples

SAMPLES = 53
IMAGES = {"id": "int", "x": "float32"}
CLIPS = {"emb": "ndarray:float32:2", "key": "str"}
CAPTIONS = {"id": "int", "text": "str"}
MORE = 20
"""Captions that belong to no image."""


def image(number: int) -> dict[str, Any]:
    """Ids do not count, and some are negative."""
    return {"id": 7 * number - 100, "x": number / 2}


def clip(number: int) -> dict[str, Any]:
    return {"emb": np.full(2, number, np.float32), "key": f"k{number}"}


def caption_of(sample_id: int) -> dict[str, Any]:
    return {"id": sample_id, "text": f"of {sample_id}"}


def captions(samples: int, seed: int = 0) -> Callable[[int], dict[str, Any]]:
    """Captions of these images and of more, in another order."""
    order = np.random.default_rng(seed).permutation(samples + MORE)
    return lambda number: caption_of(image(int(order[number]))["id"])


def cuts(total: int, seed: int) -> list[int]:
    """Sizes of shards, some of which may be empty."""
    if not total:
        return []
    borders = np.sort(np.random.default_rng(seed).integers(0, total + 1, 9))
    sizes: list[int] = np.diff(borders, prepend=0, append=total).tolist()
    return sizes


def write_images(root: Path, samples: int = SAMPLES, seed: int = 1) -> Path:
    return write_shards(root, cuts(samples, seed), IMAGES, image)


def write_clips(root: Path, samples: int = SAMPLES, seed: int = 2) -> Path:
    return write_shards(root, cuts(samples, seed), CLIPS, clip)


def write_captions(root: Path, samples: int = SAMPLES, seed: int = 3) -> Path:
    return write_shards(root, cuts(samples + MORE, seed), CAPTIONS, captions(samples, seed))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_images(root / "images")
    write_clips(root / "clips")
    write_captions(root / "captions")
    return root


def joins(data: Path, local: Path | None = None) -> dict[str, dict[str, Any]]:
    """Both ways of joining; fetched to directories of a node, where one is given."""
    asked: dict[str, dict[str, Any]] = {
        "clip": {"remote": str(data / "clips")},
        "captions": {"remote": str(data / "captions"), "key": "id"},
    }
    if local is not None:
        for name, one in asked.items():
            one["local"] = str(local / name)
    return asked


def joined_dataset(data: Path, local: Path | None = None, **asked: Any) -> StreamingDataset:
    where = {} if local is None else {"local": str(local / "images")}
    return make_dataset(data / "images", join=joins(data, local), **where, **asked)


def expected(number: int) -> dict[str, Any]:
    """What a sample ought to be."""
    one, other = image(number), clip(number)
    return {**one, "emb": other["emb"].tolist(), "key": other["key"], "text": f"of {one['id']}"}


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "emb": sample["emb"].tolist()}


def numbers_in(batch: Any) -> list[int]:
    """The images of a batch, whose other columns are found to be theirs."""
    numbers = [(number + 100) // 7 for number in batch["id"].tolist()]
    assert [(2 * number, 2 * number) for number in numbers] == [tuple((2 * one).tolist()) for one in batch["emb"]]
    assert batch["key"] == [f"k{number}" for number in numbers]
    assert batch["text"] == [f"of {image(number)['id']}" for number in numbers]
    return numbers


def sequence(data: Path, **asked: Any) -> list[int]:
    """The images of an epoch of the same dataset without joins, in its order."""
    dataset = make_dataset(data / "images", **asked)
    return [(sample["id"] + 100) // 7 for sample in dataset]


# --- what samples are ---


@settings(max_examples=examples(25), deadline=None)
@given(
    samples=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    selected=st.none() | st.sets(st.integers(0, 59), min_size=1),
    shuffle=st.booleans(),
    limited=st.booleans(),
)
def test_joined_samples_are_those_of_a_join_by_hand(
    samples: int, seed: int, selected: set[int] | None, shuffle: bool, limited: bool
) -> None:
    with TemporaryDirectory() as directory:
        data = Path(directory)
        write_images(data / "images", samples, seed)
        write_clips(data / "clips", samples, seed + 1)
        write_captions(data / "captions", samples, seed + 2)
        kept = list(range(samples)) if selected is None else sorted(one for one in selected if one < samples)
        if not kept:
            return
        asked: dict[str, Any] = {"shuffle": shuffle, "selection": {"indices": None if selected is None else kept}}
        local = data / "local" if limited else None
        dataset = joined_dataset(data, local, cache_limit="200kb" if limited else None, **asked)
        assert [plain(dataset[place]) for place in range(dataset.size)] == list(map(expected, kept))
        read = [plain(sample) for sample in dataset]
        assert read == list(map(expected, sequence(data, **asked)))
        dataset.close()


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_local", [False, True])
def test_loaders_hand_out_the_columns_of_all(data: Path, tmp_path: Path, workers: int, is_local: bool) -> None:
    dataset = joined_dataset(data, tmp_path if is_local else None)
    loader = StreamingDataLoader(dataset, num_workers=workers)
    assert [number for batch in loader for number in numbers_in(batch)] == sequence(data)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_find_the_same(data: Path, tmp_path: Path, method: str) -> None:
    dataset = joined_dataset(data, tmp_path)
    loader = StreamingDataLoader(dataset, num_workers=2, multiprocessing_context=method)
    assert [number for batch in loader for number in numbers_in(batch)] == sequence(data)
    assert len(list((tmp_path / "captions" / "selections").glob("*.npy"))) == 1


def test_a_join_is_of_the_stored_sample_whatever_is_selected(data: Path) -> None:
    chosen = [3, 4, 9, 30, 52]
    dataset = joined_dataset(data, selection={"indices": chosen})
    assert [plain(sample) for sample in dataset[:]] == list(map(expected, chosen))
    dataset = joined_dataset(data, selection={"where": lambda x: x >= 20})
    assert [plain(sample) for sample in dataset[:]] == list(map(expected, range(40, SAMPLES)))


def test_keys_restore_whole_samples(data: Path) -> None:
    dataset = joined_dataset(data)
    ((batch, keys), *_) = StreamingDataLoader(dataset, return_keys=True)
    numbers = numbers_in(batch)
    restored = [plain(joined_dataset(data, shuffle=False).restore_sample(key)) for key in keys]
    assert restored == list(map(expected, numbers))
    assert isinstance(keys[0], SampleKey)


def test_transforms_and_subclasses_see_the_columns_of_all(data: Path) -> None:
    class Texts(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return {"text": f"{sample['text']} {sample['key']}"}

    asked: dict[str, Any] = {"remote": str(data / "images"), "join": joins(data), "batch_size": 4, "shuffle": True}
    told = [f"of {image(number)['id']} k{number}" for number in sequence(data, shuffle_block_size=None)]
    assert [sample["text"] for sample in Texts(**asked)] == told
    transformed = StreamingDataset(**asked, transform=lambda sample: f"{sample['text']} {sample['key']}")
    assert list(transformed) == told


def test_streams_that_are_mixed_have_joins_of_their_own(data: Path, tmp_path: Path) -> None:
    more = write_shards(
        tmp_path / "more", [4, 3], {**IMAGES, **CLIPS}, lambda number: {**image(number + 1000), **clip(number + 1000)}
    )
    streams = {
        "joined": Stream(remote=str(data / "images"), join=joins(data)),
        "again": Stream(remote=str(data / "images"), join={"clip": {"remote": str(data / "clips")}}, repeat=2),
        "whole": Stream(remote=str(more)),
    }
    loader = StreamingDataLoader(StreamingDataset(streams=streams, batch_size=5, columns=["id", "emb"]))
    rows = [pair for batch in loader for pair in zip(batch["id"].tolist(), batch["emb"].tolist(), strict=True)]
    assert len(rows) == 3 * SAMPLES + 7
    assert all(emb == [(number + 100) // 7] * 2 for number, emb in rows)


@pytest.mark.parametrize(
    ("asked", "of_loader", "is_told"),
    [
        ({}, {}, True),
        ({"batching_method": "stratified"}, {}, True),
        ({"batching_method": "per_stream"}, {}, False),
        ({"columns": ["id"]}, {}, False),
        ({"transform": lambda sample: sample["id"]}, {}, False),
        ({}, {"collate_fn": list}, False),
        ({"batch_size": 1}, {}, False),
    ],
)
def test_batches_of_different_columns_are_told_of_at_the_start(
    data: Path,
    caplog: pytest.LogCaptureFixture,
    asked: dict[str, Any],
    of_loader: dict[str, Any],
    is_told: bool,
) -> None:
    streams = {
        "joined": Stream(remote=str(data / "images"), join={"clip": {"remote": str(data / "clips")}}),
        "plain": Stream(remote=str(data / "images")),
    }
    dataset = StreamingDataset(streams=streams, **{"batch_size": 4, **asked})
    loader = StreamingDataLoader(dataset, **of_loader)
    for _ in range(2):
        with suppress(SampleError) if is_told else nullcontext():
            next(iter(loader))
    told = [text for text in caplog.messages if "different columns" in text]
    assert len(told) == is_told
    for text in told:
        assert "['id', 'x', 'emb', 'key'] in stream 'joined', ['id', 'x'] in 'plain'" in text
        assert "name those that all have with columns=['id', 'x']" in text


def test_shards_of_different_columns_are_told_of_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part, columns in (("a", ["id", "x"]), ("b", ["id"])):
        write_shards(
            tmp_path / part, [5], {name: IMAGES[name] for name in columns}, lambda number: {"id": number, "x": 0}
        )
    merge([tmp_path / "a", tmp_path / "b"], tmp_path)
    dataset = StreamingDataset(remote=str(tmp_path), batch_size=5, shuffle=False, batching_method="per_stream")
    with suppress(SampleError):
        list(StreamingDataLoader(dataset))
    assert "['id', 'x'] in stream '0', ['id'] in '0'" in caplog.text
    caplog.clear()
    list(StreamingDataLoader(StreamingDataset(remote=str(tmp_path), batch_size=5, selection={"indices": range(5)})))
    assert "different columns" not in caplog.text


def test_streams_whose_joins_give_the_same_are_not_told_of(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    streams = {
        "a": Stream(remote=str(data / "images"), join=joins(data)),
        "b": Stream(remote=str(data / "images"), join=dict(reversed(joins(data).items()))),
    }
    next(iter(StreamingDataLoader(StreamingDataset(streams=streams, batch_size=4))))
    assert "different columns" not in caplog.text


def test_a_condition_that_looks_at_a_joined_column_is_told_of_it(data: Path) -> None:
    dataset = StreamingDataset(remote=str(data / "images"), join=joins(data), selection={"where": "emb > 1"})
    with pytest.raises(ConfigError, match=r"'emb' is joined, and .* can read only the stream's own columns"):
        _ = dataset.size


def test_a_misspelt_field_of_a_join_is_named() -> None:
    with assert_error(UnknownArgumentError, option="join.clip.prefx"):
        Stream(remote="x", join={"clip": {"remote": "y", "prefx": "z_"}})


def test_single_samples_are_read_by_their_bytes_alone(data: Path, tmp_path: Path) -> None:
    dataset = joined_dataset(data, tmp_path, storage={"on_demand": True})
    assert plain(dataset[17]) == expected(17)
    assert not list((tmp_path / "clip").glob("shard.*"))
    assert not list((tmp_path / "images").glob("shard.*"))


# --- ids ---

IDS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "int": ("int", lambda number: -(2**63) + number),
    "uint64": ("uint64", lambda number: np.uint64(2**64 - 1 - number)),
    "int16": ("int16", lambda number: np.int16(number - 20)),
    "str_int": ("str_int", lambda number: 2**63 + number),
    "str": ("str", lambda number: f"http://x/ü{number}" if number else ""),
    "bytes": ("bytes", lambda number: bytes([number, 0]) * (number % 3) + bytes([number])),
}


@pytest.mark.parametrize("kind", IDS)
def test_ids_of_every_kind_are_found(kind: str, tmp_path: Path) -> None:
    encoding, make = IDS[kind]
    write_shards(tmp_path / "a", [10, 0, 20], {"key": encoding}, lambda number: {"key": make(29 - number)})
    write_shards(
        tmp_path / "b", [1, 29], {"key": encoding, "n": "int"}, lambda number: {"key": make(number), "n": number}
    )
    dataset = StreamingDataset(
        remote=str(tmp_path / "a"), join={"b": {"remote": str(tmp_path / "b"), "key": "key"}}, batch_size=7
    )
    assert [sample["n"] for sample in dataset] == list(range(29, -1, -1))
    assert [sample["key"] for sample in dataset[:]] == [make(number) for number in range(29, -1, -1)]


def test_ids_are_the_same_in_columns_of_other_widths_and_formats(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [9], {"key": "int16"}, lambda number: {"key": number - 4})
    for writer in (CSVWriter, JSONWriter):
        root = tmp_path / writer.__name__
        with writer(out=str(root), columns={"key": "int", "n": "int"}, size_limit=60) as written:
            for number in range(10, -10, -1):
                written.write({"key": number, "n": number**2})
        join = {"b": {"remote": str(root), "key": "key"}}
        dataset = StreamingDataset(remote=str(tmp_path / "a"), join=join, batch_size=7)
        assert [sample["n"] for sample in dataset] == [(number - 4) ** 2 for number in range(9)]


# --- columns ---


def test_columns_are_chosen_and_renamed(data: Path) -> None:
    join = {
        "clip": JoinConfig(remote=str(data / "clips"), columns=["emb"], prefix="clip_"),
        "captions": JoinConfig(remote=str(data / "captions"), key="id", columns=["id", "text"], prefix="of_"),
    }
    dataset = StreamingDataset(remote=str(data / "images"), join=join, batch_size=4)
    sample = dataset[5]
    assert list(sample) == ["id", "x", "clip_emb", "of_id", "of_text"]
    assert sample["of_id"] == sample["id"] == image(5)["id"]
    assert sample["clip_emb"].tolist() == [5, 5]


@pytest.mark.parametrize("columns", [["text"], ["key", "x"], ["id"], ["emb", "text"], ["x", "text", "id"]])
def test_a_dataset_names_columns_as_they_are_in_samples(data: Path, columns: list[str]) -> None:
    dataset = joined_dataset(data, columns=columns)
    assert set(plain({"emb": np.zeros(0), **dataset[8]})) - {"emb"} == set(columns) - {"emb"}
    whole = expected(8)
    for name in columns:
        found = dataset[8][name]
        assert (found.tolist() if name == "emb" else found) == whole[name]
    assert {name for sample in dataset for name in sample} == set(columns)


def test_what_is_not_wanted_is_not_fetched(data: Path, tmp_path: Path) -> None:
    dataset = joined_dataset(data, tmp_path, columns=["x", "text"])
    assert len(list(dataset)) == SAMPLES
    assert not list((tmp_path / "clip").glob("shard.*"))
    assert list((tmp_path / "captions").glob("shard.*"))
    other = tmp_path / "other"
    dataset = joined_dataset(data, other, columns=["key"], selection={"indices": [0, 1]})
    assert len(list(dataset)) == 2
    sizes = cuts(SAMPLES, 2)
    needed = {int(np.searchsorted(np.cumsum(sizes), number, side="right")) for number in (0, 1)}
    assert len(list((other / "clip").glob("shard.*"))) == len(needed) < len(sizes)
    assert not (other / "captions" / "selections").exists()


# --- resuming ---


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_goes_on_with_other_workers_and_batches(data: Path, workers: int) -> None:
    def loader(batch_size: int, num_workers: int) -> StreamingDataLoader:
        return StreamingDataLoader(joined_dataset(data, batch_size=batch_size), num_workers=num_workers)

    whole = sequence(data)
    stopped = loader(4, workers)
    batches = iter(stopped)
    read = [number for _ in range(5) for number in numbers_in(next(batches))]
    state = json_copy(stopped.state_dict())
    resumed = loader(7, 2 - workers)
    resumed.load_state_dict(state)
    read += [number for batch in resumed for number in numbers_in(batch)]
    assert read == whole


def test_a_resume_is_exact_at_every_step(data: Path) -> None:
    assert_resumes_at_every_step(lambda: make_loader(data / "images", join=joins(data)), epochs=1)


def test_states_of_streams_without_joins_are_what_they_were(data: Path) -> None:
    state = make_loader(data / "images").state_dict()
    assert "join" not in json.dumps(state)
    joined = make_loader(data / "images", join=joins(data)).state_dict()
    told = joined["fingerprint"]["streams"]["0"].pop("join")
    assert joined["fingerprint"] == state["fingerprint"]
    assert told["captions"]["key"] == "id"
    assert told["clip"]["samples"] == SAMPLES


def test_a_resume_with_other_joined_data_is_refused(data: Path, tmp_path: Path) -> None:
    loader = make_loader(data / "images", join=joins(data))
    next(iter(loader))
    state = json_copy(loader.state_dict())
    shutil.copytree(data, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "clips")
    write_clips(tmp_path / "data" / "clips", seed=77)
    for join, told in (
        (joins(tmp_path / "data"), r"streams\.0\.join\.clip\.digest"),
        ({"clip": joins(data)["clip"]}, r"streams\.0\.join\.captions"),
        ({}, r"streams\.0\.join"),
    ):
        other = make_loader(data / "images", join=join)
        other.load_state_dict(state)
        with pytest.raises(StateMismatchError, match=told):
            len(other)
        other.load_state_dict(state, on_mismatch="warn")
        assert len(other) == len(loader)


def test_the_order_is_that_of_the_stream_alone(data: Path) -> None:
    for shuffle_algo in ("py1e", "py2s", "blockwise"):
        joined = joined_dataset(data, shuffle_algo=shuffle_algo)
        assert [(sample["id"] + 100) // 7 for sample in joined] == sequence(data, shuffle_algo=shuffle_algo)


# --- what is refused ---


def refused(told: str, root: Path, *, option: str, stream: str | None = "0", **asked: Any) -> None:
    dataset = StreamingDataset(remote=str(root), batch_size=4, **asked)
    with assert_error(ConfigError, option=option, stream=stream) as caught:
        list(dataset)
    assert re.search(told, str(caught.value))


def test_counts_that_differ_are_refused(data: Path) -> None:
    join = {"captions": {"remote": str(data / "captions"), "prefix": "c_"}}
    words = rf"stream '0' has {SAMPLES} samples, but join 'captions' has {SAMPLES + MORE}.*key="
    refused(words, data / "images", option="join.captions.key", join=join)


def test_columns_of_one_name_are_refused(data: Path) -> None:
    told = r"column 'x' is in both stream '0' and stream '0', join 'again'; list columns=.*prefix=, like 'again_'"
    refused(
        told,
        data / "images",
        option="join.again.columns",
        stream=None,
        join={"again": {"remote": str(data / "images"), "columns": ["x"]}},
    )
    told = r"column 'emb' is in both stream '0', join 'a' and stream '0', join 'b'"
    both = {name: {"remote": str(data / "clips")} for name in ("a", "b")}
    refused(told, data / "images", option="join.b.columns", stream=None, join=both)


def test_columns_that_are_not_there_are_refused(data: Path) -> None:
    told = r"stream '0', join 'clip': unknown column 'embed'; the dataset has 'emb', 'key'"
    refused(
        told,
        data / "images",
        option="join.clip.columns",
        join={"clip": {"remote": str(data / "clips"), "columns": ["embed"]}},
    )
    told = (
        r"stream '0': shard\.00000\.mds has no column 'txt'; it has 'id', 'x'.*joined columns are 'emb', 'key', 'text'"
    )
    refused(told, data / "images", option="columns", join=joins(data), columns=["txt"])


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("idd", r"stream '0' has no column key='idd'; it has 'id', 'x'"),
        ("x", r"key='x' of stream '0' is 'float32'; ids are whole numbers, str or bytes"),
    ],
)
def test_columns_that_hold_no_ids_are_refused(data: Path, on: str, told: str) -> None:
    join = {"captions": {"remote": str(data / "captions"), "key": on}}
    refused(told, data / "images", option="join.captions.key", join=join)


def test_ids_of_another_kind_are_refused(data: Path, tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [3], {"id": "str", "y": "int"}, lambda number: {"id": str(number), "y": 0})
    told = r"key='id' is a column of whole numbers in stream '0' and str in stream '0', join 'x'"
    refused(told, data / "images", option="join.x.key", join={"x": {"remote": str(root), "key": "id"}})


@pytest.mark.parametrize("workers", [0, 1])
def test_an_id_that_is_missing_is_told_when_it_is_asked_for(data: Path, tmp_path: Path, workers: int) -> None:
    root = write_shards(tmp_path / "x", [5, SAMPLES - 6], CAPTIONS, lambda number: caption_of(image(number)["id"]))
    join = {"captions": {"remote": str(root), "key": "id"}}
    dataset = make_dataset(data / "images", join=join, shuffle=False)
    assert dataset[SAMPLES - 2]["text"] == f"of {image(SAMPLES - 2)['id']}"
    missing = image(SAMPLES - 1)["id"]
    told = rf"stream '0', join 'captions': no sample has id={missing} of sample {SAMPLES - 1} of the stream"
    with pytest.raises(ConfigError, match=told):
        list(StreamingDataLoader(dataset, num_workers=workers))
    left = make_dataset(data / "images", join=join, selection={"where": lambda x: x < (SAMPLES - 1) / 2})
    assert len(list(left)) == SAMPLES - 1


@pytest.mark.parametrize("kind", ["int", "str"])
def test_an_id_that_is_there_twice_is_told(kind: str, tmp_path: Path) -> None:
    def row(number: int) -> dict[str, Any]:
        return {"id": number % 37 if kind == "int" else f"n{number % 37}", "y": number}

    root = write_shards(tmp_path / "x", [10, 20, 10], {"id": kind, "y": "int"}, row)
    images = write_shards(tmp_path / "a", [3], {"id": kind}, row)
    shown = "0" if kind == "int" else "'n0'"
    told = (
        rf"stream '0', join 'x': samples 0 and 37 both have id={shown}"
        r"|samples . and 3. both have id=.*more duplicates"
    )
    refused(told, images, option="join.x.key", join={"x": {"remote": str(root), "key": "id", "columns": ["y"]}})


def test_joins_belong_to_each_of_several_streams(data: Path) -> None:
    with assert_error(ConfigError, option="join"):
        StreamingDataset(streams={"a": Stream(remote=str(data / "images"))}, join={"b": {"remote": "x"}})


def test_damaged_shards_are_named_by_their_join(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    for path in (tmp_path / "data" / "clips").glob("shard.*"):
        path.write_bytes(path.read_bytes()[:-1])
    dataset = joined_dataset(tmp_path / "data")
    with pytest.raises(
        ShardCorruptError, match=r"^stream '0', join 'clip': .*shard\.00007\.mds has \d+ bytes, but index\.json says"
    ):
        list(dataset)
    for path in (tmp_path / "data" / "captions").glob("shard.*"):
        path.write_bytes(path.read_bytes().replace(b"of ", b"\xff\xff "))
    dataset = joined_dataset(tmp_path / "data", columns=["text"])
    with pytest.raises(EncodingError, match=r"^stream '0', join 'captions': .*column 'text'"):
        list(dataset)


def test_unsafe_columns_of_a_join_are_refused(data: Path, tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"any": "pkl"}) as writer:
        for number in range(SAMPLES):
            writer.write({"any": {number}})
    join = {"x": {"remote": str(tmp_path / "x")}}
    refused("stream '0', join 'x': .*allow_unsafe_types", data / "images", option="allow_unsafe_types", join=join)
    trusted = StreamingDataset(remote=str(data / "images"), join=join, allow_unsafe_types=True)
    assert trusted[3]["any"] == {3}
    assert StreamingDataset(remote=str(data / "images"), join=join, columns=["x"])[3] == {"x": 1.5}


# --- fetching ---


def test_joined_shards_are_fetched_ahead_and_counted(data: Path, tmp_path: Path) -> None:
    dataset = joined_dataset(data, tmp_path, shuffle=False, predownload=1000)
    samples = iter(dataset)
    next(samples)
    needed = {f"shard.{shard:05}.mds" for shard, size in enumerate(cuts(SAMPLES, 2)) if size}
    assert wait_until(lambda: {path.name for path in (tmp_path / "clip").glob("shard.*")} == needed)
    del samples
    assert dataset.cache_usage >= sum(path.stat().st_size for path in (tmp_path / "clip").glob("shard.*"))


@pytest.mark.parametrize("limit", [None, "300kb"])
def test_shards_joined_by_id_are_fetched_ahead(data: Path, tmp_path: Path, limit: str | None) -> None:
    chosen = [0, 1, 2, 3, 4, 50]
    local = tmp_path / "local"
    asked: dict[str, Any] = {"shuffle": False, "batch_size": 2, "predownload": 1000, "selection": {"indices": chosen}}
    dataset = joined_dataset(data, local, columns=["text"], cache_limit=limit, **asked)
    assert dataset.size == 6
    whole = {path.name for path in (data / "captions").glob("shard.*")}
    for path in (local / "captions").glob("shard.*"):
        path.unlink()  # what making the index of ids has fetched
    order = np.random.default_rng(3).permutation(SAMPLES + MORE)
    places = np.flatnonzero(np.isin(order, chosen))
    stops = np.cumsum(cuts(SAMPLES + MORE, 3))
    needed = {f"shard.{int(np.searchsorted(stops, place, side='right')):05}.mds" for place in places}
    samples = iter(dataset)
    assert next(samples)["text"] == f"of {image(0)['id']}"
    assert wait_until(lambda: {path.name for path in (local / "captions").glob("shard.*")} == needed)
    assert needed < whole
    assert [sample["text"] for sample in samples] == [f"of {image(number)['id']}" for number in chosen[1:]]


def test_a_failure_of_fetching_ahead_is_raised_by_who_needs_it(http_store: HttpStore, tmp_path: Path) -> None:
    root = http_store.root
    write_shards(root / "images", [2] * 10, IMAGES, image)
    write_shards(root / "captions", [5] * 4, CAPTIONS, lambda number: caption_of(image(number)["id"]))
    urls = {name: f"{http_store.url}/{name}" for name in ("images", "captions")}
    join = {"captions": {"remote": urls["captions"], "key": "id", "local": str(tmp_path / "captions")}}
    asked: dict[str, Any] = {"remote": urls["images"], "local": str(tmp_path / "images"), "join": join}
    dataset = StreamingDataset(**asked, batch_size=2, shuffle=False, predownload=1000, download_retry=0)
    assert dataset.size == 20
    (root / "captions" / "shard.00003.mds").unlink()
    (tmp_path / "captions" / "shard.00003.mds").unlink()
    samples = iter(dataset)
    assert [next(samples)["text"] for _ in range(15)] == [f"of {image(number)['id']}" for number in range(15)]
    with pytest.raises(ObjectNotFoundError, match=r"stream '0', join 'captions': .*shard\.00003\.mds"):
        next(samples)


def test_a_limit_holds_for_joined_shards_too(tmp_path: Path) -> None:
    def big(number: int) -> dict[str, Any]:
        return {"emb": np.full(2000, number, np.float32)}

    write_shards(tmp_path / "images", [20] * 10, IMAGES, image)
    write_shards(tmp_path / "clips", [10] * 20, {"emb": "ndarray:float32:2000"}, big)
    local, limit = tmp_path / "local", 600_000
    dataset = make_dataset(
        tmp_path / "images",
        local=str(local / "images"),
        join={"clip": {"remote": str(tmp_path / "clips"), "local": str(local / "clip")}},
        cache_limit=limit,
        shuffle=False,
    )
    most = 0
    for number, sample in enumerate(dataset):
        assert sample["emb"][0] == number
        most = max(most, dataset.cache_usage)
    assert 0 < most <= limit
    assert sum(path.stat().st_size for path in (tmp_path / "clips").glob("shard.*")) > 2 * limit
    small = make_dataset(
        tmp_path / "images",
        local=str(local / "a"),
        join={"clip": {"remote": str(tmp_path / "clips"), "local": str(local / "b")}},
        cache_limit=150_000,
    )
    with pytest.raises(ConfigError, match="cache_limit is 150000b; at least 167kb is needed"):
        small[0]


def test_a_pass_marks_what_it_needs_no_more_of_joined_data(tmp_path: Path) -> None:
    write_shards(tmp_path / "images", [5] * 12, IMAGES, image)
    write_shards(tmp_path / "clips", [4] * 15, CLIPS, clip)
    join = {"clip": {"remote": str(tmp_path / "clips"), "local": str(tmp_path / "kept")}}
    dataset = make_dataset(
        tmp_path / "images", local=str(tmp_path / "local"), join=join, cache_limit=10**6, shuffle=False
    )
    assert len(list(dataset)) == 60  # all is fetched: who fetches a shard may hold its lock for longer than it is read
    samples = iter(dataset)
    for _ in range(33):
        next(samples)
    assert sum(path.endswith(".mds") for path in mapped_under(tmp_path / "kept")) <= 2  # others were let go of
    assert len(list(samples)) == 27
    finished = [path.stat().st_atime_ns < FINISHED_BEFORE for path in sorted((tmp_path / "kept").glob("shard.*"))]
    assert finished == sorted(finished, reverse=True)  # in order of reading; and the last two batches end nothing
    assert finished.count(True) >= len(finished) - 3


def mapped_under(directory: Path) -> set[str]:
    """Files of a directory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if f"{directory}/" in line}


def test_joined_data_may_lie_on_a_store(data: Path, http_store: HttpStore, tmp_path: Path) -> None:
    shutil.copytree(data / "captions", http_store.root / "captions")
    join = {"captions": {"remote": f"{http_store.url}/captions", "key": "id", "local": str(tmp_path / "captions")}}
    dataset = make_dataset(data / "images", join=join)
    assert dataset[9]["text"] == f"of {image(9)['id']}"
    assert len(list(StreamingDataLoader(dataset))) == -(-SAMPLES // 4)


def test_what_is_fetched_of_joined_data_is_measured(data: Path, tmp_path: Path) -> None:
    loader = StreamingDataLoader(joined_dataset(data, tmp_path, columns=["x", "emb"]))
    list(loader)
    fetched = sum(path.stat().st_size for name in ("images", "clip") for path in (tmp_path / name).glob("shard.*"))
    assert loader.statistics().fetched_bytes == fetched


def test_nothing_is_shown_that_is_secret(data: Path) -> None:
    join = {"clip": {"remote": "s3://user:hunter2@bucket/x", "storage": {"options": {"secret": "hunter2"}}}}
    dataset = StreamingDataset(remote=str(data / "images"), join=join)
    assert "hunter2" not in repr(dataset.streams) + repr(join and dataset.streams[0].asked.join) + str(dataset.config())
    assert dataset.config()["streams"]["0"]["join"]["clip"]["key"] is None
