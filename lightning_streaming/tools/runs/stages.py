"""Tools for every stage of a configuration: inspect what is read, and compute what a run needs before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import source_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.evaluate import MissingIds
from lightning_streaming.tools import console
from lightning_streaming.tools.commands import read_run_files
from lightning_streaming.tools.console import (
    FINE,
    print_json,
    print_line,
    print_records,
    print_table,
    printable_name,
)
from lightning_streaming.tools.runs.checkpoints import read_places
from lightning_streaming.tools.runs.describe import describe_run, packs_documents, share_in_words
from lightning_streaming.waits import ProgressCallback


def read_stages(files: Sequence[str], changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Read a configuration, and return it with the data of each of its stages.

    Args:
        files: Its files; a later one overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.

    Raises:
        ConfigError: A file cannot be read, or the configuration has no data.
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
    return written, configs


# inspect --config


def inspect_run(
    files: Sequence[str],
    changes: Mapping[str, Any],
    checkpoint: str | None = None,
    loader: str | None = None,
    *,
    as_json: bool,
) -> int:
    """Print what each stage reads.

    Args:
        files: Files of the configuration; a later one overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        checkpoint: Checkpoint from which training resumes, if any.
        loader: Train loader of the checkpoint; None for its only one.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: The configuration has no data, or its data cannot be read like this.
        StateError: The checkpoint has no saved position, or is of another run.
        StorageError: An index could not be fetched.
    """
    written, configs = read_stages(files, changes)
    stages = [inspected(stage, config, written, checkpoint, loader) for stage, config in configs.items()]
    if as_json:
        print_json({"stages": stages})
    for stage in () if as_json else stages:
        _print_stage(stage)
    return FINE


def inspected(stage: str, config: Any, written: Any, checkpoint: str | None, loader: str | None) -> dict[str, Any]:
    """Return the report of a stage as plain values.

    Args:
        stage: "train", "val", "test" or "predict".
        config: Its data.
        written: The configuration, as ``read_run_files`` returns it.
        checkpoint: As for :func:`inspect_run`.
        loader: As for :func:`inspect_run`.
    """
    module, position, first_step = written.datamodule, None, 0
    dataset = module.build_dataset(stage, config)
    try:
        if stage == "train" and checkpoint is not None:
            places = read_places(checkpoint)
            position, first_step = places.loaders[places.choose(loader)].position, places.global_step or 0
        described = describe_run(dataset, written.trainer, position, checkpoint)
        batch_size = module.batch_size_of(stage)
        warnings = [None if batch_size == 1 or module._overrides("collate") else described.mixed_columns()]
        if stage == "train":
            warnings.append(described.read_again(written.trainer, first_step, batch_size))
        return {"stage": stage, **described.report(), "warnings": [warning for warning in warnings if warning]}
    finally:
        dataset.close()


def packs_in_words(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what :func:`inspected` reports of packs, as names and texts; empty without packing."""
    facts = {**report["packs"], "fill": f"{report['packs']['fill']:.2%}"} if "packs" in report else {}
    return [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in facts.items()]


def _print_stage(report: Mapping[str, Any]) -> None:
    """Print tables of streams, joins, packs and phases, and the warnings."""
    stage, streams, packing = report["stage"], report["streams"], packs_in_words(report)
    items = "documents" if packing else "samples"
    records = [
        {
            "stream": printable_name(stream["stream"]),
            **{head: f"{stream[head]:,}" for head in ("stored", "selected")},
            "weight": "" if stream["weight"] is None else f"{stream['weight']:.1%}",
            "drawn": f"{stream['drawn']:,}",
            **_shares_in_words(stream, items),
            "passes": f"{stream['passes']:.4g}",
            "only": stream["only"],
        }
        for stream in streams
    ]
    title = f"{stage}: {report['epoch_size']:,} {items} per epoch{_weights_in_words(report)}"
    print_records(title, records, left=("stream", "only"), whole=list(records[0])[1:-1])
    joins = []
    for name, join in ((stream["stream"], join) for stream in streams for join in stream["joins"]):
        columns = ", ".join(map(printable_name, join["columns"])) or "none that is read"
        joins.append((printable_name(name), printable_name(join["join"]), join["how"], f"{join['stored']:,}", columns))
    if joins:
        of_joins = ("stream", "join", "how", "stored", "columns")
        print_table("joined with them", of_joins, joins, right=("stored",), whole=("stored",))
    if packing:
        print_table(f"{stage}: packs of the first epoch", (), packing)
    if "schedule" in report:
        _print_schedule(f"{stage}: phases of an epoch{_weights_in_words(report)}", report["schedule"], items)
    for warning in report["warnings"]:
        console.print_note("inspect", f"{stage}: {warning}")


