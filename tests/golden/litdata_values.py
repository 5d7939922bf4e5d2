"""Values of samples as JSON; also for the Python that has litData, so without our package."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image


def describe(value: Any) -> Any:
    """A value as JSON: a list of its kind and what it holds; equal for equal values of one type."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, str)):
        return [kind, value]
    if isinstance(value, float):
        return [kind, value.hex()]
    if isinstance(value, (bytes, memoryview)):  # litData gives the one or the other, by how it reads the chunk
        return ["bytes", value.hex()]
    if isinstance(value, np.ndarray):
        return ["ndarray", value.dtype.name, list(value.shape), value.tobytes().hex()]
    if isinstance(value, torch.Tensor):
        kept = value.contiguous().reshape(-1)
        data = kept.view(torch.uint8).numpy().tobytes() if kept.numel() else b""
        return ["Tensor", str(value.dtype), list(value.shape), data.hex()]
    if isinstance(value, Image.Image):
        return ["Image", value.mode, list(value.size), value.tobytes().hex()]
    if isinstance(value, dict):
        return [kind, [[describe(key), describe(one)] for key, one in value.items()]]
    if isinstance(value, (list, tuple, set)):
        return [kind, [describe(one) for one in value]]
    raise TypeError(f"no value of a sample: {value!r}")
