"""Split shards: ``json``, ``csv``, ``tsv`` and ``xsv``, each a data file that people can read and a meta file.

    data file    header (json has none), then rows back to back
    meta file    uint32 n, the number of samples
                 uint32 offsets[n + 1] in the data file: where each row starts, and where the last one ends
                 config, JSON text up to the end

All integers are little-endian. A row includes its newline. The config repeats what the index says of the columns; the
index is what we believe.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, IndexFormatError
from lightning_streaming.formats.checks import brief, shortened
from lightning_streaming.formats.index import INDEX_VERSION, ShardInfo
from lightning_streaming.formats.mds import check_shard_bytes
from lightning_streaming.formats.split_rows import KINDS, Rows, json_rows, separated_rows

SPLIT_FORMATS = ("json", "csv", "tsv", "xsv")
"""Names of the formats whose shards have two files."""

_IMPLIED_SEPARATORS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLayout:
    """How the samples of a split dataset are written; made by :func:`make_split_layout`."""

    format: str
    """``json``, ``csv``, ``tsv`` or ``xsv``."""
    names: tuple[str, ...]
    """Column names, in the order they are stored; a writer sorts them."""
    encoding_names: tuple[str, ...]
    """``str``, ``int`` or ``float``, for each column."""
    newline: str
    """What every row ends in."""
    separator: str | None
    """What is between two fields; None for json."""
    rows: Rows
    """Turns values into rows, and back."""

    @property
    def schema(self) -> dict[str, Any]:
        """The keys by which an index describes these columns."""
        if self.format == "json":
            return {"columns": dict(zip(self.names, self.encoding_names, strict=True)), "newline": self.newline}
        schema = {"column_names": self.names, "column_encodings": self.encoding_names, "newline": self.newline}
        return schema | {"separator": self.separator} if self.format == "xsv" else schema

    @property
    def header(self) -> bytes:
        """What a data file has before its first row."""
        return self.rows.header

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Turn a sample into a row with its newline. What it holds beside the columns is left out.

        Raises:
            EncodingError: A column is missing, its value has another type, or its text would be taken for more fields
                or rows.
        """
        try:
            values = [sample[name] for name in self.names]
        except KeyError as error:
            found = ", ".join(map(repr, sample)) or "none"
            raise EncodingError(f"column {error.args[0]!r} is missing; the sample has {found}") from None
        return self.rows.encode(values)

    def decode(self, row: bytes | memoryview, columns: Container[str] | None = None) -> dict[str, Any]:
        """Turn a row into its columns.

        Args:
            row: One row, with its newline.
            columns: Names of the columns to decode; None for all.

        Raises:
            ShardCorruptError: It is not one row.
            EncodingError: It does not hold what its columns say.
        """
        return self.rows.decode(row, columns)


def make_split_layout(
    shard_format: str, columns: Mapping[str, str], newline: str = "\n", separator: str | None = None
) -> SplitLayout:
    """Lay out the columns of a new dataset.

    Args:
        shard_format: ``json``, ``csv``, ``tsv`` or ``xsv``.
        columns: Column name to ``str``, ``int`` or ``float``.
        newline: What every row ends in.
        separator: What is between two fields; for ``xsv`` only, which needs it.

    Raises:
        ConfigError: There is no such format or encoding, there are no columns, ``separator`` is given where it is fixed
            or is missing where it is not, or a column's name cannot be written.
    """
    names = tuple(sorted(columns))
    return _compile(shard_format, names, tuple(columns[name] for name in names), newline, separator)


def read_split_layout(info: ShardInfo) -> SplitLayout:
    """The layout of a shard's samples, as its index describes it.

    Raises:
        IndexFormatError: The index describes columns that cannot be.
    """
    schema = info.schema
    if info.format == "json":
        names = tuple(sorted(schema["columns"]))
        encoding_names = tuple(schema["columns"][name] for name in names)
    else:
        names, encoding_names = schema["column_names"], schema["column_encodings"]
    try:
        return _compile(info.format, names, encoding_names, schema["newline"], schema.get("separator"))
    except ConfigError as error:
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} cannot be read: {shortened(str(error))}"
        ) from None


@lru_cache(maxsize=1024)
def _compile(
    shard_format: str, names: tuple[str, ...], encoding_names: tuple[str, ...], newline: str, separator: str | None
) -> SplitLayout:
    _check_columns(shard_format, names, encoding_names)
    separator = _check_separator(shard_format, separator)
    _check_text("newline", newline, may_be_empty=shard_format == "json")  # whose rows end by themselves
    if separator is None:
        rows: Rows = json_rows(names, encoding_names, newline)
    else:
        _check_text("separator", separator)
        rows = separated_rows(names, encoding_names, newline, separator)
    return SplitLayout(
        format=shard_format, names=names, encoding_names=encoding_names, newline=newline, separator=separator, rows=rows
    )


def _check_columns(shard_format: str, names: tuple[str, ...], encoding_names: tuple[str, ...]) -> None:
    if shard_format not in SPLIT_FORMATS:
        raise ConfigError(f"format must be one of {', '.join(SPLIT_FORMATS)}, but got {shard_format!r}")
    if not names or len(names) != len(encoding_names) or len(set(names)) != len(names):
        raise ConfigError(
            f"a sample needs at least one column, and for each its own name and an encoding, but got {names} "
            f"and {encoding_names}"
        )
    for name, encoding_name in zip(names, encoding_names, strict=True):
        _check_text("a column's name", name, may_be_empty=True)
        if encoding_name not in KINDS:
            raise ConfigError(
                f"columns of {shard_format} shards must be {', '.join(KINDS)}, but column {name!r} is "
                f"{encoding_name!r}; MDS takes every encoding"
            )


def _check_separator(shard_format: str, separator: str | None) -> str | None:
    """The separator of a format; None for json."""
    if (separator is not None) != (shard_format == "xsv"):
        wanted = (
            "xsv needs a separator" if shard_format == "xsv" else f"{shard_format} takes no separator, only xsv does"
        )
        raise ConfigError(f"{wanted}, but got {separator!r}")
    return separator if shard_format == "xsv" else _IMPLIED_SEPARATORS.get(shard_format)


def _check_text(what: str, text: str, *, may_be_empty: bool = False) -> None:
    try:
        sound = bool(text.encode()) or may_be_empty
    except (UnicodeEncodeError, AttributeError):
        sound = False
    if not sound:
        nature = "text that UTF-8 can hold" + ("" if may_be_empty else ", and not empty")
        raise ConfigError(f"{what} must be {nature}, but got {brief(text)}")


def split_config(
    layout: SplitLayout, *, compression: str | None, hashes: Sequence[str], size_limit: int | None
) -> bytes:
    """The config text of a meta file, byte for byte as the original writer makes it."""
    config = {
        **layout.schema,
        "compression": compression,
        "format": layout.format,
        "hashes": hashes,
        "size_limit": size_limit,
        "version": INDEX_VERSION,
    }
    return json.dumps(config, sort_keys=True).encode()


def meta_bytes(offsets: Sequence[int] | NDArray[np.int64], config: bytes) -> bytes:
    """The meta file of a shard.

    Args:
        offsets: Where each row starts in the data file, and where the last one ends; of shape (samples + 1,).
        config: What :func:`split_config` gives.

    Raises:
        ConfigError: One of the two files would have 4 GiB or more.
    """
    table = np.asarray(offsets, np.int64)
    check_shard_bytes(int(table[-1]))
    check_shard_bytes(4 + 4 * len(table) + len(config))
    return b"".join([np.array(len(table) - 1, "<u4").tobytes(), table.astype("<u4").tobytes(), config])
