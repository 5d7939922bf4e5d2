"""``lightning-streaming fit --config run.yaml``: Lightning's command line with a streaming data module."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonargparse
from jsonargparse import DefaultHelpFormatter, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.stream import Stream
from lightning_streaming.storage.options import shown_options, without_hidden
from lightning_streaming.storage.secrets import redact
from lightning_streaming.trainer.comments import with_comments
from lightning_streaming.trainer.complaints import words_of_parsing
from lightning_streaming.trainer.config import StreamingConfig
from lightning_streaming.trainer.datamodule import StreamingDataModule
from lightning_streaming.trainer.failures import Failure, failure_of
from lightning_streaming.trainer.help import DESCRIPTION
from lightning_streaming.trainer.parsing import config_error_behind, error_of_user_behind, look_for_modules_here
from lightning_streaming.trainer.shown import shown
from lightning_streaming.trainer.stages import STAGES, named_error
from lightning_streaming.trainer.written import secrets_in, written_in

_USAGE = "%(prog)s [--config FILE] [--FIELD VALUE ...]"
_PRINT = "--print_config"
_DEBUG = "--debug"


class StreamingCLI(LightningCLI):
    """LightningCLI for :class:`StreamingDataModule` and its subclasses, and any model.

    Extend it as you would LightningCLI; examples/linked_batch_size.py gives a model the batch size of the data.

    Args:
        args: Arguments after the program's name. None: those of this process.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        look_for_modules_here()
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
        parser.add_argument(_DEBUG, action=_KeepTracebacks, dest="debug")
        for below, explains in (("", StreamingConfig), (".streams", Stream)):
            options = [f"--data.{stage}{below}.help" for stage in STAGES]
            parser.add_argument(*options, action=_ExplainFields, dest=f"data.explain{below}", explains=explains)

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; settings that cannot work end the program with their error alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            failed = config_error_behind(error) or error_of_user_behind(error)
        else:
            return
        if isinstance(failed, ConfigError):
            self._parser(self.subcommand).error(named_error(self._get(self.config, "data"), failed), failed)
        raise failed


def main(args: Sequence[str] | None = None) -> Failure | None:
    """Run the command line.

    Args:
        args: Arguments after the program's name. None: those of this process.

    Returns:
        What went wrong, if that can be said in a paragraph; None if all went well.

    Raises:
        Exception: What came out of the user's own code, or was not foreseen; with ``--debug`` whatever went wrong.
    """
    try:
        StreamingCLI(args)
    except Exception as error:
        given = sys.argv[1:] if args is None else list(args)
        checkpoints = [one.value for one in written_in(given) if one.name == "ckpt_path"]
        failure = None if _DEBUG in given else failure_of(error, checkpoints[-1] if checkpoints else None)
        if failure is None:
            raise
        rank = int(getattr(rank_zero_only, "rank", 0) or 0)
        return failure if rank == 0 else failure._replace(words=f"rank {rank}: {failure.words}")
    return None


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Types and defaults of options, and descriptions with their line breaks."""


class _Parser(LightningArgumentParser):
    """A parser whose errors name the field and the reason, and whose printed configuration explains itself."""

    _given: Sequence[str] = ()

    def parse_args(self, args: Any = None, *others: Any, **settings: Any) -> Any:
        """Parse, and remember what was given, for the words of an error."""
        given = sys.argv[1:] if args is None else list(args)
        self._given = [_PRINT if arg == f"{_PRINT}=comments" else arg for arg in given]
        return super().parse_args(self._given, *others, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program, saying what is wrong; a parser within this one raises instead."""
        if self.exit_on_error:
            given = _outermost(self)._given
            message = words_of_parsing(message, given, _options(_outermost(self)), ex)
            message = redact(message, {}, secrets_in(given))
        super().error(message, ex)

    def dump(self, namespace: jsonargparse.Namespace, *args: Any, **settings: Any) -> str:
        """The configuration as YAML, without secrets; where ``--print_config`` asks, with a comment on every field."""
        text: str = super().dump(shown(namespace), *args, **settings)
        return with_comments(text) if hasattr(_outermost(self), "print_config") else text


def _options(parser: ArgumentParser) -> list[str]:
    """The long options of a parser and its subcommands, without dashes."""
    found = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    inner = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return found + [option for parsers in inner for one in parsers.values() for option in _options(one)]


def _outermost(parser: Any) -> _Parser:
    """The parser of the whole command line, which has one for each subcommand."""
    while hasattr(parser, "parent_parser"):
        parser = parser.parent_parser
    outermost: _Parser = parser
    return outermost


class _KeepTracebacks(Action):
    """An option that is looked for before there is a parser, and only has to be known to it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=SUPPRESS, help="Show whole tracebacks of errors.", **kwargs)

    def __call__(self, *_: Any) -> None:
        """Nothing is left to do."""


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
        public = shown(config, hide=lambda options: without_hidden(shown_options(options)))
        super().__init__(parser, public, **kwargs)
