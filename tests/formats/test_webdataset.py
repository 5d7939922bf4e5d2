from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_streaming.cache.sources import unpack
from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    IndexFormatError,
    ObjectNotFoundError,
    SampleIndexError,
    ShardCorruptError,
    StreamingError,
)
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import check_shard, open_shard, unsafe_columns
from lightning_streaming.formats.webdataset import WebDatasetFormat
from tests.formats.tar_data import (
    as_plain,
    described,
    image_sample,
    ours,
    text_samples,
    theirs,
    write_members,
    write_samples,
)
from tests.helpers import assert_error
from tests.tiers import examples


def _same_as_theirs(place: Path) -> None:
    tars = sorted(place.rglob("*.tar"), key=lambda path: path.relative_to(place).as_posix())
    assert [[as_plain(one) for one in shard] for shard in ours(place)] == [
        [as_plain(one) for one in theirs(path)] for path in tars
    ]


# --- what is read ---


def test_samples_are_those_that_webdataset_reads(tmp_path: Path) -> None:
    write_samples(tmp_path / "b" / "01.tar", text_samples(30))
    write_samples(tmp_path / "00.tar", text_samples(5, 100))
    _same_as_theirs(tmp_path)
    assert [info.samples for info in described(tmp_path)] == [5, 30]


