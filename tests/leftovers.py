"""What trainers leave in a process, and would be found there by whatever runs in it next."""

from __future__ import annotations

import sys

from torch.utils.data import BatchSampler, DataLoader


def forget_accelerate() -> None:
    """Let the next ``Accelerator`` find out anew among how many processes it is, and which loaders are being read."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def restore_loader_classes() -> None:
    """Undo what Lightning does to torch's loaders while it asks for them, and leaves so if asking fails.

    Loaders made so note each value that is ever set on them, and keep all these alive.
    """
    for base in (DataLoader, BatchSampler):
        if "__old__setattr__" in vars(base):
            _restore(base)


def _restore(kind: type) -> None:
    for name in ("__init__", "__setattr__", "__delattr__"):
        if (old := f"__old{name}") in vars(kind):
            setattr(kind, name, vars(kind)[old])
            delattr(kind, old)
    derived: type
    for derived in kind.__subclasses__():
        _restore(derived)
