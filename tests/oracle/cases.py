"""The runs of the oracle: orders, mixtures, schedules, packs, selections and joins, each resumed on another world.

A case is a description in plain words; :func:`arguments` alone knows what the public interface calls them, so a renamed
option is changed there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming import MDSWriter, Stream, StreamingDataset, World

SIZES = {"books": 61, "code": 40, "web": 127}
"""Documents in each stream."""
_TOKENS_PER_DOCUMENT = 250
"""A token tells its document, by number over all streams, and its position in it."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Machines that read a run."""

    nodes: int
    ranks: int
    batch: int

    def worlds(self) -> list[World]:
        """Return the world of each rank."""
        count = self.nodes * self.ranks
        return [World(num_nodes=self.nodes, ranks_per_node=self.ranks, rank=rank) for rank in range(count)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: what is read, by which machines, and who resumes it."""

    name: str
    start: Geometry
    resumed: Geometry
    options: dict[str, Any]
    """Arguments of the dataset that MosaicML Streaming has too."""
    streams: Sequence[str] = tuple(SIZES)
    weights: dict[str, Any] = field(default_factory=dict)
    """``proportion``, ``repeat`` or ``choose`` of each stream by name."""
    selection: dict[str, Any] = field(default_factory=dict)
    """``where``, ``fraction``, ``group_by``, ``indices``; of all streams."""
    schedule: Sequence[dict[str, Any]] = ()
    """``name``, ``end``, ``mix``, ``steps``, ``ended_at`` of each phase."""
    pack: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    join: bool = False
    skip: Sequence[Any] = ()
    columns: Sequence[str] | None = ("id",)
    epochs: int = 2


def write_data(root: Path) -> None:
    """Write the streams, and the dataset that they are joined with."""
    first = 0
    for name, count in SIZES.items():
        lengths = np.minimum(np.random.default_rng(count).lognormal(2.5, 0.9, count), 200).astype(int) + 1
        columns = {"id": "int", "size": "int", "tokens": "ndarray:uint16"}
        with MDSWriter(out=str(root / name), columns=columns, size_limit=1500) as writer:
            for number, length in enumerate(lengths.tolist(), first):
                tokens = (number * _TOKENS_PER_DOCUMENT + np.arange(length)).astype(np.uint16)
                writer.write({"id": number, "size": length, "tokens": tokens})
        first += count
    with MDSWriter(out=str(root / "captions"), columns={"id": "int", "caption": "str"}, size_limit=400) as writer:
        for number in np.random.default_rng(7).permutation(first).tolist():
            writer.write({"id": number, "caption": f"caption of {number}"})


def arguments(case: Case, root: Path) -> dict[str, Any]:
    """Return the arguments of the dataset, by their public names."""
    of_stream: dict[str, Any] = {"selection": case.selection or None}
    if case.join:
        of_stream["join"] = {"caption": {"remote": str(root / "captions"), "key": "id"}}
    streams = {}
    for name in case.streams:
        streams[name] = Stream(remote=str(root / name), **case.weights.get(name, {}), **of_stream)
    schedule = {phase["name"]: {key: phase[key] for key in phase if key != "name"} for phase in case.schedule}
    columns = None if case.columns is None else list(case.columns) + (["caption"] if case.join else [])
    ours = {
        "schedule": schedule,
        "packing": case.pack,
        "token_budget": case.budget,
        "skip": case.skip,
        "columns": columns,
    }
    return {"streams": streams, **case.options, **{name: value for name, value in ours.items() if value}}


def dataset_of(case: Case, geometry: Geometry, world: World, root: Path) -> StreamingDataset:
    """Return the dataset that a rank reads."""
    batch = 1 if case.budget else geometry.batch
    return StreamingDataset(**arguments(case, root), batch_size=batch, world=world)


GEOMETRIES = [
    Geometry(nodes=1, ranks=1, batch=4),
    Geometry(nodes=2, ranks=2, batch=3),
    Geometry(nodes=4, ranks=1, batch=2),
    Geometry(nodes=1, ranks=3, batch=4),
    Geometry(nodes=2, ranks=1, batch=6),
]
_SHUFFLES = (None, "py1e", "py1br", "py1s", "py2s", "naive", "blockwise")
_METHODS = ("random", "stratified", "per_stream", "device_per_stream")
_WEIGHTS: list[dict[str, dict[str, Any]]] = [
    {},
    {"books": {"proportion": 0.5}, "code": {"proportion": 0.2}, "web": {"proportion": 0.3}},
    {"books": {"repeat": 1.5}, "code": {"choose": 25}, "web": {"repeat": 0.5}},
]
_SCHEDULE: list[dict[str, Any]] = [
    {"name": "broad", "end": 80, "mix": {"web": 0.8, "code": 0.2}},
    {"name": "ramp", "end": "70%", "steps": 3, "mix": {"web": [0.8, 0.4], "code": [0.2, 0.3], "books": [0, 0.3]}},
    {"name": "anneal", "mix": {"books": 3, "code": 2}},
]
_PACKS: list[dict[str, Any]] = [
    {"column": "tokens", "capacity": 64, "window": 32},
    {"column": "tokens", "capacity": 96, "method": "concat"},
    {"column": "tokens", "capacity": 48, "window": 64, "longer": "truncate"},
    {"column": "tokens", "capacity": 48, "window": 16, "longer": "drop"},
]
_BUDGETS: list[dict[str, Any]] = [
    {"column": "tokens", "tokens": 256},
    {"column": "tokens", "tokens": 400, "buckets": 3, "window": 64},
]
_SELECTIONS: list[dict[str, Any]] = [
    {"where": "size > 12"},
    {"fraction": "10%:80%"},
    {"fraction": "0%:60%", "group_by": "size"},
    {"where": "size < 40", "fraction": "20%:100%"},
]


def cases() -> list[Case]:
    """Return all runs; each name once."""
    found = [*_orders(), *_schedules(), *_packs(), *_selections(), *_others()]
    assert len({case.name for case in found}) == len(found)
    return found


def _named(parts: Sequence[object]) -> str:
    return "-".join(str(part) for part in parts)


def _shuffling(algorithm: str | None, **options: Any) -> dict[str, Any]:
    if algorithm is None:
        return {"shuffle": False, **options}
    return {"shuffle": True, "shuffle_algo": algorithm, "shuffle_block_size": 50, **options}


def _pairs() -> Iterator[tuple[Geometry, Geometry]]:
    return cycle([(one, other) for one in GEOMETRIES for other in GEOMETRIES if one != other])


def _orders() -> Iterator[Case]:
    pairs = _pairs()
    for (shuffle, method), (number, weights) in product(product(_SHUFFLES, _METHODS), enumerate(_WEIGHTS)):
        for sampling in ("balanced", "fixed")[: 2 if number else 1]:
            start, resumed = next(pairs)
            yield Case(
                name=_named(["order", shuffle, method, "weights", number, sampling]),
                start=start,
                resumed=resumed,
                options=_shuffling(
                    shuffle, batching_method=method, sampling_method=sampling, num_canonical_nodes=12, shuffle_seed=3
                ),
                weights=weights,
            )


def _schedules() -> Iterator[Case]:
    pairs = _pairs()
    for shuffle, method, repeat in product(_SHUFFLES, ("random", "stratified"), range(2)):
        start, resumed = next(pairs)
        size = 150 + 90 * repeat
        schedule = _SCHEDULE
        if method == "stratified":  # where each stream needs a sample of each global batch
            size += 180
            start, resumed = (replace(one, batch=2 * one.batch) for one in (start, resumed))
            schedule = [
                _SCHEDULE[0],
                {**_SCHEDULE[1], "mix": {**_SCHEDULE[1]["mix"], "books": [0.2, 0.3]}},
                _SCHEDULE[2],
            ]
        yield Case(
            name=_named(["schedule", shuffle, method, size]),
            start=start,
            resumed=resumed,
            options=_shuffling(shuffle, num_canonical_nodes=12, epoch_size=size, batching_method=method),
            schedule=schedule,
        )


def _packs() -> Iterator[Case]:
    pairs = _pairs()
    for shuffle, has_schedule, (number, pack) in product(
        ("py1e", "blockwise", None), (False, True), enumerate([*_PACKS, *_BUDGETS])
    ):
        start, resumed = next(pairs)
        is_pack = "capacity" in pack
        yield Case(
            name=_named(["pack" if is_pack else "budget", shuffle, number, "schedule" if has_schedule else "plain"]),
            start=start,
            resumed=resumed,
            options=_shuffling(shuffle, num_canonical_nodes=4, **({"epoch_size": 180} if has_schedule else {})),
            schedule=_SCHEDULE if has_schedule else (),
            pack=pack if is_pack else None,
            budget=None if is_pack else pack,
            columns=None,
        )


def _selections() -> Iterator[Case]:
    pairs = _pairs()
    for (number, selection), extra, shuffle in product(
        enumerate(_SELECTIONS), ("plain", "schedule", "pack"), ("py1e", "blockwise")
    ):
        start, resumed = next(pairs)
        yield Case(
            name=_named(["selection", number, extra, shuffle]),
            start=start,
            resumed=resumed,
            options=_shuffling(shuffle, num_canonical_nodes=4, **({"epoch_size": 90} if extra == "schedule" else {})),
            selection=selection,
            schedule=_SCHEDULE_SHORT if extra == "schedule" else (),
            pack=_PACKS[0] if extra == "pack" else None,
            columns=None if extra == "pack" else ("id", "size"),
        )


_SCHEDULE_SHORT: list[dict[str, Any]] = [
    {"name": "first", "end": 30, "mix": {"web": 1}},
    {"name": "second", "mix": {"web": 2, "code": 1, "books": 1}},
]


def _others() -> Iterator[Case]:
    pairs = _pairs()
    for shuffle in ("py1e", "blockwise"):
        for name, options in _OTHERS.items():
            start, resumed = next(pairs)
            settings = {"num_canonical_nodes": 4, **options.get("options", {})}
            yield Case(
                name=_named([name, shuffle]),
                start=start,
                resumed=resumed,
                **{**options, "options": _shuffling(shuffle, **settings)},
            )


_OTHERS: dict[str, dict[str, Any]] = {
    "one stream": {"streams": ("web",)},
    "join": {"join": True},
    "join and where": {"join": True, "selection": {"where": "size > 12"}},
    "skip": {"skip": ["3-5", 9]},
    "skip and schedule": {"skip": ["3-5"], "schedule": _SCHEDULE, "options": {"epoch_size": 150}},
    "skip and pack": {"skip": ["1-2"], "pack": _PACKS[0], "columns": None},
    "ended phase": {
        "schedule": [{**_SCHEDULE_SHORT[0], "ended_at": 20}, _SCHEDULE_SHORT[1]],
        "options": {"epoch_size": 90},
        "epochs": 1,
    },
    "indices": {"streams": ("web",), "selection": {"indices": list(range(5, 95, 2))}},
    "epoch size": {"options": {"epoch_size": 100}},
    "partition orig": {"options": {"partition_algo": "orig", "num_canonical_nodes": 12}},
    "granularity": {
        "options": {"sampling_granularity": 5},
        "weights": {"books": {"repeat": 0.5}, "web": {"repeat": 1.7}},
    },
}
