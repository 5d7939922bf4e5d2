"""``lightning-streaming view --config``: what a run reads, in which order, and where a checkpoint stands."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import Stream, StreamingConfig, StreamingDataModule, StreamingDataset
from lightning_streaming.tools.viewing.pages import Request
from lightning_streaming.writing.writers import MDSWriter
from tests.schedules import schedule
from tests.servers.stores import S3Bucket
from tests.tools.running import run, write_texts
from tests.tools.viewing.asking import Elements, answer, html, run_pages, snapshot


@pytest.fixture
def streams(temporary: Path) -> Path:
    """A directory with two streams, to run in."""
    write_texts("web", 60)
    write_texts("code", 40)
    return Path.cwd()


def _config(streams: dict[str, Any], **more: Any) -> None:
    data = {"batch_size": 4, "train": {"streams": streams, **more.pop("train", {})}, **more}
    written = {"data": {"init_args": data}, "trainer": {"devices": 2, "max_steps": 20}}
    Path("run.yaml").write_text(json.dumps(written))


MIXED: dict[str, Any] = {"web": {"remote": "web", "proportion": 0.75}, "code": {"remote": "code", "proportion": 0.25}}


def test_the_first_page_tells_what_each_stage_reads(streams: Path) -> None:
    _config(MIXED, val={"remote": "code"})
    with run_pages() as pages:
        text = Elements.of(html(pages, "")).text
        assert "samples per epoch" in text
        assert "75.0%" in text
        assert "val" in text
        assert [one.stage for one in pages.viewed.streams] == ["train", "train", "val"]


def test_the_order_is_that_of_trace(streams: Path) -> None:
    _config(MIXED)
    with run_pages() as pages:
        found = Elements.of(html(pages, "order", step="3", steps="2"))
    shown = [one.partition("key=")[2] for one in found.values("a", "href") if "/find?" in one]
    traced = [
        f"{read['key']['shard']}:{read['key']['sample_index']}"
        for step in (3, 4)
        for read in run("trace", "--config", "run.yaml", "--step", step, "--json").json["reads"]
    ]
    assert shown == traced
    assert len(shown) == 16
    assert "1 node of 2 ranks" in found.text


def test_steps_end_where_the_run_ends(streams: Path) -> None:
    _config(MIXED)
    with run_pages() as pages:
        assert "Step 19" in Elements.of(html(pages, "order", step="18", steps="32")).text
        beyond = answer(pages, "order", step="20")
        assert "max_steps=20" in beyond.data.decode()
        assert "there is no rank 9" in answer(pages, "order", rank="9").data.decode()


def test_steps_that_are_left_out_are_said_to_be(streams: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _config(MIXED)
    monkeypatch.setattr("lightning_streaming.tools.viewing.viewed_run._MAX_READS", 20)
    with run_pages() as pages:
        cut = Elements.of(html(pages, "order", step="3", steps="8"))
        assert "Step 5" in cut.text  # 8 samples of each
        assert "Step 6" not in cut.text
        assert "Further steps are left out" in cut.text
        assert any("order?step=6" in one for one in cut.values("a", "href"))
        assert "left out" not in Elements.of(html(pages, "order", step="3", steps="3")).text


def test_a_sample_tells_when_it_is_read(streams: Path) -> None:
    _config(MIXED)
    with run_pages() as pages:
        found = Elements.of(html(pages, "s/0/sample/5", when="1"))
    assert "When the run reads it" in found.text
    step = next(one for one in found.values("a", "href") if "order?step=" in one)
    assert "steps=1" in step


@pytest.mark.parametrize("limit", [{"max_steps": 1}, {"max_epochs": 0}])
def test_what_the_run_ends_before_is_read_by_no_step(streams: Path, limit: dict[str, int]) -> None:
    _config(MIXED)
    written = json.loads(Path("run.yaml").read_text())
    Path("run.yaml").write_text(json.dumps({**written, "trainer": {"devices": 2, **limit}}))
    with run_pages() as pages:
        told = [Elements.of(html(pages, f"s/0/sample/{number}", when="1")) for number in range(60)]
    steps = {one for page in told for one in page.values("a", "href") if "order?step=" in one}
    assert steps == ({"/token/order?step=0&steps=1"} if "max_steps" in limit else set())
    assert any("or the run ends before" in page.text for page in told)


def test_what_a_selection_leaves_and_leaves_out(streams: Path) -> None:
    _config({"web": {**MIXED["web"], "selection": {"where": "id % 3 == 0"}}, "code": MIXED["code"]})
    with run_pages() as pages:
        front = Elements.of(html(pages, "")).text
        assert "60 20 33.3%" in front
        read = Elements.of(html(pages, "s/0/samples", only="read")).text
        left = Elements.of(html(pages, "s/0/samples", only="left-out")).text
        assert "text 003" in read
        assert "text 004" not in read
        assert "text 004" in left
        assert "text 003" not in left
        further = Elements.of(html(pages, "s/0/samples", only="left-out", **{"from": "18"}))
        assert "text 019" in further.text
        assert "none" in Elements.of(html(pages, "s/1/samples", only="left-out")).text
        assert "leaves it out" in Elements.of(html(pages, "s/0/sample/4", when="1")).text


def test_stages_may_have_streams_of_one_name_and_keys_name_them(streams: Path) -> None:
    _config(MIXED, val={"streams": {"code": {"remote": "code"}}})
    with run_pages() as pages:
        assert answer(pages, "find", key="code:0:1", stream="0").location == "/token/s/1/sample/1"
        assert answer(pages, "find", key="code:0:1", stream="2").location == "/token/s/2/sample/1"
        assert answer(pages, "find", key="code:7", stream="2").location == "/token/s/2/sample/7"
        text = Elements.of(html(pages, "find", key="elsewhere:0:1")).text
        assert "there is no stream 'elsewhere'; there are web, code, or leave the name out" in text


_STRANGE = "a\u202eb\n"


def test_strange_names_are_told_so_that_they_do_nothing(streams: Path) -> None:
    phases: list[Any] = [{"name": _STRANGE, "end": 40, "mix": {_STRANGE: 1}}, {"name": "second", "mix": {"code": 1}}]
    _config(
        {_STRANGE: {"remote": "web"}, "code": {"remote": "code"}},
        train={"schedule": schedule(phases), "epoch_size": 80},
    )
    with run_pages() as pages:
        for path in (
            "",
            "order",
            "batches",
            "s/0/",
            "s/0/samples",
            "s/0/sample/3",
            "s/0/columns",
            "s/0/shards",
            "find",
        ):
            text = html(pages, path, when="1")
            assert "\u202e" not in text
            assert "a\\u202eb\\n" in text or path == "find"


def test_pages_of_a_stream_lead_to_the_same_pages_of_the_others(streams: Path) -> None:
    _config(MIXED, val={"remote": "code"})
    with run_pages() as pages:
        for kind, leads_to in (("samples", "samples"), ("columns", "columns"), ("", ""), ("sample/3", "samples")):
            found = Elements.of(html(pages, f"s/1/{kind}"))
            assert {f"/token/s/{place}/{leads_to}" for place in range(3)} <= set(found.values("a", "href"))
        monitored = Elements.of(html(pages, ""))
        assert "streams:" not in monitored.text


def test_phases_are_listed(streams: Path) -> None:
    phases: list[Any] = [{"name": "<b>first</b>", "end": 40, "mix": {"web": 1}}, {"name": "second", "mix": {"code": 1}}]
    plain = {name: {"remote": name} for name in MIXED}
    _config(plain, train={"schedule": schedule(phases), "epoch_size": 80})
    with run_pages() as pages:
        found = Elements.of(html(pages, ""))
        assert "<b>first</b>" in found.text
        assert "phase second" in Elements.of(html(pages, "order", step="6", steps="1")).text


@pytest.mark.nightly
def test_nothing_of_a_run_is_written_to(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "web")
    where = {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "local": str(streams / "node")}
    _config(
        {"web": where, "code": {"remote": "code", "local": str(streams / "copy"), "selection": {"where": "id > 9"}}}
    )
    before = snapshot(streams)
    with run_pages() as pages:
        for path in ("", "s/0/", "s/0/samples", "s/0/sample/7", "s/1/samples", "order", "batches"):
            assert "testing-secret" not in html(pages, path)
        assert "30 " in Elements.of(html(pages, "")).text
    assert snapshot(streams) == before
    assert not (streams / "caches").exists()
    assert {entry.method for entry in s3_bucket.log()} <= {"GET", "HEAD"}
    assert all(entry.range for entry in s3_bucket.log() if "shard" in entry.name)


@pytest.mark.nightly
def test_a_selection_of_a_store_is_evaluated_when_that_is_asked_for(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "web")
    _config(
        {"web": {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "selection": {"where": "id < 30"}}}
    )
    with run_pages() as pages:
        for path in ("", "order", "s/0/sample/3"):
            assert "is not known yet" in html(pages, path, when="1")
        for only in ("read", "left-out"):
            assert "is not known yet" in html(pages, "s/0/samples", only=only)
        prepared = html(pages, "s/0/sample/3", prepared="1")
        assert "is not known yet" in prepared
        assert _link_to_ask(prepared) == {"prepared": "1", "force": "1"}
        assert pages.respond(Request(root="/token/", path="s/0/file/3/0/0", query={"prepared": "1"})) is None
        assert all(entry.range for entry in s3_bucket.log() if "shard" in entry.name)
        asked = _link_to_ask(html(pages, "s/0/samples", only="left-out", **{"from": "31"}))
        assert asked == {"from": "31", "only": "left-out", "force": "1"}
        assert "text 031" in html(pages, "s/0/samples", **asked)
        assert "60 30 50.0%" in Elements.of(html(pages, "")).text
        assert "After decode and transform" in html(pages, "s/0/sample/3", prepared="1", force="1")


@pytest.mark.nightly
def test_samples_of_a_store_are_prepared_from_their_bytes_alone(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "web")
    _config({"web": {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}}})
    with run_pages() as pages:
        for number in range(12):
            shown = html(pages, f"s/0/sample/{number}", prepared="1")
            assert "After decode and transform" in shown
            assert shown.count(f"text {number:03}") == 2
        entries = [entry for entry in s3_bucket.log() if "index" in entry.name]
        assert all(entry.range for entry in s3_bucket.log() if "shard" in entry.name)
        html(pages, "s/0/sample/30", prepared="1")
        assert [entry for entry in s3_bucket.log() if "index" in entry.name] == entries, "one dataset reads all"


def test_datasets_that_prepare_samples_are_closed_with_the_pages(
    streams: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _config(MIXED, val={"remote": "code"})
    closed, close = list[StreamingDataset](), StreamingDataset.close

    def count(dataset: StreamingDataset) -> None:
        closed.append(dataset)
        close(dataset)

    monkeypatch.setattr(StreamingDataset, "close", count)
    with run_pages() as pages:
        for path in ("s/0/sample/1", "s/1/sample/2", "s/2/sample/3", "s/0/sample/4"):
            assert "After decode and transform" in html(pages, path, prepared="1")
        closed.clear()
    assert len(closed) == 2


def _link_to_ask(text: str) -> dict[str, str]:
    """What the only link of a page that asks for much says."""
    (link,) = [one for one in Elements.of(text).values("a", "href") if "force=1" in one]
    return dict(parse_qsl(urlsplit(link).query))


@pytest.mark.nightly
def test_of_what_is_not_known_one_stage_and_the_step_that_was_wanted_are_asked_for(
    streams: Path, s3_bucket: S3Bucket
) -> None:
    s3_bucket.put_all(streams / "web")
    where = {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "selection": {"where": "id < 30"}}
    _config({"web": where}, val={**where, "selection": {"where": "id < 7"}})
    with run_pages() as pages:
        links = [one for one in Elements.of(html(pages, "")).values("a", "href") if "force=1" in one]
        assert links == ["/token/?stage=train&force=1", "/token/?stage=val&force=1"]
        text = Elements.of(html(pages, "", stage="val", force="1")).text
        assert "60 7 " in text
        assert "60 30 " not in text
        wanted = {"step": "3", "steps": "2", "rank": "1"}
        assert _link_to_ask(html(pages, "order", **wanted)) == {**wanted, "force": "1"}
        wanted = {"step": "3", "rank": "1"}
        assert _link_to_ask(html(pages, "batches", **wanted)) == {**wanted, "force": "1"}


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("stream", "is_asked_for"),
    [
        ({}, False),
        ({"selection": {"where": "id < 30"}}, True),
        ({"selection": {"fraction": ":50%"}}, False),
        ({"selection": {"fraction": ":50%", "group_by": "text"}}, True),
        ({"selection": {"indices": "chosen.npy"}}, False),
        ({"selection": {"indices": "chosen.npy", "where": "id < 30"}}, True),
    ],
)
def test_a_selection_is_asked_for_where_columns_decide(
    streams: Path, s3_bucket: S3Bucket, stream: dict[str, Any], is_asked_for: bool
) -> None:
    s3_bucket.put_all(streams / "web")
    np.save("chosen.npy", np.arange(20))
    _config({"web": {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, **stream}})
    with run_pages() as pages:
        assert ("is not known yet" in html(pages, "order")) == is_asked_for
    assert all(entry.range for entry in s3_bucket.log() if "shard" in entry.name)


@pytest.mark.nightly
def test_what_was_made_of_another_condition_makes_nothing_known(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "web")
    where = {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "local": str(streams / "node")}
    _config({"web": {**where, "selection": {"where": "id < 30"}}})
    assert run("select", "--config", "run.yaml").code == 0
    _config({"web": {**where, "selection": {"where": "id < 29"}}})
    with run_pages() as pages:
        assert "is not known yet" in html(pages, "order")
    _config({"web": {**where, "selection": {"where": "id < 30"}}})
    with run_pages() as pages:
        assert "is not known yet" not in html(pages, "order")


def test_ids_of_a_store_are_asked_for_also_where_the_stream_is_here(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "code")
    join = {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "key": "id", "prefix": "its_"}
    _config({"web": {"remote": "web", "selection": {"where": "id < 40"}, "join": {"more": join}}})
    with run_pages() as pages:
        for path in ("", "order"):
            assert "is not known yet" in html(pages, path)
        assert all(entry.range for entry in s3_bucket.log() if "shard" in entry.name)
        assert "Step 0" in html(pages, "order", force="1")
        assert "is not known yet" not in html(pages, "")


def test_lengths_of_a_store_are_asked_for(temporary: Path, s3_bucket: S3Bucket) -> None:
    with MDSWriter(out="tokens", columns={"tokens": "ndarray:uint16"}, size_limit="4kb") as writer:
        for number in range(80):
            writer.write({"tokens": np.arange(10 + number, dtype=np.uint16)})
    s3_bucket.put_all(Path("tokens"))
    where = {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "local": "node"}
    data = {"batch_size": 2, "train": {**where, "packing": {"column": "tokens", "capacity": 256}}}
    Path("run.yaml").write_text(json.dumps({"data": {"init_args": data}, "trainer": {"devices": 1}}))
    with run_pages() as pages:
        assert "is not known yet" in html(pages, "")
        assert not [name for name in s3_bucket.requests() if "shard" in name]
    assert run("lengths", "--config", "run.yaml").code == 0
    with run_pages() as pages:
        assert "Packs of the first epoch" in html(pages, "")


def test_the_machines_that_were_named_read_in_all_pages(streams: Path) -> None:
    mesh = {"class_path": "ModelParallelStrategy", "init_args": {"data_parallel_size": 6, "tensor_parallel_size": 2}}
    data = {"init_args": {"batch_size": 4, "train": {"remote": "web"}}}
    Path("run.yaml").write_text(json.dumps({"data": data, "trainer": {"devices": 1, "strategy": mesh}}))
    with run_pages() as pages:
        assert "would be refused" in html(pages, "")
    with run_pages(nodes=3, ranks_per_node=4) as pages:
        assert "would be refused" not in html(pages, "")
        assert "3 nodes of 4 ranks" in Elements.of(html(pages, "order")).text


@pytest.mark.nightly
def test_a_selection_that_is_kept_is_read_where_it_is(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "web")
    where = {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}, "selection": {"where": "id < 30"}}
    _config({"web": {**where, "local": str(streams / "node")}})
    assert run("select", "--config", "run.yaml").code == 0
    (kept,) = (streams / "node").rglob("selections/*.npy")
    ahead = time.time_ns() + 10**12  # so that reading it alone changes nothing
    os.utime(kept, ns=(ahead, kept.stat().st_mtime_ns))
    before, asked = snapshot(streams), len(s3_bucket.requests())
    with run_pages() as pages:
        assert "60 30 50.0%" in Elements.of(html(pages, "")).text
        assert "text 031" in html(pages, "s/0/samples", only="left-out", **{"from": "31"})
    assert snapshot(streams) == before
    assert kept.stat().st_atime_ns == ahead
    read = [entry for entry in s3_bucket.log()[asked:] if "shard" in entry.name and entry.method == "GET"]
    assert all(entry.range for entry in read)


def test_a_configuration_without_training_has_no_steps(streams: Path) -> None:
    Path("run.yaml").write_text(json.dumps({"data": {"init_args": {"batch_size": 2, "val": {"remote": "web"}}}}))
    with run_pages() as pages:
        assert "order" not in " ".join(Elements.of(html(pages, "")).values("a", "href"))
        assert "no data.train" in answer(pages, "order").data.decode()


def test_a_run_that_would_be_refused_is_told(streams: Path) -> None:
    _config({"web": {"remote": "web", "selection": {"where": "nothing > 3"}}})
    with run_pages() as pages:
        assert "would be refused" in html(pages, "")
        assert "text 003" in html(pages, "s/0/samples")


class Model(LightningModule):
    """Has weights, and looks at the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(batch["id"].float().unsqueeze(1))
        return predicted.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _train(steps: int, **config: Any) -> None:
    """Train on what ``run.yaml`` says, on one rank, and save ``run.ckpt``."""
    data = StreamingDataModule(
        train=StreamingConfig(streams={name: Stream(**one) for name, one in MIXED.items()}, **config), batch_size=8
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), datamodule=data)
    trainer.save_checkpoint("run.ckpt")


