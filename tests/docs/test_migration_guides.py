"""The guides from other libraries: what was before and what is after print what they say; no argument is left out.

A block after ``<!-- with PACKAGE -->`` is a program of its own, which a Python runs that has the package: this one, or
the one that the environment variable PEERS names, as ``make bench-peers`` does. Where neither has it, it is skipped.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_streaming
from lightning_streaming import writing
from tests.docs.test_docs import ROOT, snippets

GUIDES = {
    path.stem: path.read_text()
    for path in sorted((ROOT / "docs").glob("migrate-from-*.md"))
    if "<!-- with " in path.read_text()
}
_STUBS = ROOT / "benchmarks" / "reading" / "stubs"
"""Of torchvision, which MosaicML Streaming imports."""
STORED = {"litdata": ROOT / "tests" / "golden" / "litdata_guide"}
"""What the program of a package writes, for where it is not installed."""
_LITDATA_INPUTS = {"input_dir", "num_downloaders", "num_uploaders", "reorder_files", "weights", "reader", "batch_size"}
ARGUMENTS: dict[str, set[str]] = {
    "litdata.StreamingDataset": {
        *("input_dir", "cache_dir", "item_loader", "shuffle", "drop_last", "seed", "serializers", "max_cache_size"),
        *("subsample", "encryption", "storage_options", "session_options", "max_pre_download", "index_path"),
        *("force_override_state_dict", "transform", "num_canonical_nodes", "batch_decode", "item_shuffle_window"),
        "window_direct_io",
    },
    "litdata.StreamingDataLoader": {
        *("dataset", "args", "batch_size", "num_workers", "profile_batches", "profile_skip_batches", "profile_dir"),
        *("profile_cprofile", "prefetch_factor", "shuffle", "drop_last", "collate_fn", "kwargs"),
    },
    "litdata.CombinedStreamingDataset": {
        *("datasets", "seed", "weights", "iterate_over_all", "batching_method", "force_override_state_dict"),
    },
    "litdata.ParallelStreamingDataset": {
        *("datasets", "length", "force_override_state_dict", "transform", "seed", "resume", "reset_rngs"),
    },
    "litdata.optimize": {
        *("fn", "inputs", "output_dir", "queue", "chunk_size", "chunk_bytes", "align_chunking", "compression"),
        *("compression_level", "compression_batch_size", "encryption", "num_workers", "fast_dev_run", "num_nodes"),
        *("machine", "mode", "use_checkpoint", "item_loader", "start_method", "optimize_dns", "storage_options"),
        *("keep_data_ordered", "verbose", "broadcast_paths", "key_fn"),
        *_LITDATA_INPUTS,
    },
    "litdata.train_test_split": {"streaming_dataset", "splits", "seed", "shuffle"},
    "webdataset.WebDataset": {
        *("urls", "handler", "mode", "resampled", "repeat", "shardshuffle", "cache_size", "cache_dir", "url_to_name"),
        *("detshuffle", "nodesplitter", "workersplitter", "select_files", "rename_files", "empty_check", "verbose"),
        "seed",
    },
    "webdataset.WebLoader": {"args", "kw"},
    "webdataset.RandomMix": {"datasets", "probs", "longest"},
    "webdataset.ShardWriter": {"pattern", "maxcount", "maxsize", "post", "start_shard", "verbose", "opener", "kw"},
    "megatron.energon.get_train_dataset": {
        *("path", "split_part", "worker_config", "batch_size", "batch_drop_last", "packing_buffer_size", "repeat"),
        *("shuffle_buffer_size", "max_samples_per_sequence", "virtual_epoch_length", "task_encoder", "kwargs"),
        "shuffle_over_epochs_multiplier",
    },
    "megatron.energon.get_val_dataset": {
        *("path", "split_part", "worker_config", "batch_size", "batch_drop_last", "packing_buffer_size", "limit"),
        *("task_encoder", "kwargs"),
    },
    "megatron.energon.get_savable_loader": {
        *("dataset", "worker_config", "checkpoint_every_sec", "checkpoint_every_min_n_samples", "n_checkpoints"),
        *("gc_collect_every_n_steps", "prefetch_factor", "cache_pool", "watchdog_timeout_seconds"),
        *("watchdog_initial_timeout_seconds", "fail_on_timeout"),
    },
    "megatron.energon.WorkerConfig": {
        *("rank", "world_size", "num_workers", "data_parallel_group", "seed_offset", "worker_debug_path"),
        *("worker_log_level", "global_error_handler", "restore_error_handler"),
    },
    "datasets.load_dataset": {
        *("path", "name", "data_dir", "data_files", "split", "cache_dir", "features", "download_config", "token"),
        *("download_mode", "verification_mode", "keep_in_memory", "save_infos", "revision", "streaming", "num_proc"),
        *("storage_options", "config_kwargs"),
    },
    "datasets.interleave_datasets": {"datasets", "probabilities", "seed", "info", "split", "stopping_strategy"},
}
"""What each takes, in litData 0.2.76, WebDataset 1.0.2, Energon 7.4 and datasets 5.0."""
_SIGNATURE = """
import importlib, inspect, json, sys, warnings
warnings.simplefilter("ignore")
module = importlib.import_module(sys.argv[1])
print(json.dumps({name: list(inspect.signature(getattr(module, name)).parameters) for name in sys.argv[2:]}))
"""


@cache
def python_with(package: str) -> str | None:
    """A Python that can import a package; None if there is none."""
    if importlib.util.find_spec(package.split(".")[0]) is not None:
        return sys.executable
    peers = os.environ.get("PEERS")
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    found = peers and subprocess.run([peers, "-c", looks], capture_output=True, check=False)
    return peers if found and found.returncode == 0 else None


def need(package: str) -> str:
    """The same, or the test is skipped."""
    found = python_with(package)
    if found is None:
        pytest.skip(f"{package} is not installed: PEERS=/path/to/python names a Python that has it")
    return found


def run_before(python: str, code: str, directory: Path) -> str:
    """What a program prints for another library."""
    (directory / "before.py").write_text(code)
    environment = {**os.environ, "TMPDIR": str(directory)}  # where some keep what they fetch, and find it again
    if "from streaming import" in code:
        environment["PYTHONPATH"] = str(_STUBS)
    command = [python, "-W", "ignore", "before.py"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)  # other libraries take their time to import
@pytest.mark.parametrize("name", GUIDES)
def test_what_was_before_prints_what_the_guide_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in snippets(GUIDES[name]):
        if block.package is not None:
            printed = run_before(need(block.package), block.code, tmp_path)
            assert block.prints is not None
            assert printed.endswith(block.prints)  # after what the library itself has to say
            break
        exec(compile(block.code, name, "exec"), {"__name__": "__main__"})
    else:
        raise AssertionError("nothing was before")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_scripts_of_mosaicml_streaming_run_there_but_for_one_line(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migrate-from-mosaicml.md").read_text()
    scripts = list(snippets(page[page.index("## Two scripts") : page.index("## Resume a half-finished run")]))
    code = "".join(one.code for one in scripts).replace("from lightning_streaming import", "from streaming import")
    assert run_before(need("streaming"), code, tmp_path) == "".join(one.prints or "" for one in scripts)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", GUIDES)
def test_what_is_after_prints_what_the_guide_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    ran = 0
    for block in snippets(GUIDES[name]):
        if block.package in STORED:
            shutil.copytree(STORED[block.package], tmp_path, dirs_exist_ok=True)
        elif block.is_run:
            exec(compile(block.code, name, "exec"), names)
            printed = capsys.readouterr().out
            assert block.prints is None or printed == block.prints
            ran += block.prints is not None
    assert ran


def section(heading: str) -> str:
    """What stands under a heading of one of the guides, up to the next."""
    found = [re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S) for text in GUIDES.values()]
    (text,) = [one[1] for one in found if one]
    return str(text)


def rows(heading: str) -> list[tuple[str, str]]:
    """The rows of its table: what is there, and what is here."""
    return re.findall(r"^\| (`.*?) \| (.*) \|$", section(heading), re.MULTILINE)


@pytest.mark.parametrize("heading", ARGUMENTS)
def test_each_argument_has_one_row(heading: str) -> None:
    named = [name for there, _ in rows(heading) for name in re.findall(r"`(\w+)`", there)]
    assert sorted(named) == sorted(ARGUMENTS[heading])


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", sorted({heading.rpartition(".")[0] for heading in ARGUMENTS}))
def test_arguments_are_those_of_the_installed_package(package: str) -> None:
    there = {heading.rpartition(".")[2]: taken for heading, taken in ARGUMENTS.items() if heading.startswith(package)}
    command = [need(package), "-c", _SIGNATURE, package, *there]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {
        name: {one for one in taken if one[0] != "_"} for name, taken in json.loads(printed.splitlines()[-1]).items()
    }
    assert found == there


def _takes_arguments(one: object) -> bool:
    return callable(one) and not (inspect.isclass(one) and issubclass(one, BaseException))


def test_what_stands_for_an_argument_is_one_here() -> None:
    shown = [getattr(lightning_streaming, name) for name in dir(lightning_streaming)]
    shown += [getattr(writing, name) for name in dir(writing)]
    taken = {name for one in shown if _takes_arguments(one) for name in inspect.signature(one).parameters}
    taken |= {*inspect.signature(DataLoader).parameters, *inspect.signature(Trainer).parameters}
    told = re.findall(r"^\| `.*?\| (.*) \|$", "\n".join(GUIDES.values()), re.MULTILINE)
    used = {name for here in told for name in re.findall(r"[`(](\w+)=", here)}
    assert used - taken == set()
    assert len(used) > 30
