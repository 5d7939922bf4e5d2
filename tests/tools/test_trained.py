"""``trace --trained``: what the weights of a checkpoint were trained on, and when, as the run itself remembers it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import KeyedBatch, MDSWriter, SampleKey, StreamingDataModule
from lightning_streaming.trainer.config import config_of
from tests.packed_data import packed_train, write_documents
from tests.phased_data import PHASES, phased_train, write_config
from tests.tools.running import read_index, run

SIZES = {"code": 40, "math": 20, "web": 60}
Seen = tuple[int, int, SampleKey]


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, samples in SIZES.items():
        with MDSWriter(out=str(root / name), columns={"id": "int", "text": "str"}, size_limit=400) as writer:
            for number in range(samples):
                writer.write({"id": number, "text": f"{name} {number} says"})
    return write_documents(root / "documents").parent


class Remembers(LightningModule):
    """Remembers the step and the key of each sample that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Seen] = []

    def training_step(self, batch: KeyedBatch, batch_idx: int) -> torch.Tensor:
        self.seen += [(self.trainer.global_step, key.epoch, key) for key in batch.keys]
        loss: torch.Tensor = self.layer.weight.sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    train: dict[str, Any],
    saved: Path,
    batch_size: int,
    *,
    ckpt_path: Path | None = None,
    drop_last: bool = False,
    **options: Any,
) -> list[Seen]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **options)
    module = StreamingDataModule(
        train=config_of(train), batch_size=batch_size, drop_last=drop_last, return_keys=["train"]
    )
    model = Remembers()
    trainer.fit(model, datamodule=module, ckpt_path=ckpt_path)
    trainer.save_checkpoint(saved)
    return model.seen


def trained(config: Path, saved: Path, *args: object) -> dict[str, Any]:
    done = run("trace", "--config", config, "--ckpt", saved, "--trained", *args, "--json")
    assert done.code == 0, done.err
    report: dict[str, Any] = done.json
    return report


def plain_train(data: Path, **changes: Any) -> dict[str, Any]:
    streams = {name: {"remote": str(data / name)} for name in SIZES}
    return {"streams": streams, "shuffle": True, "num_canonical_nodes": 2, **changes}


def as_seen(reads: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    fields = ("step", "epoch", "position", "stream", "shard", "sample_index")
    return [tuple(read[field] for field in fields) for read in reads]


def of_key(step: int, key: SampleKey) -> tuple[Any, ...]:
    return step, key.epoch, key.position, key.stream, key.shard, key.sample_index


RUNS: list[dict[str, Any]] = [
    {},
    {"skip": ["3-4", "20"]},
    {"schedule": True},
    {"batching_method": "per_stream"},
    {"downloaded": True},
]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("order", RUNS, ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_read_of_the_weights_is_there_and_no_other(
    data: Path, tmp_path: Path, order: dict[str, Any], accumulate: int
) -> None:
    train = phased_train(data) if "schedule" in order else plain_train(data, **order)
    if train.pop("downloaded", False):
        train["streams"] = {name: {**at, "local": str(tmp_path / name)} for name, at in train["streams"].items()}
    saved, steps = tmp_path / "saved.ckpt", 40 // accumulate
    seen = fit(train, saved, 5, max_steps=steps, max_epochs=-1, accumulate_grad_batches=accumulate)
    settings: dict[str, Any] = {"devices": 1, "accumulate_grad_batches": accumulate}
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 5}, **settings)
    everything = trained(config, saved, "--where", "id >= 0")
    assert as_seen(everything["reads"]) == [of_key(step, key) for step, _, key in seen]
    assert (everything["samples"], everything["trained"]) == (
        sum(SIZES.values()),
        len({(key.stream, key.shard, key.sample_index) for *_, key in seen}),
    )
    last = seen[-1][2]
    of_last = [of_key(step, key) for step, _, key in seen if of_key(0, key)[3:] == of_key(0, last)[3:]]
    name = f"{last.stream}:{last.shard}:{last.sample_index}"
    assert as_seen(trained(config, saved, "--sample", name)["reads"]) == of_last
    # In the stream, by its text, and by a digest of it: the same sample.
    sizes = read_index(data / last.stream).samples_per_shard()
    number = int(sizes[: last.shard].sum()) + last.sample_index
    text = f"{last.stream} {number} says"
    for args in (
        ["--sample", f"{last.stream}:{number}"],
        ["--where", f"contains(text, '{last.stream} {number} ')"],
        ["--where", f"sha256(text) = '{hashlib.sha256(text.encode()).hexdigest()}'"],
    ):
        report = trained(config, saved, *args)
        assert as_seen(report["reads"]) == of_last
        assert report["reads"][0]["fields"]["text"] == f"'{text}'"
    of_shard = [of_key(step, key) for step, _, key in seen if (key.stream, key.shard) == (last.stream, last.shard)]
    for shard in (last.shard, f"shard.{last.shard:05}.mds"):
        report = trained(config, saved, "--shard", f"{last.stream}:{shard}")
        assert as_seen(report["reads"]) == of_shard
        assert report["samples"] == sizes[last.shard]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("skip", [[], ["3-4", "41-90"], ["0-10"]], ids=str)
