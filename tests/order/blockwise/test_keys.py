from __future__ import annotations

import numpy as np

from lightning_streaming.order.blockwise.keys import drawn_keys, numbered_keys


def test_numbered_keys_are_the_published_sequence() -> None:
    keys = numbered_keys(np.full(3, 1234567, np.uint64), np.arange(3))
    assert keys.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_of_many_numbers_and_keys_are_all_different() -> None:
    keys = np.repeat(drawn_keys(np.random.default_rng(0), 100), 1000)
    assert len(np.unique(numbered_keys(keys, np.tile(np.arange(1000), 100)))) == 100_000
