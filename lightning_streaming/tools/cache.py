"""Show what caches hold, and make room, without hurting jobs that use them.

DIR is the cache directory of one stream, or a directory with several; by default the one with all default caches.

    lightning-streaming cache info
    lightning-streaming cache clear ~/.cache/lightning_streaming/corpus-1f0c3a5e7b9d2846
    lightning-streaming cache gc --older-than 7d --dry-run

Only files are removed that were fetched, and are unchanged since; never one that a process has open or is fetching.
"""

from __future__ import annotations

import os
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from lightning_streaming.cache.config import MANIFEST_BASENAME, USAGE_BASENAME, default_cache_directory
from lightning_streaming.cache.index_files import FoundIndex, staging_name_of
from lightning_streaming.cache.maintenance import (
    CacheFile,
    FileKind,
    Judged,
    Plan,
    Reason,
    carry_out,
    find_index,
    is_cache,
    list_cache,
    plan_clear,
    plan_garbage,
)
from lightning_streaming.cache.manifest import IndexCheck, read_manifest
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.storage import mask_url
from lightning_streaming.tools.console import (
    FINE,
    counted,
    print_json,
    print_note,
    print_table,
    printable_name,
    progress,
)
from lightning_streaming.tools.options import add_action, add_json
from lightning_streaming.units import format_bytes

_PROGRAM = "lightning-streaming cache"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="what to do; ACTION --help explains each")
    _add(actions, "info", "show what caches hold", show)
    clearing = _add(actions, "clear", "remove all that was fetched and is not in use", clear)
    clearing.add_argument("--yes", action="store_true", help="do not ask")
    garbage = _add(actions, "gc", "remove what nobody will need", collect)
    garbage.add_argument(
        "--older-than",
        metavar="AGE",
        type=_age,
        help="also remove shards that were last used before that, for example 7d; units are s, m, h, d and w",
    )
    for one in (clearing, garbage):
        one.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(args: Namespace) -> int:
    """Do what was asked for."""
    code: int = args.action(args)
    return code


def show(args: Namespace) -> int:
    """Show what each cache directory holds: how many of its shards, and bytes of files that are

    ours, fetched and unchanged since; not ours, put there by somebody, never removed; arriving now; in use now by some
    process of this machine; and left over from processes that died, which gc removes.
    """
    directories = _find_caches(args.directory)
    with progress(None, "look", "files") as advance:
        surveys, failures = _for_each(directories, lambda one: _survey(one, advance))
    if args.json:
        print_json({"caches": [one.as_json() for one in surveys], "failures": _failures_as_json(failures)})
    elif surveys:
        _print_surveys(surveys)
    else:
        print(f"nothing is cached in {_default_root()}")
    _note_failures(failures)
    return FINE


def clear(args: Namespace) -> int:
    """Remove all that we fetched and that no process of this machine uses. The index stays.

    Jobs that run fetch what they need of it again.
    """
    return _clean(args, lambda directory, files: plan_clear(directory, files, find_index(directory)), args.yes)


def collect(args: Namespace) -> int:
    """Remove what nobody will need: what processes left that died, parsed indexes that are not used any more, and
    shards that the index does not name any more; and directories into which nothing was fetched, as those of remotes
    that were misspelt.

    While a job uses the directory the latter stay: it may have begun with the index before.
    """
    since = None if args.older_than is None else time.time() - args.older_than
    return _clean(args, lambda directory, files: plan_garbage(directory, files, find_index(directory), since), True)


def _clean(args: Namespace, plan: Callable[[Path, Sequence[Any]], Plan], is_sure: bool) -> int:
    directories = _find_caches(args.directory)
    with progress(None, "look", "files") as advance:
        outcomes, failures = _for_each(directories, lambda one: plan(one, list_cache(one, advance)))
    goes = [judged for one in outcomes for judged in one.goes]
    if (goes or any(one.removes_directory for one in outcomes)) and not args.dry_run:
        if not is_sure and not _is_confirmed(goes, len(outcomes)):
            print("nothing was removed", file=sys.stderr)
            return FINE
        by_directory = {one.directory: one for one in outcomes}
        with progress(len(goes), "remove", "files") as advance:
            outcomes, more = _for_each(list(by_directory), lambda one: carry_out(by_directory[one], advance))
        failures |= more
    if args.json:
        caches = [_as_json(one) for one in outcomes]
        print_json({"dry_run": args.dry_run, "caches": caches, "failures": _failures_as_json(failures)})
    else:
        _print_outcomes(outcomes, args.dry_run)
    _note_failures(failures)
    return FINE


