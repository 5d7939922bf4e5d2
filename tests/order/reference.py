"""What the golden files call things, in our words: whole work arrays built from a plan and a deal."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.deal import Deal
from lightning_streaming.order.plan import EpochPlan
from tests.golden import golden_path


def load(name: str) -> dict[str, Any]:
    """Read a golden file."""
    loaded: dict[str, Any] = json.loads(golden_path(name).read_text())
    return loaded


def reference_start(consumed: int, num_nodes: int) -> int:
    """Where the reference starts dealing: it rounds down to whole turns of the nodes, and may so read entries again."""
    return consumed - consumed % num_nodes


def work_array(plan: EpochPlan, deal: Deal, workers: int) -> NDArray[np.int64]:
    """The reference's array of sample ids, of shape (nodes, ranks, workers, batches per worker, batch size).

    Worker ``w`` of a rank takes batches ``w``, ``w + workers``, and so on; -1 stands where there is no sample.
    """
    batches_each = -(-deal.num_batches() // workers)
    shape = (deal.num_nodes, deal.ranks_per_node, workers, batches_each, deal.batch_size)
    array = np.full(shape, -1, np.int64)
    for node in range(deal.num_nodes):
        for rank in range(deal.ranks_per_node):
            for worker in range(workers):
                positions = deal.batches(worker + workers * np.arange(batches_each), node, rank)
                array[node, rank, worker][positions >= 0] = plan.ids(positions[positions >= 0])
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
