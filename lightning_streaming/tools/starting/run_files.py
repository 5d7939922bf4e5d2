"""The files that ``init`` writes: ``run.yaml`` with comments, and ``module.py`` with a data module and a small model.

A module is a template of ``templates/``, in which capitals between ``@`` stand for variants of the code. Names from the
data are literals in assignments at its top, and nowhere else.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.storage.secrets import shown_options
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.starting.tasks import DatasetPreview, Kind, Task
from lightning_streaming.units import format_bytes

RUN, MODULE = "run.yaml", "module.py"
_TEMPLATES = Path(__file__).parent / "templates"
_VARIANT = re.compile(r"@([A-Z]+)@")
_WIDTH = 80
_MODEL_OF = {
    Kind.IMAGES: ("Classifier", "classes"),
    Kind.TOKENS: ("LanguageModel", "vocabulary"),
    Kind.TEXT: ("LanguageModel", "vocabulary"),
    Kind.NUMBERS: ("Regression", "inputs"),
}
"""The class of a module's model, and its argument that depends on the data."""
_WITH_LABEL = '        return {"pixels": torch.from_numpy(pixels.copy()), "label": int(sample[LABEL])}'
_WITHOUT_LABEL = """\
        # The data has no column of labels. As an example task, images are rotated by 0 to 3 quarter turns, and the
        # model predicts the number. Replace it by your own task.
        turns = int(rng.integers(4))
        return {"pixels": torch.from_numpy(np.rot90(pixels, turns, (1, 2)).copy()), "label": turns}"""
_FROM_TEXT = """\
        # Add your tokenizer here; until then a token is a byte. With one of the tokenizers package, which you create
        # once, in __init__:
        #     tokens = self.tokenizer.encode(sample[TEXT]).ids
        # Tokenize large corpora once instead: lightning-streaming convert --tokenize --help
        tokens = """

_FROM_TOKENS = """\
        if self.configs[stage].packing:  # in run.yaml; it takes whole documents
            return sample
        tokens = sample[TOKENS]"""
_ROW, _PAD = 129, -100
"""Tokens of a row, one more than CONTEXT, and NOTHING, both of templates/language.py.txt."""

_PLAIN = re.compile(r"(\.\./)*[A-Za-z_/][\w./-]*")
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_MAX_BATCH, _MIN_STEPS = 32, 8
"""Small data gets smaller batches, so that an epoch has at least so many steps."""
_MIN_HELD_OUT = 400
"""Number of samples from which a part of them is held out for validation."""
_HELD_OUT = 5
"""Percent of the samples that are held out."""
_NO_VALIDATION = (
    "# val:",
    f"#   remote: ...                 # other data; from {_MIN_HELD_OUT} samples on, init holds out {_HELD_OUT} %",
)
_SAVES, _MAX_STEPS = 5, 1000
"""Checkpoints of an epoch, and most steps between two."""
_COMMENT_AT = 30
"""Column of comments of the data, which is indented by four more."""
_MAX_NAMES = 6
_Path: TypeAlias = tuple[str | int, ...]
"""Keys and list numbers that lead to a nested value."""


