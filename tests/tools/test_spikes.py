"""``trace --spike``: a value that jumped, its samples, what they share, and a run that leaves them out."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_streaming import MDSWriter, SampleKey, StepLog, Stream, StreamingDataModule, StreamingDataset
from lightning_streaming.sequence.skips import BatchRange, parse_batch_ranges
from lightning_streaming.tools.runs.spikes import (
    FEWEST,
    LONGEST,
    WINDOW,
    Spike,
    find_bounds,
    find_spikes,
    shared_facts,
    skip_ranges,
)
from lightning_streaming.trainer.config import config_of
from tests.packed_data import LENGTHS, packed_train, write_documents
from tests.phased_data import write_config
from tests.tiers import examples
from tests.tools.running import read_index, run

BAD = range(1030, 1040)
"""Ids of the samples whose loss is large."""
SIZES = {"web": 150, "books": 60}


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


class Spiking(LightningModule):
    """The loss is large where a batch has bad samples; remembers what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["id"].tolist())
        noise = math.sin(12.9898 * len(self.seen))  # the same in every run
        loss: torch.Tensor = self.layer.weight.mean() * 0 + 2 + 0.05 * noise + 9 * batch["bad"].float().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def write_data(root: Path) -> dict[str, Any]:
    """Two streams, one of them with bad samples, and the data of a run."""
    for first, (name, samples) in enumerate(SIZES.items()):
        with MDSWriter(out=str(root / name), columns={"id": "int", "bad": "int"}, size_limit=250) as writer:
            for number in range(samples):
                writer.write({"id": 1000 * first + number, "bad": int(1000 * first + number in BAD)})
    return {"streams": {name: {"remote": str(root / name)} for name in SIZES}, "shuffle": True, "shuffle_seed": 5}


def fit(train: dict[str, Any], root: Path, **options: Any) -> Spiking:
    settings: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "default_root_dir": root}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    ckpt_path, log = options.pop("ckpt_path", None), options.pop("log")
    saver = ModelCheckpoint(
        dirpath=root / ("resumed" if ckpt_path else "saved"), filename="{step}", every_n_train_steps=5, save_top_k=-1
    )
    trainer = Trainer(**{**settings, **quiet, **options}, callbacks=[StepLog(log, values=["train_loss"]), saver])
    model = Spiking()
    trainer.fit(model, datamodule=StreamingDataModule(train=config_of(train), batch_size=4), ckpt_path=ckpt_path)
    return model


def spikes_of(config: Path, *args: object) -> dict[str, Any]:
    done = run("trace", "--config", config, "--spike", *args, "--json")
    assert (done.code, done.err) == (0, "")
    report: dict[str, Any] = done.json
    return report


