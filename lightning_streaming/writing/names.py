"""Every file name that a writer uses.

index.json                        what makes the shards a dataset
shard.00012.mds.zstd              a shard
.writing/00012.json               says that shard 12 is stored, while there is no index that does
.writing/shard.00012.mds.zstd     a shard that will replace a published one of this name
.writing/index.json               the index that will follow it
parts.plan                        what the parts of a dataset are made of
convert.plan                      what a conversion was begun with
"""

from __future__ import annotations

import re

from lightning_streaming.files import PARTIAL_SUFFIX

WRITING = ".writing"
"""The folder of a dataset that is being written."""

PARTS_PLAN = "parts.plan"
"""Beside the parts. It does not end in ``.json``, because the original takes every such file for an index."""

CONVERSION_PLAN = "convert.plan"
"""Beside the index. It says nothing without the dataset that it is of, and goes where that is replaced."""

_SHARD = r"shard\.\d{5,}\.(mds|json|csv|tsv|xsv)(\.meta)?(\.(br|bz2|gz|snappy|zstd))?"
_SHARD_FILE = re.compile(_SHARD, re.ASCII)
_RECORD = re.compile(r"(\d{5,})\.json", re.ASCII)
_PARTIAL = re.compile(rf"({_SHARD}|\d{{5,}}\.json|index\.json)\..*{re.escape(PARTIAL_SUFFIX)}", re.ASCII)


def shard_name(number: int, shard_format: str) -> str:
    """The raw data file of a shard: ``shard.00012.mds``."""
    return f"shard.{number:05}.{shard_format}"


def is_shard_file(name: str) -> bool:
    """Whether a writer gives this name to a file of a shard."""
    return _SHARD_FILE.fullmatch(name) is not None


def is_raw_form(name: str, shard_format: str) -> bool:
    """Whether the raw file of a shard of this format would have this name."""
    return is_shard_file(name) and re.fullmatch(rf"shard\.\d+\.{shard_format}(\.meta)?", name) is not None


def record_name(number: int) -> str:
    """Where it says that a shard is stored."""
    return f"{WRITING}/{number:05}.json"


def record_number(name: str) -> int | None:
    """The shard whose record has this name in its folder; None if it is no record."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def whole_name(name: str) -> str | None:
    """The file that an unfinished one, as a killed writer leaves it, was to become; None if it is something else."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else None
