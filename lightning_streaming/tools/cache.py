"""Show what caches contain, and free space, without affecting jobs that use them.

DIR is the cache directory of one stream, or a directory with several; the default is the one with all default caches.

    lightning-streaming cache info
    lightning-streaming cache clear ~/.cache/lightning_streaming/corpus-1f0c3a5e7b9d2846
    lightning-streaming cache gc --older-than 7d --dry-run

Only downloaded, unchanged files are removed, and never a file that a process has open or is downloading.
"""

from __future__ import annotations

import os
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_streaming.cache import maintenance
from lightning_streaming.cache.config import MANIFEST_BASENAME, USAGE_BASENAME, default_cache_directory
from lightning_streaming.cache.index_files import staging_name_of
from lightning_streaming.cache.maintenance import CacheFile, FileKind, Judged, Plan, find_index, list_cache
from lightning_streaming.cache.manifest import read_manifest
from lightning_streaming.cache.selection_files import are_bits, is_lock
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import name_in_index
from lightning_streaming.storage import mask_url
from lightning_streaming.tools import console
from lightning_streaming.tools.commands import add_action, add_json
from lightning_streaming.tools.console import counted, print_line, print_table, printable_name, progress
from lightning_streaming.units import format_bytes

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="the action; ACTION --help explains each")
    _add(actions, "info", "show what caches hold", show)
    clearing = _add(actions, "clear", "remove all that was fetched and is not in use", clear)
    clearing.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    garbage = _add(actions, "gc", "remove what nobody will need", collect)
    garbage.add_argument(
        "--older-than",
        metavar="AGE",
        type=_age,
        help="also remove shards and selections not used for this long, for example 7d; units are s, m, h, d and w",
    )
    for one in (clearing, garbage):
        one.add_argument("--dry-run", action="store_true", help="only show what would be removed")


def run(args: Namespace) -> int:
    """Run the requested action."""
    code: int = args.action(args)
    return code


def show(args: Namespace) -> int:
    """Show what each cache directory holds: how many of its shards, selections of samples, and bytes of files that are

    ours, fetched and unchanged since; not ours, put there by somebody, never removed; arriving now; in use now by some
    process of this machine; and left over from processes that died, which gc removes.
    """
    directories = _find_caches(args.directory)
    with progress(None, "look", "files") as advance:
        surveys, failures = _for_each(directories, lambda one: _survey(one, advance))
    times = ("checked", "last_used")
    caches = [one | {name: _iso(one[name]) for name in times} for one in surveys]
    return _tell(args, {"caches": caches}, lambda: _print_surveys(surveys), failures)


def clear(args: Namespace) -> int:
    """Remove all that we fetched, and selections of samples, that no process of this machine uses. The index stays.

    Jobs that run fetch what they need of it again; selections are evaluated anew when they are wanted.
    """
    return _clean(args, maintenance.plan_clear, args.yes)


def collect(args: Namespace) -> int:
    """Remove what nobody will need: what processes left that died, also half-made selections of samples; parsed
    indexes that are not used any more; shards that the index does not name any more; and directories into which nothing
    was fetched, as those of remotes that were misspelt.

    While a job uses the directory such shards stay: it may have begun with the index before.
    """
    since = None if args.older_than is None else time.time() - args.older_than
    return _clean(args, partial(maintenance.plan_garbage, unused_since=since), True)


def _clean(args: Namespace, plan: Callable[..., Plan], is_sure: bool) -> int:
    directories = _find_caches(args.directory)
    with progress(None, "look", "files") as advance:
        outcomes, failures = _for_each(directories, lambda one: plan(one, list_cache(one, advance), find_index(one)))
    goes = [judged for one in outcomes for judged in one.goes]
    if (goes or any(one.removes_directory for one in outcomes)) and not args.dry_run:
        if not is_sure and not _is_confirmed(goes, len(outcomes)):
            print("nothing was removed", file=sys.stderr)
            return console.FINE
        by_directory = {one.directory: one for one in outcomes}
        with progress(len(goes), "remove", "files") as advance:
            carry_out = maintenance.carry_out
            outcomes, more = _for_each(list(by_directory), lambda one: carry_out(by_directory[one], advance))
        failures |= more
    report = {"dry_run": args.dry_run, "caches": [_as_json(one) for one in outcomes]}
    return _tell(args, report, lambda: _print_outcomes(outcomes, args.dry_run), failures)


def _tell(args: Namespace, report: dict[str, Any], show: Callable[[], None], failures: _Failures) -> int:
    """Print what was found or done, for programs or by ``show``, and which directories were left out."""
    if args.json:
        left_out = [{"directory": str(directory), "error": str(error)} for directory, error in failures.items()]
        console.print_json(report | {"failures": left_out})
    else:
        show()
    for directory, error in failures.items():
        console.print_note("cache", f"left out {directory}: {error}")
    return console.FINE


