"""Parsed forms of indexes are whole or not used."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from lightning_streaming.cache.index_files import IndexForm, identity_of, read_form, write_form, write_identity
from lightning_streaming.files import Identity
from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from tests.formats.golden_datasets import SERVED
from tests.formats.golden_datasets import read_index as read_golden_index
from tests.golden import golden_path

DIGEST = "ab" * 32
IDENTITY = Identity(10, 20, 30)


def put(path: Path, index: DatasetIndex) -> bytes:
    """Write a form; gives its bytes."""
    with path.open("wb") as file:
        write_form(file, index, DIGEST, IDENTITY)
    return path.read_bytes()


def get(path: Path) -> IndexForm | None:
    """Read a form."""
    with path.open("rb") as file:
        return read_form(file)


@pytest.mark.parametrize("name", SERVED)
def test_a_form_holds_its_index(name: str, tmp_path: Path) -> None:
    index = read_golden_index(golden_path("mds", name))
    put(tmp_path / "form", index)
    form = get(tmp_path / "form")
    assert form is not None
    assert (form.digest, form.index, form.index.data_digest) == (DIGEST, index, index.data_digest)
    assert list(form.index.shards) == list(index.shards)


def test_odd_texts_and_numbers_come_back(tmp_path: Path) -> None:
    file = FileInfo(basename="é/a\nb", bytes=2**32 - 1, hashes={"x\ud800": "\udfff", "a": ""})
    packed = FileInfo(basename="z", bytes=2**63 - 1, hashes={})
    shard = ShardInfo(
        format="json",
        samples=0,
        compression="gz",
        hashes=(),
        size_limit=10**40,
        raw_data=file,
        zip_data=packed,
        raw_meta=file,
        zip_meta=packed,
        schema={"columns": {"é": "int", "a": "str"}, "newline": "\r\n"},
    )
    put(tmp_path / "form", DatasetIndex([shard]))
    form = get(tmp_path / "form")
    assert form is not None
    assert form.index == DatasetIndex([shard])
    assert list(form.index.shards[0].schema["columns"]) == ["é", "a"]


def test_the_file_may_go_while_its_index_is_in_use(tmp_path: Path) -> None:
    index = read_golden_index(golden_path("mds", "merged"))
    put(tmp_path / "form", index)
    form = get(tmp_path / "form")
    (tmp_path / "form").unlink()
    assert form is not None
    assert list(form.index.shards) == list(index.shards)


def test_a_form_that_was_cut_short_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "form"
    data = put(path, read_golden_index(golden_path("mds", "comp-zstd")))
    for length in [*range(0, 300, 7), *range(4000, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        assert get(path) is None


def test_a_form_with_a_wrong_byte_is_not_used_or_holds_the_same(tmp_path: Path) -> None:
    """Some bytes are between the parts, or are the identity, which has a check of its own."""
    path, index = tmp_path / "form", read_golden_index(golden_path("mds", "comp-zstd"))
    data = put(path, index)
    generator = random.Random(3)
    refused = 0
    for _ in range(400):
        place = generator.choice([generator.randrange(len(data)), generator.randrange(1000)])
        path.write_bytes(data[:place] + bytes([data[place] ^ generator.randrange(1, 256)]) + data[place + 1 :])
        form = get(path)
        refused += form is None
        assert form is None or (form.index, form.digest) == (index, DIGEST)
    assert refused > 100


def test_a_form_that_was_made_to_mislead_is_not_used(tmp_path: Path) -> None:
    """With right checksums, but arrays that do not fit each other."""
    one, other = (read_golden_index(golden_path("mds", name)).shards for name in ("comp-zstd", "scalars"))
    for name in ("kind_of_shard", "samples", "sizes", "text_stops", "text"):
        mixed = DatasetIndex(one, "0" * 16)
        object.__setattr__(mixed, "shards", type(one)(**{**_arrays(one), name: getattr(other, name)[:-1]}))
        put(tmp_path / "form", mixed)
        assert get(tmp_path / "form") is None


def _arrays(table: object) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.__dataclass_fields__}  # type: ignore[attr-defined]


def test_an_identity_is_noted_in_place(tmp_path: Path) -> None:
    path = tmp_path / "form"
    put(path, read_golden_index(golden_path("mds", "scalars")))
    with path.open("r+b") as file:
        assert identity_of(file) == IDENTITY
        write_identity(file, Identity(1, 2, 3))
        assert identity_of(file) == Identity(1, 2, 3)
    assert get(path) is not None
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff", 70)
        assert identity_of(file) is None
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as file:
        assert identity_of(file) is None
