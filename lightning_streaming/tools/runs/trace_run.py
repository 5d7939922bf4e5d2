"""What ``trace`` does: which samples a step reads, and when a sample is read, told and shown."""

from __future__ import annotations

import itertools
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.dataset.sample_access import find_sample
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.reading.dataset import StreamingDataset
from lightning_streaming.reading.passes import drawn_sequence, passes_of
from lightning_streaming.reading.position import position_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batchings import Batched
from lightning_streaming.sequence.packing.packed import PackedEpoch, Rows, rows_of
from lightning_streaming.sequence.packing.settings import BudgetSettings
from lightning_streaming.sequence.partition import BatchGeometry, Partition
from lightning_streaming.tools.console import (
    FINE,
    counted,
    print_json,
    print_line,
    print_note,
    print_table,
    printable_name,
    render,
)
from lightning_streaming.tools.runs.training_run import TracedRun, traced_run
from lightning_streaming.tools.stored.sample_reader import named_sample


def trace_run(args: Namespace) -> int:
    """Print the samples of a step, or the reads of a sample."""
    changes = dict(args.set) | ({} if args.batch_size is None else {"batch_size": str(args.batch_size)})
    traced = traced_run(args, changes)
    try:
        if traced.assumed is not None:
            print_note("trace", traced.assumed)
        reads = _find(traced, args)
        _show(traced, reads, args)
    finally:
        traced.loader.close()
    return FINE


def _find(traced: TracedRun, args: Namespace) -> list[Read]:
    if args.step is not None:
        return reads_of_step(traced, args.step, args.rank)
    named = named_sample(args.sample)
    if named is None or named.stream is None or named.shard is None:
        raise ConfigError(
            f"--sample must be STREAM:SHARD:INDEX or a key as JSON, but got {args.sample!r}", option="--sample"
        )
    if named.key is not None:
        reads = reads_of_key(traced, named.key)
    else:
        reads = reads_of_sample(traced, named.stream, named.shard, named.index, args.epochs)
    return [read for read in reads if args.rank is None or 0 <= args.rank - read.rank < traced.replication]


def _show(traced: TracedRun, reads: Sequence[Read], args: Namespace) -> None:
    shown: dict[int, dict[str, str]] = {}
    failure = None
    try:
        shown = _fields_of(traced.loader.dataset, reads, fetch=args.fields)
    except StreamingError as error:  # what is known without them is shown first
        failure = error
    told = [_as_json(traced, read, shown.get(read.sample)) for read in reads]
    heads = _WHERE_PACKED if traced.packs is not None else (*_WHERE, "sample")
    if args.json:
        print_json({"run": _run_as_json(traced), "reads": told})
    elif args.step is not None:
        _print_reads(f"step {args.step}, epoch {reads[0].key.epoch}, {_topology(traced)}", told, heads)
    elif reads:
        _print_reads(f"sample {args.sample}, {_topology(traced)}", told, (*_WHEN, *heads))
    else:
        print_line(f"{args.sample} is not read in {counted(args.epochs, 'epoch')} from epoch {traced.begins.epoch} on")
    if failure is not None:
        raise failure


def _topology(traced: TracedRun) -> str:
    nodes, ranks = counted(traced.num_nodes, "node"), counted(traced.ranks_per_node, "rank")
    packs = ""
    if traced.packs is not None:
        kind = "groups of at most" if isinstance(traced.packs, BudgetSettings) else "packs of"
        packs = f", {kind} {counted(traced.packs.capacity, 'token')}"
    return (f"{nodes} of {ranks}" if traced.num_nodes > 1 else ranks) + packs


_COLUMNS_SHOWN = 3
_CHARACTERS_SHOWN = 40
_WHEN = ("step", "epoch")
_WHERE = ("batch", "rank", "place", "position")
_WHERE_PACKED = ("batch", "rank", "place", "pack", "sample", "tokens")


def _run_as_json(run: TracedRun) -> dict[str, Any]:
    """The run as it was understood."""
    return {
        "nodes": run.num_nodes,
        "ranks_per_node": run.ranks_per_node,
        "replication": run.replication,
        "batch_size": position_of(run.loader).samples_per_global_batch * run.replication // run.num_ranks,
        **({} if run.packs is None else {"pack_capacity": run.packs.capacity}),
        "begins": {**run.begins._asdict(), "global_step": run.steps.first_step},
    }