def test_where_a_checkpoint_stands_and_what_comes_next(streams: Path) -> None:
    _config(MIXED)
    _train(7)
    with run_pages(checkpoint="run.ckpt") as pages:
        found, order = Elements.of(html(pages, "checkpoint")), Elements.of(html(pages, "order"))
        assert pages.viewed.run is not None
        seen = {one.name: one.this_epoch for one in pages.viewed.run.seen("train")}
    told = run("state", "show", "run.ckpt", "--config", "run.yaml", "--json").json["loaders"]["train"]
    assert seen == {one["name"]: one["this_epoch"] for one in told["streams"]}
    assert sum(one or 0 for one in seen.values()) == 56
    assert "7 global step" in found.text or "global step 7" in found.text
    assert f"56 of {told['epoch_size']}" in found.text
    assert "resumes with step 7" in order.text
    shown = [one.partition("key=")[2] for one in order.values("a", "href") if "/find?" in one]
    traced = run("trace", "--config", "run.yaml", "--ckpt", "run.ckpt", "--step", 7, "--json").json["reads"]
    assert shown[: len(traced)] == [f"{one['key']['shard']}:{one['key']['sample_index']}" for one in traced]


@pytest.mark.nightly
def test_what_was_read_before_the_checkpoint_is_said_to_be(streams: Path) -> None:
    _config(MIXED)
    _train(7)
    with run_pages() as pages:
        assert "before the checkpoint" not in html(pages, "s/0/sample/1", when="1")
    # What the run read is what one from the beginning reads: on one rank, batches of 8.
    read = [
        one["key"]
        for step in range(7)
        for one in run(
            "trace", "--config", "run.yaml", "--ranks-per-node", 1, "--set", "batch_size=8", "--step", step, "--json"
        ).json["reads"]
    ]
    with run_pages(checkpoint="run.ckpt") as pages:
        reader = pages.viewed.streams[1].reader
        told = dict[int, int]()
        for number in range(40):
            text = Elements.of(html(pages, "s/1/sample/" + str(number), when="1")).text
            if found := re.search(r"It was read in this epoch, 0, before the checkpoint, at position (\d+)\.", text):
                told[number] = int(found[1])
    code = {
        reader.first_of(one["shard"]) + one["sample_index"]: one["position"] for one in read if one["stream"] == "code"
    }
    assert told == code
    assert 0 < len(told) < 40


