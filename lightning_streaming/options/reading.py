"""Options of how samples are read: decoding of images, samples that cannot be read, and tools for debugging."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.images import KINDS
from lightning_streaming.options.groups import OptionGroup, store_plain
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.units import LARGEST_COUNT, check_path, check_whole, is_one_of, plain_number

OnBadSample = Literal["error", "replace"]
_LEAST_READ = 1000
"""Least number of samples that a share refers to, so that one of the first few does not end a run."""
_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
_COUNT = re.compile(r"\d+")
_LONGEST_TEXT = 64
"""Most characters of a limit."""
_LONGEST_TIMEOUT = 10**6
"""Seconds of the watchdog."""


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(OptionGroup):
    """Decoding of columns of images.

    Args:
        columns: Type of image columns in samples, by name, like ``{"image": "array"}``: "pil" images; the "bytes" of
            their files; an "array" of numpy, uint8 of shape (height, width, 3); a "tensor" of torch, uint8 of shape
            (3, height, width); or "encoded", an :class:`~lightning_streaming.EncodedImage` that ``transform`` decodes.
            None: the type of their format. See docs/images.md.
        threads: Threads of each reading process that decode samples and apply ``transform``, up to a batch ahead.
            0: the reading thread only.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "decode"
    example: ClassVar[str] = "{columns: {image: array}}"

    columns: Mapping[str, str] | None = None
    threads: int = 0

    def __post_init__(self) -> None:
        store_plain(self)
        object.__setattr__(self, "threads", check_whole("decode.threads", self.threads, 0))
        if self.columns is None:
            return
        if not isinstance(self.columns, Mapping) or not all(isinstance(name, str) for name in self.columns):
            raise ConfigError(
                "decode.columns must map names of columns to kinds, like {'image': 'array'}, but got "
                f"{short_repr(self.columns)}",
                option="decode.columns",
            )
        for name, kind in self.columns.items():
            if not is_one_of(kind, KINDS):
                known = ", ".join(map(repr, KINDS))
                raise ConfigError(
                    f"decode.columns must make one of {known} of column {name!r}, but got {short_repr(kind)}",
                    option=f"decode.columns.{name}",
                )


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


@public()
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


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig(OptionGroup):
    """Tools to find the sample at which a worker fails or hangs, and the step time without loading.

    Args:
        sample_log: Directory for a log of the samples that each worker reads; existing logs are extended. See
            docs/loading.md.
        watchdog_seconds: Seconds that one sample may take before its key and the stacks of its process are written to
            stderr.
        repeat_batches: Read this number of batches in each epoch, and repeat them instead of reading others, to measure
            a training step without loading. Such a run cannot be saved.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "debug"
    example: ClassVar[str] = "{sample_log: logs}"

    sample_log: str | os.PathLike[str] | None = None
    watchdog_seconds: float | None = None
    repeat_batches: int | None = None

    def __post_init__(self) -> None:
        store_plain(self)
        if self.repeat_batches is not None:
            count = check_whole("debug.repeat_batches", self.repeat_batches, 1)
            object.__setattr__(self, "repeat_batches", count)
        log, seconds = self.sample_log, self.watchdog_seconds
        if log is not None:
            path = check_path("debug.sample_log", log, "a directory to write logs to")
            object.__setattr__(self, "sample_log", path)
        if seconds is not None and not 0 < (plain_number(seconds) or 0) < _LONGEST_TIMEOUT:
            raise ConfigError(
                f"debug.watchdog_seconds must be a number of seconds above 0 and below 10**6, "
                f"but got {short_repr(seconds)}",
                option="debug.watchdog_seconds",
            )
