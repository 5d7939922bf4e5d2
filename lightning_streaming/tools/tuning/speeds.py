"""How fast a loader hands out batches to somebody who does nothing with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

from lightning_streaming.errors import ConfigError, SampleError, StreamingError
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.measures import WaitTimes
from lightning_streaming.tools.tuning.failure import reading_failed

WORTHWHILE = 1.1
"""A setting this many times as fast as another is better than noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What one loader has handed out after its first batch, and how long that took in seconds."""

    workers: int
    seconds: float
    batches: int
    samples: int
    sample_bytes: int
    """Bytes of these samples, uncompressed."""
    wait: WaitTimes
    first_batch: float
    """Seconds from making the loader to its first batch."""

    @property
    def batch_seconds(self) -> float:
        """Seconds from one batch to the next."""
        return self.seconds / self.batches

    @property
    def samples_per_second(self) -> float:
        """Samples handed out in a second."""
        return self.samples / self.seconds

    def step_seconds(self, consumer: float) -> float:
        """Seconds from one training step to the next.

        Workers make batches while a step is taken, the training process itself makes them between two.

        Args:
            consumer: Seconds that a step takes when its batch is there.
        """
        return max(self.batch_seconds, consumer) if self.workers else self.batch_seconds + consumer


def measure(loader: StreamingDataLoader, seconds: float) -> Speed:
    """Read an epoch from its beginning, again and again if it is short, then close the loader.

    Args:
        loader: A new one.
        seconds: How long to go on after the first batch; at least one more batch is read.

    Raises:
        ConfigError: An epoch has no batch.
    """
    with closing(loader):
        loader.dataset.next_epoch = 0
        began = perf_counter()
        batches = iter(loader)
        if next(batches, None) is None:
            raise ConfigError("an epoch of this data has no batch; with drop_last it must fill one")
        first, before = perf_counter() - began, loader.statistics()
        began = perf_counter()
        while True:
            for _ in batches:
                if (passed := perf_counter() - began) >= seconds:
                    read = loader.statistics().since(before)
                    return Speed(
                        workers=loader.num_workers,
                        seconds=passed,
                        batches=read.batches,
                        samples=read.samples,
                        sample_bytes=read.sample_bytes,
                        wait=read.wait,
                        first_batch=first,
                    )
            batches = iter(loader)


def measure_each(
    make: Callable[[int], StreamingDataLoader],
    candidates: Iterable[int],
    seconds: float,
    consumer: float,
    tell: Callable[[Speed], object],
) -> list[Speed]:
    """Measure one number of workers after another, until more of them do not help any more.

    Before that, the first is read for as long without being counted, so that all find the data in memory alike.

    Args:
        make: Makes a loader with so many workers.
        candidates: Numbers of workers, in ascending order.
        seconds: For each.
        consumer: Seconds that a training step takes; 0 if nobody knows.
        tell: Told of each.

    Raises:
        ConfigError: An epoch has no batch, or a function of the run failed.
        StreamingError: The data could not be read.
    """
    speeds: list[Speed] = []
    for workers in candidates:
        try:
            if not speeds:
                measure(make(workers), seconds)
            speeds.append(measure(make(workers), seconds))
        except Exception as error:
            if isinstance(error, StreamingError) and not isinstance(error, SampleError):
                raise
            raise reading_failed(workers, error) from error
        tell(speeds[-1])
        if is_enough(speeds, consumer):
            break
    return speeds


def is_enough(speeds: Sequence[Speed], consumer: float) -> bool:
    """Whether more workers need not be tried: the last ones keep up with training, or two steps up gained nothing.

    One step may gain nothing by chance.
    """
    of_workers = [speed for speed in speeds if speed.workers]
    if of_workers and of_workers[-1].batch_seconds * WORTHWHILE <= consumer:
        return True
    times = [speed.batch_seconds for speed in of_workers[-3:]]
    return len(times) == 3 and times[0] < times[1] * WORTHWHILE and times[1] < times[2] * WORTHWHILE
