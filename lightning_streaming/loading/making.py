"""What becomes of a stored sample before it is handed out, and how an error in that is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_streaming.errors import StreamingError
from lightning_streaming.loading.failure import kind_of
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.loading.transform import KeyedSample, KeyedTransform

_MOST_KEYS = 8
"""Keys that an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """How samples are made in a pass. The users' own code is in one of the two, or in neither."""

    transform: KeyedTransform | None
    """Applied to the decoded sample, where nobody makes samples in a way of their own."""
    make: KeyedSample | None
    """Makes a sample of its id and position, where a subclass of the dataset says how."""
    name: str
    """Whose code that is, for errors."""


def failed_sample(error: Exception, name: str, key: SampleKey) -> StreamingError:
    """What to raise from an error of the user's own code about a sample."""
    told = (
        f"{name} failed on sample {key.index} of shard {key.shard} of stream {key.stream!r}: {_in_a_line(error)}\n"
        f"This sample alone, as it failed: dataset.restore_sample({json.dumps(key.as_dict())})"
    )
    return kind_of(error)(told)


def told_keys(keys: Sequence[SampleKey]) -> str:
    """How an error names samples of a batch."""
    if len(keys) == 1:
        return f"\nThis sample alone: dataset.restore_sample({json.dumps(keys[0].as_dict())})"
    shown = "\n".join(f"  {json.dumps(key.as_dict())}" for key in keys[:_MOST_KEYS])
    more = f"\n  and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"\nIts samples, by the keys with which dataset.restore_sample(key) gives each alone:\n{shown}{more}"


def _in_a_line(error: Exception) -> str:
    return str(error) if isinstance(error, StreamingError) else f"{type(error).__name__}: {error}"
