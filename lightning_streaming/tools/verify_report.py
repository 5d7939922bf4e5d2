"""What verify found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_streaming.tools.console import counted
from lightning_streaming.tools.tables import print_table
from lightning_streaming.tools.unnamed import shown
from lightning_streaming.units import format_bytes


def print_report(report: Mapping[str, Any]) -> None:
    """Print one line if all is sound; else each bad shard, and what can be done."""
    bad = report["bad_shards"]
    if report["index_repaired"]:
        print("The index was missing or damaged, and was fetched again.")
    if not bad:
        print(
            f"{report['dataset']}: {counted(report['shards'], 'shard')}, {counted(report['samples'], 'sample')}, "
            f"{format_bytes(report['stored_bytes'])}; {report['checked']} checked, all sound"
        )
        _print_unnamed(report)
        return
    print_table(f"bad shards of {report['dataset']}", ("shard", "samples", "file", "what is wrong"), list(_rows(bad)))
    print(f"{len(bad):,} of {counted(report['shards'], 'shard')} bad; {report['checked']} checked")
    for line in _outcome(bad):
        print(line)
    _print_unnamed(report)


def _print_unnamed(report: Mapping[str, Any]) -> None:
    if report["unnamed_files"]:
        print(f"not named by the index, to be removed when you like: {shown(report['unnamed_files'])}")
    if report["not_compared"]:
        print(f"not compared with the compressed files, as it is without --quick: {shown(report['not_compared'])}")


def _rows(bad: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    for shard in bad:
        for position, problem in enumerate(shard["problems"]):
            heads = ("", "") if position else (str(shard["shard"]), _samples(shard))
            yield (*heads, problem["file"], problem["problem"])


def _outcome(bad: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    repaired = [shard for shard in bad if shard["repaired"]]
    if repaired:
        yield f"repaired: {_numbers(repaired)}"
    kept = [name for shard in bad for name in shard["kept_aside"]]
    if kept:
        yield f"kept aside, to be removed when you like: {', '.join(kept)}"
    for shard in bad:
        if shard["not_repaired_because"] is not None:
            yield f"shard {shard['shard']} not repaired: {shard['not_repaired_because']}"
    left = [shard for shard in bad if not shard["repaired"]]
    if left:
        yield f"to write again, or to fetch with --repair SOURCE: {_numbers(left)}"


def _numbers(shards: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"shard {shard['shard']}, samples {_samples(shard)}" for shard in shards)


def _samples(shard: Mapping[str, Any]) -> str:
    first, samples = shard["first_sample"], shard["samples"]
    return f"{first} to {first + samples - 1}" if samples else "none"
