"""Options for samples that cannot be read: an error, or replacements up to a limit."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import OptionGroup, store_plain
from lightning_streaming.replaced_names import suggests_names
from lightning_streaming.units import LARGEST_COUNT, check_path, is_one_of

OnBadSample = Literal["error", "replace"]
_LEAST_READ = 1000
"""Least number of samples that a share refers to, so that one of the first few does not end a run."""
_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
_COUNT = re.compile(r"\d+")
_LONGEST_TEXT = 64
"""Most characters of a limit."""


class BadLimit(NamedTuple):
    """Limit of bad samples."""

    text: str
    """The limit as the user wrote it."""
    share: Fraction | None
    """Share of the samples that were read; None if the limit is ``number``."""
    number: int = 0

    def allowed(self, read: int) -> int:
        """Return how many of ``read`` samples may be bad.

        A share refers to at least 1000 samples, and allows at least one unless it is 0.
        """
        if self.share is None:
            return self.number
        return max(1 if self.share else 0, int(self.share * max(read, _LEAST_READ)))


def parse_limit(value: object) -> BadLimit:
    """Parse a limit: a whole number, or a share like "0.01%".

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT:
        return BadLimit(str(value), None, value)
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST_TEXT else ""
    if _COUNT.fullmatch(text):
        return BadLimit(text, None, int(text))
    share = _SHARE.fullmatch(text)
    if share is None or Fraction(share[1]) > 100:
        raise ConfigError(
            "bad_samples.max must be a share of the samples read, like '0.01%', or a whole number of them, but got "
            f"{short_repr(value)}",
            option="bad_samples.max",
        )
    return BadLimit(text, Fraction(share[1]) / 100)


@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class BadSamplesConfig(OptionGroup):
    """Handling of samples that cannot be decoded, or on which ``transform`` fails.

    Args:
        action: "error" raises; "replace" skips the sample and reads another one of the same shard in its position, so
            that the number of batches stays the same and that sample is read twice. See docs/bad_samples.md.
        max: Limit of the samples that a rank may replace in an epoch: a share like "0.01%" of those it reads, of at
            least 1000, or a whole number like 5; one more is an error. "100%": no limit.
        log: Directory for JSON Lines files that list each replaced sample with its error; required for "replace". A
            resume reads and extends them, so each run needs its own. Several nodes should share it, several datasets
            not.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "bad_samples"
    example: ClassVar[str] = "{action: replace, log: logs/bad}"

    action: OnBadSample = "error"
    max: int | str = "0.01%"
    log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        store_plain(self)
        if not is_one_of(self.action, get_args(OnBadSample)):
            known = ", ".join(map(repr, get_args(OnBadSample)))
            raise ConfigError(
                f"bad_samples.action must be one of {known}, but got {short_repr(self.action)}",
                option="bad_samples.action",
            )
        parse_limit(self.max)
        if self.log is not None:
            path = check_path("bad_samples.log", self.log, "a directory to write logs to")
            object.__setattr__(self, "log", path)
        if self.replaces and self.log is None:
            raise ConfigError(
                "bad_samples.action='replace' needs a directory of the run for the log of replaced samples, which a "
                "resume reads",
                hint="pass bad_samples.log, like 'logs/bad'",
                option="bad_samples.log",
            )
        if not self.replaces and self.log is not None:
            raise ConfigError(
                f"bad_samples.log is for replaced samples, but bad_samples.action={self.action!r} replaces none",
                hint="pass bad_samples.action='replace', or leave bad_samples.log out",
                option="bad_samples.log",
            )

    @property
    def replaces(self) -> bool:
        """True if bad samples are replaced."""
        return self.action == "replace"
