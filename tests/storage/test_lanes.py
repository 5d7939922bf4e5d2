from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.storage.lanes import Lanes, lanes_of_process, next_turn, share_connections


async def _hold(lanes: Lanes, turn: int, most: int, order: list[int], peak: list[int]) -> None:
    async with lanes.one(turn, most):
        order.append(turn)
        peak.append(lanes.in_flight)
        await asyncio.sleep(0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 4))
def test_lanes_are_never_more_than_allowed_and_all_get_one(turns: list[int], most: int) -> None:
    async def run() -> None:
        lanes, order, peak = Lanes(), list[int](), list[int]()
        await asyncio.gather(*[_hold(lanes, turn, most, order, peak) for turn in turns])
        assert sorted(order) == sorted(turns)
        assert max(peak, default=0) <= most
        assert lanes.in_flight == 0

    asyncio.run(run())


def test_the_download_that_began_first_goes_first() -> None:
    async def run() -> list[int]:
        lanes, order = Lanes(), list[int]()
        async with lanes.one(0, 1):
            waiting = [asyncio.ensure_future(_hold(lanes, turn, 1, order, [])) for turn in (3, 1, 2, 1)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        return order

    assert asyncio.run(run()) == [1, 1, 2, 3]


@pytest.mark.parametrize("granted", [False, True])
def test_one_that_is_cancelled_leaves_its_lane_to_others(granted: bool) -> None:
    async def run() -> None:
        lanes, order = Lanes(), list[int]()
        async with lanes.one(0, 1):
            gone = asyncio.ensure_future(_hold(lanes, 1, 1, order, []))
            stays = asyncio.ensure_future(_hold(lanes, 2, 1, order, []))
            await asyncio.sleep(0)
            if not granted:
                gone.cancel()
        gone.cancel()  # with its lane granted just now, and not yet taken
        await asyncio.wait_for(stays, 10)
        assert (order, lanes.in_flight) == ([2], 0)

    asyncio.run(run())


def test_turns_count_up() -> None:
    assert next_turn() < next_turn()


def test_a_forked_child_has_lanes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lanes_of_process()
    assert lanes_of_process() is mine
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert lanes_of_process() is not mine


@pytest.mark.parametrize(("processes", "most"), [(1, 16), (4, 16), (8, 8), (32, 2), (1000, 2)])
def test_the_processes_of_a_node_share_its_connections(
    monkeypatch: pytest.MonkeyPatch, processes: int, most: int
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -2)

    async def run() -> int:
        peak: list[int] = []
        await asyncio.gather(*[_hold(lanes_of_process(), 0, 99, [], peak) for _ in range(20)])
        return max(peak)

    share_connections(processes)
    assert asyncio.run(run()) == most
