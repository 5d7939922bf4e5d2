"""The ``trace`` tool: find the samples that a step reads, or the reads of a sample, and show them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.dataset.sample_access import find_sample
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.reading.dataset import StreamingDataset
from lightning_streaming.reading.position import position_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.tools import console
from lightning_streaming.tools.console import counted, printable_name
from lightning_streaming.tools.runs.describe import EpochDescription, EpochRows, PackPart
from lightning_streaming.tools.runs.training_run import TracedRun, traced_run
from lightning_streaming.tools.stored.sample_reader import named_sample

_COLUMNS_SHOWN = 3
_CHARACTERS_SHOWN = 40
_WHEN = ("step", "epoch")


def trace_run(args: Namespace) -> int:
    """Print the samples of a step, or the reads of a sample."""
    traced = traced_run(args)
    try:
        if traced.assumed is not None:
            console.print_note("trace", traced.assumed)
        if args.step is not None:
            _show(traced, reads_of_step(traced, args.step, args.rank), args)
            return console.FINE
        named = named_sample(args.sample)
        if named is None or named.stream is None or named.shard is None:
            raise ConfigError(
                f"--sample must be STREAM:SHARD:INDEX or a key as JSON, but got {args.sample!r}", option="--sample"
            )
        if named.key is not None:
            reads = reads_of_key(traced, named.key)
        else:
            reads = reads_of_sample(traced, named.stream, named.shard, named.index, args.epochs)
        is_shown = range(traced.replication) if args.rank is not None else None
        _show(traced, [read for read in reads if is_shown is None or args.rank - read.rank in is_shown], args)
    finally:
        traced.loader.close()
    return console.FINE


def _show(traced: TracedRun, reads: Sequence[Read], args: Namespace) -> None:
    """Print the reads as JSON, or as a table that leads with the step or with the sample."""
    fields: dict[int, dict[str, str]] = {}
    failure = None
    try:
        fields = fields_of(traced, [read.sample for read in reads], fetch=args.fields)
    except StreamingError as error:  # shown after what is known without the fields
        failure = error
    rows = [
        {
            "step": read.step,
            "epoch": read.key.epoch,
            "batch": read.batch,
            "ranks": list(range(read.rank, read.rank + traced.replication)),
            "place": read.place,
            "sample": read.sample,
            "phase": read.phase,
            "packing": None if read.pack is None else asdict(read.pack),
            "key": read.key.as_dict(),  # as restore_sample takes it
            "fields": fields.get(read.sample),
        }
        for read in reads
    ]
    packing, described = traced.packs, traced.described
    nodes, ranks = counted(traced.num_nodes, "node"), counted(traced.ranks_per_node, "rank")
    machines = f"{nodes} of {ranks}" if traced.num_nodes > 1 else ranks
    heads = ["batch", "rank", "place", "position", "sample"]
    if packing is not None:
        kind = "groups of at most" if described.unit == "group" else "packs of"
        machines += f", {kind} {counted(packing.capacity, 'token')}"
        heads = ["batch", "rank", "place", "pack", "sample", "tokens"]
    if args.json:
        run = {
            "nodes": traced.num_nodes,
            "ranks_per_node": traced.ranks_per_node,
            "replication": traced.replication,
            "batch_size": position_of(traced.loader).samples_per_global_batch * traced.replication // traced.num_ranks,
            **({} if packing is None else {"pack_capacity": packing.capacity}),
            "begins": {**traced.begins._asdict(), "global_step": traced.steps.first_step},
        }
        console.print_json({"run": run, "reads": rows})
    elif args.step is not None:
        _print_reads(f"step {args.step}, epoch {reads[0].key.epoch}, {machines}", rows, heads)
    elif reads:
        _print_reads(f"sample {args.sample}, {machines}", rows, [*_WHEN, *heads])
    else:
        console.print_line(
            f"{args.sample} is not read in {counted(args.epochs, 'epoch')} from epoch {traced.begins.epoch} on"
        )
    if failure is not None:
        raise failure


def _print_reads(title: str, reads: Sequence[Mapping[str, Any]], heads: list[str]) -> None:
    """Print a line for each read, with its phase if there is a schedule, and the first of its fields if known."""
    has_fields, records = any(read["fields"] is not None for read in reads), []
    for read in reads:
        pack, key = read["packing"] or {"position": 0, "start": 0, "stop": 0}, read["key"]
        cells = {
            **{head: str(read[head]) for head in ("epoch", "batch", "place")},
            "step": f"{read['step']:,}",
            "rank": "-".join(map(str, dict.fromkeys((read["ranks"][0], read["ranks"][-1])))),
            "position": f"{key['position']:,}",
            "pack": f"{pack['position']:,}",
            "tokens": f"{pack['start']:,} to {pack['stop'] - 1:,}",
            "phase": "" if read["phase"] is None else printable_name(read["phase"]),
            "sample": f"{printable_name(key['stream'])}:{key['shard']}:{key['sample_index']}",
            "fields": fields_in_words(read["fields"]) if has_fields else "",
        }
        records.append({head: cells[head] for head in (*heads, "phase", "fields")})
    console.print_records(title, records, left=("sample", "phase", "fields"))


def fields_in_words(fields: Mapping[str, str] | None) -> str:
    """Return the first fields of a sample in a line."""
    values = [
        f"{printable_name(column)}: "
        + (value if len(value) <= _CHARACTERS_SHOWN else f"{value[: _CHARACTERS_SHOWN - 1]}…")
        for column, value in list((fields or {}).items())[:_COLUMNS_SHOWN]
    ]
    return ", ".join(values) + (", …" if len(fields or ()) > _COLUMNS_SHOWN else "") or "-"


def fields_of(run: TracedRun, samples: Iterable[int], *, fetch: bool) -> dict[int, dict[str, str]]:
    """Return the columns of samples as short texts, by sample id.

    Args:
        run: The run; its dataset reads single samples by their bytes alone, if it can.
        samples: Ids of the samples.
        fetch: Whether to read also samples whose shard is not on this node; else they are left out.

    Raises:
        FormatError: A sample is damaged.
        StorageError: It could not be fetched.
    """
    is_cached: dict[int, bool] = {}
    fields: dict[int, dict[str, str]] = {}
    for sample in samples:
        shard = run.catalog.place(sample).shard
        if shard not in is_cached:
            is_cached[shard] = fetch or run.described.is_cached(shard)
        if sample not in fields and is_cached[shard]:
            # The stored columns, also if a subclass of the user changes them.
            values = StreamingDataset.get_item(run.loader.dataset, sample)
            fields[sample] = {column: console.render(value) for column, value in values.items()}
    return fields


# Reads: steps to samples, and samples to steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One sample in one batch; of packed documents, one document in one pack."""

    step: int
    """The trainer's ``global_step`` while the sample is trained on."""
    batch: int
    """Batch of the epoch, as the trainer counts: its ``batch_idx``."""
    rank: int
    """Rank that reads it; with replication, the first of those that do."""
    place: int
    """Place of the sample, or of its pack, in the batch."""
    sample: int
    """Id over all streams, as ``dataset[sample]`` takes it."""
    phase: str | None
    """Phase of the schedule that reads it; None without a schedule."""
    key: SampleKey
    pack: PackPart | None = None
    """Pack that it is in, and its tokens there; None without packing."""

    @property
    def entry(self) -> int:
        """Position in the epoch of the sample, or of its pack."""
        return self.key.position if self.pack is None else self.pack.position


