"""What a user asks of samples that cannot be read: an error, or others in their places, up to a limit."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

from lightning_streaming.errors import ConfigError

OnBadSample = Literal["error", "replace"]
_LEAST_READ = 1000
"""Samples that a share is of at least, so that one of the first few does not end a run."""
_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
_COUNT = re.compile(r"\d+")
_LONGEST_TEXT = 64
"""Characters; no limit that means anything is longer."""


class BadLimit(NamedTuple):
    """How many samples may be bad."""

    told: str
    """As the user wrote it."""
    share: Fraction | None
    """Of those that were read; None where ``number`` says it."""
    number: int = 0

    def allowed(self, read: int) -> int:
        """How many of so many samples may be bad.

        A share is of at least 1000, and leaves one at least, unless it is 0.
        """
        if self.share is None:
            return self.number
        return max(1 if self.share else 0, int(self.share * max(read, _LEAST_READ)))


def parse_limit(value: object) -> BadLimit:
    """A limit as a user writes it: a whole number, or a share like "0.01%".

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return BadLimit(str(value), None, value)
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST_TEXT else ""
    if _COUNT.fullmatch(text):
        return BadLimit(text, None, int(text))
    found = _SHARE.fullmatch(text)
    if found is None or Fraction(found[1]) > 100:
        raise ConfigError(
            f"max_bad must be a share of the samples read, like '0.01%', or a whole number of them, but got {value!r}"
        )
    return BadLimit(text, Fraction(found[1]) / 100)


@dataclass(frozen=True, kw_only=True)
class BadSampleOptions:
    """What becomes of samples that cannot be read.

    Args:
        on_bad_sample: What becomes of a sample that cannot be decoded, or on which ``transform`` fails: "error", or
            "replace" it by another of its shard, which seed, epoch and position choose. See docs/bad_samples.md.
        max_bad: How many of the samples that a rank reads in an epoch may be replaced, as a share like "0.01%" or a
            number; one more is an error.
        bad_log: Directory of the run for logs of the samples that were replaced, to write, add to and read again after
            a resume; needed with "replace". Several nodes should share it, several datasets not.
    """

    on_bad_sample: OnBadSample = "error"
    max_bad: int | str = "0.01%"
    bad_log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.on_bad_sample not in get_args(OnBadSample):
            told = ", ".join(map(repr, get_args(OnBadSample)))
            raise ConfigError(f"on_bad_sample must be one of {told}, but got {self.on_bad_sample!r}")
        parse_limit(self.max_bad)
        if self.bad_log is not None and not (isinstance(self.bad_log, (str, os.PathLike)) and self.bad_log):
            raise ConfigError(f"bad_log must be a directory to write logs to, but got {self.bad_log!r}")
        if self.on_bad_sample == "replace" and self.bad_log is None:
            raise ConfigError(
                "on_bad_sample='replace' needs a directory of the run in which to write down what was replaced, and to "
                "find it after a resume; pass bad_log=, like 'logs/bad'"
            )
        if self.on_bad_sample != "replace" and self.bad_log is not None:
            raise ConfigError(
                f"bad_log is for samples that are replaced, and on_bad_sample={self.on_bad_sample!r} replaces none; "
                "pass on_bad_sample='replace', or leave bad_log out"
            )
