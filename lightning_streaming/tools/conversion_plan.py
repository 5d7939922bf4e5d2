"""What a conversion was begun with, written down beside what it writes, so that only the same one goes on there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.files import remove_partials
from lightning_streaming.storage import local_path
from lightning_streaming.storage.listing import list_files
from lightning_streaming.tools.claim import find_small, put_small
from lightning_streaming.tools.sources.digests import digest_of, traits
from lightning_streaming.tools.sources.source import Part, Source
from lightning_streaming.tools.stored_dataset import RETRY, TIMEOUT, StoredDataset
from lightning_streaming.writing.directories import check_is_directory
from lightning_streaming.writing.names import CONVERSION_PLAN
from lightning_streaming.writing.settings import ShardSettings

Plan = Mapping[str, Any]
"""What is compared, by the name that people know it by; values are those of JSON."""

_VERSION = 1
_FILES = "files of SOURCE"
_LONGEST_SHOWN = 80


def describe(
    source: Source,
    parts: Sequence[Part],
    columns: Mapping[str, str],
    settings: ShardSettings,
    options: Mapping[str, Any],
) -> Plan:
    """All that decides on the shards of a conversion.

    Args:
        source: What is converted. The content of several parts is compared elsewhere; of a single one the names of the
            files are, because the rows that are written already are only counted.
        parts: How it was cut.
        columns: Column name to encoding.
        settings: How shards are cut, compressed and hashed.
        options: Others that were given, as they are typed.
    """
    is_one = len(parts) == 1
    plan = {
        **options,
        **{f"--columns {name}": encoding for name, encoding in columns.items()},
        "--compression": settings.compression,
        "--hashes": list(settings.hashes),
        "--size-limit": settings.size_limit,
        **{f"the {name} of SOURCE": value for name, value in traits(source).items()},
        "the number of parts": "one" if is_one else "several",
        _FILES: _files(parts[0]) if is_one else None,
    }
    made: dict[str, Any] = json.loads(json.dumps(plan))  # lists for tuples, as it will be read
    return made


def check_plan(out: StoredDataset, plan: Plan, parts: Sequence[Part], *, resume: bool) -> bool:
    """Refuse to write where something else lies, or was begun. Nothing is touched.

    Returns:
        Whether nothing is there yet, so that :func:`record_plan` has to say what is begun.

    Raises:
        ConfigError: There is something to begin with, or what is gone on with was begun with other options.
        StorageError: The store does not say what is there.
    """
    if out.directory is not None:
        check_is_directory(out.directory)
    text = find_small(out, CONVERSION_PLAN) if resume else None
    if text is None:
        _check_is_new(out, resume=resume)
        return True
    found = list(_differences(_parse(text, out), plan, parts))
    if found:
        raise ConfigError(
            f"{out.shown} was begun with other options: {'; '.join(found)}. Go on with those it was begun with, or "
            "convert to another place"
        )
    return False


def record_plan(out: StoredDataset, plan: Plan) -> None:
    """Say what is begun, before anything of it is written.

    Raises:
        StorageError: It could not be written.
    """
    if out.directory is not None:
        remove_partials(out.directory / CONVERSION_PLAN)
    put_small(out, CONVERSION_PLAN, json.dumps({"version": _VERSION, "plan": plan}, indent=1).encode())


def _parse(text: bytes, out: StoredDataset) -> dict[str, Any]:
    try:
        root = json.loads(text)
        version, plan = root["version"], dict(root["plan"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{CONVERSION_PLAN} in {out.shown} is damaged ({error}); convert to another place") from None
    if version != _VERSION:
        raise ConfigError(f"{out.shown} was begun by another version of this tool; convert to another place")
    return plan


def _differences(begun: Plan, now: Plan, parts: Sequence[Part]) -> Iterator[str]:
    for key in dict.fromkeys([*now, *begun]):
        was, becomes = begun.get(key), now.get(key)
        if was == becomes or (key == _FILES and was == _beginning(parts, was)):
            continue
        if key == _FILES and was and becomes:
            yield f"the files of SOURCE have other names, or others are before them ({becomes[0]} files, was {was[0]})"
        elif key != _FILES:
            yield f"{key} is {_shown(becomes)}, but was {_shown(was)} when writing began"


def _files(part: Part, most: int | None = None) -> list[Any]:
    """How many files a part has, and a digest of their names; of the first ones, which is what a longer part keeps."""
    paths = list(dict.fromkeys(piece.path for piece in part.pieces))
    root = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""  # noqa: PTH120
    names = [os.path.relpath(path, root) for path in paths][:most]
    return [len(names), digest_of(names)]


def _beginning(parts: Sequence[Part], was: Any) -> list[Any] | None:
    """What is said of as many files as there were; files may have been added behind them."""
    return _files(parts[0], was[0]) if was and len(parts) == 1 else None


def _shown(value: object) -> str:
    if value is None or value == []:
        return "none"
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _check_is_new(out: StoredDataset, *, resume: bool) -> None:
    directory = local_path(out.location)
    if directory is None:
        found = list_files(out.location, out.options, retry=RETRY, timeout=TIMEOUT)
    else:
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if resume:  # a plan that was not whole is as good as none
        found = [name for name in found if not name.startswith(f"{CONVERSION_PLAN}.")]
    if found and resume:
        raise ConfigError(
            f"{out.shown} holds {found[0]}, but no {CONVERSION_PLAN} that says with what a conversion was begun, so "
            "--resume cannot tell whether it is the same; choose another place, or remove what is there"
        )
    if found:
        raise ConfigError(
            f"{out.shown} must be new or empty, but holds {found[0]}; add --resume to go on with a conversion that "
            "was stopped, or choose another place"
        )
