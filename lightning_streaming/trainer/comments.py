"""A printed configuration with a comment on every field that some docstring explains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import getmro
from textwrap import wrap
from typing import Any

import docstring_parser
from lightning.pytorch import Trainer

from lightning_streaming.loading.stream import Stream
from lightning_streaming.trainer.config import StreamingConfig

_WIDTH = 120
_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s:#-][^:]*):(?P<value>.*)")
_STAGE = re.compile(r"data\.(train|val|test|predict)")
_STREAMS = re.compile(rf"{_STAGE.pattern}\.streams")
_TOP = {
    "seed_everything": "Seed of weights and all else that is random; the order of the data has its own, shuffle_seed.",
    "trainer": "Arguments of lightning.pytorch.Trainer.",
    "model": "Your LightningModule; class_path names it, init_args are its arguments.",
    "data": "The data module; class_path may be left out, or name your own.",
    "optimizer": "Only for models that leave it to the command line.",
    "lr_scheduler": "Only for models that leave it to the command line.",
    "ckpt_path": 'Checkpoint to go on from, mid-epoch, exactly there; "last" for the newest, or none yet.',
    "weights_only": "Whether a checkpoint may hold plain values and tensors alone. null: as torch decides.",
}


def with_comments(text: str) -> str:
    """Put a comment above each field.

    Args:
        text: YAML in blocks, without comments.
    """
    return "".join(f"{line}\n" for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    levels: list[tuple[int, str]] = []
    classes: dict[str, str] = {"trainer": "lightning.pytorch.Trainer"}
    explained: set[str] = set()
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:  # an item of a list, or a text of several lines
            yield line
            continue
        indent, key = len(match["indent"]), match["key"]
        levels = [level for level in levels if level[0] < indent] + [(indent, key)]
        name = ".".join(one for _, one in levels if one != "init_args")
        parent = name.rpartition(".")[0]
        if key == "class_path":
            classes[parent] = match["value"].strip()
        words = _explanation(parent, key, classes, explained)
        yield from (f"{match['indent']}# {row}" for row in wrap(words, max(40, _WIDTH - 2 - indent)))
        yield line


def _explanation(parent: str, key: str, classes: Mapping[str, str], explained: set[str]) -> str:
    """What a field means; each field of the streams is explained at the first stream alone."""
    if not parent:
        return _TOP.get(key, "")
    if _STAGE.fullmatch(parent):
        return _of_class(StreamingConfig).get(key, "")
    above, _, _ = parent.rpartition(".")
    if _STREAMS.fullmatch(above):
        known = "" if f"streams.{key}" in explained else _of_class(Stream).get(key, "")
        explained.add(f"streams.{key}")
        return known
    return _of_class(_find(classes[parent])).get(key, "") if parent in classes else ""


def _find(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    return Trainer if name == "Trainer" else getattr(import_module(module), name)


def _of_class(documented: Any) -> dict[str, str]:
    """Each argument of a class in the words of its docstring, or that of a class it extends."""
    texts: dict[str, str] = {}
    classes: list[Any] = list(reversed(getmro(documented)))
    for one in classes:
        for text in (one.__doc__, one.__init__.__doc__):
            params = docstring_parser.parse(text or "").params
            texts |= {param.arg_name: _as_yaml(param.description or "") for param in params}
    return texts


def _as_yaml(words: str) -> str:
    """A description for readers of YAML, who see no markup, and write null for None."""
    return re.sub(r"\bNone\b", "null", " ".join(words.replace("``", "").split()))
