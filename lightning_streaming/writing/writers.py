"""The writers, one a format: samples become shards, stored in the background; the index is published last."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar
from weakref import WeakMethod

from lightning_streaming.errors import ConfigError, EncodingError, StreamingError
from lightning_streaming.formats.index import INDEX_BASENAME, ShardInfo, dump_index
from lightning_streaming.formats.mds.shard import encode_config
from lightning_streaming.replaced_names import tells_replacements, tells_unknown_arguments
from lightning_streaming.signatures import explains_options_of
from lightning_streaming.writing.destination import Destination
from lightning_streaming.writing.journal import Journal, check_format, check_settings, find_start, go_on
from lightning_streaming.writing.shard_builder import ShardBuffer, ShardBuilder
from lightning_streaming.writing.shard_encoders import (
    ShardEncoder,
    ShardSettings,
    check_exact,
    columns_of,
    exact_checks,
    infer_columns,
    infer_text_columns,
    make_mds_encoder,
    make_split_encoder,
)
from lightning_streaming.writing.writer_options import (
    Mode,
    SplitWriterOptions,
    WriterOptions,
    XSVWriterOptions,
    options_from,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

_Result = TypeVar("_Result")

# Of the whole process, because a fork copies all of it. So a copy knows what it is with its first sample, and no sample
# costs a question.
_REFUSALS: set[WeakMethod[Callable[[str], None]]] = set()

# Why a writer takes no more samples.
_WAS_WHOLE = "this dataset is finished; mode='append' adds to it"
_IS_ENDING = "this writer is being finished and takes no more samples; call finish() again, or close()"
_HAS_ENDED = "this writer is finished; make another one to write more"
_WAS_TORN = (
    "this writer was interrupted just as it gave a shard away; samples may be missing, so it publishes no index; make "
    "another one, where mode='resume' goes on with what is safe"
)


@tells_replacements
@tells_unknown_arguments
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
        """Look at what is there, and make room."""
        self._options, self._settings, mode = options, options.settings, options.mode
        encoder = None if options.columns is None else self._encoder_for(options.columns)
        self._destination = Destination(options)
        self._journal = None if mode == "create" else Journal(self._destination)
        with ExitStack() as held:
            if mode != "append":
                self._destination.make_folder("")
            held.enter_context(self._alone())
            if self._settings.compression is not None and not options.exist_ok:
                self._destination.check_raw_forms(self.format)
            self._start = find_start(mode, self._destination, exist_ok=options.exist_ok)
            encoder, journal = self._check_start(encoder), self._journal
            if journal is not None:
                go_on(self._start, self._destination, journal)
            self._shards = list(self._start.safe)
            self._num_samples = sum(shard.samples for shard in self._shards)
            self._builder = None if encoder is None else ShardBuilder(encoder, number=len(self._shards))
            self._schema: Mapping[str, Any] = {} if encoder is None else encoder.schema
            self._held = held.pop_all()
        self._exact_names = (
            None if encoder is None or options.columns is not None else columns_of(encoder.schema).keys()
        )
        self._background = _Background(options.max_workers)
        self._owner = os.getpid()
        self._refusal = _WAS_WHOLE if self._start.is_finished else None
        self._is_closed = False
        self._is_published = False
        _refuse_in_forks(self._refuse_from_now)

    @property
    def num_samples(self) -> int:
        """Number of samples that are stored for good and need not be written again.

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
            self._tell_columns(sample)
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
                "this writer was closed before it was finished, so there is no index", hint="make another one"
            )
        if not self._start.is_finished and not self._is_published:
            self._store_rest()
            self._publish()
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
        self._refusal = _HAS_ENDED
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
        """What all shards have in common."""

    @abstractmethod
    def _infer(self, sample: Mapping[str, Any]) -> dict[str, str]:
        """Columns that fit a sample."""

    def _alone(self) -> AbstractContextManager[None]:
        """Be the only writer in the directories."""
        return self._destination.alone()

    def _encoder_for(self, columns: Mapping[str, str]) -> ShardEncoder:
        encoder = self._make_encoder(columns, self._settings)
        self._checks = exact_checks(encoder.schema) if self._options.strict else ()
        return encoder

    def _refuse_from_now(self, why: str) -> None:
        """Take no more samples, because of this."""
        self._refusal = why

    def _check_start(self, encoder: ShardEncoder | None) -> ShardEncoder | None:
        """Compare the settings with those of what is there, whose columns are taken where none are given."""
        known = self._start.safe
        if not known:
            return encoder
        check_format(known, self.format)
        encoder = encoder or self._encoder_for(columns_of(known[0].schema))
        check_settings(known, encoder)
        return encoder

    def _tell_columns(self, sample: Mapping[str, Any]) -> None:
        encoder = self._encoder_for(self._infer(sample))
        check_exact(sample, self._checks)
        encoder.parts(sample)  # a sample that does not fit decides nothing
        names, builder = columns_of(encoder.schema).keys(), ShardBuilder(encoder)
        self._exact_names, self._schema = names, encoder.schema
        self._builder = builder

    def _cut(self, builder: ShardBuilder, parts: Sequence[Buffer]) -> None:
        """Give away what is gathered, and go on with a sample that comes after.

        An exception may come from a signal, at any point. So all that takes long, or may fail, is done while nothing
        is changed yet. In what remains :attr:`_refusal` is set, and stays if it does not come to its end.
        """
        self._wait_for_room()
        following = builder.following(parts)
        self._refusal = _WAS_TORN
        number = builder.number
        self._submit(builder, number, builder.cut(following), is_last=False)
        self._refusal = None

    def _wait_for_room(self) -> None:
        _check_process(self._owner)
        self._background.wait_for_room()
        if self._background.failure is not None:
            self._refuse()

    def _submit(self, builder: ShardBuilder, number: int, samples: ShardBuffer, *, is_last: bool) -> None:
        commit = self._commit
        if self._journal is not None and not is_last:  # that one needs no record: the index follows
            commit = partial(self._record, self._journal, number)
        self._background.submit(partial(_store, builder, number, samples, self._destination.put), commit)

    def _store_rest(self) -> None:
        if self._refusal is None:
            if self._background.failure is None and self._builder is not None and self._builder.has_samples:
                self._wait_for_room()
                self._refusal = _WAS_TORN
                self._submit(self._builder, self._builder.number, self._builder.last(), is_last=True)
            self._refusal = _IS_ENDING
        self._background.wait()
        if self._background.failure is not None or self._refusal is not _IS_ENDING:
            self._refuse()

    def _record(self, journal: Journal, number: int, shard: ShardInfo) -> None:
        journal.record(number, shard, self._shards)
        self._commit(shard)

    def _commit(self, shard: ShardInfo) -> None:
        self._shards.append(shard)
        self._num_samples += shard.samples

    def _publish(self) -> None:
        shards = tuple(self._shards)
        self._destination.check_stored(shards)
        if self._options.exist_ok and self._settings.compression is not None:
            self._destination.remove_raw_forms(shards)
        if shards != self._start.published:
            self._destination.put(INDEX_BASENAME, dump_index(shards))
        if self._journal is not None:
            self._journal.close()

    def _refuse(self) -> NoReturn:
        failure = self._background.failure
        if isinstance(failure, StreamingError):
            raise failure.with_context() from failure
        if failure is not None:
            raise failure
        raise _refused(self._refusal or "")

    def _end(self) -> None:
        self._refusal = _HAS_ENDED
        self._background.close()
        self._destination.close()
        self._held.close()
        self._builder = None  # its memory is large
        self._is_closed = True


