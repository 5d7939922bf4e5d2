"""What the golden files call things, in our words: whole work arrays built from a plan and a partition."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.batching import Batched, DevicePerStream
from lightning_streaming.sequence.partition import BatchGeometry, Partition, Regrouped, read_again
from lightning_streaming.sequence.settings import ResolvedOrder
from tests.golden import golden_path


def stretched_seed(shuffle_seed: int) -> int:
    """Return the seed that the 0.2 line shuffled with, and that its saved states have."""
    return int(np.random.default_rng(shuffle_seed).integers(2**60))


def load(name: str) -> dict[str, Any]:
    """Read a golden file."""
    loaded: dict[str, Any] = json.loads(golden_path(name).read_text())
    return loaded


def reference_start(settings: ResolvedOrder, consumed: int, current: BatchGeometry, epoch: BatchGeometry) -> int:
    """Where the reference starts dealing: it rounds down, to whole turns of the nodes or to whole global batches."""
    step = epoch.num_nodes if settings.batching_method == "random" else current.global_batch_size
    return consumed - consumed % step


def work_array(plan: Batched, partition: Partition, workers: int) -> NDArray[np.int64]:
    """The reference's array of sample ids, of shape (nodes, ranks, workers, batches per worker, batch size).

    Worker ``w`` of a rank takes batches ``w``, ``w + workers``, and so on; -1 stands where there is no sample.
    """
    batches_each = -(-partition.num_batches() // workers)
    machines = partition.geometry
    shape = (machines.num_nodes, machines.ranks_per_node, workers, batches_each, machines.batch_size)
    array = np.full(shape, -1, np.int64)
    for node in range(machines.num_nodes):
        for rank in range(machines.ranks_per_node):
            for worker in range(workers):
                positions = partition.batches(worker + workers * np.arange(batches_each), node, rank)
                array[node, rank, worker][positions >= 0] = plan.ids(positions[positions >= 0])
    return array


def reference_work_array(plan: Batched, partition: Partition, workers: int) -> NDArray[np.int64]:
    """Like :func:`work_array`, with the endings of the reference that leave ranks with unequal batches.

    Ours deals such an ending in turn, or leaves it out where batches are composed per rank.
    """
    array = work_array(plan, partition, workers)
    t, machines = partition.full_batches, partition.geometry
    if isinstance(partition.layout, Regrouped) and partition.remaining % machines.global_batch_size:
        first_machines = replace(machines, num_nodes=partition.layout.initial_num_nodes)
        for node, rank in np.ndindex(machines.num_nodes, machines.ranks_per_node):
            steps = t * machines.global_batch_size + partition.layout.entries(machines, node, rank)
            steps = read_again(steps, partition.remaining, first_machines)
            batch = np.full(machines.batch_size, -1)
            batch[steps >= 0] = plan.ids(partition.start + steps[steps >= 0])
            array[node, rank, t % workers, t // workers] = batch
    if isinstance(plan, DevicePerStream):
        rows = sum(plan.rows_per_stream)
        ending = np.full((machines.num_ranks, machines.batch_size), -1)
        left_out = rows % machines.ranks_per_node * machines.num_nodes * machines.batch_size
        places = plan.places_of_rows(np.arange(len(plan), len(plan) + left_out))
        ending.ravel()[:left_out] = plan.inner.ids(places)
        # The reference adds 1 to N * R rows of -1 on each node.
        rounds = (rows // machines.num_ranks + 1) * machines.num_nodes - partition.start // machines.global_batch_size
        batches_each = -(-rounds // workers)
        whole = np.full((*array.shape[:3], batches_each, machines.batch_size), -1)
        whole[:, :, :, : array.shape[3]] = array
        whole[:, :, t % workers, t // workers] = ending.reshape(*array.shape[:2], -1)
        return whole
    return array


def assert_is(array: NDArray[np.int64], expected: dict[str, Any]) -> None:
    """Compare an array with a golden one, given in full or by its ends, always with its shape and hash."""
    flat = array.ravel()
    assert list(array.shape) == expected["shape"]
    assert flat.dtype == np.int64
    if "ids" in expected:
        assert flat.tolist() == expected["ids"]
    else:
        assert flat[:32].tolist() == expected["first32"]
        assert flat[-32:].tolist() == expected["last32"]
    assert hashlib.sha256(flat.astype("<i8").tobytes()).hexdigest() == expected["sha256"]
