"""What a user writes of the phases of an epoch, checked, and settled for order: each with its end in samples."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from typing import Any

from lightning_streaming.errors import ConfigError, UnknownArgumentError
from lightning_streaming.order.phases import Mix, SettledPhase
from lightning_streaming.replaced_names import tells_unknown_arguments
from lightning_streaming.units import parse_count, plain_number, store_whole

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

_IN_WORDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:per\s*cents?|pct|percentage)\.?\s*", re.IGNORECASE)


@tells_unknown_arguments
@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of an epoch with one mixture of streams, or with a ramp from one to another.

    A stream goes on in each phase where it stood: its samples come again only when all of it has been read. See
    docs/mixtures.md.

    Args:
        name: What messages and saved positions call it.
        mix: The weight of each stream that it reads, by name; only the ratios count. Two weights, like ``[0.9, 0.5]``,
            are those at its beginning and end, with a ramp between them.
        until: Where it ends, in samples from the epoch's beginning over all ranks, like 800000 or "800m"; or like "90%"
            of ``epoch_size``. The last phase ends with the epoch.
        steps: Into how many steps of one mixture a ramp is cut, at least.
        max_repeats: How often streams may have been read by its end, in one epoch, by name: more is an error before the
            run.
        cut: Where it was ended, in samples from the epoch's beginning, though it had begun as one that goes on until
            later. What was drawn and not read by then comes first in what follows.

    Raises:
        ConfigError: A weight, or a border, cannot be one.
    """

    name: str
    mix: Mapping[str, float | Sequence[float]]
    until: int | float | str | None = None
    steps: int = 16
    max_repeats: Mapping[str, float] = field(default_factory=dict)
    cut: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"phases: a phase needs a name, but got {self.name!r}")
        if not isinstance(self.mix, Mapping) or not self.mix:
            raise ConfigError(
                f"{self._told('mix')} must map names of streams to weights, like {{web: 0.9, code: 0.1}}, but is "
                f"{self.mix!r}"
            )
        for stream in self.mix:
            if not isinstance(stream, str):
                raise ConfigError(f"{self._told('mix')} must map names of streams to weights, but has {stream!r}")
            self._weights(stream)
        for place, where in enumerate(("beginning", "end")):
            total = sum(self._weights(stream)[place] for stream in self.mix)
            if not total:
                raise ConfigError(f"{self._told('mix')} has no weight above 0 at its {where}; give one to a stream")
            if not math.isfinite(total):
                raise ConfigError(f"{self._told('mix')} has weights that are too large at its {where}; scale them down")
        if self.until is not None and (isinstance(self.until, bool) or not isinstance(self.until, Real | str)):
            raise ConfigError(
                f'{self._told("until")} must be samples, like 800000 or "800m", or a part like "90%", but is '
                f"{self.until!r}"
            )
        store_whole(self, "steps", 1, name=self._told("steps"))
        store_whole(self, "cut", 1, or_none=True, name=self._told("cut"))
        if not isinstance(self.max_repeats, Mapping):
            raise ConfigError(
                f"{self._told('max_repeats')} must map names of streams to numbers, like {{math: 4}}, but is "
                f"{self.max_repeats!r}"
            )
        for stream, most in self.max_repeats.items():
            if stream not in self.mix:
                raise ConfigError(f"{self._told('max_repeats')} names {stream!r}, which is not in its mix")
            if (plain_number(most) or 0) <= 0:
                raise ConfigError(f"{self._told('max_repeats')} must be numbers above 0, but {stream!r} has {most!r}")

    def settled(self, planned_stop: int) -> SettledPhase:
        """The phase as order takes it, with its end in samples."""
        names = sorted(self.mix)
        ramps = any(isinstance(weight, Sequence) for weight in self.mix.values())
        begin, end = (tuple((name, self._weights(name)[place]) for name in names) for place in (0, 1))
        return SettledPhase(
            name=self.name,
            planned_stop=planned_stop,
            begin=begin,
            end=end,
            steps=self.steps if ramps else 1,
            max_repeats=_by_name(self.max_repeats),
            cut=self.cut,
            written=self.until.strip() if isinstance(self.until, str) and _PERCENT.fullmatch(self.until) else None,
        )

    def planned_stop(self, epoch_size: int | None) -> int | None:
        """Where it ends if it is not cut, in samples; None where it does not say."""
        if self.until is None:
            return None
        part = _PERCENT.fullmatch(self.until) if isinstance(self.until, str) else None
        if part is None and (number := plain_number(self.until)) is not None and number % 1:
            raise ConfigError(
                f'{self._told("until")} must be whole samples, or a part like "90%", but is {self.until!r}'
            )
        if part is None and isinstance(self.until, str) and (words := _IN_WORDS.fullmatch(self.until)):
            raise ConfigError(
                f'{self._told("until")} must be samples, like 800000 or "800m", or a part of epoch_size, like '
                f'"{words[1]}%", but is {self.until!r}'
            )
        if part is None:
            return parse_count(self.until, self._told("until"))
        if epoch_size is None:
            raise ConfigError(f"{self._told('until')}={self.until!r} is a part of epoch_size, which is not given")
        if float(part[1]) > 100:
            raise ConfigError(f"{self._told('until')} must be at most 100%, but got {self.until!r}")
        return round(float(part[1]) / 100 * epoch_size)

    def _weights(self, stream: str) -> tuple[float, float]:
        """The weights of one stream at the beginning and at the end."""
        given = self.mix[stream]
        pair: tuple[Any, ...] = (
            tuple(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else (given, given)
        )
        weights = [plain_number(one) for one in pair]
        if len(weights) != 2 or any(one is None or one < 0 for one in weights):
            raise ConfigError(
                f"{self._told(f'mix.{stream}')} must be a weight above 0, or two for a ramp like [0.9, 0.5], but is "
                f"{given!r}"
            )
        if not any(weights):
            raise ConfigError(f"{self._told(f'mix.{stream}')} is {given!r}; leave {stream!r} out of the mix")
        begin, end = (float(one or 0) for one in weights)
        return begin, end

    def _told(self, setting: str) -> str:
        """How a message calls one of its settings."""
        return f"phases.{self.name}.{setting}"


def _by_name(values: Mapping[str, float]) -> Mix:
    return tuple((name, float(values[name])) for name in sorted(values))


def listed_phases(phases: Any) -> tuple[Phase, ...] | None:
    """The phases of an epoch; each may be written as a mapping of arguments.

    Raises:
        ConfigError: They are something else.
    """
    if phases is None:
        return None
    if not phases or not isinstance(phases, Sequence) or not all(isinstance(one, Phase | Mapping) for one in phases):
        raise ConfigError(
            "phases must be a list of Phase(name=..., mix=..., until=...), or of mappings of these arguments, but got "
            f"{phases!r}"
        )
    return tuple(one if isinstance(one, Phase) else _phase(place, one) for place, one in enumerate(phases))


def _phase(place: int, said: Mapping[Any, Any]) -> Phase:
    missing = [name for name in ("name", "mix") if name not in said]
    if missing or not all(isinstance(key, str) for key in said):
        raise ConfigError(
            f"phases[{place}] must map names of arguments to values, name and mix among them, like {{'name': 'broad', "
            f"'until': '800m', 'mix': {{'web': 0.9, 'code': 0.1}}}}, but is {dict(said)!r}"
        )
    try:
        return Phase(**said)
    except UnknownArgumentError as error:
        raise UnknownArgumentError(f"phases[{place}]: {error}") from None


def settled_phases(phases: Sequence[Phase], epoch_size: int | None) -> tuple[SettledPhase, ...]:
    """Phases as order takes them, each with its end in samples.

    Args:
        phases: In the order in which they are read.
        epoch_size: Where the last one ends, unless it says so itself.

    Raises:
        ConfigError: Two have one name, a border is missing or does not lie after the one before, or the last border is
            not the epoch's end.
    """
    found: list[SettledPhase] = []
    for number, phase in enumerate(phases):
        is_last = number == len(phases) - 1
        if any(one.name == phase.name for one in found):
            raise ConfigError(f"phases: two phases are called {phase.name!r}; give each a name of its own")
        stop = phase.planned_stop(epoch_size)
        if stop is None and is_last:
            stop = epoch_size
        if stop is None:
            way_out = "it, or epoch_size," if is_last else "it"
            if phase.cut is not None:
                way_out = "where the phase was to end before it was cut,"
            raise ConfigError(f"phases.{phase.name}.until is missing; give {way_out} as samples, like 800m")
        if not is_last and phase.cut is None and epoch_size is not None and stop >= epoch_size:
            raise ConfigError(
                f"phases.{phase.name}.until is {stop}, and epoch_size is {epoch_size}, where the last phase ends; end "
                "it earlier, or raise epoch_size"
            )
        before = 0 if not found else found[-1].planned_stop if found[-1].cut is None else found[-1].cut
        if found and stop <= before:
            raise ConfigError(
                f"phases.{phase.name}.until is {stop}, and phase {found[-1].name!r} before it ends at {before}; "
                "borders must rise, counted from the beginning of the epoch"
            )
        if stop < 1:
            raise ConfigError(f"phases.{phase.name}.until must be at least one sample, but is {phase.until!r}")
        found.append(phase.settled(stop))
    if epoch_size is not None and found and found[-1].cut is not None:
        raise ConfigError(
            f"phases.{found[-1].name}.cut is {found[-1].cut}, and no phase reads on from there up to epoch_size="
            f"{epoch_size}; let one follow, or leave epoch_size out and write where the phase was to end as its until"
        )
    if epoch_size is not None and found and found[-1].planned_stop != epoch_size:
        raise ConfigError(
            f"phases.{found[-1].name}.until is {found[-1].planned_stop}, and epoch_size is {epoch_size}; the last "
            "phase ends with the epoch, so give one of them"
        )
    return tuple(found)


def check_all_streams_are_read(phases: Sequence[Phase], streams: Collection[str]) -> None:
    """Raise ConfigError for a stream that no phase reads, with what may be its name misspelt."""
    phase_of = {name: phase.name for phase in phases for name in phase.mix}
    for name in streams:
        if name not in phase_of:
            close = get_close_matches(name, [str(other) for other in phase_of if other not in streams], 1)
            hint = f"; phases.{phase_of[close[0]]}.mix names {close[0]!r}, which is no stream" if close else ""
            raise ConfigError(
                f"stream {name!r} is in the mix of no phase; put it into one, or leave the stream out{hint}"
            )
