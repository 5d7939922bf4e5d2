"""One stream's own settings, and those it takes from the dataset.

Every argument of the dataset: what it accepts works, and what it cannot serve is refused in words.
"""

from __future__ import annotations

import inspect
import operator
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataset, World
from lightning_streaming.dataset.stream import StreamDefaults, cache_config_of, named_streams
from lightning_streaming.errors import ConfigError, DownloadError, ObjectNotFoundError, StreamingError
from tests.helpers import assert_error, ids, make_dataset, make_loader, write_dataset
from tests.reading.processes import wait_until
from tests.servers import HttpStore

DEFAULTS = StreamDefaults(split="train", download_retry=5, download_timeout=7.0, validate_hash="sha1", keep_zip=True)


def test_what_a_stream_leaves_open_is_the_datasets() -> None:
    config = cache_config_of(Stream(remote="s3://bucket/a", local="/cache"), "code", DEFAULTS)
    assert (config.name, config.remote, config.local) == ("code", "s3://bucket/a/train", "/cache/train")
    assert (config.download_retry, config.download_timeout) == (5, 7.0)
    assert (config.validate_hash, config.keep_zip) == ("sha1", True)


def test_what_a_stream_says_itself_wins() -> None:
    stream = Stream(
        remote="s3://bucket/a", split="", download_retry=1, download_timeout=2.0, validate_hash="", keep_zip=False
    )
    config = cache_config_of(stream, "code", DEFAULTS)
    assert (config.remote, config.download_retry, config.download_timeout) == ("s3://bucket/a", 1, 2.0)
    assert (config.validate_hash, config.keep_zip) == ("", False)


def test_a_stream_needs_a_place() -> None:
    with pytest.raises(ConfigError, match="remote=, local=, or both"):
        Stream(split="train")


def test_a_place_is_one_path_or_url() -> None:
    places: dict[str, Any] = {"remote": Path("data") / "rows", "local": Path("cache")}
    assert (Stream(**places).remote, Stream(**places).local) == ("data/rows", "cache")
    files: Any = ["s3://user:secret@bucket/a.parquet"]
    for option in ("remote", "local"):
        with pytest.raises(
            ConfigError, match=f"{option} of a stream must be one path or URL, but is a list; .*pattern"
        ):
            Stream(**{option: files})


@pytest.mark.parametrize(("name", "told"), [("train-0.parquet", "parquet"), ("0.tar", "webdataset"), ("a.npy", "npy")])
def test_data_of_another_format_needs_to_be_called_so(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).touch()
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(ObjectNotFoundError, match=f"files like {name} are read with format='{told}'"):
            assert StreamingDataset(remote=str(place)).size
    with pytest.raises(ConfigError, match=f"wildcard; pass format= too, like format='{told}'"):
        assert StreamingDataset(remote=str(tmp_path / f"*{name[-4:]}")).size


NO_ONLY_STREAM = dict.fromkeys(("remote", "local", "join"))


@pytest.mark.parametrize("name", ["get_shards", "prepare_shard", "set_up_local", "apply_default", "_download_file"])
def test_a_stream_that_would_fetch_in_its_own_way_is_refused(name: str) -> None:
    own = type("Table", (Stream,), {name: lambda self, *_: None})
    with assert_error(ConfigError, option="streams", stream="a", hint="register a filesystem") as caught:
        named_streams({"a": own(remote="s3://bucket/a")}, NO_ONLY_STREAM)
    assert name in str(caught.value)


def test_secrets_are_not_shown() -> None:
    stream = Stream(remote="s3://bucket/a", storage={"options": {"secret": "hunter2"}})
    assert "hunter2" not in repr(stream)
    assert "hunter2" not in repr(named_streams({"a": stream}, NO_ONLY_STREAM))
    with pytest.raises(ConfigError) as caught:
        named_streams({"a": {"remote": "x", "secret": "hunter2"}}, NO_ONLY_STREAM)
    assert "hunter2" not in str(caught.value)


def test_a_stream_is_a_value_that_pickles() -> None:
    stream = Stream(remote="s3://bucket/a", proportion=0.5, storage={"options": {"anon": True}})
    assert pickle.loads(pickle.dumps(stream)) == stream


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


