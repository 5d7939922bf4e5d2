"""Lightning's own counters in a checkpoint, set to another place.

The fit loop's counters are saved in one of several shapes, by the hook that saved. Here they get the shape they have
between two batches, or between two epochs: nothing is under way, so Lightning has nothing to finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from lightning_streaming.errors import StateError
from lightning_streaming.loading.saved_run import CALLBACK_KEY, RUN_VERSION

_EPOCHS, _BATCHES, _EPOCH_STATE = "epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"


def trained_batches(checkpoint: MutableMapping[str, Any]) -> int:
    """Batches of the epoch under way that Lightning has trained; 0 between two epochs."""
    batches = _fit_loop(checkpoint)[_BATCHES]
    return 0 if batches["is_last_batch"] else int(batches["current"]["processed"])


def batches_trained(checkpoint: Mapping[str, Any]) -> int:
    """Batches over all epochs that the weights have seen.

    Raises:
        StateError: As for :func:`move_trainer`.
    """
    loop = _fit_loop(checkpoint)
    place, progress = checkpoint["callbacks"][CALLBACK_KEY]["trainer"], loop[_BATCHES]
    seen = int(progress["total"]["processed"])
    if loop[_EPOCHS]["current"]["started"] > place["epoch"]:  # under way: batches not in the weights are read again
        seen -= progress["current"]["processed"] - place["batches"]
    return seen


def move_trainer(checkpoint: MutableMapping[str, Any], epoch: int, batches: int) -> None:
    """Let a checkpoint say that its trainer has done ``batches`` batches of ``epoch``.

    What counts all that the weights have seen stays: the batches trained in total, the global step, the loggers' step.

    Raises:
        StateError: It was not saved by a Lightning release that this package knows.
    """
    loop = _fit_loop(checkpoint)
    place = checkpoint["callbacks"][CALLBACK_KEY]["trainer"]
    epochs, progress = loop[_EPOCHS], loop[_BATCHES]
    total, current = progress["total"], progress["current"]
    closing = progress["is_last_batch"] and epochs["current"]["processed"] < epochs["current"]["started"]
    if closing or total["processed"] > total["completed"]:  # the last step was not counted for loggers yet
        loop[_EPOCH_STATE]["_batches_that_stepped"] += 1
    _set([total], batches_trained(checkpoint))
    _set([current], batches)
    progress["is_last_batch"] = False
    trackers = [epochs["current"], epochs["total"]]
    _set(trackers, epoch)
    if batches:
        for tracker in trackers:
            tracker.update(ready=epoch + 1, started=epoch + 1)
    place.update(epoch=epoch, batches=batches)
    checkpoint["epoch"] = epoch
    loader_states = loop["state_dict"].get("combined_loader", [])
    if all(isinstance(state, dict) and "sample_in_epoch" in state for state in loader_states):
        loop["state_dict"]["combined_loader"] = []  # where our loaders themselves say they are, which is no longer so


def add_place(checkpoint: MutableMapping[str, Any], loader: str, state: MutableMapping[str, Any]) -> None:
    """Give a checkpoint the state of a loader, in place of the one it has, if any.

    Raises:
        StateError: It is not a checkpoint of Lightning that ``Trainer.fit`` could go on from.
    """
    loop = _fit_loop(checkpoint)
    callbacks = checkpoint.setdefault("callbacks", {})
    saved = callbacks.get(CALLBACK_KEY)
    if saved is None or saved["trainer"] is None:
        epoch, batches = loop[_EPOCHS]["current"]["completed"], loop[_BATCHES]["current"]["processed"]
        trainer = {"epoch": epoch, "batches": batches, "batches_in_epoch": 0}
        saved = callbacks[CALLBACK_KEY] = {"version": RUN_VERSION, "trainer": trainer, "loaders": {}}
    saved["loaders"][loader] = state


def _fit_loop(checkpoint: Mapping[str, Any]) -> MutableMapping[str, Any]:
    loop: MutableMapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    missing = {_EPOCHS, _BATCHES, _EPOCH_STATE, "state_dict"} - loop.keys()
    if missing:
        raise StateError(
            f"its fit loop has no {', '.join(sorted(missing))}; "
            "it is no checkpoint of a Lightning release that this package knows (2.6 or newer)"
        )
    return loop


def _set(trackers: Iterable[MutableMapping[str, Any]], done: int) -> None:
    for tracker in trackers:
        tracker.update(ready=done, started=done, processed=done, completed=done)
