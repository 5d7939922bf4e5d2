"""Device meshes of any shape: who reads what, and ranks that see no samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader

from lightning_streaming import StreamingDataLoader, World
from lightning_streaming.distributed import all_gather_samples
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.position import position_of
from tests.forked_ranks import on_ranks
from tests.helpers import (
    READERS_OF_3,
    SHAPES_OF_8,
    FakeMesh,
    State,
    make_loader,
    mesh_of,
    read_epochs,
    worlds,
    write_dataset,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SAMPLES = 45
SEEN_BY_NONE = World(ranks_per_node=2, rank=1, is_reader=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", SAMPLES)


class Readings:
    """What the ranks of a mesh read, each world once: nothing else of a rank counts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[object, tuple[list[tuple[int, bool]], State]] = {}

    def loader(self, world: World) -> StreamingDataLoader:
        return make_loader(
            self._root, world=world, batch_size=2, num_canonical_nodes=2, loader={"return_keys": True}, shuffle_seed=7
        )

    def of(
        self, world: World, state: State | None = None, steps: int | None = None
    ) -> tuple[list[tuple[int, bool]], State]:
        """Samples of the epoch, or of so many of its batches, each with whether it is valid; and the state then."""
        asked = (world, state and state["sample_in_epoch"], steps)
        if asked not in self._read:
            loader = self.loader(world)
            if state is not None:
                loader.load_state_dict(state)
            batches = list(islice(loader, steps))
            read = [zip(batch.batch["id"].tolist(), batch.keys.valid.tolist(), strict=True) for batch in batches]
            self._read[asked] = list(chain(*read)), loader.state_dict()
        return self._read[asked]


@pytest.fixture(scope="module")
def readings(root: Path) -> Readings:
    return Readings(root)


def valid(read: dict[int, list[tuple[int, bool]]]) -> list[int]:
    """Each sample as often as a metric counts it."""
    return sorted(sample for of_rank in read.values() for sample, counts in of_rank if counts)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_8, ids=str)
