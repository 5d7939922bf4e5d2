"""Weights set by a run: seconds of a change, of the start after a resume, and bytes of a state with many changes.

    python -m benchmarks.weight_changes
    python -m benchmarks.weight_changes --ways packs --steps 100 --changes 1 100

Makes the indexes of five streams in memory, with shards of a thousand documents and no files, and lengths of documents
that are drawn from exponential distributions. An epoch has as many documents, or tokens, as all streams, in --steps
mixture steps. For each way of counting, and each number of changes, in a fresh process:

    change   the last of so many calls of ``set_weights``, each with random weights for the next mixture step
    state    bytes of JSON of the position then
    start    from this state to the ids of the first 8,192 documents, or the first 256 packs

Packs of the epoch are planned by the change, and a start on the same node finds them in a file: --alone removes that
file before the start. Prints a Markdown table of seconds, with CPU seconds in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.phases import _SHARD
from lightning_streaming.formats.index import parse_index
from lightning_streaming.options.mixing import MixingConfig
from lightning_streaming.options.packing import PackingConfig
from lightning_streaming.resume.run_order import RunRequest
from lightning_streaming.resume.run_state import RunState, drawn_sequence
from lightning_streaming.resume.state import Cursor, read_state
from lightning_streaming.selection.catalog import Catalog, CatalogLengths
from lightning_streaming.selection.document_lengths import StreamLengths
from lightning_streaming.sequence.phases import WeightChange
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import StreamWeight
from lightning_streaming.units import parse_count
from lightning_streaming.world import World

MEANS = {"books": 20_000, "code": 1000, "math": 800, "web": 500, "wiki": 700}
WAYS = ("samples", "tokens", "packs", "packs, in tokens")
SHARD_SAMPLES = 1000
_WORLD = World(num_nodes=1, ranks_per_node=8, rank=0)


class _Data:
    """Settled data."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def prepare(self) -> None:
        """Nothing to do."""


class _Passes:
    """Counts no passes, as no worker begins one."""

    def reset(self, cursor: Cursor) -> None:
        """Nothing to do."""

    def count_pass(self, worker: int) -> Cursor:
        """Is not called."""
        raise NotImplementedError

    def passes_counted(self) -> int:
        """None."""
        return 0


def make_catalog(documents: int) -> Catalog:
    """Indexes and lengths of streams of the same size, of shards that are nowhere."""
    rng, each = np.random.default_rng(0), documents // len(MEANS)
    shards = [
        {**_SHARD, "raw_data": {"basename": f"shard.{number:05}.mds", "bytes": 1 << 20, "hashes": {}}, "samples": count}
        for number, start in enumerate(range(0, each, SHARD_SAMPLES))
        for count in (min(SHARD_SAMPLES, each - start),)
    ]
    index = json.dumps({"version": 2, "shards": shards}).encode()
    catalog = Catalog({name: parse_index(index, name) for name in MEANS})
    lengths = {
        name: StreamLengths(rng.exponential(mean, each).astype(np.uint32) + 1, digest=f"{number:016}")
        for number, (name, mean) in enumerate(MEANS.items())
    }
    for read in catalog.indexes:
        _ = read.data_digest  # as an index that is kept has it
    catalog.lengths = CatalogLengths(catalog, lengths)
    return catalog


def request_of(way: str, catalog: Catalog, steps: int) -> RunRequest:
    """The options of a run of so many mixture steps in an epoch."""
    of = catalog.num_samples
    if way.endswith("tokens"):
        of = of // len(MEANS) * sum(MEANS.values())
    return RunRequest(
        settings=OrderSettings(shuffle=True, shuffle_algo="py1e", num_canonical_nodes=8),
        weights=tuple(StreamWeight(proportion=1.0) for _ in MEANS),
        epoch_size=of,
        mixing=MixingConfig(weights_in="tokens" if way.endswith("tokens") else "samples", longest_step=-(-of // steps)),
        pack=PackingConfig(column="tokens", capacity=8192) if way.startswith("packs") else None,
    )


# --- in a separate process ---


def measure(way: str, documents: int, steps: int, changes: int, *, alone: bool) -> dict[str, Any]:
    """Seconds of the last change and of a start, and bytes of the state."""
    catalog, rng = make_catalog(documents), random.Random(0)
    request = request_of(way, catalog, steps)
    mixes = [tuple((name, rng.uniform(0.1, 1)) for name in sorted(MEANS)) for _ in range(changes)]
    before = tuple(WeightChange(epoch=0, step=step, mix=mix) for step, mix in enumerate(mixes[:-1]))
    state = RunState(replace(request, weights_set=before), _Data(catalog), _Passes())
    state.read_by(16, drop_last=False)
    state.begin(_WORLD, 16)
    run = state.on(_WORLD, 16)
    stops = run.epoch(Cursor(0, 0)).sequence.part_stops()
    cursor = Cursor(0, int(stops[changes - 2]) if changes > 1 else 0)
    _, change = _timed(lambda: state.set_weights(dict(mixes[-1]), cursor, _WORLD))
    saved = json.loads(json.dumps(state.on(_WORLD, 16).saved(cursor).as_state()))
    if alone:
        shutil.rmtree(os.environ["LIGHTNING_STREAMING_RUNTIME"])

    def start() -> None:
        resumed = RunState(request, _Data(catalog), _Passes())
        resumed.read_by(16, drop_last=False)
        resumed.load(read_state(saved), "error")
        epoch = resumed.epoch_of(resumed.begin(_WORLD, 16))
        count = min(256 if request.pack else 8192, len(epoch.sequence) - cursor.sample_in_epoch)
        drawn_sequence(epoch).ids(cursor.sample_in_epoch + np.arange(count))

    return {
        "way": way,
        "changes": changes,
        "change": change,
        "state": len(json.dumps(saved)),
        "start": _timed(start)[1],
        "steps": len(stops),
    }


def _timed(act: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Call a function; its result, its seconds, and its CPU seconds."""
    began, busy = time.perf_counter(), time.process_time()
    result = act()
    return result, (time.perf_counter() - began, time.process_time() - busy)


# --- around it ---


def measured(way: str, documents: int, steps: int, changes: int, *, alone: bool) -> Any:
    """One measurement in a fresh process, with an empty runtime directory."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as runtime:
        environment = os.environ | {"LIGHTNING_STREAMING_RUNTIME": runtime}
        words = [way, *map(str, (documents, steps, changes)), *["--alone"] * alone]
        command = [sys.executable, "-m", "benchmarks.weight_changes", "--measure", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", default="1m", help="of all streams, and of the epoch (default: %(default)s)")
    parser.add_argument("--changes", type=int, nargs="+", default=[1, 10, 1000], help="(default: %(default)s)")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="(default: all)")
    parser.add_argument("--json", type=Path, default=Path("build/weight_changes.json"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="mixture steps of the epoch (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="start as on another node")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, *numbers = options.measure
        print(json.dumps(measure(way, *map(int, numbers), alone=options.alone)))
        return 0
    documents = parse_count(options.documents, "--documents")
    print("| counted | steps | changes | change | state | start |\n|---|--:|--:|--:|--:|--:|")
    results = []
    for way in options.ways:
        for changes in options.changes:
            row = measured(way, documents, options.steps, changes, alone=options.alone)
            results.append(row)
            change, start = (f"{row[what][0]:.2f} s ({row[what][1]:.2f})" for what in ("change", "start"))
            times = f"{change} | {row['state'] / 1000:.1f} KB | {start} |"
            print(f"| {way} | {row['steps']:,} | {changes:,} | {times}", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
