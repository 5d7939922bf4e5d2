"""The door of ``lightning-streaming view --config``: it imports torch, which a dataset alone does not need."""

from __future__ import annotations

from argparse import Namespace

from lightning_streaming.tools.console import FINE
from lightning_streaming.tools.stored.own_caches import own_caches
from lightning_streaming.tools.viewing.server import serve
from lightning_streaming.tools.viewing.viewed import Viewed, ViewedStream
from lightning_streaming.tools.viewing.viewed_run import ViewedRun


def view_run(args: Namespace) -> int:
    """Show what a run reads until told to end.

    Args:
        args: As ``view`` parses them.

    Raises:
        ConfigError: The configuration has no data, or cannot be read.
        StateError: The checkpoint has no place to go on from.
    """
    run = ViewedRun.read(args)
    with own_caches():
        viewed = viewed_of(run, allow_unsafe_types=args.allow_unsafe_types)
        try:
            serve(viewed, args.port, opens_browser=args.open)
        finally:
            viewed.close()
    return FINE


def viewed_of(run: ViewedRun, *, allow_unsafe_types: bool) -> Viewed:
    """A run and its streams, to be looked at; within ``own_caches``.

    Args:
        run: The run.
        allow_unsafe_types: Whether columns may be decoded that can run code of whoever wrote the data.
    """
    run.move_into_own_caches()
    streams = [
        ViewedStream(
            one.place,
            one.name if one.is_named else one.place.shown,
            allow_unsafe_types,
            stage=one.stage,
            name=one.name,
            only=one.only,
        )
        for one in run.streams()
    ]
    return Viewed(shown=run.shown, streams=streams, run=run)
