"""Sources of other files: Parquet, Hugging Face datasets, tar sets, folders of images and of texts."""

from __future__ import annotations

import io
import json
import re
import tarfile
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.tools.converting.sources import detect_kind, open_source
from lightning_streaming.tools.converting.sources.arrow import HuggingFace, Parquet
from lightning_streaming.tools.converting.sources.folders_and_tars import ImageFolder, TextFolder, WebDataset
from lightning_streaming.tools.converting.sources.row_encoding import ColumnPlan, SampleEncoder
from tests.tools.converting.test_sources_text import encode_all, encodings, rows
from tests.tools.running import run


def image(color: tuple[int, int, int], kind: str = "PNG") -> bytes:
    """The file of a small image."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(file, kind)
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A tar file of these members."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def all_rows(source: Any, most: int = 2**30) -> list[dict[str, Any]]:
    """All columns of all rows."""
    names = list(source.schema().columns)
    return [row for piece in source.pieces(most) for _, row in source.rows(piece, names)]


TABLE = pa.table(
    {
        "i": pa.array([1, 2, 3], pa.int32()),
        "f": pa.array([0.5, 1.5, 2.5], pa.float32()),
        "s": pa.array(["a", "b", "ü"], pa.large_string()),
        "b": pa.array([b"\0", b"", b"x"]),
        "t": pa.array([[1], [2, 3], [4]], pa.list_(pa.uint16())),
        "v": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "d": pa.array([Decimal("1.10")] * 3),
        "k": pa.array(["x", "y", "x"]).dictionary_encode(),
        "j": pa.array([{"a": [True]}] * 3),
        "o": pa.array([True, False, True]),
        "w": pa.array([datetime(2024, 5, 6, 7, 8, 9)] * 3, pa.timestamp("us")),
    }
)


def test_parquet_types_become_encodings_and_values(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    source = Parquet.open(str(tmp_path / "a.parquet"))
    assert encodings(source) == {
        "i": "int32",
        "f": "float32",
        "s": "str",
        "b": "bytes",
        "t": "ndarray:uint16",
        "v": "ndarray:float32:2",
        "d": "str_decimal",
        "k": "str",
        "j": "json",
        "o": "json",
        "w": None,
    }
    first = encode_all(source, *(name for name in TABLE.column_names if name != "w"), "w:str")[1]
    assert first["i"] == b"\2\0\0\0"
    assert first["b"] == b""
    assert first["k"] == b"y"
    assert first["w"] == b"2024-05-06T07:08:09"
    assert json.loads(first["j"]) == {"a": [True]}
    assert np.frombuffer(first["v"], "<f4").tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"'w', which holds timestamp\[us\]"):
        encode_all(source)


@pytest.mark.parametrize("most", [1, 2**30])
def test_parquet_is_read_by_row_groups_over_several_files(tmp_path: Path, most: int) -> None:
    for number in range(3):
        table = pa.table({"x": list(range(10 * number, 10 * number + 10))})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    source = Parquet.open(str(tmp_path))
    pieces = source.pieces(most)
    assert len(pieces) == (9 if most == 1 else 3)
    found = [(source.place(piece, n), row["x"]) for piece in pieces for n, row in source.rows(piece, ["x"])]
    assert [x for _, x in found] == list(range(30))
    assert found[15][0] == f"{tmp_path / '1.parquet'}, row 6"


def test_a_null_in_parquet_is_an_error_with_its_row(tmp_path: Path) -> None:
    table = pa.table({"x": [1, None], "t": pa.array([[1], [2, None]], pa.list_(pa.int64()))})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = Parquet.open(str(tmp_path))
    with pytest.raises(EncodingError, match=r"a.parquet, row 2: the column 'x' is int64: .*there is no value"):
        encode_all(source)
    with pytest.raises(EncodingError, match=r"row 2: the column 't' is ndarray:int64: expected a list of numbers"):
        encode_all(source, "t")
    assert encode_all(source, "x:json", "t:json")[1] == {"x": b"null", "t": b"[2, null]"}


def test_parquet_files_that_differ_or_are_damaged_are_errors(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"x": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(FormatError, match=r"'x' is string in .*b.parquet, but int64 in .*a.parquet"):
        all_rows(Parquet.open(str(tmp_path)))
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match=r"b.parquet cannot be read as Parquet"):
        all_rows(Parquet.open(str(tmp_path)))


def _table_of(kind: str) -> pa.Table:
    one, two = pa.array([1]), pa.array([2])
    if kind == "columns":
        return pa.Table.from_arrays([one, two], names=["a", "a"])
    if kind == "fields":
        return pa.table({"s": pa.StructArray.from_arrays([one, two], names=["a", "a"])})
    if kind == "date":
        return pa.table({"d": pa.array([2**62], pa.timestamp("us"))})
    bad_text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    return pa.table({"t": bad_text})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("columns", "has several columns of the name 'a'; give each its own"),
        ("fields", "cannot be read as Parquet: .*duplicate field names"),
        ("date", "cannot be read as Parquet: .*out of range"),
        ("text", "cannot be read as Parquet: .*utf-8"),
    ],
)
def test_values_of_parquet_that_python_cannot_hold_are_errors(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(_table_of(kind), path)
    outcome = run("convert", path, tmp_path / "out", "--columns", "d:str") if kind == "date" else None
    outcome = outcome or run("convert", path, tmp_path / "out")
    assert outcome.code == 1
    assert re.search(f"error: {path} {words}", outcome.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("compression", ["none", "snappy"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_damaged_page_of_parquet_is_an_error(tmp_path: Path, compression: str, version: str) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"x": np.random.default_rng(0).integers(0, 2**60, 1000), "t": ["text"] * 1000})
    parquet.write_table(
        table,
        path,
        write_page_checksum=True,
        compression=compression,
        use_dictionary=False,
        data_page_version=version,
        row_group_size=300,
    )
    assert len(all_rows(Parquet.open(str(path)))) == 1000
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"a.parquet cannot be read as Parquet: .*CRC checksum"):
        all_rows(Parquet.open(str(path)))


def test_columns_in_the_names_of_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "year=2024" / "a.parquet")
    with pytest.raises(ConfigError, match="would be lost"):
        Parquet.open(str(tmp_path))
    assert len(all_rows(Parquet.open(str(tmp_path / "year=2024" / "a.parquet")))) == 1


def _huggingface() -> datasets.Dataset:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "tokens": datasets.Sequence(datasets.Value("int32")),
            "square": datasets.Array2D((2, 2), "float32"),
            "text": datasets.Value("string"),
        }
    )
    rows = {
        "image": [{"bytes": image((red, 0, 0)), "path": None} for red in range(5)],
        "label": [0, 1, 0, 1, 0],
        "tokens": [[1], [2, 3], [4], [5], [6]],
        "square": [[[1, 2], [3, 4]]] * 5,
        "text": list("abcde"),
    }
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture
def _quiet_datasets() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.usefixtures("_quiet_datasets")
def test_a_hugging_face_dataset_is_read_as_it_was_shuffled_and_selected(tmp_path: Path) -> None:
    dataset = _huggingface().select([4, 2, 0, 1])
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    source = HuggingFace.open(str(tmp_path / "saved"))
    assert len(source.paths) == 2
    assert encodings(source) == {
        "image": "png",
        "label": "int64",
        "tokens": "ndarray:int32",
        "square": "json",
        "text": "str",
    }
    found = all_rows(source)
    assert [row["text"] for row in found] == dataset["text"][:]
    assert [row["image"] for row in found] == [image((red, 0, 0)) for red in (4, 2, 0, 1)]
    samples = encode_all(source, "square:ndarray:float32:2,2")
    assert np.frombuffer(samples[0]["square"], "<f4").tolist() == [1, 2, 3, 4]


@pytest.mark.usefixtures("_quiet_datasets")
def test_a_hugging_face_dataset_of_splits_asks_for_one(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": _huggingface(), "test": _huggingface()}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=r"splits train, test; .*both/train"):
        open_source(str(tmp_path / "both"))
    assert len(all_rows(open_source(str(tmp_path / "both" / "test")))) == 5


@pytest.mark.usefixtures("_quiet_datasets")
def test_an_arrow_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    _huggingface().save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(FormatError, match="cannot be read as an Arrow stream"):
        all_rows(HuggingFace.open(str(tmp_path / "saved")))
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(FormatError, match="_data_files"):
        HuggingFace.open(str(tmp_path / "saved"))


def test_an_arrow_file_that_ends_between_batches_is_an_error(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": [1, 2]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
        first = file.tell()
        writer.write_batch(batch)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    assert len(all_rows(HuggingFace.open(str(tmp_path)))) == 4
    whole = (tmp_path / "a.arrow").read_bytes()
    for length in (first, len(whole) - 8, len(whole) - 1):
        (tmp_path / "a.arrow").write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"a.arrow was cut off|cannot be read as an Arrow stream"):
            all_rows(HuggingFace.open(str(tmp_path)))


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ('[{"filename": "b.arrow"}]', "lists b.arrow, which is missing; restore that file"),
        ('[{"filename": "../a.arrow"}]', "must list names of files"),
        ('[{"filename": 3}]', "must list names of files"),
        ('[{"name": "a.arrow"}]', "must list names of files"),
        ('["a.arrow"]', "must list names of files"),
    ],
)
def test_an_arrow_file_that_is_missing_is_named(tmp_path: Path, listed: str, words: str) -> None:
    (tmp_path / "state.json").write_text(f'{{"_data_files": {listed}}}')
    with pytest.raises(FormatError, match=words):
        HuggingFace.open(str(tmp_path))


def _array(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_tar_set_is_grouped_by_name_and_decoded_by_ending(tmp_path: Path, name: str) -> None:
    members = {
        "__meta__.json": b"{}",
        "x/0001.jpg": image((1, 2, 3), "JPEG"),
        "x/0001.txt": "é".encode(),
        "x/0001.cls": b"7\n",
        "x/0001.json": b'{"k": 1}',
        "x/0001.emb.NPY": _array(np.arange(3, dtype=np.float32)),
        "x/0001.bin": b"\0",
        "x/0002.jpg": image((4, 5, 6), "JPEG"),
    }
    members |= {name.replace("1.", "2."): data for name, data in members.items() if name.startswith("x/0001")}
    source = WebDataset.open(str(write_tar(tmp_path / name, members)))
    assert encodings(source) == {
        "__key__": "str",
        "jpg": "jpeg",
        "txt": "str",
        "cls": "int",
        "json": "json",
        "emb.npy": "ndarray",
        "bin": "bytes",
    }
    found = rows(source)
    assert [row["__key__"] for row in found] == ["x/0001", "x/0002"]
    assert (found[0]["txt"], found[0]["cls"], found[0]["bin"]) == ("é", 7, b"\0")
    assert encode_all(source)[1]["jpg"] == members["x/0002.jpg"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"1.cls": b"x"}, r"sample 1, 1.cls cannot be decoded"),
        ({"1.json": b'{"a": 1, "a": 2}'}, r"1.json cannot be decoded: the key 'a' is there twice"),
        ({"1.txt": b"", "2.npy": b"x"}, r"sample 2, 2.npy cannot be decoded"),
        ({"1.npy": _array(np.array([{}], dtype=object))}, "cannot be decoded"),
        ({"1.txt": b"", "1.TXT": b""}, "has .txt twice"),
        ({"readme": b""}, "NAME.ENDING"),
    ],
)
def test_a_member_that_cannot_be_used_is_an_error(tmp_path: Path, members: dict[str, bytes], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        rows(WebDataset.open(str(write_tar(tmp_path / "a.tar", members))))


def test_a_tar_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.txt": b"x" * 5000, "2.txt": b"x" * 5000})
    path.write_bytes(path.read_bytes()[:8000])
    with pytest.raises(FormatError, match="cannot be read as a tar file"):
        rows(WebDataset.open(str(path)))


@pytest.mark.parametrize("kept", [512 + 5120, 512 + 5120 + 100])
def test_a_tar_file_that_was_cut_between_files_is_an_error(tmp_path: Path, kept: int) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.txt": b"x" * 5000, "2.txt": b"x" * 5000})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FormatError, match="was cut off"):
        rows(WebDataset.open(str(path)))


def test_a_sample_without_a_member_of_the_first_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.txt": b"a", "1.cls": b"1", "2.txt": b"b"})
    with pytest.raises(EncodingError, match=r"a.tar, sample 2: the column 'cls' is missing"):
        encode_all(WebDataset.open(str(path)))


def test_a_folder_of_images_has_classes_by_name(tmp_path: Path) -> None:
    for name, color in [("dog/b.png", 1), ("dog/x/a.png", 2), ("cat/c.PNG", 3), ("cat/.hidden.png", 4)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(image((color, 0, 0)))
    (tmp_path / "eel").mkdir()
    source = ImageFolder.open(str(tmp_path))
    assert encodings(source) == {"image": "png", "label": "int", "class": "str"}
    assert [(row["image"], row["label"], row["class"]) for row in rows(source)] == [
        (image((3, 0, 0)), 0, "cat"),
        (image((1, 0, 0)), 1, "dog"),
        (image((2, 0, 0)), 1, "dog"),
    ]
    assert source.classes == ("cat", "dog", "eel")


def test_images_of_several_kinds_are_bytes_and_wrong_ones_are_errors(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.png").write_bytes(image((1, 0, 0)))
    (tmp_path / "c" / "b.png").write_bytes(image((1, 0, 0), "JPEG"))
    with pytest.raises(EncodingError, match=r"b.png: the column 'image' is png: .*--columns image:bytes"):
        encode_all(ImageFolder.open(str(tmp_path)))
    (tmp_path / "c" / "b.png").rename(tmp_path / "c" / "b.jpg")
    assert encodings(ImageFolder.open(str(tmp_path)))["image"] == "bytes"
    (tmp_path / "stray.png").write_bytes(image((1, 0, 0)))
    with pytest.raises(ConfigError, match=r"1 of 3 images lie in .* itself, like stray.png, and the others in folders"):
        ImageFolder.open(str(tmp_path))


@pytest.mark.parametrize("encoding", ["jpeg", "pil"])
def test_a_picture_that_does_not_fit_is_not_told_to_be_json(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.jpg").write_bytes(image((1, 0, 0), "JPEG"))
    source = ImageFolder.open(str(tmp_path))
    both = SampleEncoder(source, ColumnPlan({"image": encoding, "path": "str"}, exact=True, command="convert x y"))
    with pytest.raises(EncodingError, match=r"leave the column out, for example, run: convert x y --columns path:str$"):
        both.encode({"image": None, "path": "a.jpg"})
    alone = SampleEncoder(source, ColumnPlan({"image": encoding}, exact=False))
    with pytest.raises(EncodingError, match=r"but there is no value$"):
        alone.encode({"image": None})


def test_a_folder_of_images_alone_has_paths_in_place_of_classes(tmp_path: Path) -> None:
    for name, color in [("b.png", 1), ("a.png", 2)]:
        (tmp_path / name).write_bytes(image((color, 0, 0)))
    (tmp_path / "notes").mkdir()
    source = ImageFolder.open(str(tmp_path))
    assert encodings(source) == {"image": "png", "path": "str"}
    assert [(row["image"], row["path"]) for row in rows(source)] == [
        (image((2, 0, 0)), "a.png"),
        (image((1, 0, 0)), "b.png"),
    ]
    assert len(encode_all(source)) == 2


@pytest.mark.parametrize("beside", ["jpg", "webp"], ids=["one_kind", "several_kinds"])
@pytest.mark.parametrize(("kind", "ending"), [("PNG", "PNG"), ("JPEG", "jpg")])
def test_an_image_that_was_cut_off_is_an_error_that_names_it(
    tmp_path: Path, kind: str, ending: str, beside: str
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / f"a.{beside}").write_bytes(image((1, 2, 3), "WEBP" if beside == "webp" else "JPEG"))
    file = io.BytesIO()
    Image.effect_noise((32, 32), 50).save(file, kind)
    path = tmp_path / "c" / f"b.{ending}"
    path.write_bytes(file.getvalue() + b"trailer")
    assert len(encode_all(ImageFolder.open(str(tmp_path)))) == 2
    for left in (file.getvalue()[:-100], file.getvalue()[:2]):
        path.write_bytes(left)
        with pytest.raises(EncodingError, match=rf"b.{ending}: expected a whole {kind} file"):
            encode_all(ImageFolder.open(str(tmp_path)))


@pytest.mark.parametrize("name", ["b.png", "b.webp"])
def test_an_empty_image_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.gif").write_bytes(image((1, 2, 3), "GIF"))
    (tmp_path / "c" / name).touch()
    with pytest.raises(EncodingError, match=f"{name}: the file is empty"):
        encode_all(ImageFolder.open(str(tmp_path)))


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "the file is empty"), (image((1, 2, 3), "JPEG")[:-30], "Truncated File Read")]
)
def test_a_damaged_image_in_a_tar_set_is_an_error_also_where_others_are_of_another_kind(
    tmp_path: Path, data: bytes, words: str
) -> None:
    webp = image((1, 2, 3), "WEBP")
    fine = write_tar(tmp_path / "a.tar", {"1.jpg": webp, "2.jpg": image((1, 2, 3), "JPEG")})
    assert [row["jpg"][:4] for row in rows(WebDataset.open(str(fine)))] == [b"RIFF", b"\xff\xd8\xff\xe0"]
    path = write_tar(tmp_path / "b.tar", {"1.jpg": webp, "2.jpg": data})
    with pytest.raises(FormatError, match=rf"b.tar, sample 2, 2.jpg: .*{words}"):
        rows(WebDataset.open(str(path)))


def test_a_folder_of_texts_keeps_text_and_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes("é\r\n".encode())
    (tmp_path / "a.md").write_text("a")
    found = rows(TextFolder.open(str(tmp_path)))
    assert found == [{"text": "a", "path": "a.md"}, {"text": "é\r\n", "path": "b/x.txt"}]
    assert rows(TextFolder.open(str(tmp_path / "a.md"))) == [{"text": "a", "path": "a.md"}]
    assert rows(TextFolder.open(str(tmp_path / "**" / "*.[tm]*"))) == found
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"c.txt is not text in UTF-8"):
        rows(TextFolder.open(str(tmp_path)))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.jsonl", "README.md", "LICENSE"], "jsonl"),
        (["x/a.csv.gz", "b.CSV"], "csv"),
        (["a.tsv"], "tsv"),
        (["a.parquet", "info.json", "README.md"], "parquet"),
        (["state.json", "data-0.arrow"], "huggingface"),
        (["dataset_dict.json", "train/state.json"], "huggingface"),
        (["a.tar", "b.tgz"], "webdataset"),
        (["cat/a.jpg", "dog/b.jpeg", "notes.txt"], "images"),
        (["a.txt", "x/b.md"], "text"),
    ],
)
def test_a_folder_tells_its_kind(tmp_path: Path, names: list[str], kind: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert detect_kind(str(tmp_path)) == kind


def test_a_file_tells_its_kind_and_nothing_is_guessed(tmp_path: Path) -> None:
    names = {"a.json": "jsonl", "a.ndjson.gz": "jsonl", "a.TSV": "tsv", "a.txt": "text", "*.parquet": "parquet"}
    assert {name: detect_kind(name) for name in names} == names
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / name).touch()
    for location, words in [(tmp_path, "files of csv and jsonl; pass --from"), ("data.bin", "no file name")]:
        with pytest.raises(ConfigError, match=words):
            detect_kind(str(location))
    for name, words in {
        "none.jsonl": "none.jsonl does not exist; SOURCE is ",
        "none": "none does not exist; ",
        "*.csv.gz": "no file matches ",
    }.items():
        with pytest.raises(ConfigError, match=words):
            open_source(str(tmp_path / name))


def test_links_to_folders_are_followed_unless_they_lead_back(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link").symlink_to(tmp_path / "data")
    assert [row["path"] for row in rows(TextFolder.open(str(tmp_path / "source")))] == ["link/a.txt"]
    for back, leads_to in [("data/back", "source"), ("source/self", "source"), ("source/above", ".")]:
        (tmp_path / back).symlink_to(tmp_path / leads_to)
        with pytest.raises(ConfigError, match=f"{Path(back).name} leads back to"):
            TextFolder.open(str(tmp_path / "source"))
        (tmp_path / back).unlink()


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "tar", "json in tar"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, kind: str) -> None:
    mark = b"\xef\xbb\xbf"
    if kind == "text":
        (tmp_path / "a.txt").write_bytes(mark + b"words")
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "words"}')
    elif kind == "csv":
        (tmp_path / "a.csv").write_bytes(mark + b"text\nwords\n")
    else:
        members = {"1.text": mark + b"words"} if kind == "tar" else {"1.json": mark + b'"words"'}
        write_tar(tmp_path / "a.tar", members)
    row = dict(rows(open_source(str(tmp_path)))[0])
    assert row.pop("json" if kind == "json in tar" else "text") == "words"


@pytest.mark.parametrize("below", ["", "/below", "/below/more"])
def test_an_out_that_is_a_file_is_told_as_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 2000)
    for more in ((), ("--part-size", "1kb", "--workers", "1"), ("--resume",)):
        outcome = run("convert", tmp_path / "a.jsonl", f"{tmp_path}/file{below}", *more)
        assert outcome.code == 2
        assert "must be a directory, but is a file" in outcome.err if not below else "Not a directory" in outcome.err
        assert "attempt" not in outcome.err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_merge_into_a_file_is_told_as_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    outcome = run("merge", f"{tmp_path}/file{below}")
    assert outcome.code == 2
    assert "attempt" not in outcome.err
