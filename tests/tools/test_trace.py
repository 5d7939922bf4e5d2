from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import (
    KeyedBatch,
    MDSWriter,
    SampleKey,
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    World,
)
from lightning_streaming.tools.runs.trace_run import reads_of_key, reads_of_sample, reads_of_step
from lightning_streaming.tools.runs.training_run import TracedRun, run_on
from tests.phased_data import PHASES, phased_train, write_streams
from tests.tiers import examples
from tests.tools.running import run

SIZES = {"web": 37, "books": 12}
ORDERS: list[dict[str, Any]] = [
    {"shuffle": True},
    {"shuffle": True, "shuffle_algo": "blockwise", "shuffle_block_size": 8, "num_canonical_nodes": 4},
    {"shuffle": True, "batching_method": "stratified", "proportion": {"web": 2, "books": 1}},
    {"shuffle": True, "epoch_size": 40, "proportion": {"web": 1, "books": 3}},
    {"shuffle": False},
    {"shuffle": True, "skip": ["2-3", "9"]},
    {
        "shuffle": True,
        "epoch_size": 61,
        "schedule": {
            "early": {"end": 20, "mix": {"web": 3, "books": 1}},
            "late": {"mix": {"web": [1, 0], "books": [0, 1]}, "steps": 3},
        },
    },
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, samples in SIZES.items():
        with MDSWriter(out=root / name, columns={"id": "int", "text": "str"}, size_limit=400) as writer:
            for number in range(samples):
                writer.write({"id": number, "text": f"{name} {number}"})
    return root


def train(data: Path, order: dict[str, Any], seed: int = 7) -> dict[str, Any]:
    """The data of a run, as a configuration has it."""
    weights = order.get("proportion", {})
    streams = {
        name: {"remote": str(data / name), **({"proportion": weights[name]} if weights else {})} for name in SIZES
    }
    settings = {name: value for name, value in order.items() if name != "proportion"}
    return {"streams": streams, "shuffle_seed": seed, **settings}


def write_config(path: Path, train: dict[str, Any], data: dict[str, Any], **trainer: Any) -> Path:
    init_args = {"train": train, **data}
    content = {"model": {"class_path": "not.imported"}, "data": {"init_args": init_args}, "trainer": trainer}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


def trace_worlds(train: dict[str, Any], nodes: int, ranks: int, **data: Any) -> TracedRun:
    streams = {name: Stream(**stream) for name, stream in train["streams"].items()}
    module = StreamingDataModule(train=StreamingConfig(**{**train, "streams": streams}), **data)
    asked = Namespace(nodes=nodes, ranks_per_node=ranks, accumulate=None, checkpoint=None)
    return run_on(module, {}, asked)


def dataset_of(train: dict[str, Any], **more: Any) -> StreamingDataset:
    streams = {name: Stream(**stream) for name, stream in train["streams"].items()}
    return StreamingDataset(**{**train, "streams": streams}, **more)


def traced(*args: object) -> list[dict[str, Any]]:
    shown = run("trace", *args, "--json")
    assert shown.code == 0, shown.err
    reads: list[dict[str, Any]] = shown.json["reads"]
    return reads


def key_of(read: dict[str, Any]) -> SampleKey:
    return SampleKey.from_dict(read["key"])


def read_by_worlds(make: Callable[[World], StreamingDataLoader], num_nodes: int, ranks: int, epochs: int) -> Any:
    """The keys that every rank reads in every batch of some epochs: by rank, in lists."""
    count = num_nodes * ranks
    keys: list[list[list[SampleKey]]] = []
    for rank in range(count):
        loader = make(World(num_nodes=num_nodes, ranks_per_node=ranks, rank=rank))
        batches = [list(batch.keys) for _ in range(epochs) for batch in loader]
        keys.append(batches)
    return keys


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 99),
    world=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    draw=st.randoms(use_true_random=False),
)
def test_every_world_reads_what_is_traced_and_the_reverse_finds_it(
    data: Path,
    order: dict[str, Any],
    seed: int,
    world: tuple[int, int],
    batch_size: int,
    drop_last: bool,
    draw: Random,
) -> None:
    if order.get("batching_method") == "stratified":
        assume(world[0] * world[1] * batch_size >= 3)  # so that each stream has a sample in it
    described = train(data, order, seed)
    traced_as = trace_worlds(described, *world, batch_size=batch_size, drop_last=drop_last)

    def make(rank: World) -> StreamingDataLoader:
        dataset = dataset_of(described, world=rank, batch_size=batch_size)
        return StreamingDataLoader(dataset, drop_last=drop_last, return_keys=True)

    read = read_by_worlds(make, *world, epochs=3)
    for step in draw.sample(range(len(read[0])), 4):
        reads = reads_of_step(traced_as, step)
        assert [(one.step, one.rank, one.place, one.key) for one in reads] == [
            (step, rank, place, key) for rank, steps in enumerate(read) for place, key in enumerate(steps[step])
        ]
    one = draw.choice(reads)
    assert one in reads_of_key(traced_as, one.key)
    stored = one.key.stream, one.key.shard, one.key.sample_index
    times = sorted(
        (key.epoch, step, rank, place)
        for rank, steps in enumerate(read)
        for step, keys in enumerate(steps)
        for place, key in enumerate(keys)
        if (key.stream, key.shard, key.sample_index) == stored
    )
    found = reads_of_sample(traced_as, *stored, epochs=3)
    assert [(one.key.epoch, one.step, one.rank, one.place) for one in found] == [
        time for time in times if time[0] == times[0][0]
    ]