def test_what_the_run_of_the_checkpoint_skipped_counts_and_not_what_is_skipped_now(
    data: Path, tmp_path: Path, skip: list[str]
) -> None:
    train, saved = plain_train(data, skip=["3-4", "20"]), tmp_path / "saved.ckpt"
    seen = fit(train, saved, 5, max_steps=37, max_epochs=-1)
    config = write_config(tmp_path / "run.yaml", {**train, "skip": skip}, {"batch_size": 5}, devices=1)
    reads = trained(config, saved, "--where", "id >= 0")["reads"]
    assert as_seen(reads) == [of_key(step, key) for step, _, key in seen]


def test_a_name_of_several_files_is_refused_and_a_path_names_one(tmp_path: Path) -> None:
    for part in "ab":
        with MDSWriter(out=str(tmp_path / "data" / part), columns={"id": "int"}) as writer:
            writer.write({"id": ord(part)})
    merged = run("merge", tmp_path / "data", tmp_path / "data" / "a", tmp_path / "data" / "b")
    assert merged.code == 0, merged.err
    train, saved = {"streams": {"all": {"remote": str(tmp_path / "data")}}}, tmp_path / "saved.ckpt"
    fit(train, saved, 1, max_steps=2)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 1}, devices=1)
    (read,) = trained(config, saved, "--shard", "all:b/shard.00000.mds")["reads"]
    assert read["fields"]["id"] == str(ord("b"))
    refused = run("trace", "--config", config, "--ckpt", saved, "--trained", "--shard", "all:shard.00000.mds")
    assert refused.code == 2
    assert "name one by its path: a/shard.00000.mds, b/shard.00000.mds" in refused.err


@pytest.mark.rotate(1)
@pytest.mark.parametrize("skip", [[], ["2-3"]], ids=str)
@pytest.mark.parametrize(("drop_last", "limit"), [(True, 1.0), (False, 10), (True, 0.5)])
def test_state_counts_the_batches_of_earlier_epochs_that_were_trained(
    data: Path, tmp_path: Path, skip: list[str], drop_last: bool, limit: int | float
) -> None:
    train, saved = plain_train(data, skip=skip), tmp_path / "saved.ckpt"
    seen = fit(train, saved, 7, drop_last=drop_last, max_steps=39, max_epochs=-1, limit_train_batches=limit)
    settings = {"devices": 1, "limit_train_batches": limit}
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 7, "drop_last": drop_last}, **settings)
    shown = run("state", "show", saved, "--config", config, "--json")
    assert (shown.code, shown.err) == (0, "")
    streams = shown.json["loaders"]["train"]["streams"]
    assert {stream["name"]: stream["before"] + stream["this_epoch"] for stream in streams} == Counter(
        key.stream for *_, key in seen
    )


def test_weights_and_phases_are_those_of_the_time(data: Path, tmp_path: Path) -> None:
    train, saved = phased_train(data), tmp_path / "saved.ckpt"
    fit(train, saved, 4, max_steps=29)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 4}, devices=1)
    reads = trained(config, saved, "--where", "id >= 0")["reads"]
    assert list(dict.fromkeys(read["phase"] for read in reads)) == [phase["name"] for phase in PHASES]
    broad, ramp, anneal = ([read for read in reads if read["phase"] == phase["name"]] for phase in PHASES)
    assert broad[0]["weights"] == pytest.approx({"web": 0.9, "code": 0.1}, abs=0.02)
    assert anneal[-1]["weights"] == pytest.approx({"math": 0.6, "code": 0.4}, abs=0.02)
    assert ramp[0]["weights"]["web"] > ramp[-1]["weights"]["web"]
    table = run("trace", "--config", config, "--ckpt", saved, "--trained", "--where", "id = 1").out.splitlines()
    assert " of 3 samples trained on before step 29" in table[0]
    assert table[2].split() == ["sample", "epoch", "step", "position", "phase", "weight", "fields"]


