"""Collation of samples: by torch's default collate, or by a user's function.

If torch's default collate fails, the error names the column, and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate as collate_by
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

_FEWEST_IN_THREADS = 1 << 15
"""Values from which on torch copies in threads."""
_IN_TRANSFORM = "in transform= (or in the dataset's __getitem__)"

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""


class CollateError(Exception):
    """Samples that could not be collated; the caller knows which they are.

    Args:
        message: What is wrong.
        places: Numbers of the samples in the batch that the error names.
    """

    def __init__(self, message: str, places: Sequence[int]) -> None:
        super().__init__(message)
        self.places = places


def collated(collate: Collate, samples: list[Any]) -> Any:
    """Return the batch of some samples.

    Args:
        collate: Collate function.
        samples: At least one.

    Raises:
        CollateError: The collate function failed; its cause is that error, unless it is torch's own function or
            :func:`stacked`, whose errors are explained with a fix.
    """
    try:
        return collate(samples)
    except Exception as error:
        if collate in (default_collate, stacked):
            raise _explained(samples, error) from None
        message = f"collate_fn failed on a batch: {type(error).__name__}: {error}"
        raise CollateError(message, range(len(samples))) from error


def stacked(samples: list[Any]) -> Any:
    """Return what torch's default collate makes of samples, in memory of this process and by this thread only.

    In a worker, torch would allocate shared memory for each tensor, which takes three times as long to fill, and is
    copied too. Elsewhere it would wake torch's threads, which keep cores busy that our threads decode on.
    """
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:  # replaced by the user, as torch allows
        return default_collate(samples)
    return collate_by(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stacked_tensors})


def _stacked_tensors(tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:  # noqa: ARG001
    first = tensors[0]
    if first.is_nested or first.layout is not torch.strided:
        return default_collate(tensors)  # which says that it does not take them
    kind = first.dtype, first.shape
    needs_no_threads = torch.get_num_threads() == 1 or first.numel() * len(tensors) < _FEWEST_IN_THREADS
    if needs_no_threads or not all(is_plain(tensor) and (tensor.dtype, tensor.shape) == kind for tensor in tensors):
        return torch.stack(tensors)
    # In one call: numpy would release the interpreter's lock, and wait for it, for each.
    joined = bytearray().join([tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors])
    return torch.frombuffer(joined, dtype=first.dtype).view(len(tensors), *first.shape)


class _Mismatch(NamedTuple):
    where: str
    """What is wrong with the samples' values at one path."""
    hint: str
    odd: int | None = None
    """The first sample of the batch that is not like those before it, if that is what is wrong."""


def _explained(samples: list[Any], error: Exception) -> CollateError:
    mismatch = _mismatch("", samples)
    if mismatch is None:
        message = f"torch's default collate cannot batch these samples: {type(error).__name__}: {error}"
        return CollateError(message, range(len(samples)))
    message = f"{mismatch.where}, which torch's default collate cannot batch; {mismatch.hint}"
    return CollateError(message, [] if mismatch.odd is None else [mismatch.odd])


def _mismatch(path: str, values: Sequence[Any]) -> _Mismatch | None:
    """Return why values cannot be collated: the first of their parts that torch does not take.

    Args:
        path: Path to the values in the samples; empty for the samples themselves.
        values: One of each sample.
    """
    place, first = f"column {path}" if path else "each sample", values[0]
    if any(value is None for value in values):
        nones = [number for number, value in enumerate(values) if value is None]
        are_all = len(nones) == len(values)
        return _Mismatch(
            f"{place} is None" if are_all else f"{place} is None in {len(nones)} of {len(values)} samples",
            f"put a value there {_IN_TRANSFORM}, or pass the loader a collate_fn=",
            None if are_all else nones[0],
        )
    if isinstance(first, Mapping):
        return _mappings(path, place, values)
    if isinstance(first, (tuple, list)):
        return _sequences(path, place, values)
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _of_other_kinds(place, values, type(first)) or _arrays(place, values)
    if isinstance(first, (str, bytes)):
        return None
    if isinstance(first, Number):
        return _of_other_kinds(place, values, Number)
    kind = type(first)
    if is_image(kind):
        return _Mismatch(
            f"{place} is a PIL image ({kind.__name__})",
            f"make an array of it {_IN_TRANSFORM}, as numpy.array(image) or torchvision's ToTensor do, of one size for "
            "all images; or pass the loader a collate_fn=",
        )
    return _Mismatch(
        f"{place} is an object of type {kind.__module__}.{kind.__qualname__}",
        f"make a tensor, array, number or text of it {_IN_TRANSFORM}, or pass the loader a collate_fn=",
    )


