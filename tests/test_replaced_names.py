"""Errors for names that do not exist: the nearest name, or what replaces that of another library."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import lightning_streaming
from lightning_streaming import (
    CSVWriter,
    JoinConfig,
    JSONWriter,
    LocalDataset,
    MDSWriter,
    MixturePhase,
    PackingConfig,
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    XSVWriter,
)
from lightning_streaming.errors import ConfigError, MissingArgumentError, UnknownArgumentError
from lightning_streaming.exports import MODULE_HINTS, TOPICS
from lightning_streaming.signatures import HINTS
from lightning_streaming.writing.writers import ShardWriter
from tests.helpers import assert_error, make_loader, write_dataset


class Text(StreamingDataset):
    """As users write them."""

    def __init__(self, *, tokenizer: str = "", max_length: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokenizer, self.max_length = tokenizer, max_length


def loader(**arguments: Any) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(remote="data", batch_size=2), **arguments)


MAKERS: dict[str, Callable[..., Any]] = {
    "StreamingDataset": lambda **arguments: StreamingDataset(remote="data", **arguments),
    "Text": lambda **arguments: Text(remote="data", **arguments),
    "Stream": lambda **arguments: Stream(remote="data", **arguments),
    "StreamingConfig": lambda **arguments: StreamingConfig(remote="data", **arguments),
    "StreamingDataLoader": loader,
    "StreamingDataModule": StreamingDataModule,
    "JoinConfig": lambda **arguments: JoinConfig(remote="data", key="id", **arguments),
    "MixturePhase": lambda **arguments: MixturePhase(mix={"a": 1}, **arguments),
    "PackingConfig": PackingConfig,
    "LocalDataset": lambda **arguments: LocalDataset("data", **arguments),
    "MDSWriter": lambda **arguments: MDSWriter(out="data", **arguments),
    "JSONWriter": lambda **arguments: JSONWriter(out="data", **arguments),
    "CSVWriter": lambda **arguments: CSVWriter(out="data", **arguments),
    "XSVWriter": lambda **arguments: XSVWriter(out="data", separator="|", **arguments),
}
DATASET: Any = StreamingDataset
STREAM: Any = Stream
WRITER: Any = MDSWriter
ROWS: Any = CSVWriter
LOADER: Any = StreamingDataLoader
"""As they are called where no type checker looks on."""
CLASSES: dict[str, type] = {
    "StreamingDataset": StreamingDataset,
    "StreamingConfig": StreamingConfig,
    "Stream": Stream,
    "StreamingDataLoader": StreamingDataLoader,
    "StreamingDataModule": StreamingDataModule,
    "JoinConfig": JoinConfig,
    "MixturePhase": MixturePhase,
    "PackingConfig": PackingConfig,
    "ShardWriter": ShardWriter,
    "LocalDataset": LocalDataset,
}


@pytest.mark.parametrize(
    ("maker", "written", "meant"),
    [
        ("StreamingDataset", "batchsize", "did you mean batch_size=?"),
        ("StreamingDataset", "shuffle_sed", "did you mean shuffle_seed=?"),
        ("StreamingDataset", "Remote", "did you mean remote=?"),
        ("StreamingDataset", "qqq", "help(StreamingDataset)"),
        ("Text", "max_lenght", "did you mean max_length=?"),
        ("Text", "cache_limt", "did you mean cache_limit=?"),
        ("Text", "input_dir", "remote= is"),
        ("Stream", "propotion", "did you mean proportion=?"),
        ("StreamingConfig", "predownlod", "did you mean predownload=?"),
        ("StreamingDataLoader", "num_worker", "did you mean num_workers=?"),
        ("StreamingDataLoader", "return_key", "did you mean return_keys=?"),
        ("LocalDataset", "splits", "did you mean split=?"),
        ("MDSWriter", "column", "did you mean columns=?"),
        ("JSONWriter", "new_line", "did you mean newline=?"),
        ("XSVWriter", "separators", "did you mean separator=?"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_name(maker: str, written: str, meant: str) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        MAKERS[maker](**{written: "hunter2"})
    assert str(caught.value).startswith(f"{maker} takes no argument {written!r}: ")
    assert meant in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("kind", [TypeError, ConfigError])
def test_it_is_what_python_users_expect(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        StreamingDataset(remote="data", whatever=1)  # type: ignore[call-arg]  # that is the test
    with pytest.raises(kind):
        PackingConfig(capacity=3)


@pytest.mark.parametrize(
    ("call", "option", "message"),
    [
        (
            lambda: MAKERS["PackingConfig"](capacity=3),
            "packing.column",
            "PackingConfig needs column=, like {column: tokens, capacity: 8192}",
        ),
        (
            lambda: StreamingDataset(remote="data", packing={"capacity": 3}),
            "packing.column",
            "PackingConfig needs column=, like {column: tokens, capacity: 8192}",
        ),
        (lambda: WRITER(columns={"id": "int"}), "out", "MDSWriter needs out="),
        (lambda: LOADER(num_workers=2), "dataset", "StreamingDataLoader needs dataset="),
    ],
)
def test_a_missing_argument_is_named(call: Callable[[], Any], option: str, message: str) -> None:
    with assert_error(MissingArgumentError, option=option) as raised:
        call()
    assert str(raised.value) == message


HINTS_FOR_ARGUMENTS = {
    ("StreamingDataset", "input_dir"): "remote= is the location of the shards, local= a directory of this machine",
    (
        "StreamingDataset",
        "samples",
    ): "epoch_size= is how many samples an epoch draws; Stream(choose=...), from one stream",
    (
        "StreamingDataset",
        "max_cache_size",
    ): "cache_limit= is the maximum number of bytes on the node, not a share of its disk",
    ("Stream", "samples"): "choose= is how many samples an epoch draws",
    ("Stream", "weight"): "proportion= is a stream's share of an epoch",
    ("StreamingConfig", "batch_size"): "pass it to the data module: StreamingDataModule(train=..., batch_size=...)",
    ("StreamingDataset", "where"): "its name is selection.where",
    ("StreamingConfig", "sample_log"): "its name is debug.sample_log",
    ("Stream", "on_demand"): "its name is storage.on_demand",
    ("PackingConfig", "max_length"): "capacity= is the number of tokens in a pack",
    ("LocalDataset", "remote"): "a LocalDataset reads a directory of this machine; StreamingDataset reads a remote",
    ("MDSWriter", "chunk_bytes"): "size_limit= is the maximum number of bytes in a shard",
    ("XSVWriter", "local"): "out= is the directory or URL, or (directory, URL) for both",
}


def test_an_argument_of_another_library_is_refused_with_its_replacement() -> None:
    for (maker, written), said in HINTS_FOR_ARGUMENTS.items():
        with pytest.raises(UnknownArgumentError) as caught:
            MAKERS[maker](**{written: 1})
        assert str(caught.value) == f"{maker} takes no argument {written!r}: {said}"


def test_an_unknown_field_of_a_small_group_is_refused_with_all_that_it_takes() -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        MixturePhase(weights={"web": 1})  # type: ignore[call-arg]
    assert all(item.name in str(caught.value) for item in fields(MixturePhase))


def test_none_of_them_is_taken_for_a_misspelling() -> None:
    for maker in MAKERS.keys() - {"Text"}:  # a user's class
        kind = CLASSES.get(maker, ShardWriter)
        for written in HINTS.get(kind.__name__, {}).keys() - inspect.signature(kind).parameters:
            with pytest.raises(UnknownArgumentError, match=f"{written!r}: (?!did you mean)(?!it takes)(?!see help)"):
                MAKERS[maker](**{written: 1})


@pytest.mark.parametrize("name", CLASSES)
def test_each_hint_is_for_a_name_that_does_not_exist(name: str) -> None:
    kind = CLASSES[name]
    arguments = inspect.signature(kind).parameters
    assert [hint for hint in HINTS.get(name, {}) if hint in arguments and hasattr(kind, hint)] == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DATASET("s3://bucket/hunter2"), "StreamingDataset takes no positional arguments, but got 1"),
        (lambda: DATASET("cache", "s3://bucket/hunter2", "train"), "as in StreamingDataset(remote=...)"),
        (lambda: STREAM("s3://bucket/hunter2"), "as in Stream(remote=...)"),
        (lambda: WRITER("hunter2", {"id": "int"}), "as in MDSWriter(out=...)"),
        (lambda: ROWS("hunter2"), "as in CSVWriter(out=...)"),
        (lambda: loader_by_place(4, False), "at most 2 positional arguments, but got 3"),
    ],
)
def test_positional_arguments_are_refused_with_a_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        call()
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def loader_by_place(*places: Any) -> Any:
    return StreamingDataLoader(StreamingDataset(remote="data"), *places)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One of each kind that tells of attributes, by the kind's name in the table."""
    root = write_dataset(tmp_path_factory.mktemp("data") / "a")
    made = make_loader(root)
    with MDSWriter(out=root.parent / "b", columns={"id": "int"}) as writer:
        pass
    return {
        "StreamingDataset": made.dataset,
        "StreamingDataLoader": made,
        "Stream": Stream(remote=str(root)),
        "DatasetStream": made.dataset.streams[0],
        "ShardWriter": writer,
    }


