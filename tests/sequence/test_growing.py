"""Orders of the first shards of longer streams: bit for bit those of the shorter streams, with ids of the longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.settings import BATCHING_METHODS, SHUFFLE_ALGOS
from lightning_streaming.sequence.weights import DatasetShape
from tests.sequence.builders import epoch_of, geometry_of, make_settings, make_shape
from tests.tiers import examples

streams = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4)


def with_gaps(shape: DatasetShape, gaps: list[int]) -> DatasetShape:
    """The same data where each stream is followed by so many samples that are not read."""
    sizes = [int(of.sum()) + gap for of, gap in zip(shape.shard_sizes, gaps, strict=True)]
    firsts = tuple(np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist())
    return DatasetShape(shard_sizes=shape.shard_sizes, weights=shape.weights, first_ids=firsts)


def renumbered(shape: DatasetShape, grown: DatasetShape) -> dict[int, int]:
    """The id in the longer streams of each sample, by its id in the shorter ones; sample by sample."""
    found: list[int] = []
    for sizes, first in zip(shape.shard_sizes, grown.first_ids, strict=True):
        found += range(first, first + int(sizes.sum()))
    return dict(enumerate(found))


@given(
    sizes=streams,
    algo=st.sampled_from([*SHUFFLE_ALGOS, None]),
    method=st.sampled_from(BATCHING_METHODS),
    repeat=st.sampled_from([None, 0.5, 1.7]),
    epoch=st.integers(0, 2),
    data=st.data(),
)
@settings(max_examples=examples(120))
def test_an_order_does_not_know_what_was_appended(
    sizes: list[list[int]], algo: Any, method: Any, repeat: float | None, epoch: int, data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes)), label="appended")
    how = {"shuffle": False} if algo is None else {"shuffle_algo": algo, "shuffle_block_size": 16}
    order = make_settings(num_canonical_nodes=2, batching_method=method, **how)
    try:
        shape = make_shape(*sizes, repeat=repeat)
        before = epoch_of(order, shape, geometry_of(1, 1, 2), epoch)
        ids = before.ids(np.arange(len(before))).tolist()
    except ConfigError:  # too few samples for this method or shuffle
        return
    grown = with_gaps(shape, gaps)
    after = epoch_of(order, grown, geometry_of(1, 1, 2), epoch)
    to = renumbered(shape, grown)
    assert len(after) == len(before)
    assert after.ids(np.arange(len(after))).tolist() == [to[one] for one in ids]
    assert isinstance(after.inner, Shuffled)
    assert isinstance(before.inner, Shuffled)
    assert after.inner.is_identity == before.inner.is_identity
    assert after.digest != before.digest


def test_ids_of_any_shape_are_renumbered() -> None:
    shape = with_gaps(make_shape([2, 1], [4]), [5, 0])
    assert shape.ids(np.array([[0, 2], [3, 6]])).tolist() == [[0, 2], [8, 11]]
    assert len(shape) == 7
    identity = Shuffled(make_settings(shuffle=False), shape, 0)
    assert identity.is_identity
    assert identity.ids(np.arange(7)).tolist() == [0, 1, 2, 8, 9, 10, 11]


def test_each_stream_begins_somewhere() -> None:
    shape = make_shape([2], [3])
    with pytest.raises(ConfigError, match="first id"):
        DatasetShape(shard_sizes=shape.shard_sizes, weights=shape.weights, first_ids=(0,))