NO_TOKENIZER: list[Any] = [
    "tokenizer.json",
    {},
    {"tokenizer": ""},
    *({"tokenizer": "bytes", name: value} for name, value in (("text", 3), ("chat", ""), ("variables", 3))),
    *({"tokenizer": "bytes", "eos": value} for value in (-1, 1.5, True)),
    {"tokenizer": "bytes", "text": "a", "chat": "b"},
    {"tokenizer": "bytes", "chat": "b", "eos": 1},
    {"tokenizer": "bytes", "template": "b"},
]
"""Values of packing.tokenize."""
REFUSED: dict[str, list[Any]] = {
    "sequence": ["EverySecond", 3, [len], [{"class_path": "os.system"}]],
    "streams": [{}, [], {"a": {"remotes": "x"}}, {"a": 5}, ["x"], "x"],
    "remote": [""],
    "local": ["s3://bucket/directory"],
    "split": [5, "a\0b"],
    "selection": [
        "score > 1",
        *({"where": value} for value in (" ", 3)),
        *({"fraction": value} for value in ("[:5]", "90%:10%", "5%:5%", ":101%", "5%")),
        *({"fraction": ":5%", "group_by": value} for value in (3, False, b"")),
        {"group_by": "doc"},
        *({"seed": value} for value in (1.5, "a", 2**63, True)),
        *({"indices": value} for value in ([[1], [2]], [1.5], ["a"], [[1], [2, 3]])),
    ],
    "join": [
        "x",
        {"a": 3},
        {"a": "x"},
        {"": {"remote": "x"}},
        {3: {"remote": "x"}},
        *({"a": value} for value in ({"key": "id"}, {"remote": "x", "key": 3}, {"x": 1}, {"remote": "x\ud800"})),
    ],
    "storage": ["x", {"options": 3}, {"options": {3: "x"}}, {"on_demand": "no"}, {"key": "x"}, {3: 4}],
    "download_retry": [-1, -3],
    "download_timeout": [0, -1, "60", True, float("nan"), float("inf")],
    "validate_hash": ["sha2", "SHA1", False],
    "keep_zip": [],
    "format": ["mds", "NPY", "", 3],
    "block_length": [0, -1, 2.5, True, "2049", 5],
    "follow_appends": [],
    "epoch_size": [-1, "-1", "ten", "1.5", "1x", "0", 0.5, float("nan")],
    "predownload": [0, -1, 1.5, "8"],
    "cache_limit": [-1, "many", "10 buckets", float("nan")],
    "schedule": [
        "broad",
        [{"name": "broad"}],
        3,
        {},
        {"broad": 3},
        {"broad": {"end": 10}},
        {"": {"mix": {"web": 1.0}}},
        {"broad": {"mix": {"web": 1.0}, "end": 10}},
    ],
    "mixing": [
        "tokens",
        *({"weights_in": value} for value in ("documents", 3, None)),
        {"weights_in": "tokens"},
        {"lengths": "size"},
        *({"size_exponent": value} for value in (-1, 1.5, "1", True, float("nan"))),
        *({"max_repeats": value} for value in (3, {"x": 2}, {3: 2})),
        {"beyond": "drop"},
        *({"longest_step": value} for value in (0, -1, "many", True)),
    ],
    "packing": ["concat", {"capacity": 8}, {"column": "x", "capacity": 0}, {"column": "x", "capacity": 8, "window": 0}]
    + [{"capacity": 8, "tokenize": value} for value in NO_TOKENIZER],
    "token_budget": [
        "tokens",
        {"tokens": 8},
        {"column": "x"},
        {"column": "x", "tokens": 0},
        {"column": 3, "tokens": 8},
    ],
    "sampling_method": ["random", "", None],
    "sampling_granularity": [0, -1, 1.5],
    "partition_algo": ["strict", None],
    "num_canonical_nodes": [-1, 1.5, "2"],
    "batch_size": [0, -1, 2.5, "4"],
    "shuffle": [],
    "shuffle_algo": ["py3", None],
    "shuffle_seed": [-1, 1.5, 2**63],
    "shuffle_block_size": [0, -1, 1.5],
    "batching_method": ["best", None],
    "skip": [["x"], ["5-3"], [-1], "a", 7, b"1", {1: 2}],
    "allow_unsafe_types": [],
    "columns": [[], "id", [3], 3, {"id"}],
    "replication": [0, -1, 2.0],
    "transform": [3, "rotate"],
    "seed_global_rng": [],
    "debug": [
        "logs",
        {"sample_logs": "x"},
        *({"sample_log": value} for value in ("", 7, True)),
        *({"watchdog_seconds": value} for value in (0, -1, "60", True, float("nan"), float("inf"))),
    ],
    "decode": [
        "image",
        {"image": "array"},
        *(
            {"columns": value}
            for value in ("image", {"image": "jpeg"}, {"image": np.array(["pil", "array"])}, {1: "pil"}, ["image"])
        ),
        *({"threads": value} for value in (-1, "2", 1.5, None)),
    ],
    "bad_samples": [
        "replace",
        *({"action": value} for value in ("skip", None, True, "replace", np.array(["replace", "error"]))),
        *({"max": value} for value in (-1, 0.01, "1.5", "101%", "many", "%", None, True, float("nan"))),
        *({"log": value} for value in ("", 7, True, "logs")),
    ],
    "world": [],
    "stream_name": ["mine", "", None],
    "stream_config": [{"table": "x"}, {"repeat": -1}, 7, {1: 2}],
}


