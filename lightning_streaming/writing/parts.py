"""A dataset written in parts: each by one call, in any process, on any machine, repeated if necessary.

A plan with the inputs and settings is stored before the first part, so that a resume cannot mix two datasets.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.escaping import short_repr
from lightning_streaming.files import remove_partials, system_errors
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.signatures import explains_options_of, public
from lightning_streaming.storage import Location, StorageOptions, join_url
from lightning_streaming.writing import destination
from lightning_streaming.writing.merging import join, publish
from lightning_streaming.writing.shards import (
    Sample,
    ShardOptions,
    ShardSettings,
    columns_of,
    make_mds_encoder,
    options_from,
)
from lightning_streaming.writing.writers import MDSWriter

Input = TypeVar("Input")

_LIST_ATTEMPTS = 3
_LIST_SECONDS = 60.0
_CONCURRENT_SHARDS = 1
"""Parts are written concurrently, so a worker holds no more than three shards in memory."""
_VERSION = 1
_LONGEST_SHOWN = 120
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")


@dataclass(frozen=True, kw_only=True)
class PartsOptions(ShardOptions):
    """Options of a dataset in parts.

    Args:
        columns: Column name to encoding, as for :class:`~lightning_streaming.MDSWriter`. None infers them
            from the first sample of each part; all parts must have the same.
        mode: ``create``; or ``resume`` to continue what the same call started, or to start if there is nothing yet.
    """

    mode: Literal["create", "resume"] = "create"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("create", "resume"):
            raise ConfigError(f"mode must be 'create' or 'resume', but got {short_repr(self.mode)}", option="mode")


@dataclass(frozen=True)
class PlanOptions(PartsOptions, Generic[Input]):
    """Options of :func:`plan_parts`.

    Args:
        inputs: Input of each part: file names, ranges, lists of records. The repr of each must be the same in every
            run: it is stored in the plan, by which a resume checks that it continues the same dataset.
        fn: Function that yields the samples of an input, the same ones each time.
        out: A directory that is missing or empty, or a URL with no dataset.
    """

    inputs: Sequence[Input]
    fn: Callable[[Input], Iterable[Sample]]
    out: str | Path


@public("writing")
@dataclass(frozen=True, kw_only=True)
class PartJob(ShardOptions, Generic[Input]):
    """Plan of a dataset in parts, with which any process can write any part. :func:`plan_parts` returns it."""

    fn: Callable[[Input], Iterable[Sample]]
    """Function that yields the samples of an input."""
    out: str
    """Directory or URL of the dataset."""
    num_parts: int
    """Number of parts, one for each input."""
    encodings: Mapping[str, type[Any]] = field(default_factory=registered_encodings, repr=False)
    """Encodings that the program registered, for the processes that write."""

    def location(self, number: int) -> str:
        """Return the directory or URL of part ``number``, from 0: ``out/part.000003``."""
        return join_url(self.out, _part_name(number))

    def write(self, number: int, part_input: Input, on_sample: Callable[[], None] = lambda: None) -> int:
        """Write a part, unless it exists. A part that was started and not finished is started over.

        Calling it twice, or in two processes at once, is safe if ``fn`` yields the same samples each time.

        Args:
            number: Number of the part, from 0.
            part_input: Input of that part.
            on_sample: Called after each sample that is written.

        Returns:
            Number of samples in the part.

        Raises:
            ConfigError: The directory of the part holds something else.
            EncodingError: A sample does not fit its columns.
            StorageError: The store did not answer.
        """
        for name, encoding_class in self.encodings.items():
            register_encoding(name, encoding_class)
        location = Location(self.location(number), self.storage_options or StorageOptions())
        with destination.waiting_lock(location.path):
            index = self._finished(location)
            if index is not None:
                return index.num_samples
            if location.path is not None:
                destination.remove_partial_part(location.path)
            samples = 0
            with _PartWriter(out=location.url, max_workers=_CONCURRENT_SHARDS, **self.of_shards()) as writer:
                for sample in self.fn(part_input):
                    writer.write(sample)
                    samples += 1
                    on_sample()
            return samples

    def publish(self) -> None:
        """Merge the parts into one dataset, once all are written. May be called again.

        Raises:
            ConfigError: Parts have different columns.
            ObjectNotFoundError: A part does not exist.
            StorageError: The store did not answer.
        """
        parts = [self.location(number) for number in range(self.num_parts)]
        index = join(parts, self.out, storage_options=self.storage_options)
        examples = [shard for _, shard in index.shards.examples()]
        for shard in examples:
            if shard.schema != examples[0].schema:
                first, other = examples[0].raw_data.basename, shard.raw_data.basename
                raise ConfigError(
                    f"{other} has columns {columns_of(shard.schema)}, but {first} has "
                    f"{columns_of(examples[0].schema)}, inferred from their first samples",
                    hint="pass columns=..., and write to another location",
                    option="columns",
                    path=other,
                )
        publish(index, self.out, storage_options=self.storage_options)

    def _finished(self, location: Location) -> DatasetIndex | None:
        """Return the index of a part if the part is complete, else None."""
        source, directory = location / INDEX_BASENAME, location.path
        data = source.read_if_there()
        if data is None:
            return None
        try:
            index = parse_index(data, str(source))
        except IndexFormatError:
            if directory is None:
                raise
            return None  # truncated by a crash of the machine
        for shard in index.shards:
            settings = ShardSettings(compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit)
            if settings != self.settings or self.columns not in (None, columns_of(shard.schema)):
                raise ConfigError(
                    f"{source} was not written with the settings of its dataset: it has {settings} and columns "
                    f"{columns_of(shard.schema)}",
                    hint="move that part away, and resume",
                    path=str(source),
                )
        return index if directory is None or destination.has_all_files(directory, index) else None


class _PartWriter(MDSWriter):
    """A writer whose caller holds the lock of the directory."""

    def _locked(self) -> AbstractContextManager[None]:
        return nullcontext()


@explains_options_of(PlanOptions)
def plan_parts(
    inputs: Sequence[Input],
    fn: Callable[[Input], Iterable[Sample]],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | float | str | None = 2**26,
    storage_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    mode: Literal["create", "resume"] = "create",
) -> PartJob[Input]:
    """Record the plan of a dataset in parts, and return the job that writes it.

    For your own engine: call ``job.write(number, inputs[number])`` for every input, on any machine and in any order,
    then ``job.publish()`` once. :func:`~lightning_streaming.writing.write_parallel` does the same.

    Raises:
        ConfigError: An argument is invalid, ``out`` is not empty, or a job with other inputs or options was started
            there.
        MissingDependencyError: A package that an option needs is not installed.
        StorageError: The store did not answer.
    """
    options: PlanOptions[Input] = options_from(PlanOptions, locals())
    job, plan = make_job(inputs, options.fn, options.out, options)
    store_plan(plan, job, mode)
    return job


def make_job(
    inputs: Sequence[Input], fn: Callable[[Input], Iterable[Sample]], out: str | Path, options: PartsOptions
) -> tuple[PartJob[Input], PartPlan]:
    """Check the arguments of :func:`plan_parts`, and return job and plan. :func:`store_plan` writes the plan."""
    columns, settings = options.columns, options.settings
    if not callable(fn):
        raise ConfigError(
            f"fn must be a function that yields the samples of an input, but got {fn!r:.100}", option="fn"
        )
    if columns is not None:
        make_mds_encoder(columns, settings)  # raises if they are invalid
    directory, remote = destination.parse_out(out)
    if directory is not None and remote is not None:
        raise ConfigError(
            f"out must be a directory or a URL here, but got the pair {out}",
            hint="parts are written to one location",
            option="out",
        )
    location = str(out) if directory is None else str(directory.absolute())
    plan = make_plan(inputs, columns, settings, strict=options.strict)
    Location(location).prepare_to_write()
    return PartJob(fn=fn, out=location, num_parts=len(inputs), **options.of_shards()), plan


@system_errors("start a dataset in parts")
def store_plan(plan: PartPlan, job: PartJob[Any], mode: str) -> None:
    """Store the plan of a new dataset, or compare it with that of the one to continue.

    Raises:
        ConfigError: The location holds another dataset, or other files.
        StorageError: The store did not answer.
    """
    out = Location(job.out, job.storage_options or StorageOptions())
    directory, stored_plan = out.path, out / destination.PARTS_PLAN
    if directory is not None:
        destination.check_is_directory(directory)
        remove_partials(directory / destination.PARTS_PLAN)

    def refused(problem: str, hint: str = "choose another location") -> ConfigError:
        return ConfigError(f"{out} {problem}", hint=hint, option="out", path=str(out))

    stored = stored_plan.read_if_there()
    if stored is not None and mode == "resume":
        check_same(parse_plan(stored, str(stored_plan)), plan, str(stored_plan))
        return
    if stored is not None:
        raise refused("was started before", "mode='resume' continues it; or choose another location")
    names = {path.name for path in directory.iterdir()} if directory is not None and directory.exists() else set()
    if others := sorted(names - {destination.CONVERSION_PLAN}):
        raise refused(f"must be empty, but holds {others[0]}, and no {destination.PARTS_PLAN}")
    if (out / INDEX_BASENAME).read_if_there() is not None:
        raise refused("holds a dataset that was not written in parts")
    if directory is None and replace(out / _part_name(0), attempts=_LIST_ATTEMPTS, timeout=_LIST_SECONDS).walk():
        raise refused(f"holds {_part_name(0)}, and no {destination.PARTS_PLAN} that describes it")
    stored_plan.put(dump_plan(plan))


def _part_name(number: int) -> str:
    return f"part.{number:06}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlan:
    """The inputs of all parts, and the settings of their shards."""

    settings: Mapping[str, Any]
    """Columns, compression, hashes, size_limit and strict, as in JSON."""
    inputs: tuple[str, ...]
    """A text for each input, see :func:`describe_input`."""


def make_plan(
    inputs: Sequence[Any], columns: Mapping[str, str] | None, settings: ShardSettings, *, strict: bool = False
) -> PartPlan:
    """Describe a dataset in parts.

    Raises:
        ConfigError: There are no inputs, or one has no repr that is the same in another run.
    """
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sized) or not len(inputs):
        raise ConfigError(
            f"inputs must be a list of at least one, but got {type(inputs).__name__} {inputs!r:.100}", option="inputs"
        )
    described = {
        "columns": None if columns is None else dict(sorted(columns.items())),
        "compression": settings.compression,
        "hashes": list(settings.hashes),
        "size_limit": settings.size_limit,
        "strict": strict,
    }
    return PartPlan(settings=described, inputs=tuple(map(describe_input, inputs)))


def describe_input(part_input: object) -> str:
    """Return a short text that is the same for an input in every run: its repr, or the start and a digest of it.

    Raises:
        ConfigError: The repr holds an address in memory.
    """
    with np.printoptions(threshold=sys.maxsize, precision=17):  # not [0 1 2 ... 97 98 99]
        text = repr(part_input)
    if _ADDRESS.search(text):
        raise ConfigError(
            f"an input must have a repr that is the same in every run, by which a resume recognises it, but got {text}",
            hint="use texts, numbers, paths, tuples or dataclasses",
            option="inputs",
        )
    if len(text) <= _LONGEST_SHOWN:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{text[:_LONGEST_SHOWN]}... sha256:{digest}"


def dump_plan(plan: PartPlan) -> bytes:
    """Return the contents of the plan file."""
    root = {"version": _VERSION, "settings": plan.settings, "inputs": plan.inputs}
    return json.dumps(root, indent=1).encode()


def parse_plan(data: bytes, source: str) -> PartPlan:
    """Read the contents of a plan file.

    Raises:
        ConfigError: :func:`dump_plan` of this version did not write them.
    """
    try:
        root = json.loads(data)
        version, settings, inputs = root["version"], dict(root["settings"]), tuple(root["inputs"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source} is damaged ({error})", hint="write to another location", path=source) from None
    if version != _VERSION:
        raise ConfigError(
            f"{source} has version {version}, but only {_VERSION} can be resumed",
            hint="write to another location",
            path=source,
        )
    return PartPlan(settings=settings, inputs=inputs)


def check_same(stored: PartPlan, plan: PartPlan, source: str) -> None:
    """Check that a stored plan is that of the dataset to continue.

    Raises:
        ConfigError: They differ; the message names every different setting, and the first different input.
    """
    differences = [
        f"{key} is {value!r}, but was {stored.settings.get(key)!r} when writing began"
        for key, value in plan.settings.items()
        if stored.settings.get(key) != value
    ]
    before, now = len(stored.inputs), len(plan.inputs)
    if before != now:
        differences.append(f"there are {now} inputs, but there were {before} when writing began")
    else:
        pairs = enumerate(zip(stored.inputs, plan.inputs, strict=True))
        changed = [(number, *pair) for number, pair in pairs if pair[0] != pair[1]]
        if changed:
            number, old, new = changed[0]
            others = f", and {len(changed) - 1} more differ" * (len(changed) > 1)
            differences.append(f"input {number} is {new}, but was {old} when writing began{others}")
    if differences:
        raise ConfigError(
            f"{'; '.join(differences)}, as {source} says",
            hint="resume with the same, or write to another location",
            path=source,
        )


class WorkerTracebackError(Exception):
    """An error with the traceback of another process, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class PartProgress:
    """Progress of a part."""

    number: int
    samples: int
    """Samples written so far."""


