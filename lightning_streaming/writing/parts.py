"""A dataset written in parts: each part by one call, in any process, on any machine, as often as it takes.

What it is made of is written down before the first part, so that a resume cannot mix two datasets.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol

import numpy as np

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.files import remove_partials, system_errors
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, parse_index
from lightning_streaming.signatures import explains_options_of
from lightning_streaming.storage import Location, StorageOptions, join_url
from lightning_streaming.writing import destination
from lightning_streaming.writing.merging import join, publish
from lightning_streaming.writing.shard_encoders import ShardSettings, columns_of, make_mds_encoder
from lightning_streaming.writing.writer_options import (
    Input,
    ParallelOptions,
    PlanOptions,
    Sample,
    ShardOptions,
    options_from,
)
from lightning_streaming.writing.writers import MDSWriter

_LIST_ATTEMPTS = 3
_LIST_SECONDS = 60.0
_SHARDS_AT_A_TIME = 1
"""Parts are what is written side by side; so a worker holds no more than three shards in memory."""
_VERSION = 1
_LONGEST_SHOWN = 120
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")


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
        with destination.after_others(location.path):
            index = self._finished(location)
            if index is not None:
                return index.num_samples
            if location.path is not None:
                destination.remove_half_part(location.path)
            return self._write(location.url, part_input, on_sample)

    def publish(self) -> None:
        """Merge the parts into one dataset, once all are written. May be called again.

        Raises:
            ConfigError: Parts have different columns.
            ObjectNotFoundError: A part does not exist.
            StorageError: The store did not answer.
        """
        parts = [self.location(number) for number in range(self.num_parts)]
        index = join(parts, self.out, storage_options=self.storage_options)
        alike = [shard for _, shard in index.shards.examples()]
        for shard in alike:
            self._check_schema(shard, alike[0])
        publish(index, self.out, storage_options=self.storage_options)

    def _write(self, url: str, part_input: Input, on_sample: Callable[[], None]) -> int:
        samples = 0
        with _PartWriter(out=url, max_workers=_SHARDS_AT_A_TIME, **self.of_shards()) as writer:
            for sample in self.fn(part_input):
                writer.write(sample)
                samples += 1
                on_sample()
        return samples

    def _finished(self, location: Location) -> DatasetIndex | None:
        """The part's index, if the part is whole."""
        source, directory = location / INDEX_BASENAME, location.path
        data = source.read_if_there()
        if data is None:
            return None
        try:
            index = parse_index(data, str(source))
        except IndexFormatError:
            if directory is None:
                raise
            return None  # cut short by a crash of the machine
        for shard in index.shards:
            self._check_settings(shard, str(source))
        return index if directory is None or destination.has_all_files(directory, index) else None

    def _check_settings(self, shard: ShardInfo, source: str) -> None:
        found = ShardSettings(compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit)
        if found != self.settings or self.columns not in (None, columns_of(shard.schema)):
            raise ConfigError(
                f"{source} was not written with the settings of its dataset: it has {found} and columns "
                f"{columns_of(shard.schema)}",
                hint="move that part away, and resume",
                path=source,
            )

    def _check_schema(self, shard: ShardInfo, first: ShardInfo) -> None:
        if shard.schema != first.schema:
            raise ConfigError(
                f"{shard.raw_data.basename} has columns {columns_of(shard.schema)}, but {first.raw_data.basename} has "
                f"{columns_of(first.schema)}, as their first samples told",
                hint="pass columns=..., and write to another place",
                option="columns",
                path=shard.raw_data.basename,
            )


class _PartWriter(MDSWriter):
    """A writer for whoever is alone with the directory already."""

    def _alone(self) -> AbstractContextManager[None]:
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
    asked: PlanOptions[Input] = options_from(PlanOptions, locals())
    job, plan = make_job(inputs, asked)
    record(plan, job, mode)
    return job


