"""What a dataset in parts is made of, written down before the first part, so that a resume cannot mix two datasets."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.settings import ShardSettings

_VERSION = 1
_LONGEST_SHOWN = 120
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlan:
    """The inputs of all parts, and how each is written."""

    settings: Mapping[str, Any]
    """Columns, compression, hashes, size_limit and strict, as JSON has them."""
    inputs: tuple[str, ...]
    """What tells each input apart, see :func:`tell_apart`."""


def make_plan(
    inputs: Sequence[Any], columns: Mapping[str, str] | None, settings: ShardSettings, *, strict: bool = False
) -> PartPlan:
    """Describe a dataset in parts.

    Raises:
        ConfigError: There are no inputs, or one could not be told apart in another run.
    """
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sized) or not len(inputs):
        raise ConfigError(f"inputs must be a list of at least one, but got {type(inputs).__name__} {inputs!r:.100}")
    described = {
        "columns": None if columns is None else dict(sorted(columns.items())),
        "compression": settings.compression,
        "hashes": list(settings.hashes),
        "size_limit": settings.size_limit,
        "strict": strict,
    }
    return PartPlan(settings=described, inputs=tuple(map(tell_apart, inputs)))


def tell_apart(part_input: object) -> str:
    """A text that is the same for the same input in every run, and short: its repr, or the start and a digest of it.

    Raises:
        ConfigError: The repr holds an address in memory.
    """
    with np.printoptions(threshold=sys.maxsize, precision=17):  # not [0 1 2 ... 97 98 99]
        text = repr(part_input)
    if _ADDRESS.search(text):
        raise ConfigError(
            f"an input must have a repr that is the same in every run, or a resume could not tell it, but got {text}; "
            "use texts, numbers, paths, tuples or dataclasses"
        )
    if len(text) <= _LONGEST_SHOWN:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{text[:_LONGEST_SHOWN]}... sha256:{digest}"


def dump_plan(plan: PartPlan) -> bytes:
    """The text of the file."""
    root = {"version": _VERSION, "settings": plan.settings, "inputs": plan.inputs}
    return json.dumps(root, indent=1).encode()


def parse_plan(data: bytes, source: str) -> PartPlan:
    """Read the text of the file.

    Raises:
        ConfigError: It is not one that :func:`dump_plan` of this version made.
    """
    try:
        root = json.loads(data)
        version, settings, inputs = root["version"], dict(root["settings"]), tuple(root["inputs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} is damaged ({error}); write to another place") from None
    if version != _VERSION:
        raise ConfigError(f"{source} has version {version}, but only {_VERSION} can be resumed; write to another place")
    return PartPlan(settings=settings, inputs=inputs)


def check_same(begun: PartPlan, wanted: PartPlan, source: str) -> None:
    """Refuse to go on with another dataset than was begun.

    Raises:
        ConfigError: They differ; the message names every setting that does, and the first of the inputs.
    """
    found = "; ".join(_differences(begun, wanted))
    if found:
        raise ConfigError(f"{found}, as {source} tells; resume with the same, or write to another place")


def _differences(begun: PartPlan, wanted: PartPlan) -> Iterator[str]:
    for key, value in wanted.settings.items():
        if begun.settings.get(key) != value:
            yield f"{key} is {value!r}, but was {begun.settings.get(key)!r} when writing began"
    before, now = len(begun.inputs), len(wanted.inputs)
    if before != now:
        yield f"there are {now} inputs, but there were {before} when writing began"
    pairs = enumerate(zip(begun.inputs, wanted.inputs, strict=False))
    changed = [(number, *pair) for number, pair in pairs if pair[0] != pair[1]]
    if changed and before == now:
        number, was, becomes = changed[0]
        others = f", and {len(changed) - 1} more differ" * (len(changed) > 1)
        yield f"input {number} is {becomes}, but was {was} when writing began{others}"
