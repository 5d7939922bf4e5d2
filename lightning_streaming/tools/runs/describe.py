"""Description of a run: its streams, schedule and packing, and the samples at the positions of its epochs.

:func:`describe_run` describes the run of a dataset as a trainer configures it. The tools read that one value: only here
it makes a difference whether a run has a schedule, or packs documents.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.cache import CacheConfig
from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.shard_table import INDEX_BASENAME
from lightning_streaming.options.packing import Packing, PackingConfig, TokenBudget
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world, planner_of, run_state_of, source_of
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.packs.types import ColumnTypes, stored_types
from lightning_streaming.resume.run import Epoch, Machines, Run
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.saved_fingerprint import SavedPacking
from lightning_streaming.resume.state import Cursor, SavedPosition
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.packing.packs import PackedEpoch
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings
from lightning_streaming.sequence.partition import BatchGeometry, Partition
from lightning_streaming.sequence.phases import MixtureSchedule
from lightning_streaming.sequence.skips import NOTHING_SKIPPED, SkippedPositions, TrainProgress, parse_batch_ranges
from lightning_streaming.tools import console
from lightning_streaming.tools.commands import count_ranks, read_run_files
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.runs.checkpoints import SavedLoader
from lightning_streaming.tools.stored.summary import ShardBytes, stored_bytes
from lightning_streaming.world import World

_AT_ONCE = 1 << 20
"""Samples whose ids are looked up together."""
_ORDER = ("shuffle", "shuffle_algo", "shuffle_block_size", "sampling_method", "sampling_granularity", "batching_method")
"""Settings of the order that a fingerprint of this version has; a later one may have more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPart:
    """The part of a document that is in a pack."""

    position: int
    """Position of the pack in the epoch, as saved states count."""
    document: int
    """Number of the document in the pack, as ``document_ids`` of the batch has it."""
    start: int
    """First token of the document that is in the pack."""
    stop: int
    """End of its tokens in the pack."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochRows:
    """Samples at some positions of an epoch: one at each, or the documents and parts of documents of a pack."""

    entries: NDArray[np.int64]
    """Which of the positions each row is at, counted from 0; rising. The other arrays have the same shape."""
    ids: NDArray[np.int64]
    """Sample ids."""
    positions: NDArray[np.int64]
    """Position that the sample would have without packing."""
    starts: NDArray[np.int64]
    """Token of the document with which the row begins; 0 for whole samples."""
    tokens: NDArray[np.int64]
    """Tokens of the row in its pack, or of the sample; 0 if its length is not known."""
    rooms: NDArray[np.int64]
    """Tokens that each pack has room for, of shape (positions,); empty without packing."""

    @property
    def first_parts(self) -> NDArray[np.bool_]:
        """Rows with which a sample begins: all but later parts of a document."""
        is_first: NDArray[np.bool_] = self.starts == 0
        return is_first

    def parts(self, positions: NDArray[np.int64]) -> list[PackPart | None]:
        """Return the part of a pack that each row is; None without packing.

        Args:
            positions: The positions that the rows are at.
        """
        if not len(self.rooms):
            return [None] * len(self.ids)
        documents = np.arange(len(self.entries)) - np.searchsorted(self.entries, self.entries)
        columns = (positions[self.entries], documents, self.starts, self.starts + self.tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [PackPart(position=at, document=number, start=start, stop=stop) for at, number, start, stop in rows]


class StreamsRead(NamedTuple):
    """What was read of each stream, by name."""

    samples: dict[str, int]
    tokens: dict[str, int] | None
    """None if lengths are not known: only runs that pack, or mix by tokens, count them."""


def share_in_words(begin: float, end: float) -> str:
    """Return a configured share, which changes along a ramp."""
    return f"{begin:.1%}" if begin == end else f"{begin:.1%} to {end:.1%}"


def _parts_of_sum(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _sums(streams: NDArray[np.int64], values: NDArray[Any], num_streams: int) -> list[int]:
    """Return the sum of the values of each stream."""
    sums = np.zeros(num_streams, np.int64)
    np.add.at(sums, streams, values.astype(np.int64))
    summed: list[int] = sums.tolist()
    return summed


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochDescription:
    """An epoch of a run, from the cursor that it is read from."""

    run: RunDescription
    read: Epoch

    @cached_property
    def sequence(self) -> Batched:
        """Sample ids by position; drawn when it is first used."""
        return drawn_sequence(self.read)

    @property
    def partition(self) -> Partition:
        """Division of the rest of the epoch among ranks and batches."""
        return self.read.partition

    @property
    def rows_per_entry(self) -> float:
        """Samples at a position, on average."""
        return self.sequence.rows_per_entry

    @cached_property
    def plan(self) -> MixtureSchedule | None:
        """The samples that each mixture step takes of each stream; None without a schedule."""
        epoch = self.read.cursor.epoch
        mixture = self.read.order.of_epoch(epoch).mixture
        return None if mixture is None else mixture.plan_of(epoch)

    @cached_property
    def phase_stops(self) -> NDArray[np.int64]:
        """Position at which each phase ends; without a schedule, one that no epoch reaches."""
        if not self.run.phases:
            return np.array([np.iinfo(np.int64).max])
        epoch = self.read.cursor.epoch
        return self.read.order.of_epoch(epoch).phase_stops(self.read.composed, epoch)

    @cached_property
    def part_stops(self) -> NDArray[np.int64]:
        """Position at which each separately shuffled part ends: the epoch, or the mixture steps of its phases."""
        return self.sequence.part_stops()

    def phase_at(self, position: int) -> str | None:
        """Return the name of the phase that reads a position; None without a schedule."""
        phases = self.run.phases
        number = int(np.searchsorted(self.phase_stops, position, side="right"))
        return phases[min(number, len(phases) - 1)] if phases else None

    def phase_of_row(self, position: int) -> str | None:
        """Return the name of the phase that reads a row, by its position without packing; None without a schedule."""
        if self.plan is None or self.run.packing is None:
            return self.phase_at(position)
        number = int(np.searchsorted(self.plan.phase_stops, position, side="right"))
        return self.run.phases[min(number, len(self.run.phases) - 1)]

    def weights_at(self, position: int) -> dict[str, float]:
        """Return the share of each stream in what is read around a row: in its mixture step, else in the epoch.

        Shares count samples, or tokens if the weights do.

        Args:
            position: Position of the row without packing.
        """
        order, plan = self.read.order.of_epoch(self.read.cursor.epoch), self.plan
        if plan is None or order.mixture is None:
            names, drawn = list(order.catalog.stream_names), np.asarray(order.weights.choose)
        else:
            names, steps, stops = list(plan.streams), plan.drawn, plan.stops
            if order.is_composed:  # batches are composed over whole phases
                steps, stops = steps[np.r_[0, plan.last_steps + 1]], self.phase_stops
            number = min(int(np.searchsorted(stops, position, side="right")), len(steps) - 2)
            begin, end = steps[number : number + 2] + (0 if plan.earlier is None else plan.earlier)
            tokens = [order.mixture.tokens_of(name) for name in names]
            drawn = np.asarray(
                [
                    last - first if passes is None else passes.before(last) - passes.before(first)
                    for first, last, passes in zip(begin.tolist(), end.tolist(), tokens, strict=True)
                ]
            )
        shares = (drawn / max(1, drawn.sum())).tolist()
        return {name: share for name, share in zip(names, shares, strict=True) if share}

    def rows(self, positions: NDArray[np.int64]) -> EpochRows:
        """Return the samples at some positions.

        Args:
            positions: Of shape (positions,).
        """
        rows, settings = self.sequence.rows(positions), self.run.packing
        if rows.pieces is None or settings is None:
            nothing, lengths = np.zeros(len(positions), np.int64), self.run.catalog.lengths
            return EpochRows(
                entries=np.arange(len(positions)),
                ids=rows.ids,
                positions=positions,
                starts=nothing,
                tokens=nothing if lengths is None else lengths(rows.ids).astype(np.int64),
                rooms=nothing[:0],
            )
        pieces = rows.pieces
        return EpochRows(
            entries=pieces.entries,
            ids=pieces.ids,
            positions=pieces.positions,
            starts=pieces.starts,
            tokens=pieces.lengths,
            rooms=pieces.rooms(settings),
        )

    def chunks(
        self, start: int, stop: int, skipped: SkippedPositions = NOTHING_SKIPPED
    ) -> Iterator[tuple[NDArray[np.int64], EpochRows]]:
        """Yield positions and the samples at them, some at a time.

        Args:
            start: First position, of those that are not skipped.
            stop: End of them.
            skipped: Positions to leave out.
        """
        size = max(1, round(_AT_ONCE / self.rows_per_entry))
        for first in range(start, stop, size):
            positions = skipped.positions(np.arange(first, min(first + size, stop)))
            yield positions, self.rows(positions)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunDescription:
    """A run of one stage."""

    dataset: StreamingDataset
    run: Run
    """The meaning of its cursors."""

    @property
    def catalog(self) -> Catalog:
        """The shards and samples of its streams."""
        return catalog_of(self.dataset)

    @cached_property
    def packing(self) -> AnyPackSettings | None:
        """Settings of packs; None unless documents are packed."""
        packer = self.run.order.packer
        return None if packer is None else packer.pack.settings()

    @property
    def unit(self) -> str:
        """What a batch consists of: "sample", "pack", or "group" within a budget of tokens."""
        return "sample" if self.packing is None else "group" if isinstance(self.packing, BudgetSettings) else "pack"

    @property
    def item(self) -> str:
        """What a dataset consists of: "document" if these are packed, else "sample"."""
        return "sample" if self.packing is None else "document"

    @cached_property
    def weights_in(self) -> str:
        """What the weights of its streams count: "tokens", "documents" that are packed, or "samples"."""
        mixture = self.run.order.mixture
        in_tokens = mixture is not None and any(mixture.tokens_of(name) is not None for name in mixture.plan.streams)
        return "tokens" if in_tokens else f"{self.item}s"

    @cached_property
    def configured(self) -> list[dict[str, tuple[float, float]]]:
        """Configured shares of the streams at the beginning and the end of each phase, or of the only one.

        Empty if no weights are configured.
        """
        plan, order = self.run.order.plan, self.run.order
        if plan is None:
            if all(weight.proportion is None for weight in run_state_of(self.dataset).request.weights):
                return []
            shares_of_epoch = zip(self.catalog.stream_names, order.weights.proportion, strict=True)
            return [{name: (share, share) for name, share in shares_of_epoch}]
        shares = []
        for phase in plan.phases:
            begin, end = (_parts_of_sum(dict(mix)) for mix in (phase.begin, phase.end))
            shares.append({name: (begin.get(name, 0.0), end.get(name, 0.0)) for name in begin})
        return shares

    @cached_property
    def configured_of_epoch(self) -> dict[str, float]:
        """Configured share of each stream, if it is the same in the whole epoch; else empty."""
        if len(self.configured) != 1 or any(begin != end for begin, end in self.configured[0].values()):
            return {}
        return {name: share for name, (share, _) in self.configured[0].items()}

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases of an epoch; empty without a schedule."""
        plan = self.run.order.plan
        return () if plan is None else tuple(phase.name for phase in plan.phases)

    @property
    def has_cut_phase(self) -> bool:
        """Whether a phase was ended early, so that the run ends with its first epoch."""
        mixture = self.run.order.mixture
        return mixture is not None and mixture.is_cut

    def epoch(self, cursor: Cursor, skipped: SkippedPositions | None = None) -> EpochDescription:
        """Describe the epoch of a cursor, from there on.

        Args:
            cursor: A normalised cursor.
            skipped: Positions that are left out; None for those that the run skips.
        """
        read = self.run.epoch(cursor)
        read = read if skipped is None else replace(read, skipped=skipped)
        return EpochDescription(run=self, read=read)

    def streams_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the stream of each sample id, counted in stream order."""
        return np.searchsorted(np.asarray(self.catalog.first_ids), ids, side="right") - 1

    def read_before(
        self, cursor: Cursor, skipped: SkippedPositions, *, whole: bool = False, most: int | None = None
    ) -> StreamsRead:
        """Count what an epoch has read of each stream before a cursor.

        A packed document counts once, where it begins; its tokens where they are.

        Args:
            cursor: A normalised cursor.
            skipped: Positions of the epoch that were left out.
            whole: Whether to count the whole epoch instead.
            most: Positions after which the trainer ended that epoch; None if it read it to its end.

        Returns:
            Counts by stream; also of streams that are gone, if they were read by mixture steps that are finished.
        """
        order, names, first = self.run.order.of_epoch(cursor.epoch), self.catalog.stream_names, 0
        plan = None if order.mixture is None else order.mixture.plan_of(cursor.epoch)
        has_tokens = self.catalog.lengths is not None and (plan is None or {*plan.streams} <= {*names})
        counts, tokens = dict.fromkeys(names, 0), dict.fromkeys(names, 0) if has_tokens else None
        is_changed = bool(order.is_composed or order.steps or skipped.runs or most is not None)
        is_scanned = has_tokens or self.packing is not None or is_changed
        if whole and not is_scanned:
            drawn = order.weights.choose if plan is None else plan.drawn[-1].tolist()
            return StreamsRead(dict(zip(names if plan is None else plan.streams, drawn, strict=True)), None)
        if plan is not None and not is_scanned:
            # Finished steps are known without their order, and without streams that are gone.
            step = int(np.searchsorted(plan.stops, cursor.sample_in_epoch, side="right"))
            counts |= dict(zip(plan.streams, plan.drawn[step].tolist(), strict=True))
            first = int(plan.stops[step - 1]) if step else 0
        epoch = self.epoch(cursor)
        stop = skipped.kept_before(len(epoch.sequence) if whole else min(cursor.sample_in_epoch, len(epoch.sequence)))
        stop = stop if most is None else min(stop, most)
        for _, rows in epoch.chunks(first, stop, skipped):
            streams = self.streams_of(rows.ids)
            for name, count in zip(names, _sums(streams, rows.first_parts, len(names)), strict=True):
                counts[name] += count
            if tokens is not None:
                for name, count in zip(names, _sums(streams, rows.tokens, len(names)), strict=True):
                    tokens[name] += count
        return StreamsRead(counts, tokens)

    def report(self) -> dict[str, Any]:
        """Return what an epoch reads of each stream as plain values; selections are evaluated if they are not cached.

        With a schedule it has ``schedule``, and with packing ``packs`` of the first epoch.
        """
        weights = self.run.order.weights
        tokens = self._tokens_report(dict(zip(self.catalog.stream_names, weights.repeat, strict=True)))
        shares = zip(self.dataset.streams.items(), weights.choose, weights.proportion, weights.repeat, strict=True)
        streams = [
            {
                "stream": name,
                "stored": stream.num_stored,
                "selected": stream.num_selected,
                "drawn": drawn,
                "share": share,
                "weight": self.configured_of_epoch.get(name),
                "passes": passes,
                **tokens.get(name, {}),
                "only": stream.selection.in_words(),
                "joins": [
                    {
                        "join": join.name,
                        "how": join.config.in_words(),
                        "stored": join.index.num_samples,
                        "columns": list(join.names.values()),
                    }
                    for join in stream.joined
                ],
            }
            for (name, stream), drawn, share, passes in shares
        ]
        schedule = {"schedule": self.schedule_report()} if self.phases else {}
        epoch = {"epoch_size": weights.epoch_size, "weights_in": self.weights_in}
        packer = self.run.order.packer
        if packer is None or self.packing is None:
            return {**epoch, "streams": streams, **schedule}
        settings = self.packing
        if isinstance(settings, BudgetSettings):
            facts = {"method": "budget", "tokens_per_group": settings.tokens}
            names: tuple[str, ...] = ("buckets", "window", "longer")
        else:
            facts = {}
            names = ("method", "capacity", *(() if settings.method == "concat" else ("window", "longer")))
        facts |= {name: getattr(settings, name) for name in names}
        facts["lengths"] = packer.pack.request().in_words()
        packs = {**facts, **self.packs_of(self.run.epoch(Cursor(0, 0)).sequence)}
        return {**epoch, "streams": streams, **schedule, "packs": packs}

    def _tokens_report(self, repeats: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return the tokens of each stream, and its share of all; empty if lengths are not known.

        Args:
            repeats: Passes over each stream; tokens are those of whole passes times these, and exact where weights
                count tokens.
        """
        lengths = self.catalog.lengths
        if lengths is None:
            return {}
        sizes = dict(zip(self.catalog.stream_names, lengths.num_tokens, strict=True))
        of_mixture = None if self.run.order.mixture is None else self.run.order.mixture.tokens_of
        drawn = dict(zip(self.catalog.stream_names, self.run.order.weights.choose, strict=True))
        tokens = {}
        for name in repeats:
            counted_passes = None if of_mixture is None else of_mixture(name)
            about = round(repeats[name] * sizes[name])
            tokens[name] = about if counted_passes is None else counted_passes.before(drawn[name])
        return {
            name: {"tokens": count, "token_share": count / max(sum(tokens.values()), 1)}
            for name, count in tokens.items()
        }

    @staticmethod
    def packs_of(sequence: Batched) -> dict[str, Any]:
        """Return the numbers of documents, tokens and packs of an epoch, and the share of their room that is filled."""
        assert isinstance(sequence, PackedEpoch), "documents are packed"
        return {
            "documents": sequence.num_documents,
            "tokens": sequence.num_tokens,
            "packs": len(sequence),
            "fill": sequence.num_tokens / max(1, sequence.token_room),
        }

    def schedule_report(self) -> list[dict[str, Any]]:
        """Return what each phase of the first epoch reads of each stream, as plain values."""
        mixture = self.run.order.mixture
        assert mixture is not None, "the run has a schedule"
        plan, report, read = mixture.plan, [], 0
        stops, steps = [0, *plan.phase_stops.tolist()], [-1, *plan.last_steps.tolist()]
        for number, phase in enumerate(plan.phases):
            before, until = plan.drawn_by(number - 1) if number else {}, plan.drawn_by(number)
            added = [name for name in until if until[name] > before.get(name, 0) and name not in dict(phase.begin)]
            size, begin, end = stops[number + 1] - stops[number], dict(phase.begin), dict(phase.end)
            streams = list[dict[str, Any]]()
            for name in [*begin, *added]:
                drawn_by_end = until.get(name, 0)
                drawn = drawn_by_end - before.get(name, 0)
                is_here = name in self.catalog.stream_names and name in plan.streams
                streams.append(
                    {
                        "stream": name,
                        "begin_share": begin.get(name, 0) / sum(begin.values()),
                        "end_share": end.get(name, 0) / sum(end.values()),
                        "drawn": drawn,
                        "share": drawn / size,
                        "drawn_by_end": drawn_by_end,
                        "passes_by_end": mixture.repeats(name, drawn_by_end) if is_here else None,
                        "max_repeats": dict(phase.max_repeats).get(name),
                    }
                )
                tokens = mixture.tokens_of(name)
                if tokens is not None:
                    streams[-1]["tokens"] = tokens.before(drawn_by_end) - tokens.before(drawn_by_end - drawn)
            in_tokens = {}
            if "tokens" in streams[0]:
                total = max(sum(stream["tokens"] for stream in streams), 1)
                streams = [{**stream, "token_share": stream["tokens"] / total} for stream in streams]
                read += sum(stream["tokens"] for stream in streams)
                in_tokens = {"ends_in_tokens": read}
            report.append(
                {
                    "phase": phase.name,
                    "begins": stops[number],
                    "ends": stops[number + 1],
                    **in_tokens,
                    "ended_at": phase.cut,
                    "steps": steps[number + 1] - steps[number],
                    "streams": streams,
                }
            )
        return report

    def mixed_columns(self) -> str | None:
        """Return the warning about samples of different columns, if torch's default collate would meet such."""
        if not self.dataset._are_as_stored():
            return None
        shares, method = self.run.order.weights.choose, self.run.settings.batching_method
        return planner_of(self.dataset).mixed_columns(shares, method)

    def read_again(self, trainer: Mapping[str, Any], first_step: int, batch_size: int) -> str | None:
        """Return why training is refused at its start because it would read a phase again that was ended early.

        Args:
            trainer: The trainer's settings.
            first_step: Step at which training begins.
            batch_size: Samples per batch on each rank.
        """
        mixture = self.run.order.mixture
        reads_once = ("overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs")
        if mixture is None or not mixture.is_cut or any(trainer.get(name) for name in reads_once):
            return None
        steps, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
        if epochs is not None and 0 <= epochs <= 1:
            return None
        cursor = run_state_of(self.dataset).next_cursor()
        samples = self.run.machines.num_ranks * batch_size * (trainer.get("accumulate_grad_batches") or 1)
        left = -(-(mixture.plan.epoch_size - cursor.sample_in_epoch) // samples)
        ends_before = steps is not None and 0 <= steps <= first_step + left
        return None if ends_before else str(mixture.read_again_error(cursor.epoch + 1))

    @cached_property
    def shard_bytes(self) -> tuple[ShardBytes, NDArray[np.int64]]:
        """Bytes of each shard, those of joined datasets included, and its stream, counted in stream order."""
        catalog, configs = self.catalog, list(cache_configs(self.dataset).values())
        streams, sizes = [catalog.stream_of_shard], list[ShardBytes]()
        for config, index in zip(configs, catalog.indexes, strict=True):
            sizes.append(stored_bytes(index.shards, in_place=is_in_place(config), keep_zip=config.keep_zip))
        for stream, joins in () if catalog.joins is None else catalog.joins.streams.items():
            for join in joins.all:
                shards, keep_zip = join.index.shards, configs[stream].keep_zip
                sizes.append(stored_bytes(shards, in_place=join.cache.reads_in_place, keep_zip=keep_zip))
                streams.append(np.full(len(shards), stream))
        fields = ("fetched", "kept", "making")
        of_all = ShardBytes(*(np.concatenate([getattr(size, field) for size in sizes]) for field in fields))
        return of_all, np.concatenate(streams)

    def is_cached(self, shard: int) -> bool:
        """Return whether a shard is on this node."""
        return source_of(self.dataset).has(shard)

    def fixed_bytes(self) -> int:
        """Return the bytes of indexes and selections in its cache directories, which are never evicted."""
        return source_of(self.dataset).quota.fixed_bytes()

    def order_bytes(self, num_epochs: int) -> int:
        """Return the bytes of the orders that a node has drawn at a time: of the part being read, and of the next.

        Args:
            num_epochs: Epochs that are read.
        """
        order = self.run.order
        first = order.source.shuffled(0, 0)
        if not first.is_drawn:
            return 0
        if order.plan is None:
            return len(first) * first.dtype.itemsize * min(2, max(1, num_epochs))
        return 2 * int(np.diff(order.plan.stops, prepend=0).max()) * first.dtype.itemsize

    def lengths_bytes(self, epoch: EpochDescription) -> int:
        """Return the bytes of the lengths of documents and of the plan of an epoch's packs; 0 without packing."""
        if self.packing is None:
            return 0
        lengths = 4 * sum(index.num_samples for index in self.catalog.indexes)
        return lengths + 4 * len(epoch.sequence) + round(2 * len(epoch.sequence) * epoch.rows_per_entry)

    def gathered_bytes(self, loader: StreamingDataLoader, batch_size: int) -> int:
        """Return the bytes of a batch if workers gather several batches at once; 0 if they read them one by one."""
        source, packing = source_of(self.dataset), run_state_of(self.dataset).request.pack
        if loader.collate_fn is not default_collate or not self.dataset._are_as_stored():
            return 0
        if packing is None:
            return round(batch_size * float(np.mean(self.catalog.mean_sample_bytes))) if source.may_be_plain() else 0
        if not isinstance(packing, PackingConfig) or not packing.is_flat or not source.may_be_joined():
            return 0
        types = ColumnTypes(packing, lambda: stored_types(packing, self.catalog))
        return batch_size * packing.capacity * sum(types.unseen(name).itemsize for name in packing.columns)


def describe_run(
    dataset: StreamingDataset,
    trainer: Mapping[str, Any] | None = None,
    position: SavedPosition | None = None,
    checkpoint: str | None = None,
) -> RunDescription:
    """Describe the run that reads a dataset.

    Args:
        dataset: The dataset; its settings decide the order.
        trainer: The trainer's settings, for nodes and ranks. None: nodes, ranks and batch size of ``position``.
        position: Position that the run resumes from; None from the start.
        checkpoint: Path of its file, for errors.

    Raises:
        ConfigError: The dataset cannot be read like this.
        StateMismatchError: The position is of other data or another order.
        StorageError: An index could not be fetched.
    """
    if trainer is not None:
        nodes, ranks = int(trainer.get("num_nodes") or 1), None
        if dataset.replication is None:
            by_strategy = strategy_ranks(trainer, nodes)
            dataset.replication, ranks = by_strategy.replication, by_strategy.ranks_per_node
        dataset.world = World(num_nodes=nodes, ranks_per_node=ranks or count_ranks(trainer)[0], rank=0)
    if position is not None:
        load_position(dataset, position, checkpoint)
    if trainer is not None or position is None:
        return RunDescription(dataset=dataset, run=run_state_of(dataset).on(dataset_world(dataset)))
    world, batch_size = _geometry_of(position)
    return RunDescription(dataset=dataset, run=run_state_of(dataset).on(world, batch_size))


def only_loader(module: Any, data: str, option: str) -> StreamingDataLoader:
    """Return the loader of a set-up data module for its data of one name, like "train".

    Args:
        module: The data module.
        data: The name of its data.
        option: Option for errors.

    Raises:
        ConfigError: The data module returns something else.
    """
    loader = getattr(module, f"{data}_dataloader")()
    if isinstance(loader, Mapping) and len(loader) == 1:
        loader = next(iter(loader.values()))
    if not isinstance(loader, StreamingDataLoader):
        returned = f"this data module's {data}_dataloader returns a {type(loader).__name__}"
        raise ConfigError(f"the tool needs one StreamingDataLoader, but {returned}", option=option)
    return loader


def load_position(
    reader: StreamingDataset | StreamingDataLoader, position: SavedPosition, checkpoint: str | None
) -> None:
    """Let a dataset or loader resume from a position; errors name the file of the checkpoint."""
    dataset = reader if isinstance(reader, StreamingDataset) else reader.dataset
    run_state_of(dataset).set_labels(checkpoint=checkpoint)
    reader.load_state_dict(position.as_state())


def _geometry_of(position: SavedPosition) -> tuple[World, int]:
    """Return nodes, ranks and batch size of the run that saved a position, as far as its order depends on them."""
    geometry = position.geometry or BatchGeometry(
        num_nodes=position.initial_physical_nodes or 1, ranks_per_node=1, batch_size=1
    )
    world = World(num_nodes=geometry.num_nodes, ranks_per_node=geometry.ranks_per_node, rank=0)
    return world, geometry.batch_size


def catalog_of(dataset: StreamingDataset) -> Catalog:
    """Return the shards and samples of a dataset's streams; its indexes are read first."""
    return source_of(dataset).catalog


def saved_run(run: Run, position: SavedPosition) -> Run:
    """Return a run as it was up to a saved position: with the ranges that it skipped then, and not those of now."""
    spans = position.skipped.items()
    placed = {batches: span for name, span in spans for batches in parse_batch_ranges([name], "skipped")}
    return replace(run, skip=tuple(placed), placed=placed, located=None)


def packs_documents(dataset: StreamingDataset) -> bool:
    """Return whether a dataset packs documents, without reading an index."""
    return run_state_of(dataset).request.pack is not None


# Samples that the epochs of a saved position have read of each stream.


def saved_packing(packing: SavedPacking) -> Packing | None:
    """Return the options of packing in a state; None if a function counts the lengths, which a state only names."""
    try:
        call = ast.parse(f"lengths({packing.lengths})", mode="eval").body
        keywords = call.keywords if isinstance(call, ast.Call) else ()
        lengths = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not as in_words of LengthsRequest writes columns
        return None
    if not lengths or not lengths.keys() <= {"column", "dtype", "lengths"}:
        return None
    kind = TokenBudget if packing.option == TokenBudget.option else PackingConfig
    options = {name: value for name, value in packing.settings.items() if name != "tokenize"}
    return kind(**options, **{"column": lengths.get("lengths"), **lengths})


def read_by_data(position: SavedPosition, places: Mapping[str, str], options: Mapping[str, Any]) -> list[StreamsRead]:
    """Count what each epoch up to a position has read of each stream, from the indexes of the data.

    Args:
        position: A position that lists its streams, of a run without schedule and selections; if it packs documents,
            their lengths are in columns.
        places: Directory or URL of every stream.
        options: Arguments of their store's filesystem.

    Raises:
        ConfigError: ``places`` has other streams than the position.
        StateMismatchError: The data is not that of the position.
    """
    assert position.fingerprint is not None, "it lists its streams"
    listed, order = position.fingerprint.streams, position.fingerprint.order
    if places.keys() != listed.keys():
        raise ConfigError(
            f"the state has the streams {', '.join(listed)}",
            hint="give --data NAME=PLACE for each of them",
            option="--data",
        )
    # Without the epoch's size, which is the sum of the samples drawn from all streams.
    settings = {name: value for name in _ORDER if (value := getattr(order, name)) is not None}
    packing, (world, batch_size) = position.fingerprint.packing, _geometry_of(position)
    if packing is not None:
        settings[packing.option] = saved_packing(packing)
    with TemporaryDirectory() as cache:
        streams = {
            name: Stream(
                remote=places[name],
                # This node may have lengths in its cache.
                local=str(Path(cache) / str(number)) if packing is None else None,
                choose=stream.samples_drawn,
                storage={"options": options},
            )
            for number, (name, stream) in enumerate(listed.items())
        }
        return _read_before(StreamingDataset(streams=streams, batch_size=batch_size, world=world, **settings), position)


def read_by_config(saved: SavedLoader, files: Sequence[str]) -> list[StreamsRead]:
    """Count what each epoch up to a position has read of each stream, by the configuration of its run.

    Args:
        saved: A position.
        files: Files of the configuration; a later one overrides an earlier one.

    Returns:
        Counts of each epoch, as :meth:`RunDescription.read_before` returns them; the last is under way.

    Raises:
        ConfigError: The configuration has no data to train on, or the data cannot be read like this.
        StateMismatchError: The configuration is of another run.
    """
    written = read_run_files(files, {})
    data, limit, machines = written.datamodule, written.trainer.get("limit_train_batches"), None
    if data.drop_last or limit not in (None, 1.0) or type(limit) is int:
        ranks, left_over = divmod(saved.global_batch or 0, data.batch_size_of("train"))
        nodes = saved.position.initial_physical_nodes or 1
        nodes = 1 if ranks % nodes else nodes
        if ranks and not left_over:
            machines = Machines(
                num_nodes=nodes,
                ranks_per_node=ranks // nodes,
                batch_size=data.batch_size_of("train"),
                drop_last=data.drop_last,
            )
        else:
            left_out = "what drop_last and limit_train_batches left out"
            console.print_note("state", f"epochs before this one are counted whole, with {left_out}")
    dataset = data.build_dataset("train", data.configs["train"])
    return _read_before(dataset, saved.position, machines, 1.0 if limit is None else limit)


def _read_before(
    dataset: StreamingDataset, position: SavedPosition, ended_by: Machines | None = None, limit: int | float = 1.0
) -> list[StreamsRead]:
    """Count each epoch; earlier ones whole, or the batches that machines read within the limit of the trainer."""
    try:
        described = describe_run(dataset, position=position)
        run = saved_run(described.run, position)
        begins, reads = run.normalise(position.cursor), list[StreamsRead]()
        past = described if ended_by is None else RunDescription(dataset=dataset, run=run.on(ended_by))
        for epoch in range(begins.epoch):
            most = None
            if ended_by is not None:
                partition = past.run.epoch(Cursor(epoch, 0)).partition
                batches = TrainProgress(limit=limit).limited(partition.num_batches(ended_by.drop_last))
                most = batches * partition.geometry.global_batch_size
            reads.append(past.read_before(Cursor(epoch, 0), run.skipped(epoch), whole=True, most=most))
        return [*reads, described.read_before(begins, run.skipped(begins.epoch))]
    finally:
        dataset.close()


# Nodes, ranks and cache directories of a configured run.


class StrategyRanks(NamedTuple):
    """Ranks of a run by the strategy of its trainer."""

    replication: int | None = None
    """Consecutive ranks that read the same samples; None if each reads its own."""
    ranks_per_node: int | None = None
    """None if the strategy does not say."""
    assumed: str | None = None
    """An assumption to report."""


def strategy_ranks(trainer: Mapping[str, Any], nodes: int, ranks_per_node: int | None = None) -> StrategyRanks:
    """Return which ranks read the same samples by the strategy in a configuration, which is not instantiated.

    Args:
        trainer: The trainer's settings.
        nodes: Nodes of the run.
        ranks_per_node: Requested ranks on each node; None for those of the trainer.

    Raises:
        ConfigError: The size of its mesh is unknown, or does not match the ranks of the run.
    """
    strategy = trainer.get("strategy")
    if not isinstance(strategy, Mapping):
        return StrategyRanks()  # with strategies given by name, each rank reads its own samples
    path = str(strategy.get("class_path"))
    module, _, name = path.rpartition(".")
    if name != "ModelParallelStrategy":  # the only one of Lightning's whose ranks share samples
        if not module or module.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return StrategyRanks()
        return StrategyRanks(
            assumed=f"which ranks of trainer.strategy={path} read the same samples is not known; taken to be none, "
            "else set data.train.replication"
        )
    configured, left_open = count_ranks(trainer)
    ranks = ranks_per_node or (configured if left_open is None else None)
    sizes = []
    # By default the strategy puts the ranks of each node into a group.
    for option, default in (("data_parallel_size", nodes), ("tensor_parallel_size", ranks)):
        size = (strategy.get("init_args") or {}).get(option, "auto")
        why, hint = f"must be a number of ranks, but is {size!r}", None
        if size == "auto" and default is None:
            why, hint = "depends on the number of devices, which is not set either", "set it, or trainer.devices"
        size = default if size == "auto" else size
        if type(size) is not int or size < 1:
            raise ConfigError(f"{option} of trainer.strategy={name} {why}", hint=hint, option="trainer.strategy")
        sizes.append(size)
    data, tensor = sizes
    if data * tensor % nodes or (ranks is not None and data * tensor != nodes * ranks):
        has = counted(nodes, "node") if ranks is None else f"{nodes} x {ranks} ranks"
        raise ConfigError(
            f"trainer.strategy={name} has a mesh of {data} (data parallel) x {tensor} (tensor parallel) ranks, and the "
            f"run has {has}",
            hint="give trainer.num_nodes and trainer.devices, or the sizes of the mesh, so that they agree, or "
            "data.train.replication, which goes before the mesh",
            option="trainer.strategy",
        )
    return StrategyRanks(replication=tensor if tensor > 1 else None, ranks_per_node=data * tensor // nodes)


def cache_configs(dataset: StreamingDataset) -> dict[str, CacheConfig]:
    """Return the location of each stream and of its cache directory, by stream name."""
    return {name: stream.cache_config() for name, stream in dataset.streams.items()}


def index_bytes(dataset: StreamingDataset) -> int:
    """Return the bytes of the indexes that a node downloads; 0 if all data is read in place."""
    configs = [config for config in cache_configs(dataset).values() if not is_in_place(config)]
    paths = (config.cache_directory() / INDEX_BASENAME for config in configs)
    return sum(path.stat().st_size for path in paths if path.exists())


def is_in_place(cache: CacheConfig) -> bool:
    """Return whether a stream is read in its own directory, so that no shard is downloaded."""
    return cache.source_directory() is not None
