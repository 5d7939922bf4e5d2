"""Who goes first, and how many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.cache.eviction import bytes_to_free, coldest_first
from lightning_streaming.cache.scan import Entry
from lightning_streaming.cache.stamps import FINISHED_BEFORE, finished_stamp

NOW = 1_800_000_000 * 10**9


def entry(name: str, stamp: int) -> Entry:
    return Entry(name, 10, stamp, 0)


def test_what_was_finished_last_goes_first_then_what_was_used_longest_ago() -> None:
    files = [
        entry("used now", NOW),
        entry("used before", NOW - 10),
        entry("finished in the last epoch", finished_stamp(NOW - 3600 * 10**9)),
        entry("finished now", finished_stamp(NOW)),
    ]
    wanted = ["finished now", "finished in the last epoch", "used before", "used now"]
    assert [file.path for file in coldest_first(files, None)] == wanted
    assert [file.path for file in coldest_first(files, NOW)] == wanted[:3]
    assert [file.path for file in coldest_first(files, FINISHED_BEFORE)] == wanted[:2]


@given(st.integers(0, 2000), st.integers(0, 500), st.integers(500, 2000))
def test_what_is_wanted_fits_afterwards_and_a_tenth_of_the_limit_goes_at_most(
    used: int, wanted: int, limit: int
) -> None:
    free = bytes_to_free(used, wanted, limit)
    assert (free == 0) == (used + wanted <= limit)
    assert used - free + wanted <= limit
    assert free == 0 or free <= max(used - limit, 0) + max(wanted, limit // 10)


def test_a_few_go_together() -> None:
    assert bytes_to_free(995, 10, 1000) == 95
    assert bytes_to_free(6, 1, 6) == 1
