"""Conditions over columns: SQL, functions, and parts drawn by hash; each gives a truth value for every sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.formats.columns import ColumnValues
from lightning_streaming.loading.selection import SplitSlice, function_columns

_TABLE = "samples"
_HASH_BYTES = 8


class Condition(Protocol):
    """Something that each sample meets or not."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at."""
        ...

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some samples meet it, of shape (samples,).

        Args:
            columns: By name, those that it looks at.
            numbers: The samples, by their numbers in the stream.
        """
        ...


@dataclass(frozen=True, slots=True)
class FunctionCondition:
    """What a function of the user says of each sample, given its columns by name."""

    function: Callable[..., Any]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return function_columns(self.function)

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Call it for each sample."""
        names = self.columns
        rows = zip(*(_listed(columns[name]) for name in names), strict=True)
        wanted = np.zeros(len(numbers), np.bool_)
        for place, row in enumerate(rows):
            values = dict(zip(names, row, strict=True))
            try:
                wanted[place] = bool(self.function(**values))
            except Exception as error:
                name = getattr(self.function, "__qualname__", "where")
                raise ConfigError(
                    f"where={name} failed on sample {numbers[place]}: {type(error).__name__}: {error}"
                ) from error
        return wanted


class SqlCondition:
    """What a condition in SQL says of each sample; NULL is no. DuckDB evaluates it, without access to anything else.

    Args:
        expression: A condition over columns, as after WHERE.

    Raises:
        MissingDependencyError: DuckDB or pyarrow is not installed.
        ConfigError: It is no condition, or asks for more than the columns.
    """

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self._database = _connected(_duckdb())  # opening one takes longer than a million samples
        self.columns = _columns_of(self._database, expression)

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Ask DuckDB."""
        import pyarrow

        table = pyarrow.table({name: pyarrow.array(_for_arrow(columns[name])) for name in self.columns})
        duckdb = _duckdb()
        with self._database.cursor() as connection:  # of its own: threads ask at the same time
            connection.register(_TABLE, table)
            try:
                # As a condition, which may not be an aggregate; then as a value of each sample, in their order.
                connection.execute(f"SELECT 1 FROM {_TABLE} WHERE ({self.expression}\n) LIMIT 0").fetchall()  # noqa: S608
                asked = f"SELECT coalesce(cast(({self.expression}\n) AS boolean), false) AS met FROM {_TABLE}"  # noqa: S608
                found = connection.execute(asked).fetchnumpy()["met"]
            except duckdb.Error as error:
                told = str(error).partition("\n")[0]
                raise ConfigError(f"where={self.expression!r} cannot be evaluated: {told}") from None
        wanted: NDArray[np.bool_] = np.asarray(found, np.bool_)
        if len(wanted) != len(numbers):
            raise ConfigError(f"where={self.expression!r} gives {len(wanted)} values for {len(numbers)} samples")
        return wanted


def _duckdb() -> Any:
    try:
        import duckdb
        import pyarrow  # noqa: F401  # what columns are handed over in
    except ImportError as error:
        raise MissingDependencyError(
            f"where= in SQL needs DuckDB and pyarrow ({error}); install lightning-streaming[select], or pass a "
            "function, like where=lambda score: score >= 0.8"
        ) from error
    return duckdb


def _connected(duckdb: Any) -> Any:
    """An empty database of its own, in memory, that reads no files and no network."""
    return duckdb.connect(config={"enable_external_access": False, "threads": 1, "lock_configuration": True})


def _columns_of(database: Any, expression: str) -> tuple[str, ...]:
    with database.cursor() as connection:
        asked = f"SELECT * FROM {_TABLE} WHERE ({expression}\n)"  # noqa: S608  # it is only parsed
        parsed = json.loads(
            connection.execute("SELECT json_serialize_sql(CAST(? AS VARCHAR))", [asked]).fetchall()[0][0]
        )
        if parsed.get("error"):
            raise ConfigError(f"where={expression!r} cannot be read as a condition in SQL: {parsed['error_message']}")
        volatile = {
            name
            for (name,) in connection.execute(
                "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'"
            ).fetchall()
        }
    found: dict[str, None] = {}
    for node in _nodes(parsed["statements"][0]["node"].get("where_clause")):
        if node.get("class") == "SUBQUERY":
            raise ConfigError(f"where={expression!r} asks another table; it may look at a sample's columns alone")
        if node.get("function_name") in volatile:
            raise ConfigError(
                f"where={expression!r} uses {node['function_name']}(), whose outcome is not the same each time; a "
                "selection must be. Take a part by hash instead, like split='[:10%]'"
            )
        if node.get("type") == "COLUMN_REF":
            found[node["column_names"][0]] = None
    if len(parsed["statements"]) > 1 or not found:
        raise ConfigError(f'where={expression!r} looks at no column; name at least one, like where="score >= 0.8"')
    return tuple(found)


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(tree, Mapping):
        yield tree
        for one in tree.values():
            yield from _nodes(one)
    elif isinstance(tree, list):
        for one in tree:
            yield from _nodes(one)


def _for_arrow(values: ColumnValues) -> ColumnValues:
    """Half precision is told in single: DuckDB has no other."""
    if isinstance(values, np.ndarray) and values.dtype == np.float16:
        return values.astype(np.float32)
    return values


@dataclass(frozen=True, slots=True)
class PartCondition:
    """A part of the samples by hash: of a column's value, or of the sample's number in its stream.

    Appending samples moves none that is there. Slices that do not overlap have no sample in common, nor two samples of
    one value of the column.
    """

    part: SplitSlice
    split_by: str | None
    seed: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that is hashed, if any."""
        return () if self.split_by is None else (self.split_by,)

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Compare the hashes with the borders."""
        if self.split_by is None:
            hashes = _mixed(numbers.view(np.uint64), self.seed)
        else:
            hashes = _hashes(columns[self.split_by], self.seed, self.split_by)
        start, stop = self.part.thresholds()
        met: NDArray[np.bool_] = hashes >= np.uint64(start)
        return met if stop >= 2**64 else met & (hashes < np.uint64(stop))


def _hashes(values: ColumnValues, seed: int, column: str) -> NDArray[np.uint64]:
    """The same for the same value, whatever the width of the integers it is stored in."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise ConfigError(
                f"split_by={column!r} is a column of {values.dtype.name}; parts are drawn by whole numbers, text or "
                "bytes, which are equal or not"
            )
        return _mixed(values.astype(np.int64).view(np.uint64), seed)
    key = seed.to_bytes(8, "little", signed=True)
    digests = b"".join(
        hashlib.blake2b(one if isinstance(one, bytes) else str(one).encode(), digest_size=_HASH_BYTES, key=key).digest()
        for one in values
    )
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def _mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Each number mixed with the seed: two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    return _splitmix(numbers ^ _splitmix(np.array([seed], np.int64).view(np.uint64)))


def _splitmix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: NDArray[np.uint64] = mixed >> np.uint64(31)
    return mixed ^ last


def _listed(values: ColumnValues) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else values
