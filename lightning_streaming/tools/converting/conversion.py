"""A source to a dataset: the functions of workers, parts that become one dataset, and resuming a conversion.

The options of a conversion are recorded next to its output, so that only the same one resumes there. Parts whose input
has changed since start over, the others stay.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from lightning_streaming.errors import ConfigError, FormatError, PartError, StreamingError
from lightning_streaming.escaping import in_one_line, shell_word
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import join_url, local_path
from lightning_streaming.tokenizing.documents import LOSS_MASK, TOKENS
from lightning_streaming.tools.console import counted, print_note, progress
from lightning_streaming.tools.converting.sources import row_source
from lightning_streaming.tools.converting.sources.row_encoding import ColumnPlan, Sample, encoded_rows
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource, digest_of
from lightning_streaming.tools.converting.tokens import Packer, TokenSettings, documents
from lightning_streaming.tools.stored.stored_dataset import StoredDataset
from lightning_streaming.writing.destination import CONVERSION_PLAN, PARTS_PLAN, WRITING, check_is_directory
from lightning_streaming.writing.parallel import run_job
from lightning_streaming.writing.parts import dump_plan, make_plan, parse_plan, plan_parts
from lightning_streaming.writing.shards import ShardSettings
from lightning_streaming.writing.writers import MDSWriter

_VERSION = 1
_FILES = "files of SOURCE"
_MAX_SHOWN = 80
_Plan = Mapping[str, Any]
"""All that determines the shards, by names for messages; values are those of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConversion:
    """Converts the rows of a part to samples, in any process."""

    source: RowSource
    plan: ColumnPlan
    limit: int | None
    """Maximum number of rows of a part; None for no limit."""

    def __call__(self, part: InputPart) -> Iterator[Sample]:
        """Yield the samples of a part."""
        yield from islice(encoded_rows(self.source, self.plan, part), self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConversion:
    """Converts the documents of a part to tokens, in any process."""

    source: RowSource
    settings: TokenSettings
    limit: int | None
    """Maximum number of documents of a part; None for no limit."""
    tallies: str
    """Folder to which each finished part writes its numbers of documents and tokens."""

    def __call__(self, part: InputPart) -> Iterator[Sample]:
        """Yield the documents of a part, or blocks of them, as samples."""
        settings = self.settings
        packer = None if settings.block_length is None else Packer(settings.block_length, settings.dtype)
        num_documents = num_tokens = num_trained = num_empty = 0
        for tokens, loss_mask in islice(documents(self.source, part, settings.documents), self.limit):
            num_documents += 1
            num_tokens += len(tokens)
            if packer is not None:
                yield from ({TOKENS: block} for block in packer.add(tokens))
                continue
            if not len(tokens):  # which no shard can store, and no pack would have
                num_empty += 1
                continue
            sample = {TOKENS: tokens.astype(settings.dtype)}
            if loss_mask is not None:
                sample[LOSS_MASK] = loss_mask
                num_trained += int(loss_mask.sum())
            yield sample
        tally = {"documents": num_documents, "tokens": num_tokens}
        tally["empty_documents" if packer is None else "dropped_tokens"] = (
            num_empty if packer is None else packer.num_pending
        )
        if settings.documents.chat is not None:
            tally["trained_tokens"] = num_trained
        Path(self.tallies, f"{part.number}.json").write_text(json.dumps(tally))


def sum_tallies(folder: str) -> dict[str, int]:
    """Return the sums of the tallies that the parts wrote."""
    tallies = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    return {name: sum(tally[name] for tally in tallies) for name in tallies[0]}


def split_source(source: RowSource, part_bytes: int, limit: int | None) -> list[InputPart]:
    """Return the parts of a source, which depend only on the input and these arguments, never on the workers.

    Args:
        source: The input.
        part_bytes: Bytes of input at which a part is full.
        limit: Maximum number of rows to convert; None for all. Which rows a limit omits depends on all before, so the
            whole input is one part then.

    Returns:
        At least one part; several parts have digests that identify their content.
    """
    pieces = source.pieces(part_bytes)
    groups = list(row_source.group_pieces(pieces, part_bytes)) if limit is None else [tuple(pieces)]
    if len(groups) < 2:
        return [InputPart(0, groups[0] if groups else ())]
    digests = row_source.digest_groups(source, groups)
    return [InputPart(number, *part) for number, part in enumerate(zip(groups, digests, strict=True))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A source, its parts, and the dataset that they become."""

    source: RowSource
    parts: Sequence[InputPart]
    """At least one."""
    convert: Callable[[InputPart], Iterator[Sample]]
    """Returns the samples of a part, the same each time."""
    out: StoredDataset
    columns: Mapping[str, str]
    """Encoding of each column, by name."""
    settings: ShardSettings
    """Limits, compression and hashes of shards."""
    options: Mapping[str, Any]
    """Other options that determine the shards, as typed."""
    why_empty: str
    """Message if there is no sample."""

    @property
    def writer_arguments(self) -> dict[str, Any]:
        """Arguments of writers."""
        return {
            "columns": self.columns,
            "compression": self.settings.compression,
            "hashes": list(self.settings.hashes),
            "size_limit": self.settings.size_limit,
            "storage_options": self.out.options,
        }

    @property
    def plan(self) -> _Plan:
        """All that determines the shards.

        The content of several parts is compared elsewhere; for a single one the names of the files are, because rows
        that are already written are only counted.
        """
        is_single = len(self.parts) == 1
        plan = {
            **self.options,
            **{f"--columns {name}": encoding for name, encoding in self.columns.items()},
            "--compression": self.settings.compression,
            "--hashes": list(self.settings.hashes),
            "--size-limit": self.settings.size_limit,
            **{f"the {name} of SOURCE": value for name, value in row_source.traits(self.source).items()},
            "the number of parts": "one" if is_single else "several",
            _FILES: _names_digest(self.parts[0]) if is_single else None,
        }
        as_read: dict[str, Any] = json.loads(json.dumps(plan))  # with lists for tuples
        return as_read

    def write(self, *, workers: int, resume: bool) -> None:
        """Write the samples of all parts as one dataset.

        A single part is written directly. Several are written to subfolders, by several processes, and joined under
        one index.

        Args:
            workers: Maximum number of processes.
            resume: Whether to continue an earlier run with the same plan.

        Raises:
            ConfigError: The destination has other data, or an earlier run that cannot be continued.
            FormatError: There are no samples; nothing is left.
            StreamingError: A part cannot be read, or written.
        """
        plan = self.plan
        is_new = _check_plan(self.out, plan, self.parts, resume=resume)
        had_directory = self.out.directory is not None and self.out.directory.is_dir()
        samples: Iterator[Sample] = iter(())
        if len(self.parts) == 1:
            samples = self.convert(self.parts[0])
            first = list(islice(samples, 1))  # before anything is written
            if not first:
                raise FormatError(self.why_empty)
            samples = chain(first, samples)
        if is_new:
            if self.out.directory is not None:
                remove_partials(self.out.directory / CONVERSION_PLAN)
            text = json.dumps({"version": _VERSION, "plan": plan}, indent=1)
            (self.out.at / CONVERSION_PLAN).put(text.encode())
        try:
            if len(self.parts) == 1:
                self._write_single(samples)
            else:
                self._write_several(workers, resume)
        except FormatError as error:
            if _remove_unused(self.out, keep_directory=had_directory):
                raise
            where = f"What was written before it is in {in_one_line(self.out.shown)}"
            # On a separate line: the message may end in a command.
            words = f"{error}\n{where}: fix the source and add --resume, or remove that output"
            raise error.with_message(words) from error

    def _write_several(self, workers: int, resume: bool) -> None:
        parts, out = self.parts, self.out
        if resume:
            self._restart_changed()
        mode: Literal["resume", "create"] = "resume" if resume else "create"
        job = plan_parts(parts, self.convert, out.location, mode=mode, **self.writer_arguments)
        try:
            count = run_job(job, parts, num_workers=min(workers, len(parts)), progress_bar=sys.stderr.isatty())
        except PartError as error:
            if isinstance(error.__cause__, StreamingError):
                raise error.__cause__ from None  # it names file and position
            raise
        if not count:  # remove parts that consist of an empty index, and the plans
            for dataset in [*(replace(out, location=job.location(number)) for number in range(job.num_parts)), out]:
                for name in (INDEX_BASENAME, PARTS_PLAN, CONVERSION_PLAN):
                    (dataset.at / name).remove()
                if dataset.directory is not None and not any(dataset.directory.iterdir()):
                    dataset.directory.rmdir()
            raise FormatError(self.why_empty)
        job.publish()

    def _restart_changed(self) -> None:
        """Prepare the parts of a stopped conversion whose input has changed to be written again.

        A changed part loses its index first, so that it does not seem finished, and then the plan is replaced: if this
        is interrupted, the next run repeats it. If there are fewer parts than before nothing is done, and plan_parts
        raises an error.

        Raises:
            ConfigError: The dataset is finished, so it must not change any more.
            StorageError: The store fails.
        """
        parts, out = self.parts, self.out
        text = (out.at / PARTS_PLAN).read_if_there()
        if text is None:
            return
        recorded = parse_plan(text, out.shown)
        wanted = make_plan(parts, self.columns, self.settings)
        if recorded.settings != wanted.settings or len(recorded.inputs) > len(wanted.inputs):
            return
        changed = [
            number for number, part in enumerate(wanted.inputs) if part not in recorded.inputs[number : number + 1]
        ]
        if not changed:
            return
        if (out.at / INDEX_BASENAME).read_if_there() is not None:
            raise ConfigError(
                f"{out.shown} is a finished dataset, which does not change, but its source did since: now input "
                f"{changed[0]} is {wanted.inputs[changed[0]]}",
                hint="convert it to another location",
                path=out.shown,
            )
        for number in changed:
            part = replace(out, location=join_url(out.location, f"part.{number:06}"))
            if (part.at / INDEX_BASENAME).read_if_there() is not None:
                (part.at / INDEX_BASENAME).remove()
        (out.at / PARTS_PLAN).put(dump_plan(wanted))
        again = f"{counted(len(changed), 'part')} of {len(parts):,} start over, because their input changed"
        print_note("convert", f"{again}; the first is part {changed[0]}")

    def _write_single(self, samples: Iterator[Sample]) -> None:
        out = self.out
        is_finished = (out.at / INDEX_BASENAME).read_if_there() is not None
        with (
            # Resume mode also for a new one, because only then it can be resumed.
            MDSWriter(out=out.location, mode="resume", **self.writer_arguments) as writer,
            progress(None, "convert", "sample") as advance,
        ):
            written = writer.num_samples
            advance(written)
            # Rows of written samples are read again: a source cannot start in its middle.
            count = sum(1 for _ in islice(samples, written))
            if count < written:
                raise ConfigError(
                    f"{out.shown} holds {counted(written, 'sample')} already, but SOURCE gives only {count:,}, so it "
                    "is not the one that the conversion started with",
                    hint="pass the same SOURCE and options, or choose another OUT",
                    option="SOURCE",
                    path=out.shown,
                )
            for sample in samples:
                if is_finished:
                    raise ConfigError(
                        f"{out.shown} is finished with {counted(written, 'sample')}, but SOURCE gives more by now",
                        hint="convert it to another location",
                        option="SOURCE",
                        path=out.shown,
                    )
                writer.write(sample)
                advance(1)


def _remove_unused(out: StoredDataset, *, keep_directory: bool) -> bool:
    """Remove the files of a conversion that failed before a shard was finished.

    Args:
        out: The destination.
        keep_directory: Whether the directory existed before.

    Returns:
        Whether nothing is left.
    """
    directory = out.directory
    if directory is None:
        return (out.at / CONVERSION_PLAN).size() is None
    plan, writing = directory / CONVERSION_PLAN, directory / WRITING
    if not {plan, writing}.issuperset(directory.rglob("*")):
        return False
    plan.unlink(missing_ok=True)
    if writing.is_dir():
        writing.rmdir()
    if not keep_directory and directory.is_dir():
        directory.rmdir()
    return True


def _check_plan(out: StoredDataset, plan: _Plan, parts: Sequence[InputPart], *, resume: bool) -> bool:
    """Check that the destination is empty, or has a stopped conversion with the same plan. Nothing is changed.

    Returns:
        Whether it is empty, so that the plan must be recorded.

    Raises:
        ConfigError: It has other data, or a conversion with other options.
        StorageError: The store fails.
    """
    if out.directory is not None:
        check_is_directory(out.directory)
    text = (out.at / CONVERSION_PLAN).read_if_there() if resume else None
    if text is None:
        _check_is_empty(out, resume=resume)
        return True
    elsewhere = "convert to another location"
    try:
        root = json.loads(text)
        version, recorded = root["version"], dict(root["plan"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        damaged = f"{CONVERSION_PLAN} in {out.shown} is damaged ({error})"
        raise ConfigError(damaged, hint=elsewhere, path=out.shown) from None
    if version != _VERSION:
        raise ConfigError(f"{out.shown} was started by another version of this tool", hint=elsewhere, path=out.shown)
    differences = []
    for key in dict.fromkeys([*plan, *recorded]):
        before, now = recorded.get(key), plan.get(key)
        if before == now:
            continue
        if key != _FILES:
            differences.append(f"{key} is {_shown(now)}, but was {_shown(before)} when writing began")
        elif before and len(parts) == 1 and before == _names_digest(parts[0], before[0]):
            continue  # files were added after the earlier ones
        elif before and now:
            differences.append(
                f"the files of SOURCE have other names, or others are before them ({now[0]} files, was {before[0]})"
            )
    if differences:
        why = f"{out.shown} was started with other options: {'; '.join(differences)}"
        raise ConfigError(why, hint=f"resume with the same options, or {elsewhere}", path=out.shown)
    return False


def _names_digest(part: InputPart, count: int | None = None) -> list[Any]:
    """Return the number of files of a part and a digest of their names, or those of the first ``count`` files."""
    paths = list(dict.fromkeys(piece.path for piece in part.pieces))
    root = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""  # noqa: PTH120
    names = [os.path.relpath(path, root) for path in paths][:count]
    return [len(names), digest_of(names)]


def _shown(value: object) -> str:
    if value is None or value == []:
        return "none"
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _check_is_empty(out: StoredDataset, *, resume: bool) -> None:
    directory = local_path(out.location)
    if directory is None:
        files = list(out.at.walk())
    else:
        files = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if resume:  # an incomplete plan counts as none
        files = [name for name in files if not name.startswith(f"{CONVERSION_PLAN}.")]
    if not files:
        return
    why = f"{out.shown} must be new or empty, but holds {files[0]}"
    hint = "add --resume to continue a stopped conversion, or choose another location"
    if resume:
        why = (
            f"{out.shown} holds {files[0]}, but no {CONVERSION_PLAN} with the options of a conversion, so --resume "
            "cannot determine whether it is the same"
        )
        hint = "choose another location, or remove its files"
    elif INDEX_BASENAME in files:
        how = "" if directory is None else f": rm -r {shell_word(str(directory))}"
        why, hint = f"{out.shown} is a finished dataset already", f"choose another location, or remove it first{how}"
    raise ConfigError(why, hint=hint, option=None if resume else "OUT", path=out.shown)
