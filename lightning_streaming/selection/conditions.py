"""Conditions over columns that return a truth value for each sample: SQL, functions, and parts drawn by hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.formats.columns import ColumnValues
from lightning_streaming.options.column_functions import WHERE, UnfitAnswerError
from lightning_streaming.options.selection import HashSlice

_TABLE = "samples"
_HASH_BYTES = 8
_MOST_DIGITS = 38
"""Most digits of a decimal in SQL."""
_VOLATILE = """
SELECT function_name FROM duckdb_functions() GROUP BY function_name
HAVING bool_or(stability = 'VOLATILE')
    OR bool_and(stability <> 'CONSISTENT')
    OR bool_or(regexp_matches(macro_definition, 'current_(date|time)|localtime'))
"""
"""Query for functions of the clock, of random numbers and of the process. If only some overloads of a function are not
consistent, these depend on the time zone, which is pinned."""
_VOLATILE_TOO = frozenset({"current_localtime", "current_localtimestamp", "current_setting"})
"""Further volatile functions, which some versions of DuckDB list as consistent."""

_TAKE_LAMBDAS = frozenset(
    prefix + name for prefix in ("", "list_", "array_") for name in ("transform", "apply", "filter", "reduce")
)
"""Functions with a lambda among their arguments, after the first."""
_SCHEMAS = frozenset({"main", "pg_catalog", "system", "temp"})
"""Names before the dot of a function that are schemas and no columns."""


class Condition(Protocol):
    """Condition that each sample meets or not."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the condition reads."""
        ...

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples meet the condition, of shape (samples,).

        Args:
            columns: Values of the columns that it reads, by name.
            numbers: The samples, by their numbers in the stream.
        """
        ...


@dataclass(frozen=True, slots=True)
class FunctionCondition:
    """Condition given by a function of the user, which is called with columns by name."""

    function: Callable[..., Any]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the function's parameters."""
        return WHERE.columns(self.function)

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Call the function for each sample."""
        return np.fromiter(WHERE.called(self.function, columns, numbers, _truth), np.bool_, len(numbers))


def _truth(answer: object) -> bool:
    if isinstance(answer, str | bytes):
        raise UnfitAnswerError(f"returned the text {answer!r}", "return whether the sample is wanted, True or False")
    return bool(answer)


class SqlCondition:
    """Condition in SQL, where NULL is false; DuckDB evaluates it, without access to anything but the columns.

    Args:
        expression: A condition over columns, as after WHERE.

    Raises:
        MissingDependencyError: DuckDB or pyarrow is not installed.
        ConfigError: It is no condition, or reads more than the columns.
    """

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self._database = _connected(_duckdb())  # opening a database takes longer than evaluating a million samples
        self.columns = _columns_of(self._database, expression)

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Evaluate the expression in DuckDB."""
        import pyarrow

        table = pyarrow.table({name: self._arrow(name, columns[name]) for name in self.columns})
        duckdb = _duckdb()
        with self._database.cursor() as connection:  # threads evaluate at the same time
            try:
                connection.register(_TABLE, table)
                # As a condition, which may not be an aggregate; then as a value of each sample, in their order.
                connection.execute(f"SELECT 1 FROM {_TABLE} WHERE ({self.expression}\n) LIMIT 0").fetchall()  # noqa: S608
                query = f"SELECT coalesce(cast(({self.expression}\n) AS boolean), false) AS met FROM {_TABLE}"  # noqa: S608
                met = connection.execute(query).fetchnumpy()["met"]
            except duckdb.Error as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(
                    f"where={self.expression!r} cannot be evaluated: {reason}", option="selection.where"
                ) from None
        wanted: NDArray[np.bool_] = np.asarray(met, np.bool_)
        if len(wanted) != len(numbers):
            raise ConfigError(
                f"where={self.expression!r} gives {len(wanted)} values for {len(numbers)} samples",
                option="selection.where",
            )
        return wanted

    def _arrow(self, name: str, values: ColumnValues) -> Any:
        """Return a column for DuckDB: half precision as single, and whole numbers beyond 64 bits as decimals."""
        import pyarrow

        if isinstance(values, np.ndarray):
            return pyarrow.array(values.astype(np.float32) if values.dtype == np.float16 else values)
        try:
            try:
                array = pyarrow.array(values)
            except OverflowError:
                array = pyarrow.array(list(map(Decimal, values)), pyarrow.decimal128(_MOST_DIGITS, 0))
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ConfigError(
                f"where={self.expression!r} cannot read column {name!r} in SQL: {error}", option="selection.where"
            ) from None
        if pyarrow.types.is_decimal(array.type) and array.type.precision > _MOST_DIGITS:
            raise ConfigError(
                f"where={self.expression!r} reads column {name!r}, which needs {array.type.precision} digits; SQL has "
                f"at most {_MOST_DIGITS}",
                hint=f"pass a function instead, like where=lambda {name}: {name} > 0",
                option="selection.where",
            )
        return array


