"""Image augmentation as for ImageNet: random resized crop, horizontal flip, normalization on the device.

    python examples/imagenet.py                                 # writes demo_output/pictures, and reads it
    lightning-streaming fit --config configs/pictures.yaml

Images are decoded in threads, after the crop is drawn, and no larger than it needs. All randomness comes from the
sample's ``rng``, so a resumed run sees the same crops. Takes 10 seconds on two cores, and prints shape, mean and
deviation of each batch. Needs no torchvision.
"""

from __future__ import annotations

import argparse
import io
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch import Tensor, nn

from lightning_streaming import EncodedImage, MDSWriter, StreamingConfig, StreamingDataModule

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the colours of ImageNet, from 0 to 1."""


def draw_box(
    size: tuple[int, int],
    rng: np.random.Generator,
    share: tuple[float, float] = (0.08, 1.0),
    shape: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """Return a random crop of an image: its left, upper, right and lower edge.

    Args:
        size: Width and height of the image.
        rng: Generator of the crop.
        share: Smallest and largest part of the image's area.
        shape: Smallest and largest ratio of width to height, uniform in its logarithm.
    """
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(*share)
        ratio = math.exp(rng.uniform(math.log(shape[0]), math.log(shape[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, upper = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            return left, upper, left + across, upper + down
    return middle_box(size, min(max(width / height, shape[0]), shape[1]))


def middle_box(size: tuple[int, int], ratio: float = 1.0, share: float = 1.0) -> tuple[int, int, int, int]:
    """Return the largest centered crop of a ratio of width to height, or a share of it."""
    width, height = size
    across = max(1, round(share * min(width, height * ratio)))
    down = max(1, round(share * min(height, width / ratio)))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down


def normalize(images: Tensor) -> Tensor:
    """Return pixels, uint8 of shape (..., 3, height, width), as float32 of mean 0 and deviation 1."""
    mean, std = (255 * torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() - mean) / std


class ImageNet(StreamingDataModule):
    """Streams samples {"image": JPEG or PNG, "label": int} as {"image": float32 (batch, 3, pixels, pixels), "label"}.

    Args:
        pixels: Width and height.
        **kwargs: The arguments of :class:`~lightning_streaming.StreamingDataModule`; stages decode "image" to
            "encoded".
    """

    def __init__(self, pixels: int = 224, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pixels = pixels

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> dict[str, Any]:
        """Crop at random and flip half of the images in training; else crop the center, 7/8 of the shorter side."""
        encoded: EncodedImage = sample["image"]
        if stage != "train":
            return {**sample, "image": encoded.crop(middle_box(encoded.size, share=7 / 8), self.pixels)}
        image = encoded.crop(draw_box(encoded.size, rng), self.pixels)
        return {**sample, "image": image.flip(-1) if rng.random() < 0.5 else image}

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Normalize on the device: uint8 is a quarter of the bytes to transfer."""
        return {**batch, "image": normalize(batch["image"])}


class Classifier(LightningModule):
    """A small convolutional network for batches {"image": float32 (batch, 3, height, width), "label": int64 (batch,)}.

    Args:
        classes: Number of labels, from 0 on.
        width: Channels of the first layer; each of the next has twice as many.
    """

    def __init__(self, classes: int = 1000, width: int = 8) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        layers = [
            nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU())
            for before, after in pairwise(sizes)
        ]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], classes))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of the labels."""
        return nn.functional.cross_entropy(self.layers(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the share of labels that are right."""
        right = self.layers(batch["image"]).argmax(1) == batch["label"]
        self.log("val_accuracy", right.float().mean(), prog_bar=True, batch_size=len(right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def write_pictures(out: Path, count: int) -> None:
    """Write JPEG images of random spots, 320 x 240 pixels."""
    rng = np.random.default_rng(0)
    with MDSWriter(out=out, columns={"image": "jpeg", "label": "int"}, size_limit="256kb", exist_ok=True) as writer:
        for number in range(count):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize((320, 240)).save(file, "JPEG")
            writer.write({"image": file.getvalue(), "label": number % 10})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/pictures"), metavar="DIR")
    out: Path = parser.parse_args().out
    write_pictures(out, 256)
    stage = StreamingConfig(remote=str(out), decode={"columns": {"image": "encoded"}, "threads": 2})
    data = ImageNet(train=stage, batch_size=64, num_workers=0)
    data.setup("fit")
    for batch in data.train_dataloader():
        images = data.on_after_batch_transfer(batch, 0)["image"]
        print(tuple(images.shape), images.dtype, f"mean {images.mean():.2f}, deviation {images.std():.2f}")


if __name__ == "__main__":
    main()