def module_text(task: Task, holds_text: bool = True) -> str:
    """Return the module for a task.

    Args:
        task: The task.
        holds_text: Whether a text column contains str, and not bytes or mappings.

    Raises:
        ConfigError: The names of the columns cannot be written as literals.
    """
    column, names, variants = task.inputs[0], dict[str, str | tuple[str, ...]](), {"PIL": ""}
    if task.kind is Kind.IMAGES:
        template, names = "images", {"IMAGE": column}
        variants = {"PIL": "", "OPENED": "sample[IMAGE]", "LABELLED": _WITHOUT_LABEL}
        if task.from_array:
            variants |= {"PIL": "from PIL import Image\n", "OPENED": "Image.fromarray(sample[IMAGE])"}
        if task.target is not None:
            names["LABEL"], variants["LABELLED"] = task.target, _WITH_LABEL
    elif task.kind is Kind.TOKENS:
        template, names = "language", {"TOKENS": column}
        variants["TOKENS"] = _FROM_TOKENS
    elif task.kind is Kind.TEXT:
        template, names = "language", {"TEXT": column}
        any_value = "value if isinstance(value := sample[TEXT], bytes) else str(value).encode()"
        as_bytes = "sample[TEXT].encode()" if holds_text else f"({any_value})"
        variants["TOKENS"] = f"{_FROM_TEXT}np.frombuffer({as_bytes}, np.uint8)"
    else:
        template, names = "numbers", {"INPUTS": task.inputs, "TARGET": task.target or ""}
    variants["ABOUT"] = task.kind.value.capitalize()
    head, code = (
        _VARIANT.sub(lambda match: variants[match[1]], (_TEMPLATES / f"{name}.py.txt").read_text(encoding="utf-8"))
        for name in ("head", template)
    )
    text = head + "".join(f"{name} = {_literal(value)}\n" for name, value in names.items()) + code
    if not _contains_only(text, names, head, code):
        raise ConfigError(
            f"the columns {', '.join(map(ascii, task.columns))} cannot be written into a Python module",
            hint="rename them",
        )
    return text


def _contains_only(text: str, names: Mapping[str, str | tuple[str, ...]], head: str, code: str) -> bool:
    """Check that a module consists of head and code, and between them assignments of these literals."""
    try:
        module, begin = ast.parse(text), len(ast.parse(head).body)
        assigned = module.body[begin : begin + len(names)]
        del module.body[begin : begin + len(names)]
        literals = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in assigned
            if isinstance(node, ast.Assign) and len(node.targets) == 1
        }
    except (SyntaxError, ValueError):
        return False
    return literals == names and ast.dump(module) == ast.dump(ast.parse(head + code))


def _literal(value: str | tuple[str, ...]) -> str:
    """Return a text or a tuple of texts as a Python literal, in several lines if it is long."""
    if isinstance(value, str):
        text = repr(value)
        return text if '"' in text or "'" in text[1:-1] else f'"{text[1:-1]}"'
    line = f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    if len(line) <= _WIDTH:
        return line
    return "(\n" + "".join(f"    {_literal(item)},\n" for item in value) + ")"


