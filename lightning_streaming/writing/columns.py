"""Encodings of a dataset's columns, told from its first sample or from one of its shards."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError

# The first type that fits decides, so bool stands before int: JSON gives True back, where int would give 1.
_ENCODING_OF_TYPE = (
    (bool, "json"),
    (bytes, "bytes"),
    (str, "str"),
    (int, "int"),
    (float, "float64"),
    (Decimal, "str_decimal"),
    (np.ndarray, "ndarray"),
    (dict, "json"),
    (list, "json"),
)

_TEXT_TYPES = (str, int, float)


def infer_columns(sample: Mapping[str, Any]) -> dict[str, str]:
    """Choose an encoding for each column of a sample, by the type of its value.

    bytes, str and int keep their names, float becomes float64, a numpy number its dtype, an array ``ndarray`` (of any
    dtype and shape), Decimal ``str_decimal``; bool, dict and list become ``json``.

    Returns:
        Column name to encoding name.

    Raises:
        ConfigError: A value has another type.
    """
    found = {name: _infer(value) for name, value in sample.items()}
    missing = [name for name, encoding in found.items() if encoding is None]
    if missing:
        held = ", ".join(f"{name!r}, a {type(sample[name]).__name__}" for name in missing)
        columns = {name: encoding or "..." for name, encoding in found.items()}
        raise ConfigError(f"no encoding follows from column {held}; pass columns={columns}")
    return {name: encoding for name, encoding in found.items() if encoding is not None}


def infer_text_columns(sample: Mapping[str, Any]) -> dict[str, str]:
    """Choose ``str``, ``int`` or ``float`` for each column of a sample, for the formats that know no other.

    Returns:
        Column name to encoding name.

    Raises:
        ConfigError: A value has another type; bool too, which would come back as a number or a text.
    """
    wrong = [
        f"{name!r} is a {type(value).__name__}" for name, value in sample.items() if type(value) not in _TEXT_TYPES
    ]
    if wrong:
        raise ConfigError(
            f"column {', '.join(wrong)}, but this format knows str, int and float only; turn it into one of them, or "
            "use MDSWriter"
        )
    return {name: type(value).__name__ for name, value in sample.items()}


def check_columns(columns: object) -> None:
    """Refuse what does not say of columns what their encodings are.

    Raises:
        ConfigError: It maps no texts to texts.
    """
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for pair in columns.items() for text in pair):
        shown = dict(columns) if isinstance(columns, Mapping) else columns
        raise ConfigError(f"columns must map names to encodings, all of them texts, but got {shown!r}")


def columns_of(schema: Mapping[str, Any]) -> dict[str, str]:
    """Column name to encoding name, from what an index says of the columns in any format."""
    if "columns" in schema:
        return dict(schema["columns"])
    return dict(zip(schema["column_names"], schema["column_encodings"], strict=True))


def _infer(value: object) -> str | None:
    for kind, encoding_name in _ENCODING_OF_TYPE:
        if isinstance(value, kind):
            return encoding_name
    if isinstance(value, np.number) and value.dtype.kind in "iuf" and value.dtype.itemsize <= 8:
        return str(value.dtype.name)
    return None
