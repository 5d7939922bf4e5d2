"""The page of a batch: which samples it shows, of what, and what is read for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

from lightning_streaming.tools.viewing import sample_pages
from lightning_streaming.tools.viewing.server import Pages
from lightning_streaming.writing.writers import MDSWriter
from tests.servers.stores import S3Bucket
from tests.tools.running import run, write_texts
from tests.tools.viewing.asking import Elements, html, run_pages, snapshot

MIXED: dict[str, Any] = {"web": {"remote": "web", "proportion": 0.75}, "code": {"remote": "code", "proportion": 0.25}}


@pytest.fixture
def streams(temporary: Path) -> Path:
    """A directory with two streams, and a run of two ranks that mixes them, to run in."""
    write_texts("web", 60)
    write_texts("code", 40)
    _config(MIXED)
    return Path.cwd()


def _config(streams: dict[str, Any], **trainer: Any) -> None:
    data = {"batch_size": 4, "train": {"streams": streams}}
    written = {"data": {"init_args": data}, "trainer": {"devices": 2, "max_steps": 20, **trainer}}
    Path("run.yaml").write_text(json.dumps(written))


def _traced(step: int, *more: object) -> list[dict[str, Any]]:
    reads: list[dict[str, Any]] = run("trace", "--config", "run.yaml", "--step", step, "--json", *more).json["reads"]
    return reads


def _key(read: dict[str, Any]) -> str:
    return ":".join(str(read["key"][name]) for name in ("stream", "shard", "sample_index"))


_SHOWN = re.compile(r"\b((?:web|code|tokens|0):\d+:\d+)\b")


def _keys(text: str) -> list[str]:
    """The keys in a page, in its order."""
    return _SHOWN.findall(Elements.of(text).text)


def test_the_samples_of_a_step_are_those_of_trace_rank_by_rank(streams: Path) -> None:
    with run_pages() as pages:
        text = html(pages, "batches", step="3")
        found = Elements.of(text)
        traced = _traced(3)
        assert _keys(text) == [_key(read) for read in traced]
        numbers = {}
        for read in traced:
            reader = pages.viewed.streams[["web", "code"].index(read["key"]["stream"])].reader
            numbers[_key(read)] = reader.first_of(read["key"]["shard"]) + read["key"]["sample_index"]
    for read in traced:
        place, number = ["web", "code"].index(read["key"]["stream"]), numbers[_key(read)]
        assert f"/token/s/{place}/sample/{number}" in found.values("a", "href")
        assert f"Sample {number} place {read['place']} {_key(read)} id {number} text text {number:03}" in found.text
    ranks = re.split(r"Rank \d epoch 0, batch 3", found.text)
    assert [len(_SHOWN.findall(rank)) for rank in ranks] == [0, 4, 4]


def test_one_rank_is_chosen(streams: Path) -> None:
    with run_pages() as pages:
        text = html(pages, "batches", step="3", rank="1")
    assert _keys(text) == [_key(read) for read in _traced(3, "--rank", 1)]
    assert "Rank 0" not in Elements.of(text).text
    chosen = [told for tag, told in Elements.of(text).tags if tag == "option" and "selected" in told]
    assert len(chosen) == 1
    assert "/token/batches?step=4&rank=1" in Elements.of(text).values("a", "href")


def test_steps_lead_to_each_other_up_to_both_ends_of_the_run(streams: Path) -> None:
    def turns(pages: Pages, step: int) -> set[str]:
        return {
            one for one in Elements.of(html(pages, "batches", step=str(step))).values("a", "href") if "s?step=" in one
        }

    with run_pages() as pages:
        assert turns(pages, 0) == {"/token/batches?step=1"}
        assert turns(pages, 7) == {"/token/batches?step=6", "/token/batches?step=8"}
        assert turns(pages, 19) == {"/token/batches?step=18"}


@pytest.mark.parametrize(
    ("asked", "words"), [({"step": "20"}, "max_steps=20"), ({"step": "3", "rank": "9"}, "there is no rank 9")]
)
def test_what_is_not_there_is_told_beside_what_was_typed(streams: Path, asked: dict[str, str], words: str) -> None:
    with run_pages() as pages:
        found = Elements.of(html(pages, "batches", **asked))
    assert words in found.text
    typed = {told["name"]: told["value"] for tag, told in found.tags if tag == "input" and told["name"] in asked}
    assert typed == asked


def test_all_samples_of_a_large_batch_are_shown_page_by_page(streams: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_pages, "_PER_BATCH_PAGE", 3)
    shown, asked = list[str](), {"step": "3"}
    with run_pages() as pages:
        for first in (0, 3, 6):
            text = html(pages, "batches", **asked)
            assert f"8 samples, of which {first + 1} to {min(first + 3, 8)} are here" in Elements.of(text).text
            shown += _keys(text)
            further = [one for one in Elements.of(text).values("a", "href") if one.endswith(f"from={first + 3}")]
            asked = dict(parse_qsl(urlsplit(further[0]).query)) if further else {}
        assert not asked
        last = Elements.of(html(pages, "batches", step="3", **{"from": "6"})).text
    counts = Counter(read["key"]["stream"] for read in _traced(3, "--rank", 1))
    assert " ".join(f"{name} {counts[name]}" for name in MIXED if counts[name]) in last  # of the whole batch
    assert shown == [_key(read) for read in _traced(3)]


def test_of_very_many_samples_those_of_one_rank_are_shown(streams: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_streaming.tools.viewing.viewed_run._MAX_READS", 7)
    with run_pages() as pages:
        text, other = html(pages, "batches", step="3"), html(pages, "batches", step="3", rank="1")
    assert _keys(text) == [_key(read) for read in _traced(3, "--rank", 0)]
    assert "of rank 0 alone" in Elements.of(text).text
    assert _keys(other) == [_key(read) for read in _traced(3, "--rank", 1)]
    assert "alone" not in Elements.of(other).text.partition("These pages")[0]


def test_a_step_of_several_batches_shows_them_one_after_another(streams: Path) -> None:
    _config(MIXED, accumulate_grad_batches=2)
    with run_pages() as pages:
        text = Elements.of(html(pages, "batches", step="1")).text
    assert re.findall(r"Rank (\d) epoch 0, batch (\d)", text) == [("0", "2"), ("1", "2"), ("0", "3"), ("1", "3")]
    assert sorted(_SHOWN.findall(text)) == sorted(_key(read) for read in _traced(1))


def test_ranks_that_read_the_same_are_named_together(streams: Path) -> None:
    _config(MIXED, devices=2)
    data = json.loads(Path("run.yaml").read_text())
    data["data"]["init_args"]["train"]["replication"] = 2
    Path("run.yaml").write_text(json.dumps(data))
    with run_pages() as pages:
        assert "Rank 0 to 1 epoch" in Elements.of(html(pages, "batches")).text


def test_every_page_of_a_run_leads_to_the_batches_and_each_step_to_its_own(streams: Path) -> None:
    with run_pages() as pages:
        for path in ("", "order", "s/0/samples"):
            assert "/token/batches" in Elements.of(html(pages, path)).values("a", "href")
        order = Elements.of(html(pages, "order", step="3", steps="2", rank="1"))
        assert {f"/token/batches?step={step}&rank=1" for step in (3, 4)} <= set(order.values("a", "href"))
        sample = Elements.of(html(pages, "s/0/sample/5", when="1"))
        (batch,) = [one for one in sample.values("a", "href") if "batches?step=" in one]
        asked = dict(parse_qsl(urlsplit(batch).query))
        assert "/token/s/0/sample/5" in Elements.of(html(pages, "batches", **asked)).values("a", "href")


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("pack", "capacity"),
    [({"column": "tokens", "capacity": 256}, 256), ({"column": "tokens", "tokens": 300}, 300)],
)
def test_documents_are_shown_pack_by_pack(temporary: Path, pack: dict[str, Any], capacity: int) -> None:
    with MDSWriter(out="tokens", columns={"tokens": "ndarray:uint16"}, size_limit="4kb") as writer:
        for number in range(80):
            writer.write({"tokens": np.arange(10 + number, dtype=np.uint16)})
    name = "packing" if "capacity" in pack else "token_budget"
    data = {"train": {"remote": "tokens", name: pack}, **({"batch_size": 2} if name == "packing" else {})}
    Path("run.yaml").write_text(json.dumps({"data": {"init_args": data}, "trainer": {"devices": 1}}))
    with run_pages() as pages:
        text = Elements.of(html(pages, "batches", step="1")).text
    traced = _traced(1)
    assert _SHOWN.findall(text) == [_key(read) for read in traced]
    for position in dict.fromkeys(read["packing"]["position"] for read in traced):
        parts = [read["packing"] for read in traced if read["packing"]["position"] == position]
        tokens = sum(part["stop"] - part["start"] for part in parts)
        documents = "1 document" if len(parts) == 1 else f"{len(parts)} documents"
        place = next(read["place"] for read in traced if read["packing"]["position"] == position)
        assert f"Pack {position} place {place}: {documents}, {tokens} of {capacity} tokens" in text
    assert all(f"tokens {read['packing']['start']} to {read['packing']['stop'] - 1}" in text for read in traced)


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps"])
def test_of_packs_of_very_many_documents_those_of_one_rank_are_shown(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr("lightning_streaming.tools.viewing.viewed_run._MAX_READS", 20)
    with MDSWriter(out="tokens", columns={"tokens": "ndarray:uint16"}, size_limit="4kb") as writer:
        for _ in range(400):
            writer.write({"tokens": np.arange(10, dtype=np.uint16)})
    data = {"batch_size": 1, "train": {"remote": "tokens", "packing": {"column": "tokens", "capacity": 200}}}
    trainer: dict[str, Any] = {"devices": 4, "max_epochs": 1}

    def write() -> None:
        Path("run.yaml").write_text(json.dumps({"data": {"init_args": data}, "trainer": trainer}))

    write()
    with run_pages() as pages:
        assert pages.viewed.run is not None
        steps = len(pages.viewed.run.traced().steps.early[0])
    trainer |= {limit: 1 if limit == "max_epochs" else steps, "max_epochs": 1 if limit == "max_epochs" else None}
    write()
    with run_pages() as pages:
        assert pages.viewed.run is not None
        last = pages.viewed.run.step(steps - 1, None)
        assert last.rank == 0
        assert {read.rank for read in last.reads} == {0}
        assert not last.has_next
        planned: Any = pages.viewed.run.traced().steps.later
        assert planned.cache_info().misses == 0  # no epoch after the first


def test_of_a_store_only_ranges_are_read_and_nothing_is_written(streams: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(streams / "web")
    _config({"web": {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}}})
    before = snapshot(streams)
    with run_pages() as pages:
        text = html(pages, "batches")
    assert len(_keys(text)) == 8
    assert "testing-secret" not in text
    asked = [entry for entry in s3_bucket.log() if "shard" in entry.name]
    assert all(entry.range for entry in asked)
    assert snapshot(streams) == before


def test_what_takes_much_is_read_for_the_whole_page_when_that_is_asked_for(
    streams: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_streaming.tools.stored.sample_reader._MAX_FETCHED", 100)
    write_texts("packed", 60, compression="zstd")
    s3_bucket.put_all(Path("packed"))
    _config({"web": {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}}})
    with run_pages() as pages:
        found = Elements.of(html(pages, "batches", step="3", rank="1"))
        assert found.text.count("must be fetched") == 4
        assert not [name for name in s3_bucket.requests() if "shard" in name]
        (link,) = [one for one in found.values("a", "href") if "force=samples" in one]
        asked = dict(parse_qsl(urlsplit(link).query))
        assert asked == {"step": "3", "rank": "1", "from": "0", "force": "samples"}
        text = Elements.of(html(pages, "batches", **asked)).text
        assert "must be fetched" not in text
        assert all(f"text {number:03}" in text for number in map(int, re.findall(r"Sample (\d+) place", text)))


def test_shards_of_all_streams_are_much_together(
    streams: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {}
    for name in ("web", "code"):
        write_texts(f"packed {name}", 60, compression="zstd")
        for path in Path(f"packed {name}").iterdir():
            s3_bucket.put(f"{name}/{path.name}", path.read_bytes())
            sizes[f"{name}/{path.name}"] = path.stat().st_size
    _config({one: {"remote": f"{s3_bucket.url}/{one}", "storage": {"options": s3_bucket.options}} for one in MIXED})
    largest = max(size for name, size in sizes.items() if "shard" in name)
    monkeypatch.setattr("lightning_streaming.tools.stored.sample_reader._MAX_FETCHED", largest)
    with run_pages() as pages:
        text = html(pages, "batches", step="3")
    assert {key.partition(":")[0] for key in _keys(text)} == {"web", "code"}
    fetched = {name for name in s3_bucket.requests() if "shard" in name}
    assert 0 < sum(sizes[name] for name in fetched) <= largest
    assert "in addition to other samples of this page" in text


def test_a_bad_sample_is_told_and_so_is_a_stream_that_is_gone(streams: Path) -> None:
    with run_pages() as pages:
        html(pages, "batches", step="3")
        (Path("web") / "index.json").rename("web.json")
        shard = pages.viewed.streams[1].reader.index.shards[0].raw_data.basename
        (Path("code") / shard).unlink()
        pages.viewed.streams[0]._reader = None
        pages.viewed.streams[1]._reader = None
        found = [Elements.of(html(pages, "batches", step=str(step))) for step in range(20)]
        read = [_traced_in(one) for one in found]
    assert all(problem for page in read for key, problem in page.items() if key.startswith("web:"))
    assert all(problem == key.startswith("code:0:") for page in read for key, problem in page.items() if key[0] == "c")
    assert {key.split(":")[1] for page in read for key in page if key[0] == "c"} > {"0"}


def test_a_stream_that_cannot_be_unpacked_leaves_the_others_alone(
    streams: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts("packed", 60, compression="zstd")
    _config({"web": {"remote": "packed"}, "code": {"remote": "code"}})
    with run_pages() as pages:
        html(pages, "batches", step="0")
        pages.viewed.streams[0].reader.close()
        pages.viewed.streams[0]._reader = None
        monkeypatch.setattr("tempfile.tempdir", str(streams / "gone"))
        text = html(pages, "batches", step="3")
    problems = _traced_in(Elements.of(text))
    assert {key.partition(":")[0] for key in problems} == {"web", "code"}
    assert all(problem == key.startswith("web:") for key, problem in problems.items())
    assert "No such file or directory" in text


def _traced_in(page: Elements) -> dict[str, bool]:
    """Of each card whether it tells of a problem."""
    text, found = page.text, {}
    places = [*_SHOWN.finditer(text)]
    for place, match in enumerate(places):
        stop = places[place + 1].start() if place + 1 < len(places) else len(text)
        found[match[1]] = " text text " not in text[match.end() : stop]
    return found
