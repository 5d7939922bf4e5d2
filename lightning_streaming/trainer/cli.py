"""``lightning-streaming fit --config run.yaml``: Lightning's command line with a streaming data module.

``StreamingCLI`` and ``main`` run it; ``read_config_files`` reads the same files for the tools, without model and
trainer; the last part adds the comments of ``--print_config``.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
import traceback
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from inspect import getmro, isclass
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import docstring_parser
import jsonargparse
import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionConfigFile, DefaultHelpFormatter, set_parsing_settings  # type: ignore[attr-defined]
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.escaping import shell_word
from lightning_streaming.options.groups import OptionGroup
from lightning_streaming.resume import lightning_checkpoint
from lightning_streaming.resume.state import CALLBACK_KEY
from lightning_streaming.storage.secrets import redact, shown_options, without_hidden
from lightning_streaming.terminal import report_error
from lightning_streaming.trainer import COMMON_OPTIONS, DESCRIPTION, SUBCOMMANDS
from lightning_streaming.trainer.cli_errors import (
    CliFailure,
    explain_failure,
    fields_in,
    locate_error,
    null_argument,
    parse_error,
    secrets_in,
    with_files,
    wrong_field,
    yaml_error_text,
)
from lightning_streaming.trainer.config import StreamingConfig, shown
from lightning_streaming.trainer.datamodule import STAGES, StreamingDataModule
from lightning_streaming.trainer.lightning_internals import existing_checkpoints, known_checkpoints


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes of options that a type of a field is made of."""
    # In Python 3.10 list[str] counts as a class.
    if isclass(hint) and not get_args(hint) and issubclass(hint, OptionGroup | Stream):
        yield hint
    for part in get_args(hint):
        yield from _classes_in(part)


_FIELDS = {name: (hint, kind) for name, hint in get_type_hints(StreamingConfig).items() for kind in _classes_in(hint)}
_NAMED = {name: kind for name, (hint, kind) in _FIELDS.items() if kind not in (hint, *get_args(hint))}
"""Fields that map names to objects, and the classes of these."""
_GROUPS = {name: kind for name, (_, kind) in _FIELDS.items() if name not in _NAMED}
"""Fields that are groups of options, and their classes."""
_NESTED = {
    group: {name: kind for name, hint in get_type_hints(group).items() for kind in _classes_in(hint)}
    for group in _GROUPS.values()
}
"""Fields of groups that are groups themselves, like ``packing.tokenize``, and their classes."""
_USAGE = "%(prog)s [--config FILE] [--FIELD VALUE ...]"
_PRINT = "--print_config"
_DEBUG = "--debug"
_SAVE_REGULARLY = (
    "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint --trainer.callbacks.every_n_train_steps=100"
)


