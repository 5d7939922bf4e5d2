"""Show what caches hold, and make room, without hurting jobs that use them.

DIR is the cache directory of one stream, or a directory with several; by default the one with all default caches.

    lightning-streaming cache info
    lightning-streaming cache clear ~/.cache/lightning_streaming/corpus-1f0c3a5e7b9d2846
    lightning-streaming cache gc --older-than 7d --dry-run

Only files are removed that were fetched, and are unchanged since; never one that a process has open or is fetching.
"""

from __future__ import annotations

import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any

from lightning_streaming.cache.cleaning import Judged, Plan, carry_out, plan_clear, plan_garbage
from lightning_streaming.cache.inspection import find_index, list_cache
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.cache_directories import Failure, default_root, find_caches, for_each
from lightning_streaming.tools.cache_report import print_outcome, print_surveys, said
from lightning_streaming.tools.cache_survey import survey
from lightning_streaming.tools.console import FINE, counted, print_json, print_note, progress
from lightning_streaming.tools.options import add_json

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
    directories = find_caches(args.directory)
    with progress(None, "look", "files") as advance:
        found, failures = for_each(directories, partial(survey, advance=advance))
    surveys = [one for _, one in found]
    if args.json:
        print_json({"caches": [one.as_json() for one in surveys], "failures": _failures_as_json(failures)})
    elif surveys:
        print_surveys(surveys)
    else:
        print(f"nothing is cached in {default_root()}")
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
    directories = find_caches(args.directory)
    with progress(None, "look", "files") as advance:
        found, failures = for_each(directories, lambda one: plan(one, list_cache(one, advance)))
    outcomes = [one for _, one in found]
    goes = [judged for one in outcomes for judged in one.goes]
    if (goes or any(one.removes_directory for one in outcomes)) and not args.dry_run:
        if not is_sure and not _is_confirmed(goes, len(outcomes)):
            print("nothing was removed", file=sys.stderr)
            return FINE
        outcomes, more = _carry_out(outcomes, len(goes))
        failures += more
    if args.json:
        print_json(
            {
                "dry_run": args.dry_run,
                "caches": [_as_json(one) for one in outcomes],
                "failures": _failures_as_json(failures),
            }
        )
    else:
        _print_outcomes(outcomes, args.dry_run)
    _note_failures(failures)
    return FINE


def _carry_out(plans: Sequence[Plan], files: int) -> tuple[list[Plan], list[Failure]]:
    by_directory = {one.directory: one for one in plans}
    with progress(files, "remove", "files") as advance:
        done, failures = for_each(list(by_directory), lambda one: carry_out(by_directory[one], advance))
    return [one for _, one in done], failures


def _is_confirmed(goes: Sequence[Judged], directories: int) -> bool:
    what = f"{said(goes)} of {counted(directories, 'cache')}"
    if not sys.stdin.isatty():
        raise ConfigError(f"this would remove {what}, and there is nobody to ask; say --yes, or --dry-run to see more")
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_outcomes(outcomes: Sequence[Plan], dry_run: bool) -> None:
    for one in outcomes:
        print_outcome(one, dry_run=dry_run)
    if not outcomes:
        print(f"nothing is cached in {default_root()}")
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


def _failures_as_json(failures: Sequence[Failure]) -> list[dict[str, str]]:
    return [{"directory": str(one.directory), "error": str(one.error)} for one in failures]


def _note_failures(failures: Sequence[Failure]) -> None:
    for one in failures:
        print_note(_PROGRAM, f"left out {one.directory}: {one.error}")


def _add(actions: Any, word: str, words: str, action: Callable[[Namespace], int]) -> ArgumentParser:
    parser: ArgumentParser = actions.add_parser(
        word, help=words, description=getdoc(action), formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.set_defaults(action=action)
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="cache directory, or one with several; the default caches if left out",
    )
    add_json(parser)
    return parser


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise ArgumentTypeError(f"must be a number and one of s, m, h, d and w, like 7d, but got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]
