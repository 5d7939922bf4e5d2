"""Whole epochs of random settings, ours against MosaicML Streaming's: every worker's every sample.

Run from the root of the repository where MosaicML Streaming 0.13 is installed: python -m benchmarks.compare_order
Prints how many epochs are equal, how many differ in a way that decision 0002 describes, and shows each that differs
otherwise; there must be none of these, and the exit status says so.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import StateError, StreamingError
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights
from lightning_streaming.world import World
from tests.sequence.reference import reference_work_array, work_array

try:
    from streaming.base.batching import generate_work
    from streaming.base.dataset import StreamingDataset
    from streaming.base.stream import Stream
    from streaming.base.world import World as ReferenceWorld
except ImportError as missing:
    sys.exit(f"{__doc__}\nThis interpreter does not have it ({missing}).")

T = TypeVar("T")

METHODS = ("random", "random", "stratified", "per_stream", "device_per_stream")
SHUFFLES = ("naive", "py1s", "py2s", "py1br", "py1e")
NO_RESUME_STATE = 990_991
"""Prefix of shared memory that nobody makes, so that the reference finds no state to resume from."""
REFUSALS = (AssertionError, ArithmeticError, IndexError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One epoch, and who reads it from where on."""

    shards: list[list[int]]
    """Samples in each shard, per stream."""
    weights: list[dict[str, Any]]
    epoch_size: int | None
    settings: dict[str, Any]
    batch_size: int
    world: tuple[int, int]
    """Nodes, and ranks per node."""
    workers: int
    replication: int | None
    epoch: int
    steps: int
    """Global batches that were read before."""
    initial_nodes: int | None


# --- random settings ---


def random_config(rng: np.random.Generator) -> Config:
    """Small data and few machines in every combination that a person may ask for, and some that cannot work."""
    shards = random_shards(rng)
    weights, epoch_size = random_weights(rng, shards)
    nodes, ranks = rng.integers(1, 5, 2).tolist()
    resumed = bool(rng.random() < 0.5)
    initial_nodes = int(rng.integers(1, 5)) if resumed and rng.random() < 0.8 else None
    # Canonical nodes mostly fit the nodes at hand or those that the run began with.
    fitted = initial_nodes or nodes
    canonical = int(rng.choice([nodes, 2 * nodes, 3 * nodes, fitted, fitted, 3 * fitted, 1, 4, 5, 12, 24]))
    batch_size = int(rng.integers(1, 7))
    if rng.random() < 0.3:
        batch_size *= fitted  # so that the global batch divides among those that the run began with
    steps_of_epoch = (epoch_size or sum(map(sum, shards))) // (nodes * ranks * batch_size)
    divisors = [each for each in range(1, nodes * ranks + 1) if nodes * ranks % each == 0]
    return Config(
        shards=shards,
        weights=weights,
        epoch_size=epoch_size,
        settings=random_settings(rng, None if rng.random() < 0.2 and not resumed else canonical),
        batch_size=batch_size,
        world=(nodes, ranks),
        workers=int(rng.integers(1, 4)),
        replication=None if rng.random() < 0.75 else int(rng.choice([*divisors, *divisors, 2])),
        epoch=int(rng.integers(6)),
        steps=int(rng.integers(steps_of_epoch + 2)) if resumed else 0,
        initial_nodes=initial_nodes,
    )


def random_shards(rng: np.random.Generator) -> list[list[int]]:
    """Samples in each shard, per stream; now and then a shard is empty, as in the reference's own first ones."""
    num_streams = int(rng.choice([1, 2, 3, 4, 9], p=[0.35, 0.3, 0.2, 0.1, 0.05]))
    largest = int(rng.choice([3, 20, 60]))
    shards: list[list[int]] = [rng.integers(1, largest + 1, rng.integers(1, 7)).tolist() for _ in range(num_streams)]
    if rng.random() < 0.1:
        some = shards[int(rng.integers(num_streams))]
        some.insert(int(rng.integers(len(some) + 1)), 0)
    return shards


def random_settings(rng: np.random.Generator, num_canonical_nodes: int | None) -> dict[str, Any]:
    """What :class:`OrderSettings` and the reference's dataset both take."""
    return {
        "shuffle": bool(rng.random() < 0.75),
        "shuffle_algo": str(rng.choice(SHUFFLES)),
        "shuffle_seed": int(rng.choice([0, 9176, int(rng.integers(2**60))])),
        "shuffle_block_size": None
        if rng.random() < 0.2
        else int(rng.choice([rng.integers(1, 20), rng.integers(80)]) + 1),
        "num_canonical_nodes": num_canonical_nodes,
        "sampling_method": str(rng.choice(["balanced", "fixed"])),
        "sampling_granularity": int(rng.choice([1, 1, 2, 5, 30])),
        "partition_algo": str(rng.choice(["orig", "relaxed", "relaxed"])),
        "batching_method": str(rng.choice(METHODS)),
    }


