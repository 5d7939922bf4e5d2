"""Small datasets, loaders over them, and one way to check that a resume is exact."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.errors import StreamingError
from lightning_streaming.formats.index import INDEX_BASENAME, dump_index
from lightning_streaming.reading.dataset import dataset_world
from lightning_streaming.writing.shards import ShardBuffer, make_mds_encoder, parse_settings
from tests.tiers import some

State = dict[str, Any]


def write_dataset(root: Path, samples: int = 29, *, first_id: int = 0, **writer: Any) -> Path:
    """Write samples whose ``id`` counts from ``first_id``, in shards of 5; gives ``root``."""
    with MDSWriter(out=str(root), columns={"id": "int"}, **{"size_limit": 230, **writer}) as written:
        for index in range(samples):
            written.write({"id": first_id + index})
    return root


def write_shards(
    root: Path,
    sizes: Sequence[int],
    columns: dict[str, str] | None = None,
    make: Callable[[int], dict[str, Any]] = lambda number: {"id": number},
) -> Path:
    """Write samples, of which ``id`` counts from 0 unless told otherwise, in shards of these sizes; gives ``root``."""
    recipe = make_mds_encoder(columns or {"id": "int"}, parse_settings(None, None, None))
    root.mkdir(parents=True)
    first, infos = 0, []
    for number, size in enumerate(sizes):
        gathered = ShardBuffer(0)
        for index in range(first, first + size):
            gathered.append(recipe.parts(make(index)))
        with gathered.samples() as samples:
            made = recipe.make(number, samples)
            for file in made.files:
                (root / file.basename).write_bytes(b"".join(file.pieces))
        infos.append(made.info)
        first += size
    (root / INDEX_BASENAME).write_bytes(dump_index(tuple(infos)))
    return root


def make_dataset(root: Path | str | None = None, **overrides: Any) -> StreamingDataset:
    """A dataset in batches of 4, shuffled in small blocks so that order means something."""
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "shuffle_block_size": 16}
    if root is not None:
        settings["remote"] = str(root)
    return StreamingDataset(**{**settings, **overrides})


def make_loader(
    root: Path | str | None = None, *, workers: int = 0, drop_last: bool = False, loader: Any = None, **overrides: Any
) -> StreamingDataLoader:
    """A loader over :func:`make_dataset`; ``loader`` holds more of its own arguments."""
    dataset = make_dataset(root, **overrides)
    return StreamingDataLoader(dataset, num_workers=workers, drop_last=drop_last, **(loader or {}))


def ids(batches: Iterable[Any]) -> list[list[int]]:
    """The ids of each batch."""
    return [batch["id"].tolist() for batch in batches]


def json_copy(state: State) -> State:
    """The state as it comes back from a file."""
    copied: State = json.loads(json.dumps(state))
    return copied


def read_epochs(loader: StreamingDataLoader, until: int) -> tuple[list[list[int]], list[State]]:
    """Read to the beginning of epoch ``until``.

    Returns:
        The ids of each batch; and the state before the first batch and after each.
    """
    batches, states = [], [loader.state_dict()]
    while states[-1]["epoch"] < until:
        for batch in loader:
            batches.append(batch["id"].tolist())
            states.append(loader.state_dict())
    return batches, states


def assert_resumes_at_every_step(
    make: Callable[[], StreamingDataLoader], resumed: Callable[[], StreamingDataLoader] | None = None, epochs: int = 2
) -> None:
    """Stop after every batch of some epochs, and go on in a fresh loader: nothing is repeated, nothing skipped.

    The resumed loader must also pass through the same states, so resuming once more from there is exact as well.
    ``make test`` stops after the last batch of the first epoch and after four others, which differ between tests.

    Args:
        make: Makes the loader that is stopped.
        resumed: Makes the loader that goes on; None for ``make``.
        epochs: How many epochs to read.
    """
    batches, states = read_epochs(make(), epochs)
    assert len({state["epoch"] for state in states}) == epochs + 1
    ends = [place for place, state in enumerate(states) if state["epoch"] and not state["sample_in_epoch"]]
    for place in sorted({*some(range(len(states)), 4), *ends[:1]}):
        loader = (resumed or make)()
        loader.load_state_dict(json_copy(states[place]))
        assert read_epochs(loader, epochs) == (batches[place:], states[place:])


@contextmanager
def raises(error: type[Exception], *words: str) -> Iterator[None]:
    """Like ``pytest.raises``, where workers are involved: an error keeps alive all that it came through.

    Torch takes ten seconds to end workers that only the garbage collector finds, so they are let go of at once.
    """
    with pytest.raises(error) as caught:
        yield
    traceback.clear_frames(caught.tb)
    assert caught.type is error
    assert [word for word in words if word not in str(caught.value)] == []


_ANY: Any = object()


@contextmanager
def assert_error(
    kind: type[StreamingError],
    *,
    option: str | None = _ANY,
    stream: str | None = _ANY,
    path: str | Path | None = _ANY,
    sample: int | None = _ANY,
    hint: str | None = _ANY,
) -> Iterator[pytest.ExceptionInfo[StreamingError]]:
    """Check that an error of exactly this kind is raised, with these fields; fields that are left out may be any.

    Args:
        kind: Its class.
        option: The option at fault, dotted as in a configuration.
        stream: Name of the stream.
        path: File or URL, or what it ends with.
        sample: Number of the sample.
        hint: Words of the hint.
    """
    with pytest.raises(kind) as caught:
        yield caught
    traceback.clear_frames(caught.tb)  # workers end with what they are held by
    error = caught.value
    assert type(error) is kind, repr(error)
    fields = {"option": option, "stream": stream, "sample": sample}
    expected = {name: value for name, value in fields.items() if value is not _ANY}
    assert {name: getattr(error, name) for name in expected} == expected, repr(error)
    for found, wanted in ((error.path, path), (error.hint, hint)):
        if wanted is None:
            assert found is None, repr(error)
    if path is not _ANY and path is not None:
        assert error.path is not None, repr(error)
        assert error.path.endswith(str(path)), error.path
    if hint is not _ANY and hint is not None:
        assert error.hint is not None, repr(error)
        assert hint in error.hint, error.hint


def worlds(num_nodes: int, ranks_per_node: int) -> list[World]:
    """Every rank's view of a world."""
    count = num_nodes * ranks_per_node
    return [World(num_nodes=num_nodes, ranks_per_node=ranks_per_node, rank=rank) for rank in range(count)]


