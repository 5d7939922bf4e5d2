"""``lightning-streaming view --config``: what a run reads, for its pages. Imports torch, which a dataset does not need.

Neither the run's caches nor its data are changed. Selections, lengths and indexes of ids in the run's caches are read.
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
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.storage import StorageConfig
from lightning_streaming.selection.bitmap import Selection
from lightning_streaming.selection.document_lengths import map_lengths
from lightning_streaming.selection.evaluate import is_selection_cached
from lightning_streaming.selection.id_index import is_id_index_cached
from lightning_streaming.selection.joins import JoinedDataset
from lightning_streaming.tools.commands import read_run_files
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.runs.checkpoints import Places, StreamSeen, read_places, seen_by_fingerprint
from lightning_streaming.tools.runs.describe import catalog_of
from lightning_streaming.tools.runs.stages import inspected, packs_in_words
from lightning_streaming.tools.runs.trace_run import Read, positions_before, reads_of_sample, reads_of_step
from lightning_streaming.tools.runs.training_run import TracedRun, run_on
from lightning_streaming.tools.stored.sample_reader import TooMuch
from lightning_streaming.tools.stored.stored_dataset import StoredDataset
from lightning_streaming.tools.viewing.viewed import ViewedStream

_MAX_READS = 20_000
"""Samples of steps that a page shows; with more, further steps, or the other ranks of a step, are left out."""
_MAX_PACKED_EPOCHS = 20
"""Epochs of packs that are planned to find a step."""
_MAX_SAMPLE_EPOCHS = 3
"""Epochs in which a sample is searched."""
_GRACE = 1.0
"""Seconds to wait at the end for a thread that creates a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewedStep:
    """The samples that a step reads."""

    run: TracedRun
    number: int
    rank: int | None
    """The only rank whose samples these are; None for all."""
    reads: Sequence[Read]
    """Ordered by batch, rank and position in the batch."""
    has_previous: bool
    """Whether the run has a step before it, since the checkpoint."""
    has_next: bool

    @property
    def streams(self) -> Sequence[str]:
        """Names of all streams of the run."""
        return self.run.catalog.stream_names


