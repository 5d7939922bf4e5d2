"""A mixture that changes, killed twice, on other machines each time, with another future: exact to the sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import MDSWriter
from tests.schedules import schedule
from tests.trainer.phased_run import PhasedRun, flat

SIZES = {"web": 400, "code": 200, "math": 60}
STREAMS: dict[str, dict[str, Any]] = {
    "web": {"selection": {"where": "score >= 0.25"}},
    "code": {"selection": {"fraction": ":80%", "group_by": "doc"}},
    "math": {},
}
BEGUN = [
    {"name": "broad", "end": 200, "mix": {"web": 0.9, "code": 0.1}},
    {"name": "ramp", "end": 420, "steps": 4, "mix": {"web": [0.9, 0.5], "code": [0.1, 0.5]}},
]
THEN = [*BEGUN, {"name": "end", "end": 600, "mix": {"web": 1, "code": 1}}]
NOW = [
    *BEGUN,
    {"name": "more", "end": 500, "mix": {"web": [0.5, 0.3], "code": [0.5, 0.4], "math": [0, 0.3]}, "steps": 3},
    {"name": "anneal", "end": 660, "mix": {"math": 0.6, "code": 0.4}, "max_repeats": {"math": 2.5}},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    columns = {"id": "int", "score": "float32", "doc": "int"}
    for number, (name, samples) in enumerate(SIZES.items()):
        with MDSWriter(out=tmp_path / name, columns=columns, size_limit=1000) as writer:
            for index in range(samples):
                writer.write({"id": 1000 * number + index, "score": index % 100 / 100, "doc": index // 8})
    return tmp_path


def train_of(data: Path, phases: list[dict[str, Any]]) -> dict[str, Any]:
    read = {name for phase in phases for name in phase["mix"]}
    streams = {name: {"remote": str(data / name), **STREAMS[name]} for name in STREAMS if name in read}
    return {"streams": streams, "schedule": schedule(phases), "num_canonical_nodes": 4, "shuffle_seed": 3}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_changing_mixture_killed_twice_and_changed_goes_on_exactly(data: Path) -> None:
    then, now = train_of(data, THEN), train_of(data, NOW)

    first = PhasedRun(directory=str(data / "first"), train=then, batch_size=8, workers=1, pause_after=38)
    first.run_and_kill()
    in_ramp = first.newest_checkpoint()
    second = PhasedRun(
        directory=str(data / "second"),
        train=now,
        batch_size=6,
        devices=2,
        ckpt_path=str(in_ramp),
        pause_after=35 + 19,
    )
    second.run_and_kill()
    in_more = second.newest_checkpoint()
    last = PhasedRun(directory=str(data / "last"), train=now, batch_size=5, ckpt_path=str(in_more))
    last.run_to_end()

    parts = [first.read_up_to(in_ramp), second.read_up_to(in_more), last.read_by()]
    past, *_, final = map(flat, parts)
    whole: list[list[tuple[int, int, int]]] = []
    for phases in (then, now):
        uninterrupted = PhasedRun(directory=str(data / f"whole {len(whole)}"), train=phases, batch_size=8)
        uninterrupted.fit()
        whole.append(flat(uninterrupted.read_by()))
    assert (len(past), len(flat(parts[1])), len(final)) == (280, 180, 200)
    assert [len(step) for part in parts for step in part] == 35 * [8] + 15 * [12] + 40 * [5]
    in_order = flat([step for part in parts for step in part])
    assert in_order[:280] == whole[0][:280]
    assert in_order == whole[1]
    assert whole[0][420:] != whole[1][420:600]

    ids = [sample for _, _, sample in in_order]
    assert [position for _, position, _ in in_order] == list(range(660))
    assert all(sample % 100 >= 25 for sample in ids if sample < 1000)
    assert Counter(sample // 1000 for sample in ids[500:]) == {1: 64, 2: 96}
    repeats = Counter(ids)
    for number, name in enumerate(SIZES):  # each comes again only when its whole stream has been read
        times = {repeats[sample] for sample in repeats if sample // 1000 == number}
        assert max(times) - min(times) <= 1, name
