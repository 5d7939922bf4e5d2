"""Which columns of a shard are read."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.checks import shortened
from lightning_streaming.formats.index import ShardInfo


def column_names(info: ShardInfo) -> tuple[str, ...]:
    """Names of a shard's columns, sorted as a writer sorts them, whatever its format."""
    names: tuple[str, ...] = tuple(info.schema["columns" if info.format == "json" else "column_names"])
    return tuple(sorted(names)) if info.format == "json" else names


def check_selection(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """The columns that a user asks for, each once; None for all.

    Raises:
        ConfigError: It is not a list of at least one name.
    """
    if columns is None:
        return None
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Sequence):
        raise ConfigError(f"columns must be a list of names, like ['text'], but got {columns!r}")
    if not columns or not all(isinstance(name, str) for name in columns):
        raise ConfigError(f"columns must name at least one column, each by a text, but got {list(columns)!r}")
    return tuple(dict.fromkeys(columns))


def check_columns(info: ShardInfo, columns: Sequence[str] | None) -> None:
    """Refuse a shard that lacks a column that is asked for.

    Raises:
        ConfigError: Naming the shard, the column, and what there is.
    """
    there = column_names(info)
    missing = [name for name in columns or () if name not in there]
    if missing:
        has = shortened(", ".join(map(repr, there)) or "none")
        raise ConfigError(f"{info.raw_data.basename} has no column {missing[0]!r}; it has {has}")
