"""Tools for every stage of a configuration: inspect what is read, and compute what a run needs before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import dataset_world
from lightning_streaming.reading.passes import drawn_sequence, passes_of
from lightning_streaming.resume.run import Run
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.missing_ids import MissingIds
from lightning_streaming.sequence.packing.packed import PackedEpoch
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings
from lightning_streaming.sequence.phased import Mixture
from lightning_streaming.sequence.phases import SettledPhase
from lightning_streaming.sequence.stretches import StreamPasses
from lightning_streaming.tools.commands import count_ranks, read_run_files
from lightning_streaming.tools.console import (
    BAD,
    FINE,
    PROGRAM,
    counted,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    printable_name,
    progress,
)
from lightning_streaming.tools.runs.checkpoints import find_places, find_state_file
from lightning_streaming.tools.runs.training_run import strategy_ranks
from lightning_streaming.waits import Tell
from lightning_streaming.world import World


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
        files: Of the configuration; what a later one says overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        checkpoint: What training goes on from, if it does.
        loader: Of which train loader of the checkpoint; None where it is of one.
        as_json: Whether to print it for programs.

    Raises:
        ConfigError: The configuration has no data, or its data cannot be read so.
        StateError: The checkpoint has no place to go on from, or is of another run.
        StorageError: An index could not be fetched.
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
    stages = [inspected(stage, config, written, checkpoint, loader) for stage, config in configs.items()]
    if as_json:
        print_json({"stages": stages})
        return FINE
    for stage in stages:
        _print_stage(stage)
    return FINE


def inspected(stage: str, config: Any, written: Any, checkpoint: str | None, loader: str | None) -> dict[str, Any]:
    """What is reported of a stage.

    Args:
        stage: "train", "val", "test" or "predict".
        config: Its data.
        written: What the configuration files say, as ``read_run_files`` gives it.
        checkpoint: As for :func:`inspect_run`.
        loader: The same.
    """
    dataset, first_step = written.datamodule.build_dataset(stage, config), 0
    try:
        read_as_configured(dataset, written.trainer)
        if stage == "train" and checkpoint is not None:
            places = find_places(find_state_file(Path(checkpoint)).peek(), checkpoint)
            passes_of(dataset).run.call(checkpoint=checkpoint)
            dataset.load_state_dict(places.loaders[places.choose(loader)].position.as_state())
            first_step = places.global_step or 0
        run = passes_of(dataset).run.on(dataset_world(dataset))
        warnings = [_mixed_columns(stage, dataset, written.datamodule, run)]
        if stage == "train":
            warnings.append(_read_again(dataset, written, run, first_step))
        return {**_stage_reads(stage, dataset, run), "warnings": [one for one in warnings if one]}
    finally:
        dataset.close()


def _mixed_columns(stage: str, dataset: Any, module: Any, run: Run) -> str | None:
    """What the stage's loader would warn of when its first pass begins."""
    if module.batch_size_of(stage) == 1 or not dataset._are_as_stored() or module._overrides("collate"):
        return None
    return passes_of(dataset).mixed_columns(run.order.weights.choose, run.settings.batching_method)