def _duckdb() -> Any:
    try:
        import duckdb
        import pyarrow  # noqa: F401  # columns are passed as its tables
    except ImportError as error:
        raise MissingDependencyError(
            f"where= in SQL needs DuckDB and pyarrow ({error})",
            hint="install lightning-streaming[select], or pass a function, like where=lambda score: score >= 0.8",
            option="selection.where",
        ) from error
    return duckdb


def _connected(duckdb: Any) -> Any:
    """Open an empty database in memory that reads neither files nor the network, nor settings of this machine."""
    database = duckdb.connect(config={"enable_external_access": False, "threads": 1})
    # A build without ICU has neither time zones nor these settings.
    known = {name for (name,) in database.execute("SELECT name FROM duckdb_settings()").fetchall()}
    for setting, value in (("TimeZone", "UTC"), ("Calendar", "gregorian"), ("lock_configuration", "true")):
        if setting in known:
            database.execute(f"SET GLOBAL {setting} = '{value}'")  # for all its cursors
    return database


def _columns_of(database: Any, expression: str) -> tuple[str, ...]:
    with database.cursor() as connection:
        query = f"SELECT * FROM {_TABLE} WHERE ({expression}\n)"  # noqa: S608  # it is only parsed
        parsed = json.loads(
            connection.execute("SELECT json_serialize_sql(CAST(? AS VARCHAR))", [query]).fetchall()[0][0]
        )
        if parsed.get("error"):
            raise ConfigError(
                f"where={expression!r} cannot be read as a condition in SQL: {parsed['error_message']}",
                option="selection.where",
            )
        volatile = _VOLATILE_TOO.union(*connection.execute(_VOLATILE).fetchall())
    condition = parsed["statements"][0]["node"].get("where_clause")
    columns = dict.fromkeys(_column_names(condition))
    for node in _nodes(condition):
        if node.get("class") == "SUBQUERY":
            raise ConfigError(
                f"where={expression!r} reads another table",
                hint="a condition can read only the columns of a sample",
                option="selection.where",
            )
        name = node.get("function_name")
        is_age = name == "age" and len(node.get("children") or node.get("arguments") or ()) == 1  # until today
        if name in volatile or is_age:
            raise ConfigError(
                f"where={expression!r} uses {name}(){' of one date' if is_age else ''}, whose result changes between "
                "calls",
                hint="a selection must be reproducible: compare with a fixed date, or use a fraction like ':10%'",
                option="selection.where",
            )
    if len(parsed["statements"]) > 1 or not columns:
        raise ConfigError(
            f"where={expression!r} reads no column",
            hint='name at least one, like where="score >= 0.8"',
            option="selection.where",
        )
    for place, name in enumerate(columns):
        alike = [other for other in list(columns)[:place] if other.lower() == name.lower()]
        if alike:
            raise ConfigError(
                f"where={expression!r} reads columns {alike[0]!r} and {name!r}, which are the same name in SQL",
                hint="pass a function instead",
                option="selection.where",
            )
    return tuple(columns)


