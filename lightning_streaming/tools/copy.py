"""Copy a dataset to another directory or store: every file that its index names, then the index, unchanged.

Every file is checked: its size, all hashes that the index records, and decompression if it is compressed (not with
--quick). The index is published last, so a partial copy is never mistaken for a dataset. Run the same command again to
continue an interrupted copy: files that are already there and correct are skipped.

    lightning-streaming copy data/train s3://corpus/train
    lightning-streaming copy s3://corpus/train gs://mirror/train --workers 32 --out-storage-options token=key.json
    lightning-streaming copy s3://bucket/tars /data/tars --format webdataset

Exit code: 0 if all files were copied; 1 if files of the source are missing or damaged, then no index is published; 2
if the copy failed. Nothing is deleted at the destination, except with --exist-ok the index and the plan of the earlier
dataset, and files with the names of uncompressed shards of this one, which could be mistaken for them; other shards
that are not overwritten stay. Both are reported. Without recorded hashes a second copy copies all files again.
"""

from __future__ import annotations

import hashlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_streaming.errors import ConfigError, IntegrityError, ObjectNotFoundError, ShardCorruptError, StorageError
from lightning_streaming.files import appears_whole, remove_partials
from lightning_streaming.formats.compression import check_algorithm, decompressed_pieces
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, dump_index, parse_index
from lightning_streaming.formats.shard import raw_forms
from lightning_streaming.formats.shard_table import PART
from lightning_streaming.tools import console
from lightning_streaming.tools.commands import add_format, add_json, add_storage_options, add_workers
from lightning_streaming.tools.console import counted, first_few, print_json, print_line, progress
from lightning_streaming.tools.stored import stored_dataset
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, check_hashes, find_dataset
from lightning_streaming.units import format_bytes
from lightning_streaming.writing.destination import CONVERSION_PLAN, PARTS_PLAN

CLAIM_BASENAME = f"{INDEX_BASENAME}.copying"
"""The file that says which dataset is being copied, while a copy is under way.

It is there before the first file that the copy writes, and is removed after the index is published. So an interrupted
copy knows its own files again, without reading them back from a store.
"""
_OVER_OTHERS = b" over others"
"""What a claim ends in while files of others, which have the right size maybe, are not all written over."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    parser.add_argument("source", metavar="SOURCE", help="directory or URL of a dataset, or of its index.json")
    parser.add_argument("out", metavar="OUT", help="directory or URL to copy it to")
    add_format(parser)
    parser.add_argument("--exist-ok", action="store_true", help="overwrite a dataset in OUT")
    parser.add_argument("--quick", action="store_true", help="check sizes and hashes only, decompress nothing")
    add_workers(parser, 8, "files to copy at a time; 8 by default. From store to store each takes its size on disk")
    add_json(parser)
    add_storage_options(parser, of="both stores")
    add_storage_options(parser, "--out-storage-options", of="OUT, instead of --storage-options")


def run(args: Namespace) -> int:
    """Copy what is not there yet, publish the index, and say what was done."""
    source, out = _places(args)
    index, index_text = _index_of(source)
    stored_dataset.check_hash_names(index, source.shown)
    cargo = _cargo_of(index)
    if not args.quick:
        for algorithm in {one.compression for one in cargo if one.compression is not None}:
            check_algorithm(algorithm)
    taken = _take_possession(index, source, out, index_text, args)
    to_copy = taken.to_copy
    failures = _carry_all(to_copy, source, out, args)
    if not failures:
        (out.at / INDEX_BASENAME).put(index_text)
        _give_up_claim(out)
    copied = [one for one in to_copy if one.file.basename not in failures]
    report = {
        "dataset": source.shown,
        "out": out.shown,
        "files": len(cargo),
        "copied": len(copied),
        "copied_bytes": sum(one.file.bytes for one in copied),
        "already_there": len(cargo) - len(to_copy),
        "copied_again_for_want_of_hashes": sum(one.file.basename in taken.untold for one in copied),
        "complete": not failures,
        "removed_files": taken.removed,
        "unnamed_files": stored_dataset.unnamed_files(taken.found, index),
        "bad_files": [{"file": file, "problem": words} for file, words in sorted(failures.items())],
    }
    (print_json if args.json else _print_report)(report)
    return console.BAD if failures else console.FINE


def _places(args: Namespace) -> tuple[StoredDataset, StoredDataset]:
    source = find_dataset(args.source, args.storage_options, args.format, args.block_length)
    out = find_dataset(args.out, args.out_storage_options or args.storage_options)
    if source.at.key == out.at.key:
        raise ConfigError(
            f"a dataset must be copied to another place, but both are {source.shown}", option="OUT", path=source.shown
        )
    if _is_within(out, source):
        raise ConfigError(
            f"a dataset must not be copied into itself, but {out.shown} is in {source.shown}",
            option="OUT",
            path=out.shown,
        )
    if out.directory is not None and out.directory.exists() and not out.directory.is_dir():
        raise ConfigError(f"{out.shown} must be a directory, but is a file", option="OUT", path=out.shown)
    source.at.prepare()
    out.at.prepare_to_write()
    return source, out


def _index_of(source: StoredDataset) -> tuple[DatasetIndex, bytes]:
    """The index, and the text that is published: of data whose own library wrote a file of this name, that file."""
    if source.format is None:
        text = source.read_index_text()
        return parse_index(text, source.shown), text
    index = source.read_index()
    return index, (source.at / INDEX_BASENAME).read() if source.format == "litdata" else dump_index(index.shards)


def _is_within(out: StoredDataset, source: StoredDataset) -> bool:
    if out.directory is not None and source.directory is not None:
        return out.directory.resolve().is_relative_to(source.directory.resolve())
    # A store's key tells its endpoint in lines after that of the place.
    out_place, _, out_store = out.at.key.partition("\n")
    source_place, _, source_store = source.at.key.partition("\n")
    return out_store == source_store and out_place.startswith(source_place + "/")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """A destination that is this copy's."""

    found: set[str]
    """All files that were there."""
    to_copy: list[_Cargo]
    """What is not there yet."""
    untold: set[str]
    """Those of the same dataset that were there, with no recorded hash that would tell what they hold."""
    removed: list[str]
    """Files that lay under names of this dataset, and that nothing is stored under."""