def test_every_kind_of_member_is_decoded_as_webdataset_decodes_it(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", map(image_sample, range(4)))
    _same_as_theirs(tmp_path)
    sample = ours(tmp_path)[0][1]
    assert isinstance(sample["png"], Image.Image)
    assert sample["png"].mode == "RGB"
    assert list(sample) == ["__key__", *sorted(set(sample) - {"__key__"})]


def test_an_index_says_what_the_columns_hold(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", map(image_sample, range(2)))
    (info,) = described(tmp_path)
    assert dict(zip(info.schema["column_names"], info.schema["column_encodings"], strict=True)) == {
        "__key__": "str",
        "bin": "bytes",
        "index": "int",
        "left.jpg": "jpeg",
        "more.json": "json",
        "npy": "ndarray",
        "npz": "pkl",
        "png": "png",
        "text": "str",
    }


LONG = "/".join(["directory" * 9] * 4)
ODD_MEMBERS = [
    ("./a.b/0.TXT", b"upper case, and a dot in the directory"),
    ("./a.b/0.detail.json", b'{"two": "dots"}'),
    ("__meta__/0.txt", b"left out"),
    ("__info__", b"left out"),
    ("no-ending", b"left out"),
    (".hidden", b"left out"),
    (f"{LONG}/1.txt", b"a long name"),
    (f"{LONG}/{'é' * 90}.txt", b"a longer one"),
    ("empty.txt", b""),
    ("big.bin", bytes(range(256)) * 9),
]


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_are_read_in_both_dialects(tmp_path: Path, tar_format: int) -> None:
    write_members(tmp_path / "00.tar", ODD_MEMBERS, tar_format)
    _same_as_theirs(tmp_path)
    (samples,) = ours(tmp_path)
    assert [list(one)[1:] for one in samples] == [["txt", "detail.json"], ["txt"], ["txt"], ["txt"], ["bin"]]


def test_names_are_split_over_two_fields(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [(f"{'d' * 60}/{'e' * 60}/0.txt", b"x")], tarfile.USTAR_FORMAT)
    _same_as_theirs(tmp_path)


def test_a_file_of_tar_itself_is_read_but_for_links_and_directories(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "in" / "deep" / f"{number:03}.txt").write_text("x" * number * 50)
    (tmp_path / "in" / "link.txt").symlink_to("deep/000.txt")
    (tmp_path / "in" / "deep" / "z.txt").hardlink_to(tmp_path / "in" / "deep" / "000.txt")
    (tmp_path / "out").mkdir()
    for style in ("gnu", "posix", "ustar", "v7"):
        command = ["tar", f"--format={style}", "--sort=name", "-C", str(tmp_path / "in")]
        subprocess.run([*command, "-cf", str(tmp_path / "out" / f"{style}.tar"), "."], check=True)
    _same_as_theirs(tmp_path / "out")
    assert [info.samples for info in described(tmp_path / "out")] == [20] * 4


def test_members_of_different_samples_may_differ(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.txt", b"x"), ("0.cls", b"1"), ("1.txt", b"y"), ("2.cls", b"3")])
    _same_as_theirs(tmp_path)
    (info,) = described(tmp_path)
    assert info.schema["column_names"] == ("__key__", "cls", "txt")
    reader = WebDatasetFormat().open(info, tmp_path, ["cls"])
    assert [reader[0], reader[2]] == [{"cls": 1}, {"cls": 3}]
    with assert_error(EncodingError, path="00.tar", sample=1):
        reader[1]


def test_only_wanted_columns_are_decoded(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.json", b"{broken"), ("0.txt", b"x")])
    assert ours(tmp_path, ["txt"]) == [[{"txt": "x"}]]
    assert ours(tmp_path, ["__key__"]) == [[{"__key__": "0"}]]
    with assert_error(EncodingError, path="00.tar", sample=0) as caught:
        ours(tmp_path)
    assert "'0.json'" in str(caught.value)
    with assert_error(ConfigError, option="columns", path="00.tar") as caught:
        ours(tmp_path, ["cls"])
    assert "'cls'" in str(caught.value)


@pytest.mark.parametrize("name", ["pkl", "pickle", "pyd", "meta.pkl", "pkl.gz"])
def test_what_can_run_code_is_refused_unless_it_is_allowed_or_not_wanted(tmp_path: Path, name: str) -> None:
    data = pickle.dumps({"a": {1, 2}})
    data = gzip.compress(data) if name.endswith(".gz") else data
    write_members(tmp_path / "00.tar", [(f"0.{name}", data), ("0.txt", b"x")])
    (info,) = described(tmp_path)
    assert unsafe_columns(info) == [name]
    with assert_error(ConfigError, option="allow_unsafe_types", path="00.tar") as caught:
        check_shard(info)
    assert f"'{name}'" in str(caught.value)
    with assert_error(ConfigError, option="allow_unsafe_types", path="00.tar"):
        open_shard(info, tmp_path, columns=[name])
    check_shard(info, columns=["txt"])
    assert ours(tmp_path, ["txt"]) == [[{"txt": "x"}]]
    check_shard(info, allow_unsafe_types=True)
    reader = open_shard(info, tmp_path, allow_unsafe_types=True, columns=[name])
    assert reader[0] == {name: {"a": {1, 2}}}
    reader.close()


def test_members_are_unpickled_as_webdataset_does(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", [{"__key__": "0", "pyd": {"a": (1, {2})}, "pickle": pickle.dumps([b"x"])}])
    (info,) = described(tmp_path)
    reader = open_shard(info, tmp_path, allow_unsafe_types=True)
    found = reader[0]
    reader.close()
    (expected,) = theirs(tmp_path / "00.tar")
    assert found["pyd"] == expected["pyd"] == {"a": (1, {2})}
    assert found["pickle"] == [b"x"]


def test_a_damaged_pickle_is_an_error_that_names_the_member(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.pkl", b"no pickle")])
    (info,) = described(tmp_path)
    reader = open_shard(info, tmp_path, allow_unsafe_types=True)
    with assert_error(EncodingError, path="00.tar", sample=0) as caught:
        reader[0]
    assert "'0.pkl'" in str(caught.value)
    reader.close()


@pytest.mark.parametrize("name", ["pth", "pt"])
def test_files_of_torch_are_refused_also_where_pickles_are_allowed(tmp_path: Path, name: str) -> None:
    write_members(tmp_path / "00.tar", [(f"0.{name}", b"x")])
    (info,) = described(tmp_path)
    for allowed in (False, True):
        with assert_error(ConfigError, option="columns", path="00.tar") as caught:
            check_shard(info, allow_unsafe_types=allowed)
        assert f"'{name}'" in str(caught.value)


def test_a_sample_outlives_its_reader(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", map(image_sample, range(2)))
    (info,) = described(tmp_path)
    reader = WebDatasetFormat().open(info, tmp_path, None)
    sample = reader[1]
    reader.close()
    assert as_plain(sample) == as_plain(theirs(tmp_path / "00.tar")[1])
    with pytest.raises(ValueError, match="released"):
        reader[1]


def test_there_are_no_samples_beyond_the_last(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", text_samples(3))
    (info,) = described(tmp_path)
    reader = WebDatasetFormat().open(info, tmp_path, None)
    assert len(reader) == 3
    for index in (-1, 3):
        with assert_error(SampleIndexError, path="00.tar", sample=index):
            reader[index]


def test_a_file_without_samples_is_a_shard_without_samples(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("README", b"no ending")])
    assert ours(tmp_path) == [[]]


# --- which files there are ---


def test_a_place_without_tar_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    (tmp_path / ".hidden.tar").write_text("")
    with assert_error(ConfigError, path=tmp_path) as caught:
        described(tmp_path)
    assert "'webdataset'" in str(caught.value)


def test_two_files_that_unpack_to_one_are_refused(tmp_path: Path) -> None:
    for name in ("a.tar", "a.tgz"):
        write_samples(tmp_path / name, text_samples(1))
    with assert_error(ConfigError, path=tmp_path) as caught:
        described(tmp_path)
    assert "shard" in str(caught.value)


def test_files_of_the_same_size_are_not_looked_at_again(tmp_path: Path) -> None:
    for number in range(3):
        write_samples(tmp_path / f"{number}.tar", text_samples(4 + number))
    write_samples(tmp_path / "3.tar.gz", text_samples(2))
    known = {info.raw_data.basename: info for info in described(tmp_path)}
    size = (tmp_path / "1.tar").stat().st_size
    (tmp_path / "1.tar").write_bytes(bytes(size))
    (tmp_path / "3.tar.gz").write_bytes(bytes((tmp_path / "3.tar.gz").stat().st_size))
    write_samples(tmp_path / "0.tar", text_samples(40))
    again = described(tmp_path, known)
    assert [one.samples for one in again] == [40, 5, 6, 2]
    assert again[1:] == list(known.values())[1:]
    with assert_error(ShardCorruptError, path="3.tar.gz"):
        described(tmp_path, {name: one for name, one in known.items() if not name.startswith("3")})


# --- compressed files ---


@pytest.mark.parametrize("name", ["00.tar.gz", "00.tgz"])
def test_a_compressed_file_is_unpacked_into_the_file_that_the_index_names(tmp_path: Path, name: str) -> None:
    write_samples(tmp_path / "in" / "00.tar.gz", text_samples(50))
    (tmp_path / "in" / "00.tar.gz").rename(tmp_path / "in" / name)
    (info,) = described(tmp_path / "in")
    assert info.zip_data is not None
    assert (info.compression, info.raw_data.basename, info.zip_data.basename) == ("gz", "00.tar", name)
    unpack(tmp_path / "in" / name, name, info.raw_data, "gz", tmp_path / "00.tar")
    reader = open_shard(info, tmp_path)
    assert [as_plain(reader[one]) for one in range(50)] == [as_plain(one) for one in theirs(tmp_path / "00.tar")]


@pytest.mark.parametrize("change", [lambda data: data[:-9], lambda data: data[:300] + b"x" + data[301:], lambda _: b""])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = write_samples(tmp_path / "00.tar.gz", text_samples(50))
    path.write_bytes(change(path.read_bytes()))
    with assert_error(ShardCorruptError, path=path):
        described(tmp_path)


# --- what others have counted ---


def _poison(path: Path) -> None:
    """Damage a file where only a look at all of it shows."""
    data = bytearray(path.read_bytes())
    data[-20_000:] = bytes([255]) * 20_000
    path.write_bytes(data)


@pytest.mark.parametrize("name", [".nv-meta/.info.json", ".nv-meta/.info.yaml", "train.json"])
def test_counts_of_others_are_taken_without_a_look(tmp_path: Path, name: str) -> None:
    paths = [write_samples(tmp_path / "in" / f"{one}.tar", text_samples(100 + one)) for one in range(3)]
    sizes = [path.stat().st_size for path in paths]
    said: dict[str, Any] = {"energon_version": "7.4.1", "shard_counts": {f"in/{one}.tar": 100 + one for one in (0, 1)}}
    if name == "train.json":
        shards = [{"url": f"./in/{one}.tar", "nsamples": 100 + one, "filesize": sizes[one]} for one in (0, 1)]
        said = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [*shards, {"url": 3}, None]}
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(json.dumps(said))  # which is YAML, too
    for path in paths[:2]:
        _poison(path)
    found = described(tmp_path)
    assert [info.samples for info in found] == [100, 101, 102]
    assert {info.schema["column_names"] for info in found} == {("__key__", "cls", "json", "txt")}
    _poison(paths[2])
    with assert_error(ShardCorruptError, path="2.tar"):
        described(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[1]", '{"shard_counts": {"00.tar": -1}}', '{"shard_counts": {"00.tar": 2}}'),
        '{"shard_counts": {"00.tar": 4000000000}}',
    ],
)
def test_counts_that_cannot_be_are_not_believed(tmp_path: Path, text: str) -> None:
    write_samples(tmp_path / "00.tar", text_samples(20))
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / ".info.json").write_text(text)
    (tmp_path / "wids.json").write_text(
        json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "00.tar", "nsamples": 30, "filesize": 1}]})
    )
    assert [info.samples for info in described(tmp_path)] == [20]


# --- what is refused ---


def test_a_key_that_comes_again_is_refused(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.txt", b""), ("1.txt", b""), ("0.cls", b"1")])
    with assert_error(ShardCorruptError, path="00.tar") as caught:
        described(tmp_path)
    assert "'0.cls'" in str(caught.value)


@pytest.mark.parametrize("name", ["0.txt", "0.TXT"])
def test_two_members_of_one_column_are_refused(tmp_path: Path, name: str) -> None:
    write_members(tmp_path / "00.tar", [("0.txt", b""), ("0.cls", b"1"), (name, b"")])
    with pytest.raises(ShardCorruptError, match=rf"00.tar: member '{name}' is the second of its sample that ends in"):
        described(tmp_path)


def test_a_member_that_would_take_the_place_of_the_key_is_refused(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.__key__", b"")])
    with assert_error(ShardCorruptError, path="00.tar") as caught:
        described(tmp_path)
    assert "column" in str(caught.value)


def test_a_file_that_changed_since_it_was_indexed_is_refused(tmp_path: Path) -> None:
    path = write_members(tmp_path / "00.tar", [("0.txt", b"x"), ("1.txt", b"y")])
    (info,) = described(tmp_path)
    write_members(path, [("0.txt", b"x"), ("0.cls", b"1")])
    assert path.stat().st_size == info.raw_data.bytes
    with assert_error(ShardCorruptError, path="00.tar") as caught:
        open_shard(info, tmp_path)
    assert "samples" in str(caught.value)
    path.write_bytes(path.read_bytes()[:-1])
    with assert_error(ShardCorruptError, path="00.tar") as caught:
        open_shard(info, tmp_path)
    assert "10239" in str(caught.value)
    path.unlink()
    with pytest.raises(ObjectNotFoundError):
        open_shard(info, tmp_path)


def test_an_entry_of_another_format_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", text_samples(1))
    (info,) = described(tmp_path)
    wrong = replace(info, schema={**info.schema, "column_names": ("txt",), "column_encodings": ("str",)})
    with assert_error(IndexFormatError, path="00.tar"):
        check_shard(wrong)


def test_names_that_climb_out_are_names_and_nothing_else(tmp_path: Path) -> None:
    write_members(tmp_path / "in" / "00.tar", [("../../x.txt", b"x"), ("/etc/passwd.txt", b"y")])
    assert ours(tmp_path / "in") == [[{"__key__": "../../x", "txt": "x"}, {"__key__": "/etc/passwd", "txt": "y"}]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


# --- anything at all ---


class Good:
    """A sound file."""

    def __init__(self, place: Path, whole: bytes, info: ShardInfo, samples: list[Any]) -> None:
        self.place, self.whole, self.info, self.samples = place, whole, info, samples


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    place = tmp_path_factory.mktemp("good")
    path = write_samples(place / "00.tar", [image_sample(2), *text_samples(2)])
    with tarfile.open(path, "a", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo(f"{LONG}/long.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"long"))
    (samples,) = ours(place)
    (info,) = described(place)
    return Good(place, path.read_bytes(), info, [as_plain(one) for one in samples])


def _read(place: Path, info: ShardInfo) -> list[Any]:
    reader = open_shard(info, place)

    def sample(number: int) -> Any:
        try:
            return as_plain(reader[number])
        except FormatError:
            return None

    return [sample(number) for number in range(len(reader))]


_PLACES = st.one_of(
    st.integers(0, 2**16), st.builds(lambda block, byte: 512 * block + byte, st.integers(0, 128), st.integers(120, 160))
)
"""Any, and those of the numbers in headers more often."""


@settings(max_examples=examples(300), deadline=5000)
@given(changes=st.lists(st.tuples(_PLACES, st.integers(0, 255)), min_size=1, max_size=3))
def test_a_file_with_any_bytes_changed_gives_right_values_or_a_typed_error(
    good: Good, changes: list[tuple[int, int]]
) -> None:
    place, info, samples = good.place, good.info, good.samples
    changed = bytearray(good.whole)
    for at, value in changes:
        changed[at % len(changed)] = value
    (place / "00.tar").write_bytes(changed)
    try:
        found = _read(place, info)
        (again,) = described(place)
    except StreamingError:
        return
    assert len(found) == len(samples) == again.samples
    # No checksum is of the bytes of members, and the last one's long name is such bytes too.
    for one, two in list(zip(found, samples, strict=True))[:-1]:
        assert one is None or (one["__key__"], sorted(one)) == (two["__key__"], sorted(two))


@settings(max_examples=examples(60), deadline=5000)
@given(stop=st.integers(0, 2**16))
def test_a_file_that_was_cut_off_is_refused(good: Good, stop: int) -> None:
    place, whole = good.place, good.whole
    content = len(whole.rstrip(b"\0")) + 511 & -512
    (place / "00.tar").write_bytes(whole[: stop % content])
    with assert_error(ShardCorruptError, path="00.tar") as caught:
        described(place)
    assert re.search(r"00.tar .*(truncated|must be a tar file)", str(caught.value))
    packed = gzip.compress(whole)
    (place / "00.tar").unlink()
    (place / "00.tar.gz").write_bytes(packed[: stop % len(packed)])
    with assert_error(ShardCorruptError, path="00.tar.gz"):
        described(place)
    (place / "00.tar.gz").unlink()


def test_a_broken_member_does_not_harm_the_others(tmp_path: Path) -> None:
    pixels = io.BytesIO()
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(pixels, "png")
    names = ["a.png", "b.npy", "c.npz", "d.cls", "e.json", "f.txt", "g.txt.gz"]
    write_members(tmp_path / "00.tar", [*((name, b"\xff\xfe") for name in names), ("h.png", pixels.getvalue())])
    (info,) = described(tmp_path)
    reader = open_shard(info, tmp_path)
    for number, name in enumerate(names):
        with assert_error(EncodingError, path="00.tar", sample=number) as raised:
            reader[number]
        assert f"'{name}'" in str(raised.value)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert reader[7]["h" if "h" in reader[7] else "png"].size == (9, 9)
    shutil.rmtree(tmp_path)
