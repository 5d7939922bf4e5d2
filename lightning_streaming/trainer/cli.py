"""``lightning-streaming fit --config run.yaml``: Lightning's command line with a streaming data module."""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
from jsonargparse import DefaultHelpFormatter, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.stream import Stream
from lightning_streaming.storage import mask_url
from lightning_streaming.trainer.config import StreamingConfig
from lightning_streaming.trainer.datamodule import StreamingDataModule
from lightning_streaming.trainer.help import DESCRIPTION

_USAGE = "%(prog)s [--config FILE] [--FIELD VALUE ...]"
_STAGES = ("train", "val", "test", "predict")

_OPTIONS_TO_SAVE = ("endpoint_url", "region_name", "profile", "project")
"""Texts among storage options that are no secrets: they say where a store is, or which credentials to look up."""

_NOISE = (
    "Does not validate against any of the Union subtypes",
    "Subtypes: ",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "Given value type: ",
    "Given value: NestedArg(",
    "Given value: Namespace(",
    "Given value: {",
)
"""How jsonargparse's lines begin that repeat whole parts of the configuration, secrets too, or name its own types."""
_GIVEN_MAPPING = re.compile(r"\. Got value: (Namespace\(|NestedArg\(|\{).*")


class StreamingCLI(LightningCLI):
    """LightningCLI for :class:`StreamingDataModule` and its subclasses, and any model.

    Extend it as you would LightningCLI; examples/linked_batch_size.py gives a model the batch size of the data.

    Args:
        args: Arguments after the program's name. None: those of this process.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        _look_for_modules_here()
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        super().__init__(
            datamodule_class=StreamingDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=_SaveConfigWithoutSecrets,
            # A run that is resumed into the same directory has its configuration there already.
            save_config_kwargs={"overwrite": True},
            parser_class=_Parser,
            parser_kwargs={
                "description": DESCRIPTION,
                "formatter_class": _Formatter,
                **{subcommand: {"usage": _USAGE} for subcommand in self.subcommands()},
            },
            args=None if args is None else list(args),
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let a configuration leave ``data.class_path`` out, and explain the fields of the data."""
        super().add_core_arguments_to_parser(parser)
        parser.set_defaults({"data": {"class_path": "lightning_streaming.StreamingDataModule"}})
        for below, explains in (("", StreamingConfig), (".streams", Stream)):
            options = [f"--data.{stage}{below}.help" for stage in _STAGES]
            parser.add_argument(*options, action=_ExplainFields, dest=f"data.explain{below}", explains=explains)

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; settings that cannot work end the program with their error alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause = _config_error_behind(error)
            if cause is None:
                raise
            self._parser(self.subcommand).error(str(cause), cause)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments after the program's name. None: those of this process.
    """
    StreamingCLI(args)


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Types and defaults of options, and descriptions with their line breaks."""


class _Parser(LightningArgumentParser):
    """A parser whose errors name the field and the reason, and little else."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        lines = [line for line in message.splitlines() if not line.strip().startswith(_NOISE)]
        super().error(_GIVEN_MAPPING.sub("", "\n".join(lines)), ex)


class _ExplainFields(Action):
    """An option that prints the fields of a dataclass and ends the program.

    jsonargparse has such options of its own, but only behind ``--data.help=CLASS``.
    """

    def __init__(self, *, explains: type, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=SUPPRESS, help=f"Show the fields of {explains.__name__} and exit.", **kwargs)
        self._explains = explains

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Print, and exit with 0."""
        assert option_string is not None, "it has no positional form"
        key = option_string.removeprefix("--").removesuffix(".help")
        explanation = jsonargparse.ArgumentParser(usage=SUPPRESS, add_help=False)
        explanation.add_class_arguments(self._explains, f"{key}.NAME" if self._explains is Stream else key)
        explanation.print_help()
        parser.exit()


class _SaveConfigWithoutSecrets(SaveConfigCallback):
    """Saves the configuration with the run, less what may be a secret in storage options.

    A run started from the saved file finds its credentials where the store's client looks by itself.
    """

    def __init__(self, parser: LightningArgumentParser, config: jsonargparse.Namespace, **kwargs: Any) -> None:
        config = deepcopy(config)
        _remove_secrets(config)
        super().__init__(parser, config, **kwargs)


def _remove_secrets(config: Any) -> None:
    """Take out what may be secret in storage options and in URLs."""
    if isinstance(config, list):
        for item in config:
            _remove_secrets(item)
    elif isinstance(config, (jsonargparse.Namespace, dict)):
        items = config if isinstance(config, dict) else vars(config)
        for name, item in items.items():
            if name == "storage_options" and isinstance(item, Mapping):
                items[name] = _public_options(item)
            elif name == "remote" and isinstance(item, str):
                items[name] = mask_url(item)
            else:
                _remove_secrets(item)


def _public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, switches and texts known to be harmless, at any depth; a list may hold anything, so none is kept."""
    return {
        name: _public_options(option) if isinstance(option, Mapping) else option
        for name, option in options.items()
        if name in _OPTIONS_TO_SAVE or option is None or isinstance(option, (Mapping, bool, int, float))
    }


def _config_error_behind(error: BaseException | None) -> ConfigError | None:
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def _look_for_modules_here() -> None:
    # A console script does not look for modules where it is called; a configuration names the user's own by class_path.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


if __name__ == "__main__":
    main()
