"""What ``state`` shows: a table for each loader and its streams, or the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.order.gaps import Place
from lightning_streaming.tools.console import counted, print_json
from lightning_streaming.tools.states.places import Places, SavedLoader, TrainerPlace
from lightning_streaming.tools.states.seen import StreamSeen
from lightning_streaming.tools.tables import print_table


def loader_as_json(loader: SavedLoader, epoch_size: int | None, streams: Sequence[StreamSeen]) -> dict[str, Any]:
    """One loader's place and what it belongs to, with the streams that were counted."""
    position = loader.position
    return {
        "epoch": position.cursor.epoch,
        "sample_in_epoch": position.cursor.sample_in_epoch,
        "epoch_size": epoch_size,
        "epoch_done": _share(position.cursor, epoch_size),
        "shuffle_seed": position.shuffle_seed,
        "num_canonical_nodes": position.num_canonical_nodes,
        "initial_physical_nodes": position.initial_physical_nodes,
        "samples_per_global_batch": loader.global_batch,
        "batch_geometry": None if position.geometry is None else asdict(position.geometry),
        "skipped": {name: [Cursor(*place)._asdict() for place in ends] for name, ends in position.skipped.items()},
        "fingerprint": position.fingerprint,
        "streams": [asdict(stream) for stream in streams],
    }


def trainer_as_json(trainer: TrainerPlace | None) -> dict[str, Any] | None:
    """How far the trainer has come."""
    return None if trainer is None else asdict(trainer)


def print_head(shown: str, trainer: TrainerPlace | None) -> None:
    """Print what the file is of."""
    if trainer is None:
        print(f"{shown}: no checkpoint of StreamingStateCallback, but it holds the place of a dataset\n")
        return
    of = f" of {trainer.batches_in_epoch}" if trainer.batches_in_epoch else ""
    step = "" if trainer.global_step is None else f", global step {trainer.global_step}"
    print(f"{shown}: trainer at epoch {trainer.epoch}, {trainer.batches}{of} batches done{step}\n")


def print_loader(name: str, loader: SavedLoader, epoch_size: int | None, streams: Sequence[StreamSeen]) -> None:
    """Print one loader's place, its fingerprint, and what was read of each stream."""
    facts = loader_as_json(loader, epoch_size, ())
    order = (loader.position.fingerprint or {}).get("order", {})
    rows = [
        ("epoch", str(facts["epoch"])),
        ("sample in epoch", _sample(loader.position.cursor, epoch_size)),
        ("global batch", "-" if loader.global_batch is None else counted(loader.global_batch, "sample")),
        ("shuffle seed", str(facts["shuffle_seed"])),
        ("canonical nodes", str(facts["num_canonical_nodes"])),
        ("nodes at first", str(facts["initial_physical_nodes"] or "-")),
        *((f"skips {batches}", _ends(*ends)) for batches, ends in loader.position.skipped.items()),
        *((key.replace("_", " "), _value(value)) for key, value in order.items()),
    ]
    print_table(name, ("", ""), rows, head=False)
    listed = (loader.position.fingerprint or {}).get("streams", {})
    if not listed:
        print("no fingerprint: it is not known to which data and order this place belongs\n")
        return
    if not streams:
        print(f"{', '.join(listed)}: too many for the state to tell each\n")
        return
    heads = ("stream", "samples", "per epoch", "before", "this epoch", "in all", "digest")
    cells = [
        (one.name, *map(_number, (one.samples, one.drawn, one.before, one.this_epoch, one.total)), digest)
        for one, digest in zip(streams, (stream["digest"] for stream in listed.values()), strict=True)
    ]
    print_table(
        f"samples read, {name}",
        heads,
        cells,
        right=heads[1:-1],
    )
    if any(one.this_epoch is None for one in streams):
        print("what this epoch has read of each stream is told with --data NAME=PLACE for each of them\n")


def print_moves(written: Path, backup: Path | None, before: Places | None, after: Places, *, as_json: bool) -> None:
    """Print what was written, from where each loader was moved to where, and where the trainer stands.

    Args:
        written: The file.
        backup: The file that holds what was there before, if there was one.
        before: The places it held.
        after: The places it holds.
        as_json: Whether to print it for programs.
    """
    cursors = {} if before is None else {name: loader.position.cursor for name, loader in before.loaders.items()}
    if as_json:
        loaders = {
            name: {
                "from": cursors[name]._asdict() if name in cursors else None,
                "to": loader.position.cursor._asdict(),
            }
            for name, loader in after.loaders.items()
        }
        trainer = trainer_as_json(after.trainer)
        print_json({"file": str(written), "backup": backup and str(backup), "loaders": loaders, "trainer": trainer})
        return
    for name, loader in after.loaders.items():
        come = f"from {_words(cursors[name])} " if name in cursors else ""
        print(f"{written}: {name} {come}to {_words(loader.position.cursor)}")
    if after.trainer is not None:
        print(f"the trainer goes on in epoch {after.trainer.epoch}, after batch {after.trainer.batches}")
    if backup is not None:
        print(f"what was there before: {backup}")


def _ends(start: Place, stop: Place) -> str:
    if start == stop:
        return "nothing: it was asked for too late"
    last = f"{stop[1]:,}" if start[0] == stop[0] else _words(Cursor(*stop))
    return f"epoch {start[0]}, samples {start[1]:,} to {last}"


def _words(cursor: Cursor) -> str:
    return f"epoch {cursor.epoch}, sample {cursor.sample_in_epoch}"


def _share(cursor: Cursor, epoch_size: int | None) -> float | None:
    return round(min(1.0, cursor.sample_in_epoch / epoch_size), 6) if epoch_size else None


def _sample(cursor: Cursor, epoch_size: int | None) -> str:
    share = _share(cursor, epoch_size)
    if share is None:
        return f"{cursor.sample_in_epoch:,}"
    return f"{cursor.sample_in_epoch:,} of {epoch_size:,}, {share:.1%}"


def _value(value: object) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
