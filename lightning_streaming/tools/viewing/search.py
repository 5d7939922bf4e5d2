"""The sample that somebody typed, among those that are looked at."""

from __future__ import annotations

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.stored.named_sample import named_sample
from lightning_streaming.tools.viewing.viewed import Viewed, ViewedStream

_MOST_NAMES = 400
"""Characters of names that an error lists."""


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
    named = named_sample(text)
    if named is None:
        raise ConfigError(
            f"{text[:80]!r} names no sample",
            hint="type its number, SHARD:INDEX, either of them after a stream's name and a colon, or a key as JSON",
        )
    place = here if named.stream is None else _stream_named(viewed, named.stream, here)
    reader = viewed.streams[place].reader
    if named.shard is None:
        reader.find(named.index)
        return place, named.index
    number = reader.first_of(named.shard) + named.index
    samples = reader.index.shards[named.shard].samples
    if not 0 <= named.index < samples:
        raise SampleIndexError(
            f"there is no sample {named.index:,} in shard {named.shard:,}, which has {samples:,}, from 0 on",
            sample=named.index,
        )
    return place, number


def _stream_named(viewed: Viewed, name: str, here: int) -> int:
    """The stream of this name: of the stage that is looked at, else the first."""
    stage = viewed.streams[here].stage
    found = [place for place, one in enumerate(viewed.streams) if name in _names_of(one)]
    of_stage = [place for place in found if viewed.streams[place].stage == stage]
    if not found:
        names = ", ".join(dict.fromkeys(printable_name(_names_of(one)[-1]) for one in viewed.streams))
        raise SampleIndexError(
            f"there is no stream {name[:80]!r}",
            hint=f"there {'is' if len(viewed.streams) == 1 else 'are'} {names[:_MOST_NAMES]}, or leave the name out",
            stream=name[:80],
        )
    return (of_stage or found)[0]


def _names_of(stream: ViewedStream) -> list[str]:
    """What a stream may be called: as keys call it, and one that nobody named, as its directory is."""
    directory = stream.place.shown.rstrip("/").rpartition("/")[2]
    return [stream.name] if stream.name == stream.label else [stream.name or "0", directory]
