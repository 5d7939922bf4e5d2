"""The saved position: a small dict of plain values, the same on every rank; read from untrusted input as a whole.

    {"version": 1, "epoch": 3, "sample_in_epoch": 51200, "shuffle_seed": 9176, "num_canonical_nodes": 2,
     "initial_physical_nodes": 2, "fingerprint": {...}}

Within an epoch whose batches are composed, "batch_geometry" also says for which nodes, ranks and batch size. Where
batches are skipped, "skipped" says which samples these are, as {"12000-12100": [epoch, sample, epoch, sample]}: from
the first position up to the second. "streams" helps to say what has changed of many streams; nothing depends on it. All
loads with ``torch.load(..., weights_only=True)``. The four or five keys that MosaicML Streaming writes are accepted
too; such a state carries no fingerprint, so it cannot be checked against the data.

The callback saves the trainer's own numbers around the states of all train loaders. Before the first batch "trainer" is
None and "loaders" is empty:

    {"version": 1,
     "trainer": {"epoch": 3, "batches": 100, "batches_in_epoch": 400},
     "loaders": {"train": {...}},
     "samples_per_global_batch": {"train": 512}}

Where a validation is due before the next batch, or one has run after batches that are trained again, "validation" says
so: {"is_due": True, "done_after": 0}.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Mapping as AnyMapping
from dataclasses import asdict, dataclass, field
from reprlib import Repr
from typing import Any, NamedTuple

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.fingerprint import StreamList, is_listed, read_fingerprint, read_stream_list
from lightning_streaming.loading.growth import NO_GROWTH, Growth
from lightning_streaming.order.partition import LARGEST_BATCH, BatchGeometry
from lightning_streaming.order.settings import LARGEST_SEED, MOST_CANONICAL_NODES
from lightning_streaming.order.skips import NOTHING_SKIPPED, SkippedPositions, SkippedRange, parse_batch_ranges
from lightning_streaming.world import World

LARGEST = 2**62 - 1
"""The largest number that processes can tell each other, and that has room for what is added to it."""
MOST_EPOCHS = 2**31 - 1
"""Far more than a run can have; beyond, a number was not written by one."""
_MOST_NODES = 2**20
"""Far more nodes than there are machines in one place."""
_STATE_VERSION = 1
CALLBACK_KEY = "lightning_streaming.StreamingStateCallback"
"""Under which key of "callbacks" a Lightning checkpoint holds the state of a run."""
RUN_VERSION = 1
_WAY_OUT = "the state was edited or damaged; go on from another checkpoint, or write it anew"
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class Cursor(NamedTuple):
    """A place in the data: everything before it has been read, everything from it on has not."""

    epoch: int
    """Passes over the data before this one."""
    sample_in_epoch: int
    """Position in the epoch's global sequence, over all ranks; replicated ranks count once."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, sample {self.sample_in_epoch}"

    def passes_later(self, passes: int) -> Cursor:
        """Where the pass begins that comes ``passes`` after the one that begins here."""
        return self if passes == 0 else Cursor(self.epoch + passes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStart:
    """All that a process must be told to read its share of one pass."""

    cursor: Cursor
    world: World
    """The world in which samples are divided: ranks that read the same samples count as one."""
    batch_size: int
    """Samples per batch on each rank."""
    geometry: BatchGeometry
    """What the epoch's batches were made for; not this world, where it changed in the middle of the epoch."""
    shuffle_seed: int
    num_canonical_nodes: int
    shuffle_block_size: int
    skipped: SkippedPositions = NOTHING_SKIPPED
    """What the pass leaves out of its epoch."""
    growth: Growth = NO_GROWTH
    """How much epochs read of streams that have grown."""


class Fields:
    """A dict of a saved state whose values are looked at one by one.

    Args:
        value: What was found where the dict is to be.
        of: What messages call it, like "a saved position".

    Raises:
        StateError: It is no dict.
    """

    def __init__(self, value: object, of: str) -> None:
        if not isinstance(value, AnyMapping):
            raise StateError(f"{of} is a dict, but got {type(value).__name__}; {_WAY_OUT}")
        self.of = of
        self._values: AnyMapping[Any, Any] = value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        """Its keys.

        Raises:
            StateError: One is no text.
        """
        for key in self._values:
            if not isinstance(key, str):
                raise StateError(f"the keys of {self.of} are texts, but one is {shown(key)}; {_WAY_OUT}")
            yield key

    def get(self, key: str) -> Any:
        """The value as it is.

        Raises:
            StateError: There is none.
        """
        if key not in self._values:
            keys = ", ".join(map(shown, list(self._values)[:12])) or "nothing"
            raise StateError(f"{self.of} needs {key!r}, but this one only has {keys}; {_WAY_OUT}")
        return self._values[key]

    def is_none(self, key: str) -> bool:
        """Whether the value is there and None."""
        return self.get(key) is None

    def whole_number(self, key: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number in ``[least, most]``."""
        value = self.get(key)
        if not _is_whole(value) or not least <= value <= most:
            raise self.wrong(key, f"a whole number in [{least}, {most}]")
        return int(value)

    def whole_numbers(self, key: str, count: int) -> tuple[int, ...]:
        """A list of so many whole numbers, none negative."""
        value = self.get(key)
        if (
            not isinstance(value, list | tuple)
            or len(value) != count
            or not all(_is_whole(one) and 0 <= one <= LARGEST for one in value)
        ):
            raise self.wrong(key, f"a list of {count} whole numbers in [0, {LARGEST}]")
        return tuple(value)

    def pairs(self, key: str) -> list[tuple[int, int]]:
        """A list of pairs of whole numbers, none negative."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(_is_whole(one) and 0 <= one <= LARGEST for one in pair)
            for pair in value
        ):
            raise self.wrong(key, f"a list of pairs of whole numbers in [0, {LARGEST}]")
        return [(first, second) for first, second in value]

    def text(self, key: str) -> str:
        """A text."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def one_of(self, key: str, choices: Collection[object]) -> Any:
        """One of a few plain values."""
        value = self.get(key)
        if not any(value is one or (type(value) is type(one) and value == one) for one in choices):
            raise self.wrong(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def fields(self, key: str, of: str | None = None) -> Fields:
        """A dict within it.

        Args:
            key: Its key.
            of: What messages call it; None for its key and what it lies in.
        """
        return Fields(self.get(key), f"{key!r} of {self.of}" if of is None else of)

    def wrong(self, key: str, wanted: str) -> StateError:
        """What to raise where a value is not what it has to be."""
        return StateError(f"{key!r} of {self.of} must be {wanted}, but is {shown(self._values[key])}; {_WAY_OUT}")

    def contradicts(self, words: str) -> StateError:
        """What to raise where two values cannot both be right."""
        return StateError(f"{self.of} contradicts itself: {words}; {_WAY_OUT}")


def shown(value: object) -> str:
    """A value as a message shows it: short, however large it is."""
    return _SHORT.repr(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPosition:
    """A state that has been read and found sound."""

    cursor: Cursor
    shuffle_seed: int
    num_canonical_nodes: int
    initial_physical_nodes: int | None
    geometry: BatchGeometry | None
    """What the batches of the epoch are made for, where they are composed."""
    fingerprint: Mapping[str, Any] | None
    skipped: Mapping[str, SkippedRange] = field(default_factory=dict)
    """Where the samples of skipped ranges of batches are, by how the range is written."""
    streams: StreamList | None = None
    """What helps to say which stream has changed, where the fingerprint alone would not."""

    def as_state(self) -> dict[str, Any]:
        """The dict that :func:`read_state` turns back into this value."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.cursor.epoch,
            "sample_in_epoch": self.cursor.sample_in_epoch,
            "shuffle_seed": self.shuffle_seed,
            "num_canonical_nodes": self.num_canonical_nodes,
            "initial_physical_nodes": self.initial_physical_nodes,
            **({} if self.geometry is None else {"batch_geometry": asdict(self.geometry)}),
            **(
                {"skipped": {name: [*start, *stop] for name, (start, stop) in self.skipped.items()}}
                if self.skipped
                else {}
            ),
            "fingerprint": self.fingerprint,
            **({} if self.streams is None else {"streams": self.streams.as_state()}),
        }


