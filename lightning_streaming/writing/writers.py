"""The writers, one per format, and their options: shards are stored in the background, the index is published last."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar, get_args
from weakref import WeakMethod

from lightning_streaming.errors import ConfigError, EncodingError, StreamingError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.index import INDEX_BASENAME, ShardInfo, dump_index
from lightning_streaming.formats.mds import encode_config
from lightning_streaming.signatures import explains_options_of, public, suggests_names
from lightning_streaming.units import store_whole
from lightning_streaming.writing.destination import Destination
from lightning_streaming.writing.journal import Journal, check_format, check_settings, find_start, prepare_start
from lightning_streaming.writing.shards import (
    ShardBuffer,
    ShardBuilder,
    ShardEncoder,
    ShardOptions,
    ShardSettings,
    check_exact,
    columns_of,
    exact_checks,
    infer_columns,
    infer_text_columns,
    make_mds_encoder,
    make_split_encoder,
    options_from,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

_Result = TypeVar("_Result")
Mode = Literal["create", "resume", "append"]

# Global to the process, because a fork copies all of it: a forked writer refuses its first sample, without a check of
# the process for each sample.
_REFUSE_METHODS: set[WeakMethod[Callable[[str], None]]] = set()

# Reasons why a writer takes no more samples, each with a hint after "; ".
_DATASET_FINISHED = "this dataset is finished; mode='append' adds to it"
_FINISHING = "this writer is being finished and takes no more samples; call finish() again, or close()"
_FINISHED = "this writer is finished; create another one to write more"
_INTERRUPTED = (
    "this writer was interrupted while it submitted a shard, and samples may be missing, so it publishes no index; "
    "create another one, which continues after the stored shards with mode='resume'"
)


@dataclass(frozen=True, kw_only=True)
class WriterOptions(ShardOptions):
    """Options of every writer.

    Args:
        out: A directory; or a URL that fsspec serves; or (directory, URL or second directory) for both.
        keep_local: Whether to write to the directory of such a pair as well.
        progress_bar: Whether to show how many bytes are stored.
        max_workers: Number of shards that are compressed, hashed and stored concurrently. One more may wait, and
            another one is being filled; all are in memory. None for one per CPU, from 2 to 8.
        retry: Attempts in total for each upload.
        exist_ok: Whether to remove a dataset in the local directory first, and to overwrite one under the URL, with
            uncompressed shards of the same names. Only files that its index names are removed; a directory with other
            files is refused.
        mode: ``"create"`` starts a new dataset. ``"resume"`` does, too, but records each stored shard, and continues
            after the last of them if an earlier writer was stopped; a finished dataset stays unchanged. ``"append"``
            adds shards to a finished dataset, whose shards stay unchanged, and records them too; its last shard may not
            be full. See :attr:`num_samples`.
    """

    out: str | Path | tuple[str, str]
    keep_local: bool = False
    progress_bar: bool = False
    max_workers: int | None = None
    retry: int = 5
    exist_ok: bool = False
    mode: Mode = "create"

    def __post_init__(self) -> None:
        super().__post_init__()
        store_whole(self, "retry", 1)
        store_whole(self, "max_workers", 1, or_none=True)
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"mode must be one of {', '.join(get_args(Mode))}, but got {short_repr(self.mode)}", option="mode"
            )
        if self.exist_ok and self.mode != "create":
            raise ConfigError(
                f"exist_ok=True replaces an existing dataset, but mode={short_repr(self.mode)} continues it",
                hint="remove one of them",
                option="exist_ok",
            )


@dataclass(frozen=True, kw_only=True)
class SplitWriterOptions(WriterOptions):
    """Options of a writer of rows.

    Args:
        newline: Text at the end of every row.
    """

    newline: str = "\n"


@dataclass(frozen=True, kw_only=True)
class XSVWriterOptions(SplitWriterOptions):
    """Options of a writer of rows with a custom separator.

    Args:
        separator: Text between two fields.
    """

    separator: str


@suggests_names
class ShardWriter(ABC):
    """Writer that splits samples into shards and stores them in the background; the index is published last.

    A ``with`` block that ends in an exception publishes no index.
    """

    format: ClassVar[str]
    """Name of the format in the index."""

    def __init__(
        self,
        *,
        out: str | Path | tuple[str, str],
        columns: Mapping[str, str] | None = None,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | float | str | None = 2**26,
        keep_local: bool = False,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int = 5,
        exist_ok: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = False,
        mode: Mode = "create",
    ) -> None:
        self._begin(options_from(WriterOptions, locals()))

    def _begin(self, options: WriterOptions) -> None:
        """Inspect the destination, and prepare it."""
        self._options, self._settings, mode = options, options.settings, options.mode
        encoder = None if options.columns is None else self._encoder_for(options.columns)
        self._destination = Destination(
            options.out,
            keep_local=options.keep_local,
            storage_options=options.storage_options,
            retry=options.retry,
            progress_bar=options.progress_bar,
        )
        self._journal = None if mode == "create" else Journal(self._destination)
        with ExitStack() as held:
            if mode != "append":
                self._destination.make_folder("")
            held.enter_context(self._locked())
            if self._settings.compression is not None and not options.exist_ok:
                self._destination.check_raw_forms(self.format)
            self._start = find_start(mode, self._destination, exist_ok=options.exist_ok)
            if stored := self._start.stored:
                check_format(stored, self.format)
                encoder = encoder or self._encoder_for(columns_of(stored[0].schema))
                check_settings(stored, encoder)
            if self._journal is not None:
                prepare_start(self._start, self._destination, self._journal)
            self._shards = list(stored)
            self._num_samples = sum(shard.samples for shard in self._shards)
            self._builder = None if encoder is None else ShardBuilder(encoder, number=len(self._shards))
            self._schema: Mapping[str, Any] = {} if encoder is None else encoder.schema
            self._held = held.pop_all()
        self._exact_names = (
            None if encoder is None or options.columns is not None else columns_of(encoder.schema).keys()
        )
        self._background = _Background(options.max_workers)
        self._owner = os.getpid()
        self._refusal = _DATASET_FINISHED if self._start.is_finished else None
        self._is_closed = False
        self._is_published = False
        _REFUSE_METHODS.add(WeakMethod(self._set_refusal, _REFUSE_METHODS.discard))

    @property
    def num_samples(self) -> int:
        """Number of samples that are stored and do not have to be written again.

        After ``mode="resume"`` or ``"append"`` it is the number of samples to skip:
        ``for sample in itertools.islice(samples, writer.num_samples, None): writer.write(sample)``.
        """
        return self._num_samples

    def get_config(self) -> dict[str, Any]:
        """Return the settings that the index has for every shard, with the columns once they are known."""
        config: dict[str, Any] = json.loads(encode_config(self._schema, self.format, **asdict(self._settings)))
        return config

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. If this raises, the sample was not added.

        It waits while ``max_workers + 1`` shards are not stored yet. Ctrl-C, or a signal handler that raises, may
        interrupt the wait; then the same sample can be written again.

        Raises:
            EncodingError: A column is missing, or its value does not fit. Other samples can still be added.
            ConfigError: The shard would have 4 GiB or more, there is no memory for it, the writer or the dataset is
                finished or belongs to another process, no encoding can be inferred, or the writer was interrupted while
                it submitted a shard.
            StorageError: An earlier shard could not be stored; the writer then stores no more.
        """
        if self._refusal is not None or self._background.failure is not None:
            self._refuse()
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise EncodingError(f"a sample must map column names to values, but got {sample!r:.100}")
        builder = self._builder
        if builder is None:
            self._start_shards(sample)
            self.write(sample)
            return
        if self._exact_names is not None and sample.keys() != self._exact_names:
            raise EncodingError(
                f"the first sample had columns {sorted(self._exact_names)}, but this one has {list(sample)}"
            )
        if self._checks:
            check_exact(sample, self._checks)
        parts = builder.encoder.parts(sample)
        if not builder.add(parts):
            self._cut(builder, parts)

    def finish(self) -> None:
        """Store the last shard, then publish the index. A second call has no effect.

        If it is interrupted, it can be called again.

        Raises:
            StorageError: A shard or the index could not be stored, or a shard has vanished. If it was the index, the
                method can be called again.
            ConfigError: The writer was closed before, its ``with`` block failed, or it belongs to another process.
        """
        _check_process(self._owner)
        if self._is_closed and not self._is_published:
            raise ConfigError(
                "this writer was closed before it was finished, so there is no index", hint="create another one"
            )
        if not self._start.is_finished and not self._is_published:
            self._store_rest()
            shards = tuple(self._shards)
            self._destination.check_stored(shards)
            if self._options.exist_ok and self._settings.compression is not None:
                self._destination.remove_raw_forms(shards)
            if shards != self._start.published:
                self._destination.put(INDEX_BASENAME, dump_index(shards))
            if self._journal is not None:
                self._journal.close()
        self._is_published = True
        self._end()

    def close(self) -> None:
        """Close the writer; without :meth:`finish` before, no index is published.

        With ``mode="create"`` the shards in the local directory are removed; those under a URL stay, without an index.
        With the other modes complete shards are stored and everything stays, so that the writer can be resumed.

        In a process that was forked from that of the writer it has no effect.
        """
        if self._is_closed or os.getpid() != self._owner:
            return
        is_undone = self._journal is None and not self._is_published
        self._refusal = _FINISHED
        if is_undone:
            self._background.drop()
            self._background.close()
            self._destination.undo()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()

    @abstractmethod
    def _make_encoder(self, columns: Mapping[str, str], settings: ShardSettings) -> ShardEncoder:
        """Return the encoder of all shards."""

    @abstractmethod
    def _infer(self, sample: Mapping[str, Any]) -> dict[str, str]:
        """Return columns that fit a sample."""

    def _locked(self) -> AbstractContextManager[None]:
        """Lock the directories, so that this is their only writer."""
        return self._destination.locked()

    def _encoder_for(self, columns: Mapping[str, str]) -> ShardEncoder:
        encoder = self._make_encoder(columns, self._settings)
        self._checks = exact_checks(encoder.schema) if self._options.strict else ()
        return encoder

    def _set_refusal(self, reason: str) -> None:
        """Take no more samples, for this reason."""
        self._refusal = reason

    def _start_shards(self, sample: Mapping[str, Any]) -> None:
        """Infer the columns from the first sample."""
        encoder = self._encoder_for(self._infer(sample))
        check_exact(sample, self._checks)
        encoder.parts(sample)  # raises if the sample does not fit, before anything is changed
        names, builder = columns_of(encoder.schema).keys(), ShardBuilder(encoder)
        self._exact_names, self._schema = names, encoder.schema
        self._builder = builder

    def _cut(self, builder: ShardBuilder, parts: Sequence[Buffer]) -> None:
        """Submit the current shard, and start the next one with a sample.

        A signal may raise an exception at any point. So all that takes long, or may fail, is done before anything is
        changed. During the rest :attr:`_refusal` is set, and stays set if that does not complete.
        """
        self._wait_for_room()
        following = builder.following(parts)
        self._refusal = _INTERRUPTED
        number = builder.number
        self._submit(builder, number, builder.cut(following), is_last=False)
        self._refusal = None

    def _wait_for_room(self) -> None:
        _check_process(self._owner)
        self._background.wait_for_room()
        if self._background.failure is not None:
            self._refuse()

    def _submit(self, builder: ShardBuilder, number: int, samples: ShardBuffer, *, is_last: bool) -> None:
        journal = None if is_last else self._journal  # the last one needs no record: the index follows

        def store() -> ShardInfo:
            with samples.samples() as encoded:
                shard = builder.encoder.make(number, encoded)
                for file in shard.files:
                    self._destination.put(file.basename, *file.pieces)
            builder.reuse(samples)
            return shard.info

        def commit(shard: ShardInfo) -> None:
            if journal is not None:
                journal.record(number, shard, self._shards)
            self._shards.append(shard)
            self._num_samples += shard.samples

        self._background.submit(store, commit)

    def _store_rest(self) -> None:
        if self._refusal is None:
            if self._background.failure is None and self._builder is not None and self._builder.has_samples:
                self._wait_for_room()
                self._refusal = _INTERRUPTED
                self._submit(self._builder, self._builder.number, self._builder.last(), is_last=True)
            self._refusal = _FINISHING
        self._background.wait()
        if self._background.failure is not None or self._refusal is not _FINISHING:
            self._refuse()

    def _refuse(self) -> NoReturn:
        failure = self._background.failure
        if isinstance(failure, StreamingError):
            raise failure.with_context() from failure
        if failure is not None:
            raise failure
        raise _refused(self._refusal or "")

    def _end(self) -> None:
        self._refusal = _FINISHED
        self._background.close()
        self._destination.close()
        self._held.close()
        self._builder = None  # its memory is large
        self._is_closed = True


