"""What the package shows to its users."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
from torch.utils.data import DataLoader, IterableDataset

import lightning_streaming
from lightning_streaming import (
    CSVWriter,
    MDSWriter,
    SelectionConfig,
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    XSVWriter,
)
from lightning_streaming.dataset.options import DatasetOptions
from lightning_streaming.exports import TOPICS
from lightning_streaming.reading.reference_names import ReferenceNames, readonly_property
from lightning_streaming.trainer.datamodule import ModuleOptions
from lightning_streaming.writing import plan_parts, write_parallel
from lightning_streaming.writing.parallel import ParallelOptions
from lightning_streaming.writing.parts import PlanOptions
from lightning_streaming.writing.writers import SplitWriterOptions, WriterOptions, XSVWriterOptions

NOT_IN_A_CONFIG = {"batch_size", "transform", "world", "stream_name", "stream_config"}
"""What the data module, the user's own code and the trainer say, and what scripts of MosaicML Streaming pass on."""

OF_A_DATASET = {
    *("batch_size", "predownload", "replication", "streams", "transform", "world"),
    *("epoch_size", "num_shards", "size", "cache_usage", "config"),
    *("get_item", "restore_sample", "can_restore_sample"),
    *("prepare_shard", "evict_shard", "evict_coldest_shard", "close"),
    *("next_epoch", "state_dict", "load_state_dict"),
    "set_epoch",
    *(name for name, one in vars(ReferenceNames).items() if isinstance(one, readonly_property)),
}
"""What docs promise of a dataset, and may be counted on."""
OF_A_LOADER = {
    *("fixed_epoch", "return_keys", "return_valid_mask"),
    *("state_dict", "load_state_dict", "statistics", "refresh", "close", "pause_workers", "set_weights"),
    "use_stateful_dataloader",
}
"""The same of a loader, beside what torch's has."""


FRONT_DOORS = [lightning_streaming, *(import_module(f"lightning_streaming.{topic}") for topic in TOPICS)]
PUBLIC = [getattr(door, name) for door in FRONT_DOORS for name in door.__all__]


@pytest.mark.parametrize("door", FRONT_DOORS, ids=lambda door: door.__name__)
def test_names_are_listed_once_and_there(door: ModuleType) -> None:
    assert door.__all__ == sorted(set(door.__all__))
    assert set(door.__all__) <= set(dir(door))
    (block,) = (node for node in ast.parse(inspect.getsource(door)).body if isinstance(node, ast.If))
    imported = [name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert [name.asname for name in imported] == [name.name for name in imported]  # or checkers take them for private
    assert len(imported) == len(door.__all__)
    shown = {name for name in vars(door) if name[0] != "_" and not inspect.ismodule(getattr(door, name))}
    assert shown - {"annotations", "TYPE_CHECKING", "lazy_exports"} <= set(door.__all__)


def test_the_top_level_is_short_enough_to_be_read() -> None:
    assert len(dir(lightning_streaming)) <= 32
    assert len({value for value in PUBLIC if not inspect.ismodule(value)}) == len(PUBLIC) - 1


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Streaming'"):
        lightning_streaming.Streaming  # type: ignore[attr-defined]  # noqa: B018 looking it up is the test


def _public(kind: type, *others: type) -> set[str]:
    """Names of a class and of its instances, but for those that other classes have."""
    shown = {name for name in dir(kind) if not name.startswith("_") and hasattr(kind, name)}
    return shown - {name for other in others for name in dir(other)}


def test_dataset_and_loader_show_what_they_promise_and_nothing_else(tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=str(tmp_path), batch_size=4)
    loader, plain = StreamingDataLoader(dataset), DataLoader([0])  # type: ignore[arg-type,var-annotated]
    shown = _public(StreamingDataset, IterableDataset) | {name for name in vars(dataset) if name[0] != "_"}
    assert shown == OF_A_DATASET
    of_loader = _public(StreamingDataLoader, DataLoader) | {name for name in vars(loader) if name[0] != "_"}
    assert of_loader - vars(plain).keys() == OF_A_LOADER


def test_docs_speak_of_all_that_a_dataset_and_a_loader_show() -> None:
    root = Path(lightning_streaming.__file__).parents[1]
    text = "\n".join(path.read_text() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))])
    spoken_of = set(re.findall(r"\w+", " ".join(re.findall(r"```python.*?```|`[^`\n]+`", text, flags=re.DOTALL))))
    assert spoken_of >= OF_A_DATASET | OF_A_LOADER


def test_every_public_class_and_function_tells_its_meaning() -> None:
    for one in PUBLIC:
        assert inspect.getdoc(one)
        members = vars(one).items() if inspect.isclass(one) else ()
        untold = [
            name for name, member in members if not name.startswith("_") and callable(member) and not member.__doc__
        ]
        assert not untold, f"{one.__name__}: {untold}"