def test_every_argument_has_its_row() -> None:
    assert REFUSED.keys() == inspect.signature(StreamingDataset).parameters.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_cannot_work_is_refused_at_birth(root: Path, name: str, value: Any) -> None:
    only_data = name in ("streams", "remote")
    with pytest.raises(ConfigError) as caught:
        make_dataset(None if only_data else root, **{name: value})
    assert len(str(caught.value)) > 30
    of_other = {"schedule": "streams", "stream_config": next(iter(value), None) if isinstance(value, dict) else None}
    assert (caught.value.option or "").partition(".")[0] in (name, of_other.get(name))


ARRAYS = [
    *("streams", "remote", "local", "split", "validate_hash", "format", "epoch_size", "stream_name", "stream_config"),
    *("shuffle_algo", "sampling_method", "partition_algo", "batching_method", "cache_limit", "schedule", "join"),
    *("selection", "selection.where", "selection.fraction", "selection.group_by", "storage", "storage.options"),
    *("mixing", "mixing.weights_in", "mixing.max_repeats", "mixing.beyond"),
    *("packing", "packing.column", "packing.method", "packing.dtype", "packing.pad", "packing.longer"),
    *("token_budget", "token_budget.column", "debug", "debug.sample_log", "decode", "decode.columns"),
    *("bad_samples", "bad_samples.action", "bad_samples.log", "bad_samples.max"),
]
NEEDED = {"packing": {"column": "x", "capacity": 8}, "token_budget": {"column": "x", "tokens": 8}}


@pytest.mark.parametrize("option", ARRAYS)
@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([]), np.array([[1, 2], [3, 4]])], ids=str)
def test_an_array_in_place_of_a_text_list_or_mapping_is_refused(root: Path, option: str, array: Any) -> None:
    group, _, field = option.partition(".")
    value = {**NEEDED.get(group, {}), field: array} if field else array
    with assert_error(ConfigError, option=option):
        make_dataset(None if option in ("streams", "remote") else root, **{group: value})


