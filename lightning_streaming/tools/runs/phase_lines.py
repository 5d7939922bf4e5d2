"""The phases that a state tells of, as lines of a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import yaml  # type: ignore[import-untyped]

from lightning_streaming.resume.saved_fingerprint import SavedPhase

_WEIGHT = r"(?:\d[\d.]*(?:e[+-]?\d+)?)"
_SHARE = re.compile(rf"(?P<name>.*?) (?P<begin>{_WEIGHT})(?: to (?P<end>{_WEIGHT}))?(?:, |$)", re.DOTALL)
_IN_SHORT = re.compile(r"of \d+ streams, ")
_STEPS = 16
"""Steps of a ramp that says nothing of them."""


def phase_line(name: str, told: SavedPhase, streams: Collection[str], ended_at: int | None = None) -> str:
    """Return a phase as a line of YAML, by name; its mix is left open if the state does not have it.

    Args:
        name: What it is called.
        told: What the state says of it.
        streams: Names of the streams that the state lists.
        ended_at: Where it is to be ended, if it is.
    """
    mix = read_mix(told.mix, streams)
    ended_at = ended_at if told.ended_at is None else told.ended_at
    ramps = mix is None or any(isinstance(weight, list) for weight in mix.values())
    phase = {
        "end": told.end,
        **({} if ended_at is None else {"ended_at": ended_at}),
        **({"steps": told.steps} if ramps and told.steps not in (1, _STEPS) else {}),
        "mix": {} if mix is None else mix,
    }
    flow = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": math.inf}
    key = yaml.safe_dump({name: None}, **flow).strip().removeprefix("{").removesuffix(": null}")
    line = f"{key}: {yaml.safe_dump(phase, **flow).strip()}"
    return line if mix is not None else f"{line.removesuffix('mix: {}}')}mix: ...}}  # as it was: of too many streams"


def read_mix(told: str, streams: Collection[str]) -> dict[str, float | list[float]] | None:
    """The weights of a phase as a state tells them, by name of stream; None where it tells them in short.

    >>> read_mix("code 0.1, web 0.9 to 0.5", ["web", "code"])
    {'code': 0.1, 'web': [0.9, 0.5]}
    """
    mix: dict[str, float | list[float]] = {}
    place = 0
    if _IN_SHORT.match(told) or any("," in name for name in streams):  # such a name cannot be told from two
        return None
    while place < len(told):
        share = _SHARE.match(told, place)
        if share is None:
            return None
        begin = _number(share["begin"])
        mix[share["name"]] = begin if share["end"] is None else [begin, _number(share["end"])]
        place = share.end()
    return mix


def _number(text: str) -> float:
    """A weight; whole ones as they are written mostly."""
    weight = float(text)
    return int(weight) if weight.is_integer() and weight < 1e15 else weight
