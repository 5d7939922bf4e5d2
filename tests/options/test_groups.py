"""Groups of options: objects or mappings, whose errors name the field, and which streams take over from their stage."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pickle
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from lightning_streaming import (
    BadSamplesConfig,
    DebugConfig,
    DecodeConfig,
    JoinConfig,
    MixturePhase,
    PackingConfig,
    SelectionConfig,
    StorageConfig,
    Stream,
    StreamingConfig,
    StreamingDataset,
    TokenBudget,
    World,
)
from lightning_streaming.errors import ConfigError, UnknownArgumentError
from lightning_streaming.options.groups import OptionGroup
from lightning_streaming.trainer.config import config_of
from tests.helpers import assert_error


class BytesPath:
    """A path that is not text."""

    def __fspath__(self) -> bytes:
        return b"x"


GROUPS: dict[type[OptionGroup], dict[str, Any]] = {
    StorageConfig: {"options": {"anon": True}, "on_demand": True},
    BadSamplesConfig: {"action": "replace", "max": 3, "log": "bad"},
    DecodeConfig: {"columns": {"image": "array"}, "threads": 2},
    DebugConfig: {"sample_log": "logs", "watchdog_seconds": 3, "repeat_batches": 8},
}
"""Each group, and a value of each field."""


@pytest.mark.parametrize("kind", GROUPS)
def test_a_mapping_is_as_good_as_the_object(kind: type[OptionGroup]) -> None:
    values = GROUPS[kind]
    assert values.keys() == {field.name for field in dataclasses.fields(kind)}
    options: list[dict[str, Any]] = [{"remote": "x", kind.option: value} for value in (kind(**values), values)]
    assert StreamingDataset(**options[0]).config() == StreamingDataset(**options[1]).config()
    config = StreamingConfig(**options[1])
    assert config == StreamingConfig(**options[0])
    assert getattr(config, kind.option) == kind(**values)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("made", [StreamingDataset, StreamingConfig])
def test_an_unknown_field_is_named_with_its_group(kind: type[OptionGroup], made: type) -> None:
    field = dataclasses.fields(kind)[0].name
    with assert_error(UnknownArgumentError, option=f"{kind.option}.{field}x") as caught:
        made(remote="x", **{kind.option: {f"{field}x": 1}})
    assert f"did you mean {field}=?" in str(caught.value)


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("value", ["text", 3, [1], {1: 2}])
def test_a_group_is_no_other_value(kind: type[OptionGroup], value: Any) -> None:
    with assert_error(ConfigError, option=kind.option):
        StreamingDataset(remote="x", **{kind.option: value})


@pytest.mark.parametrize(
    ("group", "option"),
    [
        ({"storage": {"options": 3}}, "storage.options"),
        ({"storage": {"on_demand": "no"}}, "storage.on_demand"),
        ({"bad_samples": {"action": "skip"}}, "bad_samples.action"),
        ({"bad_samples": {"max": "many"}}, "bad_samples.max"),
        ({"bad_samples": {"action": "replace"}}, "bad_samples.log"),
        ({"bad_samples": {"log": "bad"}}, "bad_samples.log"),
        ({"decode": {"columns": {"image": "jpeg"}}}, "decode.columns.image"),
        ({"decode": {"threads": -1}}, "decode.threads"),
        ({"debug": {"sample_log": ""}}, "debug.sample_log"),
        ({"debug": {"watchdog_seconds": 0}}, "debug.watchdog_seconds"),
        ({"packing": {"column": "a", "capacity": 8, "lengths": 3}}, "packing.lengths"),
        ({"packing": {"column": "a", "capacity": 8, "lengths_version": "1"}}, "packing.lengths_version"),
        ({"token_budget": {"tokens": 8, "lengths": 3}}, "token_budget.lengths"),
        ({"packing": {"column": "a", "capacity": 8, "along": np.array(3)}}, "packing.along"),
        ({"packing": {"column": "a", "capacity": 8, "as_dtype": "0%:98%"}}, "packing.as_dtype"),
        ({"packing": {"column": "a", "capacity": 8, "dtype": "\ud800"}}, "packing.dtype"),
        ({"debug": {"sample_log": "\0"}}, "debug.sample_log"),
        ({"debug": {"sample_log": BytesPath()}}, "debug.sample_log"),
        ({"debug": {"watchdog_seconds": np.float64("nan")}}, "debug.watchdog_seconds"),
        ({"bad_samples": {"action": "replace", "log": "\ud800"}}, "bad_samples.log"),
        ({"join": {"clip": {"remote": "b", "storage": 3}}}, "join.clip.storage"),
        ({"skip": np.array(3)}, "skip"),
        ({"world": 3}, "world"),
        ({"format": np.array(["a", "b"])}, "format"),
        ({"validate_hash": np.array(["a", "b"])}, "validate_hash"),
        ({"stream_config": np.array([1, 2])}, "stream_config"),
        ({"stream_config": {"local": 3}}, "stream_config.local"),
        ({"local": "\0"}, "local"),
        ({"remote": "\ud800"}, "remote"),
        ({"remote": None, "streams": Stream(remote="x")}, "streams"),
        ({"remote": None, "streams": {1: Stream(remote="x")}}, "streams"),
    ],
)
def test_an_error_names_the_field(group: dict[str, Any], option: str) -> None:
    with assert_error(ConfigError, option=option):
        StreamingDataset(**{"remote": "x", **group})


_HUGE = {
    "text": "x" * 10**6,
    "number": 10**5000,
    "list": [*range(10**5)],
    "mapping": {"a": {"b": "x" * 10**6}},
    "bytes": b"x" * 10**6,
}
_BARE: dict[type, dict[str, Any]] = {
    StreamingDataset: {"remote": "x"},
    PackingConfig: {"column": "a", "capacity": 8},
    TokenBudget: {"column": "a", "tokens": 8},
    MixturePhase: {"mix": {"a": 1}},
    JoinConfig: {"remote": "x"},
    Stream: {"remote": "x"},
}


def _refusal(kind: type, name: str, value: Any) -> str:
    try:
        kind(**{**_BARE.get(kind, {}), name: value})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", _HUGE)
@pytest.mark.parametrize("kind", [*_BARE, *GROUPS, SelectionConfig, World])
def test_errors_show_huge_values_in_part(kind: type, value: str) -> None:
    for name in inspect.signature(kind).parameters:
        assert len(_refusal(kind, name, _HUGE[value])) < 1000, name


def test_values_are_kept_and_written_as_plain_ones() -> None:
    class Text(str, enum.Enum):
        NAME, METHOD = "a", "best_fit"

    groups: list[tuple[OptionGroup, OptionGroup]] = [
        (SelectionConfig(where=Text.NAME, seed=np.int64(3)), SelectionConfig(where="a", seed=3)),
        (SelectionConfig(indices=np.array([1, 2])), SelectionConfig(indices=[1, 2])),
        (SelectionConfig(indices=range(2)), SelectionConfig(indices=[0, 1])),
        (
            PackingConfig(column=np.str_("a"), capacity=np.int64(8), method=Text.METHOD, along=np.array(["b"])),  # type: ignore[arg-type]
            PackingConfig(column="a", capacity=8, along=["b"]),
        ),
        (
            TokenBudget(column="a", tokens=8, pad=types.MappingProxyType({"a": np.float32(0.5)})),
            TokenBudget(column="a", tokens=8, pad={"a": 0.5}),
        ),
        (
            MixturePhase(mix=types.MappingProxyType({np.str_("a"): np.array([1, 2])}), end=Fraction(8)),  # type: ignore[dict-item, arg-type]
            MixturePhase(mix={"a": [1, 2]}, end=8),
        ),
        (JoinConfig(remote=np.str_("a"), key=Text.NAME), JoinConfig(remote="a", key="a")),
        (
            BadSamplesConfig(action="replace", max=np.int64(3), log="b"),
            BadSamplesConfig(action="replace", max=3, log="b"),
        ),
        (DecodeConfig(columns=types.MappingProxyType({"a": "pil"})), DecodeConfig(columns={"a": "pil"})),
        (DebugConfig(watchdog_seconds=np.float32(0.5)), DebugConfig(watchdog_seconds=0.5)),
        (StorageConfig(on_demand=np.True_), StorageConfig(on_demand=True)),  # type: ignore[arg-type]
    ]
    for group, plain in groups:
        assert group == plain
        written = yaml.safe_load(yaml.dump(group))
        assert type(plain)(**written) == plain
    stream = Stream(remote="x", proportion=np.float64(2))
    config = StreamingConfig(streams=types.MappingProxyType({np.str_("a"): stream}), epoch_size=np.int64(8))
    written = yaml.safe_load(yaml.dump(config))
    assert (written["epoch_size"], written["streams"]["a"]["proportion"]) == (8, 2.0)
    assert config_of(written) == config


def test_functions_are_written_by_name() -> None:
    assert yaml.safe_load(yaml.dump(SelectionConfig(where=len)))["where"] == "builtins.len"


def test_names_may_come_from_a_generator() -> None:
    names: dict[str, Any] = {"along": (name for name in "bc"), "without": iter(["document_ids"])}
    packing = PackingConfig(column="a", capacity=8, **names)
    assert (packing.along, packing.without) == (("b", "c"), ("document_ids",))


def test_numbers_of_samples_are_not_narrowed() -> None:
    for huge in (np.array([1, 2**63], np.uint64), [2**63], [2**64], [2**63, -1]):
        with assert_error(ConfigError, option="selection.indices"):
            SelectionConfig(indices=huge)
    assert SelectionConfig(indices=np.array([2**63 - 1], np.uint64)) == SelectionConfig(indices=[2**63 - 1])


def test_selections_of_other_samples_are_not_equal() -> None:
    selection = SelectionConfig(where="x", indices=[0, 1])
    assert selection == SelectionConfig(where="x", indices=np.array([0, 1]))
    assert hash(selection) == hash(SelectionConfig(where="x", indices=np.array([0, 1])))
    for others in ([0, 2], [True, False], "samples.npy", None):
        assert selection != SelectionConfig(where="x", indices=others)


def test_a_misspelt_field_is_named_before_the_one_that_is_then_missing() -> None:
    with assert_error(UnknownArgumentError, option="packing.capacty"):
        StreamingDataset(remote="x", packing={"column": "tokens", "capacty": 8})


def options_of(dataset: StreamingDataset) -> list[dict[str, Any]]:
    return [dict(stream.storage.options or {}) for stream in dataset.streams.values()]


def test_a_stream_without_options_uses_those_of_the_dataset() -> None:
    streams = [Stream(remote="a"), Stream(remote="b", storage={"options": {"key": "b"}})]
    streams += [Stream(remote="c", storage={}), Stream(remote="d", storage={"options": {}})]
    options = options_of(StreamingDataset(streams=streams, storage={"options": {"anon": True}}))
    assert options == [{"anon": True}, {"key": "b"}, {"anon": True}, {}]
    assert options_of(StreamingDataset(remote="a", storage={"options": {"anon": True}})) == [{"anon": True}]
    assert options_of(StreamingDataset(streams=streams)) == [{}, {"key": "b"}, {}, {}]


def test_single_samples_on_demand_are_of_the_whole_dataset() -> None:
    with assert_error(ConfigError, option="storage.on_demand"):
        Stream(remote="a", storage={"on_demand": True})
    with assert_error(ConfigError, option="join.clip.storage.on_demand"):
        Stream(remote="a", join={"clip": {"remote": "b", "storage": {"on_demand": True}}})
    config = StreamingDataset(streams=[Stream(remote="a", storage={})], storage={"on_demand": True}).config()
    assert config["storage"] == {"on_demand": True}


def test_config_has_paths_as_text(tmp_path: Path) -> None:
    config = StreamingDataset(remote="a", debug={"sample_log": tmp_path}).config()
    assert config["debug"] == {"sample_log": str(tmp_path), "watchdog_seconds": None, "repeat_batches": None}
