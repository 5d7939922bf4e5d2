"""Integration with Accelerate, transformers and Lightning, which are refused where samples would be lost.

Accelerate shards what a loader reads among its processes. Our dataset gives each rank its own samples already: sharded
twice, most samples would never be read. None of these packages is imported unless the user has done so.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_streaming.errors import ConfigError
from lightning_streaming.resume.state import Cursor
from lightning_streaming.units import check_whole
from lightning_streaming.world import World

_WAY_OUT = "give Accelerate, or Trainer.get_train_dataloader, a StreamingDataLoader; see docs/other-trainers.md"


class AcceleratedLoader(DataLoader[Any]):
    """A loader that Accelerate iterates over unchanged, and whose state it saves and loads with its own."""

    use_stateful_dataloader = True
    """Accelerate saves and loads the state of loaders with this attribute."""
    _is_accelerate_prepared = True
    """Accelerate leaves loaders with this attribute as they are, and does not shard what they read."""

    @property
    def _is_accelerated(self) -> bool:
        """Whether the loader was passed to ``Accelerator.prepare``, which sets the attribute on what it returns."""
        return "_is_accelerate_prepared" in vars(self)


class _BatchIterator(Protocol):
    """A pass over a loader."""

    def __next__(self) -> Any:
        """Return the next batch."""

    def close(self) -> None:
        """End the pass."""


class _ReaderState:
    """Attributes of a loader that Accelerate reads, by the names that its loaders have."""

    end_of_dataloader = False
    """Whether the latest batch was the last, which ends an accumulation."""
    remainder = -1
    """Samples of the last batch to count in metrics. Unknown: those read twice are not the last of a gathered batch."""


class AcceleratedPass(Iterator[Any]):
    """A pass that reports to Accelerate what its own loaders report, and puts batches on its device.

    Args:
        batches: The pass.
        is_over: Returns, after a batch, whether it was the last.
        non_blocking: Whether to move batches to the device while training continues.
    """

    def __init__(self, batches: _BatchIterator, is_over: Callable[[], bool], *, non_blocking: bool) -> None:
        self._batches = batches
        self._is_over = is_over
        self._non_blocking = non_blocking
        self._state: _ReaderState | None = None
        self._end: Callable[[], object] = _do_nothing

    def __next__(self) -> Any:
        from accelerate import PartialState
        from accelerate.utils import send_to_device

        state = self._state or self._begin()
        try:
            batch = next(self._batches)
        except BaseException:
            self._end()
            raise
        state.end_of_dataloader = self._is_over()
        return send_to_device(batch, PartialState().device, non_blocking=self._non_blocking)

    def close(self) -> None:
        """End the pass and the workers."""
        self._end()
        self._batches.close()

    def _begin(self) -> _ReaderState:
        from accelerate.state import GradientState

        gradients, state = GradientState(), _ReaderState()
        gradients._add_dataloader(state)
        self._state = state
        forgotten = weakref.finalize(self, gradients._remove_dataloader, state)  # also where a loop is left early
        forgotten.atexit = False
        self._end = forgotten
        return state


def _do_nothing() -> None:
    """Do nothing: the pass has not begun."""


class AcceleratedDataset(ABC):
    """A dataset whose epochs and batches another library may count, as Accelerate and transformers do.

    A loader that would leave samples out is refused.
    """

    batch_size: int | None
    next_epoch: int
    _loaded: Cursor | None = None
    _is_reader_checked = False

    @abstractmethod
    def _next_cursor(self) -> Cursor:
        """Return where the next pass begins."""

    @abstractmethod
    def _current_world(self) -> World:
        """Return the position of this process among those that read different samples."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass read ``epoch`` from its beginning: for libraries that themselves count epochs and batches.

        Raises:
            ConfigError: A state with another position was loaded; use ``next_epoch`` to leave it.
        """
        epoch = check_whole("epoch", epoch, 0)
        place = self._next_cursor()
        if place == self._loaded and place != (epoch, 0):
            raise ConfigError(
                f"a state was loaded that continues at epoch {place.epoch}, sample {place.sample_in_epoch}, and "
                f"set_epoch({epoch}) would leave that position",
                hint="read through a StreamingDataLoader, or load no state where Accelerate or transformers skip "
                "batches themselves; see docs/other-trainers.md",
            )
        self.next_epoch = epoch
        self._check_reader(self._next_cursor())

    def _check_reader(self, place: Cursor | None) -> None:
        """Check that a reader leaves no samples out; ``place`` is where it begins, None if unknown."""
        info = get_worker_info()
        if (place or self._next_cursor()) == (0, 0) and (info is None or info.id == 0):
            _warn_if_lightning_trains()
        reader = _reader_of(self)
        if reader is not None:
            _check_reader(reader, self._current_world(), self.batch_size, place)

    def _check_reader_of_worker(self, place: Cursor) -> None:
        """Check the reader in a worker, which knows its reader as it was when the worker began."""
        if not self._is_reader_checked:
            self._is_reader_checked = True
            self._check_reader(place)

    def _check_is_counted_here(self) -> None:
        """Check that this process counts the samples, so that it knows the position."""
        if get_worker_info() is not None:
            raise ConfigError(
                "state_dict() was called in a worker, as torchdata's StatefulDataLoader does. A worker knows what it "
                "has read, not what the others have",
                hint="take the state of a StreamingDataLoader",
            )
        if _reader_of(self) is not None:
            raise ConfigError(
                "a loader of Accelerate's own reads this dataset, some batches ahead, so the dataset does not know "
                "which were used",
                hint="give Accelerate a StreamingDataLoader and take its state; see docs/other-trainers.md",
            )


def _check_reader(reader: Any, world: World, batch_size: int | None, place: Cursor | None) -> None:
    iteration = getattr(reader, "iteration", None)
    if iteration is None:
        raise ConfigError(
            "Accelerate's skip_first_batches reads the dataset past its loader, which alone knows the position",
            hint="leave it out, as load_state has put a StreamingDataLoader back already; for Trainer, set "
            "ignore_data_skip=True and load the loader's state; see docs/other-trainers.md",
        )
    if world.num_ranks > 1:
        raise ConfigError(
            f"Accelerate deals out what a loader reads, and the dataset gives this rank its share of {world.num_ranks} "
            "already: dealt out twice, most samples would not be read",
            hint=f"{_WAY_OUT}; or pass world=World() to the dataset, so that Accelerate has all samples to deal out",
        )
    if place is not None and place != (iteration, 0):
        raise ConfigError(
            f"Accelerate is about to read epoch {iteration} from its beginning, and the dataset is at epoch "
            f"{place.epoch}, sample {place.sample_in_epoch}",
            hint="load no state into a dataset that Accelerate's loaders read, and have a dataset around it pass on "
            f"set_epoch(); {_WAY_OUT}",
        )
    # The consecutive samples that Accelerate takes from one worker at a time.
    shard, together = reader.dataset, int(reader.batch_size or 1)
    if getattr(shard, "num_processes", 1) != 1:
        together = int(shard.batch_size if shard.split_batches else shard.batch_size * shard.num_processes)
    if reader.num_workers > 1 and batch_size is not None and batch_size % together:
        raise ConfigError(
            f"the dataset deals out batches of {batch_size} among {reader.num_workers} workers, and Accelerate forms "
            f"groups of {together} from each, so its epoch would have more batches than its length and the last would "
            "be left out",
            hint=f"pass batch_size={together} to the dataset, or read with at most one worker; {_WAY_OUT}",
        )


def _reader_of(dataset: object) -> Any | None:
    """Return Accelerate's loader that iterates over a dataset now; None if it picks single samples."""
    state = sys.modules.get("accelerate.state")
    if state is None:
        return None
    reader = state.GradientState().active_dataloader
    of_reader = getattr(reader, "dataset", None)
    if not isinstance(of_reader, IterableDataset):
        return None
    return reader if any(inner is dataset for inner in datasets_within(of_reader)) else None


