"""Take the images of docs/view.md, from generated data. Run: python -m docs.img.view [DIRECTORY]

If a directory is given, the data stays there.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import wave
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image, ImageDraw

from lightning_streaming import MDSWriter, StreamingConfig, StreamingDataModule
from lightning_streaming.dataset.stream import Stream
from tests.chromium import browser

_SAMPLES = 600
_SIZE = (240, 160)
_SKIES = {"day": ((120, 178, 226), (226, 238, 244)), "night": ((18, 22, 52), (72, 70, 122))}
_HILLS = {"day": ((98, 138, 110), (62, 104, 80), (40, 74, 60)), "night": ((44, 50, 88), (30, 36, 66), (18, 22, 44))}
_COLUMNS = {
    "image": "jpeg",
    "caption": "str",
    "scene": "json",
    "score": "float32",
    "embedding": "ndarray:float32",
    "sound": "bytes",
}
_STREAMS: dict[str, dict[str, Any]] = {
    "day": {"remote": "day", "proportion": 0.7, "selection": {"where": "score >= 0.5"}},
    "night": {"remote": "night", "proportion": 0.3},
}
_SHOTS = {
    "view_samples": ("s/0/samples", 1280, 800, False),
    "view_sample": ("s/0/sample/3", 1280, 800, False),
    "view_columns": ("s/0/columns", 1280, 800, True),
    "view_run": ("", 1280, 480, False),
    "view_batch": ("batches", 1280, 800, False),
    "view_order": ("order?steps=5", 1280, 800, False),
    "view_phone": ("s/1/samples", 390, 800, True),
}


def write_all(directory: Path) -> None:
    """Two streams of landscapes, a run that mixes them, and a checkpoint of it."""
    os.chdir(directory)
    for number, stream in enumerate(_STREAMS):
        rng = np.random.default_rng(number)
        with MDSWriter(out=stream, columns=_COLUMNS, size_limit="3mb", hashes=["sha1"]) as writer:
            for place in range(_SAMPLES):
                writer.write(_landscape(stream, place, rng))
    data = {"batch_size": 8, "train": {"streams": _STREAMS, "columns": ["score"]}}  # resumes on two ranks
    Path("run.yaml").write_text(json.dumps({"data": {"init_args": data}, "trainer": {"devices": 2}}, indent=2))
    streams = {name: Stream(**options) for name, options in _STREAMS.items()}
    module = StreamingDataModule(train=StreamingConfig(streams=streams, columns=["score"]), batch_size=16)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=40, accelerator="cpu", **quiet)
    trainer.fit(_Model(), datamodule=module)
    trainer.save_checkpoint("last.ckpt")


class _Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(batch["score"].float().unsqueeze(1))
        return predicted.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _landscape(when: str, number: int, rng: np.random.Generator) -> dict[str, Any]:
    width, height = _SIZE
    top, bottom = (np.array(colour) for colour in _SKIES[when])
    rows = np.linspace(0, 1, height)[:, None, None]
    sky = (top * (1 - rows) + bottom * rows) * np.ones((1, width, 1))
    image = Image.fromarray(sky.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    light = [int(rng.integers(20, width - 20)), int(rng.integers(16, 60)), int(rng.integers(8, 16))]
    x, y, radius = light
    draw.ellipse(
        (x - radius, y - radius, x + radius, y + radius), fill=(252, 214, 92) if when == "day" else (232, 232, 214)
    )
    if when == "night":
        draw.point([(int(rng.integers(width)), int(rng.integers(80))) for _ in range(60)], fill=(222, 222, 240))
    for depth, colour in enumerate(_HILLS[when]):
        draw.polygon([(0, height), *_ridge(depth, rng), (width, height)], fill=colour)
    trees = _trees(draw, when, rng)
    wavy = np.cumsum(rng.normal(size=256)).astype(np.float32)
    kind = "sun" if when == "day" else "moon"
    caption = (
        f"Hills under the {kind}, with {len(trees)} tree{'s' * (len(trees) > 1)}."
        if trees
        else f"Bare hills under the {kind}."
    )
    return {
        "image": image,
        "caption": caption,
        "scene": {"id": number, "when": when, kind: {"at": [x, y], "radius": radius}, "trees": trees},
        "score": float(rng.beta(4, 3)),
        "embedding": wavy / np.abs(wavy).max(),
        "sound": _tone(220 * 2 ** (number % 12 / 12)),
    }


def _ridge(depth: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    width, height = _SIZE
    phases, steps = rng.uniform(0, 7, 3), np.linspace(0, 1, 40)
    waves = sum(
        np.sin(steps * frequency * 6 + phase) / frequency for frequency, phase in zip((1, 2, 5), phases, strict=True)
    )
    heights = height * (0.55 + 0.14 * depth) - 16 * np.asarray(waves)
    return [(int(width * at), int(level)) for at, level in zip(steps, heights, strict=True)]


def _trees(draw: ImageDraw.ImageDraw, when: str, rng: np.random.Generator) -> list[dict[str, int]]:
    trees = []
    for _ in range(int(rng.integers(0, 6))):
        x, ground, tall = int(rng.integers(12, _SIZE[0] - 12)), int(rng.integers(138, 156)), int(rng.integers(18, 36))
        colour = (24, 70, 44) if when == "day" else (10, 16, 34)
        draw.polygon([(x - tall // 3, ground), (x + tall // 3, ground), (x, ground - tall)], fill=colour)
        trees.append({"x": x, "ground": ground, "height": tall})
    return trees


def _tone(hertz: float) -> bytes:
    times = np.arange(4000) / 8000
    levels = (8000 * np.sin(2 * math.pi * hertz * times) * np.exp(-4 * times)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(levels.tobytes())
    return file.getvalue()


def take_pictures(out: Path) -> None:
    """Open the pages of the run, and write what is seen."""
    told = ["--config", "run.yaml", "--ckpt", "last.ckpt"]
    command = [sys.executable, "-m", "lightning_streaming", "view", *told]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  this Python
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with browser() as page:
            for name, (path, width, height, dark) in _SHOTS.items():
                page.size(width, height, dark=dark)
                page.open(url + path)
                path_out = out / f"{name}.png"
                page.picture(path_out)
                with Image.open(path_out) as taken:
                    whole = taken.convert("RGB")
                whole.save(path_out, optimize=True)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Write the data, then the pictures beside this file."""
    out = Path(__file__).parent.resolve()
    os.environ["PYTHONPATH"] = str(out.parents[1])
    with TemporaryDirectory() as scratch:
        directory = Path(sys.argv[1] if len(sys.argv) > 1 else scratch).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        write_all(directory)
        take_pictures(out)
        os.chdir(out)


if __name__ == "__main__":
    main()
