"""``state show``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import FINE, print_json
from lightning_streaming.tools.options import storage_options
from lightning_streaming.tools.states.files import find_state_file
from lightning_streaming.tools.states.places import SavedLoader, find_places
from lightning_streaming.tools.states.report import (
    loader_as_json,
    print_head,
    print_loader,
    trainer_as_json,
)
from lightning_streaming.tools.states.seen import StreamSeen, seen_by_fingerprint, this_epoch_by_data
from lightning_streaming.tools.stored_dataset import find_dataset


def show(args: Namespace) -> int:
    """Show the place of each train loader: epoch, sample, what it belongs to, and what was read of each stream.

    Nothing that the file names is run, and no tensor of it is read.
    """
    places = find_places(find_state_file(Path(args.checkpoint)).peek(), args.checkpoint)
    chosen = places.loaders
    if args.loader is not None or args.data:
        name = places.choose(args.loader)
        chosen = {name: places.loaders[name]}
    options = storage_options(args.storage_options)
    counted = {name: _count(loader, args.data, options) for name, loader in chosen.items()}
    if args.json:
        loaders = {name: loader_as_json(loader, *counted[name]) for name, loader in chosen.items()}
        print_json({"file": args.checkpoint, "trainer": trainer_as_json(places.trainer), "loaders": loaders})
        return FINE
    print_head(args.checkpoint, places.trainer)
    for name, loader in chosen.items():
        print_loader(name, loader, *counted[name])
    return FINE


def _count(loader: SavedLoader, data: Sequence[str], options: Mapping[str, Any]) -> tuple[int | None, list[StreamSeen]]:
    """The size of an epoch and what was read of each stream, as far as the state or the data tell."""
    seen = seen_by_fingerprint(loader.position)
    if not data:
        return loader.epoch_size, seen
    if loader.position.fingerprint is None:  # then it was not weighted, as far as anybody can know
        sizes = [find_dataset(place.partition("=")[2] or place, options).read_index().num_samples for place in data]
        return sum(sizes), []
    if not seen:
        raise ConfigError("the state does not list its streams, so --data has nothing to count by")
    counts = this_epoch_by_data(loader.position, _places(data, [one.name for one in seen]), options)
    return loader.epoch_size, [replace(one, this_epoch=count) for one, count in zip(seen, counts, strict=True)]


def _places(data: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """``NAME=PLACE`` by name; a place may hold an equals sign, and a lone one need not be named."""
    pairs = [text.partition("=") for text in data]
    if len(data) == len(names) == 1 and pairs[0][0] != names[0]:
        return {names[0]: data[0]}
    return {name: place for name, _, place in pairs}
