"""What is in caches, and what was removed from them, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from lightning_streaming.cache.cleaning import Judged, Plan, Reason
from lightning_streaming.tools.cache_survey import Amount, Survey
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.render import name
from lightning_streaming.tools.tables import print_table
from lightning_streaming.units import format_bytes

_MOST_SHOWN = 3
_ALWAYS = ("directory", "shards", "ours", "last use")
_AMOUNTS = ("arriving", "in use", "left over")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_JUST_NOW = 120


def print_surveys(surveys: Sequence[Survey]) -> None:
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


def print_outcome(plan: Plan, *, dry_run: bool) -> None:
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


def _facts(one: Survey) -> list[tuple[str, str]]:
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
    return f": {', '.join(name(file.name) for file, _ in judged[:_MOST_SHOWN])}{more}"


def _shards(one: Survey) -> str:
    return "-" if one.shards is None or one.shards_present is None else f"{one.shards_present:,} of {one.shards:,}"


def _amount(amount: Amount) -> str:
    return f"{counted(amount.files, 'file')} ({format_bytes(amount.bytes)})" if amount.files else "-"


def _bytes(amount: Amount) -> str:
    return format_bytes(amount.bytes) if amount.files else "-"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    passed = time.time() - seconds
    if passed < _JUST_NOW:
        return "just now"
    return next(f"{passed // length:.0f} {unit} ago" for unit, length in _UNITS if passed >= length)
