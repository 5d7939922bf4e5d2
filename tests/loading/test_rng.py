"""Randomness keyed by the sample: the same after any resume, on any topology, for one sample alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_streaming import World, rng_for
from lightning_streaming.loading.rng import seed_global_generators
from tests.helpers import make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def _augment(sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, float]:
    return sample["id"], float(rng.random())


def _augment_globally(sample: dict[str, Any]) -> tuple[int, float]:
    return sample["id"], random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002 the point


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
