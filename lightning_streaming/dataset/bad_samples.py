"""Samples that cannot be read, and their replacements.

BadSamples      in one worker's pass: decides what is bad, logs it, and chooses another sample of the same shard
BadTally        in the process that consumes samples: counts, warns once, and ends a run with too many bad samples
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.dataset.bad_log import BadSample, bad_log_path, read_bad_samples, write_bad_sample
from lightning_streaming.dataset.sample_key import Replacement, Row, SampleKey, keys_of_rows
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.errors import (
    BadSamplesError,
    ConfigError,
    EncodingError,
    ObjectNotFoundError,
    SampleError,
    StorageError,
    StreamingError,
)
from lightning_streaming.escaping import in_one_line, package_logger
from lightning_streaming.options.reading import BadSamplesConfig, parse_limit
from lightning_streaming.resume.state import EpochStart

_log = package_logger(__name__)
_MOST_ATTEMPTS = 8
"""Replacements that are tried for one sample."""
_MOST_SHOWN = 3
"""Bad samples that an error lists."""
_NOT_OF_SAMPLE = (
    *(ConfigError, StorageError, MemoryError, torch.cuda.OutOfMemoryError),
    *(ConnectionError, TimeoutError, socket.gaierror),
)
"""Errors that no sample causes, nor others that were raised from them."""
_ERRNOS_NOT_OF_SAMPLE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOLCK),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)
"""Numbers of an OSError of the disk, the network or the limits of the process; a missing file may be the sample's."""
MISSING = object()
"""Marks a document of a pack that could not be read; it is replaced by padding."""


def choose_other(key: tuple[int, int, int], attempt: int, tried: Collection[int], count: int) -> int | None:
    """Return which sample of a shard to try next as a replacement.

    Args:
        key: Seed, epoch and position of the sample.
        attempt: Number of the attempt, from 1.
        tried: Samples that were tried before, by their numbers in ``[0, count)``.
        count: Samples of the shard.

    Returns:
        The number of a sample that was not tried; None if all were.
    """
    left = count - len(tried)
    if left <= 0:
        return None
    words = " ".join(map(str, (*key, attempt))).encode()
    chosen = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little") % left
    for number in sorted(tried):
        chosen += chosen >= number
    return chosen


def is_bad_sample(error: StreamingError) -> bool:
    """Return whether an error is about its sample, and not about settings, stores, shards or the machine.

    Args:
        error: The error as it would be raised to the consumer.
    """
    seen, cause = set[int](), cast("BaseException | None", error)
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, _NOT_OF_SAMPLE) or (isinstance(cause, OSError) and cause.errno in _ERRNOS_NOT_OF_SAMPLE):
            return False
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    cause = error.__cause__
    is_of_user = type(error) is SampleError and cause is not None
    return isinstance(error, EncodingError) or (is_of_user and not isinstance(cause, (StreamingError, ImportError)))


class _KnownBadError(StreamingError):
    """A sample that was bad at this position before."""


