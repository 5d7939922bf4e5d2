"""What a run reads, for its pages: its streams, what each stage draws, its steps, and where a checkpoint stands.

Neither the run's caches nor its data are written to. Selections, lengths and indexes of ids that are kept in the run's
caches are read there.
"""

from __future__ import annotations

import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.config import SELECTIONS_BASENAME
from lightning_streaming.cache.selection_files import selection_path
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.selection.bitmap import Selection
from lightning_streaming.selection.document_lengths import map_lengths
from lightning_streaming.selection.evaluate import is_known
from lightning_streaming.selection.id_index import are_ids_known
from lightning_streaming.selection.joins import JoinedDataset
from lightning_streaming.tools.commands import read_run_files
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.runs import stream_counts
from lightning_streaming.tools.runs.checkpoints import Places, find_places, find_state_file
from lightning_streaming.tools.runs.positions import StreamSeen, seen_by_fingerprint
from lightning_streaming.tools.runs.stages import inspected, packs_in_words
from lightning_streaming.tools.runs.trace_run import Read, positions_before, reads_of_sample, reads_of_step
from lightning_streaming.tools.runs.training_run import TracedRun, run_on
from lightning_streaming.tools.stored.sample_reader import TooMuch
from lightning_streaming.tools.stored.stored_dataset import StoredDataset

_MOST_READS = 20_000
"""Samples of steps that are shown; once there are more, no further step is looked at, or only one rank of a step."""
_MOST_EPOCHS = 20
"""Epochs of packs in which a step is looked for."""
_GRACE = 1.0
"""Seconds to wait for a thread that works at a page when nobody needs it any more."""
_EPOCHS = 3
"""In which a sample is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStream:
    """A stream of a stage."""

    stage: str
    name: str
    place: StoredDataset
    is_named: bool
    """Whether the configuration names it; the only one of a stage need not be."""
    only: str
    """Which of its samples are read, in words; empty for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewedStep:
    """What a step reads."""

    run: TracedRun
    number: int
    rank: int | None
    """Only what this rank reads; None for all."""
    reads: Sequence[Read]
    """By batch, rank and place."""
    has_previous: bool
    """Whether the run has a step before it, since the checkpoint."""
    has_next: bool

    @property
    def streams(self) -> Sequence[str]:
        """The names of all streams of the run."""
        return self.run.catalog.stream_names