def _is_confirmed(goes: Sequence[Judged], directories: int) -> bool:
    what = f"{_said(goes)} of {counted(directories, 'cache')}"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"this would remove {what}, and there is nobody to ask",
            hint="say --yes, or --dry-run to see more",
            option="--yes",
        )
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_outcomes(outcomes: Sequence[Plan], dry_run: bool) -> None:
    for one in outcomes:
        _print_outcome(one, dry_run=dry_run)
    if not outcomes:
        print_line(f"nothing is cached in {_default_root()}")
    elif len(outcomes) > 1:
        goes = [judged for one in outcomes for judged in one.goes]
        print_line(f"{'would remove' if dry_run else 'removed'} {_said(goes)} in all")


def _as_json(plan: Plan) -> dict[str, Any]:
    def told(judged: Sequence[Judged]) -> list[dict[str, Any]]:
        return [{"file": file.name, "bytes": file.bytes, "because": reason.value} for file, reason in judged]

    return {
        "directory": str(plan.directory),
        "removed": told(plan.goes),
        "stays": told(plan.stays),
        "removed_directory": plan.removes_directory,
        "removed_bytes": sum(file.bytes for file, _ in plan.goes),
    }


def _add(actions: Any, word: str, words: str, action: Callable[[Namespace], int]) -> ArgumentParser:
    parser = add_action(actions, word, words, action)
    words = "cache directory, or one with several; by default the default caches"
    parser.add_argument("directory", metavar="DIR", nargs="?", help=words)
    add_json(parser)
    return parser


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise ArgumentTypeError(f"must be a number and one of s, m, h, d and w, like 7d, but got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


_Result = TypeVar("_Result")
_Failures = dict[Path, Exception]
"""Directories that could not be served, each with the error."""
_NOTES = {MANIFEST_BASENAME, USAGE_BASENAME}


def _find_caches(given: str | None) -> list[Path]:
    """The cache directories at and under a directory, sorted.

    Args:
        given: The directory; None for the root of all default ones.

    Returns:
        One path for each; none only where nothing is given and nothing is cached.

    Raises:
        ConfigError: There is no cache directory.
    """
    root = _default_root() if given is None else Path(given)
    found = sorted(_beneath(root))
    if given is not None and not found:
        lacks = f"neither it nor a directory in it has an {MANIFEST_BASENAME} of ours"
        why = lacks if root.is_dir() else "it is not there"
        raise ConfigError(
            f"{mask_url(given)} is not a cache directory: {why}",
            hint=f"give one that a stream names with local=, or none for the default ones in {_default_root()}",
            path=mask_url(given),
        )
    return found


def _default_root() -> Path:
    """Where the default directories of all datasets are."""
    return default_cache_directory("any").parent


def _for_each(directories: Sequence[Path], action: Callable[[Path], _Result]) -> tuple[list[_Result], _Failures]:
    """Do something for each directory; those where that fails, like another user's, do not keep others from it.

    Returns:
        The results, and the errors by directory.

    Raises:
        StreamingError: It failed for all of them; this is the first error.
        OSError: The same.
    """
    done: list[_Result] = []
    failures: dict[Path, Exception] = {}
    for directory in directories:
        try:
            done.append(action(directory))
        except (StreamingError, OSError) as error:  # noqa: PERF203  each has its own
            failures[directory] = error
    if failures and not done:
        raise next(iter(failures.values()))
    return done, failures


def _beneath(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if not _NOTES.isdisjoint(files) and maintenance.is_cache(Path(folder)):
            yield Path(folder)


_SHOWN_DIGITS = 16
_KINDS = {
    FileKind.OURS: "ours",
    FileKind.FOREIGN: "not_ours",
    FileKind.ARRIVING: "arriving",
    FileKind.INDEX: "indexes",
    FileKind.SELECTION: "selections",
}
_Survey = dict[str, Any]
"""What ``info --json`` says of one cache directory, but with times in seconds since 1970; None is what is not known."""


def _survey(directory: Path, advance: Callable[[int], object]) -> _Survey:
    """Look through a cache directory.

    Args:
        directory: One stream's.
        advance: Told the number of files looked at since it was last told.

    Raises:
        ConfigError: It is not a cache directory.
    """
    files = list_cache(directory, advance)
    found: dict[str, list[CacheFile]] = {kind: [] for kind in (*_KINDS.values(), "leftovers")}
    for file in files:
        found["leftovers" if _is_leftover(file) else _KINDS[file.kind]].append(file)
    whole = found["ours"] + found["not_ours"]
    sizes = {file.name: file.bytes for file in whole}
    in_part = {told for name in sizes if (told := name_in_index(name)) != name}
    index, manifest = find_index(directory), read_manifest(directory)
    shards = None if index is None else index.index.shards
    check = manifest.check if manifest and index and manifest.check and manifest.check.digest == index.digest else None

    def is_present(shard: ShardInfo) -> bool:
        return all(sizes.get(raw.basename) == raw.bytes or raw.basename in in_part for raw, _ in shard.files)

    return {
        "directory": str(directory),
        "remote": None if manifest is None or manifest.of_originals else manifest.remote,
        "index": None if index is None else index.digest[:_SHOWN_DIGITS],
        "checked": None if check is None else check.checked / 1e9,
        "shards": None if shards is None else len(shards),
        "shards_present": None if shards is None else sum(map(is_present, shards)),
        **{kind: _amount_of(some) for kind, some in found.items()},
        "in_use": _amount_of([file for file in whole if file.in_use]),
        "last_used": max((file.last_used for file in files if file.last_used is not None), default=None),
        "bytes": sum(file.bytes for file in files),
    }


def _is_leftover(file: CacheFile) -> bool:
    """Whether a dead writer left a file."""
    if file.kind is FileKind.SELECTION:
        return not file.in_use and not (are_bits(Path(file.name)) or is_lock(Path(file.name)))
    is_parsed_form = file.kind is FileKind.INDEX and staging_name_of(file.name) is not None
    return (file.kind is FileKind.ARRIVING or is_parsed_form) and not file.in_use


def _amount_of(files: Sequence[CacheFile]) -> dict[str, int]:
    return {"files": len(files), "bytes": sum(file.bytes for file in files)}


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


_MOST_SHOWN = 3
_ALWAYS = ("directory", "shards", "ours", "last use")
_AMOUNTS = {
    "ours": "ours",
    "not ours": "not_ours",
    "arriving": "arriving",
    "selections": "selections",
    "in use": "in_use",
    "left over": "leftovers",
}
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_JUST_NOW = 120


def _print_surveys(surveys: Sequence[_Survey]) -> None:
    """Print all about one directory, or a line for each of several."""
    if not surveys:
        print_line(f"nothing is cached in {_default_root()}")
    elif len(surveys) == 1:
        print_table(surveys[0]["directory"], (), _facts(surveys[0]))
    else:
        columns = {
            "directory": [one["directory"] for one in surveys],
            "shards": list(map(_shards, surveys)),
            **{
                head: [format_bytes(one[name]["bytes"]) if one[name]["files"] else "-" for one in surveys]
                for head, name in _AMOUNTS.items()
            },
            "last use": [_ago(one["last_used"]) for one in surveys],
        }
        told = {head: texts for head, texts in columns.items() if head in _ALWAYS or set(texts) != {"-"}}
        print_table("caches", list(told), zip(*told.values(), strict=True), right=list(_AMOUNTS), whole=["directory"])
        print_line(f"{format_bytes(sum(one['bytes'] for one in surveys))} in {counted(len(surveys), 'cache')}")


def _print_outcome(plan: Plan, *, dry_run: bool) -> None:
    """Print what was removed from one directory, or would be, and what stays."""
    verb, reasons = "would remove" if dry_run else "removed", list(_by_reason(plan.goes))
    if plan.removes_directory:
        reasons.append("the directory, into which nothing was fetched")
    in_all = f"{_said(plan.goes)}: " if len(reasons) > 1 else ""
    what = f"{verb} {in_all}{', '.join(reasons)}" if reasons else "nothing to remove"
    print_line(f"{plan.directory}: {what}")
    for line in _by_reason(plan.stays, with_names=True):
        print_line(f"  stays: {line}")


def _said(judged: Sequence[Judged]) -> str:
    """How many files, and how big: ``"3 files (2.6 KB)"``."""
    return f"{counted(len(judged), 'file')} ({format_bytes(sum(file.bytes for file, _ in judged))})"


def _facts(one: _Survey) -> list[tuple[str, str]]:
    checked = "" if one["checked"] is None else f", asked for {_ago(one['checked'])}"
    return [
        ("remote", f"digest {one['remote']}" if one["remote"] else "none; a dataset that is read in place"),
        ("index", f"{one['index']}{checked}" if one["index"] else "none here"),
        ("shards here", _shards(one)),
        ("ours", _amount(one["ours"])),
        ("not ours", _amount(one["not_ours"])),
        ("arriving", _amount(one["arriving"])),
        ("indexes", _amount(one["indexes"])),
        ("selections", _amount(one["selections"])),
        ("in use now", _amount(one["in_use"])),
        ("left over", _amount(one["leftovers"])),
        ("last use", _ago(one["last_used"])),
    ]


def _by_reason(judged: Sequence[Judged], with_names: bool = False) -> Iterator[str]:
    for reason in maintenance.Reason:
        found = [one for one in judged if one[1] is reason]
        if found:
            yield f"{_said(found)} {reason.value}{_names(found) if with_names else ''}"


def _names(judged: Sequence[Judged]) -> str:
    more = ", ..." if len(judged) > _MOST_SHOWN else ""
    return f": {', '.join(printable_name(file.name) for file, _ in judged[:_MOST_SHOWN])}{more}"


def _shards(one: _Survey) -> str:
    return "-" if one["shards"] is None else f"{one['shards_present']:,} of {one['shards']:,}"


def _amount(some: Mapping[str, int]) -> str:
    return f"{counted(some['files'], 'file')} ({format_bytes(some['bytes'])})" if some["files"] else "-"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    passed = time.time() - seconds
    if passed < _JUST_NOW:
        return "just now"
    return next(f"{passed // length:.0f} {unit} ago" for unit, length in _UNITS if passed >= length)
