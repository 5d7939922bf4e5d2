"""Damaged files of every format: each is told in a typed error that names the file, and what of it."""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.errors import FormatError, IntegrityError, ShardCorruptError, StreamingError
from tests.formats.every_format import FORMS, arrow_table, document_of, record_of, same
from tests.formats.every_fuzz import make_case, run_forked, run_here, sound, ways_of
from tests.formats.test_megatron import write as write_megatron
from tests.helpers import raises
from tests.tiers import amount

EVERY = pytest.mark.parametrize("name", FORMS)
Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


def dataset_of(name: str, root: Path, **settings: Any) -> StreamingDataset:
    return StreamingDataset(remote=str(root), **FORMS[name].options, **settings)


def read_all(dataset: StreamingDataset) -> list[Any]:
    return [dataset[number] for number in range(dataset.size)]


@pytest.mark.rotate(3)
@EVERY
def test_a_file_that_is_cut_is_named(written: Write, tmp_path: Path, name: str) -> None:
    rng, refused = random.Random(name), 0
    for number in range(12):
        root = Path(shutil.copytree(written(name), tmp_path / f"copy {number}"))
        path = rng.choice(sorted(path for path in root.iterdir()))
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[: rng.choice([0, 4, size - 1, rng.randrange(size), rng.randrange(size)])])
        try:
            read = read_all(dataset_of(name, root))
        except StreamingError as error:
            assert path.stem in str(error)  # noqa: PT017 either will do
            refused += 1
        else:  # after the mark of its end a tar file has nothing but zeros
            assert name == "webdataset"
            assert same(read, [FORMS[name].sample(number) for number in range(len(read))])
            assert len(read) == sum(FORMS[name].sizes)
    assert refused >= 8


@pytest.mark.rotate
@EVERY
@pytest.mark.parametrize("change", ["longer", "shorter", "noise"])
def test_a_file_that_changes_under_its_index_is_named(copied: Write, name: str, change: str) -> None:
    root = copied(name)
    dataset = dataset_of(name, root)
    assert dataset.size == sum(FORMS[name].sizes)
    ending = ".idx" if name == "megatron" and change == "noise" else ".bin" if "megatron" in name else ""
    path = sorted(path for path in root.iterdir() if path.name.endswith(ending) and path.name != "index.json")[1]
    data = path.read_bytes()
    noise = random.Random(0).randbytes(len(data))
    path.write_bytes({"longer": data + b"x", "shorter": data[:-1], "noise": noise}[change])
    words = [str(len(data)), str(path.stat().st_size)] if change != "noise" and name != "tar.gz" else []
    with pytest.raises((ShardCorruptError, IntegrityError)) as caught:  # found damaged, or of another time than indexed
        read_all(dataset)
    assert [word for word in ("stream '0'", path.name, *words) if word not in str(caught.value)] == []


@pytest.mark.rotate(3)
@EVERY
def test_what_is_no_file_of_its_format_is_named(copied: Write, name: str) -> None:
    root = copied(name)
    path = min(root.iterdir())
    ending = {"megatron": ".idx", "megatron blocks": ".idx"}.get(name, path.suffix)
    path = path.with_suffix(ending)
    path.write_bytes(b"<html>" + b" " * 5000 + b"</html>")
    with pytest.raises(FormatError, match=path.name.replace(".", r"\.")):
        read_all(dataset_of(name, root))