@public()
@explains_options_of(WriterOptions)
class MDSWriter(ShardWriter):
    """Writer of MDS shards, which support every encoding; bytes are those of MosaicML Streaming.

        with MDSWriter(columns={"tokens": "ndarray:uint16"}, out="s3://corpus/train", compression="zstd") as writer:
            for tokens in documents:
                writer.write({"tokens": tokens})

    A ``with`` block that ends in an exception publishes no index.
    """

    format: ClassVar[str] = "mds"

    def _make_encoder(self, columns: Mapping[str, str], settings: ShardSettings) -> ShardEncoder:
        return make_mds_encoder(columns, settings)

    def _infer(self, sample: Mapping[str, Any]) -> dict[str, str]:
        return infer_columns(sample)


@suggests_names
class _SplitWriter(ShardWriter):
    """Writer of shards of text rows; columns are ``str``, ``int`` or ``float``."""

    _separator: str | None = None

    def __init__(
        self,
        *,
        out: str | Path | tuple[str, str],
        columns: Mapping[str, str] | None = None,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | float | str | None = 2**26,
        keep_local: bool = False,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int = 5,
        exist_ok: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = False,
        mode: Mode = "create",
        newline: str = "\n",
    ) -> None:
        self._newline = newline
        self._begin(options_from(SplitWriterOptions, locals()))

    def _make_encoder(self, columns: Mapping[str, str], settings: ShardSettings) -> ShardEncoder:
        return make_split_encoder(self.format, columns, settings, newline=self._newline, separator=self._separator)

    def _infer(self, sample: Mapping[str, Any]) -> dict[str, str]:
        return infer_text_columns(sample)


