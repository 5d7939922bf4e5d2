"""``lightning-streaming view --config``: serve the pages of a run. Imports torch, which a dataset does not need."""

from __future__ import annotations

from argparse import Namespace

from lightning_streaming.tools.console import FINE
from lightning_streaming.tools.stored.stored_dataset import temporary_caches
from lightning_streaming.tools.viewing.pages import Viewed
from lightning_streaming.tools.viewing.server import serve
from lightning_streaming.tools.viewing.viewed_run import ViewedRun


def view_run(args: Namespace) -> int:
    """Serve the pages of a run until a signal ends the process.

    Args:
        args: Parsed arguments of ``view``.

    Raises:
        ConfigError: The configuration has no data, or cannot be read.
        StateError: The checkpoint has no position to resume from.
    """
    run = ViewedRun.read(args)
    with temporary_caches():
        viewed = viewed_of(run, allow_unsafe_types=args.allow_unsafe_types)
        try:
            serve(viewed, args.port, open_browser=args.open)
        finally:
            viewed.close()
    return FINE


def viewed_of(run: ViewedRun, *, allow_unsafe_types: bool) -> Viewed:
    """Return a run with its streams; call it within ``temporary_caches``.

    Args:
        run: The run.
        allow_unsafe_types: Whether columns may be decoded that can run code of the author of the data.
    """
    run.use_own_caches()
    return Viewed(shown=run.shown, streams=list(run.streams(allow_unsafe_types)), run=run)