_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
_OF_THE_LOADER = ("torch.utils.data", "torch.multiprocessing", "multiprocessing")
_CALLBACK = "lightning_streaming.StreamingStateCallback"


def _warn_if_lightning_trains() -> None:
    """Warn if torch's own loader that begins to read a dataset is one that Lightning trains from.

    Where :class:`StreamingStateCallback` is, it refuses the loader itself.
    """
    if not {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys():
        return
    loop = _fit_loop_above(sys._getframe(1))
    if loop is None or _CALLBACK in (getattr(callback, "state_key", None) for callback in loop.trainer.callbacks):
        return
    warnings.warn(
        "Lightning trains from a torch DataLoader around a StreamingDataset. No checkpoint has the position of such a "
        "loader: a resumed epoch begins again at the first sample of the first. Use StreamingDataLoader and "
        "StreamingStateCallback, or StreamingDataModule, which has both.",
        UserWarning,
        stacklevel=2,
    )


def _fit_loop_above(frame: FrameType | None) -> Any | None:
    """Return the fit loop whose own loader begins to read; None if there is none, or if another loop or hook reads.

    Lightning does not report that it trains, so the stack is searched: a loader of torch, started by Lightning's
    combination of loaders, started by a loop. Workers that are forked have the same stack.
    """
    while frame is not None and not _module(frame).startswith(_OF_THE_LOADER):
        frame = frame.f_back
    while frame is not None and _module(frame).startswith(_OF_THE_LOADER):
        frame = frame.f_back
    if frame is None or not _module(frame).endswith(".utilities.combined_loader"):
        return None
    while frame is not None:
        if _module(frame).startswith(_LIGHTNING) and _module(frame).endswith((".evaluation_loop", ".prediction_loop")):
            return None
        if _module(frame).startswith(_LIGHTNING) and _module(frame).endswith(".fit_loop"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_Holders = (Dataset, dict, list, tuple)  # no other mapping: a file's, say, would read all its values
_MOST_HELD = 100_000
"""Entries of a list or dict beyond which it holds samples, not datasets."""


def datasets_within(holder: object) -> Iterator[object]:
    """Yield a dataset and all that it holds, also in lists and dicts; nothing for anything else."""
    yield from _within([holder], set())


def _within(holders: Iterable[object], known: set[int]) -> Iterator[object]:
    for holder in holders:
        if not isinstance(holder, _Holders) or id(holder) in known:
            continue
        known.add(id(holder))
        if isinstance(holder, Dataset):
            yield holder
            yield from _within(vars(holder).values(), known)
        elif len(holder) <= _MOST_HELD:
            yield from _within(holder.values() if isinstance(holder, dict) else holder, known)