def random_weights(rng: np.random.Generator, shards: list[list[int]]) -> tuple[list[dict[str, Any]], int | None]:
    """Weights of one kind, now and then of two, which contradict each other."""
    samples = sum(map(sum, shards))
    epoch_size = int(rng.integers(1, 2 * samples + 1)) if rng.random() < 0.4 else None
    kind = str(rng.choice(["none", "equal", "proportion", "absolute", "mixed"], p=[0.3, 0.1, 0.3, 0.28, 0.02]))
    if kind in ("none", "equal"):
        return [{"proportion": 0.5} if kind == "equal" else {} for _ in shards], epoch_size
    said: list[dict[str, Any]] = []
    for sizes in shards:
        absolute: list[dict[str, Any]] = [
            {},
            {"repeat": round(float(rng.uniform(0, 2.5)), 2)},
            {"choose": int(rng.integers(0, 2 * sum(sizes)))},
        ]
        relative = {"proportion": round(float(rng.uniform(0.01, 1)), int(rng.integers(1, 4)))}
        use_relative = kind == "proportion" or (kind == "mixed" and rng.random() < 0.5)
        said.append(relative if use_relative else absolute[int(rng.integers(3))])
    return said, epoch_size if kind == "proportion" or rng.random() < 0.03 else None


# --- the reference ---


class Reference(StreamingDataset):  # type: ignore[misc]
    """Just enough of the reference's dataset for it to plan an epoch: no files, no shared memory."""

    def __init__(self, config: Config, world: ReferenceWorld) -> None:
        settings = config.settings
        self.__dict__.update(settings)
        self.batch_size = config.batch_size
        self.initial_physical_nodes = config.initial_nodes
        self.epoch_seed_change = settings["shuffle"] and settings["sampling_method"] == "balanced"
        self.num_streams = len(config.shards)
        self.shards_per_stream = np.asarray([len(sizes) for sizes in config.shards])
        self.shard_offset_per_stream = np.cumsum(self.shards_per_stream) - self.shards_per_stream
        self.samples_per_shard = np.concatenate([np.asarray(sizes, np.int64) for sizes in config.shards])
        self.sample_offset_per_shard = np.cumsum(self.samples_per_shard) - self.samples_per_shard
        self.streams = [Stream(local="unused", **weight) for weight in config.weights]
        samples = np.asarray([sum(sizes) for sizes in config.shards])
        self.epoch_size = Stream.apply_weights(self.streams, samples, config.epoch_size, settings["shuffle_seed"])
        self._shm_prefix_int = NO_RESUME_STATE
        self._resume(world, config.epoch)


def reference_work(config: Config) -> NDArray[np.int64]:
    """The reference's array of sample ids, of shape (nodes, ranks, workers, batches per worker, batch size)."""
    world = ReferenceWorld(*config.world, config.workers, 0)
    if config.replication is not None:
        world = world.replicate(config.replication)
    consumed = config.steps * config.batch_size * world.num_ranks
    dataset = Reference(config, world)
    work: NDArray[np.int64] = generate_work(dataset.batching_method, dataset, world, config.epoch, consumed)
    return work


def reference_work_with_stable_sort(config: Config) -> NDArray[np.int64]:
    """Like :func:`reference_work`, where equals are sorted as they were; numpy's default depends on the processor."""
    with patch("numpy.argsort", partial(np.argsort, kind="stable")):
        return reference_work(config)