def reads_of_step(run: TracedRun, step: int, rank: int | None = None, most: int | None = None) -> list[Read]:
    """Return the samples of a global step, by rank, batch and place.

    Args:
        run: The run.
        step: The trainer's ``global_step`` in the step; the first is 0.
        rank: Only what this rank reads; None for all.
        most: Once there are more samples, further ranks are left out; None for no limit.

    Raises:
        ConfigError: The run has no such step or rank.
    """
    if rank is not None and not rank < run.num_ranks:
        raise ConfigError(
            f"there is no rank {rank}",
            hint=f"the run has {run.num_ranks}, see --nodes and --ranks-per-node",
            option="--rank",
        )
    number, of_epoch = run.steps.find(step)
    epoch, batches, reads = _TracedEpoch(run, number), run.steps.of_epoch(number).batches_of(of_epoch), list[Read]()
    for reader in range(0, run.num_ranks, run.replication) if rank is None else [rank]:
        reads += epoch.in_batches(batches, [reader])
        if most is not None and len(reads) > most:
            break
    return reads


def reads_of_sample(run: TracedRun, stream: str, shard: int, index: int, epochs: int) -> list[Read]:
    """Return the reads of a sample before the run ends: all in the first epoch that reads it, in order.

    Args:
        run: The run.
        stream: Name of the stream.
        shard: Counted within the stream.
        index: Counted within the shard.
        epochs: Number of epochs to search, from where the run begins.

    Raises:
        SampleIndexError: There is no such sample.
    """
    sample = _sample_id(run.catalog, stream, shard, index)
    for number in range(run.begins.epoch, run.begins.epoch + epochs):
        if not run.steps.has(number, run.steps.global_step(number, 0)):
            break
        epoch = _TracedEpoch(run, number)
        entries = epoch.entries_in(epoch.start, len(epoch.described.sequence), lambda rows: rows.ids == sample)
        reads = [read for read in epoch.of_entries(entries) if read.sample == sample]
        if reads:
            return reads
    return []


def positions_before(run: TracedRun, stream: str, shard: int, index: int) -> list[int]:
    """Return where the epoch in which the run begins has read a sample before that, as positions of samples or packs.

    Raises:
        SampleIndexError: There is no such sample.
    """
    sample = _sample_id(run.catalog, stream, shard, index)
    epoch, skipped = _TracedEpoch(run, run.begins.epoch), run.skipped_before(run.begins.epoch)
    entries = epoch.entries_in(0, epoch.start, lambda rows: rows.ids == sample)
    return [position for position in entries if skipped.kept_before(position) < skipped.kept_before(position + 1)]


