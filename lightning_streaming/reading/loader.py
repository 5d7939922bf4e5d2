"""DataLoader that saves and restores its position in the data."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing.context import BaseContext
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.dataset.bad_samples import BadTally
from lightning_streaming.dataset.sample_key import (
    KeyedBatch,
    Replacement,
    SampleKeys,
    add_valid,
    delivered_keys,
    keys_of_batches,
    no_keys,
)
from lightning_streaming.errors import ConfigError, SampleError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.reading import workers
from lightning_streaming.reading.dataset import (
    StreamingDataset,
    check_can_save,
    dataset_world,
    planner_of,
    run_state_of,
    source_of,
)
from lightning_streaming.reading.measures import (
    BatchMeasures,
    DownloadCallback,
    DownloadReporter,
    FetchCounts,
    LoaderStatistics,
    StatisticsCollector,
)
from lightning_streaming.reading.other_trainers import AcceleratedLoader, AcceleratedPass
from lightning_streaming.reading.position import position_of, read_appended, run_of
from lightning_streaming.reading.ranks import from_all
from lightning_streaming.reading.sample_log import last_sample
from lightning_streaming.reading.transport import make_slots
from lightning_streaming.resume.run import OnMismatch
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.state import Cursor, EpochStart
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.sequence.phases import WeightChange
from lightning_streaming.signatures import check_accepts, public, suggests_names
from lightning_streaming.units import check_truth, check_whole

_log = package_logger(__name__)
_MOST_UNCLAIMED = 1024
"""Batches whose ends are remembered for :meth:`LoaderPosition.claim`, if none of them are claimed."""
_AT_ONCE = 1024
"""Batches whose ends are worked out together: a step should wait for no arithmetic."""
_READ, _BAD = BatchMeasures._fields.index("samples"), BatchMeasures._fields.index("bad_samples")


@dataclass(slots=True)
class _Progress:
    """State of a loader that changes while it is read, apart from the attributes that Lightning may keep."""

    channel: workers.WorkerChannel | None = None
    """With workers that live on from pass to pass."""
    weights_set: tuple[WeightChange, ...] = ()
    """Weights that the run had set when these workers started."""
    passes_begun: int = 0
    moved_at: int = 0
    """Passes begun when the loader was last moved."""
    passes: list[weakref.ref[LoaderPass]] = field(default_factory=list)
    """Passes that are held; a list can be pickled while it is empty, a set of weak references cannot."""
    end: Cursor | None = None
    """Where the latest batch ends; None before the first of a pass."""
    has_length_of_first_epoch: bool = False
    """Whether ``len`` returns the length of epoch 0."""
    length_callback: Callable[[], None] | None = None
    """Called when weights that are set have changed the number of batches of an epoch."""
    download_callback: DownloadCallback | None = None
    """Callback that reports what the next pass fetches before its first batch."""
    collected_keys: deque[SampleKeys] | None = None
    """Receives the keys of each batch that is yielded."""
    unclaimed: deque[Cursor] = field(default_factory=lambda: deque(maxlen=_MOST_UNCLAIMED))


@public()
@suggests_names
class StreamingDataLoader(AcceleratedLoader):
    """Batches of a :class:`StreamingDataset`, the same number on every rank, from any number of workers.

    Each ``iter(loader)`` is a pass over the next epoch; a pass that is abandoned early still counts as one. Its first
    ``next`` decides where it begins: a state loaded between ``iter`` and ``next`` takes effect, and an iterator that is
    never used consumes nothing.

    The parameters after ``return_valid_mask`` are those of :class:`torch.utils.data.DataLoader`. Those that choose
    samples are refused, as the dataset does that; they exist because frameworks pass them on.

    On a rank that does not read samples (:attr:`World.is_reader` is False) each batch is an empty dict, and
    ``collate_fn`` is not called. Such a rank yields, counts and saves as many batches as the others and fetches no
    shard.

    Args:
        dataset: Dataset to read.
        batch_size: Samples per batch on this rank. None: the dataset's.
        fixed_epoch: Read epoch 0 from its beginning in every pass, for evaluation.
        return_keys: Yield each batch as a :class:`KeyedBatch`: the batch and the keys of its samples.
        return_valid_mask: Add a mask ``valid`` to each batch, which must be a dict: False for samples that are read
            again so that every rank has the same number of batches; with ``packing``, one entry per pack. Only with
            ``batching_method="random"``.
        num_workers: Processes that read. 0: the training process reads.
        collate_fn: Makes a batch of a list of samples. None: torch's default, which stacks arrays.
        drop_last: Leave out the last batch of an epoch if it is smaller than the others.
        pin_memory: Copy batches into pinned memory, from which a GPU copies faster.
        prefetch_factor: Batches that each worker prepares ahead. None: 2 if there are workers.
        persistent_workers: Keep the workers from epoch to epoch.
        multiprocessing_context: How workers start: "fork", "spawn", "forkserver" or a context of ``multiprocessing``.
            None: Python's default.
        timeout: Seconds to wait for a batch of a worker. 0: no limit.
        worker_init_fn: Called in each worker with its number, before it reads.
        generator: Seeds torch's random numbers in workers; the order of samples does not depend on it.
        pin_memory_device: Device of pinned memory. Empty: the current accelerator.
        shuffle: Only None or False; pass it to the dataset.
        sampler: Only None.
        batch_sampler: Only None.
        in_order: Only True: batches must come in order to have a position that can be saved.

    Raises:
        ConfigError: Dataset and loader have different batch sizes; ``shuffle``, a sampler or ``in_order=False`` is
            passed; or ``return_valid_mask`` cannot work with these options.
    """

    dataset: StreamingDataset

    def __init__(
        self,
        dataset: StreamingDataset,
        batch_size: int | None = None,
        *,
        fixed_epoch: bool = False,
        return_keys: bool = False,
        return_valid_mask: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        pin_memory_device: str = "",
        shuffle: bool | None = None,
        sampler: None = None,
        batch_sampler: None = None,
        in_order: bool = True,
    ) -> None:
        for name, is_set in (
            ("fixed_epoch", fixed_epoch),
            ("return_keys", return_keys),
            ("return_valid_mask", return_valid_mask),
            ("drop_last", drop_last),
            ("pin_memory", pin_memory),
            ("persistent_workers", persistent_workers),
        ):
            check_truth(name, is_set)
        if batch_size is None:
            batch_size = dataset.batch_size
        if batch_size is None:
            raise ConfigError("pass batch_size= to the dataset or to the loader", option="batch_size")
        batch_size = check_whole("batch_size", batch_size, 1)
        has_collate = collate_fn is not None and collate_fn is not default_collate
        planner_of(dataset).assembler.check_loader(batch_size, has_collate=has_collate)
        if dataset.batch_size not in (None, batch_size):
            raise ConfigError(
                f"the dataset was made with batch_size={dataset.batch_size} and the loader with {batch_size}",
                hint="pass it to one of them",
                option="batch_size",
            )
        if shuffle:
            raise ConfigError("the order belongs to the dataset", hint="pass shuffle=True there", option="shuffle")
        for option, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            if value is not None:
                raise ConfigError(
                    f"{option} must be None, as the dataset decides which samples are read in which order",
                    hint="use shuffle=, selection= or streams= of the dataset",
                    option=option,
                )
        if not in_order:
            raise ConfigError(
                "batches must come in order to have a position that can be saved",
                hint="drop in_order=False",
                option="in_order",
            )
        if fixed_epoch and run_state_of(dataset).request.skip:
            raise ConfigError(
                "skip is for training, as it counts the batches of a run",
                hint="leave it out for other stages",
                option="skip",
            )
        method = StreamingDataset.config(dataset)["batching_method"]  # a subclass may mean another thing by the name
        if return_valid_mask and method != "random":
            raise ConfigError(
                f"return_valid_mask is for reading every sample once, but batching_method={method!r} drops samples "
                "that fill no batch",
                hint="use batching_method='random'",
                option="return_valid_mask",
            )
        if collate_fn is not None:
            check_accepts(collate_fn, "collate_fn", "(samples)", [])
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._samples_per_batch = batch_size
        run_state_of(dataset).read_by(batch_size, self.drop_last)
        # Lightning reads these names when it creates the loader again, as it does to predict.
        self.fixed_epoch = fixed_epoch
        self.return_keys = return_keys
        self.return_valid_mask = return_valid_mask
        self._tally = StatisticsCollector(list(dataset.streams))
        self._progress = _Progress()
        self._batch_types = dict[str, torch.dtype]()

    def __len__(self) -> int:
        """Return the batches of a whole epoch on each rank, regardless of resumes and of batches that are skipped.

        Where epochs differ, as with packs or with appended data, it is the length of the epoch of the next batch. If
        that cannot be read, as limits of a mixture are reached, it is the length of the first: Lightning reads it at
        the end of a run, too.
        """
        run = run_of(self)
        is_first = self._progress.has_length_of_first_epoch or not run.order.differs_by_epoch
        if self._progress.has_length_of_first_epoch:
            run = run_state_of(self.dataset).as_begun(run)
        epoch = 0 if is_first else run.normalise(position_of(self).cursor()).epoch
        return run.unskipped(Cursor(epoch if run.can_read(epoch) else 0, 0)).num_batches(self.drop_last)

    def __repr__(self) -> str:
        settings = f"batch_size={self.batch_size}, num_workers={self.num_workers}"
        return f"<StreamingDataLoader: {settings}; at {position_of(self).cursor()}; of {self.dataset!r}>"

    def __iter__(self) -> LoaderPass | AcceleratedPass:  # type: ignore[override]  # torch names its own class
        batches = LoaderPass(self)
        if not self._is_accelerated:
            return batches
        return AcceleratedPass(
            batches, lambda: position_of(self).cursor().sample_in_epoch == 0, non_blocking=self.pin_memory
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch; batches that were yielded count as read.

        Raises:
            ConfigError: ``debug.repeat_batches`` is set.
        """
        check_can_save(self.dataset)
        return self._state()

    def _state(self) -> dict[str, Any]:
        position = position_of(self)
        return run_of(self).saved(position.normalised(position.cursor())).as_state()

    def load_state_dict(self, state: Mapping[str, Any], on_mismatch: OnMismatch = "error") -> None:
        """Let the next pass continue from ``state``; see :meth:`StreamingDataset.load_state_dict`."""
        self.dataset.load_state_dict(state, on_mismatch)
        self._forget_pass()

    def refresh(self) -> bool:
        """Read what was appended to streams with ``follow_appends=True`` from the next epoch on.

        Call it between two epochs, on all ranks, with ``torch.distributed`` initialised if there are several; under
        Lightning the state callback calls it. The first rank fetches each stream's index. The others fetch it only
        if it has more shards. If one of them does not see the new shards, nothing changes until the next call, so a
        store that is unreachable for a moment ends no run. Streams with joined datasets follow at a resume only.

        Returns:
            Whether there is more to read now.

        Raises:
            ConfigError: The loader is in the middle of an epoch, or the other ranks cannot be reached.
        """
        return read_appended(self)

    def statistics(self) -> LoaderStatistics:
        """Return counts and waiting times of all passes of this loader in this process so far."""
        return self._tally.statistics()

    def close(self) -> None:
        """End the pass under way, older ones, and all workers, persistent ones too, and unmap every shard."""
        for begun in self._begun_passes():
            begun.close()
        self._end_workers(self._iterator)  # where torch keeps persistent workers
        self._tally.close_shards()
        self._forget_pass()
        self.dataset.close()

    def set_weights(self, weights: Mapping[str, float], from_step: int | None = None) -> WeightChange:
        """Set the weights of the mixture from here on, instead of those of its phases, on all ranks alike.

        They hold from the next mixture step on that begins after the batches that were yielded, or from a later one,
        until they are set again. They replace weights that were set for this step and later ones. Saved positions hold
        them, so a resume reads the same with and without the code that has set them. The steps are as long as
        ``mixing.longest_step``. Batches that workers have prefetched are read again.

        Call it on all ranks after the same batch, for example in ``on_train_batch_end`` of a callback.

        Args:
            weights: Weights of the streams, by name; only ratios count. Streams that are left out are not read.
            from_step: The mixture step of the epoch, from 0, from which on they hold. None: the next one.

        Returns:
            The weights, with epoch and mixture step from which on they hold.

        Raises:
            ConfigError: The dataset has no schedule and no options of mixing, a stream is unknown, a weight is invalid,
                ``from_step`` has begun or is beyond the epoch, ranks set other weights, or a stream would be read more
                often than it may.
        """
        cursor, world = position_of(self).cursor(), dataset_world(self.dataset)
        if from_step is not None:
            check_whole("from_step", from_step, 0)
        seen = from_all(lambda _: (tuple(sorted(dict(weights).items())), from_step, cursor))
        if others := [rank for rank, values in enumerate(seen) if values != seen[0]]:
            of_ranks = (
                f"{dict(mix)} from_step={step} at {place} on rank {rank}"
                for rank in (0, others[0])
                for mix, step, place in (seen[rank],)
            )
            raise ConfigError(
                f"set_weights got {', and '.join(of_ranks)}",
                hint="compute weights from values that are the same on all ranks, such as those of all_reduce",
                option="weights",
            )
        change = run_state_of(self.dataset).set_weights(weights, cursor, world, from_step)
        for begun in self._begun_passes():
            begun._pause(always=True)
        self._end_workers(self._iterator)
        if self._progress.length_callback is not None:
            self._progress.length_callback()
        return change

    def pause_workers(self) -> None:
        """End all workers, persistent ones too; the next batch starts them again, after the latest batch.

        The order of batches stays the same. Batches that the workers had prefetched are read again. Without workers it
        does nothing.
        """
        for begun in self._begun_passes():
            begun._pause()
        self._end_workers(self._iterator)  # of a pass that has ended
        if self.num_workers:
            self._tally.close_shards()

    def _begun_passes(self) -> list[LoaderPass]:
        """Return the passes that are still held: the latest, and older ones, whose workers live as long."""
        return [begun for held in self._progress.passes if (begun := held()) is not None]

    def _begin_pass(self, begins: LoaderPass, continues: Cursor | None = None) -> tuple[int, _UnderWay]:
        """Begin the next pass, or the rest of a paused one, and return its number."""
        progress = self._progress
        held = [begun for begun in self._begun_passes() if begun is not begins]
        progress.passes[:] = [weakref.ref(begun, progress.passes.remove) for begun in (*held, begins)]
        progress.passes_begun += 1
        progress.end = continues
        state, planner = run_state_of(self.dataset), planner_of(self.dataset)
        if continues is not None:
            state.seek(continues)
        elif self.fixed_epoch:
            state.seek(Cursor(0, 0))
        start = state.begin(dataset_world(self.dataset), self._samples_per_batch, self.drop_last)
        if continues is None:
            planner.warn_unsuitable_settings(start)
        if self.collate_fn is default_collate and self.dataset._are_as_stored():
            planner.warn_mixed_columns(start)
        self._tally.begin_pass(self.num_workers)
        if self.drop_last and (error := no_batch_error(self)):
            _log.warning(str(error))
        if start.world.is_reader:
            # torch draws a seed for each start of workers, which a run without a pause does not.
            with torch.random.fork_rng(devices=[], enabled=continues is not None):
                return progress.passes_begun, self._reading(start)
        # As many batches as on ranks that read samples, without workers.
        num_batches = state.epoch_of(start).partition.num_batches(self.drop_last)
        batches: Iterator[workers.Measured] = (({}, self._tally.nothing()) for _ in range(num_batches))
        return progress.passes_begun, _UnderWay(start, None, batches, {}, None)

    def _reading(self, start: EpochStart) -> _UnderWay:
        """Return a pass whose batches are made by workers, or in this process."""
        progress, planner = self._progress, planner_of(self.dataset)
        # torch's thread takes batches from the workers to pin them.
        is_pinned = self.pin_memory and torch.accelerator.is_available()
        # Persistent workers keep their channel; those of an abandoned pass have another.
        channel = progress.channel if self._iterator is not None else None
        weights_set = run_state_of(self.dataset).request.weights_set
        is_known = weights_set == progress.weights_set  # to persistent workers, which have the order of their start
        if channel is None or not is_known or not channel.pass_start.has_room_for(start):
            self._end_workers(self._iterator)
            channel = workers.WorkerChannel(
                workers.SharedEpochStart(len(run_state_of(self.dataset).request.skip), start.growth),
                None if is_pinned else make_slots(self.num_workers, (self.prefetch_factor or 0) + 1),
                None if progress.download_callback is None else FetchCounts(max(self.num_workers, 1)),
            )
        progress.channel = channel if self.persistent_workers else None
        progress.weights_set = weights_set
        channel.pass_start.assign(start)
        worker_batches = workers.WorkerBatches(
            self.dataset, channel, self.collate_fn, drop_last=self.drop_last, separately=is_pinned
        )
        groups = self._started(start, worker_batches)
        replaced = dict[int, Replacement]()
        batches = workers.ordered_map(groups, channel, self.num_workers, replaced)
        if self.collate_fn is default_collate:
            batches = planner.assembler.checked(batches, self._batch_types)
        if planner.debug.repeat_batches is not None:
            num_batches = run_state_of(self.dataset).epoch_of(start).partition.num_batches(self.drop_last)
            batches = _repeated(batches, planner.debug.repeat_batches, num_batches, self._tally.nothing())
        return _UnderWay(start, groups, batches, replaced, planner.bad_tally(start), channel.fetched)

    def _started(self, start: EpochStart, batches: workers.WorkerBatches) -> Iterator[workers.BatchGroup]:
        """Start the workers of a pass, or let persistent ones begin it.

        Raises:
            SampleError: A persistent worker has died since the last pass; the next call starts other workers.
        """
        cause: RuntimeError | None = None
        dead = workers.dead_worker(self._iterator)  # torch would wait for it for five seconds
        if dead is None:
            try:
                return workers.start_iterator(self, batches)
            except RuntimeError as error:  # torch's own
                cause, dead = error, workers.dead_worker(self._iterator)
                if dead is None:
                    raise
        self._end_workers(self._iterator)
        run_state_of(self.dataset).seek(start.cursor)  # no batch of it was read
        raise SampleError(f"{dead} between two passes", hint="iterate again: other workers read the pass") from cause

    def _end_workers(self, batches: Iterator[Any] | None) -> None:
        """End the workers behind torch's iterator of a pass, persistent ones too."""
        if workers is None:  # the interpreter has cleared its modules, as it ends; torch ended the workers before
            return
        workers.end_workers(batches)
        if batches is self._iterator:
            vars(self)["_iterator"] = self._progress.channel = None

    def _is_current(self, number: int) -> bool:
        """Return whether this pass is the latest and the loader was not moved since, so that its batches count.

        Raises:
            ConfigError: Another pass has begun while this one was being read.
        """
        progress = self._progress
        if number != progress.passes_begun and number > progress.moved_at:
            raise ConfigError(
                "another pass over this loader has begun while this one was being read",
                hint="make a second loader with another dataset to read two at a time",
            )
        return number == progress.passes_begun

    def _forget_pass(self) -> None:
        progress = self._progress
        progress.passes_begun += 1
        progress.moved_at = progress.passes_begun
        progress.end = None
        progress.has_length_of_first_epoch = False
        progress.unclaimed.clear()


