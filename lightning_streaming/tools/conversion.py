"""A source to a dataset: what workers run, and how their parts become one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, FormatError, PartError, StreamingError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.tools.changed_parts import begin_changed_again
from lightning_streaming.tools.claim import find_small, remove_small
from lightning_streaming.tools.console import counted, progress
from lightning_streaming.tools.conversion_plan import Plan, check_plan, record_plan
from lightning_streaming.tools.packing import COLUMN, Packer, PackingSettings, Tally, documents
from lightning_streaming.tools.sources.columns import ColumnPlan, Sample, encoded_rows
from lightning_streaming.tools.sources.digests import digest_groups
from lightning_streaming.tools.sources.source import Part, Source, put_together
from lightning_streaming.tools.stored_dataset import StoredDataset
from lightning_streaming.tools.tokens import load_tokenizer
from lightning_streaming.writing.names import CONVERSION_PLAN, PARTS_PLAN
from lightning_streaming.writing.parallel import run_job
from lightning_streaming.writing.parts import PartJob, plan_parts
from lightning_streaming.writing.settings import ShardSettings
from lightning_streaming.writing.writer import MDSWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConversion:
    """Rows become samples. It is called with a part, in any process."""

    source: Source
    plan: ColumnPlan
    limit: int | None
    """Rows at which a part ends; None for no limit."""

    def __call__(self, part: Part) -> Iterator[Sample]:
        """The samples of a part."""
        yield from islice(encoded_rows(self.source, self.plan, part), self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConversion:
    """Documents become blocks of tokens. It is called with a part, in any process."""

    source: Source
    settings: PackingSettings
    limit: int | None
    """Documents at which a part ends; None for no limit."""
    tallies: str
    """Folder in which each part leaves a file with its :class:`Tally` when it is done."""

    def __call__(self, part: Part) -> Iterator[Sample]:
        """The blocks of a part, as samples."""
        tokenizer = load_tokenizer(self.settings.tokenizer)
        packer = Packer(self.settings.block_length, self.settings.dtype)
        num_documents = num_tokens = 0
        for tokens in islice(documents(self.source, part, self.settings, tokenizer), self.limit):
            num_documents += 1
            num_tokens += len(tokens)
            for block in packer.add(tokens):
                yield {COLUMN: block}
        tally = Tally(documents=num_documents, tokens=num_tokens, dropped=packer.num_pending)
        Path(self.tallies, f"{part.number}.json").write_text(json.dumps(asdict(tally)))


def sum_tallies(folder: str) -> Tally:
    """What the parts left in a folder, together."""
    files = sorted(Path(folder).iterdir())
    return sum((Tally(**json.loads(file.read_text())) for file in files), Tally())


def cut_source(source: Source, most: int, limit: int | None) -> list[Part]:
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
    groups = list(put_together(pieces, most)) if limit is None else [tuple(pieces)]
    if len(groups) < 2:
        return [Part(0, groups[0] if groups else ())]
    return [Part(*one) for one in zip(range(len(groups)), groups, digest_groups(source, groups), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is written, and where."""

    out: StoredDataset
    """The place."""
    columns: Mapping[str, str]
    """Column name to encoding."""
    settings: ShardSettings
    """How shards are cut, compressed and hashed."""
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


def write_parts(
    parts: Sequence[Part],
    convert: Callable[[Part], Iterator[Sample]],
    target: Target,
    plan: Plan,
    *,
    workers: int,
    resume: bool,
) -> None:
    """Write the samples of all parts as one dataset.

    One part is written into the place itself. Several are written into folders of it, by several processes, and joined
    under one index.

    Args:
        parts: At least one.
        convert: Gives the samples of a part, the same each time.
        target: What is written, and where.
        plan: All that decides on it, to go on only with the same.
        workers: Processes at most.
        resume: Whether to go on with what an earlier run with the same plan has left.

    Raises:
        ConfigError: There is something that is not to be gone on with.
        FormatError: There are no samples; nothing stays.
        StreamingError: What a part cannot read, or a writer not write.
    """
    is_new = check_plan(target.out, plan, parts, resume=resume)
    if len(parts) > 1:
        if is_new:
            record_plan(target.out, plan)
        _write_several(parts, convert, target, workers=workers, resume=resume)
        return
    samples = convert(parts[0])
    first = list(islice(samples, 1))  # before anything is written
    if not first:
        raise FormatError(target.why_empty)
    if is_new:
        record_plan(target.out, plan)
    _write_one(chain(first, samples), target)


def _write_several(
    parts: Sequence[Part], convert: Callable[[Part], Iterator[Sample]], target: Target, *, workers: int, resume: bool
) -> None:
    if resume:
        begin_changed_again(parts, target.out, target.columns, target.settings)
    job = plan_parts(parts, convert, target.out.location, mode="resume" if resume else "create", **target.arguments)
    try:
        count = run_job(job, parts, num_workers=min(workers, len(parts)), progress_bar=sys.stderr.isatty())
    except PartError as error:
        if isinstance(error.__cause__, StreamingError):
            raise error.__cause__ from None  # it names file and place
        raise
    if not count:
        _remove_empty(job, target.out)
        raise FormatError(target.why_empty)
    job.publish()


def _remove_empty(job: PartJob[Part], out: StoredDataset) -> None:
    """Remove parts that hold nothing but an index of no samples, and what was written down of them."""
    for place in [*(replace(out, location=job.location(number)) for number in range(job.num_parts)), out]:
        for name in (INDEX_BASENAME, PARTS_PLAN, CONVERSION_PLAN):
            remove_small(place, name)
        if place.directory is not None and not any(place.directory.iterdir()):
            place.directory.rmdir()


def _write_one(samples: Iterator[Sample], target: Target) -> None:
    is_finished = find_small(target.out, INDEX_BASENAME) is not None
    # Also a new one: only so can it be gone on with.
    with (
        MDSWriter(out=target.out.location, mode="resume", **target.arguments) as writer,
        progress(None, "convert", "sample") as advance,
    ):
        already = writer.num_samples
        advance(already)
        _pass_over(samples, already, target.out.shown)
        for sample in samples:
            if is_finished:
                raise ConfigError(
                    f"{target.out.shown} is finished with {counted(already, 'sample')}, but SOURCE gives more by now; "
                    "convert it to another place"
                )
            writer.write(sample)
            advance(1)


def _pass_over(samples: Iterator[Sample], count: int, out: str) -> None:
    """Read again what is safe already: a source has no other way to its middle."""
    found = sum(1 for _ in islice(samples, count))
    if found < count:
        raise ConfigError(
            f"{out} holds {counted(count, 'sample')} already, but SOURCE gives only {found:,}, so it is not "
            "what the conversion was begun with; give the same SOURCE and options, or choose another OUT"
        )
