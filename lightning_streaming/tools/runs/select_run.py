"""What a run needs made before it begins: selections, indexes of the ids by which datasets are joined, and lengths."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.selection.missing_ids import MissingIds
from lightning_streaming.tools.commands import read_run_files
from lightning_streaming.tools.console import (
    BAD,
    FINE,
    PROGRAM,
    print_error,
    print_json,
    print_line,
    print_table,
    progress,
)
from lightning_streaming.waits import Tell


def select_run(files: Sequence[str], changes: Mapping[str, Any], *, as_json: bool) -> int:
    """Make what is not made yet, and say what there is.

    Args:
        files: Of the configuration; what a later one says overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        as_json: Whether to print it for programs.

    Raises:
        ConfigError: The configuration has no data, or its data cannot be selected or joined so.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    written = read_run_files(files, changes, stage=None)
    configs = {stage: config for stage, config in written.datamodule.configs.items() if config is not None}
    if not configs:
        raise ConfigError(
            f"{', '.join(files)}: there is no data",
            hint="write data.train, data.val, data.test or data.predict",
            option="data",
            path=", ".join(files),
        )
    stages = [make_ahead(stage, written.datamodule.build_dataset(stage, config)) for stage, config in configs.items()]
    made = [one for of_stage, _ in stages for one in of_stage]
    missing = [one for _, of_stage in stages for one in of_stage]
    told = [{**one._asdict(), "values": [_plain(value) for value in one.values]} for one in missing]
    if as_json:
        print_json({"made": made, "missing_ids": told})
    elif made:
        print_made(made)
    else:
        print_line("this run selects nothing and joins nothing by id, so there is nothing to make")
    for one in missing:
        print_error(f"{PROGRAM} select", _of_missing(one))
    return BAD if missing else FINE


def _plain(value: Any) -> Any:
    """An id as JSON has it."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _of_missing(one: MissingIds) -> str:
    """A sentence on ids that are missing, with the way out."""
    condition = ""
    if one.samples == len(one.values) and not any(isinstance(value, bytes) for value in one.values):
        told = (str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'" for value in one.values)
        condition = f'"{one.on} not in ({", ".join(told)})"'
    many = f"{one.samples:,} samples of the stream have ids"
    samples = "1 sample of the stream has an id" if one.samples == 1 else many
    return (
        f"{one.join}: {samples} that no sample has there; the first is sample {one.first}, {one.on}={one.values[0]!r}. "
        f"Add them there, or leave such samples of the stream out with selection.where={condition} or selection.indices"
    )


def make_ahead(stage: str, dataset: Any) -> tuple[list[dict[str, Any]], list[MissingIds]]:
    """Each selection, index of ids and lengths of a stage's streams, made now or before; and ids that joins lack."""
    made = list[dict[str, Any]]()

    @contextmanager
    def watched(label: str, asked: str, samples: int) -> Iterator[Tell]:
        began, looked_at = time.monotonic(), 0
        with progress(samples, label, "samples") as advance:

            def tell(samples: int) -> None:
                nonlocal looked_at
                advance(samples)
                looked_at += samples

            yield tell
        seconds = time.monotonic() - began
        made.append({"of": label, "asked": asked, "samples": samples, "was_kept": not looked_at, "seconds": seconds})

    passes = passes_of(dataset)
    passes.say_whose(f"data.{stage}")
    passes.make_ahead(watched)
    catalog = passes.catalog
    places = [one.kept_at for one in catalog.selections if one is not None]
    places += [one.ids.kept_at for one in catalog.joins or () if one.ids is not None]
    places += [] if catalog.lengths is None else [one.kept_at for one in catalog.lengths.streams]
    for report, kept_at in zip(made, places, strict=True):
        report["kept_at"] = None if kept_at is None else str(kept_at)
    return list(made), passes.missing_ids(watched)


def print_made(made: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each, and where it is kept."""
    rows = [
        (
            one["of"],
            one["asked"],
            f"{one['samples']:,}",
            "was kept" if one["was_kept"] else f"{one['seconds']:.1f} s",
        )
        for one in made
    ]
    print_table("made ahead", ("of", "by", "samples", "took"), rows, right=("samples",))
    nowhere = "kept nowhere: its cache directory is not writable; give another as local:"
    for one in made:
        print_line(f"{one['of']}: {one['kept_at'] or nowhere}")
