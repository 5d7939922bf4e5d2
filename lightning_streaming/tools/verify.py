"""Check a dataset: every file's size and hashes, every table of offsets, and that every sample can be decoded.

Each bad shard is named with what is wrong and which samples it holds. Exit code: 0 if all is sound, or was repaired;
1 if something is wrong; 2 if it could not be checked.

    lightning-streaming verify data/train
    lightning-streaming verify s3://corpus/train --quick
    lightning-streaming verify data/train --repair s3://corpus/train

Files of a directory that look like shards, and that the index does not name, are listed; they do no harm. The raw form
of a compressed shard must be what the compressed one holds: it may have been left by another dataset that was there.

--repair fetches bad and missing files again. What arrives is checked the same way before it takes its place; the bad
file is not deleted but renamed to NAME.damaged. Without --repair, the shards are listed that are to be written again.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.encodings import is_unsafe
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import check_shard
from lightning_streaming.tools import shard_checks
from lightning_streaming.tools.console import BAD, FINE, counted, print_json, print_table, progress
from lightning_streaming.tools.options import (
    add_dataset,
    add_json,
    add_storage_options,
    add_workers,
    storage_options,
    usable_cpus,
)
from lightning_streaming.tools.shard_checks import Job, Problem, Repair, first_few
from lightning_streaming.tools.stored_dataset import StoredDataset, columns_of, find_dataset
from lightning_streaming.units import format_bytes
from lightning_streaming.writing.parallel import ignore_interrupts, without_interrupts

_BYTES_FOR_A_PROCESS = 2**29
"""Raw bytes that are checked in about the time it takes to start a process."""


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    add_dataset(parser)
    parser.add_argument("--quick", action="store_true", help="check sizes and hashes of stored files only")
    parser.add_argument(
        "--repair", metavar="SOURCE", help="fetch bad files of a directory again, from another directory or a URL"
    )
    add_workers(parser, None, "processes to check with; one for each processor by default, fewer for small datasets")
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Check all shards, repair them if that was asked for, and say how they are."""
    options = storage_options(args.storage_options)
    place = find_dataset(args.dataset, options)
    source = None if args.repair is None else _repair_source(place, find_dataset(args.repair, options))
    index, index_repair = shard_checks.find_index(place, source)
    _check_readable(index, args)
    found = _examine_all(place, index, args)
    repairs = {} if source is None else _repair_all(place, index, found, source, args)
    report = {
        **_totals(place, index, quick=args.quick),
        "sound": all(_is_repaired(repairs.get(number)) for number in found),
        "index_repaired": index_repair is not None,
        "unnamed_files": _unnamed(place, index),
        "not_compared": _not_compared(place, index) if args.quick else [],
        "bad_shards": [_bad_shard(index, number, problems, repairs.get(number)) for number, problems in found.items()],
    }
    (print_json if args.json else _print_report)(report)
    return FINE if report["sound"] else BAD


def _repair_source(place: StoredDataset, source: StoredDataset) -> StoredDataset:
    if place.directory is None:
        raise ConfigError(
            f"only a directory can be repaired, but {place.shown} is on a store; copy a sound dataset there with "
            "lightning-streaming copy"
        )
    if source.directory is not None and source.directory.resolve() == place.directory.resolve():
        raise ConfigError(f"{place.shown} cannot be repaired from itself; name another directory or a URL")
    return source


def _check_readable(index: DatasetIndex, args: Namespace) -> None:
    """Refuse what cannot be checked for another reason than the data, once for all shards that are alike."""
    if args.quick:
        return
    for _, shard in index.shards.examples():
        check_shard(shard, allow_unsafe_types=True)
        unsafe = [column for column in columns_of(shard.schema) if is_unsafe(column.encoding)]
        if unsafe and not args.allow_unsafe_types:
            raise ConfigError(
                f"column {unsafe[0].name!r} is of encoding {unsafe[0].encoding}, which can run any code when it is "
                "decoded; give --allow-unsafe-types if you trust whoever wrote it, or --quick to decode nothing"
            )


