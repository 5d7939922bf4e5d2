"""The data of the pictures in docs/view.md: drawn pictures, texts, trees, numbers and sounds, and a run that mixes two.

python docs/img/view_data.py DIRECTORY
"""

from __future__ import annotations

import io
import json
import math
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from lightning_streaming import MDSWriter

_SHAPES = ("circle", "square", "triangle")
_COLOURS = {"red": (205, 66, 58), "green": (62, 142, 84), "blue": (58, 104, 190), "amber": (224, 164, 48)}
_WORDS = [
    "rain",
    "river",
    "stone",
    "garden",
    "winter",
    "light",
    "window",
    "letter",
    "street",
    "harbour",
    "morning",
    "bread",
    "music",
    "paper",
    "mountain",
]
_SAMPLES = 600


def write_shapes(out: Path) -> None:
    """Pictures of shapes, each with a caption, a tree of what is in it, a score, an embedding and a tone."""
    rng = np.random.default_rng(7)
    columns = {
        "image": "jpeg",
        "caption": "str",
        "objects": "json",
        "score": "float32",
        "embedding": "ndarray:float32",
        "tone": "bytes",
    }
    with MDSWriter(out=str(out), columns=columns, size_limit="3mb", hashes=["sha1"]) as writer:
        for number in range(_SAMPLES):
            writer.write(_shape(number, rng))


def write_stories(out: Path) -> None:
    """Texts, with where they come from, a score, and their tokens."""
    rng = np.random.default_rng(11)
    columns = {"text": "str", "source": "str", "score": "float64", "tokens": "ndarray:uint16"}
    with MDSWriter(out=str(out), columns=columns, size_limit="200kb", compression="zstd") as writer:
        for number in range(2 * _SAMPLES):
            words = [str(word) for word in rng.choice(_WORDS, rng.integers(20, 160))]
            source = ("book", "letter", "diary")[number % 3]
            tokens = rng.zipf(1.3, len(words)).clip(0, 50_000).astype(np.uint16)
            text = " ".join(words).capitalize()
            writer.write({"text": f"{text}.", "source": source, "score": float(rng.beta(5, 2)), "tokens": tokens})


def write_run(directory: Path) -> Path:
    """A configuration that mixes both."""
    path = directory / "run.yaml"
    streams = {
        "shapes": {"remote": str(directory / "shapes"), "proportion": 0.6, "where": "score >= 0.5"},
        "stories": {"remote": str(directory / "stories"), "proportion": 0.4},
    }
    data = {"batch_size": 16, "train": {"streams": streams}}
    path.write_text(json.dumps({"data": {"init_args": data}, "trainer": {"devices": 2, "max_steps": 1000}}))
    return path


def _shape(number: int, rng: np.random.Generator) -> dict[str, Any]:
    names = [str(name) for name in rng.choice(list(_COLOURS), rng.integers(1, 4))]
    image = Image.new("RGB", (224, 160), (238, 236, 230))
    draw, objects = ImageDraw.Draw(image), []
    for place, colour in enumerate(names):
        shape, size = _SHAPES[int(rng.integers(3))], int(rng.integers(24, 54))
        left, top = 18 + 66 * place + int(rng.integers(-8, 8)), int(rng.integers(12, 100))
        _draw(draw, shape, (left, top, left + size, top + size), _COLOURS[colour])
        objects.append({"shape": shape, "colour": colour, "box": [left, top, left + size, top + size]})
    caption = " and ".join(f"one {one['colour']} {one['shape']}" for one in objects)
    wavy = np.cumsum(rng.normal(size=256)).astype(np.float32)
    return {
        "image": image,
        "caption": f"A picture of {caption}.",
        "objects": {"id": number, "objects": objects, "drawn": {"width": 224, "height": 160}},
        "score": float(rng.beta(4, 3)),
        "embedding": wavy / np.abs(wavy).max(),
        "tone": _tone(220 * 2 ** (number % 12 / 12)),
    }


def _draw(draw: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: Any) -> None:
    left, top, right, bottom = box
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)


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


def write_all(directory: Path) -> Path:
    """Both datasets and the run; gives the configuration."""
    write_shapes(directory / "shapes")
    write_stories(directory / "stories")
    return write_run(directory)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