HINTS_FOR_ATTRIBUTES = {
    ("StreamingDataset", "remote"): "a stream of a dataset has it: dataset.streams[0].remote",
    ("StreamingDataset", "current_epoch"): "dataset.next_epoch is the epoch of the next pass",
    ("StreamingDataLoader", "num_samples_yielded"): 'state_dict()["sample_in_epoch"] is the position over all ranks',
    ("Stream", "get_shards"): "a stream of a dataset has it: dataset.streams[0].get_shards",
    ("DatasetStream", "get_index_size"): "dataset.cache_usage counts indexes too",
    ("ShardWriter", "compression"): "get_config() has it",
}


def test_an_attribute_of_another_library_raises_with_its_replacement(objects: dict[str, Any]) -> None:
    for (kind, name), said in HINTS_FOR_ATTRIBUTES.items():
        with pytest.raises(AttributeError) as caught:
            getattr(objects[kind], name)
        assert str(caught.value).endswith(f" object has no attribute {name!r}: {said}")
    for kind, value in objects.items():
        assert [name for name in HINTS[kind] if hasattr(value, name)] == []


def test_copies_and_pickles_are_whole(objects: dict[str, Any]) -> None:
    for one in (objects["StreamingDataset"], objects["Stream"]):
        for made in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(made) is type(one)
            assert made.__class__.__name__ == type(one).__name__
    assert pickle.loads(pickle.dumps(objects["StreamingDataset"]))[3] == {"id": 3}


