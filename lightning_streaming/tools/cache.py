"""Show what caches contain, and remove unused files, without affecting jobs that use the caches.

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
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_streaming.cache import maintenance
from lightning_streaming.cache.config import MANIFEST_BASENAME, USAGE_BASENAME, default_cache_directory
from lightning_streaming.cache.index_files import staging_name_of
from lightning_streaming.cache.maintenance import CacheFile, FileKind, Judged, Plan, find_index, list_cache
from lightning_streaming.cache.records import read_manifest
from lightning_streaming.cache.selection_files import are_bits, is_lock
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import name_in_index
from lightning_streaming.storage import mask_url
from lightning_streaming.tools import console
from lightning_streaming.tools.commands import add_action, add_json
from lightning_streaming.tools.console import counted, print_line, print_table, printable_name, progress
from lightning_streaming.units import format_bytes

_Result = TypeVar("_Result")
_Failures = dict[Path, Exception]
"""Directories that could not be processed, each with the error."""
_Survey = dict[str, Any]
"""The report of ``info --json`` about one cache directory, but times in seconds since 1970; None if unknown."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SHOWN_DIGITS = 16
_KINDS = {
    FileKind.OURS: "ours",
    FileKind.FOREIGN: "not_ours",
    FileKind.ARRIVING: "arriving",
    FileKind.INDEX: "indexes",
    FileKind.SELECTION: "selections",
}
_MAX_NAMES = 3
_ALWAYS = ("directory", "shards", "ours", "last use")
_AMOUNTS = {kind.replace("_", " "): kind for kind in _KINDS.values()} | {
    "in use now": "in_use",
    "left over": "leftovers",
}
"""Names of amounts in a survey, by the heads of tables."""
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_JUST_NOW = 120


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="the action; ACTION --help explains each")
    parsers = [
        add_action(actions, "info", "show what caches contain", show),
        add_action(actions, "clear", "remove all downloaded files that are not in use", clear),
        add_action(actions, "gc", "remove what is no longer needed", collect),
    ]
    for action in parsers:
        words = "cache directory, or a directory with several; all default caches by default"
        action.add_argument("directory", metavar="DIR", nargs="?", help=words)
        add_json(action)
    _, to_clear, to_collect = parsers
    to_clear.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    words = "also remove shards and selections not used for this long, for example 7d; units are s, m, h, d and w"
    to_collect.add_argument("--older-than", metavar="AGE", type=_age, help=words)
    for action in (to_clear, to_collect):
        action.add_argument("--dry-run", action="store_true", help="only show what would be removed")


def run(args: Namespace) -> int:
    """Run the requested action."""
    code: int = args.action(args)
    return code


def show(args: Namespace) -> int:
    """Show what each cache directory contains: shards, selections of samples, and the bytes of each kind of file.

    Kinds of files: ours (downloaded, unchanged since), not ours (never removed), arriving (being downloaded), in use
    now (by a process of this machine), and left over (from processes that died; gc removes them).
    """
    directories = _find_caches(args.directory)
    with progress(None, "read caches", "files") as advance:
        surveys, failures = _for_each(directories, lambda directory: _survey(directory, advance))
    caches = []
    for survey in surveys:
        times = {name: survey[name] for name in ("checked", "last_used") if survey[name] is not None}
        iso = {
            name: datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds") for name, at in times.items()
        }
        caches.append(survey | iso)
    return _report(args, {"caches": caches}, lambda: _print_surveys(surveys), failures)


def clear(args: Namespace) -> int:
    """Remove downloaded files and selections of samples that no process of this machine uses. The index stays.

    Running jobs download the files again if they need them; selections are evaluated again.
    """
    return _clean(args, maintenance.plan_clear, args.yes)


def collect(args: Namespace) -> int:
    """Remove what is no longer needed: files of processes that died, and their unfinished selections of samples; parsed
    indexes that are no longer used; shards that are no longer in the index; and directories into which nothing was
    downloaded, like those of a misspelt remote.

    While a job uses the directory, shards stay even if they are not in the index: the job may have started with an
    earlier one.
    """
    since = None if args.older_than is None else time.time() - args.older_than
    return _clean(args, partial(maintenance.plan_garbage, unused_since=since), True)


