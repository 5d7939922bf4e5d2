"""Every configuration runs, and the sums in its first lines are right."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback, Trainer

from examples.linked_batch_size import LinkedCLI
from examples.pretrain import TokenShares
from lightning_streaming import MDSWriter
from lightning_streaming.trainer.cli import StreamingCLI
from tests.servers import GcsStore, S3Store
from tests.tools.running import run

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS_PER_EPOCH = {
    "custom_datamodule": 24,
    "demo": 90,
    "growing_dataset": 125,
    "held_out_split": 85,
    "joined_columns": 125,
    "linked_batch_size": 125,
    "one_dataset": 125,
    "other_formats": 125,
    "packed_documents": 100,
    "phases": 200,
    "pictures": 8,
    "pretrain": 100,
    "resume": 250,
    "sft": 100,
    "token_budget": 100,
    "validation_set": 125,
    "weighted_mixture": 200,
}
IN_BUCKETS = {
    "s3": ["code", "docs"],
    "gcs": ["code", "docs"],
    "ddp_multi_node": ["code", "docs"],
    "fsdp": [],
}
"""Configurations whose data is in buckets, and their streams; none where a stage is one dataset."""
ON_ONE_CPU = {
    "ddp_multi_node": ["--trainer.devices=1", "--trainer.num_nodes=1"],
    "fsdp": ["--trainer.devices=1", "--trainer.strategy=auto", "--trainer.precision=32-true"]
    + [f"--model.{size}=16" for size in ("width", "heads", "depth")],
}
"""What stands for machines and GPUs that are not here; tests/trainer runs these strategies on several processes."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings('ignore:.*ckpt_path="last".* is set, but there is no last checkpoint available'),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def fit(name: str, *args: str, cli: type[StreamingCLI] = StreamingCLI, max_steps: int = 2) -> StreamingCLI:
    """Run a configuration for a few steps."""
    few = [f"--trainer.max_steps={max_steps}", "--trainer.enable_progress_bar=false"]
    return cli(["fit", "--config", str(CONFIGS / f"{name}.yaml"), *few, *args])


class ValidationLog(Callback):
    """Remembers which samples each validation was on."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_validation_start(self, *_: Any) -> None:
        self.seen.append([])

    def on_validation_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen[-1] += batch["id"].tolist()


class LinesLog(Callback):
    """Remembers the lines of each block, as a joined dataset tells them, and as they are."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.expected: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.lines += batch["lines"].tolist()
        self.expected += (batch["tokens"] == ord("\n")).sum(dim=1).tolist()


def logged(directory: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(directory, "steps.jsonl").read_text().splitlines()]


