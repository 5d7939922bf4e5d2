"""The counters of Lightning's fit loop in a checkpoint: read, checked, and set to another position.

They are plain dicts, so lightning is not imported here; trainer/lightning_internals.py has those of a running trainer.
The fit loop counts epochs and batches as ``ready``, ``started``, ``processed`` and ``completed``, which increase one
after another during one unit of work, and a checkpoint holds their values in the hook that saved it.
:func:`read_plain_values` reads these dicts from a file without the weights, and without running code.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lightning_streaming.errors import StateError

_EPOCHS, _BATCHES, _EPOCH_STATE = "epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"
_STATES, _OF_LOADERS = "state_dict", "combined_loader"
SHARDED_META = "meta.pt"
"""Name of the file in a sharded checkpoint that holds all but the tensors."""


def batches_of_epoch_trained(checkpoint: Mapping[str, Any]) -> int:
    """Return the batches of the current epoch that Lightning has trained; 0 between two epochs."""
    batches = _fit_loop(checkpoint)[_BATCHES]
    return 0 if batches["is_last_batch"] else int(batches["current"]["processed"])


def batches_in_weights(checkpoint: Mapping[str, Any], epoch: int, batches: int) -> int:
    """Return the batches over all epochs that the weights have seen, up to ``batches`` of ``epoch``."""
    loop = _fit_loop(checkpoint)
    progress = loop[_BATCHES]
    seen = int(progress["total"]["processed"])
    if loop[_EPOCHS]["current"]["started"] > epoch:  # under way: batches not in the weights are read again
        seen -= progress["current"]["processed"] - batches
    return seen


def place_of_counters(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return the trainer's position as ``StreamingStateCallback`` saves it, for a checkpoint without that callback."""
    loop = _fit_loop(checkpoint)
    epoch, batches = loop[_EPOCHS]["current"]["completed"], loop[_BATCHES]["current"]["processed"]
    return {"epoch": epoch, "batches": batches, "batches_in_epoch": 0}


def move_counters(checkpoint: MutableMapping[str, Any], seen: int, epoch: int, batches: int) -> None:
    """Set the counters of a checkpoint to the end of ``batches`` batches of ``epoch``.

    They get the values that they have between two batches, or between two epochs, so Lightning has nothing to complete.
    The global step and the loggers' step stay.

    Args:
        checkpoint: Changed in place.
        seen: Batches over all epochs that the weights have seen; see :func:`batches_in_weights`.
        epoch: Completed epochs.
        batches: Completed batches of the next epoch.
    """
    loop = _fit_loop(checkpoint)
    epochs, progress = loop[_EPOCHS], loop[_BATCHES]
    closing = progress["is_last_batch"] and epochs["current"]["processed"] < epochs["current"]["started"]
    if closing or progress["total"]["processed"] > progress["total"]["completed"]:
        loop[_EPOCH_STATE]["_batches_that_stepped"] += 1  # the last step was not counted for loggers yet
    _set([progress["total"]], seen)
    _set([progress["current"]], batches)
    progress["is_last_batch"] = False
    trackers = [epochs["current"], epochs["total"]]
    _set(trackers, epoch)
    if batches:
        for tracker in trackers:
            tracker.update(ready=epoch + 1, started=epoch + 1)
    checkpoint["epoch"] = epoch
    drop_loader_states(checkpoint)


def check_trained(checkpoint: Mapping[str, Any], epoch: int, batches: int) -> None:
    """Check that the trainer of a checkpoint has reached the position that it holds.

    Raises:
        StateError: Lightning has trained fewer batches of the epoch, has not begun it, or has gone beyond it.
    """
    loop = _fit_loop(checkpoint)
    trained = loop[_BATCHES]["current"]["processed"]
    begun, ended = (loop[_EPOCHS]["current"][count] for count in ("ready", "processed"))
    # An epoch that was cut short counts as ended for Lightning.
    if batches > trained or not ended - 1 <= epoch <= begun:
        raise StateError(
            f"the checkpoint's place in the data is after batch {batches} of epoch {epoch}, but its trainer had begun "
            f"{begun} epochs, and trained {trained} batches of the last",
            hint="the two were not saved together. Either it was saved in on_fit_start of a run that resumed, where "
            "Lightning has not restored its counters and optimizers yet: resume from the checkpoint that this "
            "run resumed from, and save in on_train_start or later. Or another checkpoint was restored since, as "
            "LearningRateFinder and BatchSizeFinder do in a run that resumes: leave those out of it",
        )


def reopen_epoch(checkpoint: Mapping[str, Any], epoch: int) -> None:
    """Count the epoch of a checkpoint as under way if a limit cut it short and Lightning counted it as completed."""
    progress = _fit_loop(checkpoint)[_EPOCHS]
    for tracker in (progress["current"], progress["total"]):
        if tracker["processed"] > epoch:
            tracker.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)


def has_loader_states(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds states that Lightning has saved of our loaders."""
    states = checkpoint.get("loops", {}).get("fit_loop", {}).get(_STATES, {}).get(_OF_LOADERS, [])
    return bool(states) and all(isinstance(state, Mapping) and "sample_in_epoch" in state for state in states)


def drop_loader_states(checkpoint: Mapping[str, Any]) -> None:
    """Remove the states of our loaders, which Lightning would load by the number of a loader.

    It does so too late for some loaders and too early for others, and fails if their number has changed.
    """
    if has_loader_states(checkpoint):
        _fit_loop(checkpoint)[_STATES][_OF_LOADERS] = []


def _fit_loop(checkpoint: Mapping[str, Any]) -> MutableMapping[str, Any]:
    loop: MutableMapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    missing = {_EPOCHS, _BATCHES, _EPOCH_STATE, _STATES} - loop.keys()
    if missing:
        raise StateError(
            f"the checkpoint's fit loop has no {', '.join(sorted(missing))}",
            hint="it is no checkpoint of a Lightning release that this package knows (2.6 or newer)",
        )
    return loop


def _set(trackers: Iterable[MutableMapping[str, Any]], done: int) -> None:
    for tracker in trackers:
        tracker.update(ready=done, started=done, processed=done, completed=done)


class _Unread:
    """Placeholder for a value that is not plain: a tensor, or an object of any class."""

    def __new__(cls, *_: object, **__: object) -> _Unread:
        """Ignore the arguments."""
        return super().__new__(cls)

    def __call__(self, *_: object, **__: object) -> _Unread:
        """Return the placeholder as the result of a function that was not read."""
        return self

    def _ignore(self, *_: object, **__: object) -> None:
        """Ignore the content that a pickle sets."""

    __init__ = __setstate__ = __setitem__ = append = extend = _ignore


class _Cautious(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Unread

    def persistent_load(self, _: object) -> Any:
        return _Unread()


def read_plain_values(path: Path) -> Any:
    """Return the dicts, lists, numbers and strings that ``torch.save`` wrote; other values are placeholders.

    Raises:
        StateError: ``torch.save`` did not write the file, or it is damaged.
    """
    try:
        with ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) == 1:
                with archive.open(pickles[0]) as file:
                    return _Cautious(file, encoding="utf-8").load()
    except OSError:
        raise
    except Exception as error:  # damaged bytes may be parsed as anything, and raise anything
        raise StateError(f"{path} is damaged: {error}", path=str(path)) from error
    raise StateError(f"{path} is a zip archive, but torch.save did not write it", path=str(path))