class ViewedRun:
    """A configured run. What takes time is worked out when it is first asked for; by one thread at a time.

    Args:
        asked: ``config``, ``set``, ``checkpoint``, ``loader``, ``nodes``, ``ranks_per_node`` and ``accumulate``.
        written: What the configuration files say.
        places: Where the checkpoint stands; None without one.
    """

    def __init__(self, asked: Namespace, written: Any, places: Places | None) -> None:
        self._asked, self._written, self.places = asked, written, places
        self.lock = threading.RLock()
        self.configs = {stage: one for stage, one in written.datamodule.configs.items() if one is not None}
        self._stages: dict[str, dict[str, Any]] = {}
        self._traced: TracedRun | None = None

    @classmethod
    def read(cls, asked: Namespace) -> ViewedRun:
        """Read configuration and checkpoint.

        Raises:
            ConfigError: The configuration has no data, or cannot be read.
            StateError: The checkpoint has no place to go on from.
        """
        written = read_run_files(asked.config, dict(asked.set), stage=None)
        if all(one is None for one in written.datamodule.configs.values()):
            raise ConfigError(
                f"{', '.join(asked.config)}: there is no data",
                hint="write data.train, data.val, data.test or data.predict",
                option="data",
                path=", ".join(asked.config),
            )
        places = None
        if asked.checkpoint is not None:
            places = find_places(find_state_file(Path(asked.checkpoint)).peek(), asked.checkpoint)
        told = (
            ("num_nodes", asked.nodes),
            ("devices", asked.ranks_per_node),
            ("accumulate_grad_batches", asked.accumulate),
        )
        changes = {name: value for name, value in told if value is not None}
        return cls(asked, replace(written, trainer={**written.trainer, **changes}), places)

    @property
    def shown(self) -> str:
        """The configuration, as it was typed."""
        return ", ".join(self._asked.config)

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint, as it was typed."""
        path: str | None = self._asked.checkpoint
        return path

    def close(self) -> None:
        """Let go of what is open; of what a thread still works at, nothing."""
        if self.lock.acquire(timeout=_GRACE):
            try:
                if self._traced is not None:
                    self._traced.loader.close()
            finally:
                self.lock.release()

    def move_into_own_caches(self) -> None:
        """Within ``own_caches``: read everything by way of them, and see there what is kept in the run's caches."""
        kept = {
            where: _kept_files(directory) for stage in self.configs for where, directory in self._directories(stage)
        }
        for stage, config in self.configs.items():
            self._written.datamodule.configs[stage] = self.configs[stage] = _without_directories(config)
        for stage in self.configs:
            for where, directory in self._directories(stage):
                _link(kept[where], directory / SELECTIONS_BASENAME)

    def streams(self) -> list[RunStream]:
        """The streams of all stages."""
        return [
            RunStream(
                stage=stage,
                name=name,
                place=StoredDataset(
                    location=config.remote or str(config.local),
                    options=config.storage_options,
                    format=config.format,
                    block_length=config.block_length,
                ),
                is_named=bool(self.configs[stage].streams),
                only=self._dataset(stage).streams[name].selection.in_words(),
            )
            for stage in self.configs
            for name, config in self._cache_configs(stage).items()
        ]

    def unread(self, stage: str) -> TooMuch | None:
        """What must be read of stores, shard by shard, to know the order of a stage; None if it is known without.

        Raises:
            StreamingError: An index cannot be read, or a condition cannot be one.
        """
        with self.lock:
            is_known = stage in self._stages or (stage == "train" and self._traced is not None)
            if is_known or stage not in self.configs:
                return None
            streams = self._dataset(stage).streams
            names = [name for name, stream in streams.items() if not self._is_known(self.configs[stage], stream)]
        if not names:
            return None
        return TooMuch(
            words=f"which samples of {', '.join(map(printable_name, names))} are read is not known yet: columns of all "
            "their shards must be read for that, and shards that are not Parquet fetched whole, into a temporary "
            "directory. Make it ahead with lightning-streaming select or lengths, or ask for it here"
        )

    def _is_known(self, config: Any, stream: Any) -> bool:
        """Whether the order is known, as far as a stream goes, without a look at shards of a store."""
        packing = config.documents()
        for join, source in stream.join_sources().items():
            if source.asked.key is None or source.cache.reads_in_place:
                continue
            joined = JoinedDataset(join, source, source.cache.read_index(), 0, config.columns)
            if joined.names and not are_ids_known(source.asked.key, joined.index, source.cache):
                return False
        cache = ShardCache(stream.cache_config())
        if cache.reads_in_place or (stream.selection.is_all and packing is None):
            return True
        index = cache.read_index()
        if not is_known(stream.selection, index, cache):
            return False
        if packing is None:
            return True
        path = selection_path(cache.directory.path, packing.request().key(cache.data_version(index)))
        return map_lengths(path, index.num_samples) is not None

    def stage(self, stage: str) -> Mapping[str, Any]:
        """What is reported of a stage, as ``inspect --config`` does it.

        Raises:
            StreamingError: As for ``inspect_run``.
        """
        with self.lock:
            if stage not in self._stages:
                config, checkpoint = self.configs[stage], self.checkpoint
                self._stages[stage] = inspected(stage, config, self._written, checkpoint, self._asked.loader)
            return self._stages[stage]

    def packs(self, stage: str) -> Sequence[tuple[str, str]]:
        """What :meth:`stage` reports of packs, in words; nothing where there are none."""
        found = self.stage(stage)
        return packs_in_words(found["packs"]) if "packs" in found else ()

    def traced(self) -> TracedRun:
        """The training, of which steps can be told.

        Raises:
            StreamingError: As for ``run_on``.
        """
        with self.lock:
            if self._traced is None:
                if "train" not in self.configs:
                    raise ConfigError(
                        f"{self.shown}: there is no data.train, so there are no steps of training",
                        option="data.train",
                        path=self.shown,
                    )
                module = read_run_files(self._asked.config, dict(self._asked.set)).datamodule
                module.configs.update({stage: self.configs.get(stage) for stage in module.configs})
                self._traced = run_on(module, self._written.trainer, self._asked)
            return self._traced

    def selection(self, stage: str, name: str) -> Selection | None:
        """Which samples of a training stream are read; None for all.

        Raises:
            StreamingError: As for :meth:`traced`.
        """
        with self.lock:
            catalog = passes_of(self.traced().loader.dataset).catalog if stage == "train" else self._catalog(stage)
            found: Selection | None = catalog.selections[catalog.stream_names.index(name)]
            return found

    def seen(self, loader: str) -> list[StreamSeen]:
        """What was read of each stream before a checkpoint, as far as it is known.

        Args:
            loader: Whose place.

        Raises:
            StreamingError: The checkpoint is of another run than the configuration.
        """
        assert self.places is not None, "there is a checkpoint"
        position = self.places.loaders[loader].position
        seen = seen_by_fingerprint(position)
        is_of_run = self._asked.loader == loader or len(self.places.loaders) == 1
        if not is_of_run or all(one.this_epoch is not None for one in seen) or self.unread("train") is not None:
            return seen
        with self.lock:
            traced = self.traced()
            begins, skipped = traced.begins, self.places.loaders[loader].skipped(traced.begins.epoch)
            counts = stream_counts.count_in_run(traced.order, begins, skipped)
        return [replace(one, this_epoch=counts.get(one.name, 0)) for one in seen]

    def next_steps(self, step: int | None, steps: int, rank: int | None) -> dict[str, Any]:
        """What some steps read, batch by batch.

        Args:
            step: The first, as the trainer counts; None for the one that the run begins with.
            steps: How many; fewer where the run ends before.
            rank: Only what this rank reads; None for all.

        Returns:
            ``batches``, each with its ``step``, ``epoch``, ``batch`` and its ``reads``; ``streams``, with how many
            samples of each are in them, and ``share``, what an epoch has of them; ``is_cut``, whether steps are left
            out because those before have many samples; and facts of the run.

        Raises:
            ConfigError: The run has no such step or rank.
        """
        with self.lock:
            traced = self.traced()
            first = traced.steps.first_step if step is None else step
            _check_near(traced, first)
            batches: dict[tuple[int, int, int], list[Read]] = {}
            is_cut = False
            for one in range(first, first + steps):
                try:
                    reads = reads_of_step(traced, one, rank)
                except ConfigError:
                    if one == first:
                        raise
                    break  # the run ends there
                for read in reads:
                    batches.setdefault((one, read.key.epoch, read.batch), []).append(read)
                if sum(map(len, batches.values())) > _MOST_READS and one + 1 < first + steps:
                    is_cut = True
                    break
            weights, names = traced.order.order.weights, traced.order.order.catalog.stream_names
        counts = Counter(read.key.stream for reads in batches.values() for read in reads)
        return {
            "first": first,
            "steps": steps,
            "is_cut": is_cut,
            "rank": rank,
            "run": traced,
            "begins_at": traced.steps.first_step,
            "batches": [
                {"step": at, "epoch": epoch, "batch": batch, "reads": reads, "counts": _counts(names, reads)}
                for (at, epoch, batch), reads in batches.items()
            ],
            "streams": [
                {"name": name, "count": counts[name], "share": share}
                for name, share in zip(names, weights.proportion, strict=True)
            ],
        }

    def step(self, number: int | None, rank: int | None) -> ViewedStep:
        """What one step reads.

        Args:
            number: As the trainer counts; None for the step that the run begins with.
            rank: Only what this rank reads; None for all, or for the first where a step has very many samples.

        Raises:
            ConfigError: The run has no such step or rank.
        """
        with self.lock:
            traced = self.traced()
            first = traced.steps.first_step
            number = first if number is None else number
            _check_near(traced, number)
            reads = reads_of_step(traced, number, rank, _MOST_READS)
            if rank is None and len(reads) > _MOST_READS:
                rank, reads = 0, [read for read in reads if read.rank == 0]
            try:
                traced.steps.find(number + 1)
                has_next = True
            except ConfigError:  # the run ends with this one
                has_next = False
            return ViewedStep(
                run=traced,
                number=number,
                rank=rank,
                reads=sorted(reads, key=lambda read: (read.batch, read.rank)),  # keeps the places in order
                has_previous=number > first,
                has_next=has_next,
            )

    def reads(self, stream: str, shard: int, index: int) -> list[Read]:
        """When the training reads a sample: all times in the first of some epochs that reads it.

        Raises:
            StreamingError: As for ``reads_of_sample``.
        """
        with self.lock:
            return reads_of_sample(self.traced(), stream, shard, index, _EPOCHS)

    def positions_before(self, stream: str, shard: int, index: int) -> list[int]:
        """Where the epoch of the checkpoint has read a sample before it; nothing without a checkpoint.

        Raises:
            StreamingError: As for :meth:`reads`.
        """
        if self.places is None:
            return []
        with self.lock:
            return positions_before(self.traced(), stream, shard, index)

    def _catalog(self, stage: str) -> Any:
        dataset = self._dataset(stage)
        try:
            return passes_of(dataset).catalog
        finally:
            dataset.close()

    def _dataset(self, stage: str) -> Any:
        return self._written.datamodule.build_dataset(stage, self.configs[stage])

    def _directories(self, stage: str) -> Iterator[tuple[tuple[str, ...], Path]]:
        """The cache directories of a stage's streams, and of what is joined with them, by stage and names."""
        for name, stream in self._dataset(stage).streams.items():
            yield (stage, name), stream.cache_config().cache_directory()
            for join, source in stream.join_sources().items():
                yield (stage, name, join), source.cache.directory.path

    def _cache_configs(self, stage: str) -> dict[str, Any]:
        return {name: stream.cache_config() for name, stream in self._dataset(stage).streams.items()}