def test_every_configuration_is_run_here() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == {*STEPS_PER_EPOCH, *IN_BUCKETS}


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_configuration_opens_with_how_to_launch_it(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"fit --config configs/{path.name}" in head


@pytest.mark.rotate(1)
@pytest.mark.usefixtures("in_example_directory")
@pytest.mark.parametrize("name", sorted(STEPS_PER_EPOCH))
def test_configuration_trains_and_has_the_steps_it_says(name: str) -> None:
    cli = fit(name, cli=LinkedCLI if name == "linked_batch_size" else StreamingCLI)
    assert cli.trainer.global_step == 2
    assert cli.trainer.num_training_batches == STEPS_PER_EPOCH[name]
    assert f"{STEPS_PER_EPOCH[name]} steps per epoch" in (CONFIGS / f"{name}.yaml").read_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_demo_draws_from_its_streams_by_weight() -> None:
    fit("demo", max_steps=15)
    ids = [sample for step in logged("demo_output/run") for sample in step["ids"]]
    assert len(ids) == len(set(ids)) == 15 * 16
    assert sum(sample < 1_000_000 for sample in ids) / len(ids) == pytest.approx(0.7, abs=0.1)


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_validation_reads_the_same_samples_each_time() -> None:
    callback = "--trainer.callbacks+=tests.examples.test_configs.ValidationLog"
    cli = fit("validation_set", "--trainer.val_check_interval=1", callback)
    assert cli.trainer.num_val_batches == [10]
    (log,) = (one for one in vars(cli.trainer)["callbacks"] if isinstance(one, ValidationLog))
    _sanity_check, first, second = log.seen
    assert len(first) == 640
    assert first == second


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_parts_of_one_dataset_are_trained_and_validated_on() -> None:
    callback = "--trainer.callbacks+=tests.examples.test_configs.ValidationLog"
    cli = fit("held_out_split", "--trainer.val_check_interval=1", callback)
    (log,) = (one for one in vars(cli.trainer)["callbacks"] if isinstance(one, ValidationLog))
    datasets = cli.datamodule.datasets
    trained = {datasets["train"][number]["id"] for number in range(datasets["train"].size)}
    assert not trained & set(log.seen[-1])
    assert all(number % 4 for number in trained)


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_what_a_configuration_reads_is_told_before_it_runs() -> None:
    shown = run("inspect", "--config", CONFIGS / "held_out_split.yaml", "--json")
    stages = {one["stage"]: one["streams"][0] for one in shown.json["stages"]}
    cli = fit("held_out_split")
    train = cli.datamodule.datasets["train"]
    assert stages["train"] == {
        "stream": "0",
        "stored": 4000,
        "selected": train.size,
        "drawn": train.size,
        "share": 1.0,
        "weight": None,
        "passes": 1.0,
        "only": "where='id % 4 <> 0', fraction='0%:90%'",
        "joins": [],
    }
    assert stages.keys() == {"train", "val", "test"}
    mixture = run("inspect", "--config", CONFIGS / "weighted_mixture.yaml").out
    assert "train: 6,400 samples per epoch" in mixture
    assert "75.0%" in mixture


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_phases_are_read_as_they_are_told(caplog: pytest.LogCaptureFixture) -> None:
    (stage,) = run("inspect", "--config", CONFIGS / "phases.yaml", "--json").json["stages"]
    head = (CONFIGS / "phases.yaml").read_text()
    assert [(one["phase"], one["ends"], one["steps"]) for one in stage["schedule"]] == [
        ("broad", 3200, 1),
        ("ramp", 5760, 8),
        ("anneal", 6400, 1),
    ]
    assert all(f"to {one['ends']}  " in head for one in stage["schedule"])
    assert [one["drawn"] for one in stage["schedule"][0]["streams"]] == [2880, 320]
    with caplog.at_level(logging.INFO):
        loss_log = "--trainer.callbacks+=examples.loss_log.LossLog"
        assert fit("phases", loss_log, "--data.train.epoch_size=640", max_steps=-1).trainer.global_step == 20
    ids = [sample for step in logged("demo_output/phases") for sample in step["ids"]]
    are_code = [sample < 1_000_000 for sample in ids]
    assert (len(ids), sum(are_code[:320]), sum(are_code[576:])) == (640, 288, 32)
    told = [message.split("'")[1] for message in caplog.messages if "reading phase" in message]
    assert told == ["broad", "ramp", "anneal"]


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_columns_of_several_datasets_are_in_each_batch() -> None:
    callback = "--trainer.callbacks+=tests.examples.test_configs.LinesLog"
    cli = fit("joined_columns", callback)
    (log,) = (one for one in vars(cli.trainer)["callbacks"] if isinstance(one, LinesLog))
    assert log.lines == log.expected
    assert len(log.lines) == 64
    shown = run("inspect", "--config", CONFIGS / "joined_columns.yaml", "--json").json
    assert shown["stages"][0]["streams"][0]["joins"] == [
        {"join": "weights", "how": "by position", "stored": 4000, "columns": ["weight"]},
        {"join": "notes", "how": "on 'id'", "stored": 4000, "columns": ["lines"]},
    ]
    told = run("inspect", "--config", CONFIGS / "joined_columns.yaml").out
    assert "joined with them" in told
    assert "by position" in told


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
def test_sources_have_their_shares_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    (stage,) = run("inspect", "--config", CONFIGS / "pretrain.yaml", "--json").json["stages"]
    broad = {stream["stream"]: stream["token_share"] for stream in stage["schedule"][0]["streams"]}
    wanted = {"web": 0.6, "wiki": 0.1, "code": 0.2, "books": 0.05, "math": 0.05}
    assert broad == pytest.approx(wanted, abs=0.02)
    cli = fit("pretrain", max_steps=40)
    (shares,) = (callback for callback in vars(cli.trainer)["callbacks"] if isinstance(callback, TokenShares))
    total = sum(shares.tokens.values())
    assert {name: count / total for name, count in shares.tokens.items()} == pytest.approx(wanted, abs=0.06)
    assert "read: web" in capsys.readouterr().out


@pytest.mark.usefixtures("in_example_directory")
def test_resume_goes_on_with_the_same_command() -> None:
    fit("resume", max_steps=3)
    fit("resume", max_steps=5)
    assert [step["step"] for step in logged("demo_output/resume")] == [1, 2, 3, 4, 5]
    ids = [sample for step in logged("demo_output/resume") for sample in step["ids"]]
    assert len(ids) == len(set(ids)) == 5 * 32


@pytest.mark.nightly
@pytest.mark.usefixtures("in_example_directory")
@pytest.mark.parametrize(("batch_size", "learning_rate"), [(32, 0.006), (8, 0.003)])
def test_link_tells_the_model_the_batch_size_of_the_data(batch_size: int, learning_rate: float) -> None:
    cli = fit("linked_batch_size", f"--data.batch_size={batch_size}", cli=LinkedCLI)
    assert cli.model.learning_rate == pytest.approx(learning_rate)


def write_to_bucket(store: S3Store | GcsStore) -> str:
    """A dataset of 128 samples in a bucket of its own; gives its URL."""
    remote = store.make_bucket()
    columns = {"tokens": "ndarray:uint8:129", "id": "int"}
    with MDSWriter(out=remote, columns=columns, storage_options=store.options) as writer:
        for index in range(128):
            writer.write({"tokens": np.full(129, index, np.uint8), "id": index})
    return remote


@pytest.mark.rotate(1)
@pytest.mark.usefixtures("in_example_directory")
@pytest.mark.parametrize("name", sorted(IN_BUCKETS))
def test_configuration_trains_from_buckets(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: S3Store | GcsStore = request.getfixturevalue("gcs" if name == "gcs" else "s3")
    for variable, value in {"STORE_KEY": "testing", "STORE_SECRET": "testing", "GCS_KEY_FILE": "anon"}.items():
        monkeypatch.setenv(variable, value)
    args = [
        "--data.pin_memory=false",
        "--data.num_workers=1",
        "--data.train.epoch_size=128",
        "--trainer.accelerator=cpu",
    ]
    written = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]["init_args"]["train"]
    for stream in IN_BUCKETS[name] or [""]:
        data = f"--data.train.streams.{stream}" if stream else "--data.train"
        args += [f"{data}.remote={write_to_bucket(store)}", f"{data}.local=cache/{stream}"]
    options = written.get("storage", {}).get("options", {})
    args.append(f"--data.train.storage.options={json.dumps({**options, 'endpoint_url': store.url})}")
    cli = fit(name, *args, *ON_ONE_CPU.get(name, []))
    assert cli.trainer.global_step == 2
    assert cli.trainer.num_training_batches == 128 // cli.datamodule.batch_size
    assert list(Path("cache").rglob("shard.00000.mds"))
    saved = next(Path("runs").rglob("config.yaml")).read_text()
    assert "testing" not in saved