def _clean(args: Namespace, plan: Callable[..., Plan], is_confirmed: bool) -> int:
    directories = _find_caches(args.directory)
    with progress(None, "read caches", "files") as advance:
        plans, failures = _for_each(directories, lambda path: plan(path, list_cache(path, advance), find_index(path)))
    removed = [judged for plan_of_cache in plans for judged in plan_of_cache.goes]
    if (removed or any(plan_of_cache.removes_directory for plan_of_cache in plans)) and not args.dry_run:
        if not is_confirmed:
            what = f"{_count_and_size(removed)} of {counted(len(plans), 'cache')}"
            if not sys.stdin.isatty():
                raise ConfigError(
                    f"this would remove {what}, and there is no terminal to confirm it",
                    hint="pass --yes, or --dry-run to see more",
                    option="--yes",
                )
            print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                print("nothing was removed", file=sys.stderr)
                return console.FINE
        by_directory = {plan_of_cache.directory: plan_of_cache for plan_of_cache in plans}
        with progress(len(removed), "remove", "files") as advance:
            plans, more = _for_each(list(by_directory), lambda path: maintenance.carry_out(by_directory[path], advance))
        failures |= more

    def as_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
        return [{"file": file.name, "bytes": file.bytes, "because": reason.value} for file, reason in judged]

    caches = [
        {
            "directory": str(plan_of_cache.directory),
            "removed": as_json(plan_of_cache.goes),
            "stays": as_json(plan_of_cache.stays),
            "removed_directory": plan_of_cache.removes_directory,
            "removed_bytes": sum(file.bytes for file, _ in plan_of_cache.goes),
        }
        for plan_of_cache in plans
    ]
    report = {"dry_run": args.dry_run, "caches": caches}
    return _report(args, report, partial(_print_plans, plans, args.dry_run), failures)


