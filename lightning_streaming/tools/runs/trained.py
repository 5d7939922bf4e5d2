"""``trace --trained``: when the weights of a checkpoint were trained on samples, without a log of the run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.columns import encodings_of
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.reading.dataset import source_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.selection.conditions import SqlCondition
from lightning_streaming.selection.evaluate import select_samples
from lightning_streaming.tools import console
from lightning_streaming.tools.console import counted, printable_name
from lightning_streaming.tools.runs.trace_run import fields_in_words, fields_of
from lightning_streaming.tools.runs.training_run import TracedRun, traced_run
from lightning_streaming.tools.stored.sample_reader import named_sample

_READS_SHOWN = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRead:
    """A sample, or a part of a packed document, that the weights were trained on."""

    sample: int
    """Id over all streams."""
    epoch: int
    step: int | None
    """The trainer's ``global_step``; None if the run has changed the samples of a step."""
    entry: int
    """Position in the epoch of the sample, or of its pack."""
    phase: str | None
    """Phase that read it; None without a schedule."""
    weights: Mapping[str, float]
    """Share of each stream in what was read then."""


def trained_reads(run: TracedRun, ids: NDArray[np.int64]) -> Iterator[TrainedRead]:
    """Yield when the weights of a run's checkpoint were trained on samples, in order.

    Args:
        run: The run that resumes from the checkpoint.
        ids: Ids of the samples.
    """
    steps = run.steps_before()
    for number in range(run.ended.epoch + 1):
        epoch, skipped = run.described.epoch(Cursor(number, 0)), run.skipped_before(number)
        partition, stop = epoch.partition, skipped.kept_before(len(epoch.sequence))
        if number == run.ended.epoch:
            stop = skipped.kept_before(min(run.ended.sample_in_epoch, len(epoch.sequence)))
        elif steps is not None:  # the trainer may leave out the last batches
            stop = min(stop, steps.of_epoch(number).batches * partition.geometry.global_batch_size)
        before = 0
        for positions, rows in epoch.chunks(0, stop, skipped):
            for row in np.flatnonzero(np.isin(rows.ids, ids)).tolist():
                of_chunk, position = int(rows.entries[row]), int(rows.positions[row])
                step = None
                if steps is not None:
                    batch = (before + of_chunk) // partition.geometry.global_batch_size
                    step = steps.global_step(number, batch)
                yield TrainedRead(
                    sample=int(rows.ids[row]),
                    epoch=number,
                    step=step,
                    entry=int(positions[of_chunk]),
                    phase=epoch.phase_of_row(position),
                    weights=epoch.weights_at(position),
                )
            before += len(positions)


def trace_trained(args: Namespace) -> int:
    """Print when the weights of a checkpoint were trained on samples."""
    run = traced_run(args)
    try:
        ids = _named_ids(run, args)
        reads = list(trained_reads(run, ids))
        known = run.steps_before() is not None
        if not known:
            words = "steps are not shown, and epochs are taken to be read whole: log them with StepLog"
            console.print_note("trace", f"the run has changed its ranks, batch size or accumulation; {words}")
        if run.order.order.growth.followed:
            words = "earlier ones may have read fewer shards"
            console.print_note(
                "trace", f"streams have grown: only the reads of epoch {run.ended.epoch} are exact; {words}"
            )
        _print_reads(run, ids, reads, args)
    finally:
        run.loader.close()
    return console.FINE


def _print_reads(run: TracedRun, ids: NDArray[np.int64], reads: Sequence[TrainedRead], args: Namespace) -> None:
    some = reads if args.json else reads[:_READS_SHOWN]
    fields = fields_of(run, [read.sample for read in some], fetch=args.fields)
    trained, catalog = len({read.sample for read in reads}), run.catalog
    if args.json:
        rows = []
        for read in reads:
            stream, shard, index = _place(catalog, read.sample)
            rows.append(
                {
                    "stream": stream,
                    "shard": shard,
                    "sample_index": index,
                    "epoch": read.epoch,
                    "step": read.step,
                    "position": read.entry,
                    "phase": read.phase,
                    "weights": dict(read.weights),
                    "fields": fields.get(read.sample),
                }
            )
        begins = {**run.begins._asdict(), "global_step": run.steps.first_step}
        console.print_json({"checkpoint": begins, "samples": len(ids), "trained": trained, "reads": rows})
        return
    words = f"{trained:,} of {counted(len(ids), run.described.item)} trained on before step {run.steps.first_step:,}"
    if not reads:
        console.print_line(words)
        return
    records = []
    for read in some:
        stream, shard, index = _place(catalog, read.sample)
        records.append(
            {
                "sample": f"{printable_name(stream)}:{shard}:{index}",
                "epoch": str(read.epoch),
                "step": "" if read.step is None else f"{read.step:,}",
                "pack" if run.packs is not None else "position": f"{read.entry:,}",
                "phase": "" if read.phase is None else printable_name(read.phase),
                "weight": f"{read.weights.get(stream, 0):.1%}",
                "fields": fields_in_words(fields.get(read.sample)) if fields else "",
            }
        )
    of = f"; {len(some)} of {len(reads):,} reads are shown, --json prints all" if len(some) < len(reads) else ""
    console.print_records(f"{words}{of}", records, left=("sample", "phase", "fields"))


