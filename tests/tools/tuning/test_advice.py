from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.reading.dataset import source_of
from lightning_streaming.reading.measures import LoaderStatistics
from lightning_streaming.tools.tuning.measure import Arrival, Speed, is_enough, link_of, quotas, shards_to_fetch
from lightning_streaming.tools.tuning.tune_run import (
    Disk,
    advise_limit,
    advise_predownload,
    advise_workers,
    doublings,
    max_open_bytes,
    round_up,
)
from lightning_streaming.units import bytes_as_written, parse_bytes

MB = 2**20


def speeds(*batches_per_second: float) -> list[Speed]:
    """Of 0, 1, 2, 4, ... workers, each measured for a second."""
    return [
        Speed(
            workers=workers,
            seconds=1.0,
            read=LoaderStatistics(batches=int(batches), samples=int(batches) * 8),
            first_batch=0.1,
        )
        for workers, batches in zip((0, 1, 2, 4, 8, 16), batches_per_second, strict=False)
    ]


@pytest.mark.parametrize(
    ("measured", "consumer", "workers"),
    [
        ((100, 80, 90), 0.0, 0),  # workers do not help
        ((100, 80, 160, 170), 0.0, 2),  # 4 are 6 % faster: noise
        ((100, 80, 160, 300), 0.0, 4),
        ((100, 80, 160, 300), 0.02, 1),  # a step of 20 ms needs 50 batches a second
        ((100, 80, 160, 300), 0.005, 4),
        ((10000, 80), 0.02, 0),  # reading in the process itself takes 0.1 ms of a step
        ((100, 40), 0.02, 1),  # 25 ms a step, rather than 10 + 20
    ],
)
def test_the_fewest_workers_are_chosen_that_are_about_as_good_as_the_best(
    measured: tuple[float, ...], consumer: float, workers: int
) -> None:
    assert advise_workers(speeds(*measured), consumer).value == workers


@pytest.mark.parametrize(
    ("measured", "consumer", "enough"),
    [
        ((100, 50, 100), 0.0, False),  # 2 are twice as fast as 1
        ((100, 50, 100, 105), 0.0, False),  # one step up that gains nothing may be chance
        ((100, 50, 100, 105, 104), 0.0, True),
        ((100, 50), 0.03, True),  # keeps up
        ((100, 50), 0.02, False),  # just
        ((100,), 1.0, False),  # the process itself never makes batches meanwhile
    ],
)
def test_trying_ends_where_more_workers_gain_nothing(
    measured: tuple[float, ...], consumer: float, enough: bool
) -> None:
    assert is_enough(speeds(*measured), consumer) is enough


