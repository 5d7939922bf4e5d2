"""Configurations as they may be printed and saved: as plain values, without secrets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any

import jsonargparse
import yaml  # type: ignore[import-untyped]

from lightning_streaming.loading.stream import Stream
from lightning_streaming.storage import StorageOptions, mask_url
from lightning_streaming.storage.options import shown_options
from lightning_streaming.storage.urls import user_of
from lightning_streaming.trainer.config import StreamingConfig

Hide = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def shown(value: Any, name: str = "", hide: Hide = shown_options) -> Any:
    """A part of a configuration without secrets: itself if it has none, else a copy.

    Args:
        value: A stage or a stream, storage options, or what holds them at any depth: namespaces, mappings, lists.
            Stages and streams become mappings of their fields.
        name: Its field.
        hide: Makes of storage options what may be shown.
    """
    if isinstance(value, StorageOptions) or (name == "storage_options" and isinstance(value, Mapping)):
        return hide(value)
    if isinstance(value, Stream | StreamingConfig):
        return {one.name: shown(getattr(value, one.name), one.name, hide) for one in fields(value)}
    if isinstance(value, jsonargparse.Namespace):
        copied = copy(value)
        vars(copied).update({key: shown(one, key, hide) for key, one in vars(value).items()})
        return copied
    if isinstance(value, str | os.PathLike):
        return _shown_text(value, name)
    inner: Any = None
    if type(value) is dict:
        inner = {key: shown(one, str(key), hide) for key, one in value.items()}
        is_same = all(inner[key] is one for key, one in value.items())
    elif type(value) in (list, tuple):
        inner = type(value)(shown(one, name, hide) for one in value)
        is_same = all(mine is one for mine, one in zip(inner, value, strict=True))
    return value if inner is None or is_same else inner


def _shown_text(text: str | os.PathLike[str], name: str) -> Any:
    location = os.fspath(text)
    if name == "remote":
        return mask_url(location)
    return location.replace(f"{user_of(location)}@", "", 1) if "://" in location and user_of(location) else text


def _represent(dumper: Any, value: Any) -> Any:
    return dumper.represent_data(shown(value, "storage_options" if isinstance(value, StorageOptions) else ""))


# Known to all of the process, because loggers write hyperparameters with yaml.dump, which would else write every field.
for _kind in (Stream, StreamingConfig, StorageOptions):
    yaml.add_representer(_kind, _represent)