class ViewedRun:
    """A configured run. Expensive results are computed on first use, by one thread at a time.

    Args:
        options: ``config``, ``set``, ``checkpoint``, ``loader``, ``nodes``, ``ranks_per_node`` and ``accumulate``.
        written: The parsed configuration files.
        places: Positions in the checkpoint; None without one.
    """

    def __init__(self, options: Namespace, written: Any, places: Places | None) -> None:
        self._options, self._written, self.places = options, written, places
        self.lock = threading.RLock()
        self.configs = {stage: config for stage, config in written.datamodule.configs.items() if config is not None}
        self._stages: dict[str, dict[str, Any]] = {}
        self._traced: TracedRun | None = None
        self._preparing: dict[str, Any] = {}
        """Dataset of each stage of which a prepared sample was requested."""

    @classmethod
    def read(cls, options: Namespace) -> ViewedRun:
        """Read configuration and checkpoint.

        Raises:
            ConfigError: The configuration has no data, or cannot be read.
            StateError: The checkpoint has no position to resume from.
        """
        written = read_run_files(options.config, dict(options.set), stage=None)
        if all(config is None for config in written.datamodule.configs.values()):
            raise ConfigError(
                f"{', '.join(options.config)}: there is no data",
                hint="write data.train, data.val, data.test or data.predict",
                option="data",
                path=", ".join(options.config),
            )
        places = None
        if options.checkpoint is not None:
            places = read_places(options.checkpoint)
        trainer = {
            "num_nodes": options.nodes,
            "devices": options.ranks_per_node,
            "accumulate_grad_batches": options.accumulate,
        }
        changes = {name: value for name, value in trainer.items() if value is not None}
        return cls(options, replace(written, trainer={**written.trainer, **changes}), places)

    @property
    def shown(self) -> str:
        """The configuration files, as typed."""
        return ", ".join(self._options.config)

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint, as typed."""
        path: str | None = self._options.checkpoint
        return path

    def close(self) -> None:
        """Close the loader and the datasets, unless a thread still uses them."""
        if self.lock.acquire(timeout=_GRACE):
            try:
                if self._traced is not None:
                    self._traced.loader.close()
                for dataset in self._preparing.values():
                    dataset.close()
                self._preparing.clear()
            finally:
                self.lock.release()

    def use_own_caches(self) -> None:
        """Read all data through ``temporary_caches``, which get links to the selections in the run's caches."""
        files = {
            key: sorted((directory / SELECTIONS_BASENAME).glob("*.npy"))
            for stage in self.configs
            for key, directory in self._cache_directories(stage)
        }
        for stage, config in self.configs.items():
            self._written.datamodule.configs[stage] = self.configs[stage] = _with_default_caches(config)
        for stage in self.configs:
            for key, directory in self._cache_directories(stage):
                for file in files[key]:  # links, so that what is written next to them is not written to the run's cache
                    link = directory / SELECTIONS_BASENAME / file.name
                    link.parent.mkdir(parents=True, exist_ok=True)
                    if not link.is_symlink():
                        link.symlink_to(file.absolute())

    def streams(self, allow_unsafe_types: bool) -> Iterator[ViewedStream]:
        """Yield the streams of all stages."""
        for stage in self.configs:
            streams = self._dataset(stage).streams
            for name, stream in streams.items():
                config = stream.cache_config()
                dataset = StoredDataset(
                    location=config.remote or str(config.local),
                    options=config.storage_options,
                    format=config.format,
                    block_length=config.block_length,
                )
                label = name if self.configs[stage].streams else dataset.shown  # a single stream may have no name
                yield ViewedStream(
                    dataset, label, allow_unsafe_types, stage=stage, name=name, selection=stream.selection.in_words()
                )

    def too_much(self, stage: str) -> TooMuch | None:
        """Return what must be read from stores, shard by shard, to know the order of a stage; None if it is known.

        Raises:
            StreamingError: An index cannot be read, or a condition is invalid.
        """
        with self.lock:
            is_selection_cached = stage in self._stages or (stage == "train" and self._traced is not None)
            if is_selection_cached or stage not in self.configs:
                return None
            streams = self._dataset(stage).streams
            names = [name for name, stream in streams.items() if not self._is_known(self.configs[stage], stream)]
        if not names:
            return None
        return TooMuch(
            reason=f"which samples of {', '.join(map(printable_name, names))} are read is not known yet: columns of "
            "all their shards must be read for that, and shards that are not Parquet fetched whole, into a temporary "
            "directory. Compute it ahead with lightning-streaming select or lengths, or request it here"
        )

    def _is_known(self, config: Any, stream: Any) -> bool:
        """Return whether the samples of a stream are known without reading shards from a store."""
        lengths = config.lengths_request()
        for join, source in stream.join_sources().items():
            if source.config.key is None or source.cache.reads_in_place:
                continue
            joined = JoinedDataset(join, source, source.cache.read_index(), 0, config.columns)
            if joined.names and not is_id_index_cached(source.config.key, joined.index, source.cache):
                return False
        cache = ShardCache(stream.cache_config())
        if cache.reads_in_place or (stream.selection.is_all and lengths is None):
            return True
        index = cache.read_index()
        if not is_selection_cached(stream.selection, index, cache):
            return False
        if lengths is None:
            return True
        path = selection_path(cache.directory.path, lengths.key(cache.data_version(index)))
        return map_lengths(path, index.num_samples) is not None

    def stage(self, stage: str) -> Mapping[str, Any]:
        """Return the report of ``inspect --config`` about a stage.

        Raises:
            StreamingError: As for ``inspect_run``.
        """
        with self.lock:
            if stage not in self._stages:
                config, checkpoint = self.configs[stage], self.checkpoint
                self._stages[stage] = inspected(stage, config, self._written, checkpoint, self._options.loader)
            return self._stages[stage]

    def packs(self, stage: str) -> Sequence[tuple[str, str]]:
        """Return facts about the packs of a stage; none without packing."""
        return packs_in_words(self.stage(stage))

    def traced(self) -> TracedRun:
        """Return the training, whose steps can be traced.

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
                module = read_run_files(self._options.config, dict(self._options.set)).datamodule
                module.configs.update({stage: self.configs.get(stage) for stage in module.configs})
                self._traced = run_on(module, self._written.trainer, self._options)
            return self._traced

    def selection(self, stage: str, name: str) -> Selection | None:
        """Return the selected samples of a stream; None for all.

        Raises:
            StreamingError: As for :meth:`traced`.
        """
        with self.lock:
            if stage == "train":
                catalog = self.traced().catalog
            else:
                dataset = self._dataset(stage)
                try:
                    catalog = catalog_of(dataset)
                finally:
                    dataset.close()
            selection: Selection | None = catalog.selections[catalog.stream_names.index(name)]
            return selection

    def seen(self, loader: str) -> list[StreamSeen]:
        """Return what was read of each stream before the checkpoint, as far as it is known.

        Args:
            loader: Name of the loader in the checkpoint.

        Raises:
            StreamingError: The checkpoint is of another run than the configuration.
        """
        assert self.places is not None, "there is a checkpoint"
        seen = seen_by_fingerprint(self.places.loaders[loader].position)
        is_of_run = self._options.loader == loader or len(self.places.loaders) == 1
        is_complete = all(stream.this_epoch is not None for stream in seen)
        if not is_of_run or is_complete or self.too_much("train") is not None:
            return seen
        with self.lock:
            traced = self.traced()
            skipped = self.places.loaders[loader].skipped(traced.begins.epoch)
            counts = traced.described.read_before(traced.begins, skipped).samples
        return [replace(stream, this_epoch=counts.get(stream.name, 0)) for stream in seen]

    def next_steps(self, step: int | None, steps: int, rank: int | None) -> dict[str, Any]:
        """Return what some steps read, batch by batch.

        Args:
            step: Number of the first step, as the trainer counts; None for the first of the run.
            steps: Number of steps; fewer if the run ends before.
            rank: The rank whose samples to return; None for all.

        Returns:
            ``batches``, each with its ``step``, ``epoch``, ``batch``, ``reads`` and ``counts``; ``streams``, with the
            number of their samples in the batches and their ``share`` of an epoch; ``is_cut``, whether steps are left
            out because those before have many samples; and facts about the run.

        Raises:
            ConfigError: The run has no such step or rank.
        """
        with self.lock:
            traced = self.traced()
            first = traced.steps.first_step if step is None else step
            _check_distance(traced, first)
            batches: dict[tuple[int, int, int], list[Read]] = {}
            is_cut = False
            for number in range(first, first + steps):
                try:
                    reads = reads_of_step(traced, number, rank)
                except ConfigError:
                    if number == first:
                        raise
                    break  # the run ends there
                for read in reads:
                    batches.setdefault((number, read.key.epoch, read.batch), []).append(read)
                if sum(map(len, batches.values())) > _MAX_READS and number + 1 < first + steps:
                    is_cut = True
                    break
            weights, names = traced.order.order.weights, traced.order.order.catalog.stream_names
        counts = {key: Counter(read.key.stream for read in reads) for key, reads in batches.items()}
        totals = sum(counts.values(), Counter[str]())
        return {
            "first": first,
            "steps": steps,
            "is_cut": is_cut,
            "rank": rank,
            "run": traced,
            "begins_at": traced.steps.first_step,
            "batches": [
                {
                    "step": at,
                    "epoch": epoch,
                    "batch": batch,
                    "reads": reads,
                    "counts": [(name, count) for name in names if (count := counts[at, epoch, batch][name])],
                }
                for (at, epoch, batch), reads in batches.items()
            ],
            "streams": [
                {"name": name, "count": totals[name], "share": share}
                for name, share in zip(names, weights.proportion, strict=True)
            ],
        }

    def step(self, number: int | None, rank: int | None) -> ViewedStep:
        """Return what one step reads.

        Args:
            number: Number of the step, as the trainer counts; None for the first of the run.
            rank: The rank whose samples to return; None for all, or for rank 0 if a step has very many samples.

        Raises:
            ConfigError: The run has no such step or rank.
        """
        with self.lock:
            traced = self.traced()
            first = traced.steps.first_step
            number = first if number is None else number
            _check_distance(traced, number)
            reads = reads_of_step(traced, number, rank, _MAX_READS)
            if rank is None and len(reads) > _MAX_READS:
                rank, reads = 0, [read for read in reads if read.rank == 0]
            try:
                traced.steps.find(number + 1)
                has_next = True
            except ConfigError:  # this is the last step
                has_next = False
            return ViewedStep(
                run=traced,
                number=number,
                rank=rank,
                reads=sorted(reads, key=lambda read: (read.batch, read.rank)),  # stable, so positions stay in order
                has_previous=number > first,
                has_next=has_next,
            )

    def reads(self, stream: str, shard: int, index: int) -> list[Read]:
        """Return all times at which the training reads a sample in the first epoch that does, if it comes soon.

        Raises:
            StreamingError: As for ``reads_of_sample``.
        """
        with self.lock:
            return reads_of_sample(self.traced(), stream, shard, index, _MAX_SAMPLE_EPOCHS)

    def prepared(self, stage: str, stream: str, shard: int, index: int) -> Any:
        """Return a sample after decode and transform, as the first epoch yields it at position 0.

        Raises:
            StreamingError: As for ``StreamingDataset.restore_sample``; the transform may raise anything.
        """
        with self.lock:
            config = self.configs[stage]
            if stage not in self._preparing:
                storage = replace(group_of(config, StorageConfig), on_demand=True)
                dataset = self._written.datamodule.build_dataset(stage, replace(config, storage=storage))
                self._preparing[stage] = dataset
            key = {"stream": stream, "shard": shard, "sample_index": index, "epoch": 0, "position": 0}
            return self._preparing[stage].restore_sample({**key, "shuffle_seed": config.shuffle_seed or 0})

    def positions_before(self, stream: str, shard: int, index: int) -> list[int]:
        """Return the positions at which the checkpoint's epoch has read a sample before it; none without one.

        Raises:
            StreamingError: As for :meth:`reads`.
        """
        if self.places is None:
            return []
        with self.lock:
            return positions_before(self.traced(), stream, shard, index)

    def _dataset(self, stage: str) -> Any:
        return self._written.datamodule.build_dataset(stage, self.configs[stage])

    def _cache_directories(self, stage: str) -> Iterator[tuple[tuple[str, ...], Path]]:
        """Yield the cache directories of a stage's streams, and of datasets joined with them, by stage and names."""
        for name, stream in self._dataset(stage).streams.items():
            yield (stage, name), stream.cache_config().cache_directory()
            for join, source in stream.join_sources().items():
                yield (stage, name, join), source.cache.directory.path


def _check_distance(run: TracedRun, step: int) -> None:
    """Refuse a distant step of packs: the number of steps of an epoch of packs is known once it is planned."""
    of_first = max(1, len(run.steps.of_epoch(run.begins.epoch)))
    if run.packs is not None and step - run.steps.first_step > _MAX_PACKED_EPOCHS * of_first:
        raise ConfigError(
            f"step {step:,} is far: epochs of packs are planned one by one, so only steps of about the next "
            f"{_MAX_PACKED_EPOCHS} epochs are shown",
            option="step",
        )


def _with_default_caches(config: Any) -> Any:
    """Return a configuration of data whose downloads are kept in the default directories."""

    def without_local(source: Any) -> Any:
        changes: dict[str, Any] = {} if source.remote is None else {"local": None}
        joins = getattr(source, "join", None)
        if joins:
            changes["join"] = {name: without_local(join) for name, join in joins.items()}
        return replace(source, **changes)

    streams = config.streams and {name: without_local(stream) for name, stream in config.streams.items()}
    return replace(without_local(config), streams=streams)
