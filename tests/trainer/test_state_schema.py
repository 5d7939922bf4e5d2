"""docs/internals/state.md describes the state: its tables have every key and type, its example is a real state."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_streaming.resume.state import CALLBACK_KEY, SavedRun, SavedTrainer, SavedValidation, read_state
from lightning_streaming.sequence.phases import WeightChange
from tests.golden import golden_path
from tests.golden.release_0_1.runs import MADE_WITH, SaveAndStop, fit
from tests.helpers import State
from tests.resume.test_state_versions import STATES

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "state.md").read_text()
SCHEMA = PAGE.partition("\n## Schema\n")[2].partition("\n## ")[0]
EXAMPLE: State = json.loads(SCHEMA.partition("```json\n")[2].partition("```")[0])
TYPES = {int: "integer", str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
GOLDEN = golden_path("release_0_1", "version_2")


def table(of: str) -> dict[str, tuple[bool, set[str]]]:
    """Return each key of a table, whether it is optional, and its types; a row may have several keys of one type."""
    lines = SCHEMA.partition(f"\n{of}:\n\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\*?`[^|]+) \| ([^|]+) \|", lines, re.MULTILINE)
    return {
        key: (keys.startswith("*"), set(types.strip().split(" or ")))
        for keys, types in rows
        for key in re.findall(r"`([^`]+)`", keys)
    }


CALLBACK, POSITION, FINGERPRINT = table("Callback"), table("Loader and dataset"), table("Fingerprint")


def keys_in(state: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key of a state as the tables name it, and the type of its value."""
    names = f"{prefix}*" in known
    for key, value in state.items():
        path = f"{prefix}*" if names else f"{prefix}{key}"
        yield path, TYPES[type(value)]
        if isinstance(value, dict) and path not in ("loaders", "fingerprint"):
            yield from keys_in(value, known, f"{path}.")


def missing_in(state: Mapping[str, Any], known: Mapping[str, tuple[bool, set[str]]], prefix: str = "") -> list[str]:
    """Keys that are not optional, and that a state lacks where it has what they are in."""
    here = {key.removeprefix(prefix) for key in known if key.startswith(prefix)}
    needed = [key for key in here if "." not in key and key != "*" and not known[prefix + key][0] and key not in state]
    keys = [prefix + key for key in needed]
    for key, value in state.items():
        inner = f"{prefix}*." if "*" in here else f"{prefix}{key}."
        if isinstance(value, dict) and inner.removesuffix(".") not in ("loaders", "fingerprint"):
            keys += missing_in(value, known, inner)
    return keys


def of_all_kinds() -> Iterator[tuple[State, dict[str, tuple[bool, set[str]]]]]:
    """Yield states, of version 2, with the table that describes each."""
    runs = [torch.load(GOLDEN / f"{kind}.ckpt", weights_only=True)["callbacks"][CALLBACK_KEY] for kind in MADE_WITH]
    trainer, due = SavedTrainer(epoch=0, batches=1, batches_in_epoch=2), SavedValidation(is_due=True, done_after=0)
    loaders = {"train": read_state(STATES["join-py1e"])}
    runs += [SavedRun().as_state(), SavedRun(trainer=trainer, loaders=loaders, validation=due).as_state()]
    positions = [position for run in runs for position in run["loaders"].values()]
    positions += [read_state(state).as_state() for state in STATES.values()]
    reference = {"epoch": 1, "sample_in_epoch": 8, "shuffle_seed": 7, "num_canonical_nodes": 2}
    positions.append(read_state(reference).as_state())
    for of, states in ((CALLBACK, runs), (POSITION, positions)):
        yield from ((state, of) for state in states)
    yield from ((state["fingerprint"], FINGERPRINT) for state in positions if state["fingerprint"] is not None)
    saved = read_state(STATES["schedule-py1e-random-150"]).fingerprint
    assert saved is not None
    grown = {name: replace(stream, grown=((40, 1),), lengths="0" * 16) for name, stream in saved.streams.items()}
    step = {"class": "my.EverySecond", "version": 1, "arguments": {}}
    change = WeightChange(epoch=0, step=2, mix=(("a", 1.0),))
    mixing = {"weights_in": "tokens", "lengths": "lengths='size'", "longest_step": 9, "max_repeats": {"a": "2.0"}}
    yield replace(saved, streams=grown, sequence=(step,), mixing=mixing, weights_set=(change,)).as_state(), FINGERPRINT
    packed = next(state for state in positions if "packing" in (state["fingerprint"] or ()))
    ends = {**packed["fingerprint"]["packing"], "bos": 1, "eos": 2, "tokenize": "0" * 16}
    with_ends = read_state({**packed, "fingerprint": {**packed["fingerprint"], "packing": ends}})
    assert with_ends.fingerprint is not None
    yield with_ends.fingerprint.as_state(), FINGERPRINT


def test_the_tables_have_every_key_and_its_type() -> None:
    seen: dict[int, dict[str, set[str]]] = {}
    for state, of in of_all_kinds():
        assert missing_in(state, of) == [], state
        for key, kind in keys_in(state, of):
            seen.setdefault(id(of), {}).setdefault(key, set()).add(kind)
    for of in (CALLBACK, POSITION, FINGERPRINT):
        keys = seen[id(of)]
        assert keys.keys() == of.keys()
        assert {key: types for key, types in keys.items() if types != of[key][1]} == {}


def test_the_example_is_what_a_run_saves(tmp_path: Path) -> None:
    batch_size, workers, batches = MADE_WITH["mixture"]
    data = golden_path("release_0_1", "data")
    fit("mixture", data, tmp_path, batch_size, workers, SaveAndStop(tmp_path / "saved.ckpt", batches))
    assert torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"][CALLBACK_KEY] == EXAMPLE
