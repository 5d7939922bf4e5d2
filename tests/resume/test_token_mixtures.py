"""Runs whose weights count tokens: shares of the tokens, the same on any machines, exact at every resume, compared."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.errors import ConfigError, StateMismatchError
from lightning_streaming.reading.dataset import run_state_of
from tests.helpers import assert_error, json_copy, worlds
from tests.tiers import some

SPEC = {"books": (60, 400), "code": (500, 60), "web": (900, 30)}
"""Documents of each stream, and their mean length."""
FIRST = {name: 10_000 * number for number, name in enumerate(SPEC)}
MIX = {"books": 0.2, "code": 0.3, "web": 0.5}
IN_TOKENS = {"weights_in": "tokens", "lengths": "size"}
PACKING = {"column": "tokens", "capacity": 128, "window": 64}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The streams, in a directory each; a token is the document's id."""
    root = tmp_path_factory.mktemp("documents")
    for name, (documents, mean) in SPEC.items():
        lengths = np.random.default_rng(documents).gamma(2, mean / 2, documents).astype(int) + 1
        columns = {"id": "int", "tokens": "ndarray:int32", "size": "int"}
        with MDSWriter(out=str(root / name), columns=columns, size_limit=20_000) as writer:
            for number, length in enumerate(lengths.tolist(), FIRST[name]):
                writer.write({"id": number, "tokens": np.full(length, number, np.int32), "size": length})
    return root


def loader(
    root: Path, *, batch_size: int = 4, workers: int = 0, proportions: bool = True, packed: bool = True, **how: Any
) -> StreamingDataLoader:
    """A loader over the streams, of whose tokens these are the shares unless there is a schedule."""
    proportions = proportions and "schedule" not in how
    streams = {name: Stream(remote=str(root / name), proportion=MIX[name] if proportions else None) for name in SPEC}
    settings: dict[str, Any] = {"shuffle": True, "num_canonical_nodes": 4, "epoch_size": 40_000, **how}
    settings |= {"packing": PACKING} if packed else {"columns": ["id", "size"]}
    settings.setdefault("mixing", {"weights_in": "tokens"} if packed else IN_TOKENS)
    return StreamingDataLoader(
        StreamingDataset(streams=streams, **settings), batch_size=batch_size, num_workers=workers
    )