class StreamingCLI(LightningCLI):
    """LightningCLI for :class:`StreamingDataModule` and its subclasses, and any model.

    Extend it as you would LightningCLI; examples/linked_batch_size.py gives a model the batch size of the data.

    Args:
        args: Arguments after the program's name. None: those of this process.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        _look_for_modules_here()
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        try:
            self._run(args)
        except SystemExit as ended:
            if not isinstance(ended.__context__, KeyboardInterrupt):
                raise
            # Lightning has caught Ctrl-C, let its callbacks save, and ends as if something had failed.
            _print_resume_hint(self.trainer)
            raise SystemExit(128 + signal.SIGINT) from None

    def _run(self, args: Sequence[str] | None) -> None:
        super().__init__(
            datamodule_class=StreamingDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=_SaveConfigWithoutSecrets,
            # A run that is resumed into the same directory has its configuration there already.
            save_config_kwargs={"overwrite": True},
            parser_class=_StreamingParser,
            parser_kwargs={
                "prog": "lightning-streaming",  # also where it is run as a module
                "description": DESCRIPTION,
                **{
                    name: {"usage": _USAGE, "description": f"{SUBCOMMANDS[name].capitalize()}."}
                    for name in self.subcommands()
                },
            },
            args=None if args is None else list(args),
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let a configuration leave ``data.class_path`` out, and explain the fields of the data."""
        super().add_core_arguments_to_parser(parser)
        parser.set_defaults({"data": {"class_path": "lightning_streaming.StreamingDataModule"}})
        parser.add_argument(_DEBUG, action=_KeepTracebacks, dest="debug")
        parser.add_argument("--help_advanced", action=_AdvancedHelp, dest="help_advanced")
        nested = {f"{name}.{field}": of for name, group in _GROUPS.items() for field, of in _NESTED[group].items()}
        for below, explains in {"": StreamingConfig, **_NAMED, **_GROUPS, **nested}.items():
            options = [f"--data.{stage}.{below}".rstrip(".") + ".help" for stage in STAGES]
            parser.add_argument(*options, action=_ExplainFields, dest=f"data.explain.{below}", explains=explains)

    def instantiate_classes(self) -> None:
        """Create model, data and trainer; invalid settings end the program with their error alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            failed = _config_error_behind(error) or _user_error_behind(error)
        else:
            return
        if isinstance(failed, ConfigError):
            parser, message = _outermost(self.parser), locate_error(self._get(self.config, "data"), failed)
            # jsonargparse accepts any value of a group's field: a group may also be a mapping.
            wrong = wrong_field(parser.given, _options(parser), read_files=False)
            parser.refuse(wrong or with_files(message, parser.given), failed)
        raise failed

    def before_fit(self) -> None:
        """Log that the run starts from scratch where an earlier one has saved a checkpoint."""
        if self._get(self.config_init, "ckpt_path") is None:
            _log_earlier_checkpoint(self.trainer)


def main(args: Sequence[str] | None = None) -> CliFailure | None:
    """Run the command line.

    Args:
        args: Arguments after the program's name. None: those of this process.

    Returns:
        The failure, if a paragraph explains it; None if the run succeeded.

    Raises:
        Exception: An error of the user's own code, or an unexpected one; with ``--debug`` any error.
    """
    try:
        StreamingCLI(args)
    except Exception as error:
        given = sys.argv[1:] if args is None else list(args)
        checkpoints = [value for name, value in fields_in(given) if name == "ckpt_path"]
        failure = None if _DEBUG in given else explain_failure(error, checkpoints[-1] if checkpoints else None)
        if failure is None:
            raise
        rank = int(getattr(rank_zero_only, "rank", 0) or 0)
        return failure if rank == 0 else failure._replace(message=f"rank {rank}: {failure.message}")
    return None


def _print_resume_hint(trainer: Trainer) -> None:
    """Print the step in which a run was interrupted, and the newest checkpoint that can resume it, to stderr."""
    if not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
        return
    newest = _newest_checkpoint(known_checkpoints(trainer))
    hint = f"no checkpoint of it is on this machine; {_SAVE_REGULARLY} saves them"
    if newest is not None:
        path, step = newest
        hint = f"resume from step {step} with --ckpt_path {shell_word(str(path))}"
    sys.stderr.write(f"lightning-streaming fit: interrupted in step {trainer.global_step}; {hint}\n")


@rank_zero_only
def _log_earlier_checkpoint(trainer: Trainer) -> None:
    newest = _newest_checkpoint(existing_checkpoints(trainer))
    if newest is not None:
        path, step = newest
        rank_zero_info(
            f"This run starts from scratch, and a checkpoint of step {step} exists: --ckpt_path "
            f"{shell_word(str(path))} resumes from there. Once this run saves, --ckpt_path last is its checkpoint."
        )


def _newest_checkpoint(paths: Iterable[Path]) -> tuple[Path, int] | None:
    """Return the most recently written checkpoint that holds a position in the data, and its step."""

    def modified(path: Path) -> int:
        with suppress(OSError):  # another run has just removed it
            return path.stat().st_mtime_ns
        return 0

    for path in sorted({*paths}, key=modified, reverse=True):
        file = path / lightning_checkpoint.SHARDED_META if path.is_dir() else path
        with suppress(StateError, OSError, LookupError, TypeError):  # any other file; loading it would report why
            content = lightning_checkpoint.read_plain_values(file)
            if content["callbacks"][CALLBACK_KEY]["loaders"]:
                return path, int(content["global_step"])
    return None


def _config_error_behind(error: BaseException | None) -> ConfigError | None:
    """Return the error of this package that jsonargparse has wrapped into its own; None if there is none."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def _user_error_behind(error: BaseException) -> BaseException:
    """Return the error that jsonargparse has wrapped into its own, whose message repeats the configuration."""
    while type(error) is ValueError and error.__cause__ is not None and _raised_by_jsonargparse(error):
        error = error.__cause__
    return error