class LoaderPass(Iterator[Any]):
    """One pass over an epoch, or over the rest of one.

    It begins when its first batch is requested, and ends when the loader is moved or closed. The loader holds a weak
    reference to it, so torch's iterator and the workers end when the last user releases the pass.
    """

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._loader = loader
        self._number = 0
        self._under_way: _UnderWay | None = None
        self._ends: Iterator[Cursor] = iter(())
        self._return_valid_mask, self._return_keys = loader.return_valid_mask, loader.return_keys
        self._keys: Iterator[SampleKeys] | None = None
        self._reporter: DownloadReporter | None = None
        self._paused_at: Cursor | None = None

    def __next__(self) -> Any:
        if self._number == 0:
            self._begin()
        elif self._paused_at is not None and self._loader._is_current(self._number):
            self._resume(self._paused_at)
        under_way, self._under_way = self._under_way, None  # any error from here on ends the pass
        if under_way is None or not self._loader._is_current(self._number):
            raise StopIteration
        began = perf_counter_ns()
        try:
            made = next(under_way.batches, None)
            if made is not None and under_way.bad is not None:
                under_way.bad.add(made[1].item(_READ), made[1].item(_BAD))
        except BaseException as error:
            dead = workers.dead_worker(under_way.groups) if type(error) is RuntimeError else None  # torch's own
            self._loader._end_workers(under_way.groups)
            if dead is not None:
                if dead.read_lost_bytes:
                    source = source_of(self._loader.dataset)
                    try:
                        source.check_unchanged(range(len(source.catalog.shards)))
                    except StreamingError as changed:
                        raise changed.with_context(str(dead)) from error
                directory, rank = planner_of(self._loader.dataset).debug.sample_log, under_way.start.world.rank
                sample = last_sample(directory, rank, dead.worker, dead.pid)
                raise SampleError(f"{dead}; {sample}") from error
            raise
        finally:
            if self._reporter is not None:
                self._reporter.close()
                self._reporter = None
        waited = perf_counter_ns() - began
        end = next(self._ends, None)
        if made is None and end is None:
            raise StopIteration
        if made is None or end is None:
            raise ConfigError(
                f"the pass has {'fewer' if end else 'more'} batches than its epoch",
                hint="a dataset must yield exactly the samples of its share; an __iter__ that yields fewer or more is "
                "for torch's DataLoader, and here a collate_fn= does that",
            )
        (batch, measures), loader = made, self._loader
        if self._keys is not None:
            keys, collected = delivered_keys(next(self._keys), under_way.replaced), loader._progress.collected_keys
            if collected is not None:
                collected.append(keys)
            if self._return_valid_mask:
                batch = add_valid(batch, keys, of_packs=planner_of(loader.dataset).assembler.collates_packs)
            if self._return_keys:
                batch = KeyedBatch(batch, keys)
        loader._tally.add(measures, waited)
        loader._progress.end = end
        loader._progress.unclaimed.append(end)
        run_state_of(loader.dataset).note_yielded(under_way.start, end)
        self._under_way = under_way
        return batch

    def close(self) -> None:
        """End the pass and its workers; those that are in the middle of a sample end within a second or two."""
        under_way, self._under_way = self._under_way, None
        self._paused_at = None
        self._loader._end_workers(under_way and under_way.groups)
        self._keys = None  # which hold the order, maybe a mapped file

    def _pause(self, *, always: bool = False) -> None:
        under_way, loader = self._under_way, self._loader
        if under_way is None or not (always or (under_way.groups is not None and loader.num_workers)):
            return
        if loader.num_workers:
            loader._end_workers(under_way.groups)
        # Batches that were prefetched take memory, as the workers did.
        self._under_way = under_way._replace(groups=None, batches=iter(()), replaced={}, fetched=None)
        if self._number == loader._progress.passes_begun:
            self._paused_at = loader._progress.end or under_way.start.cursor

    def _resume(self, end: Cursor) -> None:
        """Begin the rest of the pass, or end it if all of it was yielded."""
        paused, self._under_way, self._paused_at = self._under_way, None, None
        assert paused is not None, "it was under way when it was paused"
        if end == paused.start.cursor.passes_later(1):
            return
        self._begin(end)
        assert self._under_way is not None, "just begun"
        self._under_way = self._under_way._replace(bad=paused.bad)  # whose limits are those of the whole pass

    def _begin(self, continues: Cursor | None = None) -> None:
        loader = self._loader
        self._number, self._under_way = loader._begin_pass(self, continues)
        start, catalog = self._under_way.start, source_of(loader.dataset).catalog
        epoch = run_state_of(loader.dataset).epoch_of(start)
        self._ends = _ends_of_batches(epoch.partition, start.cursor, loader.drop_last)
        if self._return_valid_mask or self._return_keys or loader._progress.collected_keys is not None:
            self._keys = (
                keys_of_batches(start, drawn_sequence(epoch), epoch.partition, catalog)
                if start.world.is_reader
                else repeat(no_keys(start, catalog))
            )
        download_callback, loader._progress.download_callback = loader._progress.download_callback, None
        if download_callback is not None and self._under_way.fetched is not None:
            self._reporter = DownloadReporter(download_callback, self._under_way.fetched, len(catalog.shards))


