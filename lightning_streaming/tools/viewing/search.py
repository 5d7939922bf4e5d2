"""The sample that somebody typed: a number, a shard and an index, or a key."""

from __future__ import annotations

import json
import re

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.tools.viewing.viewed import Viewed

_PLACE = re.compile(r"(?:(.*):)?(\d{1,18}):(\d{1,18})", re.DOTALL)
_HELP = "type a number, SHARD:INDEX, STREAM:SHARD:INDEX, or a key as JSON"


def found_sample(viewed: Viewed, text: str, here: int) -> tuple[int, int]:
    """The stream and the number of a sample.

    Args:
        viewed: What is looked at.
        text: What was typed.
        here: The stream that is meant where none is named.

    Raises:
        ConfigError: Nothing that names a sample was typed.
        SampleIndexError: There is no such sample.
    """
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        viewed.streams[here].reader.find(int(text))
        return here, int(text)
    if text.startswith("{"):
        name, shard, index = _of_key(text)
    else:
        match = _PLACE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text[:80]!r} names no sample; {_HELP}")
        name, shard, index = match[1], int(match[2]), int(match[3])
    place = here if name is None else _stream_named(viewed, name, here)
    reader = viewed.streams[place].reader
    number = reader.first_of(shard) + index
    if not 0 <= index < reader.index.shards[shard].samples:
        raise SampleIndexError(
            f"there is no sample {index:,} in shard {shard:,}, which has {reader.index.shards[shard].samples:,}, "
            "from 0 on"
        )
    return place, number


def _of_key(text: str) -> tuple[str, int, int]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"what was typed begins like JSON, but is not JSON; {_HELP}") from None
    key = SampleKey.from_dict(values)
    return key.stream, key.shard, key.index


def _stream_named(viewed: Viewed, name: str, here: int) -> int:
    """The stream of this name: of the stage that is looked at, else the first; the only one answers to any name."""
    if len(viewed.streams) == 1:
        return 0
    stage = viewed.streams[here].stage
    found = [place for place, one in enumerate(viewed.streams) if one.name == name]
    of_stage = [place for place in found if viewed.streams[place].stage == stage]
    if not found:
        names = ", ".join(dict.fromkeys(one.name for one in viewed.streams))
        raise SampleIndexError(f"there is no stream {name[:80]!r}; there are {names[:400]}")
    return (of_stage or found)[0]