def _take_possession(
    index: DatasetIndex, source: StoredDataset, out: StoredDataset, index_text: bytes, args: Namespace
) -> _Taken:
    """Make the destination this copy's, and tell what is still to be copied.

    Raises:
        ConfigError: There is another dataset, or files of one, and it may not be written over.
    """
    found_index = (out.at / INDEX_BASENAME).read_if_there()
    if found_index not in (None, index_text) and not args.exist_ok:
        raise ConfigError(
            f"{out.shown} holds another dataset",
            hint="choose another place, or --exist-ok to write over it",
            option="OUT",
            path=out.shown,
        )
    # A digest of where the dataset is and what its index holds.
    claim = hashlib.sha256(source.at.key.encode(errors="surrogatepass") + b"\n" + index_text).hexdigest().encode()
    found_claim = (out.at / CLAIM_BASENAME).read_if_there() or b""
    trusted = found_index in (None, index_text) and found_claim == claim
    found = set(out.at.walk())
    cargo = _cargo_of(index)
    right = _which_are_there([one for one in cargo if one.file.basename in found], out, trusted, args.workers)
    to_copy = [one for one in cargo if one.file.basename not in right]
    written_over = [] if trusted else [one.file.basename for one in to_copy if one.file.basename in found]
    is_ours = found_index == index_text or found_claim.startswith(claim)
    raw = _doubtful_raw_forms(index, found, out)
    is_over_others = found_claim == claim + _OVER_OTHERS
    foreign = ([] if is_ours else written_over) + ([] if is_over_others else raw)
    if foreign and not args.exist_ok:
        raise ConfigError(
            f"{out.shown} holds {counted(len(foreign), 'file')} that are not those of {source.shown}, or cannot be "
            f"told from others, because no hashes are recorded: {first_few(foreign)}",
            hint="choose another place, or --exist-ok to replace or remove them",
            option="OUT",
            path=out.shown,
        )
    if to_copy:
        if found_index is not None:  # while files change, there is no dataset here
            (out.at / INDEX_BASENAME).remove()
        for name in found & {CONVERSION_PLAN, PARTS_PLAN}:  # what was begun here before must not be gone on with
            (out.at / name).remove()
        (out.at / CLAIM_BASENAME).put(claim + _OVER_OTHERS if written_over or raw else claim)
    for name in raw:
        (out.at / name).remove()
    again = written_over if found_index == index_text else []
    untold = {one.file.basename for one in to_copy if not one.file.hashes and one.file.basename in again}
    return _Taken(found=found - set(raw), to_copy=to_copy, untold=untold, removed=raw)


def _doubtful_raw_forms(index: DatasetIndex, found: Set[str], out: StoredDataset) -> list[str]:
    """Files with the names of raw forms of compressed shards, unless recorded hashes say that they are these.

    Whoever reads the copy in place might take them for its shards.
    """
    there = [raw for raw in raw_forms(index.shards) if raw.basename in found]
    return [raw.basename for raw in there if out.directory is None or not _is_there(raw, out, trusted=False)]


def _which_are_there(cargo: Sequence[_Cargo], out: StoredDataset, trusted: bool, workers: int) -> set[str]:
    with ThreadPoolExecutor(workers) as pool, progress(len(cargo), "look at what is there", "files") as advance:

        def look(one: _Cargo) -> bool:
            right = _is_there(one.file, out, trusted=trusted)
            advance(1)
            return right

        found = pool.map(look, cargo)
        return {one.file.basename for one, right in zip(cargo, found, strict=True) if right}