@dataclass(frozen=True)
class FakeMesh:
    """A device mesh that needs no process group."""

    mesh: NDArray[np.int64]
    mesh_dim_names: tuple[str, ...] | None = ("first", "second", "third")


SHAPES_OF_8 = [(a, b, 8 // (a * b)) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a * b <= 8]
"""Every way in which 8 ranks make a mesh of three dimensions."""
READERS_OF_3 = [("first",), ("second",), ("third",), ("first", "second"), ("first", "third"), ("second", "third")]
"""Which of them may be data parallel, where not all are."""


def mesh_of(shape: tuple[int, ...], order: Sequence[int] | None = None) -> FakeMesh:
    """The mesh that ``init_device_mesh`` makes; or one whose dimensions are strided in another order."""
    ranks = np.arange(int(np.prod(shape)))
    if order is None:
        return FakeMesh(ranks.reshape(shape))
    return FakeMesh(ranks.reshape([shape[axis] for axis in order]).transpose(np.argsort(order)))


def read_together(loaders: Sequence[StreamingDataLoader]) -> Iterator[tuple[list[int], State]]:
    """Read the next epoch on all ranks, step by step.

    Yields:
        The ids of a global batch in the order of the global sequence, and the state after it, which all ranks agree on.
    """
    world = dataset_world(loaders[0].dataset)
    for step in zip(*loaders, strict=True):
        of_ranks = ids(step)
        # A global batch goes to the nodes in turn, and within each node to the ranks in turn.
        in_turn = [
            of_ranks[node * world.ranks_per_node + rank]
            for rank in range(world.ranks_per_node)
            for node in range(world.num_nodes)
        ]
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        yield [one for round_ in zip_longest(*in_turn) for one in round_ if one is not None], states[0]


def descriptors_under(directory: Path) -> int:
    """How many descriptors this process has of files under a directory; a map has one of its own."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself, or one closed by another thread just now
            count += entry.readlink().is_relative_to(directory)
    return count
