"""A dataset written in parts: each part by one call, in any process, on any machine, as often as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from lightning_streaming.errors import ConfigError, IndexFormatError, ObjectNotFoundError
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, parse_index
from lightning_streaming.storage import join_url, local_path, mask_url, prepare
from lightning_streaming.storage.listing import list_files
from lightning_streaming.storage.options import StorageOptions
from lightning_streaming.writing.columns import columns_of
from lightning_streaming.writing.destination import parse_out
from lightning_streaming.writing.directories import check_is_directory
from lightning_streaming.writing.locations import place_at
from lightning_streaming.writing.mds_recipe import make_mds_recipe
from lightning_streaming.writing.merge import join, publish
from lightning_streaming.writing.names import CONVERSION_PLAN, PARTS_PLAN
from lightning_streaming.writing.part_directory import has_all_files, remove_half_part
from lightning_streaming.writing.part_plan import (
    PartPlan,
    check_same,
    dump_plan,
    make_plan,
    parse_plan,
)
from lightning_streaming.writing.place import Place
from lightning_streaming.writing.settings import ShardSettings, parse_settings
from lightning_streaming.writing.sole_writer import after_others
from lightning_streaming.writing.system_errors import system_errors
from lightning_streaming.writing.writer import MDSWriter

Input = TypeVar("Input")
Sample = Mapping[str, Any]

_SHARDS_AT_A_TIME = 1
"""Parts are what is written side by side; so a worker holds no more than three shards in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartJob(Generic[Input]):
    """All that a process must know to write any part of one dataset. Made by :func:`plan_parts`; pickles."""

    fn: Callable[[Input], Iterable[Sample]]
    """Gives the samples of an input."""
    out: str
    """Directory or URL of the dataset."""
    num_parts: int
    """One for each input."""
    columns: Mapping[str, str] | None
    """Column name to encoding; None to tell them from the first sample of each part."""
    settings: ShardSettings
    """How shards are cut, compressed and hashed."""
    storage_options: Mapping[str, Any] = field(repr=False)
    """Arguments for the filesystem of the URL."""
    strict: bool = False
    """Whether values that would come back as others are refused."""
    encodings: Mapping[str, type[Any]] = field(default_factory=registered_encodings, repr=False)
    """What the program registered, for the processes that write."""

    def location(self, number: int) -> str:
        """Where part ``number``, from 0, lies: ``out/part.000003``."""
        return join_url(self.out, _part_name(number))

    def write(self, number: int, part_input: Input, on_sample: Callable[[], None] = lambda: None) -> int:
        """Write a part, unless it is there already. A part that was begun and not finished is begun again.

        To call it again, or in two processes at once, does no harm, if ``fn`` gives the same samples each time.

        Args:
            number: Which part, from 0.
            part_input: The input of that part.
            on_sample: Called after each sample that is written.

        Returns:
            Samples in the part.

        Raises:
            ConfigError: Something else lies where the part belongs.
            EncodingError: A sample does not fit its columns.
            StorageError: The store did not answer.
        """
        for name, encoding_class in self.encodings.items():
            register_encoding(name, encoding_class)
        location = self.location(number)
        directory = local_path(location)
        with after_others(directory):
            index = self._finished(location)
            if index is not None:
                return index.num_samples
            if directory is not None:
                remove_half_part(directory)
            return self._write(location, part_input, on_sample)

    def publish(self) -> None:
        """Once every part is there: make them one dataset. May be called again.

        Raises:
            ConfigError: Parts have different columns.
            ObjectNotFoundError: A part is not there.
            StorageError: The store did not answer.
        """
        parts = [self.location(number) for number in range(self.num_parts)]
        index = join(parts, self.out, storage_options=self.storage_options)
        alike = [shard for _, shard in index.shards.examples()]
        for shard in alike:
            self._check_schema(shard, alike[0])
        publish(index, self.out, storage_options=self.storage_options)

    def _write(self, location: str, part_input: Input, on_sample: Callable[[], None]) -> int:
        samples = 0
        with _PartWriter(
            columns=self.columns,
            out=location,
            compression=self.settings.compression,
            hashes=list(self.settings.hashes),
            size_limit=self.settings.size_limit,
            max_workers=_SHARDS_AT_A_TIME,
            storage_options=self.storage_options,
            strict=self.strict,
        ) as writer:
            for sample in self.fn(part_input):
                writer.write(sample)
                samples += 1
                on_sample()
        return samples

    def _finished(self, location: str) -> DatasetIndex | None:
        """The part's index, if the part is whole."""
        source = mask_url(join_url(location, INDEX_BASENAME))
        directory = local_path(location)
        data = _get(place_at(location, self.storage_options), INDEX_BASENAME)
        if data is None:
            return None
        try:
            index = parse_index(data, source)
        except IndexFormatError:
            if directory is None:
                raise
            return None  # cut short by a crash of the machine
        for shard in index.shards:
            self._check_settings(shard, source)
        return index if directory is None or has_all_files(directory, index) else None

    def _check_settings(self, shard: ShardInfo, source: str) -> None:
        found = ShardSettings(compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit)
        if found != self.settings or self.columns not in (None, columns_of(shard.schema)):
            raise ConfigError(
                f"{source} was not written with the settings of its dataset: it has {found} and columns "
                f"{columns_of(shard.schema)}; move that part away, and resume"
            )

    def _check_schema(self, shard: ShardInfo, first: ShardInfo) -> None:
        if shard.schema != first.schema:
            raise ConfigError(
                f"{shard.raw_data.basename} has columns {columns_of(shard.schema)}, but {first.raw_data.basename} has "
                f"{columns_of(first.schema)}, as their first samples told; pass columns=..., and write to another place"
            )


