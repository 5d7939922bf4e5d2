"""Request for the lengths of samples in tokens: an array column, a column of integers, or a function of columns."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.columns import check_dtype
from lightning_streaming.options.column_functions import LENGTHS, function_name
from lightning_streaming.tokenizing.documents import DocumentTokenizer

_VERSION = 1
"""Version of the files of lengths; part of their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsRequest:
    """Source of the number of tokens of a sample: either ``column`` or ``lengths``.

    Args:
        column: Column of the tokens: arrays of one dimension, whose elements are counted; or bytes.
        dtype: Type of the tokens in a column of bytes, like "uint16".
        lengths: Column of whole numbers that holds the length; or a function whose parameters are named like columns,
            which is called for each sample and returns its length; or a tokenizer, which counts.
        version: Name given by the user for what the function depends on, such as a tokenizer: lengths are counted again
            if it changes. With a version, ``lengths`` may be any callable.
        inserted: Tokens that are added to each document, except for those without tokens, which are left out.
        group: Option group of the other fields, for errors.

    Raises:
        ConfigError: Neither or both are given, or one is invalid.
    """

    column: str | None = None
    dtype: str | None = None
    lengths: str | Callable[..., Any] | None = None
    version: str | None = None
    inserted: int = 0
    group: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.column is None) == (self.lengths is None):
            raise ConfigError(
                "the length of a sample needs a column or a function",
                hint="pass either the column of its tokens, like column='tokens'; or a column of whole numbers, or a "
                "function of columns, like lengths='num_tokens'",
                option="lengths",
            )
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            raise ConfigError(f"column must be the name of a column, but is {short_repr(self.column)}", option="column")
        is_column = isinstance(self.lengths, str) and self.lengths
        if self.lengths is not None and not callable(self.lengths) and not is_column:
            raise ConfigError(
                f"lengths must be the name of a column, or a function of columns, but is {short_repr(self.lengths)}",
                option="lengths",
            )
        if self.version is not None and not callable(self.lengths):
            raise ConfigError(
                f"lengths_version={short_repr(self.version)} needs a function in lengths=, which is not given",
                hint="remove lengths_version",
                option="lengths_version",
            )
        if self.version is not None and (not isinstance(self.version, str) or not self.version):
            raise ConfigError(
                "lengths_version must be a text, like 'gpt2' or a digest of the tokenizer's file, but is "
                f"{short_repr(self.version)}",
                option="lengths_version",
            )
        if callable(self.lengths) and not isinstance(self.lengths, DocumentTokenizer):
            LENGTHS.facts(self.lengths, self.version)
            LENGTHS.columns(self.lengths)
        if self.dtype is not None and self.column is None:
            raise ConfigError(
                f"dtype={short_repr(self.dtype)} needs a column of tokens in column=, which is not given",
                option="dtype",
            )
        if self.dtype is not None:
            check_dtype(self.dtype)

    def in_words(self) -> str:
        """Return the request as a message shows it."""
        if self.column is not None:
            return f"column={self.column!r}" + ("" if self.dtype is None else f", dtype={self.dtype!r}")
        if isinstance(self.lengths, DocumentTokenizer):
            return f"tokenize ({self.lengths.digest[:16]})"
        return (
            f"lengths={self.lengths!r}" if isinstance(self.lengths, str) else f"lengths={function_name(self.lengths)}"
        )

    def key(self, data_version: str) -> str:
        """Return the name of the cached lengths: 32 hexadecimal digits.

        Args:
            data_version: Version of the stream's data; see :meth:`ShardCache.data_version`.
        """
        element_bytes = None if self.dtype is None else check_dtype(self.dtype)
        lengths: Any = self.lengths
        if isinstance(self.lengths, DocumentTokenizer):
            lengths = ["tokenize", self.lengths.digest]
        elif callable(self.lengths):
            lengths = LENGTHS.facts(self.lengths, self.version)
        facts = ["lengths", _VERSION, sys.byteorder, data_version, self.column, element_bytes, lengths]
        facts += [self.inserted] if self.inserted else []
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
