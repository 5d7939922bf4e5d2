"""Parts of a conversion whose input was changed since they were begun: these begin again, the others stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import join_url
from lightning_streaming.tools.claim import find_small, put_small, remove_small
from lightning_streaming.tools.commands import PROGRAM
from lightning_streaming.tools.console import counted, print_note
from lightning_streaming.tools.sources.source import Part
from lightning_streaming.tools.stored_dataset import StoredDataset
from lightning_streaming.writing.names import PARTS_PLAN
from lightning_streaming.writing.part_plan import PartPlan, dump_plan, make_plan, parse_plan
from lightning_streaming.writing.settings import ShardSettings


def begin_changed_again(
    parts: Sequence[Part], out: StoredDataset, columns: Mapping[str, str], settings: ShardSettings
) -> None:
    """Make a dataset that was begun one that is gone on with, where only what is in the files was changed.

    A changed part loses its index first, so that it is not taken for finished, and then the plan is replaced: stopped
    in between, the next run does the same again. Where there are fewer parts now nothing is done, and plan_parts
    refuses in its own words.

    Args:
        parts: What is to be converted now.
        out: Where it was begun, if it was.
        columns: Column name to encoding.
        settings: How shards are cut, compressed and hashed.

    Raises:
        ConfigError: The dataset is finished, so that it must not change any more.
        StorageError: The store does not answer.
    """
    text = find_small(out, PARTS_PLAN)
    if text is None:
        return
    begun = parse_plan(text, out.shown)
    wanted = make_plan(parts, columns, settings)
    if not _may_go_on(begun, wanted):
        return
    changed = [number for number, one in enumerate(wanted.inputs) if one not in begun.inputs[number : number + 1]]
    if not changed:
        return
    if find_small(out, INDEX_BASENAME) is not None:
        raise ConfigError(
            f"{out.shown} is a finished dataset, which does not change, but its source did since: now input "
            f"{changed[0]} is {wanted.inputs[changed[0]]}; convert it to another place"
        )
    for number in changed:
        part = replace(out, location=join_url(out.location, f"part.{number:06}"))
        if find_small(part, INDEX_BASENAME) is not None:
            remove_small(part, INDEX_BASENAME)
    put_small(out, PARTS_PLAN, dump_plan(wanted))
    again = f"{counted(len(changed), 'part')} of {len(parts):,} begin again, because their input changed"
    print_note(f"{PROGRAM} convert", f"{again}; the first is part {changed[0]}")


def _may_go_on(begun: PartPlan, wanted: PartPlan) -> bool:
    """Whether two plans differ in the content of inputs alone; there may be more of them now."""
    return begun.settings == wanted.settings and len(begun.inputs) <= len(wanted.inputs)
