"""Options of the phases of an epoch, and their resolution to ends in samples, or in tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import OptionGroup, named_groups, store_plain
from lightning_streaming.sequence.phases import ResolvedPhase
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.units import check_whole, parse_count, plain_number

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

_IN_WORDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:per\s*cents?|pct|percentage)\.?\s*", re.IGNORECASE)


def check_max_repeats(option: str, max_repeats: object, mix: Collection[object] | None = None) -> None:
    """Check how often each stream may be read, by name.

    Args:
        option: The option, for errors.
        max_repeats: Its value.
        mix: The streams that it may name; None if these are not known yet.

    Raises:
        ConfigError: It does not map names to numbers above 0, or names another stream.
    """
    if not isinstance(max_repeats, Mapping) or (mix is None and not all(isinstance(name, str) for name in max_repeats)):
        raise ConfigError(
            f"{option} must map names of streams to numbers, like {{math: 4}}, but is {short_repr(max_repeats)}",
            option=option,
        )
    for stream, most in max_repeats.items():
        if mix is not None and stream not in mix:
            raise ConfigError(f"{option} names {stream!r}, which is not in its mix", option=option)
        if (plain_number(most) or 0) <= 0:
            raise ConfigError(f"{option} must be numbers above 0, but {stream!r} has {short_repr(most)}", option=option)


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True)
class MixturePhase(OptionGroup):
    """A part of an epoch with one mixture of streams, or with a ramp from one to another.

    A stream continues in each phase where it stopped in the previous one: no sample is repeated before the whole stream
    has been read. See docs/mixtures.md.

    Args:
        mix: Weights of the streams that the phase reads, by name, like ``{"web": 0.8, "code": 0.2}``; only the ratios
            count. Two weights, like ``[0.9, 0.5]``, are those at its beginning and end, with a ramp between them.
        end: End of the phase, counted from the beginning of the epoch over all ranks: 800000, or "800k" for the same
            ("1.5m": 1.5 million), or "90%" of ``epoch_size``, which must then be set. It counts samples; with
            ``packing`` documents; or tokens, with ``mixing: {weights_in: tokens}``. Required, except in the last phase:
            without it that one ends at ``epoch_size``.
        steps: A ramp is a staircase of at least so many steps, each with one mixture.
        max_repeats: Most times that each stream may be read by the end of the phase, in one epoch, by name, like
            ``{"code": 4}``; a schedule that needs more is an error before the run.
        ended_at: Only to end a phase early that a run has started: the sample at which it ends, counted from the
            beginning of the epoch. ``end`` keeps its old value. Samples that were drawn and not read by then come first
            in the next phase.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "schedule"
    example: ClassVar[str] = "{end: 800m, mix: {web: 0.9, code: 0.1}}"

    mix: Mapping[str, float | Sequence[float]]
    end: int | float | str | None = None
    steps: int = 16
    max_repeats: Mapping[str, float] = field(default_factory=dict)
    ended_at: int | None = None

    def __post_init__(self) -> None:
        store_plain(self)
        if not isinstance(self.mix, Mapping) or not self.mix:
            raise ConfigError(
                f"schedule.mix must map names of streams to weights, like {{web: 0.9, code: 0.1}}, "
                f"but is {short_repr(self.mix)}",
                option="schedule.mix",
            )
        for stream in self.mix:
            if not isinstance(stream, str):
                raise ConfigError(
                    f"schedule.mix must map names of streams to weights, but has {short_repr(stream)}",
                    option="schedule.mix",
                )
            self._weights(stream)
        for place, where in enumerate(("beginning", "end")):
            total = sum(self._weights(stream)[place] for stream in self.mix)
            if not total:
                raise ConfigError(
                    f"schedule.mix has no weight above 0 at its {where}",
                    hint="give one to a stream",
                    option="schedule.mix",
                )
            if not math.isfinite(total):
                raise ConfigError(
                    f"schedule.mix has weights that are too large at its {where}",
                    hint="scale them down",
                    option="schedule.mix",
                )
        if self.end is not None and (isinstance(self.end, bool) or not isinstance(self.end, Real | str)):
            raise ConfigError(
                f'schedule.end must be samples, like 800000 or "800m", or a part like "90%", '
                f"but is {short_repr(self.end)}",
                option="schedule.end",
            )
        object.__setattr__(self, "steps", check_whole("schedule.steps", self.steps, 1))
        if self.ended_at is not None:
            object.__setattr__(self, "ended_at", check_whole("schedule.ended_at", self.ended_at, 1))
        check_max_repeats("schedule.max_repeats", self.max_repeats, self.mix)

    def resolved(self, name: str, planned_stop: int) -> ResolvedPhase:
        """Return the phase with its end in samples."""
        names = sorted(self.mix)
        ramps = any(isinstance(weight, Sequence) for weight in self.mix.values())
        begin, end = (tuple((stream, self._weights(stream)[place]) for stream in names) for place in (0, 1))
        return ResolvedPhase(
            name=name,
            planned_stop=planned_stop,
            begin=begin,
            end=end,
            steps=self.steps if ramps else 1,
            max_repeats=tuple((stream, float(self.max_repeats[stream])) for stream in sorted(self.max_repeats)),
            cut=self.ended_at,
            written=self.end.strip() if isinstance(self.end, str) and _PERCENT.fullmatch(self.end) else None,
        )

    def planned_stop(self, name: str, epoch_size: int | None) -> int | None:
        """Return the planned end in samples, from ``end``; None if that is not set."""
        if self.end is None:
            return None
        option = f"schedule.{name}.end"
        part = _PERCENT.fullmatch(self.end) if isinstance(self.end, str) else None
        if part is None and (number := plain_number(self.end)) is not None and number % 1:
            raise ConfigError(
                f'{option} must be whole samples, or a part like "90%", but is {short_repr(self.end)}', option=option
            )
        if part is None and isinstance(self.end, str) and (words := _IN_WORDS.fullmatch(self.end)):
            raise ConfigError(
                f'{option} must be samples, like 800000 or "800m", or a part of epoch_size, like "{words[1]}%", but is '
                f"{short_repr(self.end)}",
                option=option,
            )
        if part is None:
            return parse_count(self.end, option)
        if epoch_size is None:
            raise ConfigError(
                f"{option}={self.end!r} is a part of epoch_size, which is not given",
                hint="set epoch_size, like 1000000, or give the end in samples",
                option=option,
            )
        if float(part[1]) > 100:
            raise ConfigError(f"{option} must be at most 100%, but got {short_repr(self.end)}", option=option)
        return round(float(part[1]) / 100 * epoch_size)

    def _weights(self, stream: str) -> tuple[float, float]:
        """Return the weights of one stream at the beginning and at the end."""
        weight, option = self.mix[stream], f"schedule.mix.{stream}"
        pair: tuple[Any, ...] = (
            tuple(weight) if isinstance(weight, Sequence) and not isinstance(weight, str | bytes) else (weight, weight)
        )
        numbers = [plain_number(number) for number in pair]
        if len(numbers) != 2 or any(number is None or number < 0 for number in numbers):
            raise ConfigError(
                f"{option} must be a weight above 0, or two for a ramp like [0.9, 0.5], but is {short_repr(weight)}",
                option=option,
            )
        if not any(numbers):
            raise ConfigError(f"{option} is {weight!r}", hint=f"leave {stream!r} out of the mix", option=option)
        begin, end = (float(number or 0) for number in numbers)
        return begin, end


