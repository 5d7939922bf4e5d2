"""Which field of a configuration's data cannot work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.stream import Stream
from lightning_streaming.trainer.config import config_of
from lightning_streaming.trainer.written import Written

STAGES = ("train", "val", "test", "predict")

_LEVEL = re.compile(rf"data(\.(?:{'|'.join(STAGES)})(\.streams(\.[^.]+)?)?)?")
_STREAM = '{remote: "s3://corpus/code"}'
_EXAMPLES = ("{train: ...}", _STREAM, f"{{code: {_STREAM}}}", _STREAM)
"""What belongs at each level: the data, a stage, its streams, one of them."""


def named_error(data: Any, error: ConfigError) -> str:
    """The words of an error, and before them the stage or stream that it is about, if it is found again there.

    Args:
        data: The data module's part of a configuration, as it was parsed.
        error: What came of making it.
    """
    found = (f"{name}: {words}" for name, words in _wrong(_plain(data)) if words.startswith(str(error)))
    return next(found, str(error))


def misshapen(written: Sequence[Written]) -> str | None:
    """Say which stage or stream is written as anything but a mapping; None if all are mappings."""
    for field in written:
        level = _LEVEL.fullmatch(field.name)
        value = _parsed(field.value) if level and isinstance(field.value, str) else field.value
        is_class_or_file = isinstance(value, str) and (field.name == "data" or Path(value).is_file())
        if level and value is not None and not is_class_or_file and not isinstance(value, Mapping):
            kind = "a list" if isinstance(value, list) else "text" if isinstance(value, str) else "a number"
            return f"{field.name} must be a mapping, like {_EXAMPLES[level.lastindex or 0]}, but is {kind}"
    return None


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # it would show the text, which may hold secrets
        return text


def _wrong(data: Any) -> Iterator[tuple[str, str]]:
    arguments = data.get("init_args") if isinstance(data, Mapping) else None
    for stage in STAGES:
        config = arguments.get(stage) if isinstance(arguments, Mapping) else None
        if not isinstance(config, Mapping):
            continue
        streams = config.get("streams") or {}
        others = f" (the streams are {', '.join(streams)})" if len(streams) > 1 else ""
        for name, stream in streams.items():
            words = _refusal(partial(Stream, **stream))
            yield f"data.{stage}.streams.{name}", words and f"{words}{others}"
        yield f"data.{stage}", _refusal(partial(config_of, config))


def _refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except (ConfigError, TypeError) as error:
        return str(error)
    return ""


def _plain(value: Any) -> Any:
    """Namespaces as mappings."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return _plain(vars(value)) if hasattr(value, "__dict__") and not callable(value) else value