def _raised_by_jsonargparse(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "jsonargparse" in Path(frames[-1].filename).parts


def _look_for_modules_here() -> None:
    """Add the current directory to the import path: a configuration names the user's modules by class_path.

    Python does not add it for a console script.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


_TITLES = {
    "trainer": "trainer",
    "model": "model",
    "data": "data",
    "optimizer": "optimizer, for models that leave it to the command line",
    "lr_scheduler": "learning rate scheduler, for models that leave it to the command line",
}
"""Titles of the groups of options, instead of those from docstrings."""


def _without_markup(words: str) -> str:
    """Return a docstring's text without roles and backticks."""
    return re.sub(r"(?::\w+:`~?(?:[\w.]*\.)?|`+)([^`]*)`+_?", r"\1", words)


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Types and defaults of options, and descriptions with their line breaks."""

    def _expand_help(self, action: Action) -> str:
        return _without_markup(re.sub(r"\s*Default: `[^`]*`+\.", "", super()._expand_help(action)))


class _FieldParser(LightningArgumentParser):
    """Parser that also sets one entry of a mapping in a named object, like ``schedule.NAME.mix.STREAM``."""

    def parse_object(
        self, obj: Any, namespace: jsonargparse.Namespace | None = None, *others: Any, **settings: Any
    ) -> Any:
        """Parse the fields of an object, which override those of ``namespace``.

        jsonargparse takes the dots of such an argument for fields of objects, and then refuses the mapping.
        """
        kinds = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
        for name, value in vars(obj).items() if isinstance(obj, jsonargparse.Namespace) else ():
            if isinstance(value, jsonargparse.Namespace) and _is_plain_mapping(kinds.get(name)):
                before = None if namespace is None else namespace.get(name)
                obj[name] = {**(before if isinstance(before, Mapping) else {}), **value.as_dict()}
        return super().parse_object(obj, namespace, *others, **settings)


def _is_plain_mapping(kind: Any) -> bool:
    """Return whether a type takes mappings of any keys, and no object whose fields they might be."""
    kinds = [*get_args(kind), kind]
    return any(get_origin(inner) is Mapping for inner in kinds) and not any(map(is_dataclass, kinds))


class _StreamingParser(_FieldParser):
    """A parser whose errors name the field and the reason, and whose printed configuration explains itself."""

    given: Sequence[str] = ()
    """Arguments as typed; set on the parser of the whole command line."""
    help_is_advanced = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        usage = {} if "prog" in settings else {"usage": SUPPRESS}  # for the help of a class
        super().__init__(*args, **{"formatter_class": _Formatter, **usage, **settings})

    def format_help(self, *formatter: Any) -> str:
        """Return the help: of a subcommand the common options, unless all are requested."""
        if hasattr(self, "parent_parser") and not self.help_is_advanced:
            return f"{self.format_usage()}\n{self.description}\n\n{COMMON_OPTIONS}"
        if self.help_is_advanced:
            self._action_groups[-1].title = "checkpoint"
        for name, group in (self.groups or {}).items():
            group.title = _without_markup(_TITLES.get(name, str(group.title)))
        text: str = super().format_help(*formatter)
        return text

    def parse_args(self, args: Any = None, *others: Any, **settings: Any) -> Any:
        """Parse, and keep the arguments for the message of an error."""
        given = sys.argv[1:] if args is None else list(args)
        self.given = [_PRINT if arg == f"{_PRINT}=comments" else arg for arg in given]
        if not hasattr(self, "parent_parser"):
            for arg in self.given:  # also of an object by any name, which no option of the parser can have
                _explain(self, arg)
            if null := null_argument(self.given):
                self.refuse(null, None)
        return super().parse_args(self.given, *others, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and end the program; a parser within this one raises instead.

        Raises:
            ConfigError: With ``--debug``, instead of ending the program.
        """
        if not self.exit_on_error:
            super().error(message, ex)
        outermost = _outermost(self)
        outermost.refuse(parse_error(message, outermost.given, _options(outermost), ex), ex)

    def refuse(self, words: str, error: BaseException | None) -> NoReturn:
        """End the program with this message; with ``--debug`` raise it with the traceback of ``error``."""
        words = redact(words, {}, secrets_in(self.given))
        if _DEBUG in self.given:
            while error is not None and error.__cause__ is not None:
                error = error.__cause__
            # Not from the error itself, whose words repeat the configuration, secrets and all.
            raise ConfigError(message=words).with_traceback(None if error is None else error.__traceback__) from None
        report_error(" ".join([self.prog, *[arg for arg in self.given if arg in SUBCOMMANDS][:1]]), words)
        self.exit(2)

    def dump(self, namespace: jsonargparse.Namespace, *args: Any, **settings: Any) -> str:
        """Return the configuration as YAML without secrets, with a comment on every field for ``--print_config``."""
        text: str = super().dump(shown(namespace), *args, **settings)
        return _with_comments(text) if hasattr(_outermost(self), "print_config") else text


def _options(parser: ArgumentParser) -> dict[str, Any]:
    """Return the long options of a parser and its subcommands, without dashes, and their types, or Any."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        for one in action.choices.values() if isinstance(action.choices, dict) else ():
            found |= _options(one)
        kind = getattr(action, "_typehint", Any)
        found |= {option.removeprefix("--"): kind for option in action.option_strings}
    return found


def _outermost(parser: Any) -> _StreamingParser:
    """Return the parser of the whole command line, which has one for each subcommand."""
    while hasattr(parser, "parent_parser"):
        parser = parser.parent_parser
    outermost: _StreamingParser = parser
    return outermost


class _KeepTracebacks(Action):
    """Option that is read before the parser exists, and registered only to be accepted."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=SUPPRESS, help="Show full tracebacks of errors.", **kwargs)

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _AdvancedHelp(Action):
    """Option that prints all options and ends the program."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=SUPPRESS, help="Show all options and exit.", **kwargs)

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        """Print, and exit with 0."""
        vars(parser)["help_is_advanced"] = True
        parser.print_help()
        parser.exit()


class _ExplainFields(Action):
    """Option that prints the fields of a dataclass and ends the program; jsonargparse has them only for classes."""

    def __init__(self, *, explains: type, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=SUPPRESS, help=f"Show the fields of {explains.__name__} and exit.", **kwargs)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Print, and exit with 0."""
        assert option_string is not None, "it has no positional form"
        _explain(parser, option_string)


def _explain(parser: ArgumentParser, option: str) -> None:
    """Print the fields that ``--data.STAGE.FIELD.help`` stands for, and exit with 0; do nothing for other options."""
    key = option.removeprefix("--").removesuffix(".help")
    if (kind := _class_at(key)) is None:
        key = f"{key}.NAME"
        kind = _class_at(key)
    if kind is not None and option.endswith(".help"):
        explanation = jsonargparse.ArgumentParser(usage=SUPPRESS, add_help=False, formatter_class=_Formatter)
        explanation.add_class_arguments(kind, key)
        explanation.print_help()
        parser.exit()


class _SaveConfigWithoutSecrets(SaveConfigCallback):
    """Callback that saves the configuration with the run, without possible secrets of storage options.

    A run that starts from the saved file uses the default credentials of the store's client.
    """

    def __init__(self, parser: LightningArgumentParser, config: jsonargparse.Namespace, **kwargs: Any) -> None:
        public = shown(config, hide=lambda options: without_hidden(shown_options(options)))
        super().__init__(parser, public, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRun:
    """Data and trainer of configuration files; models and callbacks are not read."""

    datamodule: StreamingDataModule
    trainer: Mapping[str, Any]
    """Settings of the trainer in the files, without defaults."""


def read_config_files(files: Sequence[str], changes: Mapping[str, Any]) -> WrittenRun:
    """Read the configuration files of ``lightning-streaming fit``.

    The model is not imported, and nothing is set up.

    Args:
        files: Paths; a later file overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``, like ``"train.shuffle_seed"``.

    Raises:
        ConfigError: A file cannot be read, or its data is invalid; the message names the field.
    """
    _look_for_modules_here()
    contents = [_read(file) for file in files]
    trainer = {
        name: value
        for file, content in zip(files, contents, strict=True)
        for name, value in _trainer_in(file, content).items()
    }
    parser = _FieldParser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(StreamingDataModule, "data", subclass_mode=True)
    parser.set_defaults({"data": {"class_path": "lightning_streaming.StreamingDataModule"}})
    args = [f"--config={json.dumps({'data': content['data']})}" for content in contents if content.get("data")]
    args += [f"--data.{name}={value}" for name, value in changes.items()]
    parsed: Any = {}
    try:
        parsed = parser.parse_args(args)
        datamodule = parser.instantiate_classes(parsed)["data"]
    except (ArgumentError, ValueError) as error:
        cause = _config_error_behind(error)
        words = locate_error(parsed.get("data"), cause) if cause else parse_error(str(error), args)
        where = "" if changes else f"{', '.join(files)}: "
        option, stream = (cause.option, cause.stream) if cause else (None, None)
        # Not from the error, which repeats parts of the configuration.
        message = redact(f"{where}{words}", {}, secrets_in(args))
        raise ConfigError(message=message, option=option, stream=stream, path=", ".join(files) or None) from None
    return WrittenRun(datamodule=datamodule, trainer=trainer)


def _trainer_in(file: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the trainer, and check that those which count steps and ranks are numbers."""
    trainer = content.get("trainer") or {}
    if not isinstance(trainer, Mapping):
        raise ConfigError(
            f"{file}: trainer must be settings by name, but is a {type(trainer).__name__}", option="trainer", path=file
        )
    for name in ("num_nodes", "max_steps", "max_epochs", "limit_train_batches"):
        value = trainer.get(name)
        is_number = isinstance(value, int | float) and abs(value) < math.inf
        if not (value is None or is_number or (name == "num_nodes" and str(value).isdecimal())):
            raise ConfigError(
                f"{file}: trainer.{name} must be a number, but is {value!r:.80}", option=f"trainer.{name}", path=file
            )
    return trainer


def _read(file: str) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(Path(file).read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}", path=file) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not a configuration: {yaml_error_text(error)}", path=file) from None
    except RecursionError:
        raise ConfigError(f"{file} is not a configuration: it is nested too deeply", path=file) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a configuration: {error}", path=file) from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file} is not a configuration, which has model:, data: and trainer:", path=file)
    inner = content.get("fit")
    return inner if isinstance(inner, Mapping) else content


_WIDTH = 120
_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s:#-][^:]*):(?P<value>.*)")
_STAGE = re.compile(rf"data\.({'|'.join(STAGES)})(?=\.|$)")
_TOP = {
    "seed_everything": "Seed of weights and all else that is random; the order of the data has its own, shuffle_seed.",
    "trainer": "Arguments of lightning.pytorch.Trainer.",
    "model": "Your LightningModule; class_path names it, init_args are its arguments.",
    "data": "The data module; class_path may be left out, or name your own.",
    "optimizer": "Only for models that leave it to the command line.",
    "lr_scheduler": "Only for models that leave it to the command line.",
    "ckpt_path": 'Checkpoint to resume from, mid-epoch; "last" is the newest, or none yet.',
    "weights_only": "Whether a checkpoint may hold plain values and tensors alone. null: as torch decides.",
}


def _with_comments(text: str) -> str:
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
    """Return the meaning of a field; a field that occurs several times is explained at the first of them."""
    if not parent:
        return _TOP.get(key, "")
    kind = _class_at(parent)
    if kind is None:
        return _of_class(_find(classes[parent])).get(key, "") if parent in classes else ""
    if kind is not StreamingConfig:
        if f"{kind.__name__}.{key}" in explained:
            return ""
        explained.add(f"{kind.__name__}.{key}")
    return _of_class(kind).get(key, "")


def _class_at(name: str) -> type | None:
    """Return the class of a stage, or of an object in it; None for other fields."""
    stage = _STAGE.match(name)
    kind: type | None = None if stage is None else StreamingConfig
    parts = iter(name[stage.end() :].split(".")[1:] if stage else ())
    for part in parts:
        kind = _NESTED.get(kind, {}).get(part, _GROUPS.get(part)) if kind else None
        if part in _NAMED:
            kind = None if next(parts, None) is None else _NAMED[part]
    return kind


def _find(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    return Trainer if name == "Trainer" else getattr(import_module(module), name)


def _of_class(documented: Any) -> dict[str, str]:
    """Return the description of each argument of a class, from its docstring or that of a base."""
    texts: dict[str, str] = {}
    classes: list[Any] = list(reversed(getmro(documented)))
    for one in classes:
        for text in (one.__doc__, one.__init__.__doc__):
            params = docstring_parser.parse(text or "").params
            texts |= {param.arg_name: _as_yaml(param.description or "") for param in params}
    return texts


def _as_yaml(words: str) -> str:
    """Return a description without markup, and with null for None."""
    return re.sub(r"\bNone\b", "null", " ".join(_without_markup(words).split()))