def _column_names(tree: Any, parameters: Set[str] = frozenset(), *, may_be_lambda: bool = False) -> Iterator[str]:
    """Yield the columns that a parsed expression names, without the parameters of its lambdas.

    Args:
        tree: The expression, or a part of it.
        parameters: Parameters of the enclosing lambdas, in lower case.
        may_be_lambda: True where an arrow is a lambda; elsewhere it extracts a value from JSON.
    """
    if isinstance(tree, list):
        for part in tree:
            yield from _column_names(part, parameters)
        return
    if not isinstance(tree, Mapping):
        return
    if tree.get("type") == "COLUMN_REF":
        name = tree["column_names"][0]
        if name.lower() not in parameters:
            yield name
        return
    if tree.get("type") == "LAMBDA" and (may_be_lambda or tree.get("syntax_type") == "LAMBDA_KEYWORD"):
        own = {name.lower() for name in _column_names(tree["lhs"])}
        yield from _column_names(tree["expr"], parameters | own)
        return
    path = (tree.get("qualified_name") or {}).get("path") or [tree.get("schema"), None]
    if tree.get("function_name") and len(path) > 1 and path[-2] and path[-2].lower() not in _SCHEMAS | parameters:
        yield path[-2]  # for example lang.upper()
    takes_lambda = tree.get("function_name") in _TAKE_LAMBDAS
    arguments = (tree.get("arguments") or tree.get("children") or []) if takes_lambda else []
    for place, argument in enumerate(arguments):
        yield from _column_names(argument.get("expression", argument), parameters, may_be_lambda=place > 0)
    for name, part in tree.items():
        if not takes_lambda or name not in ("arguments", "children"):
            yield from _column_names(part, parameters)


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(tree, Mapping):
        yield tree
        for part in tree.values():
            yield from _nodes(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _nodes(part)


@dataclass(frozen=True, slots=True)
class PartCondition:
    """Condition that takes a part of the samples by hash, of a column's value or of the sample's number in its stream.

    Appending samples does not move existing samples. Disjoint slices share no sample, and no value of the column.
    """

    part: HashSlice
    group_by: str | None
    seed: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that is hashed, if any."""
        return () if self.group_by is None else (self.group_by,)

    def met(self, columns: Mapping[str, ColumnValues], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Compare the hashes with the thresholds."""
        if self.group_by is None:
            hashes = _mixed(numbers.view(np.uint64), self.seed)
        else:
            hashes = _hashes(columns[self.group_by], self.seed)
        start, stop = self.part.thresholds()
        met: NDArray[np.bool_] = hashes >= np.uint64(start)
        return met if stop >= 2**64 else met & (hashes < np.uint64(stop))


def _hashes(values: ColumnValues, seed: int) -> NDArray[np.uint64]:
    """Hash values independently of their encoding: whole numbers of 64 bits are mixed, other values are digested."""
    if isinstance(values, np.ndarray):
        return _mixed(values.astype(np.int64).view(np.uint64), seed)
    key = seed.to_bytes(8, "little", signed=True)
    is_number = np.array([isinstance(value, int) and -(2**63) <= value < 2**64 for value in values], np.bool_)
    digests = b"".join(
        value.to_bytes(_HASH_BYTES + 1, "little", signed=True)[:_HASH_BYTES] if mixed else _digest(value, key)
        for value, mixed in zip(values, is_number.tolist(), strict=True)
    )
    hashes = np.frombuffer(digests, "<u8").astype(np.uint64)
    hashes[is_number] = _mixed(hashes[is_number], seed)
    return hashes


def _digest(value: Any, key: bytes) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, key=key).digest()


def _mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Mix each number with the seed, by two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    return splitmix(numbers ^ splitmix(np.array([seed], np.int64).view(np.uint64)))


def splitmix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply one round of SplitMix64, a bijection that spreads numbers evenly."""
    mixed: NDArray[np.uint64] = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: NDArray[np.uint64] = mixed >> np.uint64(31)
    return mixed ^ last