class _UnderWay(NamedTuple):
    start: EpochStart
    groups: Iterator[workers.BatchGroup] | None
    """torch's iterator; None for a rank that reads no samples."""
    batches: Iterator[workers.Measured]
    replaced: dict[int, Replacement]
    """Samples that are in the places of others, by position."""
    bad: BadTally | None
    """Counts those; None where a bad sample is an error."""
    fetched: FetchCounts | None = None
    """Counts of fetched shards; None without a callback for them."""


def _repeated(
    batches: Iterator[workers.Measured], read: int, num_batches: int, nothing: NDArray[np.int64]
) -> Iterator[workers.Measured]:
    """Yield the first ``read`` batches, and repeat them until there are ``num_batches``; repeats took ``nothing``."""
    kept = list[Any]()
    for number in range(num_batches):
        measures = nothing
        if number < read and (made := next(batches, None)) is not None:
            kept.append(made[0])
            measures = made[1]
        batch = kept[number % len(kept)]
        yield (copy(batch) if isinstance(batch, dict | list) else batch), measures  # a step may pop entries


def _ends_of_batches(partition: Partition, start: Cursor, drop_last: bool) -> Iterator[Cursor]:
    """Yield where each batch of a pass ends; the last one ends at the beginning of the next epoch."""
    batches = partition.num_batches(drop_last)
    for first in range(1, batches, _AT_ONCE):
        for position in partition.positions_after(np.arange(first, min(first + _AT_ONCE, batches))).tolist():
            yield Cursor(start.epoch, position)
    if batches:
        yield start.passes_later(1)