def reads_of_key(run: TracedRun, key: SampleKey) -> list[Read]:
    """Return the reads of a sample at the position that its key names; empty if the run ends before.

    Raises:
        SampleIndexError: There is no such sample.
        ConfigError: The run reads another sample at that position, or none.
    """
    sample = _sample_id(run.catalog, key.stream, key.shard, key.sample_index)
    epoch = _TracedEpoch(run, max(key.epoch, run.begins.epoch))
    first, stop = 0, len(epoch.described.sequence)
    if run.packs is None:
        first, stop = min(key.position, stop), min(key.position + 1, stop)
    # Several, if the parts of a document are packed.
    entries = epoch.entries_in(first, stop, lambda rows: (rows.ids == sample) & (rows.positions == key.position))
    if key.epoch < run.begins.epoch or any(entry < epoch.start for entry in entries):
        raise ConfigError(
            f"epoch {key.epoch}, position {key.position} lies before the checkpoint, which is at {run.begins}",
            option="--sample",
        )
    if not entries or run.order.settings.shuffle_seed != key.shuffle_seed:
        raise ConfigError(
            f"the run does not read this sample at position {key.position} of epoch {key.epoch}, so the key is of "
            "another run: other data, seed or order",
            hint="pass STREAM:SHARD:INDEX instead",
            option="--sample",
        )
    return [read for read in epoch.of_entries(entries) if read.key == key]


class _TracedEpoch:
    """One epoch, as far as the run reads it."""

    def __init__(self, run: TracedRun, number: int) -> None:
        begins = run.order.normalise(run.begins if number == run.begins.epoch else Cursor(number, 0))
        self._run, self._number = run, number
        self.described: EpochDescription = run.described.epoch(begins)

    @property
    def start(self) -> int:
        """Position from which the run reads it."""
        return self.described.partition.start

    def in_batches(self, batches: range, ranks: Sequence[int]) -> Iterator[Read]:
        """Yield the reads of some ranks in batches, which are counted from the first one that the run reads."""
        run, catalog = self._run, self._run.catalog
        steps = run.steps.of_epoch(self._number)
        for rank in ranks:
            reader = run.reader(rank)
            positions = self.described.partition.batches(np.asarray(batches), reader.node, reader.rank_of_node)
            for batch, row in zip(batches, positions, strict=True):
                entries = row[row >= 0]
                rows = self.described.rows(entries)
                columns = (rows.entries.tolist(), rows.positions.tolist(), rows.ids.tolist(), rows.parts(entries))
                for place, position, sample, part in zip(*columns, strict=True):
                    stored = catalog.place(sample)
                    key = SampleKey(
                        stream=catalog.stream_names[stored.stream],
                        shard=stored.shard - catalog.first_shard(stored.stream),
                        sample_index=stored.sample,
                        epoch=self._number,
                        position=position,
                        shuffle_seed=run.order.settings.shuffle_seed,
                    )
                    yield Read(
                        step=run.steps.global_step(self._number, batch),
                        batch=steps.done + batch,
                        rank=rank,
                        place=place,
                        sample=sample,
                        phase=self.described.phase_at(position if part is None else part.position),
                        key=key,
                        pack=part,
                    )

    def entries_in(self, first: int, stop: int, is_wanted: Callable[[EpochRows], NDArray[np.bool_]]) -> list[int]:
        """Return the positions between two of the epoch that have a wanted row."""
        entries = list[int]()
        for positions, rows in self.described.chunks(first, stop):
            entries += np.unique(positions[rows.entries[is_wanted(rows)]]).tolist()
        return entries

    def of_entries(self, entries: Sequence[int]) -> list[Read]:
        """Return the reads of some positions, in order; several of one that is read again to keep the ranks even."""
        steps, partition = self._run.steps, self.described.partition
        batches, size = steps.of_epoch(self._number).batches, partition.geometry.global_batch_size
        # Only what fills no global batch is divided in another way, and only there samples are read again.
        last = range(partition.full_batches, partition.num_batches())
        ranks = range(0, self._run.num_ranks, self._run.replication)
        reads = [
            read
            for entry in entries
            for batch in {(partition.sequence.entries_before(entry) - partition.entries_before) // size, *last}
            if batch < batches and steps.has(self._number, steps.global_step(self._number, batch))
            for read in self.in_batches(range(batch, batch + 1), ranks)
            if read.entry == entry
        ]
        return sorted(reads, key=lambda read: (read.batch, read.rank, read.place))


def _sample_id(catalog: Catalog, stream: str, shard: int, index: int) -> int:
    key = SampleKey(stream=stream, shard=shard, sample_index=index, epoch=0, position=0, shuffle_seed=0)
    return find_sample(catalog, key)
