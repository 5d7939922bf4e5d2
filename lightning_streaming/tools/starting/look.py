"""A look at a dataset: how large it is, what its columns hold, and what could be trained on them.

Of a dataset on a store only the index is read, and what the first samples of a few shards need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.tools.console import counted, is_image, printable_name
from lightning_streaming.tools.report.media import image_type
from lightning_streaming.tools.stored.held_shards import opened, samples_of
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, add_up, columns_of

_SHARDS, _SAMPLES = 3, 8
"""How much is looked at: the first samples of the first shard, of the last one, and of one between."""
_MOST_SAMPLES, _MOST_BYTES = 100_000, 256 << 20
"""Of a dataset on this machine that is no larger all labels, or tokens, are looked at."""
_PICTURES = ("jpeg", "png", "pil")
_LABELS = ("label", "labels", "class", "cls", "target", "category", "digit", "y")
_TARGETS = ("target", "label", "y", "value", "score", *_LABELS)
_TOKENS = ("tokens", "input_ids", "token_ids", "ids")
_TEXTS = ("text", "content", "document", "body", "review", "sentence", "prose")
_ORDINALS = ("id", "index", "idx", "key", "number", "row")
_LEAST_TOKENS = 16
_MOST_CLASSES, _MOST_TOKENS = 100_000, 1 << 20
"""Above these, numbers are no labels, and no tokens: a model would have a row of weights for each."""
_PROJECT = "https://github.com/lightning-streaming/lightning-streaming"
_DOCS = f"{_PROJECT}/blob/main/docs"
_LONG_TEXT = 40
"""Characters, on average, from which a text counts as prose beside numbers."""


class Kind(Enum):
    """What is trained on columns."""

    PICTURES = "a classifier of pictures"
    TOKENS = "a language model of tokens"
    TEXT = "a language model of text"
    NUMBERS = "a linear regression"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is known of a dataset without reading all of it."""

    place: StoredDataset
    samples: int
    shards: int
    stored_bytes: int
    columns: Mapping[str, str]
    """Encoding by name of the column."""
    seen: Sequence[Mapping[str, Any]]
    """The samples that were looked at, decoded."""
    index: DatasetIndex

    def values(self, column: str) -> list[Any]:
        """What was seen of a column."""
        return [_as_row(sample[column]) for sample in self.seen if sample.get(column) is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, on which columns."""

    kind: Kind
    inputs: tuple[str, ...]
    target: str | None = None
    size: int = 0
    """Classes that are told apart, numbers that tokens may be, or numbers that are put in."""
    from_array: bool = False
    """Of pictures: whether they are stored as arrays of pixels."""
    largest: int | None = None
    """The largest label, or token, that was seen."""

    @property
    def columns(self) -> list[str]:
        """All that it reads."""
        return list(dict.fromkeys([*self.inputs, *((self.target,) if self.target else ())]))


def look_at(place: StoredDataset) -> Look:
    """Look at a dataset.

    Raises:
        ConfigError: It has no samples.
        StreamingError: It cannot be read.
    """
    index = place.read_index()
    if not index.num_samples:
        raise ConfigError(
            f"{place.shown} has no samples, so there is nothing to train on", option="DATASET", path=place.shown
        )
    filled = [number for number, samples in enumerate(index.samples_per_shard().tolist()) if samples]
    chosen = sorted({filled[0], filled[len(filled) // 2], filled[-1]})[:_SHARDS]
    cache = place.cache()
    seen: list[Mapping[str, Any]] = []
    for number in chosen:
        shard = index.shards[number]
        names = [one.name for one in columns_of(shard.schema) if one.name not in unsafe_columns(shard)]
        wanted = min(_SAMPLES, shard.samples)
        seen += samples_of(place, cache, shard, wanted, names, allow_unsafe_types=False)
    columns = {one.name: one.encoding for one in columns_of(index.shards[chosen[0]].schema)}
    sizes = add_up(index)
    return Look(
        place=place, samples=index.num_samples, shards=sizes["shards"], stored_bytes=sizes["stored_bytes"],
        columns=columns, seen=seen, index=index,
    )  # fmt: skip


def task_of(looks: Sequence[Look]) -> Task:
    """What can be trained on all of some datasets.

    Raises:
        ConfigError: There is nothing that could be put into a model; or what they have in common is not what each of
            them would be trained for alone, like the labels of pictures and of texts.
    """
    common = [name for name in looks[0].columns if all(name in look.columns for look in looks)]
    task = _task_by(looks, common)
    if len(looks) > 1:
        alone = [_task_by([look], list(look.columns)) for look in looks]
        if task is None or any(one is None or one.kind is not task.kind for one in alone):
            _refuse_mixture(looks, common, alone)
    if task is None:
        found = ", ".join(f"{printable_name(name)} ({encoding})" for name, encoding in looks[0].columns.items())
        raise ConfigError(
            f"{looks[0].place.shown} has no pictures, text or numbers to write a first model for, but {found}",
            hint=f"start from a configuration of {_PROJECT}/tree/main/configs",
            option="DATASET",
            path=looks[0].place.shown,
        )
    return task


def _task_by(looks: Sequence[Look], common: Sequence[str]) -> Task | None:
    """What can be trained on these columns of all; None if nothing can."""
    values = {name: [value for look in looks for value in look.values(name)] for name in common}
    encodings = {name: [look.columns[name] for look in looks] for name in common}
    return (
        _of_pictures(looks, values, encodings)
        or _of_tokens(looks, values)
        or _of_text(values, always=False)
        or _of_numbers(values, alone=False)
        or _of_text(values, always=True)
        or _of_numbers(values, alone=True)
    )


def _refuse_mixture(looks: Sequence[Look], common: Sequence[str], alone: Sequence[Task | None]) -> NoReturn:
    each = "; ".join(
        f"{look.place.shown} ({', '.join(map(printable_name, look.columns))}) is for "
        f"{'no model that init knows' if task is None else task.kind.value}"
        for look, task in zip(looks, alone, strict=True)
    )
    shared = ", ".join(map(printable_name, common)) or "no column"
    raise ConfigError(
        f"no model of init takes all of them: {each}. They have {shared} in common. Write a run for each",
        hint="or start from the tutorial, whose transform makes of two kinds of samples what one model takes: "
        f"{_DOCS}/tutorial.md. Where the samples of one belong to those of the other, join their columns: "
        f"{_DOCS}/mixtures.md",
        option="DATASET",
    )


def _of_pictures(
    looks: Sequence[Look], values: Mapping[str, list[Any]], encodings: Mapping[str, Sequence[str]]
) -> Task | None:
    stored = [name for name, kinds in encodings.items() if all(kind in _PICTURES for kind in kinds)]
    stored += [name for name, found in values.items() if found and all(map(_is_picture, found)) and name not in stored]
    arrays = [name for name, found in values.items() if found and all(map(_is_pixels, found))]
    if not stored and not arrays:
        return None
    label = _label(values)
    largest = None if label is None else _largest(looks, label)
    size = 4 if largest is None else _above(largest, looks)
    column = (stored or arrays)[0]
    return Task(
        kind=Kind.PICTURES, inputs=(column,), target=label, size=size, from_array=not stored, largest=largest
    )  # fmt: skip


def _is_picture(value: Any) -> bool:
    return is_image(value) or (isinstance(value, bytes) and image_type(value) is not None)


def _is_pixels(value: Any) -> bool:
    is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8
    return is_bytes and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4)))


def _label(values: Mapping[str, list[Any]]) -> str | None:
    """The column of whole numbers from 0 that tells classes, by its name; or the only one that is no number of rows."""
    whole = [
        name
        for name, found in values.items()
        if found and all(isinstance(one, (int, np.integer)) and 0 <= one < _MOST_CLASSES for one in found)
    ]
    named = [name for name in _LABELS if name in whole]
    others = [name for name in whole if name.lower() not in _ORDINALS]
    return named[0] if named else others[0] if len(others) == 1 else None


def _may_be_read(look: Look) -> bool:
    """Whether a look at a column of all samples takes a moment only."""
    is_small = look.samples <= _MOST_SAMPLES and look.stored_bytes <= _MOST_BYTES
    return look.place.directory is not None and is_small


def _largest(looks: Sequence[Look], column: str) -> int:
    """The largest number in a column: of all samples where that takes no time, else of those that were looked at."""
    found = (
        value for look in looks for value in (_all_of(look, column) if _may_be_read(look) else look.values(column))
    )
    return max((int(np.max(value)) for value in found if value is not None and np.size(value)), default=0)


def _all_of(look: Look, column: str) -> Iterator[Any]:
    cache = look.place.cache()
    for shard in look.index.shards:
        if shard.samples:
            with opened(cache, shard, [column]) as reader:
                yield from (_as_row(reader[sample][column]) for sample in range(shard.samples))


def _as_row(value: Any) -> Any:
    """Return a tensor of one dimension, as litData gives rows of tokens, as an array; other values as they are."""
    torch: Any = sys.modules.get("torch")  # imported by whoever makes a tensor, and not for init alone
    if torch is not None and isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype != torch.bfloat16:
        return value.numpy()
    return value


def _above(largest: int, looks: Sequence[Look]) -> int:
    """How many classes, or tokens, there are; where not all were seen, with room for more."""
    return largest + 1 if all(map(_may_be_read, looks)) else 1 << largest.bit_length()


def _of_tokens(looks: Sequence[Look], values: Mapping[str, list[Any]]) -> Task | None:
    are_blocks = all(look.place.block_length is not None for look in looks)
    found = [
        name
        for name, seen in values.items()
        if seen and all(_is_tokens(one, are_blocks or name in _TOKENS) for one in seen)
    ]
    named = [name for name in _TOKENS if name in found] or found
    if not named:
        return None
    largest = _largest(looks, named[0])
    return Task(kind=Kind.TOKENS, inputs=(named[0],), size=_above(largest, looks), largest=largest)


def _is_tokens(value: Any, is_named_so: bool) -> bool:
    is_row = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
    is_long = is_row and value.size >= (1 if is_named_so else _LEAST_TOKENS)
    return is_long and int(value.min()) >= 0 and int(value.max()) < _MOST_TOKENS


def _of_text(values: Mapping[str, list[Any]], *, always: bool) -> Task | None:
    """A column of prose; or always, any that can be written as text."""
    lengths = {
        name: sum(map(len, found)) / len(found)
        for name, found in values.items()
        if found and all(isinstance(one, str) for one in found)
    }
    named = [name for name in _TEXTS if name in lengths]
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    if named:
        return Task(kind=Kind.TEXT, inputs=(named[0],), size=256)
    if longest is not None and (always or lengths[longest] >= _LONG_TEXT):
        return Task(kind=Kind.TEXT, inputs=(longest,), size=256)
    others = [name for name, found in values.items() if found and all(isinstance(one, bytes | dict) for one in found)]
    return Task(kind=Kind.TEXT, inputs=(others[0],), size=256) if always and others else None


def _of_numbers(values: Mapping[str, list[Any]], *, alone: bool) -> Task | None:
    """Columns of numbers, one of which is to be told from the others; or alone, where there is one, from itself."""
    shapes = {name: {_shape(one) for one in found} for name, found in values.items() if found}
    fitting = {name: next(iter(shape)) for name, shape in shapes.items() if len(shape) == 1 and None not in shape}
    single = [name for name, shape in fitting.items() if shape == ()]
    if not fitting or not single:
        return None
    named = [name for name in _TARGETS if name in single]
    unnumbered = [name for name in single if name.lower() not in _ORDINALS]
    target = (named or unnumbered or single)[0 if named else -1]
    inputs = tuple(name for name in fitting if name != target and name.lower() not in _ORDINALS)
    if not inputs and not alone:
        return None
    inputs = inputs or (target,)
    size = sum(int(np.prod(fitting[name] or (1,))) for name in inputs)
    return Task(kind=Kind.NUMBERS, inputs=inputs, target=target, size=size)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Of a number or an array of them; None for what is no number."""
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return ()
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return value.shape if is_numbers else None


def told_size(look: Look) -> str:
    """How large a dataset is, for people."""
    return f"{counted(look.samples, 'sample')} in {counted(look.shards, 'shard')}"
