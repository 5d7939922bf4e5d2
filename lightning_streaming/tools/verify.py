"""Check a dataset: the size and hashes of each file, each table of offsets, and that each sample can be decoded.

Each bad shard is listed with its error and its samples. If the index records no hashes, changed bytes may remain
undetected, and a line says so. Exit code: 0 if nothing is wrong, or was repaired; 1 if something is wrong; 2 if the
check failed.

    lightning-streaming verify data/train
    lightning-streaming verify s3://corpus/train --quick
    lightning-streaming verify data/train --repair s3://corpus/train
    lightning-streaming verify data/tars --format webdataset

Files that look like shards, but are not in the index, are listed; they do no harm. The raw file of a compressed shard
must have the contents of the compressed one: it may be a remainder of another dataset in the same directory.

--repair downloads bad and missing files again. A download is checked in the same way before it replaces the bad file,
which is not deleted but renamed to NAME.damaged. Without --repair, the shards to rewrite are listed.
"""

from __future__ import annotations

import filecmp
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
from lightning_streaming.formats.images.encodings import PILLOW_ERRORS, load_whole
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, dump_index, parse_index
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.formats.shard import check_shard, open_shard, unsafe_columns, was_written_for
from lightning_streaming.formats.shard_table import OTHER_FORMATS, shown_file
from lightning_streaming.tools.commands import (
    add_dataset,
    add_format,
    add_json,
    add_storage_options,
    add_workers,
    usable_cpus,
)
from lightning_streaming.tools.console import (
    BAD,
    FINE,
    counted,
    first_few,
    is_image,
    print_json,
    print_line,
    print_table,
    progress,
)
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

_BYTES_FOR_A_PROCESS = 2**29
"""Raw bytes that are checked in about the time it takes to start a process."""
_MOST_SAMPLES_NAMED = 3
_CHECKED = {
    (False, False): "everything",
    (False, True): "sizes and samples",
    (True, False): "sizes and hashes",
    (True, True): "sizes",
}
"""What was checked: by whether ``--quick`` was given, and whether no hashes are recorded."""
_UNSEEN = "bytes that changed may pass unseen; to record hashes, write with --hashes sha1, or hashes=['sha1'] in Python"
"""What follows where none are recorded."""
_LEFT_BEHIND = "it is of another dataset that was here, and some readers would take it for this one's"
_LONG_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{8,}\b")
_Problem = dict[str, str]
"""Something that is wrong with a shard: the ``file``, as the index names it, and the ``problem``."""
_Check = Callable[..., list[_Problem]]
"""Is given a dataset, a shard, and maybe a cache; see :func:`examine`."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add_dataset(parser)
    add_format(parser)
    add("--quick", action="store_true", help="check sizes and hashes of stored files only")
    add("--repair", metavar="SOURCE", help="restore bad files of a directory from another directory or a URL")
    add_workers(parser, None, "processes to check with; one for each processor by default, fewer for small datasets")
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Check all shards, repair them if that was asked for, and say how they are."""
    place = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    source = None if args.repair is None else _repair_source(place, find_dataset(args.repair, args.storage_options))
    # Not where runs keep what they fetch: what lies there was checked before.
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        return _run(args, place, source, place.cache(Path(scratch)))


def _run(args: Namespace, place: StoredDataset, source: StoredDataset | None, cache: ShardCache) -> int:
    if place.format is None:
        index, is_index_repaired = _find_index(place, source)
    else:
        index, is_index_repaired = cache.read_index(), False
    _check_readable(index, args)
    check = partial(examine, quick=args.quick, allow_unsafe_types=args.allow_unsafe_types)
    found = _examine_all(place, index, partial(check, cache=_read_by(cache, index)), args.workers)
    repairs = {}
    if source is not None:
        with progress(len(found), "repair", "shards") as advance:
            for number in found:
                repairs[number] = _repair(place, index.shards[number], source, check)
                advance(1)
    bad = [_bad_shard(index, number, problems, repairs.get(number)) for number, problems in found.items()]
    totals = stored_dataset.add_up(index)
    unhashed = _without_hashes(index, quick=args.quick)
    report = {
        "dataset": place.shown,
        "checked": _CHECKED[args.quick, 0 < unhashed == len(index.shards)],
        "shards_without_hashes": unhashed,
        **{name: totals[name] for name in ("shards", "samples", "stored_bytes")},
        "sound": all(shard["repaired"] for shard in bad),
        "index_repaired": is_index_repaired,
        # A store need not be listed.
        "unnamed_files": None if place.directory is None else stored_dataset.unnamed_files(place.at.walk(), index),
        "not_compared": _not_compared(place, index) if args.quick else [],
        "bad_shards": bad,
    }
    (print_json if args.json else _print_report)(report)
    return FINE if report["sound"] else BAD


