"""Check a dataset: the size and hashes of each file, each table of offsets, and that each sample can be decoded.

Each bad shard is listed with its error and its samples. If the index records no hashes, changed bytes may remain
undetected, and a line says so. Exit code: 0 if nothing is wrong, or all was repaired; 1 if something is wrong; 2 if
the check failed.

    lightning-streaming verify data/train
    lightning-streaming verify s3://corpus/train --quick
    lightning-streaming verify data/train --repair s3://corpus/train
    lightning-streaming verify data/tars --format webdataset

Files that look like shards, but are not in the index, are listed; they do no harm. The raw file of a compressed shard
must have the contents of the compressed one; otherwise it may be a remainder of another dataset in the directory.

--repair downloads bad and missing files again. A download is checked in the same way before it replaces the bad file,
which is not deleted but renamed to NAME.damaged. Without --repair, the shards to rewrite are listed.
"""

from __future__ import annotations

import filecmp
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.sources import find_size
from lightning_streaming.errors import ConfigError, FormatError, IntegrityError, ObjectNotFoundError, StreamingError
from lightning_streaming.files import appears_whole, join_under
from lightning_streaming.formats.images import PILLOW_ERRORS, load_whole
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, dump_index, parse_index
from lightning_streaming.formats.shard import check_shard, open_shard, unsafe_columns, was_written_for
from lightning_streaming.formats.shard_format import ShardReader
from lightning_streaming.formats.shard_table import OTHER_FORMATS, shown_file
from lightning_streaming.tools import commands, console
from lightning_streaming.tools.commands import usable_cpus
from lightning_streaming.tools.console import counted, first_few, print_line, progress
from lightning_streaming.tools.stored import stored_dataset
from lightning_streaming.tools.stored.stored_dataset import (
    StoredDataset,
    check_hashes,
    find_dataset,
    open_cached,
    stored_files,
    unpack_into,
)
from lightning_streaming.units import format_bytes
from lightning_streaming.writing.parallel import ignore_interrupts, without_interrupts

