"""Streaming dataset: streams, their order and their cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from itertools import islice
from math import ceil
from typing import Any

from torch.utils.data import get_worker_info

from lightning_streaming.cache import ShardCache
from lightning_streaming.dataset.options import DatasetOptions
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.dataset.stream import (
    DatasetStreams,
    StreamSpec,
    cache_config_of,
    join_sources_of,
    options_of,
    selections_of,
    weight_of,
)
from lightning_streaming.errors import ConfigError
from lightning_streaming.options.groups import as_group, group_of
from lightning_streaming.options.mixing import MixingConfig
from lightning_streaming.options.packing import PackingConfig, TokenBudget
from lightning_streaming.options.reading import BadSamplesConfig, DebugConfig, DecodeConfig
from lightning_streaming.options.schedule import Schedule
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.options.storage import Joins, StorageConfig
from lightning_streaming.reading.assemble import SampleAssembler
from lightning_streaming.reading.other_trainers import AcceleratedDataset
from lightning_streaming.reading.packs.assemblers import assembler_of
from lightning_streaming.reading.plan import PassPlanner
from lightning_streaming.reading.reference_names import ReferenceNames, readonly_property
from lightning_streaming.reading.transport import PassCounter
from lightning_streaming.reading.worker_process import prepare_worker_process
from lightning_streaming.reading.worker_samples import PassProgress, WorkerSamples
from lightning_streaming.resume.run import OnMismatch
from lightning_streaming.resume.run_order import RunRequest
from lightning_streaming.resume.run_state import RunState
from lightning_streaming.resume.state import Cursor, SavedPosition, read_state
from lightning_streaming.sequence.settings import BatchingMethod, PartitionAlgo, SamplingMethod, ShuffleAlgo
from lightning_streaming.sequence.skips import parse_batch_ranges
from lightning_streaming.sequence.steps import SequenceStep
from lightning_streaming.signatures import explains_options_of, public, suggests_names
from lightning_streaming.storage import mask_url
from lightning_streaming.units import check_whole
from lightning_streaming.world import World

_MOST_STREAMS = 4
"""Streams that are shown one by one."""


@public()
@suggests_names
@explains_options_of(DatasetOptions)
class StreamingDataset(AcceleratedDataset, ReferenceNames):
    """Dataset of one or several streams of shards, in an order that does not depend on the number of machines.

    Creating one does no I/O: indexes are read at the first ``len``, ``iter`` or ``[i]``. Iterate over it through
    :class:`~lightning_streaming.StreamingDataLoader`, which can save and restore its position.

    Epochs yield what ``dataset[i]`` returns: to customize samples, pass ``transform``, or override ``__getitem__`` or
    ``get_item`` in a subclass; see docs/loading.md.

    Raises:
        ConfigError: An option is invalid, or options contradict each other.
    """

    def __init__(
        self,
        *,
        streams: StreamSpec | None = None,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60.0,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | float | str | None = None,
        predownload: int | None = None,
        cache_limit: int | float | str | None = None,
        sampling_method: SamplingMethod = "balanced",
        sampling_granularity: int = 1,
        partition_algo: PartitionAlgo = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: ShuffleAlgo = "py1e",
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: BatchingMethod = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        stream_name: str = "stream",
        stream_config: Mapping[str, Any] | None = None,
        format: str | None = None,  # noqa: A002 the option's name
        block_length: int | None = None,
        columns: Sequence[str] | None = None,
        follow_appends: bool = False,
        skip: Sequence[int | str] = (),
        seed_global_rng: bool = False,
        transform: Callable[..., Any] | None = None,
        world: World | None = None,
        sequence: Sequence[SequenceStep] = (),
        selection: SelectionConfig | Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        mixing: MixingConfig | Mapping[str, Any] | None = None,
        packing: PackingConfig | Mapping[str, Any] | None = None,
        token_budget: TokenBudget | Mapping[str, Any] | None = None,
        join: Joins | None = None,
        bad_samples: BadSamplesConfig | Mapping[str, Any] | None = None,
        decode: DecodeConfig | Mapping[str, Any] | None = None,
        storage: StorageConfig | Mapping[str, Any] | None = None,
        debug: DebugConfig | Mapping[str, Any] | None = None,
    ) -> None:
        values = locals()
        options = DatasetOptions(**{option.name: values[option.name] for option in fields(DatasetOptions)})
        self._arguments = {
            name: value
            for name, value in vars(options).items()
            if isinstance(getattr(type(self), name, None), readonly_property)
        }
        named, defaults, settings = options.named_streams(), options.defaults(), options.order()
        if options.shuffle_algo == "py1b":
            # The caller is above the frame of the decorator.
            warnings.warn("shuffle_algo='py1b' is deprecated; use 'py1br'", DeprecationWarning, stacklevel=3)
        self.batch_size = options.batch_size
        self.predownload = options.predownload
        self.replication = options.replication
        self.world = options.world
        documents = options.documents()
        source = SampleSource(
            {name: ShardCache(cache_config_of(stream, name, defaults)) for name, stream in named.items()},
            options.allow_unsafe_types,
            options.columns,
            options.cache_bytes(),
            selections_of(named, defaults),
            {name: join_sources_of(stream, name, defaults) for name, stream in named.items()},
            options.lengths_request(),
            group_of(options, DecodeConfig).columns,
            None if documents is None else documents.tokenizer,
        )
        on_demand = group_of(options, StorageConfig).on_demand
        super().__init__(source, on_demand, options.transform, options.seed_global_rng, settings.shuffle_seed)
        request = RunRequest(
            settings=settings,
            weights=tuple(weight_of(stream) for stream in named.values()),
            epoch_size=options.samples_per_epoch(),
            skip=parse_batch_ranges(options.skip, "skip"),
            batch_size=options.batch_size,
            phases=options.resolved_phases(),
            mixing=as_group(MixingConfig, options.mixing),
            pack=documents,
            steps=tuple(options.sequence),
            followed=frozenset(
                place for place, stream in enumerate(named.values()) if options_of(stream, defaults).follow_appends
            ),
        )
        self._run_state = RunState(request, source, PassCounter())
        self._planner = PassPlanner(
            self._run_state, source, options, SampleAssembler() if documents is None else assembler_of(documents)
        )
        self._direct_pass: tuple[int, PassProgress] | None = None
        """The latest pass that is read here without a loader, and the moves of the run state at its beginning."""
        self.streams = DatasetStreams(named, defaults, self._run_state, source)
        self._described = options.described(named)

    @readonly_property
    def epoch_size(self) -> int:
        """Number of samples that an epoch draws, after weighting."""
        return self._run_state.weights.epoch_size

    def __len__(self) -> int:
        """Return the samples, or packs, of an epoch on each rank: its size divided by the ranks, rounded up."""
        world = self._current_world()
        request = self._run_state.request
        is_changed = request.pack is not None or request.steps
        size = self._run_state.on(world).entries_of(0) if is_changed else self.epoch_size
        return ceil(size / world.num_ranks)

    def __repr__(self) -> str:
        streams = islice(self.streams.items(), _MOST_STREAMS)
        user_streams = ((name, stream.asked) for name, stream in streams)
        locations = {name: spec.local if spec.remote is None else spec.remote for name, spec in user_streams}
        shown = [f"{name}={mask_url(str(location))!r}" for name, location in locations.items()]
        if len(self.streams) > _MOST_STREAMS:
            shown.append(f"and {len(self.streams) - _MOST_STREAMS} more streams")
        catalog = self._source.known_catalog
        size = "index not read" if catalog is None else f"{catalog.num_samples} samples"
        cursor = self._run_state.yielded() or self._run_state.next_cursor()
        return f"<StreamingDataset: {', '.join(shown)}; {size}; at {cursor}>"

    def config(self) -> dict[str, Any]:
        """Return the options as plain values without secrets, to log or compare them."""
        return deepcopy(self._described)

    @property
    def next_epoch(self) -> int:
        """Epoch of the next pass. Setting it starts that epoch from its beginning."""
        return self._run_state.next_cursor().epoch

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._run_state.seek(Cursor(check_whole("next_epoch", epoch, 0), 0))

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = False) -> dict[str, Any]:
        """Return the position of the pass under way, or of the next one if there is none, as plain values.

        Args:
            num_samples: Samples read in this pass, over all ranks. None: those that a loader has yielded, or those
                taken from ``iter(dataset)`` in this process, times the number of ranks.
            from_beginning: Count ``num_samples`` from the beginning of the epoch, and not from that of the pass.
        """
        if num_samples is None:
            self._check_is_counted_here()
        state, world = self._run_state, self._current_world()
        yielded, began = state.yielded(), state.began()
        if num_samples is None and yielded is not None:
            return state_at(self, yielded)
        if num_samples is None:
            progress = None if state.counts_in_workers() else self._direct_progress()
            num_samples = 0 if progress is None else progress.samples_read * world.num_ranks
            from_beginning = False
        began = Cursor(began.epoch, 0) if from_beginning else began
        return state_at(self, state.on(world).advance(began, num_samples))

    def load_state_dict(self, state: Mapping[str, Any], on_mismatch: OnMismatch = "error") -> None:
        """Let the next pass begin at the position of ``state``, with its seed and canonical nodes.

        This does not read the data yet. Whether the state belongs to it is checked when the index is next read.

        To divide the rest of an epoch among other ranks without a restart, set ``world`` first: an index that was
        read is not read again, and a loader's persistent workers continue.

        Args:
            state: From :meth:`state_dict`, from a loader, or from MosaicML Streaming.
            on_mismatch: "error" or "warn" if data or options have changed since.

        Raises:
            StateError: ``state`` is not a saved position.
        """
        saved = read_state(state)
        self._run_state.load(saved, on_mismatch)
        self._loaded = saved.cursor

    def _next_cursor(self) -> Cursor:
        return self._run_state.next_cursor()

    def _current_world(self) -> World:
        return (self.world or World.detect()).replicated(self.replication)

    def __iter__(self) -> WorkerSamples:
        """Iterate over this worker's samples of the next pass, each as ``dataset[i]`` returns it."""
        state, planner, info = self._run_state, self._planner, get_worker_info()
        plan = planner.take_assigned()
        if info is not None:
            prepare_worker_process()
            if plan is None:  # in a worker of a plain torch DataLoader
                start = planner.begin_in_worker(info.id, self._reading_world(), self._own_batch_size())
                self._check_reader_of_worker(start.cursor)
                plan = planner.plan(self._sample_factory, start, info.id, info.num_workers)
            return WorkerSamples(plan)
        if plan is not None:
            return WorkerSamples(plan)
        self._check_reader(state.next_cursor())
        start = state.begin(self._reading_world(), self._own_batch_size())
        planner.warn_unsuitable_settings(start)
        samples = WorkerSamples(planner.plan(self._sample_factory, start, 0, 1))
        self._direct_pass = state.moves, samples.progress
        return samples

    def close(self) -> None:
        """Stop downloads and unmap every shard. The dataset can be used again; it reopens what it needs."""
        progress = self._direct_progress()
        if progress is not None:
            progress.close()
        self._run_state.close()
        self._source.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_reader(None)  # a worker that is spawned knows nothing of its reader
        return {**self.__dict__, "_direct_pass": None}

    def _direct_progress(self) -> PassProgress | None:
        """Return the progress of the pass that this process iterates over without a loader."""
        return self._direct_pass[1] if self._direct_pass and self._direct_pass[0] == self._run_state.moves else None

    def _iterates_as_usual(self) -> bool:
        """Return whether a pass yields what :meth:`__iter__` of this class returns, not that of a subclass."""
        return type(self).__iter__ is StreamingDataset.__iter__

    def _are_as_stored(self) -> bool:
        """Return whether a pass yields samples with the columns that they are stored with."""
        return self._iterates_as_usual() and self._sample_factory(0, 0).keeps_samples

    def _reading_world(self) -> World:
        world = self._current_world()
        if not world.is_reader:
            raise ConfigError(
                "this rank does not read samples (World.is_reader is False), so iterating the dataset directly cannot "
                "track a position",
                hint="iterate through a StreamingDataLoader, which yields empty batches and counts them",
                option="world",
            )
        return world

    def _own_batch_size(self) -> int:
        if self.batch_size is None:
            raise ConfigError(
                "pass batch_size= to the dataset, or iterate through a StreamingDataLoader that has one",
                option="batch_size",
            )
        return self.batch_size


