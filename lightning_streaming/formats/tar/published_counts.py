"""How many samples tar files have, where another library has left word of it beside them.

    .nv-meta/.info.json, .nv-meta/.info.yaml    Megatron Energon: "shard_counts", samples by path
    *.json                                      wids: "shardlist", of each file its "url", "nsamples" and "filesize"

What is said of a file of another size is not believed, nor what is damaged, nor more samples than a file of its size
can have: such files are looked at instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from lightning_streaming.formats.shard_format import StoredFiles
from lightning_streaming.formats.tar.members import BLOCK

_ENERGON = ".nv-meta/.info"
_WIDS_KIND = "wids-shard-index"
_MOST_JSON_FILES = 8
"""So many at the top of a place may be read to see what they are; where there are more they are of samples."""
_MOST_BYTES = 2**28


def published_counts(files: StoredFiles) -> Mapping[str, int]:
    """Samples of files, by path; of as many as somebody has counted.

    Raises:
        StorageError: A file could not be read.
    """
    sizes = files.sizes()
    found = dict[str, int]()
    tops = [name for name in sizes if "/" not in name and name.endswith(".json") and sizes[name] <= _MOST_BYTES]
    for name in tops if len(tops) <= _MOST_JSON_FILES else ():
        found.update(_of_wids(_parsed(files.read_range(name, 0, sizes[name]), json.loads), sizes))
    for ending, parse in ((".yaml", _parse_yaml), (".json", json.loads)):  # the last is the newer one
        text = files.read_if_there(_ENERGON + ending)
        counts = _member(_parsed(text, parse), "shard_counts") if text is not None else None
        if isinstance(counts, dict):
            found.update({name: count for name, count in counts.items() if _is_count(count, sizes.get(name, 0))})
    return found


def _of_wids(index: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What an index of wids says of the files beside it."""
    shards = _member(index, "shardlist")
    if not str(_member(index, "__kind__")).startswith(_WIDS_KIND) or not isinstance(shards, list):
        return
    for shard in shards:
        url, count = _member(shard, "url"), _member(shard, "nsamples")
        if not isinstance(url, str):
            continue
        path = PurePosixPath(url).as_posix()
        if _is_count(count, sizes.get(path, 0)) and _member(shard, "filesize") in (None, sizes[path]):
            yield path, count


def _parsed(text: bytes, parse: Callable[[bytes], Any]) -> Any:
    """What a text says; None if it is damaged."""
    try:
        return parse(text)
    except (ValueError, RecursionError):
        return None


def _parse_yaml(text: bytes) -> Any:
    import yaml  # type: ignore[import-untyped]  # only needed here

    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _is_count(value: Any, size: int) -> bool:
    """Return whether a tar file of ``size`` bytes can have so many samples, each of which has at least a header."""
    return type(value) is int and 0 <= value * BLOCK < size