def _is_confirmed(goes: Sequence[Judged], directories: int) -> bool:
    what = f"{said(goes)} of {counted(directories, 'cache')}"
    if not sys.stdin.isatty():
        raise ConfigError(f"this would remove {what}, and there is nobody to ask; say --yes, or --dry-run to see more")
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_outcomes(outcomes: Sequence[Plan], dry_run: bool) -> None:
    for one in outcomes:
        _print_outcome(one, dry_run=dry_run)
    if not outcomes:
        print(f"nothing is cached in {_default_root()}")
    elif len(outcomes) > 1:
        goes = [judged for one in outcomes for judged in one.goes]
        print(f"{'would remove' if dry_run else 'removed'} {said(goes)} in all")


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "directory": str(plan.directory),
        "removed": [_file_as_json(*judged) for judged in plan.goes],
        "stays": [_file_as_json(*judged) for judged in plan.stays],
        "removed_directory": plan.removes_directory,
        "removed_bytes": sum(file.bytes for file, _ in plan.goes),
    }


def _file_as_json(file: Any, reason: Any) -> dict[str, Any]:
    return {"file": file.name, "bytes": file.bytes, "because": reason.value}


def _failures_as_json(failures: _Failures) -> list[dict[str, str]]:
    return [{"directory": str(directory), "error": str(error)} for directory, error in failures.items()]


def _note_failures(failures: _Failures) -> None:
    for directory, error in failures.items():
        print_note(_PROGRAM, f"left out {directory}: {error}")