def keep_length_of_first_epoch(loader: StreamingDataLoader) -> None:
    """Let the length of a loader be that of epoch 0 until it is moved, as before the run was resumed.

    Lightning computes the steps of all epochs from it.
    """
    loader._progress.has_length_of_first_epoch = True


def watch_length(loader: StreamingDataLoader, callback: Callable[[], None] | None) -> None:
    """Call a function when weights that are set have changed the number of batches of an epoch; None to stop."""
    loader._progress.length_callback = callback


def watch_first_download(loader: StreamingDataLoader, callback: DownloadCallback) -> None:
    """Report what the next pass fetches until its first batch, if it fetches anything.

    Args:
        loader: The loader.
        callback: Called in a thread with the files fetched so far whenever that changes, and with None at the end.
    """
    loader._progress.download_callback = callback


def collect_keys(loader: StreamingDataLoader, keys: deque[SampleKeys] | None) -> None:
    """Append the keys of each batch to a deque as it is yielded, in passes that begin from here on.

    Args:
        loader: The loader.
        keys: Receives the keys; None to stop.
    """
    loader._progress.collected_keys = keys


def no_batch_error(loader: StreamingDataLoader) -> ConfigError | None:
    """Return the error of a loader of which no epoch has a batch; None if epochs have some."""
    epoch = run_of(loader).unskipped(Cursor(0, 0))
    if epoch.num_batches(loader.drop_last) or not loader.drop_last:
        return None
    samples = epoch.samples_per_rank()
    machines = epoch.geometry
    ranks = "the only rank" if machines.num_ranks == 1 else f"each of {machines.num_ranks} ranks"
    return ConfigError(
        f"drop_last=True leaves no batch at all: an epoch has {samples} samples for {ranks}, and a batch has "
        f"{machines.batch_size}",
        hint=f"pass drop_last=False, a batch_size of {samples} at most, or more data",
        option="drop_last",
    )
