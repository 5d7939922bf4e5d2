"""Conditions of ``--fail-if`` on a plan: ``NAME(STREAM) OP NUMBER``, parsed, looked up and compared."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_streaming.errors import ConfigError
from lightning_streaming.units import parse_bytes, parse_count

_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(?:\((.*)\)\s*)?(<=|>=|==|!=|<|>)\s*(\S+(?:\s+[A-Za-z]+)?)\s*", re.DOTALL)
_LONGEST = 1000
"""Characters of a condition."""


class _Name(NamedTuple):
    """A quantity that conditions can name."""

    means: str
    parse: Callable[[str], float]
    of_stream: bool = False
    """Whether each stream has it; without a stream it is the sum, or the worst of any."""


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) else float(parse_count(text))


def _share(text: str) -> float:
    return float(text[:-1]) / 100 if re.fullmatch(r"\d+(\.\d*)?%", text) else _number(text)


NAMES: Mapping[str, _Name] = {
    "samples": _Name("samples read", _number, of_stream=True),
    "tokens": _Name("tokens read", _number, of_stream=True),
    "share": _Name(
        "share of what weights count, like 20%: samples or documents, or tokens with weights_in",
        _share,
        of_stream=True,
    ),
    "sample_share": _Name("share of all samples, or documents", _share, of_stream=True),
    "token_share": _Name("share of all tokens, where lengths are known", _share, of_stream=True),
    "passes": _Name("how often the stream is read; without a stream, the maximum", _number, of_stream=True),
    "repeats": _Name("maximum number of reads of one sample", _number, of_stream=True),
    "first_repeat": _Name("first step that reads a sample again; inf if none does", _number, of_stream=True),
    "bytes": _Name("bytes downloaded by all nodes, like 2TB", parse_bytes, of_stream=True),
    "refetched": _Name("downloaded bytes / bytes of the shards; 1 if none is downloaded twice", _number),
    "cache_peak": _Name("maximum size of a node's cache, like 500GB", parse_bytes),
    "cache_exceeded": _Name("how often the cache_limit would be exceeded", _number),
    "first_batch_seconds": _Name("seconds before the first batch", _number),
    "first_batch_bytes": _Name("bytes downloaded before the first batch, including indexes", parse_bytes),
    "mixing": _Name("how well batches are mixed; 1 is as well as a random draw", _share),
    "fill": _Name("share of the packs' capacity that tokens fill, like 0.95 or 95%", _share),
    "memory": _Name("bytes of a node's memory and runtime directory for order, lengths and batches", parse_bytes),
    "steps": _Name("steps of the run", _number),
    "epochs": _Name("epochs of the run, including an incomplete last one", _number),
}
"""What a condition may be about, by name."""
_OF_STREAM = ("samples", "tokens", "share", "sample_share", "token_share", "passes")
"""Of these, the counts of a stream."""


def names_help() -> str:
    """Return the names, a line each, for ``--help``."""
    return "\n".join(f"    {name + ('(STREAM)' if of.of_stream else ''):22} {of.means}" for name, of in NAMES.items())


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A lower bound of a number that is not known exactly."""

    number: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCondition:
    """One condition."""

    text: str
    name: str
    stream: str | None
    compared: str
    number: float

    def holds(self, values: Mapping[Any, float | AtLeast | None]) -> bool:
        """Return whether it holds.

        Args:
            values: Values by name: a number, :class:`AtLeast` one, or None if it is not known; of names that each
                stream has also by ``(name, stream)``.

        Raises:
            ConfigError: There is no such stream, or the value is not known, or not well enough.
        """
        key: Any = self.name if self.stream is None else (self.name, self.stream)
        if key not in values:
            streams = sorted(known[1] for known in values if isinstance(known, tuple) and known[0] == self.name)
            raise ConfigError(
                f"--fail-if {self.text!r}: there is no stream {self.stream!r}",
                hint=f"there are {', '.join(map(repr, streams))}",
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
        # It holds for the lower bound, for a number between, and for any that is larger; or for none of them.
        candidates = (value.number, max(value.number, self.number), math.inf)
        answers = {compare(candidate, self.number) for candidate in candidates}
        if len(answers) > 1:
            raise ConfigError(
                f"--fail-if {self.text!r}: {self.name} is known to be {value.number:,.10g} or more, which does not "
                "say whether that holds",
                option="--fail-if",
            )
        return answers.pop()


def parse_condition(text: str) -> PlanCondition:
    """Parse a condition.

    Raises:
        ConfigError: It cannot be parsed; the message lists the names.
    """
    match = _CONDITION.fullmatch(text) if len(text) <= _LONGEST else None
    names = f"names are {', '.join(NAMES)}"
    if match is None:
        raise ConfigError(
            f"--fail-if takes conditions like 'repeats(math) > 4': a name, one of {', '.join(_COMPARED)}, and a "
            f"number; but got {text[:_LONGEST]!r}",
            hint=names,
            option="--fail-if",
        )
    name, stream, compared, number = match.groups()
    if name not in NAMES:
        raise ConfigError(f"--fail-if {text!r}: there is no {name!r}", hint=names, option="--fail-if")
    if stream is not None and not NAMES[name].of_stream:
        raise ConfigError(
            f"--fail-if {text!r}: {name} is not a number of each stream",
            hint="write it without one",
            option="--fail-if",
        )
    try:
        parsed = math.inf if number == "inf" else float(NAMES[name].parse(number))
    except ConfigError as error:
        raise ConfigError(f"--fail-if {text!r}: {error}", option="--fail-if") from None
    plain = None if stream is None else stream.strip()
    if plain is not None and len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
        plain = plain[1:-1]
    return PlanCondition(text=text.strip(), name=name, stream=plain, compared=compared, number=parsed)


def values_of(report: Mapping[str, Any]) -> dict[Any, float | AtLeast | None]:
    """Return the values of a plan's report that conditions can name, by name, and by name and stream."""
    streams, cache, first = report["streams"], report["caches"][0], report["first_batch"]
    tokens = [stream["tokens"] for stream in streams]

    def fetched(number: float) -> float | AtLeast:
        return number if cache["was_full"] else AtLeast(number)

    def first_repeat(streams: Sequence[Mapping[str, Any]]) -> float | None:
        steps = [stream["first_repeat"]["step"] for stream in streams if stream["first_repeat"] is not None]
        return min(steps, default=math.inf if all(stream["is_exact"] for stream in streams) else None)

    repeats = [stream["repeats"] if stream["is_exact"] else AtLeast(stream["repeats"]) for stream in streams]
    values: dict[Any, float | AtLeast | None] = {
        "samples": sum(stream["samples"] for stream in streams),
        "tokens": None if None in tokens else sum(tokens),
        "share": 1.0,
        "sample_share": 1.0,
        "token_share": streams[0]["token_share"] and 1.0,
        "passes": max(stream["passes"] for stream in streams),
        # Of two that are as large, the one that may be larger.
        "repeats": max(repeats, key=lambda most: (most.number, True) if isinstance(most, AtLeast) else (most, False)),
        "first_repeat": first_repeat(streams),
        "bytes": fetched(cache["bytes"]),
        "refetched": fetched(cache["refetched"]),
        "cache_peak": cache["peak"],
        "cache_exceeded": fetched(cache["exceeded"]),
        "first_batch_seconds": first["seconds"],
        "first_batch_bytes": first["index_bytes"] + first["shard_bytes"],
        "mixing": report["mixing"],
        "fill": None if report["packs"] is None else report["packs"]["fill"],
        "memory": report["memory"]["total"],
        "steps": report["run"]["steps"],
        "epochs": report["run"]["epochs"],
    }
    for stream, most in zip(streams, repeats, strict=True):
        of_stream = {name: stream[name] for name in _OF_STREAM}
        of_stream |= {"repeats": most, "bytes": fetched(stream["bytes"]), "first_repeat": first_repeat([stream])}
        values |= {(name, stream["stream"]): value for name, value in of_stream.items()}
    return values