def _add(actions: Any, word: str, words: str, action: Callable[[Namespace], int]) -> ArgumentParser:
    parser = add_action(actions, word, words, action)
    words = "cache directory, or one with several; the default caches if left out"
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
        why = (
            f"neither it nor a directory in it has an {MANIFEST_BASENAME} of ours"
            if root.is_dir()
            else "it is not there"
        )
        raise ConfigError(
            f"{mask_url(given)} is not a cache directory: {why}; give one that a stream names with local=, or none for "
            f"the default ones in {_default_root()}"
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
        if not _NOTES.isdisjoint(files) and is_cache(Path(folder)):
            yield Path(folder)


_SHOWN_DIGITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Amount:
    """Some files."""

    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Survey:
    """One cache directory."""

    directory: Path
    remote: str | None
    """Digest of the location that its files come from; None for one that is read in place."""
    index: str | None
    """Beginning of the SHA-256 of the index; None where there is none that can be read."""
    checked: float | None
    """When the remote was last asked for its index, in seconds since 1970."""
    shards: int | None
    """Shards that the index names."""
    shards_present: int | None
    """Those of them whose raw files are here."""
    ours: _Amount
    not_ours: _Amount
    arriving: _Amount
    """Files on their way, those of dead writers apart."""
    indexes: _Amount
    """The index and parsed forms of it."""
    leftovers: _Amount
    """What dead writers left."""
    in_use: _Amount
    """Whole files that a process has open."""
    last_used: float | None
    """When any shard was last used, in seconds since 1970."""

    @property
    def bytes(self) -> int:
        """All that is here."""
        parts = (self.ours, self.not_ours, self.arriving, self.indexes, self.leftovers)
        return sum(amount.bytes for amount in parts)

    def as_json(self) -> dict[str, Any]:
        """For programs; times as ISO 8601."""
        told = asdict(self) | {"directory": str(self.directory), "bytes": self.bytes}
        return told | {"checked": _iso(self.checked), "last_used": _iso(self.last_used)}


def _survey(directory: Path, advance: Callable[[int], object]) -> _Survey:
    """Look through a cache directory.

    Args:
        directory: One stream's.
        advance: Told the number of files looked at since it was last told.

    Raises:
        ConfigError: It is not a cache directory.
    """
    files = list_cache(directory, advance)
    index, origin = find_index(directory), read_manifest(directory)
    whole = [file for file in files if file.kind in (FileKind.OURS, FileKind.FOREIGN)]
    dead = [file for file in files if _is_leftover(file)]
    return _Survey(
        directory=directory,
        remote=None if origin is None or origin.of_originals else origin.remote,
        index=None if index is None else index.digest[:_SHOWN_DIGITS],
        checked=_checked(origin.check if origin else None, index),
        shards=None if index is None else len(index.index.shards),
        shards_present=None
        if index is None
        else _count_present(index.index, {file.name: file.bytes for file in whole}),
        ours=_sum_amount(file for file in files if file.kind is FileKind.OURS),
        not_ours=_sum_amount(file for file in files if file.kind is FileKind.FOREIGN),
        arriving=_sum_amount(file for file in files if file.kind is FileKind.ARRIVING and file.in_use),
        indexes=_sum_amount(file for file in files if file.kind is FileKind.INDEX and not _is_leftover(file)),
        leftovers=_sum_amount(dead),
        in_use=_sum_amount(file for file in whole if file.in_use),
        last_used=max((file.last_used for file in files if file.last_used is not None), default=None),
    )


def _is_leftover(file: CacheFile) -> bool:
    """Whether a dead writer left a file."""
    is_unfinished = file.kind is FileKind.ARRIVING or (
        file.kind is FileKind.INDEX and staging_name_of(file.name) is not None
    )
    return is_unfinished and not file.in_use


def _count_present(index: DatasetIndex, sizes: Mapping[str, int]) -> int:
    return sum(all(sizes.get(raw.basename) == raw.bytes for raw, _ in shard.files) for shard in index.shards)


def _sum_amount(files: Iterable[CacheFile]) -> _Amount:
    sizes = [file.bytes for file in files]
    return _Amount(files=len(sizes), bytes=sum(sizes))


def _checked(check: IndexCheck | None, index: FoundIndex | None) -> float | None:
    return check.checked / 1e9 if check is not None and index is not None and check.digest == index.digest else None


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


_MOST_SHOWN = 3
_ALWAYS = ("directory", "shards", "ours", "last use")
_AMOUNTS = ("arriving", "in use", "left over")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_JUST_NOW = 120


def _print_surveys(surveys: Sequence[_Survey]) -> None:
    """Print all about one directory, or a line for each of several."""
    if len(surveys) == 1:
        print_table(str(surveys[0].directory), ("", ""), _facts(surveys[0]), head=False)
        return
    columns = {
        "directory": [str(one.directory) for one in surveys],
        "shards": list(map(_shards, surveys)),
        "ours": [_bytes(one.ours) for one in surveys],
        "not ours": [_bytes(one.not_ours) for one in surveys],
        "arriving": [_bytes(one.arriving) for one in surveys],
        "in use": [_bytes(one.in_use) for one in surveys],
        "left over": [_bytes(one.leftovers) for one in surveys],
        "last use": [_ago(one.last_used) for one in surveys],
    }
    told = {head: texts for head, texts in columns.items() if head in _ALWAYS or set(texts) != {"-"}}
    print_table("caches", list(told), zip(*told.values(), strict=True), right=("ours", "not ours", *_AMOUNTS))
    print(f"{format_bytes(sum(one.bytes for one in surveys))} in {counted(len(surveys), 'cache')}")


def _print_outcome(plan: Plan, *, dry_run: bool) -> None:
    """Print what was removed from one directory, or would be, and what stays."""
    verb = "would remove" if dry_run else "removed"
    reasons = list(_by_reason(plan.goes))
    if plan.removes_directory:
        reasons.append("the directory, into which nothing was fetched")
    if len(reasons) == 1:
        print(f"{plan.directory}: {verb} {reasons[0]}")
    elif reasons:
        print(f"{plan.directory}: {verb} {said(plan.goes)}: {', '.join(reasons)}")
    else:
        print(f"{plan.directory}: nothing to remove")
    for line in _by_reason(plan.stays, with_names=True):
        print(f"  stays: {line}")


def said(judged: Sequence[Judged]) -> str:
    """How many files, and how big: ``"3 files (2.6 KB)"``."""
    return f"{counted(len(judged), 'file')} ({format_bytes(sum(file.bytes for file, _ in judged))})"


def _facts(one: _Survey) -> list[tuple[str, str]]:
    checked = "" if one.checked is None else f", asked for {_ago(one.checked)}"
    return [
        ("remote", f"digest {one.remote}" if one.remote else "none; a dataset that is read in place"),
        ("index", f"{one.index}{checked}" if one.index else "none here"),
        ("shards here", _shards(one)),
        ("ours", _amount(one.ours)),
        ("not ours", _amount(one.not_ours)),
        ("arriving", _amount(one.arriving)),
        ("indexes", _amount(one.indexes)),
        ("in use now", _amount(one.in_use)),
        ("left over", _amount(one.leftovers)),
        ("last use", _ago(one.last_used)),
    ]


def _by_reason(judged: Sequence[Judged], with_names: bool = False) -> Iterator[str]:
    for reason in Reason:
        found = [one for one in judged if one[1] is reason]
        if found:
            yield f"{said(found)} {reason.value}{_names(found) if with_names else ''}"


def _names(judged: Sequence[Judged]) -> str:
    more = ", ..." if len(judged) > _MOST_SHOWN else ""
    return f": {', '.join(printable_name(file.name) for file, _ in judged[:_MOST_SHOWN])}{more}"


def _shards(one: _Survey) -> str:
    return "-" if one.shards is None or one.shards_present is None else f"{one.shards_present:,} of {one.shards:,}"


def _amount(amount: _Amount) -> str:
    return f"{counted(amount.files, 'file')} ({format_bytes(amount.bytes)})" if amount.files else "-"


def _bytes(amount: _Amount) -> str:
    return format_bytes(amount.bytes) if amount.files else "-"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    passed = time.time() - seconds
    if passed < _JUST_NOW:
        return "just now"
    return next(f"{passed // length:.0f} {unit} ago" for unit, length in _UNITS if passed >= length)
