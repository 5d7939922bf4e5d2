"""A sample as somebody types it: by stream, shard and index, by less where that is enough, or by its key as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields

from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError

_OF_SHARD = re.compile(r"(?:(.*):)?([0-9]{1,18}):([0-9]{1,18})", re.DOTALL)
_OF_STREAM = re.compile(r"(?:(.*):)?([0-9]{1,18})", re.DOTALL)
_WHAT_A_KEY_HAS = tuple(field.name for field in fields(SampleKey))


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSample:
    """What was typed."""

    stream: str | None
    """None where none is named."""
    shard: int | None
    """Counted within the stream; None where the index is counted there."""
    index: int
    """Counted within the shard, or the stream."""
    key: SampleKey | None = None
    """The whole key, where one was typed."""


def named_sample(text: str) -> NamedSample | None:
    """What a text says; None where it names no sample in any way.

    Args:
        text: ``INDEX``, ``SHARD:INDEX``, ``STREAM:INDEX`` or ``STREAM:SHARD:INDEX``, whose stream may have colons; or a
            mapping as JSON, with ``shard``, ``sample_index`` and the other fields of a key.

    Raises:
        ConfigError: It begins like JSON, but is not the key of a sample.
    """
    if text.lstrip().startswith("{"):
        return _of_json(text)
    if match := _OF_SHARD.fullmatch(text):
        return NamedSample(stream=match[1], shard=int(match[2]), index=int(match[3]))
    match = _OF_STREAM.fullmatch(text)
    return NamedSample(stream=match[1], shard=None, index=int(match[2])) if match else None


def _of_json(text: str) -> NamedSample:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"what was given begins like JSON, but is not JSON: {error}") from None
    if values.keys() == set(_WHAT_A_KEY_HAS):
        key = SampleKey.from_dict(values)
        return NamedSample(stream=key.stream, shard=key.shard, index=key.sample_index, key=key)
    shard, index, stream = (values.get(name) for name in ("shard", "sample_index", "stream"))
    are_right = type(shard) is int and type(index) is int and isinstance(stream, str | None)
    if not are_right or not values.keys() <= set(_WHAT_A_KEY_HAS):
        names = ", ".join(_WHAT_A_KEY_HAS)
        raise ConfigError(f"the key of a sample has {names}, at least shard and sample_index, but got {values!r:.200}")
    return NamedSample(stream=stream, shard=shard, index=index)
