"""What a run that packs documents needs before it begins: how long they are, and the packs of its first epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import dataset_world
from lightning_streaming.reading.passes import drawn_sequence, passes_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.packing.packed import PackedEpoch
from lightning_streaming.tools.commands import read_run_files
from lightning_streaming.tools.console import FINE, print_json, print_table
from lightning_streaming.tools.runs.inspect_run import read_as_configured
from lightning_streaming.tools.runs.select_run import make_ahead, print_made


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