def read_state(state: object, of: str = "a saved position") -> SavedPosition:
    """Read a saved state, ours or one of MosaicML Streaming; all of it, so that whoever loads it can do so whole.

    Args:
        state: What was saved.
        of: What messages call it.

    Raises:
        StateError: It is not a state, lacks a key, was written by a version that is not known here, or one of its
            values cannot be; the message names the field.
    """
    fields = Fields(state, of)
    is_ours = "version" in fields
    if is_ours:
        _check_version(fields, _STATE_VERSION)
    # MosaicML Streaming calls the time before the first epoch "epoch -1".
    epoch = fields.whole_number("epoch", least=0 if is_ours else -1, most=MOST_EPOCHS)
    sample_in_epoch = fields.whole_number("sample_in_epoch")
    has_fingerprint = (is_ours or "fingerprint" in fields) and not fields.is_none("fingerprint")
    position = SavedPosition(
        cursor=Cursor(epoch, sample_in_epoch) if epoch >= 0 else Cursor(0, 0),
        shuffle_seed=fields.whole_number("shuffle_seed", most=LARGEST_SEED),
        num_canonical_nodes=fields.whole_number("num_canonical_nodes", least=1, most=MOST_CANONICAL_NODES),
        initial_physical_nodes=_initial_nodes(fields, is_ours),
        geometry=_geometry(fields.fields("batch_geometry")) if _has(fields, "batch_geometry") else None,
        fingerprint=read_fingerprint(fields.fields("fingerprint")) if has_fingerprint else None,
        skipped=_skipped(fields.fields("skipped")) if "skipped" in fields else {},
        streams=read_stream_list(fields.fields("streams")) if _has(fields, "streams") else None,
    )
    _check_sizes(fields, position)
    return position


