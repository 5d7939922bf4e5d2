"""The configuration that ``init`` writes: every field that people change first, with the data's own numbers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.storage.secrets import shown_options
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.starting.look import Kind, Look, Task, told_size
from lightning_streaming.tools.starting.run_module import MODEL_OF
from lightning_streaming.units import format_bytes

RUN = "run.yaml"
_PLAIN = re.compile(r"(\.\./)*[A-Za-z_/][\w./-]*")
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_BATCH = 32
_LEAST_STEPS = 8
"""Steps that an epoch should have, for which small data gets small batches."""
_LEAST_HELD_OUT = 400
"""Samples from which a part of them can validate."""
_HELD_OUT = 5
"""Percent."""
_NO_VALIDATION = (
    "# val:",
    f"#   remote: ...                 # other data; from {_LEAST_HELD_OUT} samples on, init holds out {_HELD_OUT} %",
)
_ONCE = "an epoch reads all samples of each once"
_BY_WEIGHT = "set it for all streams to mix by weight: small ones are then repeated"
_SAVES, _MOST_STEPS = 5, 1000
"""Checkpoints of an epoch, but at least one in so many steps."""
_COMMENT_AT = 34
_Path: TypeAlias = tuple[str | int, ...]
"""Where an option stands in others: names, and numbers in lists."""


def config_text(looks: Sequence[Look], task: Task, out: Path) -> str:
    """The configuration of a first run, as YAML with comments.

    Args:
        looks: The datasets.
        task: What is trained on them.
        out: The directory that it is written to, in which the run starts.

    Raises:
        ConfigError: A name of a column or stream cannot be written as YAML.
    """
    lines = (*_head(looks), *_model(task), *_data(looks, task, out), *_trainer(looks))
    text = "".join(f"{in_one_line(line)}\n" for line in lines)
    if not _names(text, looks, task, out):
        names = ", ".join(map(ascii, [*task.columns, *_named(looks)]))
        raise ConfigError(f"the columns or streams {names} cannot be written into {RUN}", hint="rename them")
    return text


def _names(text: str, looks: Sequence[Look], task: Task, out: Path) -> bool:
    """Check that a configuration, once parsed, names these datasets and columns."""
    try:
        train = yaml.safe_load(text)["data"]["init_args"]["train"]
    except (yaml.YAMLError, LookupError, TypeError):
        return False
    remotes = {name: one["remote"] for name, one in train.get("streams", {"": train}).items()}
    expected = {"": looks[0]} if len(looks) == 1 else _named(looks)
    return train["columns"] == task.columns and remotes == {name: _remote(one, out) for name, one in expected.items()}


def _head(looks: Sequence[Look]) -> Iterator[str]:
    for look in looks:
        yield f"# {look.place.shown}: {told_size(look)}, {format_bytes(look.stored_bytes)} as stored. Columns:"
        yield "#"
        width = max(map(len, map(printable_name, look.columns)))
        yield from (f"#     {printable_name(name):<{width}}  {encoding}" for name, encoding in look.columns.items())
        yield "#"
    for command, words in (
        (f"fit --config {RUN}", "train"),
        (f"fit --config {RUN} --ckpt_path last", "resume after any stop, mid-epoch"),
        (f"inspect --config {RUN}", "show what a run reads"),
        (f"tune --config {RUN}", "measure, and recommend workers and prefetching"),
        (f"fit --config {RUN} --print_config", "print every field, explained"),
    ):
        yield f"#     lightning-streaming {command:<38} # {words}"
    yield ""
    yield _commented("seed_everything: 1", "seed of the weights; that of the order is data.train.shuffle_seed")
    yield ""


def _model(task: Task) -> Iterator[str]:
    name, argument = MODEL_OF[task.kind]
    yield "model:"
    yield _commented(f"  class_path: module.{name}", "in module.py")
    yield "  init_args:"
    yield _commented(f"    {argument}: {task.size}", _told_argument(task))
    yield "    learning_rate: 0.001"
    yield ""


def _told_argument(task: Task) -> str:
    if task.kind is Kind.TEXT:
        return "a token is a byte; with a tokenizer in module.py, its vocabulary"
    if task.kind is Kind.NUMBERS:
        return f"numbers in {', '.join(map(printable_name, task.inputs[:6]))}{', ...' * (len(task.inputs) > 6)}"
    if task.largest is None:
        return "the data has no column of labels; see module.py"
    what = "token" if task.kind is Kind.TOKENS else "label"
    return f"must be greater than every {what}; the largest one found is {task.largest}"


def _data(looks: Sequence[Look], task: Task, out: Path) -> Iterator[str]:
    samples = sum(look.samples for look in looks)
    batch = _batch_size(samples)
    yield "data:"
    yield "  class_path: module.Data"
    yield "  init_args:"
    yield _commented(
        f"    batch_size: {batch}", f"of each rank (GPU); on one, an epoch has about {_steps(samples):,} steps"
    )
    yield _commented("    num_workers: 2", "processes of each rank that read, decode and transform")
    yield "    persistent_workers: true"
    holds_out = samples >= _LEAST_HELD_OUT
    train = _stage("train", looks, task, out, f"0%:{100 - _HELD_OUT}%" if holds_out else None)
    val = _stage("val", looks, task, out, f"{100 - _HELD_OUT}%:100%") if holds_out else _NO_VALIDATION
    yield from (f"    {line}" for line in (*train, *val))
    yield ""


def _stage(stage: str, looks: Sequence[Look], task: Task, out: Path, fraction: str | None) -> Iterator[str]:
    yield f"{stage}:"
    if len(looks) == 1:
        yield from (f"  {line}" for line in _place(looks[0], out))
    else:
        yield "  streams:" if stage == "val" else _commented("  streams:", _ONCE, 30)
        for name, look in _named(looks).items():
            yield f"    {_scalar(name)}:"
            yield from (f"      {line}" for line in _place(look, out))
            if stage == "train" and look is looks[0]:
                yield _commented("      # proportion: 0.5", _BY_WEIGHT, 30)
    if fraction is not None:
        words = "a part drawn by hash, the same in every run" if stage == "train" else "the rest"
        yield _commented(f'  selection: {{fraction: "{fraction}"}}', words, 30)
    columns = ", ".join(map(_scalar, task.columns))
    yield _commented(f"  columns: [{columns}]", "only these are read; without this line, all", 30)
    if task.kind is Kind.PICTURES and not task.from_array:
        yield _commented(
            f"  decode: {{columns: {{{_scalar(task.inputs[0])}: pil}}}}",
            "or tensor, array, encoded: docs/pictures.md",
            30,
        )
    if stage == "train":
        yield _commented("  # epoch_size: 10m", "samples per epoch, if not all", 30)
    words = "limit of the cache on a node" if stage == "train" else "set the same: each stage has its own"
    yield _commented("  # cache_limit: 200gb", words, 30)


def _place(look: Look, out: Path) -> Iterator[str]:
    """Where a stream is."""
    place = look.place
    remote = f"remote: {_scalar(_remote(look, out))}"
    yield _commented(remote, "without its user, password and query: complete it", 30) if _is_cut(look) else remote
    if place.format is not None:
        yield f"format: {place.format}"
    if place.block_length is not None:
        yield f"block_length: {place.block_length}"
    if place.options:
        yield f"storage: {{options: {_flow(_named_secrets(place.options)[0])}}}"


def _remote(look: Look, out: Path) -> str:
    place = look.place
    return place.shown if place.directory is None else _path_from(out, place.directory)


def _path_from(out: Path, directory: Path) -> str:
    """A directory as a run that starts in ``out`` finds it; relative if both were typed so."""
    if directory.is_absolute() or out.is_absolute():
        return str(directory.resolve())
    # Only the way back from OUT is worked out: ``..`` within what was typed may lead through a symlink.
    return str(Path(os.path.relpath(Path.cwd(), out.resolve()), directory))


def told_secrets(looks: Sequence[Look]) -> Iterator[str]:
    """What must be set, or completed, before the configuration can be run: it holds no secrets."""
    names = dict.fromkeys(name for look in looks for name in _named_secrets(look.place.options)[1])
    if names:
        yield f"{RUN} takes secrets from the environment: set {', '.join(names)} before"
    for shown in dict.fromkeys(look.place.shown for look in looks if _is_cut(look)):
        yield f"{RUN} has {shown} without its user, password and query, which may be secret: complete it there"


def _is_cut(look: Look) -> bool:
    """Whether its URL is not shown as a whole."""
    return look.place.directory is None and look.place.shown != look.place.location


def _named_secrets(options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Storage options, in which environment variables stand for what may be secret; and the names of these."""
    shown = shown_options(options)
    paths = list(_hidden(shown))
    short = [_variable(path[-1:] if isinstance(path[-1], str) else path[-2:]) for path in paths]
    names = dict(zip(paths, short, strict=True))
    for path, name in names.items():
        if short.count(name) > 1:
            names[path] = _variable(path)
    return _with_variables(shown, names, ()), list(names.values())


