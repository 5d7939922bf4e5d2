"""Conditions on what is planned, as ``--fail-if`` takes them: ``NAME(STREAM) OP NUMBER``, looked up and compared."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.units import parse_bytes, parse_count

_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(?:\((.*)\)\s*)?(<=|>=|==|!=|<|>)\s*(\S+(?:\s+[A-Za-z]+)?)\s*", re.DOTALL)
_EXAMPLE = "repeats(math) > 4"
_LONGEST = 1000
"""Characters of a condition."""


@dataclass(frozen=True, slots=True)
class _Name:
    """What may be asked about."""

    means: str
    parse: Callable[[str], float]
    of_stream: bool = False
    """Whether it is told of each stream; without one it is that of all together, or the worst."""


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) else float(parse_count(text))


def _bytes(text: str) -> float:
    return float(parse_bytes(text))


def _share(text: str) -> float:
    return float(text[:-1]) / 100 if re.fullmatch(r"\d+(\.\d*)?%", text) else _number(text)


NAMES: Mapping[str, _Name] = {
    "samples": _Name("samples that are read", _number, of_stream=True),
    "tokens": _Name("tokens that are read", _number, of_stream=True),
    "share": _Name("part of all samples, as 0.2 or 20%", _share, of_stream=True),
    "passes": _Name("how often the stream is read; without a stream, the most of any", _number, of_stream=True),
    "repeats": _Name("how often the sample is read that is read most often", _number, of_stream=True),
    "first_repeat": _Name("step in which a sample is first read again; inf where none is", _number, of_stream=True),
    "bytes": _Name("bytes that all nodes fetch, as 2TB", _bytes, of_stream=True),
    "refetched": _Name("bytes fetched, by bytes of the shards that are needed: 1 where none is fetched twice", _number),
    "cache_peak": _Name("bytes that a node's cache holds at most, as 500GB", _bytes),
    "cache_exceeded": _Name("how often the cache_limit would be exceeded", _number),
    "first_batch_seconds": _Name("seconds before the first batch", _number),
    "first_batch_bytes": _Name("bytes that the first batch waits for, indexes included", _bytes),
    "mixing": _Name("how well batches are mixed, 1 as drawn at random", _share),
    "fill": _Name("how full packs are, as 0.95 or 95%", _share),
    "memory": _Name("bytes that a node's memory and runtime directory take for order, lengths and batches", _bytes),
    "steps": _Name("steps of the run", _number),
    "epochs": _Name("epochs of the run, also begun ones", _number),
}
"""What a condition may be about, by name."""


def names_told() -> str:
    """The names, a line each, for ``--help``."""
    return "\n".join(
        f"    {name + ('(STREAM)' if one.of_stream else ''):22} {one.means}" for name, one in NAMES.items()
    )


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A number of which only that is known."""

    number: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCondition:
    """One condition."""

    text: str
    name: str
    stream: str | None
    compared: str
    number: float

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it holds.

        Args:
            values: By name what is planned: a number, :class:`AtLeast` one, or None where it is not known; of names
                that are told of each stream also as ``(name, stream)``.

        Raises:
            ConfigError: There is no such stream, or what is asked is not known of this run, or not well enough.
        """
        key: Any = self.name if self.stream is None else (self.name, self.stream)
        if key not in values:
            streams = sorted(one[1] for one in values if isinstance(one, tuple) and one[0] == self.name)
            there = f"there are {', '.join(map(repr, streams))}"
            raise ConfigError(
                f"--fail-if {self.text!r}: there is no stream {self.stream!r}",
                hint=there,
                option="--fail-if",
                stream=self.stream,
            )
        value = values[key]
        if value is None:
            raise ConfigError(
                f"--fail-if {self.text!r}: {self.name} is not known of this run",
                hint="leave the condition out",
                option="--fail-if",
            )
        compare = _COMPARED[self.compared]
        if not isinstance(value, AtLeast):
            return compare(value, self.number)
        # It holds of the least number, of one between, and of any that is larger; or of none of them.
        answers = {compare(one, self.number) for one in (value.number, max(value.number, self.number), math.inf)}
        if len(answers) > 1:
            told = f"{self.name} is known to be {value.number:,.10g} or more"
            raise ConfigError(
                f"--fail-if {self.text!r}: {told}, which does not tell whether that holds", option="--fail-if"
            )
        return answers.pop()


def parse_condition(text: str) -> PlanCondition:
    """Understand a condition.

    Raises:
        ConfigError: It is none; the message lists what there is.
    """
    match = _CONDITION.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ConfigError(
            f"--fail-if takes conditions like {_EXAMPLE!r}: a name, one of {', '.join(_COMPARED)}, and a number; "
            f"but got {text[:_LONGEST]!r}",
            hint=f"names are {', '.join(NAMES)}",
            option="--fail-if",
        )
    name, stream, compared, number = match.groups()
    asked = NAMES.get(name)
    if asked is None:
        raise ConfigError(
            f"--fail-if {text!r}: there is no {name!r}", hint=f"names are {', '.join(NAMES)}", option="--fail-if"
        )
    if stream is not None and not asked.of_stream:
        raise ConfigError(
            f"--fail-if {text!r}: {name} is not told of each stream", hint="write it without one", option="--fail-if"
        )
    try:
        parsed = math.inf if number == "inf" else asked.parse(number)
    except ConfigError as error:
        raise ConfigError(f"--fail-if {text!r}: {error}", option="--fail-if") from None
    plain = None if stream is None else stream.strip()
    if plain is not None and len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
        plain = plain[1:-1]
    return PlanCondition(text=text.strip(), name=name, stream=plain, compared=compared, number=parsed)
