"""What is said of names that nothing here has: the nearest of ours, or what takes the place of another library's."""

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
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    XSVWriter,
)
from lightning_streaming.errors import ConfigError, UnknownArgumentError
from lightning_streaming.replaced_names import REPLACED_ARGUMENTS, REPLACED_ATTRIBUTES, REPLACED_IN_MODULE
from lightning_streaming.writing.writers import ShardWriter
from tests.helpers import make_loader, write_dataset


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
"""As they are called where no type checker looks on."""
CLASSES: dict[str, type] = {
    "StreamingDataset": StreamingDataset,
    "StreamingConfig": StreamingConfig,
    "Stream": Stream,
    "StreamingDataLoader": StreamingDataLoader,
    "StreamingDataModule": StreamingDataModule,
    "JoinConfig": JoinConfig,
    "MixturePhase": MixturePhase,
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
def test_an_unknown_argument_is_told_with_the_nearest_of_ours(maker: str, written: str, meant: str) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        MAKERS[maker](**{written: "hunter2"})
    assert str(caught.value).startswith(f"{maker} takes no argument {written!r}: ")
    assert meant in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("kind", [TypeError, ConfigError])
def test_it_is_what_python_users_expect(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        StreamingDataset(remote="data", whatever=1)  # type: ignore[call-arg]  # that is the test


SAID_OF_ARGUMENTS = {
    ("StreamingDataset", "input_dir"): "remote= is where the shards come from",
    (
        "StreamingDataset",
        "samples",
    ): "epoch_size= is how many samples an epoch draws; Stream(choose=...), from one stream",
    (
        "StreamingDataset",
        "max_cache_size",
    ): "cache_limit= is the most bytes that the node keeps, not a share of its disk",
    ("Stream", "samples"): "choose= is how many samples an epoch draws",
    ("Stream", "weight"): "proportion= is a stream's share of an epoch",
    ("StreamingConfig", "batch_size"): "it belongs to the data module: StreamingDataModule(train=..., batch_size=32)",
    ("StreamingDataLoader", "profile_dir"): "StreamingMonitor and loader.statistics() tell where time goes",
    ("StreamingDataset", "where"): "its name is selection.where",
    ("StreamingConfig", "phases"): "its name is schedule",
    ("Stream", "follow"): "its name is follow_appends",
    ("JoinConfig", "on"): "its name is key",
    ("MixturePhase", "until"): "its name is end",
    ("StreamingDataModule", "with_keys"): "its name is return_keys",
    ("LocalDataset", "remote"): "StreamingDataset reads a remote; a LocalDataset is here",
    ("MDSWriter", "chunk_bytes"): "shards are cut by bytes: size_limit=",
    ("XSVWriter", "local"): "out= is the directory, or (directory, URL) for both",
}


def test_an_argument_of_another_library_is_told_with_its_replacement() -> None:
    for (maker, written), said in SAID_OF_ARGUMENTS.items():
        with pytest.raises(UnknownArgumentError) as caught:
            MAKERS[maker](**{written: 1})
        assert str(caught.value) == f"{maker} takes no argument {written!r}: {said}"


def test_an_unknown_field_of_a_small_group_is_refused_with_all_that_it_takes() -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        MixturePhase(weights={"web": 1})  # type: ignore[call-arg]
    assert all(item.name in str(caught.value) for item in fields(MixturePhase))


def test_none_of_them_is_taken_for_a_misspelling() -> None:
    for maker in MAKERS.keys() - {"Text"}:  # a user's class
        for written in REPLACED_ARGUMENTS.get(CLASSES.get(maker, ShardWriter).__name__, {}):
            with pytest.raises(UnknownArgumentError, match=f"{written!r}: (?!did you mean)(?!it takes)(?!see help)"):
                MAKERS[maker](**{written: 1})


@pytest.mark.parametrize("name", CLASSES)
def test_no_replacement_hides_an_argument_of_ours(name: str) -> None:
    assert not set(REPLACED_ARGUMENTS[name]) & set(inspect.signature(CLASSES[name]).parameters)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DATASET("s3://bucket/hunter2"), "StreamingDataset takes no arguments by place, but got 1"),
        (lambda: DATASET("cache", "s3://bucket/hunter2", "train"), "as in StreamingDataset(remote=...)"),
        (lambda: STREAM("s3://bucket/hunter2"), "as in Stream(remote=...)"),
        (lambda: WRITER("hunter2", {"id": "int"}), "as in MDSWriter(out=...)"),
        (lambda: ROWS("hunter2"), "as in CSVWriter(out=...)"),
        (lambda: loader_by_place(4, False), "at most 2 arguments by place, but got 3"),
    ],
)
def test_arguments_by_place_are_told_by_name(call: Callable[[], Any], words: str) -> None:
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


SAID_OF_ATTRIBUTES = {
    ("StreamingDataset", "remote"): "it belongs to each stream: dataset.streams[0].remote",
    ("StreamingDataset", "current_epoch"): "dataset.next_epoch is the epoch of the next pass",
    ("StreamingDataLoader", "num_samples_yielded"): 'state_dict()["sample_in_epoch"] is the place over all ranks',
    ("Stream", "get_shards"): "a stream of a dataset has it: dataset.streams[0].get_shards",
    ("DatasetStream", "get_index_size"): "dataset.cache_usage counts indexes too",
    ("ShardWriter", "compression"): "get_config() tells it",
}


def test_an_attribute_of_another_library_is_told_with_its_replacement(objects: dict[str, Any]) -> None:
    for (kind, name), said in SAID_OF_ATTRIBUTES.items():
        with pytest.raises(AttributeError) as caught:
            getattr(objects[kind], name)
        assert str(caught.value).endswith(f" object has no attribute {name!r}: {said}")
    for kind, names in REPLACED_ATTRIBUTES.items():
        for name in names:
            assert not hasattr(objects[kind], name), name
            assert getattr(objects[kind], name, None) is None, name


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


SAID_OF_THE_MODULE = {
    "optimize": "write_parallel writes a dataset from many inputs, MDSWriter from one",
    "clean_stale_shared_memory": "there is no shared memory to clean up: a new start just works, after kill -9 too",
    "base": "public names are in lightning_streaming itself, or in its modules distributed, formats, logs, writing",
    "write_parallel": "from lightning_streaming.writing import write_parallel",
}


def test_a_name_of_the_module_is_told_with_its_replacement() -> None:
    for name, said in SAID_OF_THE_MODULE.items():
        with pytest.raises(AttributeError) as caught:
            getattr(lightning_streaming, name)
        assert str(caught.value) == f"module 'lightning_streaming' has no attribute {name!r}: {said}"
    assert [name for name in REPLACED_IN_MODULE if hasattr(lightning_streaming, name)] == []


def test_a_misspelt_name_of_the_module_is_told_with_the_nearest() -> None:
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
