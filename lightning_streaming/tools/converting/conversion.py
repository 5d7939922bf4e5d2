"""A source to a dataset: what workers run, how their parts become one, and with what a conversion may go on.

What a conversion was begun with is written down beside what it writes, so that only the same one goes on there. Parts
whose input was changed since they were begun begin again, the others stay.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, FormatError, PartError, StreamingError
from lightning_streaming.escaping import in_one_line, shell_word
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import join_url, local_path
from lightning_streaming.tools.console import counted, print_note, progress
from lightning_streaming.tools.converting.sources import row_source
from lightning_streaming.tools.converting.sources.row_encoding import ColumnPlan, Sample, encoded_rows
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource, digest_of
from lightning_streaming.tools.converting.tokens import COLUMN, Packer, PackingSettings, documents, load_tokenizer
from lightning_streaming.tools.stored.stored_dataset import StoredDataset
from lightning_streaming.writing.destination import CONVERSION_PLAN, PARTS_PLAN, WRITING, check_is_directory
from lightning_streaming.writing.parallel import run_job
from lightning_streaming.writing.parts import PartJob, dump_plan, make_plan, parse_plan, plan_parts
from lightning_streaming.writing.shards import ShardSettings
from lightning_streaming.writing.writers import MDSWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConversion:
    """Rows become samples. It is called with a part, in any process."""

    source: RowSource
    plan: ColumnPlan
    limit: int | None
    """Rows at which a part ends; None for no limit."""

    def __call__(self, part: InputPart) -> Iterator[Sample]:
        """The samples of a part."""
        yield from islice(encoded_rows(self.source, self.plan, part), self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConversion:
    """Documents become blocks of tokens. It is called with a part, in any process."""

    source: RowSource
    settings: PackingSettings
    limit: int | None
    """Documents at which a part ends; None for no limit."""
    tallies: str
    """Folder in which each part leaves a file when it is done: how many documents, tokens and dropped tokens it had."""

    def __call__(self, part: InputPart) -> Iterator[Sample]:
        """The blocks of a part, as samples."""
        tokenizer = load_tokenizer(self.settings.tokenizer)
        packer = Packer(self.settings.block_length, self.settings.dtype)
        num_documents = num_tokens = 0
        for tokens in islice(documents(self.source, part, self.settings, tokenizer), self.limit):
            num_documents += 1
            num_tokens += len(tokens)
            for block in packer.add(tokens):
                yield {COLUMN: block}
        tally = {"documents": num_documents, "tokens": num_tokens, "dropped_tokens": packer.num_pending}
        Path(self.tallies, f"{part.number}.json").write_text(json.dumps(tally))


def sum_tallies(folder: str) -> dict[str, int]:
    """What the parts left in a folder, together."""
    tallies = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    return {name: sum(tally[name] for tally in tallies) for name in ("documents", "tokens", "dropped_tokens")}


def cut_source(source: RowSource, most: int, limit: int | None) -> list[InputPart]:
    """The parts of a source: they depend on the input and on these arguments alone, never on the workers.

    Args:
        source: The input.
        most: Bytes of input at which a part is full.
        limit: Rows that will be converted at most; what is cut off then depends on all that is before, so that the
            whole input is one part. None for all rows.

    Returns:
        At least one part; of several each with a digest that tells it from others.
    """
    pieces = source.pieces(most)
    groups = list(row_source.put_together(pieces, most)) if limit is None else [tuple(pieces)]
    if len(groups) < 2:
        return [InputPart(0, groups[0] if groups else ())]
    return [
        InputPart(*one)
        for one in zip(range(len(groups)), groups, row_source.digest_groups(source, groups), strict=True)
    ]


_Plan = Mapping[str, Any]
"""What decides on the shards, by the name that people know it by; values are those of JSON."""

_VERSION = 1
_FILES = "files of SOURCE"
_LONGEST_SHOWN = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What is converted into what."""

    source: RowSource
    parts: Sequence[InputPart]
    """How it was cut; at least one."""
    convert: Callable[[InputPart], Iterator[Sample]]
    """Gives the samples of a part, the same each time."""
    out: StoredDataset
    columns: Mapping[str, str]
    """Column name to encoding."""
    settings: ShardSettings
    """How shards are cut, compressed and hashed."""
    options: Mapping[str, Any]
    """Others that decide on the shards, as they are typed."""
    why_empty: str
    """What is said where there is no sample at all."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What writers are told."""
        return {
            "columns": self.columns,
            "compression": self.settings.compression,
            "hashes": list(self.settings.hashes),
            "size_limit": self.settings.size_limit,
            "storage_options": self.out.options,
        }

    @property
    def plan(self) -> _Plan:
        """All that decides on the shards.

        The content of several parts is compared elsewhere; of a single one the names of the files are, because the rows
        that are written already are only counted.
        """
        is_one = len(self.parts) == 1
        plan = {
            **self.options,
            **{f"--columns {name}": encoding for name, encoding in self.columns.items()},
            "--compression": self.settings.compression,
            "--hashes": list(self.settings.hashes),
            "--size-limit": self.settings.size_limit,
            **{f"the {name} of SOURCE": value for name, value in row_source.traits(self.source).items()},
            "the number of parts": "one" if is_one else "several",
            _FILES: _files(self.parts[0]) if is_one else None,
        }
        made: dict[str, Any] = json.loads(json.dumps(plan))  # lists for tuples, as it will be read
        return made

    def write(self, *, workers: int, resume: bool) -> None:
        """Write the samples of all parts as one dataset.

        One part is written into the place itself. Several are written into folders of it, by several processes, and
        joined under one index.

        Args:
            workers: Processes at most.
            resume: Whether to go on with what an earlier run with the same plan has left.

        Raises:
            ConfigError: There is something that is not to be gone on with.
            FormatError: There are no samples; nothing stays.
            StreamingError: What a part cannot read, or a writer not write.
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
            _record_plan(self.out, plan)
        try:
            if len(self.parts) == 1:
                _write_one(samples, self)
            else:
                _write_several(self, workers, resume)
        except FormatError as error:
            if _remove_unused(self.out, stays=had_directory):
                raise
            where = f"What was written before it is in {in_one_line(self.out.shown)}"
            # On a line of its own: an error may end in a command.
            words = f"{error}\n{where}: mend it and add --resume, or remove what is there"
            raise error.with_message(words) from error


def _write_several(conversion: Conversion, workers: int, resume: bool) -> None:
    parts, out, arguments = conversion.parts, conversion.out, conversion.arguments
    if resume:
        _begin_changed_again(conversion)
    job = plan_parts(parts, conversion.convert, out.location, mode="resume" if resume else "create", **arguments)
    try:
        count = run_job(job, parts, num_workers=min(workers, len(parts)), progress_bar=sys.stderr.isatty())
    except PartError as error:
        if isinstance(error.__cause__, StreamingError):
            raise error.__cause__ from None  # it names file and place
        raise
    if not count:
        _remove_empty(job, out)
        raise FormatError(conversion.why_empty)
    job.publish()


def _remove_empty(job: PartJob[InputPart], out: StoredDataset) -> None:
    """Remove parts that hold nothing but an index of no samples, and what was written down of them."""
    for place in [*(replace(out, location=job.location(number)) for number in range(job.num_parts)), out]:
        for name in (INDEX_BASENAME, PARTS_PLAN, CONVERSION_PLAN):
            (place.at / name).remove()
        if place.directory is not None and not any(place.directory.iterdir()):
            place.directory.rmdir()


def _remove_unused(out: StoredDataset, *, stays: bool) -> bool:
    """Remove what a conversion into a directory has begun that failed before a shard was finished.

    Args:
        out: Where it wrote.
        stays: Whether the directory itself was there before.

    Returns:
        Whether nothing of it is left.
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
    if not stays and directory.is_dir():
        directory.rmdir()
    return True