# --- ours ---


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What we plan and partition."""

    settings: OrderSettings
    plan: Batched
    partition: Partition
    workers: int

    def work(self) -> NDArray[np.int64]:
        """Like :func:`reference_work`."""
        return work_array(self.plan, self.partition, self.workers)

    def work_with_uneven_ending(self) -> NDArray[np.int64]:
        """Like :meth:`work`, with the last batches as the reference deals them."""
        return reference_work_array(self.plan, self.partition, self.workers)

    def keeps_its_promises(self) -> bool:
        """Whether all that is left is read, and by all ranks equally much."""
        work = self.work()
        left = self.plan.ids_between(self.partition.start, len(self.plan))
        samples_per_rank = (work >= 0).sum(axis=(2, 3, 4))
        return set(work[work >= 0]) == set(left) and len(np.unique(samples_per_rank)) == 1


def our_epoch(config: Config) -> Ours:
    """Plan and partition as the loading room does."""
    world = World(num_nodes=config.world[0], ranks_per_node=config.world[1]).replicated(config.replication)
    settings = OrderSettings(**config.settings).resolved(world.num_nodes)
    sizes = tuple(np.asarray(shards, np.int64) for shards in config.shards)
    weights = resolve_weights(
        [StreamWeight(**weight) for weight in config.weights],
        [int(shards.sum()) for shards in sizes],
        config.epoch_size,
        settings.shuffle_seed,
    )
    shape = DatasetShape(shard_sizes=sizes, weights=weights)
    current = BatchGeometry(
        num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node, batch_size=config.batch_size
    )
    geometry = epoch_geometry(settings, current, config.initial_nodes)
    plan = batched(Shuffled(settings, shape, config.epoch).drawn(), geometry)
    partition = Partition(
        sequence=plan,
        start=plan.resume_position(config.steps * current.global_batch_size, world.num_ranks),
        geometry=current,
        layout=rank_layout(settings, current, geometry),
    )
    return Ours(settings=settings, plan=plan, partition=partition, workers=config.workers)


# --- the comparison ---

DIFFERENT = "DIFFERENT"
EQUAL = "equal"
BOTH_REFUSE = "both refuse"


def compare(config: Config) -> str:
    """Say how the two compare on one epoch."""
    ours = outcome(our_epoch, config)
    verdict = judge(ours, outcome(reference_work, config))
    if verdict.startswith(DIFFERENT) and config.settings["batching_method"] == "stratified":
        again = judge(ours, outcome(reference_work_with_stable_sort, config))
        if not again.startswith(DIFFERENT):
            return "shares of equal remainders rounded up in another order: stratified"
    return verdict


def outcome(work_out: Callable[[Config], T], config: Config) -> T | Exception:
    """What comes out, or why nothing does."""
    try:
        return work_out(config)
    except (StreamingError, *REFUSALS) as error:
        return error


def judge(ours: Ours | Exception, theirs: NDArray[np.int64] | Exception) -> str:
    """Compare two outcomes."""
    if isinstance(theirs, Exception):
        return BOTH_REFUSE if isinstance(ours, StreamingError) else served_by_us(ours, theirs)
    return refused_by_us(ours, theirs) if isinstance(ours, Exception) else both_served(ours, theirs)


def both_served(ours: Ours, theirs: NDArray[np.int64]) -> str:
    """Equal, or but for the last batches of an epoch."""
    if same(ours.work(), theirs):
        return EQUAL
    if ours.keeps_its_promises() and same(ours.work_with_uneven_ending(), theirs):
        uneven = len(np.unique((theirs >= 0).sum(axis=(2, 3, 4)))) > 1
        words = "even ending, theirs is not" if uneven else "an ending dealt in turn, theirs in blocks"
        return f"{words}: {ours.settings.batching_method}"
    return DIFFERENT


def served_by_us(ours: Ours | Exception, theirs: Exception) -> str:
    """Why the reference cannot serve what we can."""
    if isinstance(ours, Exception):
        return f"{DIFFERENT}: ours raises {ours!r}, which is none of our own errors"
    known = {
        "not evenly divisible by the initial total": "served: any global batch on nodes that do not fit",
        "could not be broadcast together": "served: few samples over many nodes",
        "could not broadcast input": "served: few samples over many nodes",
        "must be divisible by physical nodes": "served: device_per_stream on nodes that do not fit",
        "samples assigned to a canonical node": "served: py1e with an empty canonical node",
        "Resuming further into the dataset": "served: a position among repeats of fewer samples than canonical nodes",
        "are not being used": "served: a shuffle without blocks where a stream's share of a block is none",
    }
    for words, reason in known.items():
        if words in str(theirs) and ours.keeps_its_promises():
            return reason
    return f"{DIFFERENT}: the reference raises {theirs!r}"


def refused_by_us(ours: Exception, theirs: NDArray[np.int64]) -> str:
    """Why we refuse what the reference makes something of."""
    is_empty = not (theirs >= 0).any()
    if is_empty and isinstance(ours, StateError):
        return "refused: a position past the end"
    if is_empty and "too few for its share" in str(ours):
        return "refused: a stratified epoch without a batch"
    return f"{DIFFERENT}: ours raises {ours!r}"


def same(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> bool:
    """Whether every worker reads the same; batches without a sample at the end do not count."""
    return np.array_equal(without_empty_end(ours), without_empty_end(theirs))


def without_empty_end(work: NDArray[np.int64]) -> NDArray[np.int64]:
    """``work`` without the last batches per worker that hold no sample for anyone."""
    holds_samples = np.flatnonzero((work >= 0).any(axis=(0, 1, 2, 4)))
    return work[:, :, :, : holds_samples[-1] + 1 if holds_samples.size else 0]


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="epochs to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the random settings")
    parser.add_argument("--show", type=int, default=5, help="settings to print of epochs that differ")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # the reference tells of every batch it leaves out

    verdicts: Counter[str] = Counter()
    shown = 0
    for number in range(args.count):
        config = random_config(np.random.default_rng([args.seed, number]))
        verdict = compare(config)
        verdicts[verdict.split(":")[0] if verdict.startswith(DIFFERENT) else verdict] += 1
        if verdict.startswith(DIFFERENT) and shown < args.show:
            shown += 1
            print(f"{verdict}\n  {config}")
    print(f"| of {args.count} epochs | |\n|---|---:|")
    for verdict, count in verdicts.most_common():
        print(f"| {verdict} | {count} |")
    return 1 if verdicts[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main())