class BadSamples:
    """The bad samples of one worker's pass.

    Args:
        options: Options of bad samples, by which they are replaced.
        source: The samples.
        start: The pass.
        worker: Number of the worker in its rank.
        in_packs: Whether samples are documents of packs, which are replaced by padding.
        on_bad: Called for each bad sample of the pass.
        tally: Counts them in this process; None where the consumer of this worker's batches counts.
    """

    def __init__(
        self,
        options: BadSamplesConfig,
        source: SampleSource,
        start: EpochStart,
        worker: int,
        *,
        in_packs: bool,
        on_bad: Callable[[], None],
        tally: BadTally | None,
    ) -> None:
        assert options.log is not None, "checked with the options"
        self.directory = Path(options.log)
        self.known: dict[int, set[tuple[int, int]]] = {}
        """Shards and indexes of samples that were bad before this pass, by position."""
        self._path = bad_log_path(options.log, start.world.rank, worker)
        self._source = source
        self._start = start
        self._in_packs = in_packs
        self._on_bad = on_bad
        self._tally = tally
        self._replaced: list[Replacement] = []

    def begin(self) -> None:
        """Read which positions of this epoch were bad before.

        Raises:
            ConfigError: ``bad_samples.log`` is no directory.
            FormatError: A file there is no log of bad samples.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(
                f"bad_samples.log must be a directory, but {self.directory} is a file",
                hint="pass another path",
                option="bad_samples.log",
                path=str(self.directory),
            )
        catalog = self._source.catalog
        firsts = dict(zip(catalog.stream_names, accumulate(catalog.shards_per_stream, initial=0), strict=False))
        self.known = {}
        for sample in bad_samples_of(self.directory, self._start):
            if sample.key.stream in firsts:
                place = firsts[sample.key.stream] + sample.key.shard, sample.key.sample_index
                self.known.setdefault(sample.key.position, set()).add(place)

    def are_known(self, positions: NDArray[np.int64]) -> bool:
        """Return whether a sample at one of these positions was bad before."""
        return bool(self.known) and not self.known.keys().isdisjoint(positions.tolist())

    def refuse_known(self, position: int, shard: int, index: int) -> None:
        """Raise the error that :meth:`replacement` takes, if the sample at this position was bad before."""
        if (shard, index) in self.known.get(position, ()):
            raise _KnownBadError

    def replaces(self, error: StreamingError) -> bool:
        """Return whether :meth:`replacement` replaces a sample with this error."""
        return isinstance(error, _KnownBadError) or is_bad_sample(error)

    def replacement(self, row: Row, error: StreamingError, make: Callable[[Row], Any]) -> Any:
        """Return the replacement of a sample that could not be read.

        Args:
            row: The sample.
            error: Its error.
            make: Reads another sample of the shard, at the same position; raises as the first one did.

        Raises:
            BadSamplesError: No other sample of its shard could be read either.
            StreamingError: ``error``, where it is not about this sample.
        """
        self._log(row, error, 0)
        self._on_bad()
        if self._tally is not None:
            self._tally.add(read=0, bad=1)
        if self._in_packs:
            return MISSING
        position, shard, index, events = row
        catalog, tried = self._source.catalog, list[int]()
        first, count = int(catalog.first_sample_of_shard[shard]), int(catalog.samples_per_shard[shard])
        number: int | None = int(catalog.ids(np.array([shard]), np.array([index]))[0]) - first
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            assert number is not None, "checked below"
            tried.append(number)
            number = choose_other((self._start.shuffle_seed, self._start.cursor.epoch, position), attempt, tried, count)
            if number is None:
                break
            _, other = catalog.find(first + number)
            try:
                self.refuse_known(position, shard, other)
                sample = make((position, shard, other, events))
            except StreamingError as failure:
                self._log((position, shard, other, events), failure, attempt)
            else:
                key = self._key((position, shard, other, events))
                self._replaced.append(Replacement(position, key.shard, other))
                return sample
        key, others = self._key(row), len(tried) - (number is None)
        why = "was bad before" if isinstance(error, _KnownBadError) else f"is bad: {error}"
        none = f"none of the {others} others of its shard that were tried" if others else "no other sample of its shard"
        raise BadSamplesError(
            message=f"sample {key.sample_index} of shard {key.shard} of stream {key.stream!r} {why}\n"
            f"{none} can replace it; see {self.directory}. Fix the data or the transform, or leave these samples out "
            f"with `lightning-streaming select DATASET --not {self.directory} --out KEEP.npy`",
            stream=key.stream,
            sample=key.sample_index,
        ) from error

    def have_read(self, samples: int) -> None:
        """Note that more samples were read, replacements included."""
        if self._tally is not None:
            self._tally.add(samples, bad=0)

    def take_replacements(self) -> list[Replacement]:
        """Return the replacements since the last call."""
        taken, self._replaced = self._replaced, []
        return taken

    def _log(self, row: Row, error: StreamingError, attempt: int) -> None:
        """Log a bad sample; raise any other error."""
        if isinstance(error, _KnownBadError):
            return
        if not is_bad_sample(error):
            raise error
        write_bad_sample(self._path, self._key(row), attempt, error)

    def _key(self, row: Row) -> SampleKey:
        return keys_of_rows(self._source.catalog, self._start)(row)


def bad_samples_of(directory: Path, start: EpochStart) -> Iterator[BadSample]:
    """Return the logged bad samples of the epoch of a pass, of all ranks and workers."""
    with suppress(ObjectNotFoundError):  # no sample was bad yet
        for sample in read_bad_samples(directory):
            if (sample.key.shuffle_seed, sample.key.epoch) == (start.shuffle_seed, start.cursor.epoch):
                yield sample


class BadTally:
    """Counts the samples that a rank has read in a pass, in the process that consumes them.

    Args:
        options: Options of bad samples, with their limit.
        start: The pass.
        reported: Names of the warnings that were logged; is added to.
    """

    def __init__(self, options: BadSamplesConfig, start: EpochStart, reported: set[str]) -> None:
        assert options.log is not None, "checked with the options"
        self._directory = Path(options.log)
        self._limit = parse_limit(options.max)
        self._start = start
        self._reported = reported
        self._read = self._bad = 0

    def add(self, read: int, bad: int) -> None:
        """Count more samples, some of which are bad.

        Raises:
            BadSamplesError: More samples are bad than the limit allows.
        """
        self._read += read
        self._bad += bad
        if not bad:
            return
        rank, epoch, allowed = self._start.world.rank, self._start.cursor.epoch, self._limit.allowed(self._read)
        if self._bad > allowed:
            raise BadSamplesError(
                message=f"{self._bad} of the {self._read} samples that rank {rank} has read of epoch {epoch} in this "
                f"pass are bad, and bad_samples.max={self._limit.text} allows {allowed}:\n{self._first(_MOST_SHOWN)}\n"
                f"All are listed in {self._directory}. Fix the data or the transform, leave them out with "
                f"`lightning-streaming select DATASET --not {self._directory} --out KEEP.npy`, or raise "
                "bad_samples.max",
                option="bad_samples.max",
                path=str(self._directory),
            )
        if "bad samples" not in self._reported:
            self._reported.add("bad samples")
            words = "rank %d: a sample is bad, and was replaced by another of its shard, or by padding in a pack: %s"
            _log.warning(f"{words}; later ones are only in %s", rank, self._first(1), self._directory)

    def _first(self, most: int) -> str:
        """Return the first bad samples that workers of this rank have logged in this epoch."""
        of_rank = f"bad-rank{self._start.world.rank}-"
        samples = (
            sample
            for path in sorted(self._directory.glob(f"{of_rank}*.jsonl"))
            for sample in bad_samples_of(path, self._start)
            if not sample.attempt
        )
        keyed = sorted(((sample.key.position, sample) for sample in samples), key=lambda pair: pair[0])
        words = (
            f"sample {sample.key.sample_index} of shard {sample.key.shard} of stream {sample.key.stream!r}: "
            f"{in_one_line(sample.error)}"
            for _, sample in islice(keyed, most)
        )
        return "\n".join(f"  {line}" for line in words) if most > 1 else next(words, "known from before")