_BYTES_PER_PROCESS = 2**29
"""Raw bytes that are checked in about the time it takes to start a process."""
_MAX_SAMPLES_NAMED = 3
_CHECKED = {
    (False, False): "everything",
    (False, True): "sizes and samples",
    (True, False): "sizes and hashes",
    (True, True): "sizes",
}
"""What was checked: by whether ``--quick`` was given, and whether no hashes are recorded."""
_WITHOUT_HASHES = (
    "changed bytes may not be detected; to record hashes, write with --hashes sha1, or hashes=['sha1'] in Python"
)
_OF_ANOTHER = "it is of another dataset that was here, and some readers would use it as this one's"
_LONG_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{8,}\b")
_Problem = dict[str, str]
"""A problem of a shard: the ``file``, as the index names it, and the ``problem``."""
_Check = Callable[..., list[_Problem]]
"""Takes a dataset, a shard, and maybe a cache; see :func:`examine`."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    commands.add_dataset(parser)
    commands.add_format(parser)
    add("--quick", action="store_true", help="check sizes and hashes of stored files only")
    add("--repair", metavar="SOURCE", help="restore bad files of a directory from another directory or a URL")
    commands.add_workers(
        parser, None, "processes that check; one for each processor by default, fewer for small datasets"
    )
    commands.add_json(parser)
    commands.add_storage_options(parser)


def run(args: Namespace) -> int:
    """Check all shards, repair them if requested, and print the result."""
    dataset = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    source = None if args.repair is None else find_dataset(args.repair, args.storage_options)
    if source is not None:
        _check_repairable(dataset, source)
    # Not in the caches of runs: files there have been checked before.
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        cache = dataset.cache(Path(scratch))
        if dataset.format is None:
            index, is_index_repaired = _find_index(dataset, source)
        else:
            index, is_index_repaired = cache.read_index(), False
        _check_readable(index, args)
        needs_cache = any(_is_unpacked_by_cache(shard) for _, shard in index.shards.examples())
        if needs_cache:
            cache.read_index()  # before worker processes get it
        check = partial(examine, quick=args.quick, allow_unsafe_types=args.allow_unsafe_types)
        problems_of = _examine_all(dataset, index, partial(check, cache=cache if needs_cache else None), args.workers)
        repairs = {}
        if source is not None:
            with progress(len(problems_of), "repair", "shards") as advance:
                for number in problems_of:
                    repairs[number] = _repair(dataset, index.shards[number], source, check)
                    advance(1)
    not_repaired: dict[str, Any] = {"repaired": False, "not_repaired_because": None, "kept_aside": []}
    bad = [
        {
            "shard": number,
            "first_sample": int(index.samples_per_shard()[:number].sum()),
            "samples": index.shards[number].samples,
            "problems": problems,
            **repairs.get(number, not_repaired),
        }
        for number, problems in problems_of.items()
    ]
    totals = stored_dataset.add_up(index)
    unhashed = sum(
        any(not ((stored or raw).hashes or (raw.hashes and not args.quick)) for raw, stored in shard.files)
        for shard in index.shards
    )
    not_compared = []
    if args.quick and dataset.directory is not None:  # of raw files next to compressed ones only the size is checked
        not_compared = [
            raw.basename
            for shard in index.shards
            for raw, compressed in shard.files
            if compressed is not None and not raw.hashes
            if None not in (dataset.size_of(raw.basename), dataset.size_of(compressed.basename))
        ]
    report = {
        "dataset": dataset.shown,
        "checked": _CHECKED[args.quick, 0 < unhashed == len(index.shards)],
        "shards_without_hashes": unhashed,
        **{name: totals[name] for name in ("shards", "samples", "stored_bytes")},
        "sound": all(shard["repaired"] for shard in bad),
        "index_repaired": is_index_repaired,
        # Stores cannot always be listed.
        "unnamed_files": None if dataset.directory is None else stored_dataset.unnamed_files(dataset.at.walk(), index),
        "not_compared": not_compared,
        "bad_shards": bad,
    }
    (console.print_json if args.json else _print_report)(report)
    return console.FINE if report["sound"] else console.BAD


def _is_unpacked_by_cache(shard: ShardInfo) -> bool:
    return shard.format in OTHER_FORMATS and shard.compression is not None


def _check_repairable(dataset: StoredDataset, source: StoredDataset) -> None:
    """Check that a dataset can be repaired from another one.

    Raises:
        ConfigError: It cannot.
    """
    if dataset.format is not None:
        why = (
            f"--repair finds bad files by an index, but {dataset.shown} is read as format={dataset.format!r} without it"
        )
        hint = "write an index with lightning-streaming index while the data is correct, or copy the files again"
    elif dataset.directory is None:
        why = f"only a directory can be repaired, but {dataset.shown} is on a store"
        hint = "copy a correct dataset there with lightning-streaming copy"
    elif source.directory is not None and source.directory.resolve() == dataset.directory.resolve():
        why, hint = f"{dataset.shown} cannot be repaired from itself", "name another directory or a URL"
    else:
        return
    raise ConfigError(why, hint=hint, option="--repair", path=dataset.shown)


def _check_readable(index: DatasetIndex, args: Namespace) -> None:
    """Check that all kinds of shards can be read with these arguments, once for each kind."""
    if args.quick:
        return
    for _, shard in index.shards.examples():
        check_shard(shard, allow_unsafe_types=True)
        unsafe = unsafe_columns(shard)
        if unsafe and not args.allow_unsafe_types:
            encodings = {column.name: column.encoding for column in stored_dataset.columns_of(shard.schema)}
            raise ConfigError(
                f"column {unsafe[0]!r} is of encoding {encodings[unsafe[0]]}, which can run any code when it is "
                "decoded",
                hint="pass --allow-unsafe-types if you trust the author of the data, or --quick to decode nothing",
                option="--allow-unsafe-types",
            )


def _examine_all(
    dataset: StoredDataset, index: DatasetIndex, check: _Check, workers: int | None
) -> dict[int, list[_Problem]]:
    """Return the problems of all bad shards, by number; they are checked in order, in this process or in several."""
    raw_bytes = sum(raw.bytes for shard in index.shards for raw, _ in shard.files)
    workers = min(workers or min(usable_cpus(), 1 + raw_bytes // _BYTES_PER_PROCESS), len(index.shards))
    check, problems_of = partial(check, dataset), dict[int, list[_Problem]]()
    with ExitStack() as stack:
        advance = stack.enter_context(progress(len(index.shards), "verify", "shards"))
        results: Iterable[list[_Problem]] = map(check, index.shards)
        try:
            if workers > 1:
                # Spawned, because a fork would copy the threads of a store's client in an undefined state.
                pool = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn"), ignore_interrupts))
                stack.callback(pool.shutdown, cancel_futures=True)
                with without_interrupts():  # all processes are started here; the first may be killed meanwhile
                    results = pool.map(check, index.shards)
            for number, problems in enumerate(results):
                advance(1)
                if problems:
                    problems_of[number] = problems
        except BrokenProcessPool:
            raise StreamingError(
                f"one of {workers} processes was killed, perhaps because memory ran out",
                hint="use fewer with --workers",
                option="--workers",
            ) from None
    return problems_of


def _print_report(report: Mapping[str, Any]) -> None:
    """Print one line if nothing is wrong; else each bad shard, and what to do."""
    bad = report["bad_shards"]
    if report["index_repaired"]:
        print_line("The index was missing or damaged, and was fetched again.")
    if not bad:
        print_line(
            f"{report['dataset']}: {counted(report['shards'], 'shard')}, {counted(report['samples'], 'sample')}, "
            f"{format_bytes(report['stored_bytes'])}; {report['checked']} checked, "
            f"{'nothing wrong found' if report['shards_without_hashes'] else 'all sound'}"
        )
    else:
        rows = [
            (
                *(("", "") if position else (str(shard["shard"]), _samples(shard))),
                problem["file"],
                _LONG_HASH.sub(r"\1…", problem["problem"]),  # --json has whole hashes
            )
            for shard in bad
            for position, problem in enumerate(shard["problems"])
        ]
        heads = ("shard", "samples", "file", "what is wrong")
        console.print_table(f"bad shards of {report['dataset']}", heads, rows, whole=heads[:2])
        print_line(f"{len(bad):,} of {counted(report['shards'], 'shard')} bad; {report['checked']} checked")
        repaired = [shard for shard in bad if shard["repaired"]]
        if repaired:
            print_line(f"repaired: {_numbers(repaired)}")
        aside = [name for shard in bad for name in shard["kept_aside"]]
        if aside:
            print_line(f"kept aside, to be removed when you like: {', '.join(aside)}")
        for shard in bad:
            if shard["not_repaired_because"] is not None:
                print_line(f"shard {shard['shard']} not repaired: {shard['not_repaired_because']}")
        left = [shard for shard in bad if not shard["repaired"]]
        if left:
            print_line(f"to write again, or to fetch with --repair SOURCE: {_numbers(left)}")
    unhashed = report["shards_without_hashes"]
    if unhashed:
        which = "" if unhashed == report["shards"] else f" of {unhashed:,} of the {report['shards']:,} shards"
        print_line(f"no hashes are recorded{which}, so {_WITHOUT_HASHES}")
    if report["unnamed_files"]:
        print_line(f"not named by the index, to be removed when you like: {first_few(report['unnamed_files'])}")
    if report["not_compared"]:
        print_line(f"not compared with the compressed files, because of --quick: {first_few(report['not_compared'])}")


def _numbers(shards: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"shard {shard['shard']}, samples {_samples(shard)}" for shard in shards)


def _samples(shard: Mapping[str, Any]) -> str:
    first, samples = shard["first_sample"], shard["samples"]
    return f"{first} to {first + samples - 1}" if samples else "none"


def examine(
    dataset: StoredDataset, shard: ShardInfo, *, quick: bool, allow_unsafe_types: bool, cache: ShardCache | None = None
) -> list[_Problem]:
    """Check the files of a shard: presence, sizes, every recorded hash; then offsets and every sample.

    Files on a store are downloaded into a temporary directory, one shard at a time.

    Args:
        dataset: The dataset.
        shard: An entry of its index.
        quick: Whether to check only sizes and hashes of stored files.
        allow_unsafe_types: Whether samples may be decoded that can run code of the author of the data.
        cache: Cache of the dataset, for shards of another format that it must unpack.

    Returns:
        All problems, up to the step after which no more can be found.

    Raises:
        StorageError: The store fails.
        ConfigError: A column is unsafe and that was not allowed, or a hash is unknown.
        MissingDependencyError: A package is not installed.
    """
    if cache is not None and _is_unpacked_by_cache(shard) and not quick:
        name, directory = shown_file(shard).basename, cache.directory.path
        try:
            with open_cached(cache, shard, allow_unsafe_types=allow_unsafe_types) as reader:
                words = _failures(reader, shard, directory)
        except (IntegrityError, ObjectNotFoundError, FormatError) as error:
            words = [str(error).removeprefix(f"{cache.label}: ").removeprefix(f"{directory}/")]
        return [{"file": name, "problem": problem} for problem in words]
    problems = []
    with TemporaryDirectory(prefix="lightning_streaming_") as name:
        scratch = StoredDataset(location=name, options={})
        for file in stored_files(shard) if dataset.directory is None else _present_files(dataset, shard):
            try:
                if dataset.directory is None:
                    dataset.fetch(file, scratch.path(file.basename), check=True)
                else:
                    dataset.check(file)
            except (IntegrityError, ObjectNotFoundError) as error:  # noqa: PERF203  each has its own
                problems.append({"file": file.basename, "problem": str(error)})
        if problems or quick:
            return problems
        local = scratch if dataset.directory is None else dataset
        directories = Path(name), Path(local.location)
        try:
            raw_directory = directories[0 if _unpack(local, shard, Path(name)) else 1]
            reader = open_shard(shard, raw_directory, allow_unsafe_types=allow_unsafe_types)
        except (IntegrityError, FormatError) as error:
            words = [_without_directories(error, *directories)]
        else:
            words = _failures(reader, shard, *directories)
            reader.close()
        return [{"file": shard.raw_data.basename, "problem": problem} for problem in words]


def _present_files(dataset: StoredDataset, shard: ShardInfo) -> Iterator[FileInfo]:
    """Yield the files of a shard that a directory has; at least one of each pair: the stored one if both are missing.

    A cache keeps raw files of a compressed dataset, with or without the compressed ones.
    """
    for raw, compressed in shard.files:
        forms = [file for file in (compressed, raw) if file is not None]
        yield from [file for file in forms if dataset.size_of(file.basename) is not None] or forms[:1]


def _failures(reader: ShardReader, shard: ShardInfo, *directories: Path) -> list[str]:
    """Decode all samples; return the first errors, and how many samples have others."""
    failures: list[Exception] = []
    for number in range(len(reader)):
        try:
            sample = reader[number]
        except FormatError as error:
            failures.append(error)
            continue
        try:
            _load_images(sample)
        except FormatError as error:
            failures.append(error.with_context(f"sample {number}", sample=number))
        except PILLOW_ERRORS as error:  # of images from a user's own encoding
            failures.append(FormatError(f"sample {number}: {type(error).__name__}: {error}", sample=number))
    prefix = f"{shard.raw_data.basename}, "
    named = [_without_directories(error, *directories).removeprefix(prefix) for error in failures[:_MAX_SAMPLES_NAMED]]
    if len(failures) > _MAX_SAMPLES_NAMED:
        more = len(failures) - _MAX_SAMPLES_NAMED
        named.append(f"and {more:,} more of {shard.samples:,} samples cannot be decoded")
    return named


def _load_images(value: Any) -> None:
    """Decode the pixels of images, which reading a sample does not do."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _load_images(item)
    elif console.is_image(value):
        load_whole(value)


