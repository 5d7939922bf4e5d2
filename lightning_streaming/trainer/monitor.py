"""Cost of loading data for training: metrics for the loggers every few steps, a line of advice at the end."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_streaming.reading.dataset import dataset_world, run_state_of
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.measures import LoaderStatistics, WaitTimes
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.reading.ranks import from_all
from lightning_streaming.signatures import public
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.trainer.rank_waits import RankWait, rank_metrics, straggler
from lightning_streaming.units import check_truth


@public()
class StreamingMonitor(Callback):
    """Callback that logs metrics of each :class:`~lightning_streaming.StreamingDataLoader` among the train loaders.

    Each ``log_every_n_steps`` it logs the metrics of the steps since, under names that begin with ``data/``, or
    ``data/<loader>/`` if there are several; docs/monitoring.md lists them. They are those of global rank 0; names that
    begin with ``global_`` are estimates: those of rank 0 times the number of ranks that read different samples. With a
    schedule of mixtures it prints a line whenever a phase begins. If ``fit`` waited for data for a tenth of its time or
    more, it prints a line of advice at the end.

    It only reads :meth:`~lightning_streaming.StreamingDataLoader.statistics`, and saves nothing in checkpoints.

    Args:
        every_rank: Also log how long each rank waited, and which waited the longest. Ranks exchange their statistics
            whenever metrics are logged, and at the end.
    """

    def __init__(self, every_rank: bool = False) -> None:
        check_truth("every_rank", every_rank)
        self._every_rank = bool(every_rank)
        self._watched: dict[str, _Watched] = {}
        self._clock = _TrainingClock()
        self._logged_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._watched = {}
        self._clock = _TrainingClock()
        self._logged_at = 0.0
        self._look(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the loaders: Lightning may have recreated them."""
        self._look(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Print the phase that begins, if any."""
        for watched in self._watched.values() if trainer.is_global_zero else ():
            line = watched.new_phase()
            if line:
                rank_zero_info(line)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log metrics, if the trainer logs in this step."""
        for watched in self._watched.values() if trainer.is_global_zero else ():
            watched.end_batch()
        step = lightning_internals.logging_step(trainer)
        if step is None or not trainer.loggers or not (trainer.is_global_zero or self._every_rank):
            return
        self._look(trainer)
        now = self._clock.seconds()
        seconds, self._logged_at = now - self._logged_at, now
        metrics: dict[str, float] = {}
        for name, watched in self._watched.items():
            prefix = "data/" if len(self._watched) == 1 else f"data/{name}/"
            taken = watched.take()
            numbers = _metrics(taken, seconds, watched.num_ranks)
            if self._every_rank:
                numbers |= rank_metrics(_of_all_ranks(taken, seconds))
            metrics |= {f"{prefix}{key}": value for key, value in numbers.items()}
            if watched.phase is not None:
                metrics[f"{prefix}phase"] = watched.phase
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(metrics, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the counts of loaders before Lightning recreates them."""
        self._look(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of training during validation."""
        self._clock.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the clock of training."""
        self._clock.go_on()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print advice about the slowest loader, if data was the bottleneck."""
        self._look(trainer)
        seconds = self._clock.seconds()
        waits = {
            name: _of_all_ranks(watched.in_fit, seconds) if self._every_rank else [RankWait(watched.in_fit, seconds)]
            for name, watched in self._watched.items()
        }
        slowest = max(waits, key=lambda name: max(rank.share for rank in waits[name]), default=None)
        line = slowest and advice(waits[slowest], self._watched[slowest].setup)
        if line:
            rank_zero_info(line)

    def _look(self, trainer: Trainer) -> None:
        for name, loader in lightning_internals.streaming_loaders(trainer).items():
            if name not in self._watched:
                self._watched[name] = _Watched(name, loader)
            self._watched[name].look(loader)


class _Watched:
    """One of the train loaders, by name: another loader may take its place."""

    def __init__(self, name: str, loader: StreamingDataLoader) -> None:
        self._name = name
        self._since_taken = self.in_fit = LoaderStatistics()
        self._seen = loader.statistics()
        self.phase: int | None = None
        """The phase of the batch's first sample, counted from 0; None without phases."""
        self._begin(loader)

    def look(self, loader: StreamingDataLoader) -> None:
        """Add the loader's statistics since the last call."""
        now = loader.statistics()
        if self._loader() is not loader:
            self._seen = LoaderStatistics()
            self._begin(loader)
        new = now.since(self._seen)
        self._seen = now
        self.in_fit += new
        self._since_taken += new

    def take(self) -> LoaderStatistics:
        """Return the statistics since the last call."""
        taken, self._since_taken = self._since_taken, LoaderStatistics()
        return taken

    def new_phase(self) -> str | None:
        """Return a message when a batch is of another phase than the previous one; else None."""
        loader = self._loader()
        if loader is None or not self._phases:
            return None
        phase = run_of(loader).phase(self._place)
        if self.phase is not None and phase == self._phases[self.phase]:
            return None
        self.phase = self._phases.index(str(phase))
        return f"{self._name}: reading phase {phase!r}, number {self.phase}, at {self._place}."

    def end_batch(self) -> None:
        """Record the start of the next batch."""
        loader = self._loader()
        if loader is not None and self._phases:
            self._place = position_of(loader).cursor()

    def _begin(self, loader: StreamingDataLoader) -> None:
        # A weak reference: only Lightning keeps a loader, or its workers would not end.
        self._loader = weakref.ref(loader)
        self.num_ranks = dataset_world(loader.dataset).num_ranks
        self.setup = LoadingSetup(
            name=self._name, num_workers=loader.num_workers, persistent_workers=loader.persistent_workers
        )
        self._place = position_of(loader).cursor()
        self._phases: list[str] = [phase.name for phase in run_state_of(loader.dataset).request.phases]


@dataclass
class _TrainingClock:
    """Seconds of training since its creation, without those while it is stopped."""

    _began: float = field(default_factory=perf_counter)
    _stopped: float | None = None

    def seconds(self) -> float:
        """Return the seconds until now."""
        return (perf_counter() if self._stopped is None else self._stopped) - self._began

    def stop(self) -> None:
        """Stop the clock."""
        self._stopped = perf_counter()

    def go_on(self) -> None:
        """Start the clock again."""
        if self._stopped is not None:
            self._began += perf_counter() - self._stopped
            self._stopped = None


def _of_all_ranks(statistics: LoaderStatistics, seconds: float) -> list[RankWait]:
    return from_all(lambda _: RankWait(statistics, seconds))


def _metrics(statistics: LoaderStatistics, seconds: float, num_ranks: int) -> dict[str, float]:
    """Return the metrics of some steps; docs/monitoring.md explains each."""
    batches, wait = max(1, statistics.batches), statistics.wait
    samples_per_s = statistics.samples / seconds
    return {
        "wait_ms": 1000 * wait.total / batches,
        **{f"wait_{reason}_ms": 1000 * value / batches for reason, value in wait._asdict().items()},
        "wait_share": wait.total / seconds,
        "ready_share": statistics.ready_batches / batches,
        "step_ms": 1000 * (seconds - wait.total) / batches,
        "samples_per_s": samples_per_s,
        "global_samples_per_s": num_ranks * samples_per_s,
        "bytes_per_s": statistics.sample_bytes / seconds,
        **_metrics_of_tokens(statistics, seconds, num_ranks),
        "fetched_bytes_per_s": statistics.fetched_bytes / seconds,
        "shards_opened": statistics.shards_opened,
        "cache_hits": statistics.cache_hits,
        "shards_open": statistics.shards_open,
        "bad_samples": statistics.bad_samples,
        **{f"stream/{name}": samples for name, samples in statistics.samples_per_stream.items()},
        **{f"stream_tokens/{name}": tokens for name, tokens in statistics.tokens_per_stream.items()},
        **{f"stream_download_ms/{name}": 1000 * s / batches for name, s in statistics.download_per_stream.items()},
    }


def _metrics_of_tokens(statistics: LoaderStatistics, seconds: float, num_ranks: int) -> Mapping[str, float]:
    if not statistics.token_room:
        return {}
    fill, tokens_per_s = statistics.tokens / statistics.token_room, statistics.tokens / seconds
    return {
        "tokens_per_s": tokens_per_s,
        "global_tokens_per_s": num_ranks * tokens_per_s,
        "fill": fill,
        "padding_share": 1 - fill,
    }


_BOTTLENECK = 0.1
"""Share of the time waited from which data is worth a word."""
_REASONS = {
    "download": "downloads",
    "decompress": "decompression",
    "decode": "reading, decoding and collating",
    "queue": "batches on their way from worker processes",
    "start": "passes to begin",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingSetup:
    """Settings of a loader that advice depends on."""

    name: str
    """The loader's name among the train loaders."""
    num_workers: int
    persistent_workers: bool


def advice(ranks: Sequence[RankWait], setup: LoadingSetup) -> str | None:
    """Return advice for a run that waited for its data; None for one that did not.

    Args:
        ranks: What each rank waited in this run; only that of rank 0 if the others are unknown.
        setup: Settings of the loader.
    """
    shares = [rank.share for rank in ranks]
    statistics, seconds = slowest = ranks[shares.index(max(shares))]
    waited = statistics.wait.total
    if not statistics.batches or waited < _BOTTLENECK * seconds:
        return None
    reason = main_reason(statistics.wait)
    share = getattr(statistics.wait, reason) / waited
    rank = ""
    if len(ranks) > 1 and (lagging := straggler(ranks)) is not None:
        rank = f" on rank {lagging} (the median rank: {median(shares):.0%})"
    stream = ""
    per_stream = statistics.download_per_stream
    if reason == "download" and len(per_stream) > 1:
        longest = max(per_stream, key=per_stream.__getitem__)
        stream = f", {per_stream[longest] / statistics.wait.download:.0%} of that for stream {longest!r}"
    return (
        f"Waited for the data of {setup.name!r} {slowest.share:.0%} of the training time ({waited:.1f} of "
        f"{seconds:.1f} s){rank}, mostly for {_REASONS[reason]} ({share:.0%} of it{stream}): {_fix_for(reason, setup)}."
    )


def main_reason(wait: WaitTimes) -> str:
    """Return the field of :class:`WaitTimes` that is the largest."""
    return max(WaitTimes._fields, key=lambda name: float(getattr(wait, name)))


def _fix_for(reason: str, setup: LoadingSetup) -> str:
    more_workers = "raise num_workers" if setup.num_workers else "load in other processes with num_workers=1 or more"
    if reason == "download":
        return f"raise predownload, {more_workers}, keep a cache across runs with local=, or bring the data nearer"
    if reason == "decompress":
        return f"raise predownload, {more_workers}, or store the data with a faster compression"
    if reason == "decode":
        return f"{more_workers}, read fewer columns=, or make the transform cheaper"
    if reason == "queue":
        return "make batches smaller, or start no more workers than the machine has cores for"
    if setup.num_workers and not setup.persistent_workers:
        return "set persistent_workers=True, so that workers are started once and not in every epoch"
    return "begin fewer passes, with a larger epoch_size"
