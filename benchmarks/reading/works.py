"""Kinds of samples that are read: how they are made, stored and used.

Each has one size that can be chosen: tokens of a sequence, floats of a record, bytes of a blob, characters of a text,
pixels of an image's side.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Sample = dict[str, Any]
SEED = 7
VOCABULARY = 50_000
INTEGERS = ("a", "b")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kind of samples."""

    what: Callable[[int], str]
    """In words, given the size."""
    size: int
    samples: int
    """In the dataset, unless said otherwise."""
    columns: Callable[[int], dict[str, str]]
    """MDS columns and their encodings, given the size."""
    make: Callable[[np.random.Generator, int], Sample]
    row: Callable[[int], np.dtype[Any]] | None = None
    """For samples that are rows of a matrix: what one row is."""
    transform: Callable[[Sample], Sample] | None = None
    """What a user does with each sample."""


def samples(work: Work, count: int, size: int) -> Iterator[Sample]:
    """The same samples in every process that asks."""
    rng = np.random.default_rng(SEED)
    return (work.make(rng, size) for _ in range(count))


def rows(work: Work, count: int, size: int) -> NDArray[Any]:
    """The samples as the rows of one array, shape (count, ...); for works that have rows."""
    assert work.row is not None
    matrix = np.empty(count, work.row(size))
    for place, sample in enumerate(samples(work, count, size)):
        values = tuple(np.frombuffer(one, np.uint8) if isinstance(one, bytes) else one for one in sample.values())
        matrix[place] = values if len(values) > 1 else values[0]
    return matrix


def floats(size: int) -> list[str]:
    """Names of a record's floats."""
    return [f"f{place}" for place in range(size)]


def _tokens(rng: np.random.Generator, size: int) -> Sample:
    return {"tokens": rng.integers(0, VOCABULARY, size, np.uint16)}


def _record(rng: np.random.Generator, size: int) -> Sample:
    integers = zip(INTEGERS, rng.integers(2**40, size=len(INTEGERS)).tolist(), strict=True)
    return dict(integers) | dict(zip(floats(size), rng.random(size, np.float32).tolist(), strict=True))


def _blob(rng: np.random.Generator, size: int) -> Sample:
    return {"blob": rng.bytes(size)}


def _text(rng: np.random.Generator, size: int) -> Sample:
    letters = rng.integers(ord("a"), ord("z") + 1, size, np.uint8)
    letters[rng.integers(0, size, size // 6)] = ord(" ")
    meta = {
        "url": f"https://example.com/{rng.integers(2**40)}",
        "score": float(rng.random()),
        "lines": int(rng.integers(100)),
        "tags": [f"tag{number}" for number in rng.integers(1000, size=3)],
    }
    return {"text": letters.tobytes().decode(), "meta": meta}


def _jpeg(rng: np.random.Generator, size: int) -> Sample:
    from PIL import Image

    coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
    smooth = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), np.int16)
    grainy = np.clip(smooth + rng.integers(-8, 9, smooth.shape, np.int16), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(grainy).save(stream, "JPEG", quality=90)
    return {"image": stream.getvalue()}


def next_tokens(sample: Sample) -> Sample:
    """What a language model trains on: tensors of tokens and of the ones after them."""
    tokens = torch.from_numpy(np.asarray(sample["tokens"]).astype(np.int64))
    return {"inputs": tokens[:-1], "targets": tokens[1:]}


def pixels(sample: Sample) -> Sample:
    """Decode with Pillow, in every system alike; a tensor of shape (height, width, 3)."""
    from PIL import Image

    return {"image": torch.from_numpy(np.array(Image.open(io.BytesIO(sample["image"])).convert("RGB")))}


def _record_row(size: int) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in INTEGERS] + [(name, np.float32) for name in floats(size)])


WORKS = {
    "tokens": Work(
        what=lambda size: f"{size:,} tokens, `ndarray:uint16:{size}`",
        size=2049,
        samples=20_000,
        columns=lambda size: {"tokens": f"ndarray:uint16:{size}"},
        make=_tokens,
        row=lambda size: np.dtype((np.uint16, size)),
    ),
    "free-tokens": Work(
        what=lambda size: f"{size:,} tokens, `ndarray:uint16` of any shape",
        size=2049,
        samples=20_000,
        columns=lambda _: {"tokens": "ndarray:uint16"},
        make=_tokens,
        row=lambda size: np.dtype((np.uint16, size)),
    ),
    "records": Work(
        what=lambda size: f"2 `int` and {size} `float32`",
        size=8,
        samples=100_000,
        columns=lambda size: dict.fromkeys(INTEGERS, "int") | dict.fromkeys(floats(size), "float32"),
        make=_record,
        row=_record_row,
    ),
    "blobs": Work(
        what=lambda size: f"{size / 1000:,.0f} kB `bytes`",
        size=110_000,
        samples=2_000,
        columns=lambda _: {"blob": "bytes"},
        make=_blob,
        row=lambda size: np.dtype((np.uint8, size)),
    ),
    "text": Work(
        what=lambda size: f"`str` of {size:,} characters and `json`",
        size=2000,
        samples=10_000,
        columns=lambda _: {"text": "str", "meta": "json"},
        make=_text,
    ),
    "jpeg": Work(
        what=lambda size: f"{size} × {size} JPEG, decoded by Pillow",
        size=224,
        samples=1_000,
        columns=lambda _: {"image": "bytes"},
        make=_jpeg,
        transform=pixels,
    ),
    "transform": Work(
        what=lambda size: f"{size:,} tokens made tensors by a transform",
        size=2049,
        samples=20_000,
        columns=lambda size: {"tokens": f"ndarray:uint16:{size}"},
        make=_tokens,
        transform=next_tokens,
    ),
}
