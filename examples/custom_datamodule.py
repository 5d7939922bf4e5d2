"""A custom data module with a transform and a collate: classify images of digits, stop in mid-epoch, and resume.

    python examples/custom_datamodule.py                                # writes the images, trains and resumes
    lightning-streaming fit --config configs/custom_datamodule.yaml     # trains again, from YAML

Draws the digits with the typefaces of matplotlib; validation uses typefaces that training does not. Takes a minute on
two cores, and prints the accuracy at the stop and at the end.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional

from lightning_streaming import MDSWriter, StreamingConfig, StreamingDataModule

PIXELS = 28
TYPEFACES = ("DejaVuSans*", "DejaVuSerif*", "STIXGeneral*", "cmr10", "cmb10", "cmss10", "cmtt10", "cmti10")
SIZES = (18, 20, 22, 24)
VALIDATION_SHARE = 0.2


class DigitsDataModule(StreamingDataModule):
    """Streams samples {"image": uint8 (28, 28), "digit": int} as batches for a classifier.

    Args:
        max_shift: Most pixels by which a training image is moved, in each direction.
        noise: Standard deviation of the noise added to training images, whose pixels are 0 to 1.
        **kwargs: The arguments of :class:`~lightning_streaming.StreamingDataModule`.
    """

    def __init__(self, max_shift: int = 3, noise: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_shift = max_shift
        self.noise = noise

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> tuple[Tensor, int]:
        """Scale to 0..1, and augment in training.

        All randomness comes from ``rng``, which is seeded by the sample: a resumed run, on any number of machines,
        trains on the same images as without the interruption.
        """
        image = sample["image"].astype(np.float32) / 255
        if stage == "train":
            shift = rng.integers(-self.max_shift, self.max_shift + 1, size=2)
            image = np.roll(image, tuple(shift), axis=(0, 1))
            image += rng.normal(0, self.noise, image.shape).astype(np.float32)
        return torch.from_numpy(image), sample["digit"]

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        """Stack images to (batch, 1, 28, 28), and digits to (batch,)."""
        images, digits = zip(*samples, strict=True)
        return {"image": torch.stack(images).unsqueeze(1), "digit": torch.tensor(digits)}


class DigitClassifier(LightningModule):
    """A small convolutional network; logs the accuracy on the validation data as ``val_accuracy``."""

    def __init__(self, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (batch, 16, 14, 14)
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (batch, 32, 7, 7)
            *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of the digits."""
        loss: Tensor = functional.cross_entropy(self.layers(batch["image"]), batch["digit"])
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the share of digits that are right."""
        right = self.layers(batch["image"]).argmax(dim=1) == batch["digit"]
        self.log("val_accuracy", right.float().mean(), batch_size=len(right), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def write_digits(out: Path) -> None:
    """Write the datasets ``train`` and ``val``, each digit in each typeface and size once."""
    fonts = Path(mpl.get_data_path()) / "fonts" / "ttf"
    typefaces = sorted({path for pattern in TYPEFACES for path in fonts.glob(f"{pattern}.ttf")})
    random.Random(0).shuffle(typefaces)
    held_out = int(VALIDATION_SHARE * len(typefaces))
    for name, chosen in (("val", typefaces[:held_out]), ("train", typefaces[held_out:])):
        columns = {"image": f"ndarray:uint8:{PIXELS},{PIXELS}", "digit": "int"}
        with MDSWriter(out=out / name, columns=columns, size_limit="64kb", exist_ok=True) as writer:
            for typeface in chosen:
                for size in SIZES:
                    for digit in range(10):
                        writer.write({"image": draw(digit, typeface, size), "digit": digit})


def draw(digit: int, typeface: Path, size: int) -> NDArray[np.uint8]:
    """Return a digit as uint8 pixels of shape (28, 28), white on black."""
    image = Image.new("L", (PIXELS, PIXELS))
    middle = (PIXELS / 2, PIXELS / 2)
    ImageDraw.Draw(image).text(middle, str(digit), fill=255, font=ImageFont.truetype(typeface, size), anchor="mm")
    return np.asarray(image)


def fit(out: Path, max_steps: int, checkpoint: Path, *, resume: bool = False) -> float:
    """Train until ``max_steps`` are done, and save a checkpoint.

    Args:
        out: Directory of the datasets.
        max_steps: Step after which to stop.
        checkpoint: File to save to at the end.
        resume: Whether to resume from the file.

    Returns:
        Accuracy on the validation data.
    """
    seed_everything(0, verbose=False)
    datamodule = DigitsDataModule(
        train=StreamingConfig(remote=str(out / "train")),
        val=StreamingConfig(remote=str(out / "val")),
        batch_size=32,
        num_workers=2,
        persistent_workers=True,
    )
    model = DigitClassifier()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Nothing else is needed for an exact resume: the data module adds its position to every checkpoint.
    trainer.fit(model, datamodule=datamodule, ckpt_path=checkpoint if resume else None)
    trainer.save_checkpoint(checkpoint)
    (metrics,) = trainer.validate(model, datamodule=datamodule, verbose=False)
    return metrics["val_accuracy"]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output/digits"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=150, help="24 are an epoch (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    write_digits(out)
    stop = arguments.steps // 2
    print(f"Accuracy after step {stop}, where the run stops: {fit(out, stop, out / 'last.ckpt'):.3f}", flush=True)
    accuracy = fit(out, arguments.steps, out / "last.ckpt", resume=True)
    print(f"Accuracy after step {arguments.steps}, resumed: {accuracy:.3f}")


if __name__ == "__main__":
    main()
