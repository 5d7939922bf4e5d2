"""The page on moving over from MosaicML Streaming covers what there is, there and here, and says of each what is so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.utils.data import DataLoader

import lightning_streaming
from lightning_streaming import (
    CSVWriter,
    JSONWriter,
    LocalDataset,
    MDSWriter,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    TSVWriter,
    XSVWriter,
)
from lightning_streaming.errors import UnknownArgumentError
from lightning_streaming.exports import MODULE_HINTS
from lightning_streaming.signatures import HINTS
from tests.helpers import make_loader, write_dataset

PAGE = (Path(__file__).parents[2] / "docs" / "migrate-from-mosaicml.md").read_text()
NEEDED: Any = inspect.Parameter.empty


class Facts(NamedTuple):
    """What a class takes there."""

    arguments: dict[str, Any]
    """With their defaults in 0.13."""
    older: tuple[str, ...] = ()
    """Arguments that only older releases have."""


OF_STREAMS = {"remote": None, "local": None, "split": None}
REFERENCE: dict[str, Facts] = {
    "StreamingDataset": Facts(
        {
            "streams": None,
            **OF_STREAMS,
            "download_retry": 2,
            "download_timeout": 60,
            "validate_hash": None,
            "keep_zip": False,
            "epoch_size": None,
            "predownload": None,
            "cache_limit": None,
            "sampling_method": "balanced",
            "sampling_granularity": 1,
            "partition_algo": "relaxed",
            "num_canonical_nodes": None,
            "batch_size": None,
            "shuffle": False,
            "shuffle_algo": "py1e",
            "shuffle_seed": 9176,
            "shuffle_block_size": None,
            "batching_method": "random",
            "allow_unsafe_types": False,
            "replication": None,
            "stream_name": "stream",
            "stream_config": None,
        }
    ),
    "Stream": Facts(
        {
            **OF_STREAMS,
            **dict.fromkeys(("proportion", "repeat", "choose", "download_retry", "download_timeout")),
            **dict.fromkeys(("validate_hash", "keep_zip")),
        },
        older=("samples",),
    ),
    "StreamingDataLoader": Facts(
        {
            "dataset": NEEDED,
            "batch_size": 1,
            "num_workers": 0,
            "collate_fn": None,
            "drop_last": False,
            "pin_memory": False,
            "prefetch_factor": None,
            "persistent_workers": False,
            "shuffle": None,
        }
    ),
    "MDSWriter, JSONWriter, CSVWriter, TSVWriter, XSVWriter": Facts(
        {
            "columns": NEEDED,
            "out": NEEDED,
            "keep_local": False,
            "compression": None,
            "hashes": None,
            "size_limit": 1 << 26,
            "newline": "\n",
            "separator": NEEDED,
            "progress_bar": False,
            "max_workers": None,
            "retry": 2,
            "exist_ok": False,
        },
        older=("dirname", "extra_bytes_per_shard", "extra_bytes_per_sample"),
    ),
    "LocalDataset": Facts({"local": NEEDED, "split": None}),
}
"""Its public classes, by the heading on the page."""
WRITERS = (MDSWriter, JSONWriter, CSVWriter, TSVWriter, XSVWriter)
CLASSES: dict[str, tuple[type, ...]] = {
    "StreamingDataset": (StreamingDataset,),
    "Stream": (Stream,),
    "StreamingDataLoader": (StreamingDataLoader,),
    "MDSWriter, JSONWriter, CSVWriter, TSVWriter, XSVWriter": WRITERS,
    "LocalDataset": (LocalDataset,),
}
PUBLIC = {
    "StreamingDataset": {
        *REFERENCE["StreamingDataset"].arguments.keys() & {"predownload", "cache_limit", "batch_size", "replication"},
        *(name for name in REFERENCE["StreamingDataset"].arguments if name.startswith(("shuffle", "sampling", "part"))),
        *("num_canonical_nodes", "batching_method", "allow_unsafe_types", "initial_physical_nodes"),
        *("epoch_seed_change", "streams", "num_streams", "num_samples", "shards", "stream_per_shard"),
        *(
            "shard_offset_per_stream",
            "shards_per_stream",
            "sample_offset_per_stream",
            "samples_per_stream",
            "num_shards",
        ),
        *("max_shard_size_across_all_streams", "samples_per_shard", "sample_offset_per_shard", "spanner", "epoch_size"),
        *("length", "size", "next_epoch", "cache_usage", "state_dict", "load_state_dict", "resample_streams"),
        *("evict_shard", "evict_coldest_shard", "prepare_shard"),
    },
    "DatasetStream": {
        *REFERENCE["Stream"].arguments,
        *("safe_keep_zip", "prepare_shard", "get_shards", "set_up_local", "get_index_size"),
    },
    "Stream": {
        *REFERENCE["Stream"].arguments,
        *("safe_keep_zip", "apply_default", "validate_weights", "apply_weights", "prepare_shard", "get_shards"),
        *("set_up_local", "get_index_size"),
    },
    "StreamingDataLoader": {"num_samples_yielded", "state_dict", "load_state_dict"},
    "LocalDataset": {"local", "split", "shards", "num_samples", "size", "get_item"},
    "ShardWriter": {
        "write",
        "finish",
        "get_config",
        "flush_shard",
        "encode_sample",
        "shards",
        "cloud_writer",
        "format",
    },
}
"""Attributes and methods that its objects have, by the class of ours that stands for theirs."""


def section(heading: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def rows(heading: str) -> dict[str, str]:
    """Map each argument to its state: those of the table, and those listed after "Same:", "New:" or "differs:"."""
    text = section(heading)
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| .*\|$", text, re.MULTILINE)
    for state, names in re.findall(
        r"\b(same|new|differs)\b[^:\n|]*: (`.+?)(?:\.\n|\Z)", text, re.DOTALL | re.IGNORECASE
    ):
        listed += [(name, state.lower()) for name in re.findall(r"`(\w+)`", names)]
    assert len(listed) == len(dict(listed))
    return dict(listed)


def ours(heading: str) -> dict[str, Any]:
    """Arguments that the classes here take, with their defaults."""
    taken: dict[str, Any] = {}
    for one in CLASSES[heading]:
        for base in (base for base in one.__mro__ if "__init__" in vars(base)):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            passed_on = [of for of in parameters if of.kind is of.VAR_KEYWORD]
            for of in parameters:
                if of not in passed_on:
                    taken.setdefault(of.name, of.default)
            if not passed_on:
                break
    return taken


def torchs() -> set[str]:
    """What torch's loader takes, of which the page names the usual ones."""
    return set(inspect.signature(DataLoader).parameters) - {"dataset", "batch_size"}


