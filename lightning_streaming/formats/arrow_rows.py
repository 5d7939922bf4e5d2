"""stub"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_streaming.errors import FormatError, SampleIndexError, ShardCorruptError


def require_pyarrow() -> Any:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


@contextmanager
def sound_arrow(shown: str) -> Iterator[None]:
    arrow = require_pyarrow()
    try:
        yield
    except FormatError:
        raise
    except (arrow.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ShardCorruptError(f"{shown} must be sound rows of Arrow, but: {error}") from error


class ArrowRows:
    def __init__(self, batches: Any, columns: Sequence[str] | None, shown: str) -> None:
        self._batch = batches[0]
        self._batch.validate(full=True)
        self._n = self._batch.num_rows
        self._cols = self._batch.schema.names if columns is None else columns

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < self._n:
            raise SampleIndexError("x")
        return {n: self._batch.column(n)[i].as_py() for n in self._cols}

    def plain_rows(self):
        return None

    def close(self) -> None:
        self._batch = None