@pytest.mark.parametrize(
    "path",
    [
        "trainer.cli.StreamingCLI",
        "trainer.config.StreamingConfig",
        "trainer.datamodule.StreamingDataModule",
        "trainer.monitor.StreamingMonitor",
        "trainer.preemption.PreemptedExit",
        "trainer.preemption.PreemptionCheckpoint",
        "trainer.state_callback.StreamingStateCallback",
        "trainer.step_log.StepLog",
        "reading.loader.StreamingDataLoader",
        "reading.dataset.StreamingDataset",
        "dataset.stream.Stream",
        "world.World",
    ],
)
def test_class_paths_of_saved_configurations_and_pickled_objects_still_lead_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(import_module(f"lightning_streaming.{module}"), name)
    assert found is getattr(lightning_streaming, name, found)


@pytest.mark.parametrize(
    ("home", "name"),
    [(door.__name__, name) for door in FRONT_DOORS for name in door.__all__ if inspect.isclass(getattr(door, name))],
)
def test_a_public_class_is_pickled_by_its_public_name(home: str, name: str) -> None:
    public = getattr(import_module(home), name)
    assert (public.__module__, public.__qualname__) == (home, name)
    assert pickle.loads(pickle.dumps(public)) is public


def test_a_pickled_option_is_loaded_by_a_process_that_has_imported_nothing() -> None:
    options = StreamingConfig(streams={"a": Stream(remote="x")}, selection=SelectionConfig(where="n > 1"))
    data = pickle.dumps(options)
    named = {text for text in re.findall(rb"lightning_streaming[\w.]*", data) if b"." in text}
    assert named <= {b"lightning_streaming.storage.secrets"}
    script = "import pickle, sys\nprint(repr(pickle.loads(sys.stdin.buffer.read())))"
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert done.stdout.decode().strip() == repr(options)


def _loaded_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_the_package_imports_neither_lightning_nor_a_store() -> None:
    heavy = {"torch", "lightning", "pytorch_lightning", "jsonargparse", "fsspec", "s3fs", "gcsfs", "matplotlib"}
    heavy |= {"accelerate", "transformers"}
    assert not heavy & _loaded_after("import lightning_streaming")


@pytest.mark.nightly
def test_asking_for_a_trainer_name_imports_lightning() -> None:
    assert "lightning" in _loaded_after("from lightning_streaming import StreamingDataModule")


Options = dict[str, tuple[Any, Any]]
"""Type and default of each option by name."""


def options_of(made: Any, hinted: Any) -> Options:
    hints = get_type_hints(hinted)
    return {name: (hints[name], option.default) for name, option in inspect.signature(made).parameters.items()}


def test_dataset_stage_and_stream_have_the_same_options() -> None:
    dataset = options_of(StreamingDataset, StreamingDataset.__init__)
    assert len(dataset) <= 44
    assert dataset == options_of(DatasetOptions, DatasetOptions)
    stage = options_of(StreamingConfig, StreamingConfig)
    assert stage.pop("shuffle") == (bool | None, None)  # yes for training, no otherwise
    assert stage.pop("streams") == (Mapping[str, Stream] | None, None)
    assert stage == {name: dataset[name] for name in dataset.keys() - NOT_IN_A_CONFIG - {"shuffle", "streams"}}
    stream = options_of(Stream, Stream)
    for weight in ("proportion", "repeat", "choose"):
        assert stream.pop(weight)[1] is None
    assert stream == {name: (dataset[name][0] | None, None) for name in stream}


def test_a_data_module_has_the_options_that_it_checks() -> None:
    assert options_of(StreamingDataModule, StreamingDataModule.__init__) == options_of(ModuleOptions, ModuleOptions)


@pytest.mark.parametrize("name", [name for name in dir(lightning_streaming) if name.endswith(("Config", "Budget"))])
def test_types_of_options_can_be_resolved_where_a_group_is_called(name: str) -> None:
    group = getattr(lightning_streaming, name)
    assert get_type_hints(group.__init__).keys() >= inspect.signature(group).parameters.keys()


@pytest.mark.parametrize(
    ("called", "hinted", "options"),
    [
        (MDSWriter, MDSWriter.__init__, WriterOptions),
        (CSVWriter, CSVWriter.__init__, SplitWriterOptions),
        (XSVWriter, XSVWriter.__init__, XSVWriterOptions),
        (write_parallel, write_parallel, ParallelOptions),
        (plan_parts, plan_parts, PlanOptions),
    ],
)
def test_writers_have_the_options_that_they_check(called: Any, hinted: Any, options: Any) -> None:
    assert options_of(called, hinted) == options_of(options, options)


WRITERS = [lightning_streaming.MDSWriter, lightning_streaming.JSONWriter, lightning_streaming.XSVWriter]
WRITERS_OF_PARTS = [write_parallel, plan_parts]


@pytest.mark.parametrize("one", [StreamingConfig, StreamingDataset, *WRITERS, *WRITERS_OF_PARTS])
def test_every_option_is_explained_once(one: Any) -> None:
    explained = re.findall(r"^    (\w+): ", (inspect.getdoc(one) or "").partition("Raises:")[0], re.MULTILINE)
    assert explained == list(inspect.signature(one).parameters)