@pytest.mark.parametrize("heading", REFERENCE)
def test_each_argument_has_one_row_that_tells_whether_it_is_there_and_here(heading: str) -> None:
    here, facts, told = set(ours(heading)), REFERENCE[heading], rows(heading)
    if heading == "StreamingDataLoader":
        here -= torchs() - facts.arguments.keys()
    expected = {
        **dict.fromkeys(facts.arguments.keys() & here, "both"),
        **dict.fromkeys(here - facts.arguments.keys(), "new"),
        **dict.fromkeys({*facts.arguments, *facts.older} - here, "gone"),
    }
    assert {name: "both" if said in ("same", "differs") else said for name, said in told.items()} == expected


@pytest.mark.parametrize("heading", REFERENCE)
def test_what_is_the_same_has_the_same_default(heading: str) -> None:
    here, facts = ours(heading), REFERENCE[heading].arguments
    alike = [name for name, said in rows(heading).items() if said == "same"]
    assert alike
    assert {name: here[name] for name in alike} == {name: facts[name] for name in alike}


def gone() -> Iterator[tuple[type, str]]:
    for heading, classes in CLASSES.items():
        for name, said in rows(heading).items():
            if said == "gone":
                yield from ((one, name) for one in classes)


def test_what_is_gone_is_refused_in_words() -> None:
    for kind, name in gone():
        with pytest.raises(UnknownArgumentError, match=f"takes no argument '{name}': (?!did you mean)(?!help)"):
            kind(**{name: 1, **({"separator": "|"} if kind is XSVWriter else {})})


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = write_dataset(tmp_path_factory.mktemp("data") / "a")
    loader = make_loader(root, cache_limit="1mb")
    with MDSWriter(out=root.parent / "b", columns={"id": "int"}) as writer:
        pass
    return {
        "StreamingDataset": loader.dataset,
        "DatasetStream": loader.dataset.streams[0],
        "Stream": Stream(remote=str(root)),
        "StreamingDataLoader": loader,
        "LocalDataset": LocalDataset(root),
        "ShardWriter": writer,
    }


def test_each_name_there_is_here_or_told_in_words(objects: dict[str, Any]) -> None:
    for kind, names in PUBLIC.items():
        is_told = HINTS.get(kind, {}).keys()
        assert {name for name in names if not hasattr(objects[kind], name)} == names & is_told, kind


def test_the_page_names_each_of_a_datasets() -> None:
    text = section("Attributes of a dataset") + section("StreamingDataset")
    assert [name for name in PUBLIC["StreamingDataset"] if f"`{name}`" not in text] == []


def test_each_name_of_their_modules_is_here_or_told_in_words() -> None:
    there = {
        *("StreamingDataset", "Stream", "StreamingDataLoader", "MDSWriter", "JSONWriter", "CSVWriter", "TSVWriter"),
        *("XSVWriter", "LocalDataset", "text", "vision", "multimodal", "base", "streams_registry", "merge_index"),
        *("clean_stale_shared_memory", "dataframe_to_mds", "StreamingVisionDataset", "StreamingC4", "StreamingPile"),
    }
    assert there - set(dir(lightning_streaming)) == there & MODULE_HINTS.keys()