def _check_version(fields: Fields, known: int) -> None:
    version = fields.get("version")
    if type(version) is not int or version != known:
        raise StateError(
            f"{fields.of} has version {shown(version)} and this release reads version {known}; "
            "resume with the release that wrote it, or a newer one"
        )


def _has(fields: Fields, key: str) -> bool:
    return key in fields and not fields.is_none(key)


def _initial_nodes(fields: Fields, is_ours: bool) -> int | None:
    """Those that the run began with; states of MosaicML Streaming 0.2, as they were or imported, do not tell."""
    if (not is_ours and "initial_physical_nodes" not in fields) or fields.is_none("initial_physical_nodes"):
        return None
    return fields.whole_number("initial_physical_nodes", least=1, most=_MOST_NODES)


def _geometry(fields: Fields) -> BatchGeometry:
    nodes = fields.whole_number("num_nodes", least=1, most=_MOST_NODES)
    ranks = fields.whole_number("ranks_per_node", least=1, most=min(_MOST_NODES, LARGEST_BATCH // nodes))
    most = LARGEST_BATCH // (nodes * ranks)
    return BatchGeometry(
        num_nodes=nodes, ranks_per_node=ranks, batch_size=fields.whole_number("batch_size", least=1, most=most)
    )


def _skipped(fields: Fields) -> dict[str, SkippedRange]:
    read: dict[str, SkippedRange] = {}
    batches = 0
    for name in fields:
        try:
            (asked,) = parse_batch_ranges([name], "skipped")
        except ConfigError as error:
            raise fields.contradicts(f"a range of batches is written like '12-20', but one is {shown(name)}") from error
        batches += len(asked)
        first, start, last, stop = fields.whole_numbers(name, 4)
        read[name] = (first, start), (last, stop)
    for name, (begin, end) in read.items():
        # Each epoch that a range goes through has at least one batch, of this range or of another.
        if end < begin or end[0] - begin[0] > batches:
            raise fields.wrong(name, f"a range of {batches} batches at most, from a place to a later one")
    return read


def _check_sizes(fields: Fields, position: SavedPosition) -> None:
    """Hold what counts samples of an epoch against the size that the fingerprint tells."""
    if position.fingerprint is None:
        return
    size = position.fingerprint["order"]["epoch_size"]
    geometry, most = position.geometry, size + MOST_CANONICAL_NODES + _MOST_NODES
    if geometry is not None and geometry.global_batch_size > _most_composed(position, geometry, size):
        raise fields.contradicts(
            f"'batch_geometry' has batches of {geometry.global_batch_size} samples, of an epoch of {size}"
        )
    for name, (begin, end) in position.skipped.items():
        # Epochs to come may be longer, of data that has grown.
        farthest = max((sample for epoch, sample in (begin, end) if epoch <= position.cursor.epoch), default=0)
        if farthest > most:
            raise fields.contradicts(f"'skipped' has {name!r} at sample {farthest} of an epoch of {size}")


def _most_composed(position: SavedPosition, geometry: BatchGeometry, size: int) -> int:
    """Entries of an epoch of composed batches at most: each stream repeats some, even for canonical nodes and ranks."""
    assert position.fingerprint is not None, "looked at by the caller"
    streams = position.fingerprint["streams"]
    num_streams = len(streams) if is_listed(streams) else size  # each draws a sample at least
    return size + num_streams * (position.num_canonical_nodes + geometry.num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTrainer:
    """How far the trainer had come."""

    epoch: int
    batches: int
    """Batches of this epoch that are in the weights."""
    batches_in_epoch: int
    """0 if that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedValidation:
    """Validations of an epoch under way."""

    is_due: bool = False
    """Whether one is due, or was under way, before the trainer's next batch."""
    done_after: int = 0
    """Batches of the epoch after which the last finished one ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """The state of a run that has been read and found sound."""

    trainer: SavedTrainer | None
    """None before the first batch."""
    loaders: Mapping[str, SavedPosition]
    """The place of each train loader, by name."""
    samples_per_global_batch: Mapping[str, int]
    """Of some of the loaders: samples of one batch over all ranks."""
    validation: SavedValidation = field(default_factory=SavedValidation)


def read_run(state: object) -> SavedRun:
    """Read all of what the callback has saved.

    Raises:
        StateError: It is no such state, was written by a version that is not known here, or one of its values cannot
            be; the message names the field.
    """
    fields = Fields(state, "the checkpoint's streaming state")
    _check_version(fields, RUN_VERSION)
    loaders = fields.fields("loaders")
    positions = {name: read_state(loaders.get(name), f"the saved position of {name!r}") for name in loaders}
    batches = Fields({}, "nothing")
    if "samples_per_global_batch" in fields:
        batches = fields.fields("samples_per_global_batch")
    run = SavedRun(
        trainer=None if fields.is_none("trainer") else _read_trainer(fields.fields("trainer")),
        loaders=positions,
        samples_per_global_batch={name: batches.whole_number(name, least=1) for name in batches},
        validation=_read_validation(fields.fields("validation")) if "validation" in fields else SavedValidation(),
    )
    if run.trainer is None and positions:
        raise fields.contradicts(f"'trainer' is None, as before the first batch, but there are {sorted(positions)}")
    if run.trainer is not None and not positions:
        raise fields.contradicts("'trainer' has a place, and 'loaders' none")
    return run


def _read_trainer(fields: Fields) -> SavedTrainer:
    trainer = SavedTrainer(
        epoch=fields.whole_number("epoch", most=MOST_EPOCHS),
        batches=fields.whole_number("batches"),
        batches_in_epoch=fields.whole_number("batches_in_epoch"),
    )
    if 0 < trainer.batches_in_epoch < trainer.batches:
        raise fields.contradicts(f"'batches' is {trainer.batches} of an epoch of {trainer.batches_in_epoch}")
    return trainer


def _read_validation(fields: Fields) -> SavedValidation:
    return SavedValidation(is_due=fields.one_of("is_due", (False, True)), done_after=fields.whole_number("done_after"))