def _store(builder: ShardBuilder, number: int, gathered: ShardBuffer, put: Callable[..., None]) -> ShardInfo:
    with gathered.samples() as samples:
        made = builder.encoder.make(number, samples)
        for file in made.files:
            put(file.basename, *file.pieces)
    builder.use_again(gathered)
    return made.info


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


@tells_unknown_arguments
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


@explains_options_of(SplitWriterOptions)
class JSONWriter(_SplitWriter):
    """Writer of JSONL shards: a JSON object per row. Columns are ``str``, ``int`` or ``float``."""

    format: ClassVar[str] = "json"


@explains_options_of(SplitWriterOptions)
class CSVWriter(_SplitWriter):
    """Writer of CSV shards without quoting: texts must not contain a comma or a newline."""

    format: ClassVar[str] = "csv"


@explains_options_of(SplitWriterOptions)
class TSVWriter(_SplitWriter):
    """Writer of TSV shards: texts must not contain a tab or a newline."""

    format: ClassVar[str] = "tsv"


@tells_unknown_arguments
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


def _refuse_in_forks(refuse: Callable[[str], None]) -> None:
    """Have a method of an object called in forked processes, as soon as they are there, with the reason."""
    _REFUSALS.add(WeakMethod(refuse, _REFUSALS.discard))