def test_every_mesh_reads_each_sample_once_and_goes_on_as_another(
    shape: tuple[int, int, int], order: tuple[int, int, int], machines: int, readings: Readings
) -> None:
    mesh, other = mesh_of(shape, order), mesh_of(shape[1:] + shape[:1])
    ranks = worlds(machines, 8 // machines)
    for readers in READERS_OF_3:
        mine = [World.from_mesh(mesh, readers, ranks=rank) for rank in ranks]
        whole = [readings.of(world)[0] for world in mine]
        by_reader = {world.rank: read for world, read in zip(mine, whole, strict=True)}
        assert all(read == by_reader[world.rank] for world, read in zip(mine, whole, strict=True))
        assert len({len(read) for read in whole}) == 1
        assert valid(by_reader) == list(range(SAMPLES))

        begun = {world.rank: readings.of(world, steps=2) for world in mine}
        states = [state for _, state in begun.values()]
        assert all(state == states[0] for state in states)
        then = [World.from_mesh(other, readers, ranks=rank) for rank in ranks]
        rest = {world.rank: readings.of(world, states[0])[0] for world in then}
        before = valid({rank: read for rank, (read, _) in begun.items()})
        alone = [sample for sample, _ in readings.of(World())[0]]
        assert before == sorted(alone[: 2 * 2 * mine[0].num_ranks])
        assert sorted(before + valid(rest)) == list(range(SAMPLES))


def test_machines_whose_ranks_share_fetch_their_own_shards_alone(root: Path, tmp_path: Path) -> None:
    mesh = FakeMesh(np.arange(8).reshape(4, 2), ("dp_shard", "tp"))
    fetched: dict[bool, list[int]] = {}
    for by_mesh in (True, False):
        for rank in worlds(2, 4):
            local = tmp_path / f"{by_mesh} {rank.node}"
            world = World.from_mesh(mesh, ranks=rank) if by_mesh else rank.replicated(2)
            loader = make_loader(
                root.as_uri(), local=str(local), world=world, shuffle_algo="py1s", num_canonical_nodes=2
            )
            list(loader)
            loader.close()
        fetched[by_mesh] = [len(list((tmp_path / f"{by_mesh} {node}").rglob("*.mds"))) for node in range(2)]
    assert fetched == {True: [5, 5], False: [9, 9]}  # of 9, one of which lies in both canonical nodes


NAMES = [("pp", "dp_shard", "tp"), ("tp", "dp_replicate", "dp_shard"), ("dp_replicate", "cp", "ep")]
MESHES = [(shape, names) for shape in SHAPES_OF_8 for names in NAMES]


def _read_in_meshes(root: Path) -> list[dict[str, Any]]:
    """Half an epoch in each mesh in turn, the rest in the next: a real mesh of each shape."""
    told, state = [], None
    for shape, names in MESHES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        loader = make_loader(root, world=World.from_mesh(mesh), batch_size=2, loader={"return_keys": True})
        if state is not None:
            loader.load_state_dict(state)
        values, keys, read = [], [], []
        for batch in loader:
            values.append(batch.batch["id"].float())
            keys.append(batch.keys)
            read += batch.batch["id"].tolist()
            if state is None and len(read) == 4:
                break
        state = loader.state_dict() if state is None else None
        gathered = all_gather_samples(values, keys).tolist()
        told.append({"mesh": mesh.mesh.tolist(), "read": read, "gathered": gathered, "batches": len(loader)})
    return told


def test_real_ranks_read_by_their_mesh_and_a_metric_counts_each_sample_once(root: Path, tmp_path: Path) -> None:
    by_rank = on_ranks(_read_in_meshes, root, meeting=tmp_path / "ranks", count=8)
    halves: list[set[int]] = []
    for number, (shape, names) in enumerate(MESHES):
        of_mesh = [told[number] for told in by_rank]
        assert of_mesh[0]["mesh"] == np.arange(8).reshape(shape).tolist()
        axes = [axis for axis, name in enumerate(names) if name.startswith("dp")]
        count = int(np.prod([shape[axis] for axis in axes]))
        groups = np.moveaxis(np.arange(8).reshape(shape), axes, range(len(axes))).reshape(count, -1).tolist()
        for group in groups:
            for rank in group:
                assert of_mesh[rank]["read"] == of_mesh[group[0]]["read"]
        assert len({tuple(told["read"]) for told in of_mesh}) == len(groups)
        assert all(told["gathered"] == of_mesh[0]["gathered"] for told in of_mesh)
        gathered = of_mesh[0]["gathered"]
        assert gathered == sorted({*gathered})
        assert {told["batches"] for told in of_mesh} == {-(-SAMPLES // (2 * len(groups)))}
        halves.append({*map(int, gathered)})
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        assert not first & second
        assert first | second == {*range(SAMPLES)}


# Ranks that see no samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_samples_has_as_many_batches_and_stands_where_the_others_do(
    workers: int, drop_last: bool, root: Path
) -> None:
    reads = make_loader(root, world=replace(SEEN_BY_NONE, is_reader=True), drop_last=drop_last)
    none = make_loader(root, world=SEEN_BY_NONE, drop_last=drop_last, workers=workers)
    assert len(none) == len(reads)
    for _ in range(2):
        for batch, nothing in zip(reads, none, strict=True):
            assert len(batch["id"])
            assert nothing == {}
            assert none.state_dict() == reads.state_dict()
            assert none.dataset.state_dict() == reads.dataset.state_dict()
            assert position_of(none).claim() == position_of(reads).claim()
    statistics = none.statistics()
    assert (statistics.batches, statistics.samples) == (2 * len(none), 0)
    assert {*statistics.samples_per_stream.values()} == {0}


def test_a_rank_without_samples_fetches_no_shard_and_starts_no_worker(root: Path, tmp_path: Path) -> None:
    none = make_loader(root, local=str(tmp_path / "local"), world=SEEN_BY_NONE, workers=2, transform=_fail)
    batches = iter(none)
    assert next(batches) == {}
    assert torch.multiprocessing.active_children() == []
    assert len(list(batches)) == len(none) - 1
    assert not list((tmp_path / "local").rglob("*.mds"))
    none.close()


def _fail(_sample: Any) -> Any:
    raise AssertionError("nobody asked for a sample")


@pytest.mark.parametrize("persistent", [False, True])
def test_a_rank_without_samples_goes_on_where_one_with_samples_was_saved(persistent: bool, root: Path) -> None:
    loader = {"persistent_workers": True} if persistent else {}
    reads = make_loader(root, world=World(ranks_per_node=2, rank=0), workers=int(persistent), loader=loader)
    none = make_loader(root, world=SEEN_BY_NONE, workers=int(persistent), loader=loader)
    _, states = read_epochs(reads, 2)
    reads.close()
    for state in states[:-1]:
        none.load_state_dict(state)
        passed = [none.state_dict() for _ in chain(none, none if state["epoch"] == 0 else ())]
        assert passed == states[states.index(state) + 1 :]
    none.close()


def test_a_rank_that_comes_to_read_goes_on_where_it_saw_none(root: Path) -> None:
    reads, none = (partial(make_loader, root, world=World(ranks_per_node=2, is_reader=one)) for one in (True, False))
    batches, _ = read_epochs(reads(), 1)
    without = none()
    for place, nothing in enumerate(without, start=1):
        assert nothing == {}
        again = reads()
        again.load_state_dict(without.state_dict())
        assert read_epochs(again, 1)[0] == batches[place:]


def test_batches_without_samples_have_no_keys_and_an_empty_mask(root: Path) -> None:
    keyed = make_loader(root, world=SEEN_BY_NONE, loader={"return_keys": True, "return_valid_mask": True})
    for batch in keyed:
        assert len(batch.keys) == 0
        assert batch.batch.keys() == {"valid"}
        assert batch.batch["valid"].shape == (0,)


def _gather(root: Path) -> Any:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    world = World.from_mesh(mesh, is_reader=mesh.get_local_rank("pp") == 1)
    loader = make_loader(root, world=world, loader={"return_keys": True, "fixed_epoch": True})
    keyed = list(loader)
    values = [batch.batch["id"] if world.is_reader else torch.empty(0, dtype=torch.int64) for batch in keyed]
    return rank, len(keyed), all_gather_samples(values, [batch.keys for batch in keyed]).tolist()


def test_ranks_without_samples_bring_nothing_to_a_metric(root: Path, tmp_path: Path) -> None:
    told = on_ranks(_gather, root, meeting=tmp_path / "ranks", count=4)
    assert told == [(rank, -(-SAMPLES // 8), list(range(SAMPLES))) for rank in range(4)]


def _train_in_stages(root: Path) -> list[tuple[list[int] | None, int]]:
    """Three stages of a pipeline, twice; the second takes its steps on what the first sends."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "dp_shard"))
    stage = mesh.get_local_rank("pp")
    loader = make_loader(root, world=World.from_mesh(mesh, is_reader=stage != 1), drop_last=True)
    part = PipelineStage(torch.nn.Linear(1, 1), stage, 3, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(part, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    told: list[tuple[list[int] | None, int]] = []
    for batch in loader:
        column = batch["id"].float().unsqueeze(1) if batch else None
        if stage == 0:
            schedule.step(column)
        elif stage == 2:
            schedule.step(target=column, losses=[])
        else:
            schedule.step()
        told.append((batch["id"].tolist() if batch else None, loader.state_dict()["sample_in_epoch"]))
    return told


def test_stages_in_the_middle_of_a_pipeline_take_their_steps_without_samples(root: Path, tmp_path: Path) -> None:
    ranks = on_ranks(_train_in_stages, root, meeting=tmp_path / "ranks", count=6)
    first, middle, last = ranks[:2], ranks[2:4], ranks[4:]
    assert first == last
    assert first[0] != first[1]
    for reading, passing in zip(first, middle, strict=True):
        assert len(reading) == SAMPLES // 8
        assert passing == [(None, position) for _, position in reading]


def test_skipped_batches_are_skipped_without_samples_too(root: Path) -> None:
    reads = make_loader(root, world=World(ranks_per_node=2), skip=["1-3"])
    none = make_loader(root, world=World(ranks_per_node=2, is_reader=False), skip=["1-3"])
    for _ in zip(reads, none, strict=True):
        assert none.state_dict() == reads.state_dict()
    assert none.dataset.next_epoch == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_what_nobody_could_count_is_refused(workers: int, root: Path) -> None:
    dataset = make_loader(root, world=SEEN_BY_NONE).dataset
    plain: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=workers)
    with pytest.raises(ConfigError, match=r"World.is_reader is False.*through a StreamingDataLoader"):
        list(plain)
    assert isinstance(dataset[0]["id"], (int, np.integer))  # what is asked for by its number is read