def _write_one(samples: Iterator[Sample], conversion: Conversion) -> None:
    out = conversion.out
    is_finished = (out.at / INDEX_BASENAME).read_if_there() is not None
    # Also a new one: only so can it be gone on with.
    with (
        MDSWriter(out=out.location, mode="resume", **conversion.arguments) as writer,
        progress(None, "convert", "sample") as advance,
    ):
        already = writer.num_samples
        advance(already)
        # What is safe already is read again: a source has no other way to its middle.
        found = sum(1 for _ in islice(samples, already))
        if found < already:
            raise ConfigError(
                f"{out.shown} holds {counted(already, 'sample')} already, but SOURCE gives only {found:,}, so it is "
                "not what the conversion was begun with",
                hint="give the same SOURCE and options, or choose another OUT",
                option="SOURCE",
                path=out.shown,
            )
        for sample in samples:
            if is_finished:
                raise ConfigError(
                    f"{out.shown} is finished with {counted(already, 'sample')}, but SOURCE gives more by now",
                    hint="convert it to another place",
                    option="SOURCE",
                    path=out.shown,
                )
            writer.write(sample)
            advance(1)


def _check_plan(out: StoredDataset, plan: _Plan, parts: Sequence[InputPart], *, resume: bool) -> bool:
    """Refuse to write where something else lies, or was begun. Nothing is touched.

    Returns:
        Whether nothing is there yet, so that :func:`_record_plan` has to say what is begun.

    Raises:
        ConfigError: There is something to begin with, or what is gone on with was begun with other options.
        StorageError: The store does not say what is there.
    """
    if out.directory is not None:
        check_is_directory(out.directory)
    text = (out.at / CONVERSION_PLAN).read_if_there() if resume else None
    if text is None:
        _check_is_new(out, resume=resume)
        return True
    found = list(_differences(_parse(text, out), plan, parts))
    if found:
        raise ConfigError(
            f"{out.shown} was begun with other options: {'; '.join(found)}",
            hint="go on with those it was begun with, or convert to another place",
            path=out.shown,
        )
    return False