@public()
@explains_options_of(SplitWriterOptions)
class JSONWriter(_SplitWriter):
    """Writer of JSONL shards: a JSON object per row. Columns are ``str``, ``int`` or ``float``."""

    format: ClassVar[str] = "json"


@public()
@explains_options_of(SplitWriterOptions)
class CSVWriter(_SplitWriter):
    """Writer of CSV shards without quoting: texts must not contain a comma or a newline."""

    format: ClassVar[str] = "csv"


@public()
@explains_options_of(SplitWriterOptions)
class TSVWriter(_SplitWriter):
    """Writer of TSV shards: texts must not contain a tab or a newline."""

    format: ClassVar[str] = "tsv"


@public()
@suggests_names
@explains_options_of(XSVWriterOptions)
class XSVWriter(_SplitWriter):
    """Writer of shards with a custom separator: texts must not contain it, or a newline."""

    format: ClassVar[str] = "xsv"

    def __init__(
        self,
        *,
        out: str | Path | tuple[str, str],
        columns: Mapping[str, str] | None = None,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | float | str | None = 2**26,
        keep_local: bool = False,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int = 5,
        exist_ok: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = False,
        mode: Mode = "create",
        separator: str,
        newline: str = "\n",
    ) -> None:
        self._newline, self._separator = newline, separator
        self._begin(options_from(XSVWriterOptions, locals()))