def _as_json(run: TracedRun, read: Read, fields: Mapping[str, str] | None) -> dict[str, Any]:
    """A read; the key is what ``restore_sample`` takes."""
    return {
        "step": read.step,
        "epoch": read.key.epoch,
        "batch": read.batch,
        "ranks": list(range(read.rank, read.rank + run.replication)),
        "place": read.place,
        "sample": read.sample,
        "phase": read.phase,
        "pack": None if read.pack is None else asdict(read.pack),
        "key": read.key.as_dict(),
        "fields": fields,
    }


def _print_reads(title: str, reads: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> None:
    """Print one line for each read, with its phase, where there are any; and of its fields the first few, likewise."""
    if any(read["phase"] is not None for read in reads):
        heads = [*heads, "phase"]
    if any(read["fields"] is not None for read in reads):
        heads = [*heads, "fields"]
    rows = []
    for read in reads:
        pack = read["pack"] or {"position": 0, "start": 0, "stop": 0}
        key, ranks = read["key"], list(dict.fromkeys((read["ranks"][0], read["ranks"][-1])))
        cells = {
            **{head: str(read[head]) for head in ("epoch", "batch", "place")},
            "step": f"{read['step']:,}",
            "rank": "-".join(map(str, ranks)),
            "position": f"{key['position']:,}",
            "pack": f"{pack['position']:,}",
            "tokens": f"{pack['start']:,} to {pack['stop'] - 1:,}",
            "phase": printable_name(read["phase"] or ""),
            "sample": f"{printable_name(key['stream'])}:{key['shard']}:{key['sample_index']}",
            "fields": _fields(read["fields"] or {}),
        }
        rows.append([cells[head] for head in heads])
    print_table(title, heads, rows, right=(*_WHEN, *_WHERE, "pack", "tokens"))


def _fields(values: Mapping[str, str]) -> str:
    few = [f"{printable_name(column)}: {_cut(value)}" for column, value in list(values.items())[:_COLUMNS_SHOWN]]
    return ", ".join(few) + (", …" if len(values) > _COLUMNS_SHOWN else "") or "-"


def _cut(value: str) -> str:
    return value if len(value) <= _CHARACTERS_SHOWN else f"{value[: _CHARACTERS_SHOWN - 1]}…"


def _fields_of(dataset: StreamingDataset, reads: Iterable[Read], *, fetch: bool) -> dict[int, dict[str, str]]:
    """The columns of samples, each value in a few words.

    Args:
        dataset: Reads single samples by their bytes alone, where it can.
        reads: Of which samples.
        fetch: Whether to read also those whose shard is not on this node.

    Returns:
        By sample id; samples that are not read are left out.

    Raises:
        FormatError: A sample is damaged.
        StorageError: It could not be fetched.
    """
    is_here = cache(passes_of(dataset).has)
    shown: dict[int, dict[str, str]] = {}
    for read in reads:
        if read.sample in shown or not (fetch or is_here(passes_of(dataset).catalog.place(read.sample).shard)):
            continue
        values = StreamingDataset.get_item(dataset, read.sample)  # the columns, whatever a subclass makes of them
        shown[read.sample] = {column: render(value) for column, value in values.items()}
    return shown


_AT_A_TIME = 1 << 20
_PACKS_AT_A_TIME = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPart:
    """What a pack has of one document."""

    position: int
    """The pack's, in the epoch: packs are what a saved state counts."""
    document: int
    """Which of its documents, as ``document_ids`` of the batch tells them."""
    start: int
    """The first token of the document that is in the pack."""
    stop: int
    """After the last one."""


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
    """Place in the batch; of packs, that of the pack."""
    sample: int
    """Id over all streams, as ``dataset[sample]`` takes it."""
    phase: str | None
    """The phase of the epoch that reads it; None without phases."""
    key: SampleKey
    pack: PackPart | None = None
    """Where documents are packed: which pack it is in, and which tokens of it."""

    @property
    def entry(self) -> int:
        """What of the epoch it is: the position of the sample, or of its pack."""
        return self.key.position if self.pack is None else self.pack.position


def reads_of_step(run: TracedRun, step: int, rank: int | None = None, most: int | None = None) -> list[Read]:
    """The samples of a global step, by rank, batch and place.

    Args:
        run: The run.
        step: The trainer's ``global_step`` in the step; the first is 0.
        rank: Only what this rank reads; None for all.
        most: Ranks after the one with which there are more samples are left out; None for no limit.

    Raises:
        ConfigError: The run has no such step or rank.
    """
    if rank is not None and not rank < run.num_ranks:
        raise ConfigError(
            f"there is no rank {rank}",
            hint=f"the run has {run.num_ranks}, see --nodes and --ranks-per-node",
            option="--rank",
        )
    epoch, of_epoch = run.steps.find(step)
    ranks = range(0, run.num_ranks, run.replication) if rank is None else [rank]
    of_run, batches, reads = _EpochReads.of(run, epoch), run.steps.of_epoch(epoch).batches_of(of_epoch), list[Read]()
    for one in ranks:
        reads += of_run.in_batches(batches, [one])
        if most is not None and len(reads) > most:
            break
    return reads


def reads_of_sample(run: TracedRun, stream: str, shard: int, index: int, epochs: int) -> list[Read]:
    """When a sample is read before the run ends: all times in the first epoch that reads it, in order.

    Args:
        run: The run.
        stream: Name of the stream.
        shard: Counted within the stream.
        index: Counted within the shard.
        epochs: How many epochs to look through, from where the run begins.

    Raises:
        SampleIndexError: There is no such sample.
    """
    sample = _sample_id(run.catalog, stream, shard, index)
    for epoch in range(run.begins.epoch, run.begins.epoch + epochs):
        if not run.steps.has(epoch, run.steps.global_step(epoch, 0)):
            break
        reads = _EpochReads.of(run, epoch)
        found = reads.of_sample(sample)
        if found:
            return found
    return []


def positions_before(run: TracedRun, stream: str, shard: int, index: int) -> list[int]:
    """Where the epoch in which the run begins has read a sample before that: positions, of packs those of the pack.

    Raises:
        SampleIndexError: There is no such sample.
    """
    sample = _sample_id(run.catalog, stream, shard, index)
    reads, skipped = _EpochReads.of(run, run.begins.epoch), run.skipped_before(run.begins.epoch)
    found = reads.entries_in(0, reads.partition.start, lambda rows: rows.ids == sample)
    return [position for position in found if skipped.kept_before(position) < skipped.kept_before(position + 1)]


def reads_of_key(run: TracedRun, key: SampleKey) -> list[Read]:
    """When the sample with this key is read, in the very place that the key names; never, if the run ends before.

    Raises:
        SampleIndexError: There is no such sample.
        ConfigError: The run reads another sample at that place, or none.
    """
    sample = _sample_id(run.catalog, key.stream, key.shard, key.sample_index)
    begins = run.begins
    reads = _EpochReads.of(run, max(key.epoch, begins.epoch))
    entries = reads.entries_of(key, sample)
    if key.epoch < begins.epoch or any(entry < reads.partition.start for entry in entries):
        raise ConfigError(
            f"epoch {key.epoch}, position {key.position} lies before the checkpoint, which is at {begins}",
            option="--sample",
        )
    if not entries or reads.of_pass_seed != key.shuffle_seed:
        raise ConfigError(
            f"the run does not read this sample at position {key.position} of epoch {key.epoch}, so the key is of "
            "another run: other data, seed or order",
            hint="ask for STREAM:SHARD:INDEX instead",
            option="--sample",
        )
    return [read for read in reads.of_entries(entries) if read.key == key]


@dataclass(frozen=True, kw_only=True, slots=True)
class _EpochReads:
    """One epoch, as far as the run reads it."""

    run: TracedRun
    epoch: int
    plan: Batched
    partition: Partition
    composed: BatchGeometry
    """What the epoch's batches are made for."""
    of_pass_seed: int

    @classmethod
    def of(cls, run: TracedRun, epoch: int) -> _EpochReads:
        order = run.order
        begins = order.normalise(run.begins if epoch == run.begins.epoch else Cursor(epoch, 0))
        read = order.epoch(begins)
        seed = order.settings.shuffle_seed
        return cls(
            run=run,
            epoch=epoch,
            plan=drawn_sequence(read),
            partition=read.partition,
            composed=read.composed,
            of_pass_seed=seed,
        )

    def in_batches(self, batches: range, ranks: Sequence[int]) -> Iterator[Read]:
        """What these ranks read in batches, which are counted from the first one that the run reads."""
        for rank in ranks:
            reader = self.run.reader(rank)
            positions = self.partition.batches(np.asarray(batches), reader.node, reader.rank_of_node)
            for batch, row in zip(batches, positions, strict=True):
                entries = row[row >= 0]
                rows = rows_of(self.plan, entries)
                places = np.arange(len(entries)) if rows.pieces is None else rows.pieces.packs
                parts = _parts_of(entries, rows)
                found = zip(places.tolist(), rows.positions.tolist(), rows.ids.tolist(), parts, strict=True)
                for place, position, sample, part in found:
                    yield self._read(batch, rank, place, position, sample, part)

    def of_sample(self, sample: int) -> list[Read]:
        """When a sample is read in the rest of the epoch."""
        entries = self.entries_in(self.partition.start, len(self.plan), lambda rows: rows.ids == sample)
        return [read for read in self.of_entries(entries) if read.sample == sample]

    def entries_of(self, key: SampleKey, sample: int) -> list[int]:
        """Where the sample stands in the epoch that a key names: several where the parts of a document are packed."""
        if not isinstance(self.plan, PackedEpoch):
            stands_there = key.position < len(self.plan) and self.plan.ids(np.asarray([key.position]))[0] == sample
            return [key.position] if stands_there else []
        return self.entries_in(0, len(self.plan), lambda rows: (rows.ids == sample) & (rows.positions == key.position))

    def entries_in(self, first: int, stop: int, is_wanted: Callable[[Rows], NDArray[np.bool_]]) -> list[int]:
        """The entries of the epoch, from one up to another, of which a row is wanted."""
        found, step = list[int](), _PACKS_AT_A_TIME if isinstance(self.plan, PackedEpoch) else _AT_A_TIME
        for start in range(first, stop, step):
            entries = np.arange(start, min(start + step, stop))
            rows = rows_of(self.plan, entries)
            of_rows = entries if rows.pieces is None else entries[rows.pieces.packs]
            found += np.unique(of_rows[is_wanted(rows)]).tolist()
        return found

    def of_entries(self, entries: Sequence[int]) -> list[Read]:
        """Who reads some entries, and when, in order."""
        found = [read for entry in entries for read in self._of_entry(entry)]
        return sorted(found, key=lambda read: (read.batch, read.rank, read.place))

    def _of_entry(self, entry: int) -> list[Read]:
        """Who reads an entry, and when; more than once where it is read again to keep the ranks even."""
        batches = self.run.steps.of_epoch(self.epoch).batches
        size = self.partition.geometry.global_batch_size
        # Only what fills no global batch is divided in another way, and only there anything is read again.
        last = range(self.partition.full_batches, self.partition.num_batches())
        left = self.partition.sequence.entries_before(entry) - self.partition.entries_before
        candidates = sorted({left // size, *last})
        steps = self.run.steps
        ranks = range(0, self.run.num_ranks, self.run.replication)
        return [
            read
            for batch in candidates
            if batch < batches and steps.has(self.epoch, steps.global_step(self.epoch, batch))
            for read in self.in_batches(range(batch, batch + 1), ranks)
            if read.entry == entry
        ]

    def _read(self, batch: int, rank: int, place: int, position: int, sample: int, pack: PackPart | None) -> Read:
        steps, catalog = self.run.steps, self.run.catalog
        stored = catalog.place(sample)
        key = SampleKey(
            stream=catalog.stream_names[stored.stream],
            shard=stored.shard - sum(catalog.shards_per_stream[: stored.stream]),
            sample_index=stored.sample,
            epoch=self.epoch,
            position=position,
            shuffle_seed=self.of_pass_seed,
        )
        return Read(
            step=steps.global_step(self.epoch, batch),
            batch=steps.of_epoch(self.epoch).done + batch,
            rank=rank,
            place=place,
            sample=sample,
            phase=self.run.order.order.phase(
                Cursor(self.epoch, position if pack is None else pack.position), self.composed
            ),
            key=key,
            pack=pack,
        )


def _parts_of(entries: NDArray[np.int64], rows: Rows) -> Iterator[PackPart | None]:
    """Of each row what its pack has of it; None where nothing is packed."""
    if rows.pieces is None:
        yield from itertools.repeat(None, len(entries))
        return
    packs, starts, lengths = (of.tolist() for of in (rows.pieces.packs, rows.pieces.starts, rows.pieces.lengths))
    for row, (pack, start, length) in enumerate(zip(packs, starts, lengths, strict=True)):
        first = bisect_left(packs, pack)
        yield PackPart(position=int(entries[pack]), document=row - first, start=start, stop=start + length)


def _sample_id(catalog: Catalog, stream: str, shard: int, index: int) -> int:
    key = SampleKey(stream=stream, shard=shard, sample_index=index, epoch=0, position=0, shuffle_seed=0)
    return find_sample(catalog, key)
