"""Samples made a batch, and what to say where that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""

_IN_TRANSFORM = "in transform= (or in the dataset's __getitem__)"


class CollateError(Exception):
    """Samples that could not be made a batch; for who knows which ones they are.

    Args:
        told: What is wrong.
        places: Those samples of the batch that are to be named.
    """

    def __init__(self, told: str, places: Sequence[int]) -> None:
        super().__init__(told)
        self.places = places


class _Trouble(NamedTuple):
    where: str
    """What is wrong, of the samples' values that stand in one place."""
    way_out: str
    odd: int | None = None
    """The first sample of the batch that is not like those before it, if that is what is wrong."""


def collated(collate: Collate, samples: list[Any]) -> Any:
    """The batch of some samples.

    Raises:
        CollateError: The collate function failed; its cause is that error, unless it is torch's own function, of whose
            error the message says what to do about it.
    """
    try:
        return collate(samples)
    except Exception as error:
        if collate is default_collate:
            raise _explained(samples, error) from None
        told = f"collate_fn failed on a batch: {type(error).__name__}: {error}"
        raise CollateError(told, range(len(samples))) from error


def _explained(samples: list[Any], error: Exception) -> CollateError:
    found = _trouble("", samples)
    if found is None:
        told = f"torch's default collate makes no batch of these samples: {type(error).__name__}: {error}"
        return CollateError(told, range(len(samples)))
    told = f"{found.where}, of which torch's default collate makes no batch; {found.way_out}"
    return CollateError(told, [] if found.odd is None else [found.odd])


def _trouble(path: str, values: Sequence[Any]) -> _Trouble | None:
    """What keeps values from being collated: the first of their parts that does not go with torch.

    Args:
        path: Where in the samples they stand; empty for the samples themselves.
        values: One of each sample.
    """
    place, first = f"column {path}" if path else "each sample", values[0]
    if any(value is None for value in values):
        return _missing(place, values)
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
    return _Trouble(f"{place} is {_kind_in_words(type(first))}", _way_out_of(type(first)))


def _missing(place: str, values: Sequence[Any]) -> _Trouble:
    nones = [number for number, value in enumerate(values) if value is None]
    way_out = f"put a value there {_IN_TRANSFORM}, or pass the loader a collate_fn="
    if len(nones) == len(values):
        return _Trouble(f"{place} is None", way_out)
    return _Trouble(f"{place} is None in {len(nones)} of {len(values)} samples", way_out, nones[0])


def _of_other_kinds(place: str, values: Sequence[Any], kind: type) -> _Trouble | None:
    """Samples that are of another type than the first."""
    for number, value in enumerate(values):
        if not isinstance(value, kind):
            names = f"{type(values[0]).__name__} and {type(value).__name__}"
            return _Trouble(f"{place} is of different types, {names}", f"make them one {_IN_TRANSFORM}", number)
    return None


def _mappings(path: str, place: str, values: Sequence[Any]) -> _Trouble | None:
    first = values[0]
    for number, value in enumerate(values):
        keys = list(value) if isinstance(value, Mapping) else type(value).__name__
        if not isinstance(value, Mapping) or value.keys() != first.keys():
            return _Trouble(
                f"{place} has different columns: {list(first)} in number 0 of the batch, {keys} in number {number}",
                f"give all samples the same {_IN_TRANSFORM}, or pass the loader a collate_fn=",
                number,
            )
    parts = (_trouble(f"{path}[{name!r}]" if path else repr(name), [one[name] for one in values]) for name in first)
    return next((part for part in parts if part is not None), None)


def _sequences(path: str, place: str, values: Sequence[Any]) -> _Trouble | None:
    sizes = [len(value) if isinstance(value, (tuple, list)) else -1 for value in values]
    if len(set(sizes)) > 1:
        shown = ", ".join(map(str, sorted(set(sizes))[:5]))
        return _Trouble(
            f"{place} is a {type(values[0]).__name__} of different lengths ({shown})",
            f"make them equally long {_IN_TRANSFORM}, or pad them in a collate_fn= of the loader",
        )
    parts = (_trouble(f"{path}[{number}]", [one[number] for one in values]) for number in range(sizes[0]))
    return next((part for part in parts if part is not None), None)


def _arrays(place: str, values: Sequence[Any]) -> _Trouble | None:
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) > 1:
        shown = ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")
        return _Trouble(
            f"{place} is an array of different shapes, not of equal size in all samples: {shown}",
            f"bring them to one shape {_IN_TRANSFORM}, or pad them in a collate_fn= of the loader",
        )
    if isinstance(values[0], np.ndarray) and values[0].dtype.kind in "OSUMm":
        return _Trouble(
            f"{place} is an array of dtype {values[0].dtype}", f"make numbers of it {_IN_TRANSFORM}, or leave it out"
        )
    return None


def _kind_in_words(kind: type) -> str:
    if _is_image(kind):
        return f"a PIL image ({kind.__name__})"
    return f"an object of type {kind.__module__}.{kind.__qualname__}"


def _way_out_of(kind: type) -> str:
    if _is_image(kind):
        return (
            f"make an array of it {_IN_TRANSFORM}, as numpy.array(image) or torchvision's ToTensor do, of one size for "
            "all images; or pass the loader a collate_fn="
        )
    return f"make a tensor, array, number or text of it {_IN_TRANSFORM}, or pass the loader a collate_fn="


def _is_image(kind: type) -> bool:
    """Whether these are Pillow's, which need not be installed."""
    return any(one.__module__ == "PIL.Image" and one.__name__ == "Image" for one in kind.__mro__)
