"""Lightning's Trainer, noticed where it trains from a loader whose place no checkpoint holds."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
_OF_THE_LOADER = ("torch.utils.data", "torch.multiprocessing", "multiprocessing")
_CALLBACK = "lightning_streaming.StreamingStateCallback"


def warn_if_lightning_trains() -> None:
    """To be called where torch's own loader begins to read a dataset: warn if it is one that Lightning trains from.

    Where :class:`StreamingStateCallback` is, it refuses the loader itself.
    """
    if not {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys():
        return
    loop = _fit_loop_above(sys._getframe(1))
    if loop is None or any(getattr(one, "state_key", None) == _CALLBACK for one in loop.trainer.callbacks):
        return
    warnings.warn(
        "Lightning trains from a torch DataLoader around a StreamingDataset. No checkpoint holds the place of such a "
        "loader: a resumed epoch begins again at the first sample of the first. Use StreamingDataLoader and "
        "StreamingStateCallback, or StreamingDataModule, which has both.",
        UserWarning,
        stacklevel=2,
    )


def _fit_loop_above(frame: FrameType | None) -> Any | None:
    """The fit loop whose own loader is beginning to read; None if there is none, or if another loop or hook reads.

    Lightning tells nobody that it trains, so the stack has to: a loader of torch's, begun by Lightning's combination
    of loaders, and that by a loop. Workers that are forked have the same stack.
    """
    while frame is not None and not _module(frame).startswith(_OF_THE_LOADER):
        frame = frame.f_back
    while frame is not None and _module(frame).startswith(_OF_THE_LOADER):
        frame = frame.f_back
    if frame is None or not _module(frame).endswith(".utilities.combined_loader"):
        return None
    while frame is not None:
        if _module(frame).startswith(_LIGHTNING) and _module(frame).endswith((".evaluation_loop", ".prediction_loop")):
            return None
        if _module(frame).startswith(_LIGHTNING) and _module(frame).endswith(".fit_loop"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