@pytest.mark.filterwarnings("ignore:.*Checkpoint directory")
def test_after_a_change_of_batches_reads_are_exact_and_steps_are_not_made_up(data: Path, tmp_path: Path) -> None:
    train, first, saved = plain_train(data), tmp_path / "first.ckpt", tmp_path / "saved.ckpt"
    seen = fit(train, first, 5, max_steps=11)
    seen += fit(train, saved, 4, max_steps=30, ckpt_path=first, max_epochs=-1)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 4}, devices=1)
    done = run("trace", "--config", config, "--ckpt", saved, "--trained", "--where", "id >= 0", "--json")
    assert [read[1:] for read in as_seen(done.json["reads"])] == [of_key(0, key)[1:] for *_, key in seen]
    assert {read["step"] for read in done.json["reads"]} == {None}
    assert "the run has changed its ranks, batch size or accumulation" in done.err


def test_documents_of_packs_are_traced_back_to_their_packs(data: Path, tmp_path: Path) -> None:
    train, saved = packed_train(data / "documents"), tmp_path / "saved.ckpt"
    seen = fit(train, saved, 2, max_steps=60, max_epochs=-1)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, devices=1)
    report = trained(config, saved, "--where", "size >= 0")
    assert [
        (read["step"], read["epoch"], read["stream"], read["shard"], read["sample_index"]) for read in report["reads"]
    ] == [(step, key.epoch, key.stream, key.shard, key.sample_index) for step, _, key in seen]
    assert {read["epoch"] for read in report["reads"]} == {0, 1}


def test_weights_in_tokens_are_shown_in_tokens(data: Path, tmp_path: Path) -> None:
    train, saved, shares = packed_train(data / "documents"), tmp_path / "saved.ckpt", {"books": 0.75, "web": 0.25}
    train |= {"mixing": {"weights_in": "tokens"}, "epoch_size": 3000}
    train["streams"] = {name: {**train["streams"][name], "proportion": share} for name, share in shares.items()}
    seen = fit(train, saved, 2, max_steps=40, max_epochs=-1)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, devices=1)
    reads = trained(config, saved, "--where", "size >= 0")["reads"]
    assert len(reads) == len(seen)
    assert {read["epoch"] for read in reads} == {0, 1}
    for read in reads:
        assert read["weights"] == pytest.approx(shares, abs=0.06)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--sample", "web:0:0", "--trained"], "--trained goes with --ckpt"),
        (["--where", "id = 1"], "--where goes with --trained"),
        (["--sample", "web:0:0", "--trained", "--ckpt", "c", "--rank", 0], "--rank goes with reads to come"),
        (["--sample", "web:0:0", "--trained", "--ckpt", "c", "--epochs", 2], "--epochs goes with reads to come"),
        (["--step", 1, "--epochs", 2], "--epochs goes with --sample"),
        (["--step", 1, "--threshold", 6], "--threshold goes with --spike"),
        (["--step", 1, "--trained", "--ckpt", "saved.ckpt"], "--trained goes with --sample, --shard or --where"),
        (["--shard", "web:99", "--trained", "--ckpt", "saved.ckpt"], "stream 'web' has no shard '99'"),
        (["--shard", "web:no.mds", "--trained", "--ckpt", "saved.ckpt"], "stream 'web' has no shard 'no.mds'"),
        (["--shard", "0", "--trained", "--ckpt", "saved.ckpt"], "there is no stream ''"),
        (["--sample", "web:99:0", "--trained", "--ckpt", "saved.ckpt"], "there is no sample 'web:99:0'"),
        (["--where", "nothing = 1", "--trained", "--ckpt", "saved.ckpt"], "no stream has the columns nothing"),
    ],
)
def test_what_cannot_be_traced_back_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    train = plain_train(data)
    if "saved.ckpt" in args:
        fit(train, tmp_path / "saved.ckpt", 4, max_steps=1)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 4}, devices=1)
    refused = run("trace", "--config", config, *args)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err