def _read_by(cache: ShardCache, index: DatasetIndex) -> ShardCache | None:
    """The cache, if shards are read by way of it; it has read its index before worker processes get it."""
    if not any(_is_unpacked_by_cache(shard) for _, shard in index.shards.examples()):
        return None
    cache.read_index()
    return cache


def _is_unpacked_by_cache(shard: ShardInfo) -> bool:
    return shard.format in OTHER_FORMATS and shard.compression is not None


def _repair_source(place: StoredDataset, source: StoredDataset) -> StoredDataset:
    if place.format is not None:
        raise ConfigError(
            f"--repair tells by the index which files are bad, but {place.shown} is looked at as "
            f"format={place.format!r} without one",
            hint="give it an index with lightning-streaming index while it is sound, or copy the files anew",
            option="--repair",
            path=place.shown,
        )
    if place.directory is None:
        raise ConfigError(
            f"only a directory can be repaired, but {place.shown} is on a store",
            hint="copy a sound dataset there with lightning-streaming copy",
            option="--repair",
            path=place.shown,
        )
    if source.directory is not None and source.directory.resolve() == place.directory.resolve():
        raise ConfigError(
            f"{place.shown} cannot be repaired from itself",
            hint="name another directory or a URL",
            option="--repair",
            path=place.shown,
        )
    return source


def _check_readable(index: DatasetIndex, args: Namespace) -> None:
    """Refuse what cannot be checked for another reason than the data, once for all shards that are alike."""
    if args.quick:
        return
    for _, shard in index.shards.examples():
        check_shard(shard, allow_unsafe_types=True)
        unsafe = unsafe_columns(shard)
        if unsafe and not args.allow_unsafe_types:
            encodings = {one.name: one.encoding for one in stored_dataset.columns_of(shard.schema)}
            raise ConfigError(
                f"column {unsafe[0]!r} is of encoding {encodings[unsafe[0]]}, which can run any code when it is "
                "decoded",
                hint="give --allow-unsafe-types if you trust whoever wrote it, or --quick to decode nothing",
                option="--allow-unsafe-types",
            )