@pytest.mark.nightly
def test_a_checkpoint_of_several_loaders_shows_them_all(streams: Path) -> None:
    _config(MIXED)
    _train(3)
    saved = torch.load("run.ckpt", weights_only=False)
    (state,) = [one for name, one in saved["callbacks"].items() if "StreamingState" in name]
    state["loaders"]["other"] = state["loaders"]["train"]
    state["samples_per_global_batch"]["other"] = 8
    torch.save(saved, "run.ckpt")
    for loader, counted in ((None, []), ("train", ["train"]), ("other", ["other"])):
        with run_pages(checkpoint="run.ckpt", loader=loader) as pages:
            found = Elements.of(html(pages, "checkpoint"))
            assert "train epoch 0" in found.text
            assert "other epoch 0" in found.text
            assert pages.viewed.run is not None
            seen = {name: pages.viewed.run.seen(name) for name in ("train", "other")}
            known = [name for name, streams in seen.items() if all(one.this_epoch is not None for one in streams)]
            assert known == counted
            assert ("--loader" in answer(pages, "order").data.decode()) == (loader is None)


def test_a_checkpoint_of_another_run_is_told_in_its_pages(streams: Path) -> None:
    _config(MIXED)
    _train(2)
    _config({"web": {"remote": "web"}})
    with run_pages(checkpoint="run.ckpt") as pages:
        for path in ("checkpoint", "order"):
            found = answer(pages, path)
            assert "<b>Error</b>" in found.data.decode()
        assert "would be refused" in html(pages, "")
        assert "text 003" in html(pages, "s/0/samples")