def tokens_by_stream(batches: list[Any]) -> dict[str, int]:
    """The tokens of some batches by stream."""
    if "input_ids" in batches[0]:
        of = np.concatenate([batch["input_ids"][batch["document_ids"] >= 0].numpy() for batch in batches])
        sizes = np.ones(len(of), int)
    else:
        of, sizes = (np.concatenate([batch[name].numpy() for batch in batches]) for name in ("id", "size"))
    counts = np.bincount(of // 10_000, sizes, len(SPEC)).astype(int).tolist()
    return dict(zip(SPEC, counts, strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_tokens_have_the_weights_as_shares_anywhere(root: Path, packed: bool) -> None:
    batches = list(loader(root, packed=packed))
    of = tokens_by_stream(batches)
    total = sum(of.values())
    assert total == pytest.approx(40_000, abs=500)
    for name, share in MIX.items():
        assert of[name] / total == pytest.approx(share, abs=0.01)
    half = tokens_by_stream(batches[: len(batches) // 2])
    for name, share in MIX.items():
        assert half[name] / sum(half.values()) == pytest.approx(share, abs=0.06)  # of ten books


SCHEDULE = {
    "broad": {"end": "50%", "mix": MIX},
    "ramp": {"end": 32_000, "mix": {"books": [0.2, 0.6], "web": [0.8, 0.4]}, "steps": 3},
    "anneal": {"mix": {"books": 0.5, "code": 0.5}, "max_repeats": {"books": 1.5}},
}


@pytest.mark.parametrize("packed", [True, False])
def test_phases_end_at_their_tokens(root: Path, packed: bool) -> None:
    run = loader(root, packed=packed, schedule=SCHEDULE, batch_size=1)
    order = run_state_of(run.dataset).on(World()).order
    batches = list(run)
    assert order.plan is not None
    geometry = run_state_of(run.dataset).on(World())._geometry()
    stops = order.phase_stops(geometry, 0).tolist()
    assert stops[-1] == len(batches)
    begin, before = 0, 0
    for stop, end, mix in zip(stops, (20_000, 32_000, 40_000), (MIX, {"books": 0.4, "web": 0.6}, None), strict=True):
        of = tokens_by_stream(batches[begin:stop])
        assert before + sum(of.values()) == pytest.approx(end, abs=1200)
        for name, share in (mix or {"books": 0.5, "code": 0.5}).items():
            assert of[name] / sum(of.values()) == pytest.approx(share, abs=0.05)
        begin, before = stop, before + sum(of.values())


def read(run: StreamingDataLoader, steps: int | None = None) -> list[int]:
    """The first token of each document or pack, in order."""
    rows = list[int]()
    for number, batch in enumerate(run, 1):
        rows += batch["input_ids"][:, 0].tolist() if "input_ids" in batch else batch["id"].tolist()
        if number == steps:
            break
    return rows


@pytest.mark.parametrize(("packed", "schedule"), [(True, None), (True, SCHEDULE), (False, SCHEDULE)])
def test_a_resume_is_exact_on_other_ranks_workers_and_batch_sizes(
    root: Path, packed: bool, schedule: dict[str, Any] | None
) -> None:
    more: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
    whole = [read(loader(root, packed=packed, batch_size=1, **more))]
    first = loader(root, packed=packed, batch_size=1, **more)
    first.dataset.next_epoch = 1
    whole.append(read(first))
    for steps in some(range(1, len(whole[0]) // 4), 4):
        stopped = loader(root, packed=packed, **more)
        began = read(stopped, steps)
        assert began == whole[0][: 4 * steps]
        state = json_copy(stopped.state_dict())
        alone = loader(root, packed=packed, batch_size=5, workers=2 if steps % 2 else 0, **more)
        alone.load_state_dict(state)
        assert (read(alone), read(alone)) == (whole[0][4 * steps :], whole[1])
        ranks = []
        for world in worlds(2, 1):
            resumed = loader(root, packed=packed, batch_size=3, world=world, **more)
            resumed.load_state_dict(state)
            ranks.append((read(resumed), read(resumed)))
        for epoch, rest in enumerate((whole[0][4 * steps :], whole[1])):
            both = Counter(ranks[0][epoch] + ranks[1][epoch])
            assert not Counter(rest) - both
            assert (both - Counter(rest)).total() <= 1  # ranks are kept even


def test_a_state_says_what_is_counted_and_what_limits_changed(root: Path) -> None:
    mixing = {"weights_in": "tokens", "max_repeats": {"books": 0.5}, "beyond": "redistribute"}
    run = loader(root, mixing=mixing)
    read(run, 2)
    state = json_copy(run.state_dict())
    assert state["fingerprint"]["mixing"] == {"weights_in": "tokens", "max_repeats": {"books": "0.5"}}
    assert set(state["fingerprint"]["schedule"]) == {"proportion"}
    assert state["fingerprint"]["schedule"]["proportion"]["end"] == 40_000
    resumed = loader(root, mixing=mixing)
    resumed.load_state_dict(state)
    read(resumed, 1)
    for other in (
        {"mixing": {**mixing, "max_repeats": {"books": 0.6}}},
        {"mixing": {**mixing, "weights_in": "samples"}},
        {"mixing": {**mixing, "size_exponent": 0.5}},
        {"mixing": None},
    ):
        changed = loader(root, **other)
        changed.load_state_dict(state)
        with pytest.raises(StateMismatchError) as caught:
            len(changed)
        assert "mixing" in str(caught.value) or "schedule" in str(caught.value)


def test_sizes_of_streams_count_with_an_exponent(root: Path) -> None:
    natural = tokens_by_stream(list(loader(root, proportions=False, epoch_size=None)))
    sizes = {name: int(count) for name, count in natural.items()}
    for exponent, factors in ((1.0, MIX), (0.5, dict.fromkeys(MIX, 1.0))):
        proportions = exponent == 1.0
        mixing = {"weights_in": "tokens", "size_exponent": exponent}
        of = tokens_by_stream(list(loader(root, proportions=proportions, mixing=mixing)))
        wanted = {name: factors[name] * sizes[name] ** exponent for name in SPEC}
        for name in SPEC:
            assert of[name] / sum(of.values()) == pytest.approx(wanted[name] / sum(wanted.values()), abs=0.02)


def test_documents_count_as_packing_keeps_them(root: Path) -> None:
    for longer in ("truncate", "drop"):
        packing = {**PACKING, "longer": longer}
        streams = {name: Stream(remote=str(root / name), proportion=MIX[name]) for name in SPEC}
        dataset = StreamingDataset(
            streams=streams,
            packing=packing,
            shuffle=True,
            num_canonical_nodes=4,
            epoch_size=20_000,
            mixing={"weights_in": "tokens"},
        )
        of = tokens_by_stream(list(StreamingDataLoader(dataset, batch_size=4)))
        assert sum(of.values()) == pytest.approx(20_000, abs=500)
        assert of["books"] / sum(of.values()) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"mixing": {"weights_in": "tokens", "lengths": "size"}}, "mixing.lengths"),
        ({"packed": False, "mixing": {"weights_in": "tokens"}}, "mixing.lengths"),
        ({"packed": False, "batching_method": "stratified"}, "batching_method"),
        ({"mixing": {"weights_in": "tokens", "max_repeats": {"x": 2}}}, "mixing.max_repeats"),
        ({"packed": False, "schedule": {"a": {"mix": MIX, "ended_at": 9}, "b": {"mix": MIX}}}, "schedule.a.end"),
    ],
)
def test_options_that_contradict_each_other_are_refused(root: Path, options: dict[str, Any], option: str) -> None:
    with assert_error(ConfigError, option=option):
        loader(root, **options)


def test_a_missing_stream_of_an_earlier_phase_is_named(root: Path) -> None:
    schedule: dict[str, Any] = {"early": {"end": 20_000, "mix": {"code": 1}}, "late": {"mix": {"books": 1, "web": 1}}}
    run = loader(root, schedule=schedule)
    read(run, 200 // 4)
    state = json_copy(run.state_dict())
    streams = {name: Stream(remote=str(root / name)) for name in ("books", "web")}
    options: dict[str, Any] = {"packing": PACKING, "mixing": {"weights_in": "tokens"}, "num_canonical_nodes": 4}
    dataset = StreamingDataset(streams=streams, schedule=schedule, epoch_size=40_000, shuffle=True, **options)
    resumed = StreamingDataLoader(dataset, batch_size=4)
    resumed.load_state_dict(state)
    with assert_error(ConfigError, option="schedule.early.mix", stream="code"):
        len(resumed)


@pytest.mark.parametrize("followed", [False, True])
def test_appended_data_changes_nothing_of_a_pass_that_has_begun(root: Path, tmp_path: Path, followed: bool) -> None:
    copied = Path(shutil.copytree(root, tmp_path / "grown"))
    how: dict[str, Any] = {"schedule": SCHEDULE, "batch_size": 1, "follow_appends": followed}
    whole = read(loader(copied, **how))
    stopped = loader(copied, **how)
    began = read(stopped, len(whole) // 3)
    state = json_copy(stopped.state_dict())
    columns = {"id": "int", "tokens": "ndarray:int32", "size": "int"}
    with MDSWriter(out=str(copied / "web"), columns=columns, size_limit=20_000, mode="append") as writer:
        for number in range(FIRST["web"] + 5_000, FIRST["web"] + 5_200):
            writer.write({"id": number, "tokens": np.full(30, number, np.int32), "size": 30})
    resumed = loader(copied, **how)
    resumed.load_state_dict(state)
    rest = read(resumed)
    # The first pass over "web" continues; only what begins after it may read new documents.
    assert began + (rest if not followed else rest[: len(whole) - len(began)]) == whole or followed
    web = [row for row in began + rest if row >= FIRST["web"]]
    assert all(row < FIRST["web"] + 5_000 for row in web[: len(web) // 2])
    again = loader(copied, **how)
    again.load_state_dict(json_copy(state))
    steps = len(rest) // 2
    assert read(again, steps) == rest[:steps]
    last = loader(copied, **how)
    last.load_state_dict(json_copy(again.state_dict()))
    assert read(last) == rest[steps:]


@pytest.mark.parametrize("mixing", [{}, IN_TOKENS])
def test_an_epoch_that_reads_exactly_what_may_be_read_ends_as_any_other(root: Path, mixing: dict[str, Any]) -> None:
    limited = {**mixing, "size_exponent": 1, "max_repeats": dict.fromkeys(SPEC, 1)}
    run = loader(root, packed=False, proportions=False, epoch_size=None, mixing=limited)
    assert len(run) * 4 == 1460
    assert sorted(read(run)) == sorted(
        document for name, (count, _) in SPEC.items() for document in range(FIRST[name], FIRST[name] + count)
    )
    state = json_copy(run.state_dict())
    with assert_error(ConfigError, option="mixing.max_repeats"):
        read(run)
    resumed = loader(root, packed=False, proportions=False, epoch_size=None, mixing=limited)
    resumed.load_state_dict(state)
    with assert_error(ConfigError, option="mixing.max_repeats"):
        read(resumed)


@pytest.mark.parametrize("mixing", [{}, IN_TOKENS])
@pytest.mark.parametrize("has_schedule", [False, True])
def test_only_ratios_of_weights_count(root: Path, mixing: dict[str, Any], has_schedule: bool) -> None:
    def run(times: float | int) -> StreamingDataLoader:
        streams = {name: Stream(remote=str(root / name)) for name in ("code", "web")}
        more: dict[str, Any] = {"columns": ["id"], "shuffle": True, "num_canonical_nodes": 4, "epoch_size": 1200}
        if has_schedule:
            more["schedule"] = {"all": {"mix": {"code": [3 * times, times], "web": 7 * times}}}
        else:
            for name, weight in (("code", 3 * times), ("web", 7 * times)):
                streams[name] = Stream(remote=str(root / name), proportion=weight)
        return StreamingDataLoader(StreamingDataset(streams=streams, mixing=mixing, **more), batch_size=4)

    whole, stopped = read(run(1)), run(1)
    began = read(stopped, 5)
    state = json_copy(stopped.state_dict())
    for times in (1.0, 0.1, 1 / 7):
        resumed = run(times)
        resumed.load_state_dict(state)
        assert began + read(resumed) == whole
    resumed = run(0.1)
    resumed.load_state_dict(state)
    read(resumed, 1)
    assert resumed.state_dict()["fingerprint"] == state["fingerprint"]