def _check_process(owner: int) -> None:
    """Refuse to go on in another process than the one that began.

    Raises:
        ConfigError: It is another one.
    """
    if os.getpid() != owner:
        raise _refused(_of_another(owner))


def _refused(why: str) -> ConfigError:
    wrong, _, hint = why.rpartition("; ")
    return ConfigError(wrong, hint=hint)


def _of_another(owner: int) -> str:
    return (
        f"this writer is of process {owner}, from which this one was forked; make another one here, or leave the "
        "process with os._exit()"
    )


def _tell_copies() -> None:
    for refusal in list(_REFUSALS):
        refuse = refusal()
        if refuse is not None:
            refuse(_of_another(os.getppid()))


os.register_at_fork(after_in_child=_tell_copies)


class _Background:
    """Runs pieces of work in threads, which start with the first piece and end with :meth:`close`.

    One thread gives the work. Where it waits, it may be interrupted, and nothing has changed.
    """

    def __init__(self, max_workers: int | None) -> None:
        """Nothing is started yet.

        Args:
            max_workers: Pieces at work at a time. One more may wait. None for one a CPU, from 2 to 8.
        """
        max_workers = max(2, min(8, os.cpu_count() or 1)) if max_workers is None else int(max_workers)
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="shard-writer")
        self._most = max_workers + 1
        self._unfinished: deque[Future[None]] = deque()
        self.failure: BaseException | None = None
        """What went wrong first; all that was to finish later fails with it."""

    def wait_for_room(self) -> None:
        """Wait while ``max_workers + 1`` pieces are not finished."""
        unfinished = self._unfinished
        while len(unfinished) >= self._most:
            wait([unfinished[0]])
            unfinished.popleft()

    def submit(self, work: Callable[[], _Result], commit: Callable[[_Result], None]) -> None:
        """Take a piece of work, for which there is room.

        Args:
            work: Runs beside others.
            commit: Takes its result, when all pieces before have been committed.
        """
        previous = self._unfinished[-1] if self._unfinished else None
        self._unfinished.append(self._pool.submit(self._run, work, commit, previous))

    def wait(self) -> None:
        """Wait until all is committed, or has failed, or was dropped."""
        wait([one for one in self._unfinished if not one.done()])

    def drop(self) -> None:
        """What waits is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Finish all that was not dropped, and end the threads."""
        self.wait()  # first: a thread whose end is waited for counts as ended once that is interrupted
        self._pool.shutdown(wait=True)

    def _run(
        self, work: Callable[[], _Result], commit: Callable[[_Result], None], previous: Future[None] | None
    ) -> None:
        try:
            self._stop_after_failure()
            result = work()
            if previous is not None:  # it was submitted before, so it is at work or done: no deadlock
                previous.result()
            commit(result)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def _stop_after_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