Schedule = Mapping[str, MixturePhase | Mapping[str, Any]]
"""Phases of an epoch by name, in the order in which they are read."""


def named_phases(schedule: Schedule) -> Mapping[str, MixturePhase]:
    """Return the phases of a schedule by name.

    Raises:
        ConfigError: They are none, or one of them cannot work.
    """
    phases = named_groups(MixturePhase, schedule)
    if not phases:
        raise ConfigError(
            f"schedule has no phases; it must map names to phases, like {{broad: {MixturePhase.example}}}",
            option="schedule",
        )
    return phases


def resolved_phases(phases: Mapping[str, MixturePhase], epoch_size: int | None) -> tuple[ResolvedPhase, ...]:
    """Return phases with their ends in samples.

    Args:
        phases: Phases by name, in the order in which they are read.
        epoch_size: End of the last phase, if it has no ``end``.

    Raises:
        ConfigError: An end is missing or not after the previous one, or the last end is not that of the epoch.
    """
    resolved: list[ResolvedPhase] = []
    for number, (name, phase) in enumerate(phases.items()):
        is_last, option = number == len(phases) - 1, f"schedule.{name}.end"
        stop = phase.planned_stop(name, epoch_size)
        if stop is None and is_last:
            stop = epoch_size
        if stop is None:
            missing = "it, or epoch_size," if is_last else "it"
            if phase.ended_at is not None:
                missing = "the end that the phase had before it was ended,"
            raise ConfigError(f"{option} is missing", hint=f"give {missing} as samples, like 800m", option=option)
        if not is_last and phase.ended_at is None and epoch_size is not None and stop >= epoch_size:
            raise ConfigError(
                f"{option} is {stop}, and epoch_size is {epoch_size}, where the last phase ends",
                hint="end it earlier, or raise epoch_size",
                option=option,
            )
        before = 0 if not resolved else resolved[-1].planned_stop if resolved[-1].cut is None else resolved[-1].cut
        if resolved and stop <= before:
            raise ConfigError(
                f"{option} is {stop}, and phase {resolved[-1].name!r} before it ends at {before}",
                hint="ends are counted from the beginning of the epoch, and must increase",
                option=option,
            )
        if stop < 1:
            raise ConfigError(f"{option} must be at least one sample, but is {short_repr(phase.end)}", option=option)
        resolved.append(phase.resolved(name, stop))
    last = resolved[-1] if resolved else None
    if epoch_size is not None and last is not None and last.cut is not None:
        raise ConfigError(
            f"schedule.{last.name}.ended_at is {last.cut}, and no phase continues up to epoch_size={epoch_size}",
            hint="add one, or leave epoch_size out and give the end that the phase had",
            option=f"schedule.{last.name}.ended_at",
        )
    if epoch_size is not None and last is not None and last.planned_stop != epoch_size:
        raise ConfigError(
            f"schedule.{last.name}.end is {last.planned_stop}, and epoch_size is {epoch_size}",
            hint="the last phase ends with the epoch, so give one of them",
            option=f"schedule.{last.name}.end",
        )
    return tuple(resolved)


