"""``lightning-streaming view DATASET``: its pages, made without a server."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_streaming.tools.stored import sample_reader
from lightning_streaming.tools.stored.stored_dataset import temporary_caches
from lightning_streaming.tools.viewing import shown_values
from lightning_streaming.tools.viewing.server import Pages
from lightning_streaming.tools.viewing.shown_values import TEXT_PAGE
from lightning_streaming.writing.writers import JSONWriter, MDSWriter
from tests.tools.running import run, write_texts
from tests.tools.viewing.asking import HOSTILE, Elements, answer, html, pages_of, run_pages, snapshot, write_rich


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rich") / "data"
    write_rich(directory)
    return directory


@pytest.fixture
def pages(rich: Path) -> Pages:
    return pages_of(rich)


ALL_PAGES = ["s/0/", "s/0/samples", "s/0/sample/7", "s/0/columns", "s/0/shards", "find"]


@pytest.mark.parametrize("path", ALL_PAGES)
def test_a_page_has_no_script_no_inline_style_and_no_address_elsewhere(pages: Pages, path: str) -> None:
    found = Elements.of(html(pages, path, key="1:2:3"))
    assert "script" not in [tag for tag, _ in found.tags]
    assert not [told for _, told in found.tags if "style" in told or any(name.startswith("on") for name in told)]
    for tag, attribute in (("a", "href"), ("img", "src"), ("link", "href"), ("form", "action"), ("audio", "src")):
        assert all(one.startswith(("/token/", "#")) for one in found.values(tag, attribute))


@pytest.mark.parametrize("path", ["s/0/samples", "s/0/sample/7"])
def test_a_hostile_text_is_shown_as_text(pages: Pages, path: str) -> None:
    text = html(pages, path)
    assert "<script>" not in text
    assert "<img src=x" not in text
    assert HOSTILE in Elements.of(text).text


def test_hostile_names_of_columns_and_files_are_shown_as_text(tmp_path: Path) -> None:
    out = tmp_path / "<img src=x onerror=alert(1)>"
    with MDSWriter(out=str(out), columns={HOSTILE: "str", "\u202e\n\0": "int"}) as writer:
        writer.write({HOSTILE: "a", "\u202e\n\0": 1})
    for path in ALL_PAGES[:-1]:
        text = html(pages_of(out), path.replace("/7", "/0"))
        assert "<script>" not in text
        assert "<img src=x" not in text
        assert "\u202e" not in text
    assert HOSTILE in Elements.of(html(pages_of(out), "s/0/sample/0")).text


def test_the_page_of_a_sample_shows_each_value_as_what_it_is(pages: Pages) -> None:
    text = html(pages, "s/0/sample/7")
    found = Elements.of(text)
    assert "caption 7" in found.text
    assert "0.875" in found.text
    assert "12 × 20 × 3" in found.text
    assert "WAV" in found.text
    assert "3c 73 76 67" in found.text  # an SVG file is bytes
    assert "deep" in found.text
    assert len(found.values("img", "src")) == 3
    assert text.count("<polyline") == 1


def test_pictures_and_sounds_are_given_as_what_they_are_and_nothing_else_is(pages: Pages) -> None:
    names = ["caption", "drawn", "picture", "pixels", "raw", "score", "sound", "tree", "wave"]
    kinds = {}
    for column, name in enumerate(names):
        found = pages.respond(_asked(f"s/0/file/7/{column}/0"))
        kinds[name] = None if found is None else (found.content_type, found.data[:4])
    assert kinds == {
        **dict.fromkeys(names),
        "drawn": ("image/png", b"\x89PNG"),
        "picture": ("image/jpeg", kinds["picture"] and kinds["picture"][1]),
        "pixels": ("image/png", b"\x89PNG"),
        "sound": ("audio/wav", b"RIFF"),
    }
    assert pages.respond(_asked("s/0/file/7/2/1")) is None
    assert pages.respond(_asked("s/0/file/7/99/0")) is None


def _asked(path: str) -> Any:
    from lightning_streaming.tools.viewing.pages import Request

    return Request(root="/token/", path=path, query={})


def test_samples_are_listed_page_by_page(pages: Pages) -> None:
    first, last = Elements.of(html(pages, "s/0/samples")), Elements.of(html(pages, "s/0/samples", **{"from": "24"}))
    assert "0 to 11 of 30" in first.text
    assert "24 to 29 of 30" in last.text
    assert "/token/s/0/samples?from=12" in first.values("a", "href")
    assert not [one for one in last.values("a", "href") if one.endswith("from=36")]
    assert "29 to 29 of 30" in Elements.of(html(pages, "s/0/samples", **{"from": "9" * 18})).text


def test_what_asks_for_no_number_is_answered_with_the_first(pages: Pages) -> None:
    for text in ("", "-3", "x", "1e9", "٣", "9" * 40):
        assert "0 to 11 of 30" in Elements.of(html(pages, "s/0/samples", **{"from": text})).text


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("7", "s/0/sample/7"),
        (" 29 ", "s/0/sample/29"),
        ("0:3", "s/0/sample/3"),
        ("data:0:3", "s/0/sample/3"),
        ("data:7", "s/0/sample/7"),
        ("0:0:3", "s/0/sample/3"),
        ('{"shard": 0, "sample_index": 4}', "s/0/sample/4"),
        ('{"stream": "data", "shard": 0, "sample_index": 4, "epoch": 1}', "s/0/sample/4"),
        ('{"stream": "0", "shard": 0, "sample_index": 4, "position": 2, "shuffle_seed": 3}', "s/0/sample/4"),
    ],
)
def test_a_sample_is_found_by_what_names_it(pages: Pages, typed: str, found: str) -> None:
    given = answer(pages, "find", key=typed)
    assert given.status == 303
    assert given.location == f"/token/{found}"


_REST = '"epoch": 1, "position": 2, "shuffle_seed": 3}'
_KEY_BEFORE = f'{{"stream": "0", "shard": 1, "sample_index": -1, {_REST}'
_KEY_OF_NO_SHARD = f'{{"stream": "0", "shard": -1, "sample_index": 0, {_REST}'


@pytest.mark.parametrize(
    "typed",
    ["", "30", "99:0", "0:999", "x", "{", "[1]", '{"stream": 3}', "9" * 30, HOSTILE, _KEY_BEFORE, _KEY_OF_NO_SHARD],
)
def test_what_names_no_sample_is_told(pages: Pages, typed: str) -> None:
    found = Elements.of(html(pages, "find", key=typed))
    assert "No such sample" in found.text
    assert "script" not in [tag for tag, _ in found.tags]


@pytest.mark.parametrize("typed", ["data2:0:5", "data2:5", '{"stream": "data2", "shard": 0, "sample_index": 5}'])
def test_a_stream_that_is_not_looked_at_is_told_with_those_that_are(pages: Pages, typed: str) -> None:
    text = Elements.of(html(pages, "find", key=typed)).text
    assert "there is no stream 'data2'; there is data, or leave the name out" in text


@pytest.mark.parametrize("path", ["s/0/sample/30", "s/1/", "s/0/file/30/0/0"])
def test_what_is_not_there_is_not_found(pages: Pages, path: str) -> None:
    assert answer(pages, path).status == 404


@pytest.mark.parametrize(
    "path", ["s/0", "s/x/", "s/0/sample/-1", "../s/0/", "s/0/../0/", "order", "checkpoint", "s/٣/"]
)
def test_other_paths_are_no_pages(pages: Pages, path: str) -> None:
    assert pages.respond(_asked(path)) is None


def test_columns_are_told_from_samples_of_all_shards(pages: Pages) -> None:
    found = Elements.of(html(pages, "s/0/columns"))
    shards = pages.viewed.streams[0].reader.index.shards
    assert "From all 30 samples." in found.text
    assert len(shards) > 1
    assert "image/jpeg" in found.text
    assert found.text.count("Values of score") >= 1


def test_shards_are_listed_with_their_sizes(pages: Pages) -> None:
    found = Elements.of(html(pages, "s/0/shards"))
    index = pages.viewed.streams[0].reader.index
    assert all(shard.raw_data.basename in found.text for shard in index.shards)
    assert f"/token/s/0/samples?from={index.shards[0].samples}" in found.values("a", "href")


def test_a_long_text_is_shown_page_by_page(tmp_path: Path) -> None:
    text = "".join(f"{number:07d} " for number in range(TEXT_PAGE // 2))
    with MDSWriter(out=str(tmp_path), columns={"text": "str"}) as writer:
        writer.write({"text": text})
    pages = pages_of(tmp_path)
    first = html(pages, "s/0/sample/0")
    assert len(first) < 2 * TEXT_PAGE
    shown, path, query = "", "s/0/sample/0", dict[str, str]()
    for _ in range(len(text) // TEXT_PAGE + 1):
        page = html(pages, path, **query)
        shown += re.search(r'<pre class="text">(.*?)</pre>', page, re.DOTALL)[1]  # type: ignore[index]
        following = re.search(r'column=(\d+)&amp;start=(\d+)">next|column=(\d+)&start=(\d+)">next', page)
        if following is None:
            break
        column, start = [one for one in following.groups() if one is not None]
        query = {"column": column, "start": start}
    assert shown == text


def test_a_deep_and_a_wide_tree_are_cut(tmp_path: Path) -> None:
    deep: Any = "the end"
    for _ in range(200):
        deep = [deep]
    with MDSWriter(out=str(tmp_path), columns={"deep": "json", "wide": "json"}) as writer:
        writer.write({"deep": deep, "wide": {str(number): [[number] * 10] * 10 for number in range(2000)}})
    text = html(pages_of(tmp_path), "s/0/sample/0")
    assert "the end" not in text
    assert "1,950 more" in text
    assert len(text) < 400_000


def test_a_huge_sample_is_read_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_SAMPLE_BYTES", 5000)
    with MDSWriter(out=str(tmp_path), columns={"values": "ndarray:int64", "id": "int"}) as writer:
        for number in range(4):
            writer.write({"values": np.arange(10 if number % 2 else 2000), "id": number})
    pages = pages_of(tmp_path)
    found = Elements.of(html(pages, "s/0/samples"))
    assert found.text.count("this sample takes") == 2
    assert "/token/s/0/sample/2?force=1" in found.values("a", "href")
    assert "2,000" not in Elements.of(html(pages, "s/0/sample/2")).text
    assert "2,000" in Elements.of(html(pages, "s/0/sample/2", force="1")).text
    assert "left out: this sample takes" in Elements.of(html(pages_of(tmp_path), "s/0/columns")).text


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def test_what_can_run_code_is_decoded_when_that_is_allowed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MDSWriter(out=str(tmp_path / "data"), columns={"a": "pkl", "id": "int"}) as writer:
        writer.write({"a": pickle.dumps(Bomb()), "id": 3})
    for path in ("s/0/", "s/0/samples", "s/0/sample/0", "s/0/columns"):
        html(pages_of(tmp_path / "data"), path)
    assert not Path("exploded").exists()
    assert "--allow-unsafe-types" in html(pages_of(tmp_path / "data"), "s/0/sample/0")
    html(pages_of(tmp_path / "data", allow_unsafe_types=True), "s/0/sample/0")
    assert Path("exploded").exists()


class Broken(dict[str, int]):
    """Of a class that has changed since it was pickled."""

    def __len__(self) -> int:
        raise AttributeError("'Broken' object has no attribute '_size'")

    def __repr__(self) -> str:
        return f"{len(self)} entries"


def test_of_a_value_whose_own_code_fails_that_is_told_and_the_others_are_shown(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"a": "pkl", "id": "int"}) as writer:
        for number in range(3):
            writer.write({"a": Broken(), "id": number})
    pages = pages_of(tmp_path, allow_unsafe_types=True)
    for path in ("s/0/samples", "s/0/sample/2", "s/0/columns"):
        text = Elements.of(html(pages, path)).text
        assert "AttributeError: 'Broken' object has no attribute '_size'" in text
        assert "shard 0, index 2" in text or path != "s/0/samples"
    assert pages.respond(_asked("s/0/file/2/0/0")) is None


def test_a_dataset_of_nothing_but_shut_columns_is_shown(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"a": "pkl"}) as writer:
        writer.write({"a": {1: 2}})
    for path in ("s/0/", "s/0/samples", "s/0/sample/0", "s/0/columns"):
        html(pages_of(tmp_path), path)


def test_damage_is_told_in_the_page_and_the_rest_is_shown(tmp_path: Path) -> None:
    index = write_texts(tmp_path, 40)
    shard = tmp_path / index.shards[1].raw_data.basename
    data = bytearray(shard.read_bytes())
    data[4:12] = b"\xff" * 8
    shard.write_bytes(data)
    (tmp_path / index.shards[2].raw_data.basename).unlink()
    pages = pages_of(tmp_path)
    text = Elements.of(html(pages, "s/0/samples")).text
    first = index.shards[0].samples
    assert "text 000" in text
    assert "could not be read" in Elements.of(html(pages, f"s/0/sample/{first}")).text
    assert "could not be read" in Elements.of(html(pages, f"s/0/sample/{first + index.shards[1].samples}")).text
    assert "left out" in Elements.of(html(pages, "s/0/columns")).text


@pytest.mark.parametrize("how", [{"compression": "zstd"}, {"compression": "gz"}])
def test_compressed_shards_are_unpacked_elsewhere(tmp_path: Path, how: dict[str, Any]) -> None:
    write_texts(tmp_path / "data", **how)
    before = snapshot(tmp_path)
    pages = pages_of(tmp_path / "data")
    for path in ("s/0/samples", "s/0/sample/24", "s/0/columns", "s/0/shards"):
        text = html(pages, path)
        assert "could not be read" not in text
    assert "text 024" in html(pages, "s/0/sample/24")
    pages.viewed.close()
    assert snapshot(tmp_path) == before


def test_a_shard_that_takes_much_to_unpack_is_unpacked_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_UNPACKED", 100)
    write_texts(tmp_path, compression="zstd")
    pages = pages_of(tmp_path)
    assert "must be unpacked" in html(pages, "s/0/sample/3")
    assert "text 003" in html(pages, "s/0/sample/3", force="1")
    assert "text 004" in html(pages, "s/0/sample/4")  # of the shard that is open now
    pages.viewed.close()


def test_lines_of_json_are_read_alone_too(tmp_path: Path) -> None:
    with JSONWriter(out=str(tmp_path), columns={"id": "int", "text": "str"}, size_limit=200) as writer:
        for number in range(20):
            writer.write({"id": number, "text": f"line {number}"})
    assert "line 17" in html(pages_of(tmp_path), "s/0/sample/17")


def test_parts_of_a_page_are_escaped_by_nothing_but_the_templates() -> None:
    shown = shown_values.shown_value({"<b>": ["<i>"]})
    assert shown.tree is not None
    assert shown.tree.items[0].name == "<b>"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "either DATASET"),
        (["data", "--config", "run.yaml"], "either DATASET"),
        (["missing"], "not a directory"),
        (["data", "--ckpt", "x"], "--ckpt needs a run"),
        (["data", "--nodes", "2"], "--nodes needs a run"),
        (["data", "--set", "a=1"], "--set changes the data of a run"),
        (["--config", "run.yaml", "--loader", "x"], "give --ckpt"),
        (["--config", "run.yaml", "--block-length", "8"], "--block-length"),
        (["data", "--port", "70000"], "must be a port"),
    ],
)
def test_what_cannot_be_shown_is_told_before_a_page_is(temporary: Path, given: list[str], words: str) -> None:
    write_texts(temporary.parent / "data")
    found = run("view", *given)
    assert found.code == 2
    assert words in found.err
    assert found.out == ""


def _parquet(directory: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": range(40), "text": [f"row {number}" for number in range(40)], "tags": [["a"]] * 40})
    pyarrow.parquet.write_table(table, directory / "part.parquet", row_group_size=10)


def _tar(directory: Path) -> None:
    with tarfile.open(directory / "part.tar", "w") as tar:
        for number in range(40):
            for suffix, data in (("jpg", _jpeg(number)), ("txt", f"row {number}".encode()), ("json", b'{"a": [1]}')):
                member = tarfile.TarInfo(f"{number:04}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _jpeg(number: int) -> bytes:
    drawn = io.BytesIO()
    Image.new("RGB", (8, 6), (number, 9, 9)).save(drawn, "jpeg")
    return drawn.getvalue()


@pytest.mark.parametrize(("kind", "write"), [("parquet", _parquet), ("webdataset", _tar)])
def test_data_of_another_format_is_shown_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, write: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "run's own"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    before = snapshot(tmp_path)
    with temporary_caches():
        pages = pages_of(tmp_path / "data", shard_format=kind)
        for path in ("s/0/", "s/0/samples", "s/0/columns", "s/0/shards"):
            assert "could not be read" not in html(pages, path)
        assert "row 37" in html(pages, "s/0/sample/37")
        if kind == "webdataset":
            pictures = [answer(pages, src.removeprefix("/token/")) for src in _pictures(html(pages, "s/0/sample/37"))]
            assert [one.data for one in pictures] == [_jpeg(37)]
        pages.viewed.close()
    assert snapshot(tmp_path) == before
    assert os.environ["LIGHTNING_STREAMING_CACHE"] == str(tmp_path / "run's own")


def _pictures(text: str) -> list[str]:
    return Elements.of(text).values("img", "src")


def _numbers(page: str) -> list[int]:
    """Return the numbers of the samples in a list, in order."""
    return [int(number) for number in re.findall(r">Sample ([0-9]+)</a>", page)]


def test_a_list_is_sorted_filtered_and_opened_at_random(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int", "text": "str", "x": "ndarray:float32"}) as writer:
        for number in range(130):
            values = np.zeros(1 + number % 5, np.float32)
            writer.write({"id": -number % 7, "text": "even" if number % 2 == 0 else "odd", "x": values})
    pages = pages_of(tmp_path)
    shown = html(pages, "s/0/samples", sort="id")
    assert sorted(range(12), key=lambda number: (-number % 7, number)) == _numbers(shown)
    assert 'aria-sort="ascending"' in shown
    assert _numbers(html(pages, "s/0/samples", sort="text", down="1"))[:6] == [1, 3, 5, 7, 9, 11]
    assert [number % 5 for number in _numbers(html(pages, "s/0/samples", sort="x"))[:3]] == [0, 0, 0]
    shown = html(pages, "s/0/samples", match="EVEN")
    assert _numbers(shown) == list(range(0, 100, 2))
    assert "50 of these 100 samples" in shown
    assert "match=EVEN" in shown, "the next page keeps the filter"
    assert _numbers(html(pages, "s/0/samples", match="even", **{"from": "100"})) == list(range(100, 130, 2))
    target = answer(pages, "s/0/samples", **{"from": "random"}).location
    assert target is not None
    start = int(target.rpartition("=")[2])
    assert 0 <= start < 130
    assert start % 12 == 0


def test_labels_are_counted_by_class(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"label": "int"}) as writer:
        for number in range(60):
            writer.write({"label": number % 3})
    assert "Most frequent values of label" in Elements.of(html(pages_of(tmp_path), "s/0/columns")).text


def test_numbers_that_no_chart_can_draw_have_no_bars(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"label": "str_int"}) as writer:
        for number in range(30):
            writer.write({"label": 10**400 if number % 2 else 1})
    shown = Elements.of(html(pages_of(tmp_path), "s/0/columns")).text
    assert "too large for the chart" in shown
    assert "Most frequent" not in shown


class Silent:
    """An object without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_search_passes_values_without_a_text(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"a": "pkl", "id": "int"}) as writer:
        for number in range(3):
            writer.write({"a": [Silent()], "id": number})
    assert _numbers(html(pages_of(tmp_path, allow_unsafe_types=True), "s/0/samples", match="2")) == [2]