def test_candidates_are_powers_of_two_up_to_all_cores() -> None:
    assert [doublings(most) for most in (1, 2, 6, 8)] == [[0, 1], [0, 1, 2], [0, 1, 2, 4, 6], [0, 1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("reads", "brings", "value", "words"),
    [
        (1000, 5000, None, "more than are read"),  # 2 s for a shard: each of 2 workers reads 1000 meanwhile
        (4000, 5000, 4000, "prefetches only 1,000"),
        (4000, 3000, 3000, "slower than reading"),
        (4000, 500, None, "slower than reading"),
    ],
)
def test_a_worker_looks_ahead_as_far_as_it_reads_while_a_shard_comes(
    reads: float, brings: float, value: int | None, words: str
) -> None:
    advice = advise_predownload(
        samples_per_second=reads, readers=2, shard_seconds=2.0, link_samples_per_second=brings, default=1000
    )
    assert advice.value == value
    assert words in advice.why


def test_a_limit_is_wanted_only_where_not_all_data_fits() -> None:
    disk = Disk(room=1000 * MB, data=850 * MB, largest_shard=10 * MB, index=MB)
    assert advise_limit(disk, 2, lambda: 200 * MB).value is None
    disk = Disk(room=1000 * MB, data=950 * MB, largest_shard=10 * MB, index=MB)
    least = advise_limit(disk, 2, lambda: 200 * MB)
    assert 290 * MB < parse_bytes(str(least.value)) < 350 * MB
    assert "this should fetch none twice" in least.why
    advice = advise_limit(disk, 2, lambda: 900 * MB)
    assert advice.value == "900mb"
    assert "`lightning-streaming plan` predicts how often each is fetched; a smaller" in advice.why
    unknown = advise_limit(disk, 2, lambda: None)
    assert (unknown.value, "too long to simulate" in unknown.why) == ("900mb", True)
    small = Disk(room=20 * MB, data=950 * MB, largest_shard=10 * MB, index=MB)
    assert advise_limit(small, 2, lambda: 200 * MB).value is None


def test_numbers_are_rounded_up() -> None:
    assert [round_up(number) for number in (0.2, 7, 99.5, 1234, 1200, 100_001)] == [1, 7, 100, 1300, 1200, 110_000]
    assert [bytes_as_written(size) for size in (1, 1025, 100 * MB - 1, 100 * MB, 100 * MB + 1)] == [
        "1kb",
        "2kb",
        "102400kb",
        "100mb",
        "101mb",
    ]


def test_shards_are_fetched_of_every_stream_in_turn() -> None:
    stored = np.array([5, 5, 0, 5, 5, 5, 20])
    streams = np.array([0, 0, 1, 2, 2, 2, 3])
    assert shards_to_fetch(stored, streams, 1000) == [0, 3, 6, 1, 4, 5]
    assert shards_to_fetch(stored, streams, 36) == [0, 3, 6, 1]
    assert shards_to_fetch(stored, streams, 1) == [0, 3, 6]


def test_the_first_shard_does_not_count_where_others_came_beside_each_other() -> None:
    stored = np.array([100, 100, 100])
    first = Arrival(shard=2, began=0, ended=5)
    others = [Arrival(shard=0, began=5, ended=7), Arrival(shard=1, began=5, ended=6)]
    assert link_of([first], stored).bytes_per_second == 20
    link = link_of([first, *others], stored)
    assert (link.shards, link.stored_bytes) == ([0, 1, 2], 300)
    assert (link.alone, link.each, link.bytes_per_second) == (5, 1.5, 100)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    (tmp_path / "a" / "b").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "membership", "found"),
    [
        ({}, "0::/a/b\n", []),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, "0::/a/b\n", [3]),
        ({"cpu.max": "1000 100000\n"}, "0::/\n", [1]),
        ({"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/a\n", [2]),
        ({"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/a\n", []),
        ({"a/cpu.max": "200000 100000\n"}, "2:cpuset:/a\n", []),
    ],
)
def test_quotas_of_control_groups_and_those_around_them_count(
    groups: Path, files: dict[str, str], membership: str, found: list[int]
) -> None:
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    (groups / "membership").write_text(membership)
    assert list(quotas(groups, groups / "membership")) == found
    assert not list(quotas(groups / "none", groups / "none"))


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[StreamingDataLoader]:
    with MDSWriter(out=tmp_path / "data", columns={"id": "int"}, size_limit=220) as writer:  # 4 samples a shard
        for number in range(48):
            writer.write({"id": number})
    world = World(num_nodes=2, ranks_per_node=2)
    made = StreamingDataLoader(
        StreamingDataset(remote=str(tmp_path / "data"), shuffle=True, shuffle_block_size=16, world=world), batch_size=2
    )
    yield made
    made.close()


def test_what_is_open_on_a_node_is_what_its_ranks_have_begun_and_not_finished(loader: StreamingDataLoader) -> None:
    dataset = loader.dataset
    weights = np.arange(1, dataset.num_shards + 1)
    of_batches: list[set[int]] = [set() for _ in range(6)]
    for rank in range(2):
        mine = StreamingDataset(**_settings(dataset), world=World(num_nodes=2, ranks_per_node=2, rank=rank))
        for number, batch in enumerate(StreamingDataLoader(mine, batch_size=2)):
            of_batches[number] |= {source_of(dataset).catalog.place(one).shard for one in batch["id"].tolist()}
        mine.close()
    used = set().union(*of_batches)
    span = {shard: [number for number, shards in enumerate(of_batches) if shard in shards] for shard in used}
    at_once = [sum(shard + 1 for shard in used if span[shard][0] <= now <= span[shard][-1]) for now in range(6)]
    assert max_open_bytes(loader, weights) == max(at_once)


def _settings(dataset: StreamingDataset) -> dict[str, Any]:
    return {"streams": dataset.streams, "shuffle": True, "shuffle_block_size": 16}
