"""The modules that ``init`` writes: for each kind of task a data module with its transform, and a small model.

All that a module takes from the data are literals in assignments at its top. The code below them is text of ours, in
which words in capitals between ``@`` stand for variants, also of ours.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import TypeGuard

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.starting.look import Kind, Task

_WIDTH = 80
_HEAD = '''\
"""@ABOUT@, with the transform of its samples.

Written by `lightning-streaming init` as a starting point; change it as you like. run.yaml names the classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
@PIL@from torch import Tensor, nn

from lightning_streaming import StreamingDataModule

'''

_PICTURES = '''\
PIXELS = 64
"""Width and height that the model sees."""


class Data(StreamingDataModule):
    """Convert each sample to the model's input: pixels, and the number of a class."""

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> dict[str, Any]:
        """Run in the worker processes. `rng` belongs to the sample: its numbers are the same after a resume."""
        picture = @OPENED@.convert("RGB").resize((PIXELS, PIXELS))
        pixels = np.asarray(picture, np.uint8).transpose(2, 0, 1)
        if stage == "train" and rng.random() < 0.5:
            pixels = pixels[:, :, ::-1]
@LABELLED@


class Classifier(LightningModule):
    """A few convolutions.

    Args:
        classes: Number of classes; labels are numbers from 0 on.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(self, classes: int, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.classes, self.learning_rate = classes, learning_rate
        channels = [3, 16, 32, 64]
        layers: list[nn.Module] = []
        for before, after in zip(channels, channels[1:]):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores, (batch, classes), of pixels, uint8 of shape (batch, 3, height, width)."""
        scores: Tensor = self.layers(pixels.float() / 127.5 - 1)
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        label = batch["label"]
        if int(label.max()) >= self.classes:
            raise ValueError(f"there is a label {int(label.max())}; raise model.init_args.classes in run.yaml")
        loss = nn.functional.cross_entropy(self(batch["pixels"]), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the share of correct labels."""
        right = (self(batch["pixels"]).argmax(1) == batch["label"]).float().mean()
        self.log("val_accuracy", right, prog_bar=True, batch_size=len(batch["label"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
'''
_WITH_LABEL = '        return {"pixels": torch.from_numpy(pixels.copy()), "label": int(sample[LABEL])}'
_WITHOUT_LABEL = """\
        # The data has no column of labels. As an example task, images are rotated by 0 to 3 quarter turns, and the
        # model predicts the number. Replace it by your own task.
        turns = int(rng.integers(4))
        return {"pixels": torch.from_numpy(np.rot90(pixels, turns, (1, 2)).copy()), "label": turns}"""

_LANGUAGE = '''\
CONTEXT = 128
"""Number of tokens in a sample."""
NOTHING = -100
"""Label after the end of a document, which the loss ignores."""


class Data(StreamingDataModule):
    """Convert each sample to the model's input: rows of tokens of equal length."""

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> dict[str, Any]:
        """Run in the worker processes. `rng` belongs to the sample: its numbers are the same after a resume."""
@TOKENS@
        most = len(tokens) - (CONTEXT + 1)
        begin = int(rng.integers(most + 1)) if most > 0 and stage == "train" else 0
        tokens = tokens[begin : begin + CONTEXT + 1]
        row = np.full(CONTEXT + 1, NOTHING, np.int64)
        row[: len(tokens)] = tokens
        return {"tokens": torch.from_numpy(row)}


class LanguageModel(LightningModule):
    """A small transformer that predicts the next token.

    Args:
        vocabulary: Number of different tokens; they are numbers from 0 on.
        width: Size of a token's vector.
        depth: Number of layers.
        heads: Attention heads per layer.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self, vocabulary: int, width: int = 64, depth: int = 2, heads: int = 4, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.vocabulary, self.learning_rate = vocabulary, learning_rate
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocabulary), of tokens, (batch, length)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embedding(tokens.clamp(min=0)) + self.position[:length]
        logits: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token."""
        if int(tokens.max()) >= self.vocabulary:
            raise ValueError(f"there is a token {int(tokens.max())}; raise model.init_args.vocabulary in run.yaml")
        logits, following = self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, following, ignore_index=NOTHING, reduction="sum")
        mean: Tensor = total / (following != NOTHING).sum().clamp(min=1)
        return mean

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = self.loss(batch["tokens"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss on held-out data."""
        self.log("val_loss", self.loss(batch["tokens"]), prog_bar=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
'''
_FROM_TOKENS = "        tokens = sample[TOKENS]"
_FROM_TEXT = """\
        # Add your tokenizer here; until then a token is a byte. With one of the tokenizers package, which you create
        # once, in __init__:
        #     tokens = self.tokenizer.encode(sample[TEXT]).ids
        # Tokenize large corpora once instead: lightning-streaming convert --tokenize --help
        tokens = """

_NUMBERS = '''\


class Data(StreamingDataModule):
    """Convert each sample to the model's input: numbers, and the target."""

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> dict[str, Any]:
        """Run in the worker processes. `rng` belongs to the sample: its numbers are the same after a resume."""
        numbers = np.concatenate([np.asarray(sample[name], np.float32).ravel() for name in INPUTS])
        return {"inputs": torch.from_numpy(np.nan_to_num(numbers)), "target": np.float32(sample[TARGET])}


class Regression(LightningModule):
    """A linear model.

    Args:
        inputs: Number of inputs.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(self, inputs: int, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = nn.Linear(inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions, (batch,), of inputs, (batch, inputs)."""
        predictions: Tensor = self.layer(inputs).squeeze(1)
        return predictions

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the error: squared below 1, linear above."""
        loss = nn.functional.smooth_l1_loss(self(batch["inputs"]), batch["target"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the mean error."""
        error = (self(batch["inputs"]) - batch["target"]).abs().mean()
        self.log("val_error", error, prog_bar=True, batch_size=len(batch["target"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
'''

MODEL_OF: Mapping[Kind, tuple[str, str]] = {
    Kind.PICTURES: ("Classifier", "classes"),
    Kind.TOKENS: ("LanguageModel", "vocabulary"),
    Kind.TEXT: ("LanguageModel", "vocabulary"),
    Kind.NUMBERS: ("Regression", "inputs"),
}
"""The class of a module's model, and its argument that depends on the data."""


_VARIANT = re.compile(r"@([A-Z]+)@")


def module_text(task: Task, holds_text: bool = True) -> str:
    """Return the module for a task.

    Args:
        task: What is trained.
        holds_text: Of text: whether the column holds text, and not bytes or a mapping.

    Raises:
        ConfigError: The names of the columns cannot be written as literals.
    """
    body, names, variants = _parts(task, holds_text)
    variants = {"ABOUT": task.kind.value.capitalize(), "PIL": "", **variants}

    def filled(text: str) -> str:
        return _VARIANT.sub(lambda found: variants[found[1]], text)

    head, code = filled(_HEAD), filled(body)
    text = head + "".join(f"{name} = {_literal(value)}\n" for name, value in names.items()) + code
    if not _holds_only(text, names, head, code):
        raise ConfigError(
            f"the columns {', '.join(map(ascii, task.columns))} cannot be written into a Python module",
            hint="rename them",
        )
    return text


def _parts(task: Task, holds_text: bool) -> tuple[str, Mapping[str, str | tuple[str, ...]], Mapping[str, str]]:
    """Return the code of a module; what it takes from the data, by name; and the variants of the code."""
    column, target = task.inputs[0], task.target
    if task.kind is Kind.PICTURES:
        opened = "Image.fromarray(sample[IMAGE])" if task.from_array else "sample[IMAGE]"
        variants = {"OPENED": opened, "LABELLED": _WITHOUT_LABEL if target is None else _WITH_LABEL}
        if task.from_array:
            variants["PIL"] = "from PIL import Image\n"
        return _PICTURES, {"IMAGE": column, **({} if target is None else {"LABEL": target})}, variants
    if task.kind is Kind.TOKENS:
        return _LANGUAGE, {"TOKENS": column}, {"TOKENS": _FROM_TOKENS}
    if task.kind is Kind.TEXT:
        any_value = "value if isinstance(value := sample[TEXT], bytes) else str(value).encode()"
        as_bytes = "sample[TEXT].encode()" if holds_text else f"({any_value})"
        return _LANGUAGE, {"TEXT": column}, {"TOKENS": f"{_FROM_TEXT}np.frombuffer({as_bytes}, np.uint8)"}
    return _NUMBERS, {"INPUTS": task.inputs, "TARGET": target or ""}, {}


def _holds_only(text: str, names: Mapping[str, str | tuple[str, ...]], head: str, code: str) -> bool:
    """Check that a module is head and code, and between them assignments of these literals; nothing else."""
    try:
        module, begin = ast.parse(text), len(ast.parse(head).body)
        assigned = module.body[begin : begin + len(names)]
        del module.body[begin : begin + len(names)]
        literals = {ast.unparse(one.targets[0]): ast.literal_eval(one.value) for one in assigned if _is_assignment(one)}
    except (SyntaxError, ValueError):
        return False
    return literals == names and ast.dump(module) == ast.dump(ast.parse(head + code))


def _is_assignment(node: ast.stmt) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and len(node.targets) == 1


def _literal(value: str | tuple[str, ...]) -> str:
    """Return a text or a tuple of texts as Python writes it, in lines where it is long."""
    if isinstance(value, str):
        text = repr(value)
        return text if '"' in text or "'" in text[1:-1] else f'"{text[1:-1]}"'
    line = f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    if len(line) <= _WIDTH:
        return line
    return "(\n" + "".join(f"    {_literal(one)},\n" for one in value) + ")"