@pytest.mark.parametrize("name", ["shuffle_seed", "sampling_granularity"])
def test_none_is_refused_where_a_number_is_needed(root: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        make_dataset(root, **{name: None})


@pytest.mark.parametrize(
    ("also", "option"),
    [({"remote": "x"}, "streams"), ({"local": "x"}, "streams"), ({"stream_config": {"repeat": 2}}, "stream_config")],
)
def test_data_is_named_in_one_way_only(root: Path, also: dict[str, Any], option: str) -> None:
    with assert_error(ConfigError, option=option):
        StreamingDataset(streams=[Stream(remote=str(root))], **also)


def test_data_is_named_at_all() -> None:
    for empty in (StreamingDataset, Stream):
        with assert_error(ConfigError, option="remote"):
            empty()


def test_all_streams_have_a_proportion_or_none(root: Path) -> None:
    with assert_error(ConfigError, option="proportion", stream="b"):
        StreamingDataset(streams={"a": Stream(remote=str(root), proportion=1), "b": Stream(remote=str(root))})


@pytest.mark.parametrize(
    "weights",
    [
        {"proportion": 1, "repeat": 1},
        {"repeat": 1, "choose": 1},
        {"proportion": -1},
        {"repeat": float("nan")},
        {"choose": -1},
    ],
)
def test_a_stream_has_one_sound_weight(root: Path, weights: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Stream(remote=str(root), **weights)


def test_a_stream_of_which_no_sample_would_be_read_is_refused(root: Path) -> None:
    streams = {"all": Stream(remote=str(root)), "few": Stream(remote=str(root), repeat=0.001)}
    with pytest.raises(ConfigError, match=r"repeat of stream 'few' is 0.001, and the stream has \d+ samples"):
        len(make_dataset(streams=streams))
    streams["few"] = Stream(remote=str(root), repeat=0)
    assert len(make_dataset(streams=streams)) == len(make_dataset(root))


@pytest.mark.parametrize("epoch_size", [12.5, True, False, [5], "12.5"])
def test_an_epoch_is_of_whole_samples(root: Path, epoch_size: Any) -> None:
    with pytest.raises(ConfigError, match="epoch_size must be"):
        StreamingDataset(remote=str(root), epoch_size=epoch_size)


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ([{"proportion": 1}, {}], {}),
        ([{"proportion": 1}, {"repeat": 1}], {}),
        ([{"proportion": 1}, {"choose": 3}], {}),
        ([{"repeat": 1}, {}], {"epoch_size": 10}),
        ([{"choose": 0}, {"repeat": 0}], {}),
        ([{"proportion": 0}, {"proportion": 0}], {}),
    ],
)
def test_weights_that_contradict_each_other_are_refused(
    root: Path, weights: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    streams = [Stream(remote=str(root), **weight) for weight in weights]
    with pytest.raises(ConfigError):
        len(make_dataset(streams=streams, **settings))


def test_streams_are_a_list_or_named(root: Path) -> None:
    streams = [Stream(remote=str(root)), Stream(remote=str(root), choose=1)]
    assert make_dataset(streams=streams).epoch_size == 30
    assert list(make_dataset(streams={"code": streams[0], "docs": streams[1]}).streams) == ["code", "docs"]


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_directory_is_read_in_place(root: Path, as_type: Any) -> None:
    before = sorted(root.iterdir())
    for where in ({"remote": as_type(root)}, {"local": as_type(root)}, {"remote": as_type(root), "local": str(root)}):
        assert len(list(make_dataset(**where))) == 29
    assert sorted(root.iterdir()) == before


def test_a_remote_directory_is_copied_where_local_says(root: Path, tmp_path: Path) -> None:
    assert len(list(make_dataset(root, local=str(tmp_path / "cache")))) == 29
    assert {path.name for path in root.iterdir()} <= {path.name for path in (tmp_path / "cache").iterdir()}


def test_split_is_a_subdirectory_of_both_and_a_stream_may_have_its_own(root: Path, tmp_path: Path) -> None:
    streams = {"a": Stream(remote=str(root.parent), local=str(tmp_path)), "b": Stream(remote=str(root), split="")}
    dataset = make_dataset(streams=streams, split=root.name)
    assert len(list(dataset)) == 58
    assert (tmp_path / root.name / "index.json").exists()


def test_storage_options_reach_the_filesystem(http_store: HttpStore) -> None:
    write_dataset(http_store.root)
    with pytest.raises(ConfigError, match="no_such_option"):
        len(make_dataset(http_store.url, storage={"options": {"no_such_option": 1}}))


@pytest.mark.parametrize("retry", [0, 1])
def test_download_retry_counts_attempts_after_the_first(http_store: HttpStore, retry: int) -> None:
    write_dataset(http_store.root)
    http_store.fail("index.json", "status")
    with pytest.raises(DownloadError, match=f"{retry + 1} attempt"):
        len(make_dataset(http_store.url, download_retry=retry))
    assert http_store.requests() == ["index.json"] * (retry + 1)


def test_download_timeout_ends_an_attempt(http_store: HttpStore) -> None:
    write_dataset(http_store.root)
    http_store.fail("index.json", "stall")
    with pytest.raises(DownloadError, match=r"0\.3 s"):
        len(make_dataset(http_store.url, download_retry=0, download_timeout=0.3))


def test_validate_hash_names_a_hash_of_the_index(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", hashes=["sha1"])
    cache = str(tmp_path / "cache")
    assert len(list(make_dataset(tmp_path / "data", local=cache, validate_hash="sha1"))) == 29
    assert len(list(make_dataset(tmp_path / "data", local=cache + "2", validate_hash=""))) == 29
    with pytest.raises(ConfigError, match="sha1"):
        list(make_dataset(tmp_path / "data", local=cache + "3", validate_hash="md5"))


@pytest.mark.parametrize("keep", [False, True])
def test_keep_zip_keeps_compressed_files(tmp_path: Path, keep: bool) -> None:
    write_dataset(tmp_path / "data", compression="zstd")
    list(make_dataset(tmp_path / "data", local=str(tmp_path / "cache"), keep_zip=keep))
    assert any((tmp_path / "cache").glob("*.zstd")) == keep


@pytest.mark.parametrize(
    ("value", "samples"),
    [(None, 29), (0, 29), ("", 29), (10, 10), (40.0, 40), ("0.1k", 100), ("1K", 1000), (np.int64(7), 7)],
)
def test_epoch_size_is_a_count(root: Path, value: Any, samples: int) -> None:
    dataset = make_dataset(root, epoch_size=value)
    assert len(list(dataset)) == dataset.epoch_size == samples


@pytest.mark.parametrize(("predownload", "fetched"), [(1, 1), (8, 2), (None, 6)])
def test_predownload_is_how_far_ahead_shards_are_fetched(
    http_store: HttpStore, predownload: int | None, fetched: int
) -> None:
    write_dataset(http_store.root)
    dataset = make_dataset(http_store.url, shuffle=False, predownload=predownload)
    samples = iter(dataset)
    next(samples)
    assert wait_until(lambda: len(http_store.requests()) > fetched)  # the first request is for the index
    time.sleep(0.05)
    assert len(http_store.requests()) == 1 + fetched
    assert len(list(samples)) == 28


def test_sampling_method_says_whether_epochs_draw_anew(root: Path) -> None:
    streams = [Stream(remote=str(root), repeat=0.5)]
    fixed, balanced = make_dataset(streams=streams, sampling_method="fixed"), make_dataset(streams=streams)
    assert {s["id"] for s in fixed} == {s["id"] for s in fixed}
    assert {s["id"] for s in balanced} != {s["id"] for s in balanced}


def test_sampling_granularity_draws_runs(root: Path) -> None:
    streams = [Stream(remote=str(root), choose=9)]
    drawn = [{s["id"] for s in make_dataset(streams=streams, sampling_granularity=g)} for g in (1, 3)]
    assert [len(one) for one in drawn] == [9, 9]
    assert drawn[0] != drawn[1]


def test_both_partitions_read_the_same_sequence(root: Path) -> None:
    assert ids(make_loader(root, partition_algo="orig")) == ids(make_loader(root, partition_algo="relaxed"))


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("num_canonical_nodes", [None, 0, 1], [2, 4]),
        ("shuffle_seed", [9176], [0, 2**63 - 1]),
        ("shuffle_block_size", [16], [7, 2**40]),
        ("shuffle_algo", ["py1e"], ["py1s", "naive"]),
        ("shuffle", [True], [False]),
    ],
)
def test_order_follows_its_settings(root: Path, name: str, same: list[Any], other: list[Any]) -> None:
    usual = [s["id"] for s in make_dataset(root)]
    assert all([s["id"] for s in make_dataset(root, **{name: value})] == usual for value in same)
    assert all([s["id"] for s in make_dataset(root, **{name: value})][:29] != usual for value in other)