def make_job(
    inputs: Sequence[Input], asked: PlanOptions[Input] | ParallelOptions[Input]
) -> tuple[PartJob[Input], PartPlan]:
    """Check what :func:`plan_parts` is told. Nothing is touched; :func:`record` writes the plan down."""
    fn, out, columns, settings = asked.fn, asked.out, asked.columns, asked.settings
    if not callable(fn):
        raise ConfigError(f"fn must be a function that gives the samples of an input, but got {fn!r:.100}", option="fn")
    if columns is not None:
        make_mds_encoder(columns, settings)  # raises where they cannot work
    directory, remote = destination.parse_out(out)
    if directory is not None and remote is not None:
        raise ConfigError(
            f"out must be a directory or a URL here, but got the pair {out}", hint="parts go to one place", option="out"
        )
    location = str(out) if directory is None else str(directory.absolute())
    plan = make_plan(inputs, columns, settings, strict=asked.strict)
    Location(location).prepare_to_write()
    return PartJob(fn=fn, out=location, num_parts=len(inputs), **asked.of_shards()), plan


@system_errors("begin a dataset in parts")
def record(plan: PartPlan, job: PartJob[Any], mode: str) -> None:
    """Store the plan of a new dataset, or compare it with that of the one to go on with.

    Raises:
        ConfigError: Something else lies there.
        StorageError: The store did not answer.
    """
    out = Location(job.out, job.storage_options or StorageOptions())
    directory, stored_plan = out.path, out / destination.PARTS_PLAN
    if directory is not None:
        destination.check_is_directory(directory)
        remove_partials(directory / destination.PARTS_PLAN)
    begun = stored_plan.read_if_there()
    if begun is not None and mode == "resume":
        check_same(parse_plan(begun, str(stored_plan)), plan, str(stored_plan))
        return
    if begun is not None:
        raise ConfigError(
            f"{out} was begun before",
            hint="mode='resume' continues it; or choose another place",
            option="out",
            path=str(out),
        )
    there = {path.name for path in directory.iterdir()} if directory is not None and directory.exists() else set()
    if found := sorted(there - {destination.CONVERSION_PLAN}):
        raise ConfigError(
            f"{out} must be empty, but holds {found[0]}, and no {destination.PARTS_PLAN}",
            hint="choose another place",
            option="out",
            path=str(out),
        )
    if (out / INDEX_BASENAME).read_if_there() is not None:
        raise ConfigError(
            f"{out} holds a dataset that was not written in parts",
            hint="choose another place",
            option="out",
            path=str(out),
        )
    if directory is None and replace(out / _part_name(0), attempts=_LIST_ATTEMPTS, timeout=_LIST_SECONDS).walk():
        raise ConfigError(
            f"{out} holds {_part_name(0)}, and no {destination.PARTS_PLAN} that says of what",
            hint="choose another place",
            option="out",
            path=str(out),
        )
    stored_plan.put(dump_plan(plan))


def _part_name(number: int) -> str:
    return f"part.{number:06}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlan:
    """The inputs of all parts, and how each is written."""

    settings: Mapping[str, Any]
    """Columns, compression, hashes, size_limit and strict, as JSON has them."""
    inputs: tuple[str, ...]
    """What tells each input apart, see :func:`tell_apart`."""