def _without_directories(error: Exception, *directories: Path) -> str:
    """Return the message of an error with file names as the index has them."""
    words = str(error)
    for directory in directories:
        words = words.removeprefix(f"{directory}/")
    return words


def _unpack(dataset: StoredDataset, shard: ShardInfo, scratch: Path) -> bool:
    """Put the raw files of a compressed shard into ``scratch``; return False if it is not compressed.

    Raises:
        IntegrityError: One cannot be decompressed, or the file of its name differs.
    """
    if shard.compression is None:
        return False
    is_proven = True  # whether raw files are identified by more than their names and sizes
    for raw, compressed in shard.files:
        assert compressed is not None
        path = dataset.path(raw.basename)
        has_raw = path != join_under(scratch, raw.basename) and find_size(path) is not None
        if dataset.size_of(compressed.basename) is not None:
            unpacked = unpack_into(scratch, dataset.path(compressed.basename), raw, compressed, shard)
            check_hashes(raw, unpacked)
            if has_raw and not filecmp.cmp(path, unpacked, shallow=False):
                raise IntegrityError(
                    f"{raw.basename} differs from the contents of {compressed.basename}",
                    hint=_OF_ANOTHER,
                    path=raw.basename,
                )
            continue
        is_proven = is_proven and bool(raw.hashes)
        if has_raw:
            link = join_under(scratch, raw.basename)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())
    if not is_proven and not was_written_for(shard, scratch):
        name = shard.raw_data.basename
        raise IntegrityError(f"{name} was not written for compression {shard.compression}", hint=_OF_ANOTHER, path=name)
    return True