def _shares_in_words(counts: Mapping[str, Any], items: str) -> dict[str, str]:
    """Return the share of samples, or documents; and tokens and their share, if lengths are known."""
    share = f"{counts['share']:.1%}"
    if "tokens" not in counts:
        return {"share": share}
    return {f"of {items}": share, "tokens": f"{counts['tokens']:,}", "of tokens": f"{counts['token_share']:.1%}"}


def _weights_in_words(report: Mapping[str, Any]) -> str:
    """Return the unit of the configured weights, if any are shown."""
    has_weights = "schedule" in report or any(stream["weight"] is not None for stream in report["streams"])
    return f"; weights count {report['weights_in']}" if has_weights else ""


def _print_schedule(title: str, phases: Sequence[Mapping[str, Any]], items: str) -> None:
    """Print a line for each stream of each phase: its weights, as configured, and what the phase reads of it."""
    ramps = any(stream["begin_share"] != stream["end_share"] for phase in phases for stream in phase["streams"])
    has_steps, records = ramps or any(phase["steps"] > 1 for phase in phases), []
    for phase in phases:
        ends = {"ends": phase["ends"]}
        if "ends_in_tokens" in phase:
            ends = {f"ends, {items}": phase["ends"], "ends, tokens": phase["ends_in_tokens"]}
        for number, stream in enumerate(phase["streams"]):
            is_first = number == 0
            records.append(
                {
                    "phase": printable_name(phase["phase"]) if is_first else "",
                    **{head: f"{end:,}" if is_first else "" for head, end in ends.items()},
                    "ended": "early" if is_first and phase["ended_at"] is not None else "",
                    "steps": f"{phase['steps']:,}" if is_first and has_steps else "",
                    "stream": printable_name(stream["stream"]),
                    "weight": share_in_words(stream["begin_share"], stream["end_share"]),
                    items: f"{stream['drawn']:,}",
                    **_shares_in_words(stream, items),
                    "so far": f"{stream['drawn_by_end']:,}",
                    "passes": "-" if stream["passes_by_end"] is None else f"{stream['passes_by_end']:.4g}",
                }
            )
    print_records(title, records, left=("phase", "ended", "stream"), whole=list(records[0]))


# select --config