def make_plan(
    inputs: Sequence[Any], columns: Mapping[str, str] | None, settings: ShardSettings, *, strict: bool = False
) -> PartPlan:
    """Describe a dataset in parts.

    Raises:
        ConfigError: There are no inputs, or one could not be told apart in another run.
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
    return PartPlan(settings=described, inputs=tuple(map(tell_apart, inputs)))


def tell_apart(part_input: object) -> str:
    """A text that is the same for the same input in every run, and short: its repr, or the start and a digest of it.

    Raises:
        ConfigError: The repr holds an address in memory.
    """
    with np.printoptions(threshold=sys.maxsize, precision=17):  # not [0 1 2 ... 97 98 99]
        text = repr(part_input)
    if _ADDRESS.search(text):
        raise ConfigError(
            f"an input must have a repr that is the same in every run, or a resume could not tell it, but got {text}",
            hint="use texts, numbers, paths, tuples or dataclasses",
            option="inputs",
        )
    if len(text) <= _LONGEST_SHOWN:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{text[:_LONGEST_SHOWN]}... sha256:{digest}"


def dump_plan(plan: PartPlan) -> bytes:
    """The text of the file."""
    root = {"version": _VERSION, "settings": plan.settings, "inputs": plan.inputs}
    return json.dumps(root, indent=1).encode()


def parse_plan(data: bytes, source: str) -> PartPlan:
    """Read the text of the file.

    Raises:
        ConfigError: It is not one that :func:`dump_plan` of this version made.
    """
    try:
        root = json.loads(data)
        version, settings, inputs = root["version"], dict(root["settings"]), tuple(root["inputs"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source} is damaged ({error})", hint="write to another place", path=source) from None
    if version != _VERSION:
        raise ConfigError(
            f"{source} has version {version}, but only {_VERSION} can be resumed",
            hint="write to another place",
            path=source,
        )
    return PartPlan(settings=settings, inputs=inputs)


def check_same(begun: PartPlan, wanted: PartPlan, source: str) -> None:
    """Refuse to go on with another dataset than was begun.

    Raises:
        ConfigError: They differ; the message names every setting that does, and the first of the inputs.
    """
    found = "; ".join(_differences(begun, wanted))
    if found:
        raise ConfigError(
            f"{found}, as {source} says", hint="resume with the same, or write to another place", path=source
        )


def _differences(begun: PartPlan, wanted: PartPlan) -> Iterator[str]:
    for key, value in wanted.settings.items():
        if begun.settings.get(key) != value:
            yield f"{key} is {value!r}, but was {begun.settings.get(key)!r} when writing began"
    before, now = len(begun.inputs), len(wanted.inputs)
    if before != now:
        yield f"there are {now} inputs, but there were {before} when writing began"
    pairs = enumerate(zip(begun.inputs, wanted.inputs, strict=False))
    changed = [(number, *pair) for number, pair in pairs if pair[0] != pair[1]]
    if changed and before == now:
        number, was, becomes = changed[0]
        others = f", and {len(changed) - 1} more differ" * (len(changed) > 1)
        yield f"input {number} is {becomes}, but was {was} when writing began{others}"


class WorkerTracebackError(Exception):
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class PartProgress:
    """A part is being written."""

    number: int
    samples: int
    """So far."""


@dataclass(frozen=True, slots=True)
class PartDone:
    """A part is finished."""

    number: int
    samples: int
    """All of it."""


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part is not finished."""

    number: int
    summary: str
    """What happened, in a line."""
    trace: str = ""
    """The traceback, if it was an error."""
    pickled_error: bytes | None = None
    """The error itself, if it can travel."""

    def cause(self) -> Exception | None:
        """The original error, whose own cause is its traceback as text; None if there was no error, but a death."""
        if not self.trace:
            return None
        shown = WorkerTracebackError(self.trace)
        try:
            error = pickle.loads(self.pickled_error or b"")  # noqa: S301 - from our own worker
        except Exception:  # noqa: BLE001 - a class that only the worker can import; its text is all there is
            return shown
        if not isinstance(error, Exception):
            return shown
        error.__cause__ = shown
        return error


Event = PartProgress | PartDone | PartFailed


class Workers(Protocol):
    """Writes parts elsewhere, some at a time. Used as a context: leaving it ends all that it began."""

    capacity: int
    """Most parts that may be begun and not ended."""

    def begin(self, number: int, part_input: Any) -> None:
        """Have a part written; at most ``capacity`` of them at a time."""

    def wait(self) -> list[Event]:
        """Wait until something happens; some part must have been begun. A part ends with PartDone or PartFailed."""


def write_part(
    job: PartJob[Any], number: int, part_input: Any, on_sample: Callable[[], None] = lambda: None
) -> PartDone | PartFailed:
    """Write a part; an error becomes a value that can travel."""
    try:
        return PartDone(number, job.write(number, part_input, on_sample))
    except Exception as error:  # noqa: BLE001 - raised by the user's function; raised again where the user looks
        return failure(number, error)


def failure(number: int, error: Exception, words: str = "") -> PartFailed:
    """An error as a value that can travel, with words before it."""
    trace = "".join(traceback.format_exception(error))
    return PartFailed(number, words + summary_of(error), trace, _pickled(error))


def summary_of(error: BaseException) -> str:
    """The last line of a traceback: ``ValueError: bad line``."""
    return "".join(traceback.format_exception_only(error)).strip()


def _pickled(error: Exception) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - many errors can be pickled and not be made again
    except Exception:  # noqa: BLE001 - then its text must do
        return None
    return pickled