def test_a_sample_after_decode_and_transform_is_next_to_the_stored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    with MDSWriter(out="data", columns={"id": "int", "image": "jpeg"}) as writer:
        for number in range(4):
            writer.write({"id": number, "image": Image.new("RGB", (8, 6), (9, 9, 9))})
    Path("prepared_module.py").write_text(
        "from lightning_streaming import StreamingDataModule\n"
        "class Data(StreamingDataModule):\n"
        "    def transform(self, sample, stage, rng):\n"
        "        if sample['id'] == 3: raise KeyError('no <such> thing')\n"
        "        return {'doubled': 2 * sample['id'], 'pixels': sample['image'], 'stage': stage}\n"
    )
    train = {"remote": "data", "decode": {"columns": {"image": "array"}}}
    data = {"class_path": "prepared_module.Data", "init_args": {"batch_size": 2, "train": train}}
    Path("run.yaml").write_text(json.dumps({"data": data}))
    with run_pages() as pages:
        assert "doubled" not in html(pages, "s/0/sample/2")
        shown = Elements.of(html(pages, "s/0/sample/2", prepared="1"))
        for words in ("As stored", "After decode and transform", "doubled", "stage"):
            assert words in shown.text
        (image,) = (source for source in shown.values("img", "src") if "prepared=1" in source)
        path = image.removeprefix("/token/").partition("?")[0]
        assert answer(pages, path, prepared="1").data.startswith(b"\x89PNG")
        assert "KeyError: 'no <such> thing'" in Elements.of(html(pages, "s/0/sample/3", prepared="1")).text