def _of_other_kinds(place: str, values: Sequence[Any], kind: type) -> _Mismatch | None:
    """Return the samples of another type than the first."""
    for number, value in enumerate(values):
        if not isinstance(value, kind):
            names = f"{type(values[0]).__name__} and {type(value).__name__}"
            return _Mismatch(f"{place} is of different types, {names}", f"make them one {_IN_TRANSFORM}", number)
    return None


def _mappings(path: str, place: str, values: Sequence[Any]) -> _Mismatch | None:
    first = values[0]
    for number, value in enumerate(values):
        keys = list(value) if isinstance(value, Mapping) else type(value).__name__
        if not isinstance(value, Mapping) or value.keys() != first.keys():
            hint = f"give all samples the same {_IN_TRANSFORM}, or pass the loader a collate_fn="
            return _Mismatch(
                f"{place} has different columns: {list(first)} in number 0 of the batch, {keys} in number {number}",
                hint if path else f"{_columns_of_all(values)}{hint}",
                number,
            )
    paths = {name: f"{path}[{name!r}]" if path else repr(name) for name in first}
    parts = (_mismatch(paths[name], [value[name] for value in values]) for name in first)
    return next((part for part in parts if part is not None), None)


def _columns_of_all(samples: Sequence[Any]) -> str:
    """Return a hint to read only the columns that all samples have; empty if there are none."""
    if not all(isinstance(sample, Mapping) for sample in samples):
        return ""
    common = [name for name in samples[0] if all(name in sample for sample in samples)]
    return f"name those that all have with columns={common}, " if common else ""


def _sequences(path: str, place: str, values: Sequence[Any]) -> _Mismatch | None:
    sizes = [len(value) if isinstance(value, (tuple, list)) else -1 for value in values]
    if len(set(sizes)) > 1:
        shown = ", ".join(map(str, sorted(set(sizes))[:5]))
        return _Mismatch(
            f"{place} is a {type(values[0]).__name__} of different lengths ({shown})",
            f"make them equally long {_IN_TRANSFORM}, or pad them in a collate_fn= of the loader",
        )
    parts = (_mismatch(f"{path}[{number}]", [value[number] for value in values]) for number in range(sizes[0]))
    return next((part for part in parts if part is not None), None)


def _arrays(place: str, values: Sequence[Any]) -> _Mismatch | None:
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) > 1:
        shown = ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")
        return _Mismatch(
            f"{place} is an array of different shapes, not of equal size in all samples: {shown}",
            f"bring them to one shape {_IN_TRANSFORM}, or pad them in a collate_fn= of the loader",
        )
    dtype = values[0].dtype
    if isinstance(values[0], np.ndarray) and (dtype.kind in "OSUMmV" or dtype.char in "gG" or not dtype.isnative):
        hint = f"make numbers of it {_IN_TRANSFORM}, or leave it out"
        if dtype.kind in "iufc":
            largest = 16 if dtype.kind == "c" else 8
            hint = f"convert it to {np.dtype(f'{dtype.kind}{min(dtype.itemsize, largest)}')} {_IN_TRANSFORM}"
        return _Mismatch(f"{place} is an array of dtype {dtype}", hint)
    return None


def is_image(kind: type) -> bool:
    """Return whether a value is an image of Pillow, which may not be installed."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in kind.__mro__)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but its bytes, which it shares with no other."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