def _job(place: StoredDataset, shard: ShardInfo, args: Namespace) -> Job:
    return Job(place=place, shard=shard, quick=args.quick, allow_unsafe_types=args.allow_unsafe_types)


def _examine_all(place: StoredDataset, index: DatasetIndex, args: Namespace) -> dict[int, tuple[Problem, ...]]:
    """What is wrong, by number of the shard; sound shards are left out."""
    jobs = [_job(place, shard, args) for shard in index.shards]
    raw_bytes = sum(raw.bytes for shard in index.shards for raw, _ in shard.files)
    workers = args.workers or min(usable_cpus(), 1 + raw_bytes // _BYTES_FOR_A_PROCESS)
    found = {}
    with progress(len(jobs), "verify", "shards") as advance:
        for number, problems in enumerate(_map(jobs, min(workers, len(jobs)))):
            advance(1)
            if problems:
                found[number] = problems
    return found


def _map(jobs: Sequence[Job], workers: int) -> Any:
    """Examine shards in order, in this process or in several."""
    if workers <= 1:
        yield from map(shard_checks.examine, jobs)
        return
    # Spawned, because a fork would copy the threads of a store's client in whatever state they are.
    with ProcessPoolExecutor(workers, get_context("spawn"), ignore_interrupts) as pool:
        try:
            with without_interrupts():  # all processes are started here
                found = pool.map(shard_checks.examine, jobs)
            yield from found
        except BrokenProcessPool:
            raise StreamingError(
                f"one of {workers} processes was killed, perhaps for want of memory; try fewer with --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _repair_all(
    place: StoredDataset,
    index: DatasetIndex,
    found: Mapping[int, Sequence[Problem]],
    source: StoredDataset,
    args: Namespace,
) -> dict[int, Repair]:
    repairs = {}
    with progress(len(found), "repair", "shards") as advance:
        for number in found:
            repairs[number] = shard_checks.repair(_job(place, index.shards[number], args), source)
            advance(1)
    return repairs


def _unnamed(place: StoredDataset, index: DatasetIndex) -> list[str] | None:
    """Files that look like shards, and that the index does not name; None on a store, which need not be listed."""
    if place.directory is None:
        return None
    return shard_checks.unnamed_files(place.at.walk(), index)


def _not_compared(place: StoredDataset, index: DatasetIndex) -> list[str]:
    return (
        []
        if place.directory is None
        else [name for shard in index.shards for name in shard_checks.not_compared(place, shard)]
    )


def _is_repaired(repair: Repair | None) -> bool:
    return repair is not None and repair.failure is None


def _totals(place: StoredDataset, index: DatasetIndex, *, quick: bool) -> dict[str, Any]:
    return {
        "dataset": place.shown,
        "checked": "sizes and hashes" if quick else "everything",
        "shards": len(index.shards),
        "samples": index.num_samples,
        "stored_bytes": sum(file.bytes for shard in index.shards for file in shard_checks.stored_files(shard)),
    }


def _bad_shard(index: DatasetIndex, number: int, problems: Sequence[Problem], repair: Repair | None) -> dict[str, Any]:
    return {
        "shard": number,
        "first_sample": int(index.samples_per_shard()[:number].sum()),
        "samples": index.shards[number].samples,
        "problems": [{"file": one.file, "problem": one.words} for one in problems],
        "repaired": _is_repaired(repair),
        "not_repaired_because": None if repair is None else repair.failure,
        "kept_aside": [] if repair is None else list(repair.kept_aside),
    }


def _print_report(report: Mapping[str, Any]) -> None:
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
        print(f"not named by the index, to be removed when you like: {first_few(report['unnamed_files'])}")
    if report["not_compared"]:
        print(f"not compared with the compressed files, as it is without --quick: {first_few(report['not_compared'])}")


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
