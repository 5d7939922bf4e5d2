"""The recipe of ImageNet: parts within the picture, drawn evenly, the same after a resume."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.imagenet import MEAN, STD, ImageNet, draw_box, middle_box, normalize, write_pictures
from lightning_streaming import StreamingConfig

sides = st.integers(1, 2000)


@given(st.tuples(sides, sides), st.integers(0, 99), st.floats(0.1, 10), st.floats(0.1, 1))
def test_boxes_are_within_the_picture(size: tuple[int, int], seed: int, ratio: float, share: float) -> None:
    for box in (draw_box(size, np.random.default_rng(seed)), middle_box(size, ratio, share)):
        left, upper, right, lower = box
        assert 0 <= left < right <= size[0]
        assert 0 <= upper < lower <= size[1]


def test_boxes_are_drawn_evenly() -> None:
    rng = np.random.default_rng(3)
    boxes = np.array([draw_box((1000, 1000), rng) for _ in range(4000)])
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    shares, shapes = width * height / 1e6, np.log(width / height)
    assert 0.079 < shares.min() < 0.09
    assert 0.45 < shares.mean() < 0.55
    assert abs(shapes.mean()) < 0.02
    assert np.abs(shapes).max() < math.log(4 / 3) + 0.01
    assert abs(boxes[:, 0].mean() - (1000 - width.mean()) / 2) < 12


def test_the_middle_is_in_the_middle() -> None:
    assert middle_box((500, 375)) == (62, 0, 437, 375)
    assert middle_box((256, 512), share=7 / 8) == (16, 144, 240, 368)


def test_pixels_are_normalized() -> None:
    pixels = torch.tensor([round(255 * one) for one in MEAN], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalize(pixels).abs().max() < 0.01
    white = normalize(torch.full((3, 2, 2), 255, dtype=torch.uint8))
    assert torch.allclose(white[:, 0, 0], torch.tensor([(1 - mean) / std for mean, std in zip(MEAN, STD, strict=True)]))


def test_a_resumed_run_sees_the_same_parts(tmp_path: Path) -> None:
    write_pictures(tmp_path / "data", 40)

    def loader(threads: int) -> object:
        decode = {"decode": {"columns": {"image": "encoded"}, "threads": threads}}
        module = ImageNet(train=StreamingConfig(remote=str(tmp_path / "data"), **decode), pixels=32, batch_size=8)  # type: ignore[arg-type]
        module.setup("fit")
        return module.train_dataloader()

    first, again = loader(2), loader(0)
    batches = iter(first)  # type: ignore[call-overload]
    seen = [next(batches) for _ in range(2)]
    again.load_state_dict(first.state_dict())  # type: ignore[attr-defined]
    left = list(again)  # type: ignore[call-overload]
    assert len(left) == 3
    for one, other in zip(batches, left, strict=True):
        assert torch.equal(one["image"], other["image"])
    assert seen[0]["image"].shape == (8, 3, 32, 32)
    assert not torch.equal(seen[0]["image"], left[0]["image"])
