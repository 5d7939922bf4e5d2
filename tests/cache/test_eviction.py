"""The eviction policy: what goes first, how much goes at once, what stays, and limits that cannot work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.cache.eviction import (
    FINISHED_BEFORE,
    bytes_to_free,
    check_limit,
    coldest_first,
    evict,
    finished_time,
    last_used,
    least_limit,
    prefetch_spares_since,
    reader_share,
)
from lightning_streaming.cache.records import CacheEntry
from lightning_streaming.errors import ConfigError
from lightning_streaming.units import parse_bytes

NOW = 1_800_000_000 * 10**9


def entry(name: str, stamp: int) -> CacheEntry:
    return CacheEntry(name, 10, stamp, 0, 0)


def test_what_was_finished_last_goes_first_then_what_was_used_longest_ago() -> None:
    files = [
        entry("used now", NOW),
        entry("used before", NOW - 10),
        entry("finished in the last epoch", finished_time(NOW - 3600 * 10**9)),
        entry("finished now", finished_time(NOW)),
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


def test_a_limit_that_cannot_work_is_refused_with_the_one_that_would() -> None:
    least = least_limit(100, 1000)
    assert least == 2100
    check_limit(None, 100, 1000)
    check_limit(least, 100, 1000)
    with pytest.raises(
        ConfigError, match=r"^cache_limit is 2099b; at least 2100b is needed: 100b for .* 1000b"
    ) as caught:
        check_limit(least - 1, 100, 1000)
    assert caught.value.option == "cache_limit"


@pytest.mark.parametrize(
    ("limit", "fixed", "shard", "message"),
    [
        (
            500,
            100,
            1000,
            "x.cache_limit is 500b; at least 2100b is needed: 100b for index and selections, and twice 1000b,",
        ),
        (100 * 2**10, 2**10, 2**26, "x.cache_limit is 100kb; at least 129mb is needed: 1mb for index and selections"),
        (2**30, 2**10, 2**30, "x.cache_limit is 1024mb; at least 2049mb is needed: 1mb for "),
    ],
)
def test_a_limit_is_reported_in_units_in_which_it_is_written(limit: int, fixed: int, shard: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_limit(limit, fixed, shard, "x.cache_limit")
    assert str(raised.value).startswith(message)
    enough = parse_bytes(str(raised.value).partition("at least ")[2].split()[0])
    check_limit(enough, fixed, shard)


def test_readers_share_half_of_the_room() -> None:
    assert reader_share(1000, 5) == 100


def test_a_finished_file_was_last_used_when_it_was_finished() -> None:
    assert last_used(NOW) == NOW
    assert last_used(finished_time(NOW)) == NOW


def test_eviction_ends_once_enough_is_freed_and_passes_over_what_is_in_use() -> None:
    sizes = {"a": 3, "in use": 0, "b": 4, "c": 5}
    coldest = iter(sizes)
    assert evict(coldest, 5, sizes.__getitem__) == 7
    assert list(coldest) == ["c"]
    assert evict(iter(sizes), 100, sizes.__getitem__) == 12


def test_prefetching_spares_what_is_ahead_and_beyond_its_share_all_but_finished_shards() -> None:
    assert prefetch_spares_since(0, None, 10, None) is None
    assert prefetch_spares_since(10, NOW, 5, 15) == NOW
    assert prefetch_spares_since(10, NOW, 6, 15) == FINISHED_BEFORE
