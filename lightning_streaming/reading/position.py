"""The position of a loader in its run: the ends of the batches that it yielded, and where its next pass begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_streaming.reading.dataset import dataset_world
from lightning_streaming.reading.passes import run_state_of
from lightning_streaming.resume.run import Run
from lightning_streaming.resume.state import Cursor

if TYPE_CHECKING:
    from lightning_streaming.reading.loader import StreamingDataLoader


def run_of(loader: StreamingDataLoader) -> Run:
    """Return the run as a loader reads it: what its batches, their ends and a saved position mean."""
    return run_state_of(loader.dataset).on(dataset_world(loader.dataset), loader._samples_per_batch, loader.drop_last)


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Position of a loader, for a trainer that fetches batches ahead of the steps that use them."""

    loader: StreamingDataLoader

    def cursor(self) -> Cursor:
        """Return where the next batch to be yielded begins."""
        end = self.loader._progress.end
        return run_state_of(self.loader.dataset).next_cursor() if end is None else end

    def claim(self) -> Cursor | None:
        """Return where the oldest batch ends that was yielded and not claimed yet; None if there is none.

        A trainer that consumes batches later than they are yielded claims each when it is done with it, and so knows
        the position that is safe to save.
        """
        unclaimed = self.loader._progress.unclaimed
        return unclaimed.popleft() if unclaimed else None

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way ends."""
        self.loader._forget_pass()
        run_state_of(self.loader.dataset).seek(cursor)

    def normalised(self, cursor: Cursor) -> Cursor:
        """Return the same position, with the end of an epoch written as the beginning of the next."""
        return run_state_of(self.loader.dataset).normalise(run_of(self.loader), cursor)

    def batches_of_epoch(self) -> int:
        """Count the batches, on each rank, of the whole epoch of the next batch, without those that are skipped."""
        run = run_of(self.loader)
        return run.batches_in_epoch(run.normalise(self.cursor()))

    @property
    def samples_per_global_batch(self) -> int:
        """Samples of one batch over all ranks that read different ones."""
        return self.loader._samples_per_batch * dataset_world(self.loader.dataset).num_ranks


def position_of(loader: StreamingDataLoader) -> LoaderPosition:
    """Return the position of a loader."""
    return LoaderPosition(loader)