class _PartWriter(MDSWriter):
    """A writer for whoever is alone with the directory already."""

    def _alone(self) -> AbstractContextManager[None]:
        return nullcontext()


def plan_parts(
    inputs: Sequence[Input],
    fn: Callable[[Input], Iterable[Sample]],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | float | str | None = "64mb",
    mode: Literal["create", "resume"] = "create",
    storage_options: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> PartJob[Input]:
    """Write down what a dataset in parts is made of, and give the job that writes it.

    For engines of your own: call ``job.write(number, inputs[number])`` for every input, wherever and in whatever order,
    then ``job.publish()`` once. :func:`~lightning_streaming.writing.parallel.write_parallel` does just that. Its
    arguments and errors are the same.
    """
    job, plan = make_job(
        inputs,
        fn,
        out,
        columns=columns,
        compression=compression,
        hashes=hashes,
        size_limit=size_limit,
        storage_options=storage_options,
        strict=strict,
    )
    record(plan, job, mode)
    return job


def make_job(
    inputs: Sequence[Input],
    fn: Callable[[Input], Iterable[Sample]],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None,
    compression: str | None,
    hashes: Sequence[str] | None,
    size_limit: int | float | str | None,
    storage_options: Mapping[str, Any] | None,
    strict: bool,
) -> tuple[PartJob[Input], PartPlan]:
    """Check what :func:`plan_parts` is told. Nothing is touched; :func:`record` writes the plan down."""
    if not callable(fn):
        raise ConfigError(f"fn must be a function that gives the samples of an input, but got {fn!r:.100}")
    settings = parse_settings(compression, hashes, size_limit)
    if columns is not None:
        make_mds_recipe(columns, settings)  # raises where they cannot work
    directory, remote = parse_out(out)
    if directory is not None and remote is not None:
        raise ConfigError(f"out must be a directory or a URL here, but got the pair {out}; parts go to one place")
    location = str(out) if directory is None else str(directory.absolute())
    plan = make_plan(inputs, columns, settings, strict=strict)
    options = StorageOptions(storage_options)
    prepare(location)
    job = PartJob(
        fn=fn,
        out=location,
        num_parts=len(inputs),
        columns=columns,
        settings=settings,
        storage_options=options,
        strict=strict,
    )
    return job, plan


@system_errors("begin a dataset in parts")
def record(plan: PartPlan, job: PartJob[Any], mode: str) -> None:
    """Store the plan of a new dataset, or compare it with that of the one to go on with.

    Raises:
        ConfigError: There is no such mode, or something else lies there.
        StorageError: The store did not answer.
    """
    if mode not in ("create", "resume"):
        raise ConfigError(f"mode must be 'create' or 'resume', but got {mode!r}")
    out, options = job.out, job.storage_options
    shown, directory, place = mask_url(out), local_path(out), place_at(out, options)
    if directory is not None:
        check_is_directory(directory)
        remove_partials(directory / PARTS_PLAN)
    begun = _get(place, PARTS_PLAN)
    if begun is not None and mode == "resume":
        source = mask_url(join_url(out, PARTS_PLAN))
        check_same(parse_plan(begun, source), plan, source)
        return
    if begun is not None:
        raise ConfigError(f"{shown} was begun before; mode='resume' goes on with it, or choose another place")
    there = {path.name for path in directory.iterdir()} if directory is not None and directory.exists() else set()
    if found := sorted(there - {CONVERSION_PLAN}):
        raise ConfigError(f"{shown} must be empty, but holds {found[0]}, and no {PARTS_PLAN}; choose another place")
    if _get(place, INDEX_BASENAME) is not None:
        raise ConfigError(f"{shown} holds a dataset that was not written in parts; choose another place")
    first_part = join_url(out, _part_name(0))
    if directory is None and list_files(first_part, dict(options), retry=3, timeout=60.0):
        raise ConfigError(f"{shown} holds {_part_name(0)}, and no {PARTS_PLAN} that says of what; choose another place")
    place.put(PARTS_PLAN, dump_plan(plan))


def _part_name(number: int) -> str:
    return f"part.{number:06}"


def _get(place: Place, name: str) -> bytes | None:
    try:
        return place.get(name)
    except ObjectNotFoundError:
        return None