def _examine_all(
    place: StoredDataset, index: DatasetIndex, check: _Check, workers: int | None
) -> dict[int, list[_Problem]]:
    """What is wrong, by number of the shard; sound shards are left out."""
    raw_bytes = sum(raw.bytes for shard in index.shards for raw, _ in shard.files)
    workers = workers or min(usable_cpus(), 1 + raw_bytes // _BYTES_FOR_A_PROCESS)
    found = {}
    with progress(len(index.shards), "verify", "shards") as advance:
        problems_of = _map(partial(check, place), index.shards, min(workers, len(index.shards)))
        for number, problems in enumerate(problems_of):
            advance(1)
            if problems:
                found[number] = problems
    return found


def _map(check: Callable[[ShardInfo], Any], shards: Sequence[ShardInfo], workers: int) -> Iterator[Any]:
    """Examine shards in order, in this process or in several."""
    if workers <= 1:
        yield from map(check, shards)
        return
    # Spawned, because a fork would copy the threads of a store's client in whatever state they are.
    with ProcessPoolExecutor(workers, get_context("spawn"), ignore_interrupts) as pool:
        try:
            with without_interrupts():  # all processes are started here
                found = pool.map(check, shards)
            yield from found
        except BrokenProcessPool:
            raise StreamingError(
                f"one of {workers} processes was killed, perhaps for want of memory",
                hint="try fewer with --workers",
                option="--workers",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _bad_shard(
    index: DatasetIndex, number: int, problems: Sequence[_Problem], repaired: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "shard": number,
        "first_sample": int(index.samples_per_shard()[:number].sum()),
        "samples": index.shards[number].samples,
        "problems": problems,
        **(repaired or {"repaired": False, "not_repaired_because": None, "kept_aside": []}),
    }


def _without_hashes(index: DatasetIndex, *, quick: bool) -> int:
    """How many shards have a file of which no hash is compared."""
    return sum(
        any(not ((stored or raw).hashes or (raw.hashes and not quick)) for raw, stored in shard.files)
        for shard in index.shards
    )


def _print_report(report: Mapping[str, Any]) -> None:
    """Print one line if all is sound; else each bad shard, and what can be done."""
    bad = report["bad_shards"]
    if report["index_repaired"]:
        print_line("The index was missing or damaged, and was fetched again.")
    if not bad:
        print_line(
            f"{report['dataset']}: {counted(report['shards'], 'shard')}, {counted(report['samples'], 'sample')}, "
            f"{format_bytes(report['stored_bytes'])}; {report['checked']} checked, "
            f"{'nothing wrong found' if report['shards_without_hashes'] else 'all sound'}"
        )
        _print_notes(report)
        return
    heads = ("shard", "samples", "file", "what is wrong")
    print_table(f"bad shards of {report['dataset']}", heads, list(_rows(bad)), whole=heads[:2])
    print_line(f"{len(bad):,} of {counted(report['shards'], 'shard')} bad; {report['checked']} checked")
    for line in _outcome(bad):
        print_line(line)
    _print_notes(report)


def _print_notes(report: Mapping[str, Any]) -> None:
    unhashed = report["shards_without_hashes"]
    if unhashed:
        which = "" if unhashed == report["shards"] else f" of {unhashed:,} of the {report['shards']:,} shards"
        print_line(f"no hashes are recorded{which}, so {_UNSEEN}")
    if report["unnamed_files"]:
        print_line(f"not named by the index, to be removed when you like: {first_few(report['unnamed_files'])}")
    if report["not_compared"]:
        print_line(
            f"not compared with the compressed files, as it is without --quick: {first_few(report['not_compared'])}"
        )


def _rows(bad: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    for shard in bad:
        for position, problem in enumerate(shard["problems"]):
            heads = ("", "") if position else (str(shard["shard"]), _samples(shard))
            # Nobody compares whole hashes by eye; --json has them.
            yield (*heads, problem["file"], _LONG_HASH.sub(r"\1…", problem["problem"]))


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


def examine(
    place: StoredDataset,
    shard: ShardInfo,
    *,
    quick: bool,
    allow_unsafe_types: bool,
    cache: ShardCache | None = None,
) -> list[_Problem]:
    """Check a shard's files: presence, sizes, every recorded hash; then offsets and every sample.

    Files on a store are fetched into a temporary directory, one shard at a time.

    Args:
        place: The dataset.
        shard: An entry of its index.
        quick: Whether only sizes and hashes of stored files are checked.
        allow_unsafe_types: Whether samples may be decoded that can run code of whoever wrote the data.
        cache: Of the dataset, for shards of another format that must be unpacked: the cache knows how.

    Returns:
        All that is wrong, up to the step after which nothing more can be told.

    Raises:
        StorageError: The store does not answer.
        ConfigError: A column is unsafe and that was not allowed, or a hash is unknown.
        MissingDependencyError: A package is needed that is not installed.
    """
    if cache is not None and _is_unpacked_by_cache(shard) and not quick:
        return [_problem(shown_file(shard), words) for words in _examine_unpacked(cache, shard, allow_unsafe_types)]
    problems = []
    with TemporaryDirectory(prefix="lightning_streaming_") as name:
        scratch = StoredDataset(location=name, options={})
        for file in stored_files(shard) if place.directory is None else _present_files(place, shard):
            try:
                if place.directory is None:
                    place.fetch(file, scratch.path(file.basename), check=True)
                else:
                    place.check(file)
            except (IntegrityError, ObjectNotFoundError) as error:  # noqa: PERF203  each has its own
                problems.append(_problem(file, str(error)))
        if problems or quick:
            return problems
        there = scratch if place.directory is None else place
        return [
            _problem(shard.raw_data, words) for words in _examine_content(there, shard, Path(name), allow_unsafe_types)
        ]


def _problem(file: FileInfo, words: str) -> _Problem:
    return {"file": file.basename, "problem": words}


def _present_files(place: StoredDataset, shard: ShardInfo) -> Iterator[FileInfo]:
    """The files of a shard that a directory has, of each pair at least one: the stored one, if there is none.

    A cache keeps raw files of a compressed dataset, with or without the compressed ones.
    """
    for raw, compressed in shard.files:
        forms = [file for file in (compressed, raw) if file is not None]
        yield from [file for file in forms if place.size_of(file.basename) is not None] or forms[:1]


def _not_compared(place: StoredDataset, index: DatasetIndex) -> list[str]:
    """Raw files in a directory beside the compressed ones, of which only the size can be checked without these."""
    if place.directory is None:
        return []
    pairs = [pair for shard in index.shards for pair in shard.files]
    return [
        raw.basename
        for raw, compressed in pairs
        if compressed is not None and not raw.hashes
        if None not in (place.size_of(raw.basename), place.size_of(compressed.basename))
    ]


def _examine_content(place: StoredDataset, shard: ShardInfo, scratch: Path, allow_unsafe_types: bool) -> Iterator[str]:
    directory, name = place.directory, shard.raw_data.basename
    assert directory is not None
    try:
        there = scratch if _unpack(place, shard, scratch) else directory
        reader = open_shard(shard, there, allow_unsafe_types=allow_unsafe_types)
    except (IntegrityError, FormatError) as error:
        yield _short(error, scratch, directory)
        return
    failures = [_short(error, scratch, directory) for error in _failures(reader)]
    reader.close()
    yield from _told(failures, name, shard)


def _examine_unpacked(cache: ShardCache, shard: ShardInfo, allow_unsafe_types: bool) -> Iterator[str]:
    """What is wrong with a shard that the cache unpacks."""
    directory = cache.directory.path
    try:
        with open_cached(cache, shard, allow_unsafe_types=allow_unsafe_types) as reader:
            failures = [_short(error, directory) for error in _failures(reader)]
    except (IntegrityError, ObjectNotFoundError, FormatError) as error:
        yield str(error).removeprefix(f"{cache.label}: ").removeprefix(f"{directory}/")
        return
    yield from _told(failures, shard.raw_data.basename, shard)


def _failures(reader: ShardReader) -> Iterator[Exception]:
    found = (_failure_of(reader, number) for number in range(len(reader)))
    return (error for error in found if error is not None)


def _told(failures: Sequence[str], name: str, shard: ShardInfo) -> Iterator[str]:
    """What is said of samples that cannot be decoded."""
    for words in failures[:_MOST_SAMPLES_NAMED]:
        yield words.removeprefix(f"{name}, ")
    if len(failures) > _MOST_SAMPLES_NAMED:
        yield f"and {len(failures) - _MOST_SAMPLES_NAMED:,} more of {shard.samples:,} samples cannot be decoded"


def _failure_of(reader: ShardReader, number: int) -> Exception | None:
    try:
        sample = reader[number]
    except FormatError as error:
        return error
    try:
        _load_images(sample)
    except FormatError as error:
        return error.with_context(f"sample {number}", sample=number)
    except PILLOW_ERRORS as error:  # of images that a user's own encoding gives
        return FormatError(f"sample {number}: {type(error).__name__}: {error}", sample=number)
    return None


def _unpack(place: StoredDataset, shard: ShardInfo, scratch: Path) -> bool:
    """Put the raw files of a compressed shard into ``scratch``; False if it is not compressed.

    Raises:
        IntegrityError: One cannot be made, or the file under its name is another.
    """
    if shard.compression is None:
        return False
    is_proven = True  # whether more speaks for the raw files than their names and sizes
    for raw, compressed in shard.files:
        assert compressed is not None
        there = place.path(raw.basename)
        is_there = there != join_under(scratch, raw.basename) and find_size(there) is not None
        if place.size_of(compressed.basename) is not None:
            unpacked = unpack_into(scratch, place.path(compressed.basename), raw, compressed, shard)
            check_hashes(raw, unpacked)
            if is_there and not filecmp.cmp(there, unpacked, shallow=False):
                raise IntegrityError(
                    f"{raw.basename} is not what {compressed.basename} holds", hint=_LEFT_BEHIND, path=raw.basename
                )
            continue
        is_proven = is_proven and bool(raw.hashes)
        if is_there:
            link = join_under(scratch, raw.basename)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(there.absolute())
    if not is_proven and not was_written_for(shard, scratch):
        name = shard.raw_data.basename
        raise IntegrityError(
            f"{name} was not written for compression {shard.compression}", hint=_LEFT_BEHIND, path=name
        )
    return True


def _load_images(value: Any) -> None:
    """Decode the pixels of images, which their files need not have been for."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _load_images(item)
    elif is_image(value):
        load_whole(value)


def _short(error: Exception, *directories: Path) -> str:
    """The words of an error with names as the index has them."""
    words = str(error)
    for directory in directories:
        words = words.removeprefix(f"{directory}/")
    return words


def _find_index(place: StoredDataset, source: StoredDataset | None) -> tuple[DatasetIndex, bool]:
    """The index of a dataset; if it is missing or cannot be used, that of the source, which takes its place.

    Returns:
        The index, and whether it was replaced.

    Raises:
        IndexFormatError: Neither can be used.
        ObjectNotFoundError: There is none.
        StorageError: A store does not give it.
    """
    try:
        index = place.read_index()
        stored_dataset.check_hash_names(index, str(place.at / INDEX_BASENAME))
    except (FormatError, ObjectNotFoundError):
        if source is None or place.directory is None:
            raise
    else:
        return index, False
    text = source.read_index_text()
    index = parse_index(text, source.shown)
    stored_dataset.check_hash_names(index, source.shown)
    place.directory.mkdir(parents=True, exist_ok=True)
    with appears_whole(place.path(INDEX_BASENAME)) as partial_file:
        partial_file.write_bytes(text)
        _set_aside(place.path(INDEX_BASENAME))
    return index, True


def _repair(place: StoredDataset, shard: ShardInfo, source: StoredDataset, check: _Check) -> dict[str, Any]:
    """Fetch a shard again, check it in full, and put what differs into the dataset's directory.

    Nothing is deleted: a bad file is renamed, and stays.

    Args:
        place: A directory.
        shard: The bad shard.
        source: Where to fetch it from.
        check: Tells what is wrong with it.

    Returns:
        What the report says of it.

    Raises:
        StorageError: The source does not answer.
    """
    failure, kept_aside = None, list[str]()
    # Beside the dataset's files, so that they can be renamed into place.
    with TemporaryDirectory(prefix=".repair-", dir=place.directory) as name:
        staged = StoredDataset(location=name, options={})
        try:
            for file in stored_files(shard):
                source.fetch(file, staged.path(file.basename), check=True)
        except (IntegrityError, ObjectNotFoundError) as error:
            failure = str(error)
        else:
            problems = check(staged, shard, cache=_cache_of_one(staged, shard))
            if problems:
                failure = f"{source.shown} has it no better: {problems[0]['problem']}"
            else:
                kept_aside.extend(_replace_bad(place, shard, staged))
    return {"repaired": failure is None, "not_repaired_because": failure, "kept_aside": kept_aside}


def _cache_of_one(staged: StoredDataset, shard: ShardInfo) -> ShardCache | None:
    """What unpacks a shard that was fetched alone, if that takes a cache."""
    if not _is_unpacked_by_cache(shard):
        return None
    staged.path(INDEX_BASENAME).write_bytes(dump_index([shard]))
    return staged.cache(staged.path("unpacked"))


def _replace_bad(place: StoredDataset, shard: ShardInfo, staged: StoredDataset) -> Iterator[str]:
    """Files whose raw form is in the directory too, as in a cache, are decompressed for it."""
    assert place.directory is not None
    present = list(_present_files(place, shard))
    for raw, compressed in shard.files:
        if compressed is not None and raw in present:
            unpack_into(Path(staged.location), staged.path(compressed.basename), raw, compressed, shard)
    for file in present:
        good, target = staged.path(file.basename), place.path(file.basename)
        if target.exists() and filecmp.cmp(good, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = _set_aside(target)
        os.replace(good, target)
        if aside is not None:
            yield aside.relative_to(place.directory).as_posix()


def _set_aside(path: Path) -> Path | None:
    """Rename a file to ``NAME.damaged``, or ``NAME.damaged.2`` if that is taken; None if there is no file."""
    if not path.exists():
        return None
    endings = (stored_dataset.DAMAGED + (f".{number}" if number > 1 else "") for number in count(1))
    names = (path.with_name(path.name + ending) for ending in endings)
    return path.rename(next(name for name in names if not name.exists()))
