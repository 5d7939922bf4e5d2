"""A run as its configuration describes it: the data module and the trainer's settings, without a trainer."""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]
from lightning.pytorch.cli import LightningArgumentParser

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage.secrets import redact
from lightning_streaming.trainer.complaints import in_words
from lightning_streaming.trainer.datamodule import StreamingDataModule
from lightning_streaming.trainer.parsing import config_error_behind, look_for_modules_here
from lightning_streaming.trainer.written import secrets_in, without_lines, written_in


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRun:
    """What configuration files say of data and trainer; models and callbacks are left unread."""

    datamodule: StreamingDataModule
    trainer: Mapping[str, Any]
    """The trainer's settings as they are written; no defaults are added."""


def read_run(files: Sequence[str], changes: Mapping[str, Any]) -> WrittenRun:
    """Read the configuration files of ``lightning-streaming fit``.

    The model is not imported, and nothing is set up.

    Args:
        files: Paths; what a later one says overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``, like ``"train.shuffle_seed"``.

    Raises:
        ConfigError: A file cannot be read, or its data cannot be made; the message names the field.
    """
    look_for_modules_here()
    contents = [_read(file) for file in files]
    trainer = {name: value for content in contents for name, value in (content.get("trainer") or {}).items()}
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(StreamingDataModule, "data", subclass_mode=True)
    parser.set_defaults({"data": {"class_path": "lightning_streaming.StreamingDataModule"}})
    args = [f"--config={json.dumps({'data': content['data']})}" for content in contents if content.get("data")]
    args += [f"--data.{name}={value}" for name, value in changes.items()]
    try:
        datamodule = parser.instantiate_classes(parser.parse_args(args))["data"]
    except (ArgumentError, ValueError) as error:
        cause = config_error_behind(error)
        words = str(cause) if cause else f"{', '.join(files)}: {in_words(str(error), written_in(args), ())}"
        # Not from the error, which repeats parts of the configuration.
        raise ConfigError(redact(words, {}, secrets_in(args))) from None
    return WrittenRun(datamodule=datamodule, trainer=trainer)


def _read(file: str) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(Path(file).read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not a configuration: {without_lines(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a configuration: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file} is not a configuration, which has model:, data: and trainer:")
    inner = content.get("fit")
    return inner if isinstance(inner, Mapping) else content
