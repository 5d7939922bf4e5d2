"""``plan``: what it says of runs, checked by what they read; its conditions; and what it refuses."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.planning import planned_reads, resources
from lightning_streaming.tools.planning.fail_if import NAMES, AtLeast, parse_condition
from lightning_streaming.tools.planning.node import NodeReads, first_requests
from lightning_streaming.tools.planning.resources import first_batch
from lightning_streaming.tools.planning.show_plan import facts_of
from lightning_streaming.tools.stored.summary import ShardBytes
from lightning_streaming.trainer.config import config_of
from lightning_streaming.units import format_bytes
from tests.helpers import raises
from tests.packed_data import packed_train, write_documents
from tests.phased_data import FIRST_ID, PHASES, SIZES, phased_train, write_config, write_streams
from tests.schedules import schedule
from tests.tiers import examples
from tests.tools.running import Outcome, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_documents(root / "documents")
    return write_streams(root)


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "caches"))
    monkeypatch.setenv("COLUMNS", "120")


def plan(path: Path, train: dict[str, Any], *args: object, **trainer: Any) -> Outcome:
    batch = {"batch_size": trainer.pop("batch_size", 2)}
    return run("plan", "--config", write_config(path / "run.yaml", train, batch, **trainer), *args)


def reads(train: dict[str, Any], epochs: int, ranks: int, batch_size: int, *, drop_last: bool = False) -> list[int]:
    """The ids that all ranks read."""
    config = config_of(train)
    assert config is not None
    found = list[int]()
    for rank in range(ranks):
        world = World(ranks_per_node=ranks, rank=rank)
        arguments = config.dataset_arguments(shuffle_by_default=True)
        dataset = StreamingDataset(**arguments, batch_size=batch_size, world=world)
        loader = StreamingDataLoader(dataset, drop_last=drop_last)
        found += [int(one) for _ in range(epochs) for batch in loader for one in batch["id"]]
        loader.close()
    return found


def by_stream(ids: list[int]) -> dict[str, list[int]]:
    return {name: [one for one in ids if first <= one < first + 1000] for name, first in FIRST_ID.items()}


def limit_of(data: Path, shards: int) -> int:
    """A limit of a cache that has room for so many bytes of shards."""
    return shards + sum((data / name / "index.json").stat().st_size for name in SIZES)


STREAM_WEIGHTS = st.fixed_dictionaries({name: st.integers(1, 5) for name in SIZES})


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([None, 30, 77, 240]),
    STREAM_WEIGHTS,
    st.sampled_from(["py1e", "blockwise", "py1s", "naive"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_samples_and_repeats_are_those_that_are_read(
    data: Path,
    tmp_path: Path,
    epoch_size: int | None,
    weights: dict[str, int],
    algo: str,
    epochs: int,
    ranks: int,
    batch_size: int,
    drop_last: bool,
) -> None:
    streams = {name: {"remote": str(data / name), "proportion": weights[name]} for name in SIZES}
    train = {"streams": streams, "shuffle_algo": algo, "num_canonical_nodes": 2, "epoch_size": epoch_size}
    config = write_config(
        tmp_path / "run.yaml",
        train,
        {"batch_size": batch_size, "drop_last": drop_last},
        max_epochs=epochs,
        devices=ranks,
    )
    told = run("plan", "--config", config, "--json").json
    really = by_stream(reads(train, epochs, ranks, batch_size, drop_last=drop_last))
    for one in told["streams"]:
        ids = really[one["stream"]]
        assert one["samples"] == len(ids)
        assert one["repeats"] == max(Counter(ids).values(), default=0)
        assert one["passes"] == pytest.approx(len(ids) / SIZES[one["stream"]])
        assert (one["first_repeat"] is None) == (one["repeats"] < 2)
    assert sum(one["share"] for one in told["streams"]) == pytest.approx(1)


def test_phases_read_what_is_told_of_each(data: Path, tmp_path: Path) -> None:
    train = phased_train(data)
    told = plan(tmp_path, train, "--json", max_epochs=1, batch_size=1).json
    inspected = run("inspect", "--config", tmp_path / "run.yaml", "--json").json["stages"][0]["schedule"]
    for one, other in zip(told["schedule"], inspected, strict=True):
        assert one["phase"] == other["phase"]
        drawn = {stream["stream"]: stream["drawn"] for stream in other["streams"] if stream["drawn"]}
        assert {stream["stream"]: stream["samples"] for stream in one["streams"]} == drawn
    assert [one["phase"] for one in told["over_time"]["schedule"]] == [phase["name"] for phase in PHASES]
    assert [one["step"] for one in told["over_time"]["schedule"]] == [0, 52, 84]


@pytest.mark.nightly
def test_of_long_runs_a_part_is_looked_at_and_said_to_be(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan(tmp_path, phased_train(data), "--json", max_epochs=40).json
    monkeypatch.setattr(planned_reads, "MOST_SAMPLES", 1200)
    part = plan(tmp_path, phased_train(data), "--json", max_epochs=40).json
    assert any("epochs were counted" in note for note in part["notes"])
    for one, other in zip(part["streams"], whole["streams"], strict=True):
        assert one["samples"] == pytest.approx(other["samples"], rel=0.02)
        assert not one["is_exact"]
        assert one["repeats"] <= other["repeats"]
    assert part["run"]["steps"] == whole["run"]["steps"]
    assert part["run"]["epochs"] == whole["run"]["epochs"] == 40


@pytest.mark.nightly
def test_of_a_long_epoch_a_part_is_looked_at(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"streams": {name: {"remote": str(data / name), "proportion": 1} for name in SIZES}, "epoch_size": 120_000}
    whole = plan(tmp_path, train, "--json", max_epochs=1).json
    monkeypatch.setattr(planned_reads, "MOST_SAMPLES", 20_000)
    part = plan(tmp_path, train, "--json", max_epochs=1).json
    assert any("of the samples were counted" in note for note in part["notes"])
    for one, other in zip(part["streams"], whole["streams"], strict=True):
        assert one["samples"] == pytest.approx(other["samples"], rel=0.05)


def test_simulations_that_are_too_long_are_cut_short_and_said_to_be(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = {name: {"remote": str(data / name), "local": str(tmp_path / name)} for name in SIZES}
    train = {"streams": streams, "cache_limit": limit_of(data, 3000)}
    whole = plan(tmp_path, train, "--json", max_epochs=3, batch_size=1).json["caches"][0]
    monkeypatch.setattr("lightning_streaming.tools.planning.plan_run.MOST_SAMPLES", 60)
    monkeypatch.setattr(resources, "MOST_SAMPLES", 60)
    cut = plan(tmp_path, train, "--json", max_epochs=3, batch_size=1).json
    assert whole["simulated"] == 1
    assert 0 < cut["caches"][0]["simulated"] < 1
    assert any("were simulated" in note for note in cut["notes"])
    assert whole["bytes"] / 2 < cut["caches"][0]["bytes"] < 2 * whole["bytes"]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("shards", [2000, 3000])
def test_what_is_fetched_again_is_told_with_and_without_a_limit_to_compare_it_with(
    data: Path, tmp_path: Path, shards: int
) -> None:
    streams = {name: {"remote": str(data / name), "local": str(tmp_path / name)} for name in SIZES}
    train = {"streams": streams, "cache_limit": limit_of(data, shards)}
    small = f"{limit_of(data, shards + 200)}b"
    alone, beside = (
        plan(tmp_path, train, "--json", "--limit", small, *more, max_epochs=3).json["caches"]
        for more in ((), ("--limit", "none"))
    )
    assert beside[2]["refetched"] == 1
    assert alone[0]["refetched"] == pytest.approx(beside[0]["bytes"] / beside[2]["bytes"])
    assert [one["refetched"] for one in alone] == [one["refetched"] for one in beside[:2]]
    assert min(one["refetched"] for one in alone) > 1.5


def test_what_no_limit_removes_is_fetched_once_however_many_epochs_follow(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_reads, "_MOST_EPOCHS", 1)
    streams = {name: {"remote": str(data / name), "local": str(tmp_path / name)} for name in SIZES}
    told = plan(tmp_path, {"streams": streams}, "--json", "--limit", "none", max_epochs=9).json
    once = plan(tmp_path, {"streams": streams}, "--json", "--limit", "none", max_epochs=1).json
    assert told["run"]["epochs"] == 9
    assert told["caches"][0] == once["caches"][0]
    assert [one["bytes"] for one in told["streams"]] == [one["bytes"] for one in once["streams"]]
    assert told["over_time"]["caches"][0]["fetched"][-1] == told["caches"][0]["bytes"]


@pytest.mark.nightly
def test_steps_and_epochs_asked_for_go_before_the_trainer(data: Path, tmp_path: Path) -> None:
    train = phased_train(data)
    assert plan(tmp_path, train, "--json", "--epochs", 2, max_epochs=9).json["run"]["epochs"] == 2
    told = plan(tmp_path, train, "--json", "--steps", 7, max_epochs=9).json
    assert told["run"]["steps"] == 7
    assert sum(one["samples"] for one in told["streams"]) == 14
    said = plan(tmp_path, train)
    assert "one epoch is planned" in said.err
    assert said.code == 0


def test_packs_tell_tokens_and_fill(data: Path, tmp_path: Path) -> None:
    told = plan(tmp_path, packed_train(data / "documents"), "--json", max_epochs=1).json
    counted = run("inspect", "--config", tmp_path / "run.yaml", "--json").json["stages"][0]["packs"]
    assert sum(one["tokens"] for one in told["streams"]) == counted["tokens"]
    assert told["packs"]["fill"] == pytest.approx(counted["fill"], rel=0.02)  # ranks are made even
    assert sum(told["packs"]["histogram"]) >= counted["packs"]
    assert told["run"]["unit"] == "pack"


WEIGHTS_IN_TOKENS: dict[str, Any] = {
    "streams": {name: {"proportion": share} for name, share in (("books", 0.6), ("web", 0.4))},
    "mixing": {"weights_in": "tokens"},
    "epoch_size": 3000,
}


def with_weights(data: Path, changes: dict[str, Any]) -> dict[str, Any]:
    train = packed_train(data / "documents")
    streams = {name: {**stream, **changes["streams"][name]} for name, stream in train["streams"].items()}
    return {**train, **changes, "streams": streams}


def test_shares_are_in_what_weights_count(data: Path, tmp_path: Path) -> None:
    train = with_weights(data, WEIGHTS_IN_TOKENS)
    conditions = ("share(books) < 0.58", "share(books) > 62%", "token_share(web) < 0.38", "token_share < 1")
    flags = [flag for condition in conditions for flag in ("--fail-if", condition)]
    report = plan(tmp_path, train, "--json", *flags, max_epochs=1).json
    assert (report["run"]["weights_in"], report["failed"]) == ("tokens", [])
    tokens = {stream["stream"]: stream["tokens"] for stream in report["streams"]}
    samples = {stream["stream"]: stream["samples"] for stream in report["streams"]}
    for streams in (report["streams"], report["schedule"][0]["streams"]):
        for stream in streams:
            name = stream["stream"]
            assert stream["share"] == stream["token_share"] == tokens[name] / sum(tokens.values())
            assert stream["sample_share"] == samples[name] / sum(samples.values())
            assert stream["share"] == pytest.approx(WEIGHTS_IN_TOKENS["streams"][name]["proportion"], abs=0.02)
    assert abs(samples["books"] / sum(samples.values()) - 0.6) > 0.04, "shares of documents are others"
    assert {name: counts[-1] for name, counts in report["over_time"]["tokens"].items()} == tokens
    shown = run("plan", "--config", tmp_path / "run.yaml", "--html", tmp_path / "plan.html").out
    of_phases = shown.partition("phases; weights count tokens")[2]
    rows = [line.split() for line in of_phases.splitlines() if line.strip()]
    assert rows[2][:3] == ["proportion", "books", "60.0%"]
    for words in ("documents", "of tokens"):
        assert words in of_phases
    assert "share of tokens" in (tmp_path / "plan.html").read_text()


def test_documents_and_tokens_are_shown_where_weights_count_documents(data: Path, tmp_path: Path) -> None:
    train = with_weights(data, {"streams": WEIGHTS_IN_TOKENS["streams"]})
    report = plan(tmp_path, train, "--json", max_epochs=1).json
    assert report["run"]["weights_in"] == "documents"
    for stream in report["streams"]:
        assert stream["share"] == stream["sample_share"] == pytest.approx(stream["weight"], abs=0.02)
        assert abs(stream["token_share"] - stream["share"]) > 0.05
    shown = " ".join(run("plan", "--config", tmp_path / "run.yaml").out.split())
    assert "streams; weights count documents" in shown
    for words in ("60.0%", "of documents", "of tokens"):
        assert words in shown


def test_the_tables_say_it_all(data: Path, tmp_path: Path) -> None:
    streams = {name: {"remote": str(data / name), "local": str(tmp_path / name)} for name in SIZES}
    train = {**phased_train(data), "streams": streams, "cache_limit": limit_of(data, 3000)}
    shown = plan(tmp_path, train, "--limit", "none", max_epochs=1, devices=2, num_nodes=2)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("plan: 2 nodes of 2 ranks, 0 workers each, batches of 2 samples\n")
    for head in ("streams", "phases", "caches, empty at first", "first batch", "mixing", "memory"):
        assert head in shown.out
    assert f"{format_bytes(limit_of(data, 3000))} (configured)" in shown.out


@pytest.mark.nightly
def test_data_that_is_read_in_place_fetches_nothing(data: Path, tmp_path: Path) -> None:
    told = plan(tmp_path, phased_train(data), "--json", max_epochs=1).json
    assert [(one["bytes"], one["peak"]) for one in told["caches"]] == [(0, 0)]
    limited = {**phased_train(data), "cache_limit": "1mb"}
    for train in (
        phased_train(data),
        limited,
        {**limited, "selection": {"where": "id >= 0"}},
    ):  # whose selections caches do hold
        shown = plan(tmp_path, train, max_epochs=1).out
        assert "caches" not in shown
        assert re.search(r"^ fetches +nothing: the data is read in place$", shown, re.MULTILINE)


@pytest.mark.parametrize(("mixing", "told"), [(0.8684, "0.868, where 1 is as drawn at random"), (None, None)])
def test_mixing_is_told_beside_what_chance_gives(
    data: Path, tmp_path: Path, mixing: float | None, told: str | None
) -> None:
    report = plan(tmp_path, phased_train(data), "--json", max_epochs=1).json
    assert dict(facts_of({**report, "mixing": mixing})).get("mixing") == told
    above = dict(facts_of({**report, "mixing": 1.0962}))["mixing"]
    assert above == "1.096, where 1 is as drawn at random, and above it more even than that"


# --- conditions ---


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("repeats(math) > 1", True),
        ("repeats(math) > 4", False),
        ("repeats( 'math' )>1", True),
        ("repeats > 1", True),
        ("passes(code) >= 1", False),
        ("samples == 120", True),
        ("samples(math) < 0.1k", True),
        ("share(web) > 60%", False),
        ("share(web) > 0.3", True),
        ("bytes > 0", False),
        ("bytes <= 2TB", True),
        ("cache_peak > 1kb", False),
        ("first_repeat(code) == inf", True),
        ("first_repeat != inf", True),
        ("epochs != 1", False),
        ("steps > 59", True),
        ("first_batch_seconds > 1000", False),
        ("mixing < 30%", False),
        ("memory > 1 tb", False),
    ],
)  # fmt: skip
def test_a_condition_that_holds_is_exit_code_1(data: Path, tmp_path: Path, condition: str, holds: bool) -> None:
    done = plan(tmp_path, phased_train(data), "--fail-if", condition, max_epochs=1)
    assert done.code == int(holds)
    assert (f"--fail-if: {condition} holds" in done.err) == holds
    assert "streams" in done.out


def test_conditions_are_reported_to_programs(data: Path, tmp_path: Path) -> None:
    args = ("--fail-if", "samples > 1", "--fail-if", "samples > 1b", "--json")
    done = plan(tmp_path, phased_train(data), *args, max_epochs=1)
    assert (done.code, done.json["failed"]) == (1, ["samples > 1"])


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("repeats(math)", ["a name, one of <=", "names are samples, tokens"]),
        ("nonsense > 3", ["there is no 'nonsense'", "repeats"]),
        ("__import__('os').system('true') > 0", ["there is no '__import__'"]),
        ("4 < repeats", ["takes conditions like"]),
        ("cache_peak(web) > 3", ["is not a number of each stream"]),
        ("bytes > 3 apples", ["b, kb, mb"]),
        ("repeats > many", ["k, m, b, t"]),
        ("tokens(web) > 3", ["tokens is not known of this run"]),
        ("fill < 90%", ["fill is not known of this run"]),
        ("repeats(nowhere) > 3", ["there is no stream 'nowhere'", "'code', 'math', 'web'"]),
    ],
)
def test_a_condition_that_makes_no_sense_is_told(data: Path, tmp_path: Path, condition: str, words: list[str]) -> None:
    done = plan(tmp_path, phased_train(data), "--fail-if", condition, max_epochs=1)
    assert done.code == 2
    for word in words:
        assert word in done.err


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        condition = parse_condition(text)
    except ConfigError:
        return
    assert condition.name in NAMES
    assert math.isfinite(condition.number) or "inf" in text


@given(st.sampled_from(sorted(NAMES)), st.text(min_size=1, max_size=20), st.integers(0, 10**9))
def test_a_condition_of_any_stream_is_understood(name: str, stream: str, number: int) -> None:
    if not NAMES[name].of_stream:
        with raises(ConfigError, "not a number of each stream"):
            parse_condition(f"{name}({stream}) > {number}")
        return
    stripped = stream.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return
    found = parse_condition(f"{name}({stream}) > {number}")
    assert (found.stream, found.number) == (stripped, number)


@pytest.mark.parametrize(
    ("condition", "least", "holds"),
    [
        ("bytes > 5kb", 6000, True),
        ("bytes > 7kb", 6000, None),
        ("bytes <= 5kb", 6000, False),
        ("bytes < 7kb", 6000, None),
        ("repeats == 4", 5, False),
        ("repeats == 6", 5, None),
        ("repeats != 4", 5, True),
        ("repeats >= 5", 5, True),
        ("repeats > 5", 5, None),
        ("repeats == 5", 5, None),
    ],
)
def test_of_a_number_of_which_the_least_is_known_only_what_follows_is_said(
    condition: str, least: float, holds: bool | None
) -> None:
    parsed = parse_condition(condition)
    if holds is None:
        with raises(ConfigError, r"or more, which does not say whether that holds"):
            parsed.holds({parsed.name: AtLeast(least)})
    else:
        assert parsed.holds({parsed.name: AtLeast(least)}) is holds


@pytest.mark.nightly
def test_conditions_on_what_was_looked_at_in_part(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_reads, "_MOST_EPOCHS", 3)
    train = phased_train(data)
    whole = plan(tmp_path, train, "--epochs", 3, "--json", max_epochs=40).json
    most = max(one["repeats"] for one in whole["streams"])
    assert plan(tmp_path, train, "--fail-if", f"repeats > {most - 1}", max_epochs=40).code == 1
    unknown = plan(tmp_path, train, "--fail-if", "repeats > 10k", "--fail-if", "samples > 1", max_epochs=40)
    assert unknown.code == 2
    assert "streams" in unknown.out  # what is known is shown all the same
    assert "repeats is known to be" in unknown.err
    assert "samples > 1 holds" in unknown.err


def test_tokens_of_a_stream_that_is_not_read_are_none(tmp_path: Path) -> None:
    for name in ("web", "code"):
        with MDSWriter(out=str(tmp_path / name), columns={"tokens": "ndarray:uint16:4"}) as writer:
            for number in range(40):
                writer.write({"tokens": np.full(4, number, np.uint16)})
    streams = {name: {"remote": str(tmp_path / name)} for name in ("web", "code")}
    phases = [{"name": "all", "end": 40, "mix": {"web": 1}}, {"name": "rest", "mix": {"code": 1}}]
    train = {"streams": streams, "schedule": schedule(phases), "epoch_size": 80}
    done = plan(tmp_path, train, "--fail-if", "tokens > 70", "--fail-if", "tokens(code) > 0", "--steps", 10, "--json")
    assert [one["tokens"] for one in done.json["streams"]] == [80, 0]
    assert (done.code, done.json["failed"]) == (1, ["tokens > 70"])


def test_help_names_all_conditions() -> None:
    told = run("plan", "--help").out
    assert all(name in told for name in NAMES)


# --- the first batch ---


def node_reads(data: Path, *, batch_size: int = 2, num_workers: int = 1) -> tuple[StreamingDataset, NodeReads]:
    from lightning_streaming.reading.dataset import run_state_of, source_of
    from lightning_streaming.resume.run_state import drawn_sequence
    from lightning_streaming.resume.state import Cursor

    dataset = StreamingDataset(remote=str(data / "web"), shuffle=True, batch_size=batch_size, world=World())
    order = run_state_of(dataset).on(World(), batch_size, False)
    read = order.epoch(order.normalise(Cursor(0, 0)))
    catalog = source_of(dataset).catalog
    return dataset, NodeReads(
        catalog=catalog,
        sequence=drawn_sequence(read),
        partition=read.partition,
        node=0,
        num_workers=num_workers,
        num_batches=read.partition.num_batches(),
    )


def test_the_first_batch_waits_for_its_shards_and_for_those_beside_them(data: Path) -> None:
    dataset, reads_of = node_reads(data)
    sizes = ShardBytes.plain(np.full(reads_of.num_shards, 1000))
    slow, fast = (first_batch(reads_of, sizes, speed, 0.25, 500, order_seconds=2) for speed in (1000, 1e12))
    assert fast["order_seconds"] == slow["order_seconds"] == 2
    assert fast["index_seconds"] == pytest.approx(0.5)
    assert slow["index_seconds"] == pytest.approx(1)
    assert fast["shard_seconds"] == pytest.approx(0.25)  # four at a time, of which the first batch needs two at most
    assert slow["shard_seconds"] >= slow["shard_bytes"] / 1000
    assert slow["shard_seconds"] <= 0.25 + slow["ahead_bytes"] / 1000
    assert slow["seconds"] == slow["index_seconds"] + slow["order_seconds"] + slow["shard_seconds"]
    dataset.close()


def test_all_shards_are_asked_for_once_and_before_they_are_read(data: Path) -> None:
    dataset, reads_of = node_reads(data, num_workers=3)
    asked = first_requests(reads_of)
    assert asked.shards.tolist() == list(range(reads_of.num_shards))
    assert set(reads_of.first_shards()[0]) <= set(asked.shards[asked.steps == 0].tolist())
    assert asked.steps.max() < reads_of.num_batches
    dataset.close()