def _check_near(run: TracedRun, step: int) -> None:
    """Refuse a step of packs that is far: how many steps an epoch of them has is known when it is planned."""
    of_first = max(1, len(run.steps.of_epoch(run.begins.epoch)))
    if run.packs is not None and step - run.steps.first_step > _MOST_EPOCHS * of_first:
        raise ConfigError(
            f"step {step:,} is far: epochs of packs are planned one by one, so only steps of the next {_MOST_EPOCHS} "
            "or so are shown",
            option="step",
        )


def _counts(names: Sequence[str], reads: Sequence[Read]) -> list[tuple[str, int]]:
    """Of the streams that are read how many samples, in the order of the streams."""
    counts = Counter(read.key.stream for read in reads)
    return [(name, counts[name]) for name in names if counts[name]]


def _kept_files(directory: Path) -> Sequence[Path]:
    return sorted((directory / SELECTIONS_BASENAME).glob("*.npy"))


def _link(files: Sequence[Path], directory: Path) -> None:
    """Show files in another directory: what is written beside them there is not written where they are."""
    if files:
        directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = directory / file.name
        if not link.is_symlink():
            link.symlink_to(file.absolute())


def _without_directories(config: Any) -> Any:
    """Data as it is asked for, but that what is fetched is kept in the default directories."""

    def moved(one: Any) -> Any:
        told: dict[str, Any] = {} if one.remote is None else {"local": None}
        joins = getattr(one, "join", None)
        if joins:
            told["join"] = {name: moved(join) for name, join in joins.items()}
        return replace(one, **told)

    streams = config.streams and {name: moved(stream) for name, stream in config.streams.items()}
    return replace(moved(config), streams=streams)