@pytest.mark.parametrize("allowed", [False, True])
def test_columns_that_need_unpickling_are_refused_before_anything_is_fetched(tmp_path: Path, allowed: bool) -> None:
    root = write_dataset(tmp_path / "data")
    index = (root / "index.json").read_text()
    (root / "index.json").write_text(index.replace('["int"]', '["pkl"]'))
    expected = "column_sizes" if allowed else "allow_unsafe_types"
    with pytest.raises(StreamingError, match=expected):
        list(make_dataset(root, local=str(tmp_path / "cache"), allow_unsafe_types=allowed))
    assert not list((tmp_path / "cache").glob("shard*"))


def test_replication_must_divide_the_ranks(root: Path) -> None:
    with pytest.raises(ConfigError, match="replication must divide the 4 ranks"):
        iter(make_dataset(root, replication=3, world=World(ranks_per_node=4)))


@pytest.mark.parametrize(
    "transform", [lambda sample: sample["id"], operator.itemgetter("id"), lambda s, rng: s["id"] + 0 * rng.random()]
)
def test_transform_is_applied_to_each_sample(root: Path, transform: Any) -> None:
    assert sorted(make_dataset(root, transform=transform)) == list(range(29))


@pytest.mark.parametrize("builtin", [dict, list, len])
def test_a_builtin_that_does_not_tell_its_parameters_is_a_transform(root: Path, builtin: Any) -> None:
    assert next(iter(make_dataset(root, shuffle=False, transform=builtin))) == builtin({"id": 0})


def test_an_explicit_world_is_believed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(make_dataset(root)) == 10
    assert len(make_dataset(root, world=World())) == 29


def test_a_stream_that_is_not_there_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="stream 'code'"):
        len(make_dataset(streams={"code": Stream(remote=str(tmp_path / "nowhere"))}))


def test_a_stream_may_be_a_mapping_of_its_fields(root: Path) -> None:
    by_name = {"a": {"remote": str(root), "repeat": 2}}
    (stream,) = make_dataset(streams=by_name).streams.values()
    assert (stream.asked, stream.name) == (Stream(remote=str(root), repeat=2), "a")
    (stream,) = make_dataset(streams=[{"remote": str(root)}]).streams.values()
    assert stream.asked == Stream(remote=str(root))
    with assert_error(ConfigError, option="streams.a.remote", stream="a"):
        make_dataset(streams={"a": {}})
