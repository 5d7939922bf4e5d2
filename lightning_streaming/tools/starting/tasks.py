"""What a dataset contains, read without reading all of it, and what could be trained on its columns.

Of a dataset on a store only the index is read, and what the first samples of a few shards need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.tools.console import counted, is_image, printable_name
from lightning_streaming.tools.report.media import image_type
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, add_up, columns_of, open_cached, samples_of

_SAMPLES_PER_SHARD = 8
"""Samples that are read from the first shard, the last, and one between."""
_MAX_SAMPLES, _MAX_BYTES = 100_000, 256 << 20
"""Largest dataset on this machine whose labels or tokens are all read."""
_IMAGE_ENCODINGS = ("jpeg", "png", "pil")
_LABELS = ("label", "labels", "class", "cls", "target", "category", "digit", "y")
_TARGETS = ("target", "label", "y", "value", "score", *_LABELS)
_TOKENS = ("tokens", "input_ids", "token_ids", "ids")
_TEXTS = ("text", "content", "document", "body", "review", "sentence", "prose")
_ORDINALS = ("id", "index", "idx", "key", "number", "row")
_MIN_TOKENS = 16
_MAX_CLASSES, _MAX_TOKENS = 100_000, 1 << 20
"""Larger numbers are neither labels nor tokens: a model would have a row of weights for each."""
_BYTES = 256
_DEFAULT_CLASSES = 4
_PROJECT = "https://github.com/lightning-streaming/lightning-streaming"
_DOCS = f"{_PROJECT}/blob/main/docs"
_LONG_TEXT = 40
"""Mean number of characters from which a text is preferred to numbers."""


class Kind(Enum):
    """The model that is trained on columns."""

    IMAGES = "a classifier of images"
    TOKENS = "a language model of tokens"
    TEXT = "a language model of text"
    NUMBERS = "a linear regression"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPreview:
    """The size, the columns and some samples of a dataset."""

    dataset: StoredDataset
    samples: int
    shards: int
    stored_bytes: int
    columns: Mapping[str, str]
    """Encoding of each column, by name."""
    first_samples: Sequence[Mapping[str, Any]]
    """The decoded samples that were read."""
    index: DatasetIndex

    @property
    def size(self) -> str:
        """The number of samples and shards, as text."""
        return f"{counted(self.samples, 'sample')} in {counted(self.shards, 'shard')}"

    @property
    def is_small(self) -> bool:
        """Whether reading a column of all samples is quick."""
        return self.dataset.directory is not None and self.samples <= _MAX_SAMPLES and self.stored_bytes <= _MAX_BYTES

    def values(self, column: str) -> list[Any]:
        """Return the values of a column that were read."""
        return [_as_array(sample[column]) for sample in self.first_samples if sample.get(column) is not None]

    def all_values(self, column: str) -> Iterator[Any]:
        """Yield the values of a column in all samples of a small dataset, else those that were read."""
        if not self.is_small:
            yield from self.values(column)
            return
        cache = self.dataset.cache()
        for shard in self.index.shards:
            if shard.samples:
                with open_cached(cache, shard, [column]) as reader:
                    yield from (_as_array(reader[sample][column]) for sample in range(shard.samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, on which columns."""

    kind: Kind
    inputs: tuple[str, ...]
    target: str | None = None
    size: int = 0
    """Number of classes, of different tokens, or of inputs."""
    from_array: bool = False
    """Whether images are stored as arrays of pixels."""
    largest: int | None = None
    """The largest label or token that was read."""

    @property
    def columns(self) -> list[str]:
        """All columns that it reads."""
        return list(dict.fromkeys([*self.inputs, *((self.target,) if self.target else ())]))


