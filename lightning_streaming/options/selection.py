"""Options that select samples of a stream, checked."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.column_functions import WHERE, function_name
from lightning_streaming.options.groups import OptionGroup, store_plain
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.units import check_text, check_whole

Where = str | Callable[..., Any]
"""Condition: SQL over the columns, or a function whose parameters are named like columns."""
Indices = Sequence[int] | Sequence[bool] | str | os.PathLike[str] | NDArray[Any]
"""Numbers of samples of a stream, or a truth value for each; or the ``.npy`` file that holds them."""

_VERSION = 2
"""Version of how conditions are evaluated; part of the name of cached selections. 2: the time zone of SQL is pinned."""
_FRACTION = re.compile(r"\s*(?:(?P<start>\d{1,9}(\.\d{1,99})?)%)?\s*:\s*(?:(?P<stop>\d{1,9}(\.\d{1,99})?)%)?\s*")


class HashSlice(NamedTuple):
    """Part of a stream by hash: the samples whose hash, relative to the largest hash, is in [start, stop)."""

    start: Fraction
    stop: Fraction

    def __str__(self) -> str:
        return f"{_percent(self.start)}:{_percent(self.stop)}"

    def thresholds(self) -> tuple[int, int]:
        """Return the range as whole numbers in [0, 2**64]; adjacent slices share a threshold."""
        return int(self.start * 2**64), int(self.stop * 2**64)


def parse_fraction(fraction: str) -> HashSlice:
    """Parse a fraction into a slice.

    >>> parse_fraction("98%:") == HashSlice(Fraction(98, 100), Fraction(1))
    True

    Raises:
        ConfigError: The text is no range in percent.
    """
    match = _FRACTION.fullmatch(fraction)
    if match is None or match["start"] is match["stop"] is None:
        raise ConfigError(
            f"selection.fraction must be a range in percent, like '0%:98%', ':98%' or '98%:', "
            f"but got {short_repr(fraction)}",
            hint="slices are drawn by hash, so give percents and not numbers of samples",
            option="selection.fraction",
        )
    start, stop = Fraction(match["start"] or 0) / 100, Fraction(match["stop"] or 100) / 100
    if not 0 <= start < stop <= 1:
        raise ConfigError(
            f"selection.fraction={short_repr(fraction)} goes from {_percent(start)} to {_percent(stop)}",
            hint="a slice must begin before it ends, between 0% and 100%",
            option="selection.fraction",
        )
    return HashSlice(start, stop)


def _percent(part: Fraction) -> str:
    return f"{float(100 * part):g}%"


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionConfig(OptionGroup):
    """Selection of the samples that are read of a stream: those that meet all conditions.

    None in a stream stands for the value of its stage or dataset, "" for no condition.

    Args:
        where: A condition in SQL over columns, like "score >= 0.8 and lang in ('en', 'de')"; text is in single quotes.
            In Python also a function whose parameters are named like columns: ``lambda score, lang: score >= 0.8``.
            Evaluated once; see docs/selecting.md.
        fraction: A part drawn by hash, as a range in percent: "0%:98%" to train, and the rest "98%:100%" to validate.
            Parts that do not overlap have no sample in common, and stay the same when data is appended. ``where`` does
            not change in which part a sample is.
        group_by: Column whose value decides in which part of ``fraction`` a sample is, so that samples of one value
            stay together: the parts are then parts of the values. None: each sample is drawn on its own.
        seed: Seed of the hash that draws the parts: give all parts of a split the same. None: 0.
        indices: Numbers of the samples, counted in the stream from 0; a bool for each sample; or the path of a ``.npy``
            file of either.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "selection"
    example: ClassVar[str] = "{where: 'score >= 0.8'}"

    where: Where | None = None
    fraction: str | None = None
    group_by: str | None = None
    seed: int | None = None
    indices: Indices | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        store_plain(self, leave=("indices",))  # which may be large
        if isinstance(self.where, str) and self.where and not self.where.strip():
            raise ConfigError(
                "selection.where is empty",
                hint='give a condition over columns, like where="score >= 0.8", or leave it out',
                option="selection.where",
            )
        if self.where is not None and not callable(self.where):
            expected = 'a condition in SQL, like "score >= 0.8", or a function of columns'
            check_text("selection.where", self.where, expected)
        if self.fraction is not None:
            check_text("selection.fraction", self.fraction, "a range in percent, like '0%:98%'")
            _ = self.part  # which raises
        if self.group_by is not None:
            check_text("selection.group_by", self.group_by, "the name of a column")
        if self.seed is not None:
            object.__setattr__(self, "seed", check_whole("selection.seed", self.seed, -(2**63), 2**63 - 1))
        if isinstance(self.indices, os.PathLike):
            object.__setattr__(self, "indices", os.fspath(self.indices))
        if self.indices is not None and not isinstance(self.indices, str):
            numbers = as_numbers(self.indices)
            if not isinstance(self.indices, list | tuple):
                object.__setattr__(self, "indices", numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SelectionConfig):
            return NotImplemented
        own, others = ([getattr(group, item.name) for item in fields(self) if item.compare] for group in (self, other))
        return own == others and _are_equal(self.indices, other.indices)

    def resolved(self) -> SelectionConfig:
        """Return the options with empty texts replaced by None."""
        return replace(self, where=self.where or None, fraction=self.fraction or None, group_by=self.group_by or None)

    @property
    def part(self) -> HashSlice | None:
        """The slice drawn by hash; None for all samples."""
        return parse_fraction(self.fraction) if self.fraction else None

    @property
    def is_all(self) -> bool:
        """True if all samples are selected."""
        return self.where is None and self.fraction is None and self.indices is None

    def in_words(self) -> str:
        """Return the conditions as a message shows them."""
        where = repr(self.where) if isinstance(self.where, str) else function_name(self.where)
        conditions = {
            f"where={where}": self.where is not None,
            f"fraction={self.fraction!r}": self.fraction is not None,
            f"group_by={self.group_by!r}": self.fraction is not None and self.group_by is not None,
            "indices": self.indices is not None,
        }
        return ", ".join(text for text, is_set in conditions.items() if is_set)

    def described(self) -> dict[str, Any]:
        """Return the fields by name, with the number of indices."""
        indices = self.indices
        if indices is not None and not isinstance(indices, str | os.PathLike):
            indices = f"{len(indices)} values"
        return {**OptionGroup.described(self), "indices": indices}

    def key(self, data_version: str, selected: NDArray[np.bool_] | NDArray[np.int64] | None) -> str:
        """Return the name of the cached selection: 32 hexadecimal digits.

        Args:
            data_version: Version of the stream's data; see :meth:`ShardCache.data_version`.
            selected: Contents of :attr:`indices`.
        """
        where = self.where if self.where is None or isinstance(self.where, str) else WHERE.facts(self.where)
        part = self.part
        drawn = None if part is None else [str(part.start), str(part.stop), self.group_by, self.seed or 0]
        chosen = None if selected is None else [str(selected.dtype), hashlib.blake2b(selected.tobytes()).hexdigest()]
        facts = json.dumps(["selection", _VERSION, data_version, where, drawn, chosen])
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _are_equal(indices: Indices | None, others: Indices | None) -> bool:
    if isinstance(indices, str | None) or isinstance(others, str | None):
        return isinstance(indices, str | None) and isinstance(others, str | None) and indices == others
    mine, theirs = as_numbers(indices), as_numbers(others)
    return mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


def as_numbers(indices: Indices) -> NDArray[np.bool_] | NDArray[np.int64]:
    """Return numbers of samples, or truth values, as an array.

    Raises:
        ConfigError: The values are neither.
    """
    try:
        values = np.asarray(indices)
    except ValueError:  # lists of different lengths
        values = np.empty((0, 0))
    if values.dtype == np.bool_ and values.ndim == 1:
        return values.astype(np.bool_)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ConfigError(
            "selection.indices must be a list of sample numbers, or a truth value for each sample, but has shape "
            f"{values.shape} and dtype {values.dtype}",
            option="selection.indices",
        )
    if values.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max:
        raise ConfigError(
            f"selection.indices must be numbers of samples, but has {values.max()}", option="selection.indices"
        )
    return values.astype(np.int64)
