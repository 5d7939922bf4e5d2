"""A source to a dataset: what workers run, and how their parts become one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, PartError, StreamingError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import local_path, mask_url
from lightning_streaming.storage.listing import list_files
from lightning_streaming.tools.changed_parts import begin_changed_again
from lightning_streaming.tools.claim import find_small
from lightning_streaming.tools.console import counted, progress
from lightning_streaming.tools.packing import COLUMN, Packer, PackingSettings, Tally, documents
from lightning_streaming.tools.sources.columns import ColumnPlan, Sample, encoded_rows
from lightning_streaming.tools.sources.digests import digest_groups, digest_of, traits
from lightning_streaming.tools.sources.source import Part, Source, put_together
from lightning_streaming.tools.stored_dataset import RETRY, TIMEOUT, StoredDataset
from lightning_streaming.tools.tokens import load_tokenizer
from lightning_streaming.writing.parallel import write_parallel
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


def cut_source(source: Source, most: int, limit: int | None, made_into: str) -> list[Part]:
    """The parts of a source: they depend on the input and on these arguments alone, never on the workers.

    Args:
        source: The input.
        most: Bytes of input at which a part is full.
        limit: Rows that will be converted at most; what is cut off then depends on all that is before, so that the
            whole input is one part. None for all rows.
        made_into: What becomes of the rows, in words.

    Returns:
        At least one part; of several each with digests that tell it from others.
    """
    pieces = source.pieces(most)
    groups = list(put_together(pieces, most)) if limit is None else [tuple(pieces)]
    if len(groups) < 2:
        return [Part(0, groups[0] if groups else ())]
    digests, becomes = digest_groups(source, groups), digest_of((made_into, traits(source)))
    return [Part(*one, becomes) for one in zip(range(len(groups)), groups, digests, strict=True)]


def write_parts(
    parts: Sequence[Part],
    convert: Callable[[Part], Iterator[Sample]],
    out: str,
    *,
    workers: int,
    resume: bool,
    storage_options: Mapping[str, Any],
    **settings: Any,
) -> None:
    """Write the samples of all parts as one dataset.

    One part is written into ``out`` itself. Several are written into folders of it, by several processes, and joined
    under one index.

    Args:
        parts: At least one.
        convert: Gives the samples of a part, the same each time.
        out: A directory or a URL.
        workers: Processes at most.
        resume: Whether to go on with what an earlier run with the same arguments has left.
        storage_options: Arguments for the filesystem of the URL.
        settings: Columns, compression, hashes and size limit of the shards.

    Raises:
        ConfigError: There is something in ``out`` that is not to be gone on with.
        StreamingError: What a part cannot read, or a writer not write.
    """
    if not resume:
        _check_is_new(out, storage_options)
    if len(parts) > 1:
        if resume:
            begin_changed_again(parts, StoredDataset(location=out, options=storage_options), **settings)
        try:
            write_parallel(
                parts,
                convert,
                out,
                num_workers=min(workers, len(parts)),
                mode="resume" if resume else "create",
                progress_bar=sys.stderr.isatty(),
                storage_options=storage_options,
                **settings,
            )
        except PartError as error:
            if isinstance(error.__cause__, StreamingError):
                raise error.__cause__ from None  # it names file and place
            raise
        return
    _write_one(convert(parts[0]), out, storage_options, **settings)


def _write_one(samples: Iterator[Sample], out: str, storage_options: Mapping[str, Any], **settings: Any) -> None:
    is_finished = find_small(StoredDataset(location=out, options=storage_options), INDEX_BASENAME) is not None
    # Also a new one: only so can it be gone on with.
    with (
        MDSWriter(out=out, mode="resume", storage_options=storage_options, **settings) as writer,
        progress(None, "convert", "sample") as advance,
    ):
        already = writer.num_samples
        advance(already)
        _pass_over(samples, already, out)
        for sample in samples:
            if is_finished:
                raise ConfigError(
                    f"{mask_url(out)} is finished with {counted(already, 'sample')}, but SOURCE gives more by now; "
                    "convert it to another place"
                )
            writer.write(sample)
            advance(1)


def _pass_over(samples: Iterator[Sample], count: int, out: str) -> None:
    """Read again what is safe already: a source has no other way to its middle."""
    found = sum(1 for _ in islice(samples, count))
    if found < count:
        raise ConfigError(
            f"{mask_url(out)} holds {counted(count, 'sample')} already, but SOURCE gives only {found:,}, so it is not "
            "what the conversion was begun with; give the same SOURCE and options, or choose another OUT"
        )


def _check_is_new(out: str, options: Mapping[str, Any]) -> None:
    directory = local_path(out)
    if directory is None:
        found = list_files(out, options, retry=RETRY, timeout=TIMEOUT)
    else:
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if found:
        raise ConfigError(
            f"{mask_url(out)} must be new or empty, but holds {found[0]}; add --resume to go on with a conversion that "
            "was stopped, or choose another place"
        )
