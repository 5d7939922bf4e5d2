"""Copy a dataset to another directory or store: every file that its index names, then the index, unchanged.

Every file is checked: its size, all hashes that the index records, and decompression if it is compressed (not with
--quick). The index is published last, so a partial copy is never mistaken for a dataset. Run the same command again to
continue an interrupted copy: files that are already there and correct are skipped.

    lightning-streaming copy data/train s3://corpus/train
    lightning-streaming copy s3://corpus/train gs://mirror/train --workers 32 --out-storage-options token=key.json
    lightning-streaming copy s3://bucket/tars /data/tars --format webdataset

Exit code: 0 if all files were copied; 1 if files of the source are missing or damaged, and no index was published; 2
if the copy failed. With --exist-ok, the index and the plan of the earlier dataset are deleted, and files with the names
of uncompressed shards of this one, which could be mistaken for them. Other shards stay, unless they are overwritten.
Deleted files and shards that stay are reported. If the index records no hashes, a second copy copies all files again.
"""

from __future__ import annotations

import hashlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning_streaming.errors import ConfigError, IntegrityError, ObjectNotFoundError, ShardCorruptError, StorageError
from lightning_streaming.files import appears_whole, remove_partials
from lightning_streaming.formats.algorithms import check_algorithm, decompressed_pieces
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
"""The file that identifies the dataset that is being copied.

It is created before the first file is copied, and removed after the index is published. So an interrupted copy
recognizes its own files, without reading them back from a store.
"""
_OVER_OTHERS = b" over others"
"""Suffix of a claim until all files of other datasets, which may have the right size, are overwritten."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    parser.add_argument("source", metavar="SOURCE", help="directory or URL of a dataset, or of its index.json")
    parser.add_argument("out", metavar="OUT", help="directory or URL to copy it to")
    add_format(parser)
    parser.add_argument("--exist-ok", action="store_true", help="overwrite a dataset in OUT")
    parser.add_argument("--quick", action="store_true", help="check sizes and hashes only, decompress nothing")
    add_workers(parser, 8, "files to copy at the same time; 8 by default. Between stores, each needs its size on disk")
    add_json(parser)
    add_storage_options(parser, of="both stores")
    add_storage_options(parser, "--out-storage-options", of="OUT, instead of --storage-options")


def run(args: Namespace) -> int:
    """Copy missing files, publish the index, and print what was done."""
    source, out = _datasets(args)
    if source.format is None:
        index_text = source.read_index_text()
        index = parse_index(index_text, source.shown)
    else:  # litData's own file has this name
        index = source.read_index()
        index_text = (source.at / INDEX_BASENAME).read() if source.format == "litdata" else dump_index(index.shards)
    stored_dataset.check_hash_names(index, source.shown)
    files = _files_of(index)
    if not args.quick:
        for algorithm in {file.compression for file in files if file.compression is not None}:
            check_algorithm(algorithm)
    claimed = _claim(index, files, source, out, index_text, args)
    failures = _copy_all(claimed.to_copy, source, out, args)
    if not failures:
        (out.at / INDEX_BASENAME).put(index_text)
        if (out.at / CLAIM_BASENAME).read_if_there() is not None:
            try:
                (out.at / CLAIM_BASENAME).remove()
            except StorageError as error:
                console.print_note("copy", f"{CLAIM_BASENAME} is no longer needed, but could not be removed: {error}")
    copied = [file for file in claimed.to_copy if file.info.basename not in failures]
    report = {
        "dataset": source.shown,
        "out": out.shown,
        "files": len(files),
        "copied": len(copied),
        "copied_bytes": sum(file.info.bytes for file in copied),
        "already_there": len(files) - len(claimed.to_copy),
        "copied_again_for_want_of_hashes": sum(file.info.basename in claimed.unhashed for file in copied),
        "complete": not failures,
        "removed_files": claimed.removed,
        "unnamed_files": stored_dataset.unnamed_files(claimed.existing, index),
        "bad_files": [{"file": file, "problem": words} for file, words in sorted(failures.items())],
    }
    (print_json if args.json else _print_report)(report)
    return console.BAD if failures else console.FINE


def _datasets(args: Namespace) -> tuple[StoredDataset, StoredDataset]:
    """Return source and destination.

    Raises:
        ConfigError: One is within the other, or the destination is a file.
    """
    source = find_dataset(args.source, args.storage_options, args.format, args.block_length)
    out = find_dataset(args.out, args.out_storage_options or args.storage_options)
    if source.at.key == out.at.key:
        raise ConfigError(
            f"a dataset must be copied to another location, but both are {source.shown}",
            option="OUT",
            path=source.shown,
        )
    if out.directory is not None and source.directory is not None:
        is_within = out.directory.resolve().is_relative_to(source.directory.resolve())
    else:  # the key of a store has its endpoint in lines after that of the location
        out_path, _, out_store = out.at.key.partition("\n")
        source_path, _, source_store = source.at.key.partition("\n")
        is_within = out_store == source_store and out_path.startswith(source_path + "/")
    if is_within:
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


class _CopiedFile(NamedTuple):
    """One stored file, and how to check its content."""

    info: FileInfo
    raw_bytes: int
    """Its size after decompression."""
    compression: str | None


def _files_of(index: DatasetIndex) -> list[_CopiedFile]:
    """Return the stored files of a dataset, each once: in other formats several shards may be parts of one file."""
    files = {}
    for shard in index.shards:
        compression = None if shard.compression == PART else shard.compression
        for raw, compressed in shard.files:
            info = compressed or raw
            files[info.basename] = _CopiedFile(info, raw.bytes, compression)
    return list(files.values())


class _Claimed(NamedTuple):
    """A destination that this copy has claimed."""

    existing: set[str]
    """All files that were there, except removed ones."""
    to_copy: list[_CopiedFile]
    """Files that are missing, or may differ."""
    unhashed: set[str]
    """Files of the same dataset that were there, without recorded hashes to compare."""
    removed: list[str]
    """Files with names of raw shards that this dataset stores compressed."""


def _claim(
    index: DatasetIndex,
    files: Sequence[_CopiedFile],
    source: StoredDataset,
    out: StoredDataset,
    index_text: bytes,
    args: Namespace,
) -> _Claimed:
    """Claim the destination for this copy, and return what is to copy.

    Raises:
        ConfigError: It has another dataset, or files of one, that may not be overwritten.
    """
    existing_index = (out.at / INDEX_BASENAME).read_if_there()
    if existing_index not in (None, index_text) and not args.exist_ok:
        raise ConfigError(
            f"{out.shown} holds another dataset",
            hint="choose another location, or --exist-ok to overwrite it",
            option="OUT",
            path=out.shown,
        )
    # A digest of the location of the dataset and of its index.
    claim = hashlib.sha256(source.at.key.encode(errors="surrogatepass") + b"\n" + index_text).hexdigest().encode()
    existing_claim = (out.at / CLAIM_BASENAME).read_if_there() or b""
    trusted = existing_index in (None, index_text) and existing_claim == claim
    existing = set(out.at.walk())
    present = [file.info for file in files if file.info.basename in existing]
    complete = set[str]()
    with ThreadPoolExecutor(args.workers) as pool, progress(len(present), "check existing files", "files") as advance:
        is_complete = partial(_has_file, out=out, trusted=trusted)
        for info, is_here in zip(present, pool.map(is_complete, present), strict=True):
            complete |= {info.basename} if is_here else set()
            advance(1)
    to_copy = [file for file in files if file.info.basename not in complete]
    overwritten = [] if trusted else [file.info.basename for file in to_copy if file.info.basename in existing]
    # Raw forms of compressed shards, unless hashes prove them: a reader of the copy in place might use them.
    raw = [
        file.basename
        for file in raw_forms(index.shards)
        if file.basename in existing and (out.directory is None or not _has_file(file, out, trusted=False))
    ]
    is_own = existing_index == index_text or existing_claim.startswith(claim)
    foreign = ([] if is_own else overwritten) + ([] if existing_claim == claim + _OVER_OTHERS else raw)
    if foreign and not args.exist_ok:
        raise ConfigError(
            f"{out.shown} holds {counted(len(foreign), 'file')} that are not those of {source.shown}, or cannot be "
            f"distinguished from others, because no hashes are recorded: {first_few(foreign)}",
            hint="choose another location, or --exist-ok to replace or remove them",
            option="OUT",
            path=out.shown,
        )
    if to_copy:
        if existing_index is not None:  # while files change, this is no dataset
            (out.at / INDEX_BASENAME).remove()
        for name in existing & {CONVERSION_PLAN, PARTS_PLAN}:  # an earlier conversion cannot be resumed here
            (out.at / name).remove()
        (out.at / CLAIM_BASENAME).put(claim + _OVER_OTHERS if overwritten or raw else claim)
    for name in raw:
        (out.at / name).remove()
    again = overwritten if existing_index == index_text else []
    unhashed = {file.info.basename for file in to_copy if not file.info.hashes and file.info.basename in again}
    return _Claimed(existing=existing - set(raw), to_copy=to_copy, unhashed=unhashed, removed=raw)


def _has_file(info: FileInfo, out: StoredDataset, trusted: bool) -> bool:
    """Return whether the destination has a file of the index.

    Args:
        info: Its entry in the index.
        out: The destination.
        trusted: Whether only copies of this dataset wrote there. Then size alone identifies a file on a store, and a
            file without recorded hashes.

    Raises:
        StorageError: The store fails.
    """
    if out.size_of(info.basename) != info.bytes:
        return False
    if not info.hashes or (trusted and out.directory is None):
        return trusted
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        if out.directory is None:
            out.fetch(info, path)
        else:
            path = out.path(info.basename)
        try:
            check_hashes(info, path)
        except IntegrityError:
            return False
    return True


def _copy_all(
    files: Sequence[_CopiedFile], source: StoredDataset, out: StoredDataset, args: Namespace
) -> dict[str, str]:
    """Copy files; return the error of each that is missing or damaged in the source, by name."""
    failures, total = {}, sum(file.info.bytes for file in files)
    with ThreadPoolExecutor(args.workers) as pool, progress(total, "copy", "B") as advance:
        running = {pool.submit(copy_file, file, source, out, quick=args.quick): file.info for file in files}
        try:
            for done in as_completed(running):
                advance(running[done].bytes)
                error = done.exception()
                if not isinstance(error, IntegrityError | ObjectNotFoundError):
                    done.result()  # raises another error, if there is one
                else:
                    failures[running[done].basename] = str(error)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return failures


def copy_file(file: _CopiedFile, source: StoredDataset, out: StoredDataset, *, quick: bool) -> None:
    """Copy and check a file, which appears at the destination complete or not at all.

    Args:
        file: The file.
        source: The dataset to copy from.
        out: The dataset to copy to.
        quick: Whether to omit decompressing a compressed file to check its content.

    Raises:
        IntegrityError: It differs from its entry in the index.
        ObjectNotFoundError: It is missing.
        StorageError: A store fails.
    """
    name = file.info.basename
    if out.directory is not None:
        target = out.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(target)
        with appears_whole(target) as partial:
            source.fetch(file.info, partial, check=True)
            _check_content(file, partial, quick)
        return
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        if source.directory is not None:
            path = source.path(name)
            source.check(file.info)
        else:
            source.fetch(file.info, path, check=True)
        _check_content(file, path, quick)
        (out.at / name).upload(path)
    size = out.size_of(name)
    if size != file.info.bytes:
        raise IntegrityError(f"{file.info.bytes} bytes of {name} were sent, but the store has {size}", path=name)


def _check_content(file: _CopiedFile, path: Path, quick: bool) -> None:
    if quick or file.compression is None:
        return
    try:
        with path.open("rb") as stream:
            for _ in decompressed_pieces(file.compression, stream, file.raw_bytes):
                pass
    except ShardCorruptError as error:
        name = file.info.basename
        raise IntegrityError(f"{name} cannot be decompressed: {error}", path=name) from error


def _print_report(report: dict[str, Any]) -> None:
    if report["bad_files"]:
        rows = [(bad["file"], bad["problem"]) for bad in report["bad_files"]]
        console.print_table(f"bad files of {report['dataset']}", ("file", "what is wrong"), rows)
    existing = f", {report['already_there']:,} existed" if report["already_there"] else ""
    print_line(
        f"{report['dataset']} to {report['out']}: {report['copied']:,} of {counted(report['files'], 'file')} copied "
        f"({format_bytes(report['copied_bytes'])}){existing}"
    )
    if report["copied_again_for_want_of_hashes"]:
        again = counted(report["copied_again_for_want_of_hashes"], "existing file")
        print_line(f"{again} copied again, because the index records no hashes to compare")
    if report["removed_files"]:
        print_line(
            f"removed, because they could be mistaken for shards of this dataset: {first_few(report['removed_files'])}"
        )
    if report["unnamed_files"]:
        print_line(f"not part of this dataset, and left unchanged: {first_few(report['unnamed_files'])}")
    if not report["complete"]:
        print_line("no index was published; fix the source, for example with verify --repair, and copy again")
