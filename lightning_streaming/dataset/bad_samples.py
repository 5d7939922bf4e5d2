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
from typing import Any

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
from lightning_streaming.options.bad_samples import BadSamplesConfig, parse_limit
from lightning_streaming.resume.state import EpochStart

_log = package_logger(__name__)
_MOST_ATTEMPTS = 8
"""Samples that are tried in the place of one."""
_MOST_TOLD = 3
"""Bad samples that an error tells of."""
_NOBODYS_SAMPLE = (
    *(ConfigError, StorageError, MemoryError, torch.cuda.OutOfMemoryError),
    *(ConnectionError, TimeoutError, socket.gaierror),
)
"""What no sample is to blame for, whatever was raised from it."""
_NOBODYS_ERRNOS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOLCK),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)
"""Of an OSError: the disk, the limits of the process or the network fail. Others, like a missing file, may come of what
the sample names."""
MISSING = object()
"""Stands for a document whose place in a pack is filled up."""


def choose_other(key: tuple[int, int, int], attempt: int, tried: Collection[int], count: int) -> int | None:
    """Return which sample of a shard to try next as a replacement.

    Args:
        key: Seed, epoch and position of the place.
        attempt: From 1 on.
        tried: Those that were tried before, by their numbers in ``[0, count)``.
        count: Samples to choose from, those included.

    Returns:
        The number of one that was not tried; None if there is none.
    """
    left = count - len(tried)
    if left <= 0:
        return None
    words = " ".join(map(str, (*key, attempt))).encode()
    chosen = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little") % left
    for one in sorted(tried):
        chosen += chosen >= one
    return chosen


def is_bad_sample(told: StreamingError) -> bool:
    """Return whether an error is about its sample, and not about settings, stores, shards or the machine.

    Args:
        told: The error as whoever reads would be told it.
    """
    if any(map(_is_nobodys_sample, _with_causes(told))):
        return False
    cause = told.__cause__
    is_of_user = type(told) is SampleError and cause is not None
    return isinstance(told, EncodingError) or (is_of_user and not isinstance(cause, (StreamingError, ImportError)))


def _is_nobodys_sample(error: BaseException) -> bool:
    return isinstance(error, _NOBODYS_SAMPLE) or (isinstance(error, OSError) and error.errno in _NOBODYS_ERRNOS)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class _KnownBadError(StreamingError):
    """A sample that was bad at this position before."""


