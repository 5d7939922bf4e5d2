"""Where columns lie in Parquet files: what pyarrow says of sound footers, and of damaged ones a ValueError."""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pyarrow.parquet.encryption
import pytest
from hypothesis import given

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import UnsupportedError
from lightning_streaming.formats.parquet_footer import read_chunks
from tests.formats.every_format import write_parquet
from tests.formats.every_fuzz import PARQUET_WAYS, write_wide_parquet
from tests.formats.small_shards import damaged_bytes
from tests.helpers import raises


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def said_by_pyarrow(path: Path) -> list[list[tuple[Any, ...]]]:
    metadata = pyarrow.parquet.read_metadata(path)
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    columns = [[group.column(place) for place in range(metadata.num_columns)] for group in groups]
    return [
        [
            (
                one.path_in_schema,
                one.num_values,
                one.total_uncompressed_size,
                one.total_compressed_size,
                one.data_page_offset,
                one.dictionary_page_offset,
                False,
            )
            for one in group
        ]
        for group in columns
    ]


@pytest.mark.parametrize("way", PARQUET_WAYS)
def test_columns_lie_where_pyarrow_says(tmp_path: Path, way: str) -> None:
    write_wide_parquet(tmp_path, **PARQUET_WAYS[way])
    for path in tmp_path.iterdir():
        found = read_chunks(memoryview(footer_of(path.read_bytes())))
        assert found == said_by_pyarrow(path)
        assert len(found) > 1


def test_long_lists_and_files_without_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    names = [f"column {number}" for number in range(300)]
    for rows in (0, 3):
        pyarrow.parquet.write_table(pyarrow.table({name: list(range(rows)) for name in names}), path)
        assert read_chunks(memoryview(footer_of(path.read_bytes()))) == said_by_pyarrow(path)


@pytest.fixture(scope="module")
def footer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("data")
    write_parquet(root)
    return footer_of((root / "0.parquet").read_bytes())


def test_a_footer_that_ends_early_is_refused(footer: bytes) -> None:
    for stop in range(len(footer)):
        with pytest.raises(ValueError, match="footer"):
            read_chunks(memoryview(footer[:stop]))


def test_damage_is_read_or_refused(footer: bytes) -> None:
    @given(damaged_bytes(footer))
    def check(data: bytes) -> None:
        with suppress(ValueError):
            read_chunks(memoryview(data))

    check()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x1c" * 50, "structs within each other"),
        (b"\x15" + b"\xff" * 20, "more than 64 bits"),
        (b"\x1f\x00", "unknown type 15"),
        (b"\x19\xfc" + b"\xff" * 8 + b"\x01", "ends before"),
        (b"\x18\xff\xff\xff\x7f", "ends before"),
    ],
)
def test_what_no_writer_writes_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_chunks(memoryview(data))


class Keys(pyarrow.parquet.encryption.KmsClient):  # type: ignore[misc]
    """Keeps keys as anybody could."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_columns_are_refused(tmp_path: Path, plaintext_footer: bool) -> None:
    told = pyarrow.parquet.encryption
    factory = told.CryptoFactory(Keys)
    config = told.EncryptionConfiguration(
        footer_key="a", column_keys={"b": ["secret"]}, plaintext_footer=plaintext_footer
    )
    table = pyarrow.table({"open": [1, 2], "secret": [3, 4]})
    properties = factory.file_encryption_properties(told.KmsConnectionConfig(), config)
    with pyarrow.parquet.ParquetWriter(
        tmp_path / "a.parquet", table.schema, encryption_properties=properties
    ) as writer:
        writer.write_table(table)
    with raises(UnsupportedError, "a.parquet", "encrypt"):
        StreamingDataset(remote=str(tmp_path), format="parquet")[0]