@pytest.mark.rotate(1)
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_resumes_with_the_ranges_leaves_the_samples_of_spikes_out(tmp_path: Path, accumulate: int) -> None:
    train, log = write_data(tmp_path), tmp_path / "log"
    before = fit(train, tmp_path, log=log, accumulate_grad_batches=accumulate)
    callback = {"class_path": "lightning_streaming.StepLog", "init_args": {"dirpath": str(log)}}
    settings: dict[str, Any] = {"devices": 1, "accumulate_grad_batches": accumulate, "callbacks": [callback]}
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 4}, **settings)
    report = spikes_of(config)
    assert report == spikes_of(config, log), "by default the log is that of the configuration"
    bad = [number for number, ids in enumerate(before.seen) if {*ids} & {*BAD}]
    ranges = parse_batch_ranges(report["skip"], "skip")
    skipped = {number for ends in ranges for number in range(ends.first, ends.last + 1)}
    dataset = StreamingDataset(streams={name: Stream(**stream) for name, stream in train["streams"].items()})
    late = [number for number in bad if number >= FEWEST * accumulate]
    assert late
    assert skipped >= set(late)
    assert {number // accumulate for number in skipped} == {number // accumulate for number in late}
    for spike in report["spikes"]:
        first, last = spike["batches"]
        ids = [id_ for number in range(first, last + 1) for id_ in before.seen[number]]
        keys = [SampleKey.from_dict(sample["key"]) for sample in spike["samples"]]
        assert sorted(dataset.restore_sample(key)["id"] for key in keys) == sorted(ids)
        assert {sample["fields"]["bad"] for sample in spike["samples"]} >= {"1"}
        assert spike["samples"][0]["value"] == spike["value"] or accumulate > 1, "the largest is first"
    dataset.close()
    # With these ranges in the configuration, the same log has no others.
    with_skip = write_config(tmp_path / "skip.yaml", {**train, "skip": report["skip"]}, {"batch_size": 4}, **settings)
    assert spikes_of(with_skip)["skip"] == report["skip"]
    # A checkpoint within a spike: what its weights have seen cannot be left out.
    straddling = write_log(tmp_path / "straddling", ((step, [], 9 if 18 <= step < 22 else 2) for step in range(25)))
    within = tmp_path / "saved" / "step=20.ckpt"
    done = run("trace", "--config", config, "--spike", straddling, "--ckpt", within, "--json")
    assert (done.json["spikes"][0]["steps"], done.json["skip"]) == ([18, 21], ["20-21"])
    assert "1 spike began before step 20" in done.err
    # The YAML is what fit takes, and a resume with it reads none of them.
    start = report["spikes"][0]["steps"][0] // 5 * 5
    printed = run("trace", "--config", config, "--spike", "--yaml").out
    skipping = {**train, **yaml.safe_load(printed)["data"]["init_args"]["train"]}
    ckpt = tmp_path / "saved" / f"step={start}.ckpt" if start else None
    after = fit(skipping, tmp_path, log=log, ckpt_path=ckpt, accumulate_grad_batches=accumulate)
    kept = [ids for number, ids in enumerate(before.seen) if number >= start * accumulate and number not in skipped]
    assert after.seen == kept
    # The numbers hold for the run that skips them: nothing is left, and what it skips stays in the ranges.
    again = write_config(tmp_path / "again.yaml", skipping, {"batch_size": 4}, **settings)
    assert [spike for spike in spikes_of(again)["spikes"] if spike["steps"][0] >= start] == []


def test_a_jump_is_far_above_the_steps_before_and_no_number_is_a_jump() -> None:
    rng = np.random.default_rng(1)
    falling = 5 * np.exp(-np.arange(400) / 500) + rng.normal(0, 0.05, 400)
    assert spikes_in(falling) == []
    values = falling.copy()
    values[200:203] += [3, 5, 4]
    values[320:] = math.nan
    (first, second) = spikes_in(values)
    assert (first.first, first.peak, first.last) == (200, 201, 202)
    assert first.bound.expected == pytest.approx(5 * math.exp(-200 / 500), abs=0.05)
    assert values[199] < first.bound.most(6) < values[200]
    assert (second.first, second.peak, second.last) == (320, 320, 320)
    assert [spike.first for spike in spikes_in(values, 1000)] == [320]
    spikes = spikes_in([2.0] * 20 + [math.nan, 50, 60, 2, 70, math.nan, math.nan])
    assert [(spike.first, spike.peak, spike.last) for spike in spikes] == [(20, 20, 22), (24, 25, 25)]
    assert spikes_in([1.0] * 50 + [1.02]) != []
    assert spikes_in([1.0] * 50 + [1.002]) == [], "below 6 times 0.1 %"
    assert spikes_in([1.0] * (FEWEST - 1) + [9]) == [], "too few before it"
    assert [spike.first for spike in spikes_in([math.inf, 1.0])] == [0]
    assert spikes_in([]) == []
    assert [(spike.first, spike.last) for spike in spikes_in([2.0] * 50 + [3.0] * 20 + [2.0] * 50)] == [(50, 69)]
    assert [spike.last for spike in spikes_in([2.0] * 50 + [3.0] * 200)] == [50 + LONGEST - 1]


CURVES: dict[str, Callable[[int], float]] = {
    "slow": lambda step: 2 + 5 * math.exp(-step / 500),
    "fast": lambda step: 2 + 8 * math.exp(-step / 30),
    "power": lambda step: 1 + 9 * (step + 1) ** -0.5,
    "line": lambda step: 10 - 0.025 * min(step, 300),
    "warm up": lambda step: 10.8 - 6 * (1 - math.exp(-((step / 150) ** 2))),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_a_spike_on_a_falling_loss_is_found_and_nothing_else(curve: str, noise: float) -> None:
    rng = np.random.default_rng(7)
    values = np.array([CURVES[curve](step) for step in range(500)]) + rng.normal(0, noise, 500)
    assert spikes_in(values) == []
    values[250] += 0.5 + 20 * noise
    assert [(spike.first, spike.last) for spike in spikes_in(values)] == [(250, 250)]


def spikes_in(values: Any, threshold: float = 6) -> list[Spike]:
    values = list(map(float, values))
    return find_spikes(values, find_bounds(values), threshold)


@settings(max_examples=examples(50))
@given(
    st.lists(st.floats(0, 10) | st.just(math.nan), max_size=3 * WINDOW),
    st.floats(0, 20),
)
def test_jumps_are_those_of_the_rule_step_by_step(values: list[float], threshold: float) -> None:
    bounds, jumps, first, end = find_bounds(values), set[int](), None, 0.0
    for place, value in enumerate(values):
        before = [(at - place, values[at]) for at in range(max(0, place - WINDOW), place) if not math.isnan(values[at])]
        most = math.inf
        if len(before) >= FEWEST:
            places, known = (np.array(column, float) for column in zip(*before, strict=True))
            half = len(known) // 2
            rise = np.median(known[half:]) - np.median(known[:half])
            along = known - places * (rise / (np.mean(places[half:]) - np.mean(places[:half])))
            expected = max(float(np.median(along)), float(np.median(known[-FEWEST:])))
            spread = 1.4826 * float(np.median(np.abs(along - np.median(along))))
            spread = max(spread, 0.001 * float(np.median(known)))
            assert bounds[place] == pytest.approx((expected, spread), rel=1e-9, abs=1e-12)
            most = bounds[place].most(threshold)
        continues = first is not None and value > end and place - first < LONGEST
        if math.isnan(value) or value > most or continues:
            first, end, jumps = (place, most, jumps | {place}) if first is None else (first, end, jumps | {place})
        else:
            first = None
    spikes = find_spikes(values, bounds, threshold)
    in_spikes = {place for spike in spikes for place in range(spike.first, spike.last + 1)}
    lost = 0
    while lost < len(values) and math.isnan(values[-1 - lost]):
        lost += 1
    assert in_spikes - set(range(len(values) - lost, len(values))) == jumps - set(
        range(len(values) - lost, len(values))
    )
    for spike in spikes:
        here = values[spike.first : spike.last + 1]
        assert math.isnan(values[spike.peak]) if any(map(math.isnan, here)) else values[spike.peak] == max(here)


def test_facts_are_shared_beyond_chance_and_not_those_of_the_steps_before() -> None:
    before = [{"stream": "web" if number % 10 else "books", "shard": f"web:{number % 50}"} for number in range(1000)]
    alike = [{"stream": "web", "shard": f"web:{number}"} for number in range(16)]
    assert shared_facts(alike, before) == []
    (stream, shard) = shared_facts([{"stream": "books", "shard": "books:7"}] * 8 + alike[:8], before)
    by_value = {fact.value: fact for fact in (stream, shard)}
    assert by_value["books:7"].lift is None
    assert by_value["books"].lift == pytest.approx(5)


def _range(text: str) -> BatchRange:
    (batches,) = parse_batch_ranges([text], "skip")
    return batches


@pytest.mark.parametrize(
    ("batches", "skipped", "ranges"),
    [
        ([(5, 7)], [], ["5-7"]),
        ([(5, 7), (8, 8), (20, 20)], [], ["5-8", "20"]),
        ([(5, 5)], ["0-1"], ["0-1", "7"]),
        ([(5, 6)], ["6-9"], ["5-10"]),
        ([(100, 100)], ["3", "50-59", "200"], ["3", "50-59", "111", "200"]),
    ],
)
def test_ranges_are_numbered_as_skip_numbers_batches(
    batches: list[tuple[int, int]], skipped: list[str], ranges: list[str]
) -> None:
    passed = [_range(text) for text in skipped]
    assert [str(batches) for batches in skip_ranges(batches, passed, passed)] == ranges
    if not skipped:  # the log is of a run before these ranges were configured
        assert [str(each) for each in skip_ranges(batches, [], [_range(text) for text in ranges])] == ranges


def write_log(
    directory: Path, steps: Iterable[tuple[int, list[Any], float]], run_number: int = 1, rank: int = 0
) -> Path:
    """A log of one rank as StepLog writes it: batch, samples and loss of each step."""
    directory.mkdir(exist_ok=True)
    with (directory / f"rank{rank}.jsonl").open("a") as file:
        for batch, samples, loss in steps:
            head = {"run": run_number, "batch": batch, "step": batch, "loader": "train"}
            for line in (
                {**head, "epoch": 0, "shuffle_seed": 9, "samples": samples},
                {"run": run_number, "taken": batch + 1},
                {"run": run_number, "batch": batch, "values": [("loss", loss)]},
            ):
                file.write(json.dumps(line) + "\n")
    return directory


def test_long_documents_and_a_shard_are_named_where_packs_are_read(tmp_path: Path) -> None:
    train = packed_train(write_documents(tmp_path))
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, devices=1)
    shards = [shard.samples for shard in read_index(tmp_path / "web").shards]
    longest = max(range(shards[0]), key=LENGTHS["web"].__getitem__)
    short = [number for number in range(shards[0]) if LENGTHS["web"][number] < LENGTHS["web"][longest] / 4]
    steps = ((step, [[4 * step + place, "web", 0, short[place], 0] for place in range(4)], 2.0) for step in range(30))
    spike = [(30, [[120, "web", 0, longest, 0], [121, "web", 0, longest, 0]], 9.0)]
    log = write_log(tmp_path / "log", itertools.chain(steps, spike))
    (report,) = spikes_of(config, log)["spikes"]
    power = LENGTHS["web"][longest].bit_length() - 1
    assert [(fact["fact"], fact["value"]) for fact in report["shared"]] == [
        ("length", f"{1 << power:,} to {(2 << power) - 1:,} tokens")
    ]
    assert [sample["key"]["sample_index"] for sample in report["samples"]] == [longest] * 2
    table = run("trace", "--config", config, "--spike", log).out
    assert "step 30: loss 9, expected 2" in table
    assert table.endswith('before step 30 was trained, with train.skip =\n  ["30"]\n\n')
    nothing = ["trace", "--config", config, "--spike", log, "--threshold", 10**6]
    words = "the highest is step 30: loss 9, expected 2, is 3.5e+03 spreads above"
    words += "; a spike is more than 1e+06, see --threshold"
    assert run(*nothing).out == f"{log}: loss of 31 steps, 0 spikes\n{words}\n\n"
    report = run(*nothing, "--json").json
    assert (report["threshold"], report["spikes"], report["highest"]["step"]) == (10**6, [], 30)
    assert report["highest"]["spreads"] == pytest.approx(3500)
    short_log = write_log(tmp_path / "few", ((step, [], 2.0) for step in range(5)))
    assert "no step has 10 finite values before it" in run("trace", "--config", config, "--spike", short_log).out


def test_a_step_has_the_mean_of_its_ranks_and_the_rank_that_jumped_comes_first(tmp_path: Path) -> None:
    train = packed_train(write_documents(tmp_path))
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 1}, devices=2)
    for rank in (0, 1):
        steps = ((step, [[2 * step + rank, "web", 0, rank, 0]], 2 + rank / 10) for step in range(20))
        write_log(
            tmp_path / "log", itertools.chain(steps, [(20, [[40 + rank, "web", 0, rank, 0]], 2 + 4 * rank)]), rank=rank
        )
    (spike,) = spikes_of(config, tmp_path / "log")["spikes"]
    assert (spike["steps"], spike["value"]) == ([20, 20], 4)
    assert spike["expected"] == pytest.approx(2.05)
    assert [(sample["rank"], sample["value"]) for sample in spike["samples"]] == [(1, 6), (0, 2)]
    only = spikes_of(config, tmp_path / "log", "--rank", 0)["spikes"][0]["samples"]
    assert [sample["rank"] for sample in only] == [0]
    # A run that resumed from step 15 has other values from there on.
    for rank in (0, 1):
        write_log(tmp_path / "log", ((step, [], 2.0) for step in range(15, 25)), run_number=2, rank=rank)
    report = spikes_of(config, tmp_path / "log")
    assert (report["steps"], report["spikes"]) == (25, [])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--spike"], "the configuration has no StepLog among trainer.callbacks"),
        (
            ["--spike", "--config", "bare.yaml"],
            "the configuration has no StepLog among trainer.callbacks with a dirpath",
        ),
        (["--spike", "nowhere"], "nowhere has no log of steps of the train loader 'train'"),
        (["--spike", "log", "--value", "grad"], "log has no values of 'grad'; it has loss"),
        (["--step", "0", "--yaml"], "--yaml goes with --spike"),
        (["--spike", "log", "--yaml", "--json"], "--json and --yaml"),
    ],
)
def test_what_has_no_spikes_is_refused(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log", iter([(0, [], 1.0)]))
    config = write_config(tmp_path / "run.yaml", packed_train(write_documents(tmp_path)), {"batch_size": 2}, devices=1)
    bare = {"trainer": {"callbacks": [{"class_path": "lightning_streaming.StepLog"}]}}
    Path("bare.yaml").write_text(yaml.safe_dump(bare))
    refused = run("trace", "--config", config, *args)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err