def _record_plan(out: StoredDataset, plan: _Plan) -> None:
    """Say what is begun, before anything of it is written.

    Raises:
        StorageError: It could not be written.
    """
    if out.directory is not None:
        remove_partials(out.directory / CONVERSION_PLAN)
    (out.at / CONVERSION_PLAN).put(json.dumps({"version": _VERSION, "plan": plan}, indent=1).encode())


def _parse(text: bytes, out: StoredDataset) -> dict[str, Any]:
    try:
        root = json.loads(text)
        version, plan = root["version"], dict(root["plan"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{CONVERSION_PLAN} in {out.shown} is damaged ({error})", hint="convert to another place", path=out.shown
        ) from None
    if version != _VERSION:
        raise ConfigError(
            f"{out.shown} was begun by another version of this tool", hint="convert to another place", path=out.shown
        )
    return plan


def _differences(begun: _Plan, now: _Plan, parts: Sequence[InputPart]) -> Iterator[str]:
    for key in dict.fromkeys([*now, *begun]):
        was, becomes = begun.get(key), now.get(key)
        if was == becomes or (key == _FILES and was == _beginning(parts, was)):
            continue
        if key == _FILES and was and becomes:
            yield f"the files of SOURCE have other names, or others are before them ({becomes[0]} files, was {was[0]})"
        elif key != _FILES:
            yield f"{key} is {_shown(becomes)}, but was {_shown(was)} when writing began"


def _files(part: InputPart, most: int | None = None) -> list[Any]:
    """How many files a part has, and a digest of their names; of the first ones, which is what a longer part keeps."""
    paths = list(dict.fromkeys(piece.path for piece in part.pieces))
    root = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""  # noqa: PTH120
    names = [os.path.relpath(path, root) for path in paths][:most]
    return [len(names), digest_of(names)]


def _beginning(parts: Sequence[InputPart], was: Any) -> list[Any] | None:
    """What is said of as many files as there were; files may have been added behind them."""
    return _files(parts[0], was[0]) if was and len(parts) == 1 else None


def _shown(value: object) -> str:
    if value is None or value == []:
        return "none"
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _check_is_new(out: StoredDataset, *, resume: bool) -> None:
    directory = local_path(out.location)
    if directory is None:
        found = out.at.walk()
    else:
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if resume:  # a plan that was not whole is as good as none
        found = [name for name in found if not name.startswith(f"{CONVERSION_PLAN}.")]
    if found and resume:
        raise ConfigError(
            f"{out.shown} holds {found[0]}, but no {CONVERSION_PLAN} that says with what a conversion was begun, so "
            "--resume cannot tell whether it is the same",
            hint="choose another place, or remove what is there",
            path=out.shown,
        )
    if INDEX_BASENAME in found:
        way = "remove it first" if directory is None else f"remove it first: rm -r {shell_word(str(directory))}"
        raise ConfigError(
            f"{out.shown} is a finished dataset already",
            hint=f"choose another place, or {way}",
            option="OUT",
            path=out.shown,
        )
    if found:
        raise ConfigError(
            f"{out.shown} must be new or empty, but holds {found[0]}",
            hint="add --resume to go on with a conversion that was stopped, or choose another place",
            option="OUT",
            path=out.shown,
        )


def _begin_changed_again(conversion: Conversion) -> None:
    """Make a dataset that was begun one that is gone on with, where only what is in the files was changed.

    A changed part loses its index first, so that it is not taken for finished, and then the plan is replaced: stopped
    in between, the next run does the same again. Where there are fewer parts now nothing is done, and plan_parts
    refuses in its own words.

    Raises:
        ConfigError: The dataset is finished, so that it must not change any more.
        StorageError: The store does not answer.
    """
    parts, out = conversion.parts, conversion.out
    text = (out.at / PARTS_PLAN).read_if_there()
    if text is None:
        return
    begun = parse_plan(text, out.shown)
    wanted = make_plan(parts, conversion.columns, conversion.settings)
    if begun.settings != wanted.settings or len(begun.inputs) > len(wanted.inputs):
        return
    changed = [number for number, one in enumerate(wanted.inputs) if one not in begun.inputs[number : number + 1]]
    if not changed:
        return
    if (out.at / INDEX_BASENAME).read_if_there() is not None:
        raise ConfigError(
            f"{out.shown} is a finished dataset, which does not change, but its source did since: now input "
            f"{changed[0]} is {wanted.inputs[changed[0]]}",
            hint="convert it to another place",
            path=out.shown,
        )
    for number in changed:
        part = replace(out, location=join_url(out.location, f"part.{number:06}"))
        if (part.at / INDEX_BASENAME).read_if_there() is not None:
            (part.at / INDEX_BASENAME).remove()
    (out.at / PARTS_PLAN).put(dump_plan(wanted))
    again = f"{counted(len(changed), 'part')} of {len(parts):,} begin again, because their input changed"
    print_note("convert", f"{again}; the first is part {changed[0]}")