@dataclass(frozen=True, slots=True)
class PartDone:
    """A finished part."""

    number: int
    samples: int
    """All its samples."""


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part that could not be written."""

    number: int
    summary: str
    """The reason, in a line."""
    trace: str = ""
    """The traceback, if it was an error."""
    pickled_error: bytes | None = None
    """The error, if it can be pickled."""

    def cause(self) -> Exception | None:
        """Return the original error, whose cause is its traceback as text; None if the worker died without one."""
        if not self.trace:
            return None
        traceback_error = WorkerTracebackError(self.trace)
        try:
            error = pickle.loads(self.pickled_error or b"")  # noqa: S301 - from our worker
        except Exception:  # noqa: BLE001 - a class that only the worker can import; the text remains
            return traceback_error
        if not isinstance(error, Exception):
            return traceback_error
        error.__cause__ = traceback_error
        return error


Event = PartProgress | PartDone | PartFailed


class Workers(Protocol):
    """Workers that write some parts concurrently. A context manager: leaving it ends all that it started."""

    capacity: int
    """Maximum number of parts that are started and not finished."""

    def begin(self, number: int, part_input: Any) -> None:
        """Start a part; at most ``capacity`` at a time."""

    def wait(self) -> list[Event]:
        """Wait for events; a part must have been started. A part ends with PartDone or PartFailed."""


def write_part(
    job: PartJob[Any], number: int, part_input: Any, on_sample: Callable[[], None] = lambda: None
) -> PartDone | PartFailed:
    """Write a part; return an error as a value that can be pickled."""
    try:
        return PartDone(number, job.write(number, part_input, on_sample))
    except Exception as error:  # noqa: BLE001 - raised by the user's function; raised again in the user's process
        return failure(number, error)


def failure(number: int, error: Exception, prefix: str = "") -> PartFailed:
    """Return an error as a value that can be pickled, with a prefix of its summary."""
    pickled: bytes | None = None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - many errors can be pickled, but not unpickled
    except Exception:  # noqa: BLE001 - the text remains
        pickled = None
    trace = "".join(traceback.format_exception(error))
    return PartFailed(number, prefix + summary_of(error), trace, pickled)


def summary_of(error: BaseException) -> str:
    """Return the last line of a traceback: ``ValueError: bad line``."""
    return "".join(traceback.format_exception_only(error)).strip()
