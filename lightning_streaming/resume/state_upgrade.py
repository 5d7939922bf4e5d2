"""Bring saved states of earlier versions, and of MosaicML Streaming, under the keys of the current version.

This is the only place that knows the earlier keys. Values are passed on as they are, also wrong ones: the parser of the
current version checks them.

Version 1 describes streams with "place", "samples drawn" and "joins", many of them by one entry "all 12 streams"; it
has "phases" with "until" and "cut", and "pack" within "order". MosaicML Streaming writes no version and four or five
keys; it calls the time before the first epoch "epoch -1".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lightning_streaming.errors import StateError
from lightning_streaming.escaping import short_repr
from lightning_streaming.saved_fields import DAMAGED, Fields
from lightning_streaming.sequence.packing.settings import named_facts

STATE_VERSION = 2
"""The version that this release writes."""
_RELEASE = re.compile(r"\d+(\.\w+)*")
_ALL = re.compile(r"all (\d{1,9}) streams")
_STREAM = {"place": "index", "samples drawn": "samples_drawn", "joins": "join"}
_PHASE = {"until": "end", "cut": "ended_at"}


def version_of(fields: Fields) -> int:
    """Return the version of a state, which this release can read.

    Raises:
        StateError: It is none, or a newer one; the hint says which release reads it.
    """
    version = fields.get("version")
    if type(version) is not int or version < 1:
        raise StateError(f"{fields.of} has version {short_repr(version)}, and versions are whole numbers", hint=DAMAGED)
    if version > STATE_VERSION:
        release = fields.get("library_version") if "library_version" in fields else None
        known = isinstance(release, str) and len(release) < 20 and _RELEASE.fullmatch(release)
        raise StateError(
            f"{fields.of} has version {short_repr(version)}, and this release reads versions up to {STATE_VERSION}",
            hint=f"install lightning-streaming {release} or a newer release"
            if known
            else "resume with the release that wrote it, or a newer one",
        )
    return version


def upgraded(fields: Fields) -> Fields:
    """Return a saved position under the keys of the current version.

    Args:
        fields: Of any version up to the current one, or of MosaicML Streaming.

    Raises:
        StateError: Its version cannot be read.
    """
    if "version" in fields:
        state = fields.values
    else:
        for key in ("epoch", "sample_in_epoch"):
            fields.get(key)  # before others are added: the error names the keys that the state has
        state = {**_of_the_reference(fields.values), "version": 1}
    if version_of(Fields(state, fields.of)) == 1:
        state = _renamed(state, {"streams": "stream_list"})
        state = _with(state, "stream_list", lambda value: _renamed(value, {"named digests": "named_digests"}))
        state = _with(state, "fingerprint", _fingerprint)
    return Fields(state, fields.of)


def _of_the_reference(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state of MosaicML Streaming with the keys that it lacks; those of its release 0.2 have no nodes."""
    state = {"initial_physical_nodes": None, "fingerprint": None, **state}
    sample = state.get("sample_in_epoch")
    if type(state.get("epoch")) is int and state["epoch"] == -1 and type(sample) is int and sample >= 0:
        state |= {"epoch": 0, "sample_in_epoch": 0}
    return state


def _fingerprint(value: Any) -> Any:
    new = _renamed(value, {"phases": "schedule"})
    new = _with(new, "schedule", lambda phases: _each(phases, lambda phase: _renamed(phase, _PHASE)))
    new = _with(new, "streams", lambda streams: _each(streams, _stream))
    streams = new.get("streams") if isinstance(new, Mapping) else None
    if isinstance(streams, Mapping) and len(streams) == 1:
        ((name, stream),) = streams.items()
        together = _ALL.fullmatch(name) if isinstance(name, str) else None
        if together and isinstance(stream, Mapping) and "index" not in stream:
            new = {key: of for key, of in new.items() if key != "streams"}
            new["all_streams"] = {"count": int(together[1]), **stream}
    order = new.get("order") if isinstance(new, Mapping) else None
    if isinstance(order, Mapping) and "pack" in order:
        new = {**new, **_packing(order["pack"]), "order": {key: order[key] for key in order if key != "pack"}}
    return new


def _stream(value: Any) -> Any:
    joins = lambda of: _each(of, lambda join: _renamed(join, {"on": "key"}))  # noqa: E731
    return _with(_renamed(value, _STREAM), "join", joins)


def _packing(value: Any) -> dict[str, Any]:
    """Return the settings of version 1, a list that begins with the method, by their names."""
    facts = value.get("method") if isinstance(value, Mapping) else None
    if not isinstance(facts, list | tuple) or not facts or not isinstance(facts[0], str):
        return {"packing": value}
    settings = named_facts(facts)
    is_budget = settings["method"] == "budget"
    if is_budget:
        del settings["method"]
    others = {key: of for key, of in value.items() if key != "method"}
    return {"token_budget" if is_budget else "packing": {**settings, **others}}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    return {names.get(key, key): of for key, of in value.items()} if isinstance(value, Mapping) else value


def _with(value: Any, key: str, change: Callable[[Any], Any]) -> Any:
    return {**value, key: change(value[key])} if isinstance(value, Mapping) and key in value else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return {key: change(of) for key, of in value.items()} if isinstance(value, Mapping) else value