def preview(dataset: StoredDataset) -> DatasetPreview:
    """Read the index and a few samples of a dataset.

    Raises:
        ConfigError: It has no samples.
        StreamingError: It cannot be read.
    """
    index = dataset.read_index()
    if not index.num_samples:
        raise ConfigError(
            f"{dataset.shown} has no samples, so there is nothing to train on", option="DATASET", path=dataset.shown
        )
    nonempty = [number for number, samples in enumerate(index.samples_per_shard().tolist()) if samples]
    chosen = sorted({nonempty[0], nonempty[len(nonempty) // 2], nonempty[-1]})
    cache = dataset.cache()
    samples: list[Mapping[str, Any]] = []
    for number in chosen:
        shard = index.shards[number]
        unsafe = unsafe_columns(shard)
        names = [column.name for column in columns_of(shard.schema) if column.name not in unsafe]
        count = min(_SAMPLES_PER_SHARD, shard.samples)
        samples += samples_of(dataset, cache, shard, count, names, allow_unsafe_types=False)
    totals = add_up(index)
    return DatasetPreview(
        dataset=dataset,
        samples=index.num_samples,
        shards=totals["shards"],
        stored_bytes=totals["stored_bytes"],
        columns={column.name: column.encoding for column in columns_of(index.shards[chosen[0]].schema)},
        first_samples=samples,
        index=index,
    )


def task_of(previews: Sequence[DatasetPreview]) -> Task:
    """Return what can be trained on all of some datasets.

    Raises:
        ConfigError: No column can be the input of a model; or the common columns are not what each dataset alone would
            be trained on, like the labels of images and of texts.
    """
    common = [name for name in previews[0].columns if all(name in preview.columns for preview in previews)]
    task = _find_task(previews, common)
    single = [_find_task([preview], list(preview.columns)) for preview in previews] if len(previews) > 1 else []
    if single and (task is None or any(other is None or other.kind is not task.kind for other in single)):
        each = "; ".join(
            f"{preview.dataset.shown} ({', '.join(map(printable_name, preview.columns))}) is for "
            f"{'no model that init knows' if other is None else other.kind.value}"
            for preview, other in zip(previews, single, strict=True)
        )
        shared = ", ".join(map(printable_name, common)) or "no column"
        raise ConfigError(
            f"no model of init takes all datasets: {each}. They have {shared} in common. Write a run for each",
            hint="or start from the tutorial, whose transform converts two kinds of samples to the input of one model: "
            f"{_DOCS}/tutorial.md. If samples of two datasets belong together, join their columns: {_DOCS}/joining.md",
            option="DATASET",
        )
    if task is None:
        columns = ", ".join(f"{printable_name(name)} ({encoding})" for name, encoding in previews[0].columns.items())
        shown = previews[0].dataset.shown
        raise ConfigError(
            f"{shown} has no images, text or numbers to write a first model for, but {columns}",
            hint=f"start from a configuration of {_PROJECT}/tree/main/configs",
            option="DATASET",
            path=shown,
        )
    return task


def _find_task(previews: Sequence[DatasetPreview], common: Sequence[str]) -> Task | None:
    """Return what can be trained on columns that all datasets have; None if nothing can."""
    values = {name: [value for preview in previews for value in preview.values(name)] for name in common}
    encodings = {name: [preview.columns[name] for preview in previews] for name in common}
    return (
        _image_task(previews, values, encodings)
        or _token_task(previews, values)
        or _text_task(values, any_text=False)
        or _number_task(values, single_column=False)
        or _text_task(values, any_text=True)
        or _number_task(values, single_column=True)
    )


def _columns_where(values: Mapping[str, list[Any]], is_fitting: Callable[[Any], object]) -> list[str]:
    """Return the columns with values, all of which fit."""
    return [name for name, of_column in values.items() if of_column and all(map(is_fitting, of_column))]


def _image_task(
    previews: Sequence[DatasetPreview], values: Mapping[str, list[Any]], encodings: Mapping[str, Sequence[str]]
) -> Task | None:
    images = [name for name, kinds in encodings.items() if all(kind in _IMAGE_ENCODINGS for kind in kinds)]
    files = _columns_where(
        values, lambda value: is_image(value) or (isinstance(value, bytes) and image_type(value) is not None)
    )
    images += [name for name in files if name not in images]

    def is_pixels(value: Any) -> bool:
        is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8
        return is_bytes and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4)))

    arrays = _columns_where(values, is_pixels)
    if not images and not arrays:
        return None
    # The label is a column of whole numbers: one of a usual name, or the only one that does not count rows.
    whole = _columns_where(values, lambda value: isinstance(value, (int, np.integer)) and 0 <= value < _MAX_CLASSES)
    named = [name for name in _LABELS if name in whole]
    others = [name for name in whole if name.lower() not in _ORDINALS]
    label = named[0] if named else others[0] if len(others) == 1 else None
    largest = None if label is None else _largest(previews, label)
    return Task(
        kind=Kind.IMAGES,
        inputs=((images or arrays)[0],),
        target=label,
        size=_DEFAULT_CLASSES if largest is None else _count_up_to(largest, previews),
        from_array=not images,
        largest=largest,
    )


