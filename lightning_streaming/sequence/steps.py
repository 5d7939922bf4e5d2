"""Steps of the user: change what an epoch reads between its shuffle and its batches.

A :class:`SequenceStep` is configuration, the same for the whole run. Its method ``over`` makes a
:class:`~lightning_streaming.sequence.SampleSequence` of each part of an epoch: the whole epoch, a mixture step of a
schedule, or, where batches are composed by stream, each stream of one of these. Canonical nodes, ranks, batches
and saved positions then count its entries.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError, StreamingError
from lightning_streaming.sequence.base import SampleSequence, check_entries, digest_of
from lightning_streaming.sequence.draw import EpochPart
from lightning_streaming.signatures import public


@public("sequence")
@dataclass(frozen=True, kw_only=True, slots=True)
class PartContext:
    """The part of an epoch that a step is applied to.

    Args:
        epoch: Counts from 0.
        seed: ``shuffle_seed`` of the run.
        part: Mixture step of a schedule, from 0; 0 without a schedule.
        stream: Stream, in stream order from 0, where batches are composed by stream; else None.
    """

    epoch: int
    seed: int
    part: int = 0
    stream: int | None = None

    def generator(self, *more: int) -> np.random.Generator:
        """Return a generator of random numbers that is the same for this part in every process and run.

        Args:
            *more: Numbers, none negative, that distinguish several uses.
        """
        stream = 0 if self.stream is None else self.stream + 1
        return np.random.default_rng((self.seed, self.epoch, self.part, stream, *more))


@public("sequence")
class SequenceStep(ABC):
    """A step that changes which samples an epoch reads, or in which order.

    Subclasses are frozen dataclasses, as a rule: their fields are compared when a run resumes, so a position is refused
    if the class, its ``version`` or a field has changed. Change ``version`` when the same fields mean another result.
    They are pickled for workers that are spawned.

    An entry is a place in the order of the part: canonical nodes follow each other there, which are read in turn.

    For example every second sample of that order:

        @dataclass(frozen=True)
        class EverySecond(SequenceStep):
            def over(self, parent, context):
                return _EverySecond(parent)

        class _EverySecond(SampleSequence):
            def __init__(self, parent):
                self.parent = parent

            def __len__(self):
                return len(self.parent) // 2

            def ids(self, entries):
                return self.parent.ids(2 * entries)
    """

    version: ClassVar[int] = 1

    @abstractmethod
    def over(self, parent: SampleSequence, context: PartContext) -> SampleSequence:
        """Return the sequence that this step makes of a part of an epoch.

        Return an object of a subclass of :class:`SampleSequence` with two methods, ``__len__`` and ``ids``. Only its
        ``ids`` may call ``parent.ids``; its length follows from ``len(parent)``, the context and the fields. If the
        step changes the length, the result is shortened to a multiple of ``num_canonical_nodes``. Saved positions count
        the samples after the step.
        """

    def arguments(self) -> dict[str, Any]:
        """Return what the result depends on in addition to the class: by default the fields, or all attributes.

        They are also the arguments from which a configuration that was written out creates the step again.

        Values must be plain: texts, numbers, booleans, None, and lists and mappings of these.
        """
        if is_dataclass(self):
            return {item.name: getattr(self, item.name) for item in fields(self)}
        return dict(vars(self))

    @property
    def facts(self) -> dict[str, Any]:
        """The class, its version and its arguments, as a saved position holds them.

        Raises:
            ConfigError: An argument is not plain.
        """
        name = f"{_module_of(type(self))}.{type(self).__qualname__}"
        try:
            arguments = json.loads(json.dumps(self.arguments(), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"sequence: the arguments of {name} cannot be saved with a position: {error}",
                hint="use texts, numbers, booleans and lists of these, or return such values from arguments()",
                option="sequence",
            ) from error
        return {"class": name, "version": self.version, "arguments": arguments}


def check_steps(steps: object) -> tuple[SequenceStep, ...]:
    """Return the steps as a tuple.

    Raises:
        ConfigError: They are no list of steps, or the arguments of one are not plain.
    """
    if steps is None:
        return ()
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes):
        raise ConfigError(
            f"sequence must be a list of SequenceStep, but is a {type(steps).__name__}", option="sequence"
        )
    checked = list[SequenceStep]()
    for item in steps:
        step = _of_mapping(item) if isinstance(item, Mapping) else item
        if isinstance(step, type) and issubclass(step, SequenceStep):
            raise ConfigError(
                f"sequence must hold objects of SequenceStep, but one is the class {step.__name__}",
                hint=f"pass an object, like {step.__name__}()",
                option="sequence",
            )
        if not isinstance(step, SequenceStep):
            raise ConfigError(
                f"sequence must hold objects of SequenceStep, but one is a {type(step).__name__}",
                hint="derive its class from lightning_streaming.sequence.SequenceStep",
                option="sequence",
            )
        _ = step.facts
        checked.append(step)
    return tuple(checked)


def _of_mapping(step: Mapping[str, Any]) -> object:
    """Return the step that a mapping describes, which a checkpoint holds instead of the object.

    Nothing is imported: a checkpoint may come from anywhere.
    """
    module, _, name = str(step.get("class_path")).rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or not issubclass(kind, SequenceStep):
        raise ConfigError(
            f"sequence: class_path {step.get('class_path')!r} is no SequenceStep of a module that is imported",
            hint="import its module first, or pass the object",
            option="sequence",
        )
    return kind(**(step.get("init_args") or {}))


def _module_of(kind: type) -> str:
    """Return the module of a class by the name that imports it, also if it is the program that was started."""
    name = kind.__module__
    if name not in ("__main__", "__mp_main__"):
        return name
    scope = vars(sys.modules[name])
    if scope.get(kind.__qualname__) is not kind:  # a profiler, for example, runs the program apart from that module
        scope = next((value.__globals__ for value in vars(kind).values() if isfunction(value)), {})
    spec, file = scope.get("__spec__"), scope.get("__file__")
    if spec is not None and spec.name != "__main__":
        return str(spec.name)
    return name if file is None else Path(file).stem


class _Section(SampleSequence):
    """The entries ``[start, start + length)`` of another sequence."""

    def __init__(self, parent: SampleSequence, start: int, length: int) -> None:
        self._parent, self._start, self._length = parent, start, length

    def __len__(self) -> int:
        return self._length

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        check_entries(entries, self._length, "entries")
        return self._parent.ids(entries + self._start)


class Stepped(EpochPart):
    """A part of an epoch after the user's steps.

    Args:
        drawn: The part, shuffled.
        steps: One after another.

    Raises:
        ConfigError: A step returns no sequence, or leaves no sample.
    """

    def __init__(self, drawn: EpochPart, steps: Sequence[SequenceStep]) -> None:
        self.settings, self.epoch, self.turn, self.is_on_demand = (
            drawn.settings,
            drawn.epoch,
            drawn.turn,
            drawn.is_on_demand,
        )
        self._drawn = drawn
        self._facts = [step.facts for step in steps]
        by_stream = drawn.settings.batching_method != "random"
        lengths = drawn.choose if by_stream else (len(drawn),)
        self._sections, kept, start = list[SampleSequence](), list[int](), 0
        for stream, length in enumerate(lengths):
            context = PartContext(
                epoch=drawn.epoch,
                seed=drawn.settings.shuffle_seed,
                part=drawn.step,
                stream=stream if by_stream else None,
            )
            section: SampleSequence = _Section(drawn, start, length)
            start += length
            for step in steps if length else ():
                section = _applied(step, section, context)
            self._sections.append(section)
            shortened = len(section) - len(section) % drawn.settings.num_canonical_nodes
            kept.append(length if len(section) == length else shortened)
            if length and not kept[-1]:
                raise ConfigError(
                    f"sequence: {', '.join(facts['class'] for facts in self._facts)} leaves {len(section)} of {length} "
                    f"samples of epoch {drawn.epoch}, fewer than its {drawn.settings.num_canonical_nodes} canonical "
                    "nodes",
                    hint="keep more samples, or set num_canonical_nodes lower",
                    option="sequence",
                )
        self._stops = np.cumsum(kept)
        self.choose = tuple(kept)
        self.proportion = drawn.proportion
        self.step = drawn.step

    def __len__(self) -> int:
        return int(self._stops[-1])

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sample ids of entries, of any shape.

        Raises:
            SampleIndexError: An entry lies outside the part, or a step returns ids of another shape or below 0.
        """
        check_entries(entries, len(self), "entries")
        if len(self._sections) == 1:
            return self._checked(self._sections[0].ids(entries), entries)
        numbers = np.searchsorted(self._stops, entries, side="right")
        ids = np.empty_like(entries)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            first = int(self._stops[number - 1]) if number else 0
            ids[here] = self._checked(self._sections[number].ids(entries[here] - first), entries[here])
        return ids

    @property
    def digest(self) -> str:
        """A digest of the drawn part and of the steps' classes, versions and arguments."""
        return digest_of("steps", self._drawn.digest, self._facts)

    def name_of(self, stream: int) -> str | None:
        """Return the name of a stream, where it is known."""
        return self._drawn.name_of(stream)

    def stream_label(self, stream: int) -> str:
        """Return a stream as errors name it."""
        return self._drawn.stream_label(stream)

    def _checked(self, ids: object, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        is_array = isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.shape == entries.shape
        if not isinstance(ids, np.ndarray) or not is_array or (ids.size and ids.min() < 0):
            shown = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise SampleIndexError(
                f"sequence: {self._facts[-1]['class']} must return the ids of its parent as int64 of shape "
                f"{entries.shape}, but returned {shown}"
            )
        return ids.astype(np.int64, copy=False)


def _applied(step: SequenceStep, parent: SampleSequence, context: PartContext) -> SampleSequence:
    try:
        sequence = step.over(parent, context)
    except StreamingError:
        raise
    except Exception as error:
        raise ConfigError(
            f"sequence: {type(step).__name__}.over failed: {type(error).__name__}: {error}",
            hint="its parent has a length, and ids(entries) for an array of entries; it cannot be indexed or sliced",
            option="sequence",
        ) from error
    if not isinstance(sequence, SampleSequence):
        raise ConfigError(
            f"sequence: {type(step).__name__}.over must return a SampleSequence, but returned a "
            f"{type(sequence).__name__}",
            option="sequence",
        )
    return sequence


def with_steps(drawn: EpochPart, steps: Sequence[SequenceStep]) -> EpochPart:
    """Return a part of an epoch after the user's steps, if there are any."""
    return Stepped(drawn, steps) if steps else drawn