def mixed_parquet(root: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = arrow_table(range(3))
    ids = pyarrow.array([str(number) for number in range(3)])
    pyarrow.parquet.write_table(table.set_column(0, "id", ids), root / "9.parquet")


def mixed_rows(root: Path) -> None:
    np.save(root / "9.npy", np.zeros(3, [("id", "<i4"), ("text", "<U24"), ("tokens", "<i4", (5,))]))


def mixed_long_rows(root: Path) -> None:
    np.save(root / "9.npy", np.zeros(30, np.int64))


def mixed_documents(root: Path) -> None:
    write_megatron(root, [[[1, 2, 3, 4, 5]]], "9", 8)


MIXED: Mapping[str, tuple[Callable[[Path], None], list[str]]] = {
    "parquet": (mixed_parquet, ["9.parquet", "0.parquet", "'id'", "int64", "str"]),
    "datasets": (mixed_parquet, ["9.parquet", "0.parquet", "'id'", "int64", "str"]),
    "npy": (mixed_rows, ["9.npy", "0.npy", "int32", "int64"]),
    "npy blocks": (mixed_long_rows, ["9.npy", "0.npy", "int64", "int32"]),
    "megatron": (mixed_documents, ["9.bin", "0.bin", "uint16", "int32"]),
    "megatron blocks": (mixed_documents, ["9.bin", "0.bin", "uint16", "int32"]),
}


@pytest.mark.parametrize("name", MIXED)
def test_files_of_several_kinds_are_named(copied: Write, name: str) -> None:
    root, (mix, words) = copied(name), MIXED[name]
    mix(root)
    with raises(FormatError, "stream '0'", *words):
        read_all(dataset_of(name, root))


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_a_key_that_comes_again_is_named(tmp_path: Path, ending: str) -> None:
    import webdataset

    root = tmp_path / "data"
    root.mkdir()
    with webdataset.TarWriter(str(root / f"a{ending}")) as writer:
        for key in ("one", "two", "one"):
            writer.write({"__key__": key, "txt": key})
    with raises(ShardCorruptError, f"a{ending}", "'one.txt'"):
        read_all(dataset_of("webdataset", root))


def test_a_page_that_is_damaged_is_told_by_its_checksum(tmp_path: Path) -> None:
    import pyarrow.parquet

    root = tmp_path / "data"
    root.mkdir()
    pyarrow.parquet.write_table(
        arrow_table(range(20)),
        root / "a.parquet",
        row_group_size=5,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    path = root / "a.parquet"
    place = path.read_bytes().index(document_of(13).tobytes())
    dataset = dataset_of("parquet", root)
    assert same(dataset[13], record_of(13))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "caches")
    dataset = dataset_of("parquet", root)
    assert same(dataset[4], record_of(4))
    with raises(ShardCorruptError, "row group 2 of", "a.parquet", "CRC"):
        dataset[13]
    assert same(dataset_of("parquet", root, columns=["id"])[13], {"id": np.int64(13)})


def test_a_file_with_other_columns_of_the_same_size_is_told(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    root = tmp_path / "data"
    root.mkdir()
    whole, halves = pyarrow.array(range(10)), pyarrow.array([number / 2 for number in range(10)])
    pyarrow.parquet.write_table(pyarrow.table({"a": whole, "b": halves}), root / "a.parquet")
    dataset = dataset_of("parquet", root)
    assert dataset.size == 10
    size = (root / "a.parquet").stat().st_size
    pyarrow.parquet.write_table(pyarrow.table({"a": halves, "b": whole}), root / "a.parquet")
    assert (root / "a.parquet").stat().st_size == size
    with raises(IntegrityError, "a.parquet", "was replaced since it was indexed"):
        dataset[3]


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_columns_are_refused(tmp_path: Path, plaintext_footer: bool) -> None:
    import pyarrow.parquet
    import pyarrow.parquet.encryption as told

    class Keys(told.KmsClient):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__()

        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
            return base64.b64encode(key_bytes)

        def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
            return base64.b64decode(wrapped_key)

    root = tmp_path / "data"
    root.mkdir()
    config = told.EncryptionConfiguration(
        footer_key="a", column_keys={"b": ["text"]}, plaintext_footer=plaintext_footer
    )
    properties = told.CryptoFactory(Keys).file_encryption_properties(told.KmsConnectionConfig(), config)
    table = arrow_table(range(5))
    with pyarrow.parquet.ParquetWriter(root / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(StreamingError, match=r"a\.parquet.*crypt"):
        read_all(dataset_of("parquet", root))


# --- by the thousand ---

CASES = dict.fromkeys(FORMS, amount(60, 300)) | dict.fromkeys(
    ("datasets", "tar.gz", "npy blocks", "megatron blocks"), amount(30, 100)
)
"""Fewer of a second form of a format."""


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("name", "cases"), CASES.items())
def test_damage_ends_in_the_right_values_or_in_our_errors(name: str, cases: int) -> None:
    endings = run_here(name, range(cases))
    assert endings.total() == cases
    assert sum(count for ending, count in endings.items() if ending.endswith("Error when indexed")) > cases / 50
    assert sum(count for ending, count in endings.items() if "Error+" in ending) > cases / 50


def test_cases_are_told_by_their_numbers() -> None:
    assert make_case("npy", 7) == make_case("npy", 7)
    assert len({make_case("npy", number).data for number in range(30)}) > 25


def test_what_ends_a_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(case: Any) -> str:
        if case.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if case.number == 5:
            raise ValueError("wrong")
        return "right"

    for way in ways_of("npy"):
        sound("npy", way)
    monkeypatch.setattr("tests.formats.every_fuzz.run_case", run_case)
    found = list(run_forked("npy", range(8)))
    assert [number for number, _, wrong in found] == list(range(8))
    assert [(number, wrong) for number, _, wrong in found if wrong] == [
        (3, "ended its process with -9"),
        (5, "ValueError: wrong"),
    ]