def test_an_attribute_that_is_nowhere_is_an_ordinary_error(objects: dict[str, Any]) -> None:
    for one in objects.values():
        with pytest.raises(AttributeError, match=r"has no attribute 'nowhere'$"):
            _ = one.nowhere


class Broken(StreamingDataset):
    """Its property fails for want of something else."""

    @property
    def vocabulary(self) -> Any:
        return self.words  # type: ignore[attr-defined]  # that is the test


def test_a_property_that_fails_tells_what_it_lacked() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'words'$"):
        _ = Broken(remote="data").vocabulary


def test_a_subclass_may_use_a_replaced_name_for_its_own() -> None:
    dataset = Text(remote="data")
    dataset.split = "train"  # type: ignore[attr-defined]  # as any attribute
    assert dataset.split == "train"  # type: ignore[attr-defined]  # as any attribute


HINTS_FOR_THE_MODULE = {
    "optimize": "write_parallel writes a dataset from many inputs, MDSWriter from one",
    "clean_stale_shared_memory": "there is no shared memory to clean up: a new run can start at any time",
    "base": f"public names are in lightning_streaming itself, or in its modules {', '.join(TOPICS)}",
    "write_parallel": "from lightning_streaming.writing import write_parallel",
}


def test_a_name_of_the_module_raises_with_its_replacement() -> None:
    for name, said in HINTS_FOR_THE_MODULE.items():
        with pytest.raises(AttributeError) as caught:
            getattr(lightning_streaming, name)
        assert str(caught.value) == f"module 'lightning_streaming' has no attribute {name!r}: {said}"
    assert [name for name in MODULE_HINTS if hasattr(lightning_streaming, name)] == []


def test_a_misspelt_name_of_the_module_raises_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"did you mean StreamingDataset\?"):
        lightning_streaming.StreamingDatset  # type: ignore[attr-defined]  # noqa: B018 looking it up is the test


def test_a_call_still_shows_what_a_class_takes() -> None:
    for one in (StreamingDataset, Stream, StreamingConfig, MDSWriter):
        assert {"remote", "out"} & set(inspect.signature(one).parameters)


def test_nothing_is_written_by_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for maker, make in MAKERS.items():
        with pytest.raises(UnknownArgumentError, match=maker):
            make(qqq=1)
    assert not list(tmp_path.iterdir())
