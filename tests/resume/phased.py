"""Streams of a few samples, and phases over them, for tests of mixtures that change within an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from lightning_streaming import Stream, StreamingDataLoader
from tests.helpers import State, json_copy, make_loader, write_dataset
from tests.schedules import Phase, schedule

SIZES = {"code": 29, "math": 13, "news": 21, "web": 60, "aaa": 18, "mid": 18, "zzz": 18}
FIRST_ID = {name: 1000 * number for number, name in enumerate(SIZES)}
NAMES = ("web", "code", "math", "news")

BROAD = Phase(name="broad", end=40, mix={"web": 0.9, "code": 0.1})
RAMP = Phase(name="ramp", end="75%", mix={"web": [0.9, 0.5], "math": [0.1, 0.5]}, steps=4)
ANNEAL = Phase(name="anneal", mix={"math": 1, "news": 2})
PHASES = (BROAD, RAMP, ANNEAL)
"""Of 160 samples, with borders at 40 and 120: "code" is read by the first alone, "news" by the last."""


def write_streams(root: Path, sizes: dict[str, int] | None = None) -> Path:
    """Every stream of ``SIZES``, each with ids of its own."""
    for name, size in (sizes or SIZES).items():
        write_dataset(root / name, size, first_id=FIRST_ID[name])
    return root


def phased_loader(
    root: Path, phases: Sequence[Phase] | None = PHASES, names: Sequence[str] = NAMES, **overrides: Any
) -> StreamingDataLoader:
    """A loader over some of the streams in 4 canonical nodes, in batches of 4."""
    streams = {name: Stream(remote=str(root / name)) for name in names}
    settings: dict[str, Any] = {"epoch_size": 160, "num_canonical_nodes": 4, "streams": streams}
    settings["schedule"] = schedule(phases) if phases else None
    return make_loader(**{**settings, **overrides})


def read(loader: StreamingDataLoader, steps: int | None = None) -> list[int]:
    """The ids of the next batches, or of the rest of an epoch."""
    found: list[int] = []
    for number, batch in enumerate(loader, 1):
        found += batch["id"].tolist()
        if number == steps:
            break
    return found


def stopped(root: Path, steps: int, **asked: Any) -> tuple[list[int], State]:
    """What a run reads in so many batches, and its state then."""
    loader = phased_loader(root, **asked)
    found = read(loader, steps) if steps else []
    return found, json_copy(loader.state_dict())


def gone_on(root: Path, state: State, on_mismatch: Any = "error", **asked: Any) -> StreamingDataLoader:
    """The loader that goes on from a state."""
    loader = phased_loader(root, **asked)
    loader.load_state_dict(json_copy(state), on_mismatch=on_mismatch)
    return loader


def stream_of(sample: int) -> str:
    """Which stream an id is of."""
    return next(name for name in reversed(SIZES) if FIRST_ID[name] <= sample)


def check_passes(seen: Sequence[int], first_id: int, sizes: Sequence[int], then: int) -> None:
    """The first passes over a stream read each of so many samples once, and those after them each of ``then``."""
    mine = [one - first_id for one in seen if first_id <= one < first_id + 1000]
    for size in chain(sizes, repeat(then)):
        in_pass, mine = mine[:size], mine[size:]
        if not mine:
            assert len(set(in_pass)) == len(in_pass)
            return
        assert sorted(in_pass) == list(range(size))
