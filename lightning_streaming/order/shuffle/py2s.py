"""Shuffle shards and their samples once for the run, then again for the epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.spans import Spans, cut, in_rooms, shuffle_runs, shuffled, unit_spans
from lightning_streaming.order.shuffle.task import ShuffleTask


def py2s(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """As ``py1s``, but samples are shuffled before shards are cut.

    So a shard that reaches across two canonical nodes gives each of them samples from all over it.
    """
    run_generator, generator = task.run_generator(), task.epoch_generator()
    spans = shuffled(unit_spans(task), run_generator)
    spans.write_shuffled(out, run_generator)

    # From here on spans are stretches of what has just been written.
    stretches = Spans(np.cumsum(spans.sizes) - spans.sizes, spans.sizes)
    for part, room in in_rooms(cut(stretches, task.num_canonical_nodes), out):
        if not len(room):
            continue
        first = int(part.firsts[0])
        part = shuffled(part, generator)
        places = np.empty(len(room), room.dtype)
        Spans(part.firsts - first, part.sizes).write(places)
        room[:] = room[places]
        shuffle_runs(part.sizes, room, generator)