def _largest(previews: Sequence[DatasetPreview], column: str) -> int:
    """Return the largest number in a column: of all samples of small datasets, else of those that were read."""
    values = (value for preview in previews for value in preview.all_values(column))
    return max((int(np.max(value)) for value in values if value is not None and np.size(value)), default=0)


def _as_array(value: Any) -> Any:
    """Return a tensor of one dimension, as litData stores rows of tokens, as an array; other values unchanged."""
    torch: Any = sys.modules.get("torch")  # imported by the format that returns tensors, and not for init alone
    if torch is not None and isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype != torch.bfloat16:
        return value.numpy()
    return value


def _count_up_to(largest: int, previews: Sequence[DatasetPreview]) -> int:
    """Return the number of classes or tokens; with room for larger ones if not all were read."""
    return largest + 1 if all(preview.is_small for preview in previews) else 1 << largest.bit_length()


def _token_task(previews: Sequence[DatasetPreview], values: Mapping[str, list[Any]]) -> Task | None:
    are_blocks = all(preview.dataset.block_length is not None for preview in previews)

    def is_row(value: Any, min_length: int) -> bool:
        is_integers = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
        return is_integers and value.size >= min_length and int(value.min()) >= 0 and int(value.max()) < _MAX_TOKENS

    fitting = [
        name
        for name, of_column in values.items()
        if of_column and all(is_row(value, 1 if are_blocks or name in _TOKENS else _MIN_TOKENS) for value in of_column)
    ]
    named = [name for name in _TOKENS if name in fitting] or fitting
    if not named:
        return None
    largest = _largest(previews, named[0])
    return Task(kind=Kind.TOKENS, inputs=(named[0],), size=_count_up_to(largest, previews), largest=largest)


def _text_task(values: Mapping[str, list[Any]], *, any_text: bool) -> Task | None:
    """Return a task for a column of prose or, with ``any_text``, for any column that can be written as text."""
    texts = _columns_where(values, lambda value: isinstance(value, str))
    lengths = {name: sum(map(len, values[name])) / len(values[name]) for name in texts}
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    column = next((name for name in _TEXTS if name in lengths), None)
    if column is None and longest is not None and (any_text or lengths[longest] >= _LONG_TEXT):
        column = longest
    if column is None and any_text:
        column = next(iter(_columns_where(values, lambda value: isinstance(value, bytes | dict))), None)
    return None if column is None else Task(kind=Kind.TEXT, inputs=(column,), size=_BYTES)


def _number_task(values: Mapping[str, list[Any]], *, single_column: bool) -> Task | None:
    """Return a task that predicts a column of numbers from others or, with ``single_column``, from itself."""
    shapes = {name: {_shape(value) for value in of_column} for name, of_column in values.items() if of_column}
    fitting = {name: next(iter(shape)) for name, shape in shapes.items() if len(shape) == 1 and None not in shape}
    scalars = [name for name, shape in fitting.items() if shape == ()]
    if not scalars:
        return None
    named = [name for name in _TARGETS if name in scalars]
    unnumbered = [name for name in scalars if name.lower() not in _ORDINALS]
    target = named[0] if named else (unnumbered or scalars)[-1]
    inputs = tuple(name for name in fitting if name != target and name.lower() not in _ORDINALS)
    if not inputs and not single_column:
        return None
    inputs = inputs or (target,)
    size = sum(int(np.prod(fitting[name] or (1,))) for name in inputs)
    return Task(kind=Kind.NUMBERS, inputs=inputs, target=target, size=size)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a number or an array of numbers; None for other values."""
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return ()
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return value.shape if is_numbers else None