def _hidden(shown: Any, path: _Path = ()) -> Iterator[_Path]:
    """Where texts that are not shown stand."""
    if shown == "***":
        yield path
    for key, one in _items(shown):
        yield from _hidden(one, (*path, key))


def _with_variables(shown: Any, names: Mapping[_Path, str], path: _Path) -> Any:
    if path in names:
        return f"${{{names[path]}}}"
    changed = {key: _with_variables(one, names, (*path, key)) for key, one in _items(shown)}
    if isinstance(shown, Mapping):
        return changed
    return list(changed.values()) if isinstance(shown, list) else shown


def _items(shown: Any) -> Iterable[tuple[str | int, Any]]:
    if isinstance(shown, Mapping):
        return shown.items()
    return enumerate(shown, 1) if isinstance(shown, list) else ()


def _variable(path: _Path) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", "_".join(map(str, path)).upper())


def _named(looks: Sequence[Look]) -> dict[str, Look]:
    """Streams by the last part of their paths, all different."""
    named: dict[str, Look] = {}
    for look in looks:
        place = look.place
        path = urlsplit(place.shown).path if place.directory is None else place.directory.resolve().as_posix()
        name = PurePosixPath(path).name or "data"
        numbered = (f"{name}_{number}" for number in count(2))
        named[next(one for one in chain([name], numbered) if one not in named)] = look
    return named