def select_run(files: Sequence[str], changes: Mapping[str, Any], *, as_json: bool) -> int:
    """Compute the selections, id indexes and lengths of a run that are not cached, and print a summary.

    Args:
        files: Files of the configuration; a later one overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: The configuration has no data, or its data cannot be selected or joined like this.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    written, configs = read_stages(files, changes)
    build = written.datamodule.build_dataset
    results = [compute_ahead(stage, build(stage, config)) for stage, config in configs.items()]
    made = [report for reports, _ in results for report in reports]
    missing = [ids for _, of_stage in results for ids in of_stage]
    if as_json:
        reports = [ids._asdict() for ids in missing]
        for report in reports:
            values = report["values"]
            report["values"] = [v.decode(errors="backslashreplace") if isinstance(v, bytes) else v for v in values]
        print_json({"made": made, "missing_ids": reports})
    elif made:
        _print_made(made)
    else:
        print_line("this run selects nothing and joins nothing by id, so there is nothing to compute")
    for ids in missing:
        condition = ""
        if ids.samples == len(ids.values) and not any(isinstance(value, bytes) for value in ids.values):
            literals = (str(v) if isinstance(v, int) else "'" + v.replace("'", "''") + "'" for v in ids.values)
            condition = f'"{ids.on} not in ({", ".join(literals)})"'
        many = f"{ids.samples:,} samples of the stream have ids"
        samples = "1 sample of the stream has an id" if ids.samples == 1 else many
        console.print_error(
            f"{console.PROGRAM} select",
            f"{ids.join}: {samples} that no sample has there; the first is sample {ids.first}, "
            f"{ids.on}={ids.values[0]!r}. Add them there, or leave such samples of the stream out with "
            f"selection.where={condition} or selection.indices",
        )
    return console.BAD if missing else FINE


def compute_ahead(stage: str, dataset: Any) -> tuple[list[dict[str, Any]], list[MissingIds]]:
    """Compute selections, id indexes and lengths of a stage that are not cached.

    Returns:
        A report on each of them, cached or not; and the ids that joined datasets lack.
    """
    reports = list[dict[str, Any]]()

    @contextmanager
    def watched(label: str, request: str, samples: int) -> Iterator[ProgressCallback]:
        began = time.monotonic()
        with console.progress(samples, label, "samples") as advance:
            yield advance
        report = {"of": label, "asked": request, "samples": samples, "was_kept": not advance.done}
        reports.append({**report, "seconds": time.monotonic() - began})

    source = source_of(dataset)
    source.set_label(f"data.{stage}")
    source.read_catalog(watched)
    catalog = source.catalog
    paths = [selection.cached_at for selection in catalog.selections if selection is not None]
    paths += [join.ids.cached_at for join in catalog.joins or () if join.ids is not None]
    paths += [] if catalog.lengths is None else [lengths.cached_at for lengths in catalog.lengths.streams]
    for report, path in zip(reports, paths, strict=True):
        report["kept_at"] = None if path is None else str(path)
    return list(reports), list(source.catalogs.missing_ids(source.catalog, source.quota, watched))


def _print_made(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each computed file, and where it is cached."""
    rows = []
    for report in reports:
        took = "was kept" if report["was_kept"] else f"{report['seconds']:.1f} s"
        rows.append((report["of"], report["asked"], f"{report['samples']:,}", took))
    print_table("made ahead", ("of", "by", "samples", "took"), rows, right=("samples",))
    nowhere = "kept nowhere: its cache directory is not writable; give another as local:"
    for report in reports:
        print_line(f"{report['of']}: {report['kept_at'] or nowhere}")


# lengths --config


def lengths_run(files: Sequence[str], *, as_json: bool) -> int:
    """Count the lengths of a run that are not cached, plan the packs of its first epoch, and print a summary.

    Args:
        files: Files of the configuration; a later one overrides an earlier one.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: The configuration packs nothing, or its data cannot be packed like this.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched, or the disk has no room for a plan.
    """
    written, configs = read_stages(files, {})
    made, planned = list[dict[str, Any]](), list[dict[str, Any]]()
    held = []  # a plan that no process maps is removed when the next one is written
    for stage, config in configs.items():
        dataset = written.datamodule.build_dataset(stage, config)
        if config.lengths_request() is None:
            continue
        made += compute_ahead(stage, dataset)[0]
        if not packs_documents(dataset):
            continue
        began = time.monotonic()
        described = describe_run(dataset, written.trainer)
        epoch = described.epoch(described.run.normalise(Cursor(0, 0)))
        held.append(epoch)
        facts = {"of": f"data.{stage}", "epoch": epoch.read.cursor.epoch, **described.packs_of(epoch.sequence)}
        planned.append({**facts, "seconds": time.monotonic() - began})
    if not made and not planned:
        raise ConfigError(
            f"{', '.join(files)}: no data of this run has packing, token_budget or weights in tokens, so no lengths "
            "are needed",
            option="data",
            path=", ".join(files),
        )
    if as_json:
        print_json({"made": made, "planned": planned})
        return FINE
    _print_made(made)
    heads = ("of", "epoch", "documents", "tokens", "packs", "fill", "took")
    rows = [
        (plan["of"], *(f"{plan[head]:,}" for head in heads[1:5]), f"{plan['fill']:.2%}", f"{plan['seconds']:.1f} s")
        for plan in planned
    ]
    if rows:
        print_table("packs planned", heads, rows, right=heads[1:])
    return FINE