def run_state_of(dataset: StreamingDataset) -> RunState:
    """Return the run of a dataset and its position. Attributes of a subclass may have any other name."""
    return dataset._run_state


def source_of(dataset: StreamingDataset) -> SampleSource:
    """Return the samples of a dataset."""
    return dataset._source


def planner_of(dataset: StreamingDataset) -> PassPlanner:
    """Return the planner of passes over a dataset: for loaders and workers."""
    return dataset._planner


def dataset_world(dataset: StreamingDataset) -> World:
    """Return the position of this process among those that read different samples of a dataset."""
    return dataset._current_world()


def saved_at(dataset: StreamingDataset, cursor: Cursor) -> SavedPosition:
    """Return the saved position of a reader at ``cursor``; the end of an epoch is the beginning of the next."""
    check_can_save(dataset)
    run = run_state_of(dataset).on(dataset_world(dataset))
    return run.saved(run_state_of(dataset).normalise(run, cursor))


def check_can_save(dataset: StreamingDataset) -> None:
    """Raise an error if loaders repeat batches instead of reading others.

    Raises:
        ConfigError: ``debug.repeat_batches`` is set.
    """
    if planner_of(dataset).debug.repeat_batches is not None:
        raise ConfigError(
            "debug.repeat_batches repeats batches instead of reading others, so the position cannot be saved",
            hint="remove the option, or measure without checkpoints: Trainer(enable_checkpointing=False)",
            option="debug.repeat_batches",
        )


def state_at(dataset: StreamingDataset, cursor: Cursor) -> dict[str, Any]:
    """Return the same as plain values."""
    return saved_at(dataset, cursor).as_state()