def config_text(previews: Sequence[DatasetPreview], task: Task, out: Path) -> str:
    """Return the configuration of a first run, as YAML with comments.

    Args:
        previews: The datasets.
        task: What is trained on them.
        out: The directory of the configuration, in which the run starts.

    Raises:
        ConfigError: The name of a column or stream cannot be written as YAML.
    """
    samples, (model, argument) = sum(preview.samples for preview in previews), _MODEL_OF[task.kind]
    holds_out, kept = samples >= _MIN_HELD_OUT, 100 - _HELD_OUT
    train = _stage("train", previews, task, out, f"0%:{kept}%" if holds_out else None)
    val = _stage("val", previews, task, out, f"{kept}%:100%") if holds_out else _NO_VALIDATION
    # About how many steps an epoch has on one rank; the samples that are held out are drawn by hash.
    batch_size = max(1, min(_MAX_BATCH, samples // _MIN_STEPS))
    trained = samples * kept // 100 if holds_out else samples
    steps = max(1, -(-trained // batch_size))
    if task.kind is Kind.TEXT:
        about_size = "a token is a byte; with a tokenizer in module.py, its vocabulary"
    elif task.kind is Kind.NUMBERS:
        more = ", ..." if len(task.inputs) > _MAX_NAMES else ""
        about_size = f"numbers in {', '.join(map(printable_name, task.inputs[:_MAX_NAMES]))}{more}"
    elif task.largest is None:
        about_size = "the data has no column of labels; see module.py"
    else:
        what = "token" if task.kind is Kind.TOKENS else "label"
        about_size = f"must be greater than every {what}; the largest one found is {task.largest}"
    values = {
        "head": _head(previews),
        "model": model,
        "argument": argument,
        "size": task.size,
        "about_size": about_size,
        "batch_size": batch_size,
        "steps": f"{steps:,}",
        "data": [f"    {line}" for line in chain(train, val)],
        "log_every": max(1, min(50, steps // 10)),
        "saves": max(1, min(_MAX_STEPS, steps // _SAVES)),
    }
    lines = list[str]()
    for line in (_TEMPLATES / "run.yaml.txt").read_text(encoding="utf-8").splitlines():
        block = values.get(line[1:]) if line.startswith("$") else None
        code, comment, words = (Template(part).substitute(values) for part in line.partition(" ## "))
        lines += block if isinstance(block, list) else [_commented(code, words, _COMMENT_AT + 4) if comment else code]
    text = "".join(f"{in_one_line(line)}\n" for line in lines)
    try:  # check that the text, once parsed, names these datasets and columns
        train = yaml.safe_load(text)["data"]["init_args"]["train"]
        remotes = {name: stream["remote"] for name, stream in train.get("streams", {"": train}).items()}
        expected = {"": previews[0]} if len(previews) == 1 else _named(previews)
        is_correct = train["columns"] == task.columns and remotes == {
            name: _remote(preview, out) for name, preview in expected.items()
        }
    except (yaml.YAMLError, LookupError, TypeError):
        is_correct = False
    if not is_correct:
        names = ", ".join(map(ascii, [*task.columns, *_named(previews)]))
        raise ConfigError(f"the columns or streams {names} cannot be written into {RUN}", hint="rename them")
    return text


def _head(previews: Sequence[DatasetPreview]) -> list[str]:
    lines = []
    for preview in previews:
        width = max(map(len, map(printable_name, preview.columns)))
        lines += [
            f"# {preview.dataset.shown}: {preview.size}, {format_bytes(preview.stored_bytes)} as stored. Columns:",
            "#",
            *(f"#     {printable_name(name):<{width}}  {encoding}" for name, encoding in preview.columns.items()),
            "#",
        ]
    return lines


def _stage(
    stage: str, previews: Sequence[DatasetPreview], task: Task, out: Path, fraction: str | None
) -> Iterator[str]:
    is_train = stage == "train"
    yield f"{stage}:"
    if len(previews) == 1:
        yield from (f"  {line}" for line in _location(previews[0], out))
    else:
        words = "an epoch reads all samples of each once"
        yield _commented("  streams:", words) if is_train else "  streams:"
        for name, preview in _named(previews).items():
            yield f"    {_scalar(name)}:"
            yield from (f"      {line}" for line in _location(preview, out))
            if is_train and preview is previews[0]:
                words = "set it for all streams to mix by weight: small ones are then repeated"
                yield _commented("      # proportion: 0.5", words)
    if fraction is not None:
        words = "a part drawn by hash, the same in every run" if is_train else "the rest"
        yield _commented(f'  selection: {{fraction: "{fraction}"}}', words)
    columns = ", ".join(map(_scalar, task.columns))
    yield _commented(f"  columns: [{columns}]", "only these are read; without this line, all")
    if task.kind is Kind.IMAGES and not task.from_array:
        decode = f"  decode: {{columns: {{{_scalar(task.inputs[0])}: pil}}}}"
        yield _commented(decode, "or tensor, array, encoded: docs/images.md")
    if task.kind is Kind.TOKENS:
        pack = f"  # packing: {{column: {_scalar(task.inputs[0])}, capacity: {_ROW}, pad: {_PAD}}}"
        yield _commented(pack, "whole documents, several in a row: docs/packing.md")
    if is_train:
        yield _commented("  # epoch_size: 10m", "samples per epoch, if not all")
    words = "limit of the cache on a node" if is_train else "set the same: each stage has its own"
    yield _commented("  # cache_limit: 200gb", words)


def _location(preview: DatasetPreview, out: Path) -> Iterator[str]:
    """Yield the fields that locate a dataset."""
    dataset = preview.dataset
    remote = f"remote: {_scalar(_remote(preview, out))}"
    words = "without its user, password and query: complete it"
    yield _commented(remote, words) if _is_masked(preview) else remote
    if dataset.format is not None:
        yield f"format: {dataset.format}"
    if dataset.block_length is not None:
        yield f"block_length: {dataset.block_length}"
    if dataset.options:
        yield f"storage: {{options: {_flow(_with_variables(dataset.options)[0])}}}"


def _remote(preview: DatasetPreview, out: Path) -> str:
    """Return a dataset's location as a run that starts in ``out`` finds it; relative if both were typed so."""
    directory = preview.dataset.directory
    if directory is None:
        return preview.dataset.shown
    if directory.is_absolute() or out.is_absolute():
        return str(directory.resolve())
    # Only the path back from OUT is computed: ``..`` within the typed path may lead through a symlink.
    return str(Path(os.path.relpath(Path.cwd(), out.resolve()), directory))


def _is_masked(preview: DatasetPreview) -> bool:
    """Return whether parts of a URL are not shown."""
    return preview.dataset.directory is None and preview.dataset.shown != preview.dataset.location


def secret_hints(previews: Sequence[DatasetPreview]) -> Iterator[str]:
    """Yield what the user must set or complete before the run: the configuration contains no secrets."""
    names = dict.fromkeys(name for preview in previews for name in _with_variables(preview.dataset.options)[1])
    if names:
        yield f"{RUN} takes secrets from the environment: set {', '.join(names)} before"
    for shown in dict.fromkeys(preview.dataset.shown for preview in previews if _is_masked(preview)):
        yield f"{RUN} has {shown} without its user, password and query, which may be secret: complete it there"


def _with_variables(options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return storage options with environment variables instead of possible secrets, and the names of these."""
    shown = shown_options(options)

    def variable(path: _Path) -> str:
        return re.sub(r"[^A-Z0-9]+", "_", "_".join(map(str, path)).upper())

    def masked(value: Any, path: _Path = ()) -> Iterator[_Path]:
        if value == "***":
            yield path
        for key, item in _items(value):
            yield from masked(item, (*path, key))

    def replaced(value: Any, path: _Path = ()) -> Any:
        if path in names:
            return f"${{{names[path]}}}"
        changed = {key: replaced(item, (*path, key)) for key, item in _items(value)}
        if isinstance(value, Mapping):
            return changed
        return list(changed.values()) if isinstance(value, list) else value

    paths = list(masked(shown))
    short = [variable(path[-1:] if isinstance(path[-1], str) else path[-2:]) for path in paths]
    names = {path: name if short.count(name) == 1 else variable(path) for path, name in zip(paths, short, strict=True)}
    return replaced(shown), list(names.values())


def _items(value: Any) -> Iterable[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value, 1) if isinstance(value, list) else ()


def _named(previews: Sequence[DatasetPreview]) -> dict[str, DatasetPreview]:
    """Return the datasets by stream name: the last part of the path, with a number if it is not unique."""
    named: dict[str, DatasetPreview] = {}
    for preview in previews:
        directory = preview.dataset.directory
        path = urlsplit(preview.dataset.shown).path if directory is None else directory.resolve().as_posix()
        name = PurePosixPath(path).name or "data"
        numbered = (f"{name}_{number}" for number in count(2))
        named[next(candidate for candidate in chain([name], numbered) if candidate not in named)] = preview
    return named


def _commented(line: str, words: str, at: int = _COMMENT_AT) -> str:
    return f"{line:<{at}}  # {words}"


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar: quoted unless it is plain, in one line of printable characters."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    escaped = in_one_line(text.replace("\\", "\\\\").replace('"', '\\"'))
    return f'"{escaped}"'


def _flow(value: Any) -> str:
    """Return a value, with nested mappings and lists, as YAML in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_scalar(str(key))}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return _scalar(value) if isinstance(value, str) else json.dumps(value)