def _find_index(dataset: StoredDataset, source: StoredDataset | None) -> tuple[DatasetIndex, bool]:
    """Return the index of a dataset; if it is missing or invalid, replace it by that of the source.

    Returns:
        The index, and whether it was replaced.

    Raises:
        IndexFormatError: Neither is valid.
        ObjectNotFoundError: There is none.
        StorageError: A store fails.
    """
    try:
        index = dataset.read_index()
        stored_dataset.check_hash_names(index, str(dataset.at / INDEX_BASENAME))
    except (FormatError, ObjectNotFoundError):
        if source is None or dataset.directory is None:
            raise
    else:
        return index, False
    text = source.read_index_text()
    index = parse_index(text, source.shown)
    stored_dataset.check_hash_names(index, source.shown)
    dataset.directory.mkdir(parents=True, exist_ok=True)
    with appears_whole(dataset.path(INDEX_BASENAME)) as partial_file:
        partial_file.write_bytes(text)
        _set_aside(dataset.path(INDEX_BASENAME))
    return index, True


def _repair(dataset: StoredDataset, shard: ShardInfo, source: StoredDataset, check: _Check) -> dict[str, Any]:
    """Download a shard again, check it in full, and replace the files of the directory that differ.

    Nothing is deleted: a bad file is renamed.

    Args:
        dataset: A dataset in a directory.
        shard: The bad shard.
        source: The dataset to download from.
        check: Returns the problems of a shard.

    Returns:
        The part of the report about the repair.

    Raises:
        StorageError: The source fails.
    """
    failure, kept_aside = None, list[str]()
    # In the same directory, so that files can be renamed into place.
    with TemporaryDirectory(prefix=".repair-", dir=dataset.directory) as name:
        staged = StoredDataset(location=name, options={})
        try:
            for file in stored_files(shard):
                source.fetch(file, staged.path(file.basename), check=True)
        except (IntegrityError, ObjectNotFoundError) as error:
            failure = str(error)
        else:
            cache = None
            if _is_unpacked_by_cache(shard):  # a cache of this shard alone
                staged.path(INDEX_BASENAME).write_bytes(dump_index([shard]))
                cache = staged.cache(staged.path("unpacked"))
            problems = check(staged, shard, cache=cache)
            if problems:
                failure = f"{source.shown} has it no better: {problems[0]['problem']}"
            else:
                kept_aside.extend(_replace_bad(dataset, shard, staged))
    return {"repaired": failure is None, "not_repaired_because": failure, "kept_aside": kept_aside}


def _replace_bad(dataset: StoredDataset, shard: ShardInfo, staged: StoredDataset) -> Iterator[str]:
    """Replace the files that differ, and yield the new names of bad ones.

    Raw files that the directory has too, like a cache, are decompressed for it.
    """
    assert dataset.directory is not None
    present = list(_present_files(dataset, shard))
    for raw, compressed in shard.files:
        if compressed is not None and raw in present:
            unpack_into(Path(staged.location), staged.path(compressed.basename), raw, compressed, shard)
    for file in present:
        good, target = staged.path(file.basename), dataset.path(file.basename)
        if target.exists() and filecmp.cmp(good, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = _set_aside(target)
        os.replace(good, target)
        if aside is not None:
            yield aside.relative_to(dataset.directory).as_posix()


def _set_aside(path: Path) -> Path | None:
    """Rename a file to ``NAME.damaged``, or ``NAME.damaged.2`` if that exists; return None if there is no file."""
    if not path.exists():
        return None
    endings = (stored_dataset.DAMAGED + (f".{number}" if number > 1 else "") for number in count(1))
    names = (path.with_name(path.name + ending) for ending in endings)
    return path.rename(next(name for name in names if not name.exists()))