def _read_again(dataset: Any, written: Any, run: Run, first_step: int) -> str | None:
    """Why training as configured would be refused at its start: it would read phases again of which one was cut."""
    mixture, trainer, cursor = run.order.mixture, written.trainer, passes_of(dataset).next_cursor()
    reads_once = ("overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs")
    if mixture is None or not mixture.is_cut or any(trainer.get(name) for name in reads_once):
        return None
    steps, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
    if epochs is not None and 0 <= epochs <= 1:
        return None
    accumulate = trainer.get("accumulate_grad_batches") or 1
    samples = run.machines.num_ranks * written.datamodule.batch_size_of("train") * accumulate
    left = -(-(mixture.plan.epoch_size - cursor.sample_in_epoch) // samples)
    ends_before = steps is not None and 0 <= steps <= first_step + left
    return None if ends_before else str(mixture.read_again_error(cursor.epoch + 1))


def read_as_configured(dataset: Any, trainer: Mapping[str, Any]) -> None:
    """Let the machines of the run read a dataset: their nodes decide how many canonical nodes there are."""
    nodes, ranks = int(trainer.get("num_nodes") or 1), None
    if dataset.replication is None:
        by_strategy = strategy_ranks(trainer, nodes)
        dataset.replication, ranks = by_strategy.replication, by_strategy.ranks_per_node
    dataset.world = World(num_nodes=nodes, ranks_per_node=ranks or count_ranks(trainer)[0], rank=0)


def _stage_reads(stage: str, dataset: Any, run: Run) -> dict[str, Any]:
    """What an epoch of a stage reads of each stream; selections that nobody evaluated yet are evaluated now."""
    weights = run.order.weights
    shares = zip(dataset.streams.items(), weights.choose, weights.proportion, weights.repeat, strict=True)
    streams = [
        {
            "stream": name,
            "stored": stream.num_stored,
            "selected": stream.num_selected,
            "drawn": drawn,
            "share": share,
            "passes": passes,
            "only": stream.selection.in_words(),
            "joins": [
                {
                    "join": one.name,
                    "how": one.asked.in_words(),
                    "stored": one.index.num_samples,
                    "columns": list(one.names.values()),
                }
                for one in stream.joined
            ],
        }
        for (name, stream), drawn, share, passes in shares
    ]
    mixture = run.order.mixture
    phases = {} if mixture is None else {"phases": _phases_read(mixture, run.order.catalog.stream_names)}
    packs = {} if run.order.packer is None else {"packs": _packs_read(run)}
    return {"stage": stage, "epoch_size": weights.epoch_size, "streams": streams, **phases, **packs}


def _packs_read(run: Run) -> dict[str, Any]:
    """How documents are packed, and what comes of it in the first epoch."""
    packer, read = run.order.packer, run.epoch(Cursor(0, 0)).sequence
    assert packer is not None, "it was looked at"
    assert isinstance(read, PackedEpoch), "as there are packs"
    settings = packer.pack.settings()
    return {
        **_settings_told(settings),
        "lengths": packer.pack.request().in_words(),
        "documents": read.num_documents,
        "tokens": read.num_tokens,
        "packs": len(read),
        "fill": read.num_tokens / max(1, read.token_room),
    }


def packs_in_words(packs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What :func:`inspected` reports of packs, for people."""
    facts = {**packs, "fill": f"{packs['fill']:.2%}"}
    return [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in facts.items()]


def _settings_told(settings: AnyPackSettings) -> dict[str, Any]:
    if isinstance(settings, BudgetSettings):
        return {
            "method": "budget",
            "tokens_per_group": settings.tokens,
            **_named(settings, "buckets", "window", "longer"),
        }
    if settings.method == "concat":
        return _named(settings, "method", "capacity")
    return _named(settings, "method", "capacity", "window", "longer")


def _named(settings: AnyPackSettings, *names: str) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def _phases_read(mixture: Mixture, names: Sequence[str]) -> list[dict[str, Any]]:
    """What each phase of the first epoch reads of each stream, of those that are here."""
    plan, passes = mixture.plan, {name: mixture.passes(name) for name in names if name in mixture.plan.streams}
    stops, steps = [0, *plan.phase_stops.tolist()], [-1, *plan.last_steps.tolist()]
    phases = []
    for number, phase in enumerate(plan.phases):
        before, drawn = plan.drawn_by(number - 1) if number else {}, plan.drawn_by(number)
        phases.append(
            {
                "phase": phase.name,
                "begins": stops[number],
                "ends": stops[number + 1],
                "ended_at": phase.cut,
                "steps": steps[number + 1] - steps[number],
                "streams": [
                    _stream_in_phase(
                        phase, name, drawn.get(name, 0), before.get(name, 0), stops[number + 1] - stops[number], passes
                    )
                    for name, _ in phase.begin
                ],
            }
        )
    return phases


def _stream_in_phase(
    phase: SettledPhase, name: str, drawn: int, before: int, size: int, passes: Mapping[str, StreamPasses]
) -> dict[str, Any]:
    begin, end = dict(phase.begin), dict(phase.end)
    return {
        "stream": name,
        "begin_share": begin[name] / sum(begin.values()),
        "end_share": end[name] / sum(end.values()),
        "drawn": drawn - before,
        "share": (drawn - before) / size,
        "drawn_by_end": drawn,
        "passes_by_end": passes[name].count(drawn) if name in passes else None,
        "max_repeats": dict(phase.max_repeats).get(name),
    }


def _print_stage(stage: Mapping[str, Any]) -> None:
    heads = ("stream", "stored", "selected", "drawn", "share", "passes", "only")
    rows = [
        (
            printable_name(one["stream"]),
            f"{one['stored']:,}",
            f"{one['selected']:,}",
            f"{one['drawn']:,}",
            f"{one['share']:.1%}",
            f"{one['passes']:.4g}",
            one["only"],
        )
        for one in stage["streams"]
    ]
    title = f"{stage['stage']}: {counted(stage['epoch_size'], 'document' if 'packs' in stage else 'sample')} per epoch"
    kept = len(heads) - all(not one["only"] for one in stage["streams"])
    print_table(title, heads[:kept], [row[:kept] for row in rows], right=heads[1:-1], whole=heads[1:-1])
    _print_joins(stage["streams"])
    if "packs" in stage:
        print_table(f"{stage['stage']}: packs of the first epoch", (), packs_in_words(stage["packs"]))
    if "phases" in stage:
        _print_phases(stage["stage"], stage["phases"])
    for warning in stage["warnings"]:
        print_note("inspect", f"{stage['stage']}: {warning}")


def _print_joins(streams: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            printable_name(stream["stream"]),
            printable_name(one["join"]),
            one["how"],
            f"{one['stored']:,}",
            ", ".join(map(printable_name, one["columns"])) or "none that is read",
        )
        for stream in streams
        for one in stream["joins"]
    ]
    if rows:
        heads = ("stream", "join", "how", "stored", "columns")
        print_table("joined with them", heads, rows, right=("stored",), whole=("stored",))


def _print_phases(stage: str, phases: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each stream of each phase; with the steps where a phase has several, or is a ramp."""
    heads = ["phase", "ends", "stream", "drawn", "share", "so far", "passes"]
    ramps = any(one["begin_share"] != one["end_share"] for phase in phases for one in phase["streams"])
    if ramps or any(phase["steps"] > 1 for phase in phases):
        heads.insert(heads.index("stream"), "steps")
    if any(phase["ended_at"] is not None for phase in phases):
        heads.insert(heads.index("ends") + 1, "ended")
    if ramps:
        heads.insert(heads.index("share") + 1, "to")
    rows = []
    for phase in phases:
        for place, one in enumerate(phase["streams"]):
            is_ramp = one["begin_share"] != one["end_share"]
            cells = {
                "stream": printable_name(one["stream"]),
                "drawn": f"{one['drawn']:,}",
                "share": f"{one['begin_share'] if is_ramp else one['share']:.1%}",
                "to": f"{one['end_share']:.1%}" if is_ramp else "",
                "so far": f"{one['drawn_by_end']:,}",
                "passes": "-" if one["passes_by_end"] is None else f"{one['passes_by_end']:.4g}",
            }
            if place == 0:
                cells |= {"phase": printable_name(phase["phase"])}
                cells |= {head: f"{phase[head]:,}" for head in ("ends", "steps")}
                cells["ended"] = "" if phase["ended_at"] is None else "early"
            rows.append([cells.get(head, "") for head in heads])
    right = [head for head in heads if head not in ("phase", "ended", "stream")]
    print_table(f"{stage}: phases of an epoch", heads, rows, right=right, whole=heads)


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


def lengths_run(files: Sequence[str], *, as_json: bool) -> int:
    """Count what is not counted yet, plan the packs of the first epoch, and say what there is.

    Args:
        files: Of the configuration; what a later one says overrides an earlier one.
        as_json: Whether to print it for programs.

    Raises:
        ConfigError: The configuration packs nothing, or its data cannot be packed so.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched, or there is no room for a plan.
    """
    written = read_run_files(files, {}, stage=None)
    configs = {stage: config for stage, config in written.datamodule.configs.items() if config is not None}
    made, planned = list[dict[str, Any]](), list[dict[str, Any]]()
    held = []  # a plan that nobody maps is removed when the next one is made
    for stage, config in configs.items():
        dataset = written.datamodule.build_dataset(stage, config)
        if passes_of(dataset).run.asked.pack is None:
            continue
        made += make_ahead(stage, dataset)[0]
        read_as_configured(dataset, written.trainer)
        packs, told = _planned(stage, dataset)
        held.append(packs)
        planned.append(told)
    if not planned:
        raise ConfigError(
            f"{', '.join(files)}: no data of this run has packing or token_budget, so no lengths are needed",
            option="data",
            path=", ".join(files),
        )
    if as_json:
        print_json({"made": made, "planned": planned})
    else:
        print_made(made)
        _print_planned(planned)
    return FINE


def _planned(stage: str, dataset: Any) -> tuple[PackedEpoch, dict[str, Any]]:
    """The packs of the first epoch that is read, planned now or before, and what there is to say of them."""
    began = time.monotonic()
    run = passes_of(dataset).run.on(dataset_world(dataset))
    start = run.normalise(Cursor(0, 0))
    packs = drawn_sequence(run.epoch(start))
    assert isinstance(packs, PackedEpoch), "as documents are packed"
    return packs, {
        "of": f"data.{stage}",
        "epoch": start.epoch,
        "documents": packs.num_documents,
        "tokens": packs.num_tokens,
        "packs": len(packs),
        "fill": packs.num_tokens / max(1, packs.token_room),
        "seconds": time.monotonic() - began,
    }


def _print_planned(planned: Sequence[Mapping[str, Any]]) -> None:
    heads = ("of", "epoch", "documents", "tokens", "packs", "fill", "took")
    rows = [
        (
            one["of"],
            *(f"{one[head]:,}" for head in heads[1:5]),
            f"{one['fill']:.2%}",
            f"{one['seconds']:.1f} s",
        )
        for one in planned
    ]
    print_table("packs planned", heads, rows, right=heads[1:])