class Recorder(LightningModule):
    """Remembers which keys each global step is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.read: dict[int, list[tuple[int, SampleKey]]] = {}

    def training_step(self, batch: KeyedBatch, batch_idx: int) -> torch.Tensor:
        self.read.setdefault(self.trainer.global_step, []).extend((batch_idx, key) for key in batch.keys)
        predicted: torch.Tensor = self.layer(batch.batch["id"].float().unsqueeze(1))
        return predicted.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(described: dict[str, Any], batch_size: int, **trainer: Any) -> tuple[Recorder, Trainer]:
    streams = {name: Stream(**stream) for name, stream in described["streams"].items()}
    config = StreamingConfig(**{**described, "streams": streams})
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    checkpoint = trainer.pop("ckpt_path", None)
    made = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **{"max_epochs": -1, **trainer})
    model = Recorder()
    data = StreamingDataModule(train=config, batch_size=batch_size, return_keys=["train"])
    made.fit(model, datamodule=data, ckpt_path=checkpoint)
    return model, made


def assert_traced(model: Recorder, *args: object) -> None:
    """The first, the last, and a step between are traced as they were trained."""
    for step in {min(model.read), sum(model.read) // len(model.read), max(model.read)}:
        reads = traced("--step", step, *args)
        assert [(read["batch"], key_of(read)) for read in reads] == model.read[step]


def test_steps_are_those_of_a_trainer_that_accumulates_and_goes_on(data: Path, tmp_path: Path) -> None:
    described = train(data, ORDERS[0])
    model, trainer = fit(described, 4, max_steps=9, accumulate_grad_batches=3)
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 4}, accumulate_grad_batches=3, devices=1)
    assert_traced(model, "--config", config)
    saved = tmp_path / "step=9.ckpt"
    trainer.save_checkpoint(saved)
    resumed, _ = fit(described, 3, max_steps=15, accumulate_grad_batches=2, ckpt_path=saved)
    assert list(resumed.read) == list(range(9, 15))
    goes_on = ["--config", config, "--ckpt", saved, "--batch-size", 3, "--accumulate", 2, "--ranks-per-node", 1]
    assert_traced(resumed, *goes_on)
    refused = run("trace", *goes_on, "--step", 8)
    assert refused.code == 2
    assert "step 8 was done before the checkpoint, which is at step 9" in refused.err


def test_a_new_skip_counts_batches_where_steps_are_of_several(data: Path, tmp_path: Path) -> None:
    described = train(data, ORDERS[0])
    _, trainer = fit(described, 2, max_steps=5, accumulate_grad_batches=2)
    saved = tmp_path / "step=5.ckpt"
    trainer.save_checkpoint(saved)
    skipping = {**described, "skip": ["14-15"]}
    resumed, _ = fit(skipping, 2, max_steps=9, accumulate_grad_batches=2, ckpt_path=saved)
    config = write_config(tmp_path / "run.yaml", skipping, {"batch_size": 2}, accumulate_grad_batches=2, devices=1)
    assert_traced(resumed, "--config", config, "--ckpt", saved)


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"max_steps": 4}, "there is no step 4: the run ends after max_steps=4"),
        ({"max_epochs": 0}, "there is no step 4: the run ends after max_epochs=0"),
        ({"overfit_batches": 2}, "remove it from the configuration"),
        ({"num_nodes": "z"}, "run.yaml: trainer.num_nodes must be a number, but is 'z'"),
        ({"max_steps": "many"}, "run.yaml: trainer.max_steps must be a number, but is 'many'"),
        ({"max_epochs": [1]}, "run.yaml: trainer.max_epochs must be a number, but is [1]"),
        ({"limit_train_batches": float("inf")}, "run.yaml: trainer.limit_train_batches must be a number, but is inf"),
    ],
)
def test_what_the_trainer_will_not_do_is_not_traced(
    trainer: dict[str, Any], words: str, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", train(data, ORDERS[0]), {"batch_size": 3}, devices=1, **trainer)
    refused = run("trace", "--config", config, "--step", 4)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: [1]", "trainer must be settings by name, but is a list"),
        ("data: " + "[" * 1500, "is not a configuration: it is nested too deeply"),
    ],
    ids=["list", "deep"],
)
def test_what_is_no_configuration_is_told(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    refused = run("trace", "--config", tmp_path / "run.yaml", "--step", 0)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err


def test_epochs_are_as_long_as_the_trainer_is_limited_to(data: Path, tmp_path: Path) -> None:
    described = train(data, ORDERS[0])
    model, _ = fit(described, 5, max_steps=7, limit_train_batches=4, accumulate_grad_batches=2)
    config = write_config(
        tmp_path / "run.yaml", described, {"batch_size": 5}, limit_train_batches=4, accumulate_grad_batches=2, devices=1
    )
    assert_traced(model, "--config", config)


def test_ranks_of_a_checkpoint_are_those_it_was_saved_with(data: Path, tmp_path: Path) -> None:
    described = train(data, ORDERS[0])
    _, trainer = fit(described, 6, max_steps=2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 2}, devices=7)
    shown = run("trace", "--config", config, "--ckpt", tmp_path / "run.ckpt", "--step", 2, "--json").json
    assert shown["run"] == {
        "nodes": 1,
        "ranks_per_node": 3,
        "replication": 1,
        "batch_size": 2,
        "begins": {"epoch": 0, "sample_in_epoch": 12, "global_step": 2},
    }


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [(16, 24), (24, 16)])
def test_a_run_that_goes_on_with_another_batch_size_is_traced_on_the_ranks_configured(
    before: int, after: int, data: Path, tmp_path: Path
) -> None:
    described = train(data, ORDERS[0])
    _, trainer = fit(described, before, max_steps=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed, _ = fit(described, after, max_steps=2, ckpt_path=tmp_path / "run.ckpt")
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": before}, devices=1)
    asked = ["--config", config, "--ckpt", tmp_path / "run.ckpt"]
    for change in (["--batch-size", after], ["--set", f"batch_size={after}"]):
        assert_traced(resumed, *asked, *change)
        assert (
            f"the checkpoint's run read {before} samples at a time, which is no multiple of batches of {after}; "
            "taken to resume with 1 rank, see --ranks-per-node\n"
        ) in run("trace", *asked, *change, "--step", 1).err
    told = run("trace", *asked, "--batch-size", before // 2, "--step", 1).err
    assert f"with batches of {before // 2} taken to be 2 ranks; the configuration has 1, see" in told
    assert run("trace", *asked, "--step", 1).err == ""


def test_ranks_that_read_the_same_are_shown_together(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train(data, ORDERS[0]), {"batch_size": 2}, devices=4)
    reads = traced("--config", config, "--set", "train.replication=2", "--step", 1)
    assert [read["ranks"] for read in reads] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert traced("--config", config, "--set", "train.replication=2", "--step", 1, "--rank", 2) == reads[2:]


def mesh(**sizes: Any) -> dict[str, Any]:
    """The strategy whose ranks share samples, as a configuration has it."""
    return {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy", "init_args": sizes}


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("strategy", "trainer", "replication"),
    [
        (mesh(data_parallel_size=2, tensor_parallel_size=2), {"devices": 4}, 2),
        (mesh(data_parallel_size=2, tensor_parallel_size=2), {"devices": "auto"}, 2),
        (mesh(data_parallel_size=4, tensor_parallel_size=1), {"devices": 2, "num_nodes": 2}, 1),
        (mesh(), {"devices": 2, "num_nodes": 2}, 2),
        (mesh(data_parallel_size=1), {"devices": 4}, 4),
        ("fsdp", {"devices": 4}, 1),
        ({"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, {"devices": 4}, 1),
    ],
)
def test_ranks_read_as_the_strategy_has_them(
    strategy: Any, trainer: dict[str, Any], replication: int, data: Path, tmp_path: Path
) -> None:
    described = train(data, ORDERS[0])
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 2}, strategy=strategy, **trainer)
    found = run("trace", "--config", config, "--step", 1, "--json")
    assert (found.code, found.err) == (0, "")
    nodes = trainer.get("num_nodes", 1)
    assert (found.json["run"]["ranks_per_node"], found.json["run"]["replication"]) == (4 // nodes, replication)
    by_hand = ["--nodes", nodes, "--ranks-per-node", 4 // nodes, "--set", f"train.replication={replication}"]
    assert traced("--config", config, "--step", 1, *by_hand) == found.json["reads"]


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("strategy", "trainer", "words"),
    [
        (mesh(data_parallel_size=2, tensor_parallel_size=2), {"devices": 2}, "mesh of 2 (data parallel) x 2 (tensor"),
        (mesh(data_parallel_size=1, tensor_parallel_size=3), {"num_nodes": 2}, "and the run has 2 nodes; give"),
        (mesh(), {}, "tensor_parallel_size of trainer.strategy=ModelParallelStrategy depends on the number of devices"),
        (mesh(tensor_parallel_size="two"), {"devices": 2}, "must be a number of ranks, but is 'two'"),
    ],
)
def test_a_mesh_that_the_run_cannot_have_is_refused(
    strategy: Any, trainer: dict[str, Any], words: str, data: Path, tmp_path: Path
) -> None:
    described = train(data, ORDERS[0])
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 2}, strategy=strategy, **trainer)
    refused = run("trace", "--config", config, "--step", 1)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err


def test_what_a_strategy_of_ones_own_has_ranks_read_is_assumed_and_said(data: Path, tmp_path: Path) -> None:
    own = {"class_path": "mine.Strategy"}
    described = train(data, ORDERS[0])
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 2}, strategy=own, devices=2)
    told = run("trace", "--config", config, "--step", 1)
    assert told.code == 0
    assert "which ranks of trainer.strategy=mine.Strategy read the same samples is not known" in told.err
    assert run("trace", "--config", config, "--step", 1, "--set", "train.replication=2").err == ""


def test_fields_are_shown_where_the_shard_is_here_or_they_are_wanted(data: Path, tmp_path: Path) -> None:
    described = {"streams": {"web": {"remote": str(data / "web"), "local": str(tmp_path / "cache")}}}
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 2}, devices=1)
    (first, second) = traced("--config", config, "--step", 0)
    assert first["fields"] is second["fields"] is None
    wanted = traced("--config", config, "--step", 0, "--fields")
    for read in wanted:
        number = read["sample"]
        assert read["fields"] == {"id": str(number), "text": f"'web {number}'"}
    assert not list((tmp_path / "cache").glob("*.mds"))
    dataset_of(described).prepare_shard(first["key"]["shard"])
    assert traced("--config", config, "--step", 0)[0]["fields"] == wanted[0]["fields"]


def test_a_shard_that_is_here_with_the_columns_that_are_read_is_here(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pyarrow.table({"id": [1, 2], "text": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "data" / "a.parquet")
    stream = {"remote": str(tmp_path / "data"), "format": "parquet"}
    described = {"streams": {"rows": stream}, "columns": ["text"]}
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 2}, devices=1)
    assert traced("--config", config, "--step", 0)[0]["fields"] is None
    dataset_of(described).prepare_shard(0)
    shown = [read["fields"]["text"] for read in traced("--config", config, "--step", 0)]
    assert sorted(shown) == ["'a'", "'b'"]


def test_tables_name_samples_as_they_are_asked_for(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train(data, ORDERS[0]), {"batch_size": 3}, devices=2)
    table = run("trace", "--config", config, "--step", 5, "--rank", 1).out
    assert table.startswith("step 5, epoch 0, 2 ranks\n")
    key = traced("--config", config, "--step", 5, "--rank", 1)[0]["key"]
    name = f"{key['stream']}:{key['shard']}:{key['sample_index']}"
    assert name in table
    assert f"text: '{key['stream']} " in table
    back = run("trace", "--config", config, "--sample", name).out
    assert back.startswith(f"sample {name}, 2 ranks\n")
    assert back.splitlines()[4].split()[:4] == ["5", "0", "5", "1"]


def test_a_read_with_long_fields_is_one_line_and_whole_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with MDSWriter(out=tmp_path / "data", columns={"x": "ndarray:float32"}) as writer:
        writer.write({"x": np.linspace(0, 1 / 3, 8, dtype=np.float32)})
    described = {"remote": str(tmp_path / "data")}
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 1}, devices=1)
    shown = run("trace", "--config", config, "--step", 0).out.splitlines()
    assert [line.partition("x: ")[2] for line in shown if "x: " in line] == ["float32[8] 0.0 0.04761905 0.0952381 0.1…"]
    (read,) = traced("--config", config, "--step", 0)
    assert read["fields"]["x"].endswith("0.33333334")


def test_what_the_configuration_leaves_open_is_said(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train(data, ORDERS[0]), {"batch_size": 3})
    assert (
        "the configuration leaves the number of devices open; assuming 1"
        in run("trace", "--config", config, "--step", 0).err
    )


@pytest.mark.rotate(1)
@pytest.mark.parametrize("trainer", [{"max_steps": 3}, {"max_steps": 15, "max_epochs": 2}, {"max_epochs": 1}])
def test_no_read_after_the_end_of_the_run_is_told(data: Path, tmp_path: Path, trainer: dict[str, int]) -> None:
    described = train(data, ORDERS[0])
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 5}, devices=1, **trainer)
    model, _ = fit(described, 5, **trainer)
    for place in ((0, 0), (1, 3), (2, 1)):
        really = [
            (step, key)
            for step, keys in model.read.items()
            for _, key in keys
            if (key.stream, key.shard, key.sample_index) == ("web", *place)
        ]
        found = traced("--config", config, "--sample", "web:{}:{}".format(*place), "--epochs", 3)
        told = [(read["step"], key_of(read)) for read in found]
        assert told == [one for one in really if one[1].epoch == really[0][1].epoch]


def test_a_sample_that_is_not_drawn_is_told_so(data: Path, tmp_path: Path) -> None:
    described = train(data, {"shuffle": True, "sampling_method": "fixed", "epoch_size": 10})
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 10}, devices=1)
    drawn = {
        (read["key"]["stream"], read["key"]["shard"], read["key"]["sample_index"])
        for read in traced("--config", config, "--step", 0)
    }
    shard, index = next(pair for pair in ((0, number) for number in range(9)) if ("web", *pair) not in drawn)
    shown = run("trace", "--config", config, "--sample", f"web:{shard}:{index}", "--epochs", 2)
    assert shown.out == f"web:{shard}:{index} is not read in 2 epochs from epoch 0 on\n"


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--step", 0, "--rank", 2], "there is no rank 2; the run has 2"),
        (["--sample", "web:0"], "--sample must be STREAM:SHARD:INDEX"),
        (["--sample", "wob:0:0"], "'wob' does not exist"),
        (["--sample", "web:0:9999"], "'web'"),
        (["--sample", "{"], "not JSON"),
        (["--sample", '{"stream": "web"}'], "the key of a sample has"),
        (
            [
                "--sample",
                json.dumps(
                    SampleKey(stream="web", shard=0, sample_index=0, epoch=0, position=0, shuffle_seed=3).as_dict()
                ),
            ],
            "so the key is of another run",
        ),
        (
            ["--step", 0, "--set", "train.shufle=true"],
            "there is no field data.train.shufle; did you mean data.train.shuffle?",
        ),
        (["--step", 0, "--set", "train.shuffle_algo=py9"], "shuffle_algo"),
        (["--step", 0, "--ckpt", "no.ckpt"], "no.ckpt does not exist"),
        (["--step", 0, "--config", "no.yaml"], "there is no no.yaml"),
    ],
)
def test_what_cannot_be_traced_is_refused(args: list[object], words: str, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train(data, ORDERS[0]), {"batch_size": 3}, devices=2)
    refused = run("trace", "--config", config, *args)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err


@pytest.mark.nightly  # 27 commands
@pytest.mark.parametrize("batching", ["random", "per_stream"])
def test_each_read_tells_its_phase(tmp_path: Path, batching: str) -> None:
    phases = [*PHASES[:1], {**PHASES[1], "end": 84, "steps": 1}, PHASES[2]]
    described = phased_train(write_streams(tmp_path), phases=phases, batching_method=batching)
    config = write_config(tmp_path / "run.yaml", described, {"batch_size": 4}, devices=1)
    reads = [read for step in range(25) for read in traced("--config", config, "--step", step)]
    by_stream = {"broad": {"web", "code"}, "ramp": {"web", "code", "math"}, "anneal": {"math", "code"}}
    told = [read["phase"] for read in reads]
    assert list(dict.fromkeys(told)) == ["broad", "ramp", "anneal"]
    assert told == sorted(told, key=list(by_stream).index)
    assert all(read["key"]["stream"] in by_stream[read["phase"]] for read in reads)
    if batching == "random":
        assert [told.count(name) for name in by_stream] == [52, 32, 16]
    (first, *_), last = reads, reads[-1]
    assert traced("--config", config, "--sample", json.dumps(last["key"])) == [last]
    place = ":".join(str(first["key"][part]) for part in ("stream", "shard", "sample_index"))
    table = run("trace", "--config", config, "--sample", place).out
    assert "broad" in table
    assert "phase" in table


def test_without_phases_the_table_names_none(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train(data, ORDERS[0]), {"batch_size": 4}, devices=1)
    assert "phase" not in run("trace", "--config", config, "--step", 3).out
    assert {read["phase"] for read in traced("--config", config, "--step", 3)} == {None}
