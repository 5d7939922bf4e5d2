"""stub"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ArrowColumn(NamedTuple):
    encoding: str


def arrow_columns(schema: Any, columns: Sequence[str] | None, shown: str) -> dict[str, ArrowColumn]:
    return {one.name: ArrowColumn(str(one.type)) for one in schema if columns is None or one.name in columns}