def test_packs_are_shown_with_their_tokens_and_far_steps_are_refused(temporary: Path) -> None:
    with MDSWriter(out="tokens", columns={"tokens": "ndarray:uint16"}, size_limit="4kb") as writer:
        for number in range(80):
            writer.write({"tokens": np.arange(10 + number, dtype=np.uint16)})
    data = {"batch_size": 2, "train": {"remote": "tokens", "packing": {"column": "tokens", "capacity": 256}}}
    Path("run.yaml").write_text(json.dumps({"data": {"init_args": data}, "trainer": {"devices": 1}}))
    with run_pages() as pages:
        front = Elements.of(html(pages, "")).text
        assert "Packs of the first epoch" in front
        assert re.search(r"fill \d\d\.\d\d%", front)
        assert "tokens 3,960" in front
        assert "tokens" in Elements.of(html(pages, "order")).text
        assert "is far" in html(pages, "order", step="9" * 15)
        assert pages.viewed.streams[0].title == "train: tokens"


def test_bad_checkpoints_are_told_before_a_page_is(streams: Path) -> None:
    _config(MIXED)
    Path("bad.ckpt").write_bytes(b"not a checkpoint")
    for name, words in (("missing.ckpt", "missing.ckpt"), ("bad.ckpt", "bad.ckpt")):
        found = run("view", "--config", "run.yaml", "--ckpt", name)
        assert found.code == 2
        assert words in found.err
        assert found.out == ""