def _carry_all(cargo: Sequence[_Cargo], source: StoredDataset, out: StoredDataset, args: Namespace) -> dict[str, str]:
    """Copy files; those that the source does not have as promised, by name, with the reason."""
    failures = {}
    with (
        ThreadPoolExecutor(args.workers) as pool,
        progress(sum(one.file.bytes for one in cargo), "copy", "B") as advance,
    ):
        running = {pool.submit(carry, one, source, out, quick=args.quick): one.file for one in cargo}
        try:
            for done in as_completed(running):
                advance(running[done].bytes)
                error = done.exception()
                if not isinstance(error, IntegrityError | ObjectNotFoundError):
                    done.result()  # raises it, if there is one
                else:
                    failures[running[done].basename] = str(error)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return failures


def _give_up_claim(out: StoredDataset) -> None:
    if (out.at / CLAIM_BASENAME).read_if_there() is None:
        return
    try:
        (out.at / CLAIM_BASENAME).remove()
    except StorageError as error:
        console.print_note("copy", f"{CLAIM_BASENAME} is of no more use, but could not be removed: {error}")


def _print_report(report: dict[str, Any]) -> None:
    if report["bad_files"]:
        rows = [(bad["file"], bad["problem"]) for bad in report["bad_files"]]
        console.print_table(f"bad files of {report['dataset']}", ("file", "what is wrong"), rows)
    there = f", {report['already_there']:,} were there" if report["already_there"] else ""
    print_line(
        f"{report['dataset']} to {report['out']}: {report['copied']:,} of {counted(report['files'], 'file')} copied "
        f"({format_bytes(report['copied_bytes'])}){there}"
    )
    if report["copied_again_for_want_of_hashes"]:
        again = counted(report["copied_again_for_want_of_hashes"], "file")
        print_line(f"{again} copied again, though there: the index records no hashes that would tell what they hold")
    if report["removed_files"]:
        print_line(
            f"removed, because they could be taken for shards of this dataset: {first_few(report['removed_files'])}"
        )
    if report["unnamed_files"]:
        print_line(f"of no part of this dataset, and left as they were: {first_few(report['unnamed_files'])}")
    if not report["complete"]:
        print_line("no index was published; mend the source, for example with verify --repair, and copy again")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cargo:
    """One stored file, and how its content can be checked."""

    file: FileInfo
    """What the index says of it."""
    raw_bytes: int
    """Its size once it is decompressed."""
    compression: str | None
    """How it is compressed."""


def _cargo_of(index: DatasetIndex) -> list[_Cargo]:
    """The stored files of a dataset, each once: of other formats several shards may be parts of one file."""
    cargo = {}
    for shard in index.shards:
        compression = None if shard.compression == PART else shard.compression
        for raw, compressed in shard.files:
            file = compressed or raw
            cargo[file.basename] = _Cargo(file=file, raw_bytes=raw.bytes, compression=compression)
    return list(cargo.values())


def carry(cargo: _Cargo, source: StoredDataset, out: StoredDataset, *, quick: bool) -> None:
    """Copy a file. It appears whole, and only if it is what the index promises.

    Args:
        cargo: The file.
        source: Where it is.
        out: Where it goes.
        quick: Whether a compressed file need not be decompressed to see that it holds what it should.

    Raises:
        IntegrityError: It is not what the index promises.
        ObjectNotFoundError: It is not there.
        StorageError: A store does not answer, or refuses.
    """
    if out.directory is not None:
        target = out.path(cargo.file.basename)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(target)
        with appears_whole(target) as partial:
            source.fetch(cargo.file, partial, check=True)
            _check_content(cargo, partial, quick)
        return
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        if source.directory is not None:
            path = source.path(cargo.file.basename)
            source.check(cargo.file)
        else:
            source.fetch(cargo.file, path, check=True)
        _check_content(cargo, path, quick)
        (out.at / cargo.file.basename).upload(path)
    found = out.size_of(cargo.file.basename)
    if found != cargo.file.bytes:
        raise IntegrityError(
            f"{cargo.file.bytes} bytes of {cargo.file.basename} were sent, but the store has {found}",
            path=cargo.file.basename,
        )


def _is_there(file: FileInfo, out: StoredDataset, *, trusted: bool) -> bool:
    """Whether the file at the destination is the one that the index promises.

    Args:
        file: What the index says of it.
        out: Where it may be.
        trusted: Whether only copies of this very dataset put files there. Then a file on a store is known by its size,
            and one of which the index records no hash by its size everywhere.

    Raises:
        StorageError: The store does not answer.
    """
    if out.size_of(file.basename) != file.bytes:
        return False
    if not file.hashes or (trusted and out.directory is None):
        return trusted
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        if out.directory is None:
            out.fetch(file, path)
        else:
            path = out.path(file.basename)
        try:
            check_hashes(file, path)
        except IntegrityError:
            return False
    return True


def _check_content(cargo: _Cargo, path: Path, quick: bool) -> None:
    if quick or cargo.compression is None:
        return
    try:
        with path.open("rb") as file:
            for _ in decompressed_pieces(cargo.compression, file, cargo.raw_bytes):
                pass
    except ShardCorruptError as error:
        raise IntegrityError(
            f"{cargo.file.basename} cannot be decompressed: {error}", path=cargo.file.basename
        ) from error