def _trainer(looks: Sequence[Look]) -> Iterator[str]:
    steps = _steps(sum(look.samples for look in looks))
    saves = max(1, min(_MOST_STEPS, steps // _SAVES))
    yield "trainer:"
    yield _commented("  max_epochs: 1", "or max_steps, max_time")
    yield _commented("  accelerator: auto", "a GPU where there is one")
    yield _commented("  devices: auto", "or a number of them")
    yield f"  log_every_n_steps: {max(1, min(50, steps // 10))}"
    yield "  logger:"
    yield "    class_path: lightning.pytorch.loggers.CSVLogger"
    yield "    init_args: {save_dir: ., name: logs}"
    yield "  callbacks:"
    yield "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint"
    yield f"      init_args: {{dirpath: checkpoints, every_n_train_steps: {saves}, save_last: true}}"
    yield _commented("    - class_path: lightning_streaming.StreamingMonitor", "logs how long steps wait for data", 60)


def _batch_size(samples: int) -> int:
    return max(1, min(_BATCH, samples // _LEAST_STEPS))


def _steps(samples: int) -> int:
    """Steps of an epoch on one rank, about, as what is held out is drawn by hash."""
    trained = samples * (100 - _HELD_OUT) // 100 if samples >= _LEAST_HELD_OUT else samples
    return max(1, -(-trained // _batch_size(samples)))


def _commented(line: str, words: str, at: int = _COMMENT_AT) -> str:
    return f"{line:<{at}}  # {words}"


def _scalar(text: str) -> str:
    """Return a text as YAML: as it is where it is plain, else quoted, in one line of printable characters."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    escaped = in_one_line(text.replace("\\", "\\\\").replace('"', '\\"'))
    return f'"{escaped}"'


def _flow(value: Any) -> str:
    """Return plain values, and mappings and lists of them, as YAML in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_scalar(str(key))}: {_flow(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return _scalar(value) if isinstance(value, str) else json.dumps(value)
