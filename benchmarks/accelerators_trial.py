"""The data of :mod:`benchmarks.accelerators`, and a trial: accelerators that are forked from one process."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 2**26
LONGEST_SECONDS = 300
"""Of a trial, or of writing data."""
WARM_UP, LEAST_STEPS = 3, 5
"""Steps of each accelerator that are not measured, as they use up what was prefetched; and the fewest measured."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an accelerator computes on."""

    title: str
    columns: dict[str, tuple[str, int]]
    """The dtype and the length of each array of a sample."""
    samples_per_file: int
    batch_size: int
    computation: float
    """Seconds per batch."""
    bound: float
    """Utilization to reach."""

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of a sample."""
        return sum(np.dtype(dtype).itemsize * length for dtype, length in self.columns.values())

    def arrays(self, record: Any) -> dict[str, Any]:
        """Return the arrays of a sample that are stored one after another."""
        arrays, start = {}, 0
        for name, (dtype, length) in self.columns.items():
            stop = start + np.dtype(dtype).itemsize * length
            arrays[name], start = record[start:stop].view(dtype), stop
        return arrays


FLUX_LENGTHS = (524_328, 409, 8_232, 8_232, 7)
WORKLOADS = {
    "resnet50": Workload(
        title="ResNet-50, H100",
        columns={"image": ("uint8", 114_660)},
        samples_per_file=1251,
        batch_size=400,
        computation=0.224,
        bound=0.90,
    ),
    "retinanet": Workload(
        title="RetinaNet, B200",
        columns={"image": ("uint8", 322_957)},
        samples_per_file=1,
        batch_size=24,
        computation=0.04755,
        bound=0.85,
    ),
    "flux": Workload(
        title="Flux, B200",
        columns={f"column{number}": ("float32", length) for number, length in enumerate(FLUX_LENGTHS)},
        samples_per_file=288,
        batch_size=48,
        computation=1.35,
        bound=0.90,
    ),
}
SYSTEMS = {"ours": "mds", "litData": "litdata", "MosaicML": "mds", "plain": "plain"}
"""The format that each system reads."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A number of accelerators to run at once."""

    system: str
    workload: str
    accelerators: int
    cores: int
    workers: int
    seconds: float
    data: str
    """Directory or URL."""
    cache: str
    endpoint: str


# --- data ---


def records(workload: Workload, samples: int) -> Iterator[Any]:
    """Yield samples as rows of bytes, the same for all formats."""
    rng = np.random.default_rng(0)
    for _ in range(samples):
        yield np.frombuffer(rng.bytes(workload.sample_bytes), np.uint8)


def write(form: str, root: Path, workload: Workload, samples: int) -> None:
    """Write the samples in a format."""
    rows = records(workload, samples)
    if form == "mds":
        from lightning_streaming import MDSWriter

        columns = {name: f"ndarray:{dtype}:{length}" for name, (dtype, length) in workload.columns.items()}
        with MDSWriter(out=str(root), columns=columns, size_limit=SHARD_BYTES) as mds:
            for row in rows:
                mds.write(workload.arrays(row))
    elif form == "litdata":
        from litdata.streaming.writer import BinaryWriter

        root.mkdir(parents=True)
        writer = BinaryWriter(str(root), chunk_bytes=SHARD_BYTES)
        for number, row in enumerate(rows):
            writer[number] = workload.arrays(row)
        writer.done()
        writer.merge()
    else:
        root.mkdir(parents=True)
        for number, row in enumerate(rows):
            with (root / f"{number // workload.samples_per_file:06}").open("ab") as file:
                row.tofile(file)


class Files:
    """Map-style dataset over files of samples that are stored one after another."""

    def __init__(self, root: str, workload: Workload) -> None:
        self.paths, self.workload = sorted(Path(root).iterdir()), workload
        self.length = sum(path.stat().st_size for path in self.paths) // workload.sample_bytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        file, row = divmod(number, self.workload.samples_per_file)
        size = self.workload.sample_bytes
        return self.workload.arrays(np.fromfile(self.paths[file], np.uint8, size, offset=row * size))


# --- accelerators ---


def make_loader(trial: Trial, number: int) -> Any:
    """Return the loader of one accelerator."""
    workload = WORKLOADS[trial.workload]
    options: dict[str, Any] = {"batch_size": workload.batch_size, "num_workers": trial.workers, "drop_last": True}
    options["persistent_workers"] = trial.workers > 0
    is_remote, cache = trial.data.startswith("s3:"), f"{trial.cache}/{number}"
    store: dict[str, Any] = {}
    if trial.system == "plain":
        from torch.utils.data import DataLoader

        files: Any = Files(trial.data, workload)
        return DataLoader(files, shuffle=True, **options)
    if trial.system == "litData":
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it would talk to an endpoint by https only
        keys = {"endpoint_url": trial.endpoint, "aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        if is_remote:
            store = {"cache_dir": cache, "storage_options": keys}
        return StreamingDataLoader(StreamingDataset(trial.data, shuffle=True, batch_decode=0, **store), **options)
    if trial.system == "MosaicML":
        from streaming import StreamingDataLoader, StreamingDataset

        place = {"remote": trial.data, "local": cache} if is_remote else {"local": trial.data}
        dataset = StreamingDataset(shuffle=True, batch_size=workload.batch_size, **place)
        return StreamingDataLoader(dataset, **options)
    import lightning_streaming

    keys = {"key": "key", "secret": "secret", "endpoint_url": trial.endpoint}
    if is_remote:
        store = {"local": cache, "storage": {"options": keys}}
    dataset = lightning_streaming.StreamingDataset(remote=trial.data, shuffle=True, **store)
    return lightning_streaming.StreamingDataLoader(dataset, **options)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from loader


def accelerate(trial: Trial, number: int, lock: Any, barrier: Any, results: Any) -> None:
    """Take batches and sleep, as one accelerator, and report its utilization."""
    computation = WORKLOADS[trial.workload].computation
    try:
        with lock if trial.system == "MosaicML" else nullcontext():  # it chooses names of shared memory without one
            batches = endless(make_loader(trial, number))
            next(batches)
        barrier.wait(LONGEST_SECONDS)
    except BaseException:
        barrier.abort()
        raise
    for _ in range(WARM_UP):
        next(batches)
        time.sleep(computation)
    steps, began = 0, time.perf_counter()
    while steps < LEAST_STEPS or time.perf_counter() - began < trial.seconds:
        next(batches)
        time.sleep(computation)
        steps += 1
    results.put(steps * computation / (time.perf_counter() - began))


def run_trial(trial: Trial) -> float:
    """Return the mean utilization of all accelerators of a trial, which are forked from this process."""
    import torch

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: trial.cores])
    torch.set_num_threads(1)
    module = {"ours": "lightning_streaming.reading.loader", "litData": "litdata", "MosaicML": "streaming"}
    importlib.import_module(module.get(trial.system, "torch.utils.data"))  # once, for all accelerators
    fork = multiprocessing.get_context("fork")
    lock, barrier, results = fork.Lock(), fork.Barrier(trial.accelerators), fork.SimpleQueue()
    processes = [
        fork.Process(target=accelerate, args=(trial, number, lock, barrier, results))
        for number in range(trial.accelerators)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("an accelerator failed")
    return float(np.mean([results.get() for _ in processes]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["trial", text]:
            print(run_trial(Trial(**json.loads(text))), flush=True)
        case ["write", form, path, workload, count]:
            write(form, Path(path), WORKLOADS[workload], int(count))