def check_mixes(phases: Mapping[str, MixturePhase], streams: Collection[str]) -> None:
    """Check that each stream is in a mix, and that the mix of the last phase has no unknown streams.

    Earlier phases may name a stream that has been removed since they ended, which a resumed run decides.

    Raises:
        ConfigError: A stream is in no mix, or the last mix has an unknown stream; suggests the misspelt name.
    """
    phase_of = {stream: name for name, phase in phases.items() for stream in phase.mix}
    for stream in streams:
        if stream not in phase_of:
            close = get_close_matches(stream, [str(other) for other in phase_of if other not in streams], 1)
            misspelt = f"; schedule.{phase_of[close[0]]}.mix names {close[0]!r}, which is no stream" if close else ""
            raise ConfigError(
                f"stream {stream!r} is in the mix of no phase",
                hint=f"put it into one, or leave the stream out{misspelt}",
                option="schedule",
                stream=stream,
            )
    last = list(phases)[-1]
    for stream in phases[last].mix:
        if stream not in streams:
            raise ConfigError(
                f"schedule.{last}.mix reads stream {stream!r}, and the streams are {', '.join(map(repr, streams))}",
                hint="add it to streams, or leave it out of the mix",
                option=f"schedule.{last}.mix",
                stream=stream,
            )
