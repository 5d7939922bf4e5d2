"""Randomness keyed by the sample: the same after any resume, on any topology, for one sample alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_streaming import MDSWriter, World
from lightning_streaming.dataset.transform import rng_for, rng_of_worker, seed_global_generators
from lightning_streaming.errors import ConfigError, SampleError
from tests.helpers import make_dataset, make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def _augment(sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, float]:
    return sample["id"], float(rng.random())


def _draw() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002 the point


def _augment_globally(sample: dict[str, Any]) -> tuple[int, float]:
    return sample["id"], _draw()


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


AUGMENTATIONS = pytest.mark.parametrize(
    "transform", [{"transform": _augment}, {"transform": _augment_globally, "seed_global_rng": True}]
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 24)


def _read(root: Path, start: int = 0, epoch: int = 0, **settings: Any) -> dict[int, float]:
    """Augmentation by sample, from a place in an epoch to its end."""
    loader = make_loader(root, loader={"collate_fn": list}, **{"num_canonical_nodes": 4, **settings})
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "sample_in_epoch": start})
    return dict(pair for batch in loader for pair in batch)


@pytest.mark.rotate(2)
@AUGMENTATIONS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"workers": 2},
        {"batch_size": 3},
        {"workers": 2, "batch_size": 5},
        {"start": 9},
        {"start": 10, "workers": 2, "batch_size": 3},
    ],
)
def test_augmentation_does_not_depend_on_how_it_is_read(
    root: Path, transform: dict[str, Any], settings: dict[str, Any]
) -> None:
    whole, again = _read(root, **transform), _read(root, **transform, **settings)
    assert len(set(whole.values())) == 24
    assert len(again) == 24 - settings.get("start", 0)
    assert again.items() <= whole.items()


@AUGMENTATIONS
def test_augmentation_does_not_depend_on_the_world(root: Path, transform: dict[str, Any]) -> None:
    worlds = [World(num_nodes=2, ranks_per_node=2, rank=rank) for rank in range(4)]
    of_ranks = [_read(root, world=world, **transform) for world in worlds]
    assert {one: value for rank in of_ranks for one, value in rank.items()} == _read(root, **transform)


@AUGMENTATIONS
def test_augmentation_differs_between_epochs_and_seeds(root: Path, transform: dict[str, Any]) -> None:
    values = [_read(root, epoch=0, **transform), _read(root, epoch=1, **transform)]
    values.append({**_read(root, shuffle_seed=1, **transform)})
    assert len({one for read in values for one in read.values()}) == 3 * 24


def test_one_sample_can_be_augmented_again_alone(root: Path) -> None:
    (first, *_), *_ = make_loader(root, transform=_augment, loader={"collate_fn": list})
    assert first == (first[0], rng_for(9176, 0, 0).random())


def test_generators_differ_by_seed_epoch_and_position() -> None:
    keys = [(seed, epoch, position) for seed in (0, 1) for epoch in (0, 1) for position in (0, 1, 2**40)]
    assert len({rng_for(*key).random() for key in keys}) == len(keys)
    # A literal, because augmentation must be the same in the next release.
    assert rng_for(9176, 0, 0).integers(2**32, size=2).tolist() == [1815518809, 2931819081]


def test_all_global_generators_are_seeded() -> None:
    drawn = []
    for _ in range(2):
        seed_global_generators(rng_for(1, 2, 3))
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002 the point
    assert drawn[0] == drawn[1]


def test_without_a_transform_the_global_generators_are_left_alone(root: Path) -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    list(make_loader(root, seed_global_rng=True))
    assert random.random() == expected


def _draws_between_samples(root: Path, **settings: Any) -> list[float]:
    """What training draws that reads samples in its own process."""
    _seed_all(3)
    drawn = []
    for sample in make_dataset(root, **settings):
        assert sample
        drawn.append(_draw())
    return drawn


def _fail_globally(sample: dict[str, Any]) -> Any:
    raise ValueError(str(_draw()))


def test_training_in_the_same_process_is_not_seeded_with_the_samples(root: Path) -> None:
    undisturbed = _draws_between_samples(root)
    assert len(set(undisturbed)) == 24
    assert _draws_between_samples(root, transform=_augment_globally, seed_global_rng=True) == undisturbed


def test_nor_by_a_transform_that_fails(root: Path) -> None:
    _seed_all(3)
    expected = _draw()
    _seed_all(3)
    with pytest.raises(SampleError, match=r"ValueError: [0-9.]+\n"):
        next(iter(make_dataset(root, transform=_fail_globally, seed_global_rng=True)))
    assert _draw() == expected


def _first_draws(root: Path, rank: int, **loader: Any) -> list[float]:
    """What each of two workers draws first from the global generators, unless it is seeded."""
    settings: dict[str, Any] = {"world": World(ranks_per_node=3, rank=rank), "transform": _augment_globally}
    _seed_all(3)  # as on every rank
    batches = make_loader(root, workers=2, loader={"collate_fn": list, **loader}, batch_size=2, **settings)
    return [batch[0][1] for batch in batches][:2]


def test_no_two_workers_of_a_run_draw_the_same_and_a_run_draws_the_same_again(root: Path) -> None:
    drawn = [_first_draws(root, rank) for rank in range(3)]
    assert len({one for rank in drawn for one in rank}) == 6
    assert [_first_draws(root, rank) for rank in range(3)] == drawn


def test_a_worker_draws_other_numbers_in_other_epochs_and_from_other_places() -> None:
    keys = [(1, epoch, position, 0, 0) for epoch in (0, 1) for position in (0, 64)]
    assert len({rng_of_worker(*key).random() for key in keys} | {rng_for(1, 0, 0).random()}) == len(keys) + 1


def test_the_users_own_seeds_of_workers_stand(root: Path) -> None:
    _seed_all(7)
    expected = _draw()
    assert _first_draws(root, 0, worker_init_fn=lambda worker: _seed_all(7)) == [expected, expected]


@pytest.mark.parametrize("transform", [lambda: None, lambda sample, stage: sample, lambda sample, stage, rng: sample])
def test_a_transform_with_other_arguments_is_refused_at_construction(transform: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transform must accept \(sample\), optionally with rng="):
        make_dataset(tmp_path, transform=transform)
    for taken in (dict, lambda sample, rng, more=0: sample, lambda *samples, **_: samples):
        make_dataset(tmp_path, transform=taken)


def test_a_collate_fn_with_other_arguments_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collate_fn must accept \(samples\); .*'stage'"):
        make_loader(tmp_path, loader={"collate_fn": lambda samples, stage: samples})


def _refuse(sample: dict[str, Any]) -> None:
    raise ValueError("no good")


def test_an_error_tells_kinds_and_shapes_of_columns_and_no_value(tmp_path: Path) -> None:
    columns = {"pixels": "png", "tokens": "ndarray:uint16:3", "secret": "str", "meta": "json"}
    with MDSWriter(out=str(tmp_path / "x"), columns=columns) as writer:
        tokens = np.array([7, 8, 9], np.uint16)
        writer.write({"pixels": Image.new("L", (4, 2)), "tokens": tokens, "secret": "sesame", "meta": {"x": 1}})
    with pytest.raises(SampleError, match="no good") as raised:
        list(make_dataset(tmp_path / "x", transform=_refuse))
    told = str(raised.value).splitlines()[1].removeprefix("When it failed, the sample had ").split(", ")
    assert sorted(told) == ["meta (dict)", "pixels (picture L 4×2)", "secret (str)", "tokens (uint16[3])"]
    assert "sesame" not in str(raised.value)


def _read_exif(sample: dict[str, Any]) -> None:
    sample["exif"] = sample.pop("pixels").getexif()
    raise ValueError("no good")


def test_what_a_picture_gives_need_not_be_one(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"pixels": "png"}) as writer:
        writer.write({"pixels": Image.new("L", (4, 2))})
    with pytest.raises(SampleError, match=r"no good\nWhen it failed, the sample had exif \(Exif\)\n"):
        list(make_dataset(tmp_path / "x", transform=_read_exif))


def test_of_many_columns_the_first_are_told(tmp_path: Path) -> None:
    names = [f"c{number:02}" for number in range(25)]
    with MDSWriter(out=str(tmp_path / "x"), columns=dict.fromkeys(names, "int")) as writer:
        writer.write(dict.fromkeys(names, 1))
    with pytest.raises(SampleError, match=r"c00 \(int\), .*c19 \(int\) and 5 more\n"):
        list(make_dataset(tmp_path / "x", transform=_refuse))