def _check_process(owner: int) -> None:
    """Check that this is the process that created the writer.

    Raises:
        ConfigError: It is another one.
    """
    if os.getpid() != owner:
        raise _refused(_of_another_process(owner))


def _refused(reason: str) -> ConfigError:
    problem, _, hint = reason.rpartition("; ")
    return ConfigError(problem, hint=hint)


def _of_another_process(owner: int) -> str:
    return (
        f"this writer is of process {owner}, from which this one was forked; create another one here, or leave the "
        "process with os._exit()"
    )


def _refuse_after_fork() -> None:
    for reference in list(_REFUSE_METHODS):
        refuse = reference()
        if refuse is not None:
            refuse(_of_another_process(os.getppid()))


os.register_at_fork(after_in_child=_refuse_after_fork)


class _Background:
    """Threads that run tasks; they start with the first task and end with :meth:`close`.

    One thread submits the tasks. Its waits may be interrupted, and then nothing has changed.
    """

    def __init__(self, max_workers: int | None) -> None:
        """Start nothing yet.

        Args:
            max_workers: Concurrent tasks. One more may wait. None for one per CPU, from 2 to 8.
        """
        max_workers = max(2, min(8, os.cpu_count() or 1)) if max_workers is None else int(max_workers)
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="shard-writer")
        self._max_tasks = max_workers + 1
        self._unfinished: deque[Future[None]] = deque()
        self.failure: BaseException | None = None
        """The first error, with which all later tasks fail."""

    def wait_for_room(self) -> None:
        """Wait while ``max_workers + 1`` tasks are not finished."""
        unfinished = self._unfinished
        while len(unfinished) >= self._max_tasks:
            wait([unfinished[0]])
            unfinished.popleft()

    def submit(self, work: Callable[[], _Result], commit: Callable[[_Result], None]) -> None:
        """Submit a task, for which there is room.

        Args:
            work: Function that runs concurrently with others.
            commit: Function that takes its result, after all tasks before are committed.
        """
        previous = self._unfinished[-1] if self._unfinished else None
        self._unfinished.append(self._pool.submit(self._run, work, commit, previous))

    def wait(self) -> None:
        """Wait until all tasks are committed, failed or dropped."""
        wait([future for future in self._unfinished if not future.done()])

    def drop(self) -> None:
        """Drop the tasks that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Finish all tasks that were not dropped, and end the threads."""
        self.wait()  # first: a thread whose join is interrupted counts as ended
        self._pool.shutdown(wait=True)

    def _run(
        self, work: Callable[[], _Result], commit: Callable[[_Result], None], previous: Future[None] | None
    ) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            result = work()
            if previous is not None:  # it was submitted before, so it is running or done: no deadlock
                previous.result()
            commit(result)
        except BaseException as error:
            self.failure = self.failure or error
            raise