def _place(catalog: Catalog, sample: int) -> tuple[str, int, int]:
    """Return stream, shard within the stream, and index of a sample."""
    place = catalog.place(sample)
    return catalog.stream_names[place.stream], place.shard - catalog.first_shard(place.stream), place.sample


def _named_ids(run: TracedRun, args: Namespace) -> NDArray[np.int64]:
    """Return the ids of the samples that the command line names, among those that the run selects.

    Raises:
        ConfigError: No sample has such a name.
    """
    if args.where is not None:
        return _ids_where(run, args.where)
    catalog = run.catalog
    if args.shard is not None:
        stream, _, name = args.shard.rpartition(":")
        number = _stream(catalog, stream, "--shard")
        shards = catalog.indexes[number].shards
        if name.isdecimal():
            matches = {int(name): name} if int(name) < len(shards) else {}
        else:
            paths = ((place, path) for place, info in enumerate(shards) for path in _files(info))
            alike = {place: path for place, path in paths if f"/{path}".endswith(f"/{name}")}
            matches = {place: path for place, path in alike.items() if path == name} or alike
        if len(matches) > 1:
            raise ConfigError(
                f"stream {catalog.stream_names[number]!r} has {len(matches):,} files named {name!r}",
                hint=f"name one by its path: {', '.join(islice(matches.values(), 5))}"
                + (", ..." if len(matches) > 5 else ""),
                option="--shard",
            )
        if not matches:
            raise ConfigError(
                f"stream {catalog.stream_names[number]!r} has no shard {name!r}",
                hint=f"it has {counted(len(shards), 'shard')}, numbered from 0",
                option="--shard",
            )
        shard = catalog.first_shard(number) + next(iter(matches))
        first = int(catalog.first_sample_of_shard[shard])
        return np.arange(first, first + int(catalog.samples_per_shard[shard]))
    named = named_sample(args.sample)
    if named is None:
        raise ConfigError(
            f"--sample must be STREAM:SHARD:INDEX, STREAM:INDEX or a key as JSON, but got {args.sample!r}",
            option="--sample",
        )
    number = _stream(catalog, named.stream or "", "--sample")
    sizes = catalog.indexes[number].samples_per_shard()
    index = named.index
    if named.shard is None:
        stops = np.cumsum(sizes)
        shard = int(np.searchsorted(stops, index, side="right"))
        index -= int(stops[shard - 1]) if shard else 0
    else:
        shard = named.shard
    if shard >= len(sizes) or index >= sizes[shard]:
        raise ConfigError(f"there is no sample {args.sample!r}", option="--sample")
    sample = catalog.id_of(catalog.first_shard(number) + shard, index)
    return np.array([] if sample is None else [sample], np.int64)


def _stream(catalog: Catalog, name: str, option: str) -> int:
    """Return the number of a stream, which may be omitted if there is one."""
    if not name and len(catalog.stream_names) == 1:
        return 0
    if name not in catalog.stream_names:
        raise ConfigError(
            f"there is no stream {name!r}", hint=f"there are {', '.join(catalog.stream_names)}", option=option
        )
    return catalog.stream_names.index(name)


def _files(info: Any) -> list[str]:
    """Return the paths of the files of a shard."""
    return [file.basename for pair in info.files for file in pair if file is not None]


def _ids_where(run: TracedRun, where: str) -> NDArray[np.int64]:
    """Return the ids of samples that meet a condition, of the streams that have its columns."""
    catalog, source, columns = run.catalog, source_of(run.loader.dataset), SqlCondition(where).columns
    matches, lacking, first = list[NDArray[np.int64]](), list[str](), 0
    for name, index, cache in zip(catalog.stream_names, catalog.indexes, source.catalogs.caches.values(), strict=True):
        if all(encodings_of(info).keys() >= set(columns) for _, info in index.shards.examples()):
            selection = select_samples(SelectionConfig(where=where), index, cache, source.quota)
            numbers, stops = selection.stored(np.arange(len(selection))), np.cumsum(index.samples_per_shard())
            shards = np.searchsorted(stops, numbers, side="right")
            indexes = numbers - np.r_[0, stops][shards]
            ids = (catalog.id_of(first + shard, i) for shard, i in zip(shards.tolist(), indexes.tolist(), strict=True))
            matches.append(np.array([sample for sample in ids if sample is not None], np.int64))
        else:
            lacking.append(name)
        first += len(index.shards)
    if lacking and not matches:
        raise ConfigError(f"no stream has the columns {', '.join(columns)} of --where", option="--where")
    if lacking:
        console.print_note("trace", f"without columns of --where, and not searched: {', '.join(lacking)}")
    return np.concatenate(matches)