class BadSamples:
    """The bad samples of one worker's pass.

    Args:
        asked: That samples are to be replaced, and where to write.
        source: The samples.
        start: The pass.
        worker: Among the workers of its rank.
        in_packs: Whether samples are documents of packs, whose places are filled up.
        found: Called for each place whose sample is bad.
        tally: Counts them here; None where somebody else does, who consumes what this worker reads.
    """

    def __init__(
        self,
        asked: BadSamplesConfig,
        source: SampleSource,
        start: EpochStart,
        worker: int,
        *,
        in_packs: bool,
        found: Callable[[], None],
        tally: BadTally | None,
    ) -> None:
        assert asked.log is not None, "checked with the options"
        self.directory = Path(asked.log)
        self.known: dict[int, set[tuple[int, int]]] = {}
        """Shards and indexes of what was found bad before this pass, by position."""
        self._path = bad_log_path(asked.log, start.world.rank, worker)
        self._source = source
        self._start = start
        self._in_packs = in_packs
        self._found = found
        self._tally = tally
        self._replaced: list[Replacement] = []

    def begin(self) -> None:
        """Read which positions of this epoch were bad before.

        Raises:
            ConfigError: ``bad_samples.log`` is no directory.
            FormatError: What is there is no log of bad samples.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(
                f"bad_samples.log must be a directory, but {self.directory} is a file",
                hint="name another one",
                option="bad_samples.log",
                path=str(self.directory),
            )
        catalog = self._source.catalog
        firsts = dict(zip(catalog.stream_names, accumulate(catalog.shards_per_stream, initial=0), strict=False))
        self.known = {}
        for one in bad_samples_of(self.directory, self._start):
            if one.key.stream in firsts:
                place = firsts[one.key.stream] + one.key.shard, one.key.sample_index
                self.known.setdefault(one.key.position, set()).add(place)

    def are_known(self, positions: NDArray[np.int64]) -> bool:
        """Return whether a sample at one of these positions was bad before."""
        return bool(self.known) and not self.known.keys().isdisjoint(positions.tolist())

    def refuse_known(self, position: int, shard: int, index: int) -> None:
        """Raise the error that :meth:`instead` takes, if the sample at this position was bad before."""
        if (shard, index) in self.known.get(position, ()):
            raise _KnownBadError

    def replaces(self, told: StreamingError) -> bool:
        """Return whether :meth:`instead` replaces a sample with this error."""
        return isinstance(told, _KnownBadError) or is_bad_sample(told)

    def instead(self, row: Row, told: StreamingError, make: Callable[[Row], Any]) -> Any:
        """Return the replacement of a sample that could not be made.

        Args:
            row: Of the sample.
            told: Why not.
            make: Makes another sample of the shard, at the same position; raises as the first one did.

        Raises:
            BadSamplesError: No other sample of its shard could be made either.
            StreamingError: ``told``, where it is not about this sample.
        """
        self._note(row, told, 0)
        self._found()
        if self._tally is not None:
            self._tally.add(read=0, bad=1)
        return MISSING if self._in_packs else self._another(row, told, make)

    def have_read(self, samples: int) -> None:
        """Note that more samples were read, replacements included."""
        if self._tally is not None:
            self._tally.add(samples, bad=0)

    def take_replacements(self) -> list[Replacement]:
        """Return the replacements since the last call."""
        taken, self._replaced = self._replaced, []
        return taken

    def _another(self, row: Row, told: StreamingError, make: Callable[[Row], Any]) -> Any:
        position, shard, index, events = row
        catalog, tried = self._source.catalog, list[int]()
        first, count = int(catalog.first_sample_of_shard[shard]), int(catalog.samples_per_shard[shard])
        number: int | None = int(catalog.ids(np.array([shard]), np.array([index]))[0]) - first
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            assert number is not None, "looked at below"
            tried.append(number)
            number = choose_other((self._start.shuffle_seed, self._start.cursor.epoch, position), attempt, tried, count)
            if number is None:
                break
            _, other = catalog.find(first + number)
            try:
                self.refuse_known(position, shard, other)
                sample = make((position, shard, other, events))
            except StreamingError as error:
                self._note((position, shard, other, events), error, attempt)
            else:
                key = self._key((position, shard, other, events))
                self._replaced.append(Replacement(position, key.shard, other))
                return sample
        key = self._key(row)
        words = self._told_exhausted(key, len(tried) - (number is None), told)
        raise BadSamplesError(message=words, stream=key.stream, sample=key.sample_index) from told

    def _note(self, row: Row, told: StreamingError, attempt: int) -> None:
        """Log a bad sample; raise any other error."""
        if isinstance(told, _KnownBadError):
            return
        if not is_bad_sample(told):
            raise told
        write_bad_sample(self._path, self._key(row), attempt, told)

    def _key(self, row: Row) -> SampleKey:
        return keys_of_rows(self._source.catalog, self._start)(row)

    def _told_exhausted(self, key: SampleKey, others: int, told: StreamingError) -> str:
        why = "was found bad before" if isinstance(told, _KnownBadError) else f"is bad: {told}"
        none = f"none of the {others} others of its shard that were tried" if others else "no other sample of its shard"
        return (
            f"sample {key.sample_index} of shard {key.shard} of stream {key.stream!r} {why}\n{none} can take its "
            f"place; see {self.directory}. Mend the data or the transform, or leave these samples out with "
            f"`lightning-streaming select DATASET --not {self.directory} --out KEEP.npy`"
        )


def bad_samples_of(directory: Path, start: EpochStart) -> Iterator[BadSample]:
    """Return the logged bad samples of the epoch of a pass, of all ranks and workers."""
    with suppress(ObjectNotFoundError):  # nothing was bad as yet
        for one in read_bad_samples(directory):
            if (one.key.shuffle_seed, one.key.epoch) == (start.shuffle_seed, start.cursor.epoch):
                yield one


class BadTally:
    """Counts the samples that a rank has read in a pass, in the process that consumes them.

    Args:
        asked: How many samples may be bad.
        start: The pass.
        has_warned: Takes a word for what was warned of, so that it is not again.
    """

    def __init__(self, asked: BadSamplesConfig, start: EpochStart, has_warned: set[str]) -> None:
        assert asked.log is not None, "checked with the options"
        self._directory = Path(asked.log)
        self._limit = parse_limit(asked.max)
        self._start = start
        self._has_warned = has_warned
        self._read = self._bad = 0

    def add(self, read: int, bad: int) -> None:
        """Count more samples, some of which are bad.

        Raises:
            BadSamplesError: By now, more are than may be.
        """
        self._read += read
        self._bad += bad
        if not bad:
            return
        if self._bad > self._limit.allowed(self._read):
            raise BadSamplesError(message=self._told(), option="bad_samples.max", path=str(self._directory))
        if "bad samples" not in self._has_warned:
            self._has_warned.add("bad samples")
            words = "rank %d: a sample is bad, and another one of its shard was read, or its place in a pack filled: %s"
            _log.warning(f"{words}; later ones are only in %s", self._start.world.rank, self._first(1), self._directory)

    def _told(self) -> str:
        rank, epoch = self._start.world.rank, self._start.cursor.epoch
        limit = f"bad_samples.max={self._limit.text} allows {self._limit.allowed(self._read)}"
        return (
            f"{self._bad} of the {self._read} samples that rank {rank} has read of epoch {epoch} in this pass are "
            f"bad, and {limit}:\n{self._first(_MOST_TOLD)}\nAll are told in {self._directory}. Mend the data or the "
            f"transform, leave them out with `lightning-streaming select DATASET --not {self._directory} --out "
            "KEEP.npy`, or raise bad_samples.max"
        )

    def _first(self, most: int) -> str:
        """Return the first bad samples that workers of this rank have logged in this epoch."""
        of_rank = f"bad-rank{self._start.world.rank}-"
        found = (
            one
            for path in sorted(self._directory.glob(f"{of_rank}*.jsonl"))
            for one in bad_samples_of(path, self._start)
            if not one.attempt
        )
        keyed = sorted(((one.key.position, one) for one in found), key=lambda pair: pair[0])
        words = (
            f"sample {one.key.sample_index} of shard {one.key.shard} of stream {one.key.stream!r}: "
            f"{in_one_line(one.error)}"
            for _, one in islice(keyed, most)
        )
        return "\n".join(f"  {one}" for one in words) if most > 1 else next(words, "found before")