def _report(args: Namespace, report: dict[str, Any], show: Callable[[], None], failures: _Failures) -> int:
    """Print a report, as JSON or by ``show``, and which directories were left out."""
    if args.json:
        left_out = [{"directory": str(directory), "error": str(error)} for directory, error in failures.items()]
        console.print_json(report | {"failures": left_out})
    else:
        show()
    for directory, error in failures.items():
        console.print_note("cache", f"left out {directory}: {error}")
    return console.FINE


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise ArgumentTypeError(f"must be a number and one of s, m, h, d and w, like 7d, but got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def _find_caches(directory: str | None) -> list[Path]:
    """Return the cache directories at and under a directory, sorted.

    Args:
        directory: The directory; None for the parent of all default ones.

    Returns:
        Their paths; none only if no directory is given and nothing is cached.

    Raises:
        ConfigError: The directory has no cache.
    """
    root = _default_root() if directory is None else Path(directory)
    caches = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if not {MANIFEST_BASENAME, USAGE_BASENAME}.isdisjoint(files) and maintenance.is_cache(Path(folder)):
            caches.append(Path(folder))
    if directory is not None and not caches:
        lacks = f"neither it nor a directory in it has an {MANIFEST_BASENAME} of ours"
        raise ConfigError(
            f"{mask_url(directory)} is not a cache directory: {lacks if root.is_dir() else 'it does not exist'}",
            hint=f"pass the local= directory of a stream, or none for the default caches in {_default_root()}",
            path=mask_url(directory),
        )
    return sorted(caches)


def _default_root() -> Path:
    """Return the parent of the default cache directories."""
    return default_cache_directory("any").parent


def _for_each(directories: Sequence[Path], action: Callable[[Path], _Result]) -> tuple[list[_Result], _Failures]:
    """Apply a function to each directory; failures, like those of another user's directories, do not stop it.

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


def _survey(directory: Path, advance: Callable[[int], object]) -> _Survey:
    """Return the contents of a cache directory.

    Args:
        directory: Cache directory of one stream.
        advance: Receives the number of files read since its last call.

    Raises:
        ConfigError: It is not a cache directory.
    """
    files = list_cache(directory, advance)
    by_kind: dict[str, list[CacheFile]] = {kind: [] for kind in (*_KINDS.values(), "leftovers")}
    for file in files:
        by_kind["leftovers" if _is_leftover(file) else _KINDS[file.kind]].append(file)
    complete = by_kind["ours"] + by_kind["not_ours"]
    sizes = {file.name: file.bytes for file in complete}
    partly_present = {named for name in sizes if (named := name_in_index(name)) != name}
    index, manifest = find_index(directory), read_manifest(directory)
    shards = None if index is None else index.index.shards
    check = manifest.check if manifest and index and manifest.check and manifest.check.digest == index.digest else None

    def is_present(shard: ShardInfo) -> bool:
        return all(sizes.get(raw.basename) == raw.bytes or raw.basename in partly_present for raw, _ in shard.files)

    def amount(files: Sequence[CacheFile]) -> dict[str, int]:
        return {"files": len(files), "bytes": sum(file.bytes for file in files)}

    return {
        "directory": str(directory),
        "remote": None if manifest is None or manifest.of_originals else manifest.remote,
        "index": None if index is None else index.digest[:_SHOWN_DIGITS],
        "checked": None if check is None else check.checked / 1e9,
        "shards": None if shards is None else len(shards),
        "shards_present": None if shards is None else sum(map(is_present, shards)),
        **{kind: amount(of_kind) for kind, of_kind in by_kind.items()},
        "in_use": amount([file for file in complete if file.in_use]),
        "last_used": max((file.last_used for file in files if file.last_used is not None), default=None),
        "bytes": sum(file.bytes for file in files),
    }


def _is_leftover(file: CacheFile) -> bool:
    """Return whether a dead process left a file unfinished."""
    if file.in_use:
        return False
    if file.kind is FileKind.SELECTION:
        return not (are_bits(Path(file.name)) or is_lock(Path(file.name)))
    return file.kind is FileKind.ARRIVING or (file.kind is FileKind.INDEX and staging_name_of(file.name) is not None)


def _print_surveys(surveys: Sequence[_Survey]) -> None:
    """Print all about one directory, or a line for each of several."""
    if not surveys:
        print_line(f"nothing is cached in {_default_root()}")
    elif len(surveys) == 1:
        print_table(surveys[0]["directory"], (), _facts(surveys[0]))
    else:
        columns = {
            "directory": [survey["directory"] for survey in surveys],
            "shards": list(map(_shards, surveys)),
            **{
                head: [format_bytes(survey[name]["bytes"]) if survey[name]["files"] else "-" for survey in surveys]
                for head, name in _AMOUNTS.items()
                if name != "indexes"
            },
            "last use": [_ago(survey["last_used"]) for survey in surveys],
        }
        shown = {head: texts for head, texts in columns.items() if head in _ALWAYS or set(texts) != {"-"}}
        print_table("caches", list(shown), zip(*shown.values(), strict=True), right=list(_AMOUNTS), whole=["directory"])
        total = sum(survey["bytes"] for survey in surveys)
        print_line(f"{format_bytes(total)} in {counted(len(surveys), 'cache')}")


def _facts(survey: _Survey) -> list[tuple[str, str]]:
    checked = "" if survey["checked"] is None else f", checked {_ago(survey['checked'])}"
    amounts = {head: survey[name] for head, name in _AMOUNTS.items()}
    return [
        ("remote", f"digest {survey['remote']}" if survey["remote"] else "none; a dataset that is read in place"),
        ("index", f"{survey['index']}{checked}" if survey["index"] else "none here"),
        ("shards here", _shards(survey)),
        *(
            (head, f"{counted(amount['files'], 'file')} ({format_bytes(amount['bytes'])})" if amount["files"] else "-")
            for head, amount in amounts.items()
        ),
        ("last use", _ago(survey["last_used"])),
    ]


def _shards(survey: _Survey) -> str:
    return "-" if survey["shards"] is None else f"{survey['shards_present']:,} of {survey['shards']:,}"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    passed = time.time() - seconds
    if passed < _JUST_NOW:
        return "just now"
    return next(f"{passed // length:.0f} {unit} ago" for unit, length in _UNITS if passed >= length)


def _print_plans(plans: Sequence[Plan], dry_run: bool) -> None:
    """Print what was removed from each directory, or would be, and what stays."""
    verb = "would remove" if dry_run else "removed"
    for plan in plans:
        reasons = list(_by_reason(plan.goes))
        if plan.removes_directory:
            reasons.append("the directory, into which nothing was fetched")
        total = f"{_count_and_size(plan.goes)}: " if len(reasons) > 1 else ""
        what = f"{verb} {total}{', '.join(reasons)}" if reasons else "nothing to remove"
        print_line(f"{plan.directory}: {what}")
        for line in _by_reason(plan.stays, with_names=True):
            print_line(f"  stays: {line}")
    if not plans:
        print_line(f"nothing is cached in {_default_root()}")
    elif len(plans) > 1:
        print_line(f"{verb} {_count_and_size([judged for plan in plans for judged in plan.goes])} in all")


def _by_reason(judged: Sequence[Judged], with_names: bool = False) -> Iterator[str]:
    for reason in maintenance.Reason:
        matching = [pair for pair in judged if pair[1] is reason]
        if matching:
            more = ", ..." if len(matching) > _MAX_NAMES else ""
            names = f": {', '.join(printable_name(file.name) for file, _ in matching[:_MAX_NAMES])}{more}"
            yield f"{_count_and_size(matching)} {reason.value}{names if with_names else ''}"


def _count_and_size(judged: Sequence[Judged]) -> str:
    """Return the number of files and their size: ``"3 files (2.6 KB)"``."""
    return f"{counted(len(judged), 'file')} ({format_bytes(sum(file.bytes for file, _ in judged))})"
