"""Errors of the command line: which field of a configuration is wrong, why a run failed, and what may be a secret.

``parse_error`` and ``locate_error`` are about configurations, ``explain_failure`` about runs, and ``fields_in`` and
``secrets_in`` read the arguments and the files that they name.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import site
import sys
import sysconfig
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import jsonargparse
import lightning
import torch
import yaml  # type: ignore[import-untyped]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_streaming import errors
from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError, FormatError, IntegrityError, StateMismatchError, StreamingError
from lightning_streaming.options.groups import OptionGroup
from lightning_streaming.options.schedule import MixturePhase
from lightning_streaming.options.storage import JoinConfig, StorageConfig
from lightning_streaming.signatures import argument_hint
from lightning_streaming.storage.secrets import is_secret_name, secrets_of, secrets_of_options
from lightning_streaming.trainer import SUBCOMMANDS
from lightning_streaming.trainer.config import StreamingConfig, config_of
from lightning_streaming.trainer.datamodule import STAGES, StreamingDataModule

# Fields of a configuration -------------------------------------------------------------------------------------------

_BASES: Mapping[str, type] = {"model": LightningModule, "data": LightningDataModule}
_DEFAULTS: Mapping[str, type] = {"data": StreamingDataModule, "trainer": Trainer}
_ABOUT_CLASSES = ("class_path", "init_args", "dict_kwargs")
_TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
}
_STREAM = '{remote: "s3://corpus/code"}'
_NAMED_EXAMPLES: Mapping[type, tuple[str, str]] = {
    Stream: ("code", _STREAM),
    MixturePhase: ("broad", MixturePhase.example),
    JoinConfig: ("captions", JoinConfig.example),
}
"""Classes of objects that a configuration maps names to; a name and the fields of each, for messages."""
_NOT_REASONS = (
    *("Subtypes: ", "Errors:", "Given value", "Does not validate", "Problem with given class_path"),
    *("Expected a <class 'NoneType'>", "Expected a <class 'collections.abc.Mapping'>"),
)
"""Beginnings of lines of jsonargparse that repeat the configuration, secrets included, or name only internal types."""
_VALUE = re.compile(r"\. Got value: (Namespace\(|NestedArg\(|\{|\[).*")
"""A value in a message that may be a part of the configuration, secrets included."""
_STAGE_FIELD = re.compile(rf"data\.({'|'.join(STAGES)})\.")
_NAMED_OBJECT = re.compile(r"\.(streams|schedule|join)\.[^.]+$")


def parse_error(
    message: str, args: Sequence[str], options: Mapping[str, Any] = {}, error: BaseException | None = None
) -> str:
    """Return a message that names the wrong field, for arguments and files that jsonargparse has refused.

    jsonargparse names fields only within text, and repeats whole parts of the configuration. So the fields are checked
    again one by one, with the signatures of their classes.

    Args:
        message: The message of jsonargparse; shown, without possible secrets, if no single field is wrong.
        args: The arguments.
        options: Types of the options of the command line, by dotted name; with them, a model is required.
        error: The error of the message.

    Raises:
        Exception: An error that a module of the user raises while it is imported.
    """
    while error is not None and not isinstance(error, yaml.YAMLError):
        error = error.__cause__ or error.__context__
    if error is not None:
        return f"{' or '.join(_files_in(args)) or 'an argument'} is not YAML: {yaml_error_text(error)}"
    fault = wrong_field(args, options)
    if fault is not None:
        return fault
    if re.search(r"are required: [\w., ]*\bmodel\b", message):
        return "there is no model; name one in a file for --config, or by --model=my_project.MyModel"
    # One line for each level of the configuration, and then the reasons.
    lines = [_VALUE.sub("", line.strip(" -")) for line in message.splitlines()]
    keys = [line.split('"')[1] for line in lines if line.startswith("Parser key")]
    reasons = [line for line in lines if line and not line.startswith(("Parser key", *_NOT_REASONS))]
    return with_files(f"{'.'.join(keys)}: {'; '.join(reasons)}" if keys else "\n".join(reasons), args)


def wrong_field(args: Sequence[str], options: Mapping[str, Any], *, read_files: bool = True) -> str | None:
    """Return an error for the first wrong field in arguments and in the files that they name; None if there is none.

    Args:
        args: The arguments.
        options: Types of the options of the command line, by dotted name.
        read_files: Whether to check the files, too.
    """
    classes = {name.removesuffix(".class_path"): value for name, value in fields_in(args) if _is_class_path(value)}
    for option, value in _options_in(args):
        if option not in _CONFIG:
            content, prefix = _parsed(value), ""
            for key in reversed(_short(option.removeprefix("--")).split(".")):
                content = {key: content}
        elif read_files:
            content, prefix = _content(value), f"{value}: " if _is_file(value) else ""
            if not isinstance(content, Mapping | None):
                is_not = "is not a configuration, which has model:, data: and trainer:"
                return f"{value} {is_not}" if prefix else f"there is no file {value} for {option}"
        else:
            continue
        fault = next(_faults_of_run(content or {}, classes, options), None)
        if fault is not None:
            return prefix + fault
    return None


def null_argument(args: Sequence[str]) -> str | None:
    """Return an error for the first field of a stage that an argument sets to null; None if there is none.

    jsonargparse passes such a field on as text: "None" would become a directory or a column. Objects by name, like a
    stream, are left to :func:`wrong_field`: a file cannot set them to null either.
    """
    for argument, value in _named_values(args):
        for name, inner in _flat(_parsed(value), argument) if argument else ():
            is_null = inner in (None, "null", "Null", "NULL", "~")
            if is_null and _STAGE_FIELD.match(name) and not _NAMED_OBJECT.search(name):
                return f"{name} cannot be null on the command line; leave it out, or set it to null in a file"
    return None


def with_files(message: str, args: Sequence[str]) -> str:
    """Prefix an error with the configuration files, if the arguments set no field of model, data or trainer."""
    files = (
        []
        if any(name.partition(".")[0] in ("model", *_DEFAULTS) for name, _ in _named_values(args))
        else _files_in(args)
    )
    return f"{', '.join(files)}: {message}" if files else message


def locate_error(data: Any, error: ConfigError) -> str:
    """Return the message of an error, with the stage or stream that it is about, if creating that raises one again.

    Args:
        data: The configuration of the data module, as it was parsed.
        error: The error that creating the data module raised.
    """
    plain = _plain(data)
    arguments = plain.get("init_args") if isinstance(plain, Mapping) else None
    if not isinstance(arguments, Mapping):
        return str(error)
    for stage in STAGES:
        config = arguments.get(stage)
        if not isinstance(config, Mapping):
            continue
        streams = config.get("streams") or {}
        others = f" (the streams are {', '.join(streams)})" if len(streams) > 1 else ""
        parts: list[tuple[str, Callable[[], object], str]] = [
            (f"data.{stage}.streams.{name}", partial(Stream, **stream), others) for name, stream in streams.items()
        ]
        without_objects = {name: value for name, value in config.items() if name != "sequence"}
        parts.append((f"data.{stage}", partial(config_of, without_objects), ""))
        for name, create, hint in parts:
            try:
                create()
            except (ConfigError, TypeError) as refused:  # noqa: PERF203
                return f"{name}: {refused}{hint}"
    return str(error)


def _plain(value: Any) -> Any:
    """Return namespaces as mappings, and objects of a class as mappings of their arguments, except the outermost."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, jsonargparse.Namespace):
        value = vars(value)
    if not isinstance(value, Mapping):
        return value
    fields = {name: _plain(inner) for name, inner in value.items()}
    is_object = {
        name: isinstance(one, Mapping) and one.keys() == {"class_path", "init_args"} for name, one in fields.items()
    }
    return {name: one["init_args"] if is_object[name] else one for name, one in fields.items()}


def _is_class_path(value: object) -> bool:
    return isinstance(value, str) and "." in value


def _faults_of_run(content: Mapping[str, Any], classes: Mapping[str, str], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of a configuration, or of the part of it that one argument sets."""
    known = {option.partition(".")[0] for option in options}
    for key, value in content.items():
        if key in SUBCOMMANDS and isinstance(value, Mapping):
            yield from _faults_of_run(value, classes, options)
        elif key in ("model", *_DEFAULTS):
            yield from _faults(key, value, _BASES.get(key, Trainer), classes)
        elif key in options:
            yield from _faults(key, value, options[key], classes)
        elif known and key.removesuffix("+") not in known:
            yield _unknown_field(key, known)


def _faults(name: str, value: Any, kind: Any, classes: Mapping[str, str]) -> Iterator[str]:
    """Yield the errors of the value of a field, and of the fields below it.

    Args:
        name: The field, dotted.
        value: Its value.
        kind: Its type, as annotated.
        classes: Class paths that are set elsewhere, by field.
    """
    kinds = _without_none(kind)
    elements = [get_args(each)[0] for each in kinds if get_origin(each) in (list, Sequence) and get_args(each)]
    path = value.get("class_path", classes.get(name)) if isinstance(value, Mapping) else value
    names_class = _is_class_path(path) and (isinstance(value, Mapping) or name in _BASES)
    below: Mapping[str, Any] | None = None
    if names_class and not _is_file(path) and (fault := _class_fault(path, _BASES.get(name, object))):
        yield f"{name}.class_path: {fault}"
    elif isinstance(value, Mapping) and (below := _fields_below(name, value, kinds, path)) is not None:
        inner = value.get("init_args")
        for key, item in {**value, **(inner if isinstance(inner, Mapping) else {})}.items():
            field = f"{name}.{key}"
            if str(key) in below:
                yield from _faults(field, item, below[str(key)], classes)
            elif key not in _ABOUT_CLASSES and not str(key).endswith("+"):
                hint = next((hint for one in kinds if (hint := argument_hint(one, str(key)))), None)
                unknown = _unknown_field(field, below, path if names_class else None)
                yield f"there is no field {field}: {hint}" if hint else unknown
    elif isinstance(value, list) and elements:
        for item in value:
            yield from _faults(name, item, elements[0], classes)
    elif (value is None and any(map(is_dataclass, kinds)) and NoneType not in get_args(kind)) or (
        not _may_be_object(kinds, value) and not _is_accepted(kind, value)
    ):  # jsonargparse itself would take null for a dataclass
        yield _wrong_value(name, kinds, value)


def _without_none(kind: Any) -> list[Any]:
    """Return the types that a union allows, or the type itself, without None."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [one for one in kinds if one is not NoneType]


def _may_be_object(kinds: Iterable[Any], value: Any) -> bool:
    """Return whether a value may be a file that holds the field, or set an object of a class."""
    takes_objects = any(inspect.isclass(one) and not is_dataclass(one) and one not in _TYPE_NAMES for one in kinds)
    return (isinstance(value, str) and _is_file(value)) or (takes_objects and isinstance(value, str | Mapping | None))


def _wrong_value(name: str, kinds: Sequence[Any], value: Any) -> str:
    """Return an error that names the types of a field; without a value that is part of a mapping or a list."""
    types = [_type_name(one) for one in kinds if get_origin(one) is not Literal]
    actual = "empty" if value is None else _type_name(type(value))
    if {*types} == {"a mapping"} or name in ("model", *_DEFAULTS):
        example = "{train: ...}" if name == "data" else _example(kinds)
        return f"{name} must be a mapping{f', like {example}' if example else ''}, but is {actual}"
    literals = [repr(one) for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    types += [f"one of {', '.join(literals)}"] if literals else []
    # The text of a mapping could hold secrets, also if a brace is missing.
    is_hidden = _OPTIONS.search(name) or isinstance(value, list | Mapping) or re.search(r"[{[]", str(value))
    got = f"is {actual}" if is_hidden else f"got {str(value)!r}"
    return f"{name} must be {' or '.join(dict.fromkeys(types))}, but {got}"


def _example(kinds: Iterable[Any]) -> str:
    """Return a mapping for the first of these types that is one of options; "" if none is."""
    for kind in kinds:
        if inspect.isclass(kind) and not get_args(kind):
            if issubclass(kind, Stream | StreamingConfig):
                return _STREAM
            if issubclass(kind, OptionGroup):
                return kind.example
        if get_origin(kind) is Mapping:
            of_values = _without_none(get_args(kind)[1])
            for cls, (key, example) in _NAMED_EXAMPLES.items():
                if cls in of_values:
                    return f"{{{key}: {example}}}"
    return ""


def _type_name(kind: Any) -> str:
    if is_dataclass(kind):
        return "a mapping"
    origin = get_origin(kind) or kind
    return _TYPE_NAMES.get(origin) or f"of type {getattr(origin, '__name__', origin)}"


def _fields_below(name: str, value: Mapping[str, Any], kinds: Sequence[Any], path: Any) -> Mapping[str, Any] | None:
    """Return the fields that a mapping may have, by name, with their types; None if they are unknown."""
    cls: Any = _DEFAULTS.get(name) or next((one for one in kinds if is_dataclass(one)), None)
    if _is_class_path(path):
        module, _, class_name = path.rpartition(".")
        cls = getattr(import_module(module), class_name)
    if inspect.isclass(cls):
        with suppress(ArgumentError, ValueError):  # a default of it is invalid
            parser = jsonargparse.ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(cls, fail_untyped=False)
            hints: dict[str, Any] = {}
            for base in reversed(inspect.getmro(cls)):
                with suppress(NameError):  # annotated with what is imported for types only
                    # The fields of a dataclass: its __init__ names types of its bases, which its module may not know.
                    is_own = "__dataclass_fields__" in vars(base)
                    hints |= get_type_hints(base if is_own else base.__init__)  # type: ignore[misc]
            names = {dotted.partition(".")[0] for dotted in parser.get_defaults().keys()}  # noqa: SIM118 no dict
            return {field: hints.get(field, Any) for field in names}
    of_values = [get_args(one)[1] for one in kinds if get_origin(one) in (dict, Mapping)]
    return dict.fromkeys(map(str, value), of_values[0]) if of_values else None


def _is_accepted(kind: Any, value: Any) -> bool:
    """Return whether jsonargparse accepts a value for a type."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
    except ValueError:  # a type that it does not support
        return True
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, ValueError):
        return False
    return True


def _unknown_field(field: str, known: Iterable[str], class_path: str | None = None) -> str:
    parent, dot, name = field.rpartition(".")
    if close := get_close_matches(name, known, 1):
        return f"there is no field {field}; did you mean {parent}{dot}{close[0]}?"
    return f"there is no field {field}" + (f": {class_path} has no such argument" if class_path else "")


def _class_fault(path: str, base: type) -> str | None:
    """Return an error for a class path that names no class derived from ``base``; None if it names one."""
    module_name, _, name = path.rpartition(".")
    handled = sys.exc_info()[1]
    try:
        module = import_module(module_name)
    except (ImportError, SyntaxError) as error:
        return f"cannot import {module_name}: {error}"
    except BaseException as error:
        _unlink(error, handled)
        raise
    cls = getattr(module, name, None)
    if cls is None:
        # In Python 3.10 list[str] counts as a class.
        classes = {
            known: value for known, value in vars(module).items() if inspect.isclass(value) and not get_args(value)
        }
        fitting = [known for known, kind in classes.items() if issubclass(kind, base)]
        close = get_close_matches(name, fitting, 1, 0.5)
        return f"the module {module_name} has no {name}" + (f"; did you mean {close[0]}?" if close else "")
    is_wrong = inspect.isclass(cls) and not issubclass(cls, base)
    return f"{path} is not derived from {base.__name__}" if is_wrong else None


def _unlink(error: BaseException, handled: BaseException | None) -> None:
    """Remove the error that was handled when a module was imported from the contexts of the module's own errors.

    It is one of jsonargparse, and repeats the configuration, secrets included.
    """
    links, seen = [error], list[BaseException]()
    while links:
        link = links.pop()
        if any(link is known for known in seen):
            continue
        seen.append(link)
        if link.__context__ is handled:
            link.__context__ = None
        inner = getattr(link, "exceptions", ())  # of a group; other classes may have anything there
        inner = inner if isinstance(inner, (list, tuple)) else ()
        links += [one for one in (link.__cause__, link.__context__, *inner) if isinstance(one, BaseException)]


# Runs that failed ----------------------------------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_OURS = re.compile(rf"^{re.escape(errors.__name__)}\.(\w+): ", re.MULTILINE)
_FRAME = re.compile(r'^ +File "([^"]+)", line (\d+), in (\S+)(?:\n +(?!File ")(.*))?', re.MULTILINE)
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_MISMATCH_HINT = (
    "To resume nevertheless: --trainer.callbacks+=lightning_streaming.StreamingStateCallback "
    "--trainer.callbacks.on_mismatch=warn"
)
_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages())
_LIBRARIES = (
    *(str(Path(module.__file__ or "").parent) for module in (lightning, torch, jsonargparse)),
    str(Path(__file__).parents[1]),
)


class CliFailure(NamedTuple):
    """A failure that needs no traceback."""

    message: str
    """The reason, and how to fix it."""
    is_of_data: bool = False
    """Whether the data is damaged; otherwise the arguments, or the environment, do not work."""


def explain_failure(error: BaseException, checkpoint: str | None = None) -> CliFailure | None:
    """Explain a failed run, with the line of the user's code; None for an unexpected error, or one of that code.

    Args:
        error: The error that ended the run.
        checkpoint: The checkpoint that it was to resume from, if any.
    """
    if isinstance(error, StreamingError | ProcessRaisedException):
        kind, text = type(error), str(error)
        # The error of a worker or of a spawned rank has a traceback as text.
        *_, last = [None, *_OURS.finditer(text)]
        if isinstance(error, ProcessRaisedException) or (last and _TRACEBACK in text):
            if last is None:
                return None
            kind, text = getattr(errors, last[1]), text[last.end() :]
        if issubclass(kind, StateMismatchError):
            text = f"{text.strip()}\n{_MISMATCH_HINT}"
        line_of_user = _line_of_user(error)
        if line_of_user:
            first, *others = text.strip().splitlines()
            text = "\n".join([first, line_of_user, *others, "--debug shows the whole traceback"])
        return CliFailure(text.strip(), issubclass(kind, FormatError | IntegrityError))
    frames, text = traceback.extract_tb(error.__traceback__), " ".join(str(error).split())
    foreign = [
        frame.filename
        for frame in frames
        if not frame.filename.startswith(_LIBRARIES) and "fsspec" not in Path(frame.filename).parts
    ]
    if any(file.startswith(_INSTALLED) or not _is_library(file) for file in foreign) or _TRACEBACK in str(error):
        return None
    if any(_loads_checkpoint(frame) for frame in frames):
        shown = f"checkpoint {checkpoint}" if checkpoint else "checkpoint"
        if isinstance(error, FileNotFoundError):
            return CliFailure(f"there is no {shown}; correct --ckpt_path ({text})")
        if "loading state_dict" in text:
            return CliFailure(f"the {shown} is of another model or optimizer: {text[:600]}")
        return CliFailure(f"the {shown} cannot be read ({type(error).__name__}: {text[:600]})")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        path = f", at {os.fsdecode(error.filename)}" if error.filename else ""
        return CliFailure(f"the disk is full{path}; free some space, or choose another trainer.default_root_dir")
    if isinstance(error, MisconfigurationException | OSError):
        return CliFailure(text or type(error).__name__)
    return None


def _loads_checkpoint(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return (
        frame.name == "_parse_ckpt_path"
        or (path.name in ("checkpoint_connector.py", "torch_io.py") and "load" in frame.name)
        or ("connectors" in path.parts and frame.name.startswith("restore"))
    )


def _line_of_user(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error, or one of its causes, was raised in; or ""."""
    link: BaseException | None = error
    while link is not None:
        # The traceback of a worker is text.
        frames = [match.groups() for match in _FRAME.finditer(str(link).rpartition(_CAUSED)[0])]
        if link is not error:
            frames = [tuple(frame) for frame in traceback.extract_tb(link.__traceback__)] or frames
        for file, line, name, code in reversed(frames):
            path = Path(file)
            if path.is_absolute() and not _is_library(file):  # compiled code names files of its makers
                shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
                return f"in {name} of {shown}, line {line}" + (f": {code}" if code else "")
        link = link.__cause__
    return ""


def _is_library(file: str) -> bool:
    return file.startswith(("<", _STANDARD, *_INSTALLED, *_LIBRARIES))


# Arguments, and the files that they name -----------------------------------------------------------------------------

_CONFIG = ("--config", "-c")
_NEGATIVE = re.compile(r"-[\d.]")
"""The beginning of a number that looks like an option, and is the value of the one before."""
_OPTIONS = re.compile(r"(?:^|\.)storage(?:\.|$)|storage.?opt", re.IGNORECASE)
"""Fields of storage options, including misspelled ones."""


def fields_in(args: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the fields that arguments, and the files that they name, set: dotted, without ``init_args``."""
    return [field for name, value in _named_values(args) for field in _flat(value, name)]


def secrets_in(args: Sequence[str]) -> set[str]:
    """Return the possible secrets in arguments, and in the files that they name.

    These are values below storage options, values of fields with a name like that of a secret, and parts of URLs.
    """
    texts = {text for name, value in _named_values(args) for text in _secrets(value, name)}
    return {text for text in texts if text not in StorageConfig.example}  # which an error shows


def _files_in(args: Sequence[str]) -> list[str]:
    return [value for option, value in _options_in(args) if option in _CONFIG and _is_file(value)]


def _is_file(value: str) -> bool:
    """Return whether a text is the path of a file; False for a text that cannot be a path, like a long mapping."""
    return os.path.isfile(value)  # noqa: PTH113 - Path.is_file raises an error for those


def yaml_error_text(error: yaml.YAMLError) -> str:
    """Return the problem of a text that is not YAML, and its position; without lines of it, which may hold secrets."""
    mark = getattr(error, "problem_mark", None)
    position = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or 'not YAML'}{position}"


def _named_values(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument; the content of a file has no name."""
    for option, value in _options_in(args):
        yield ("", _content(value)) if option in _CONFIG else (_short(option.removeprefix("--")), value)


def _options_in(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, arg in enumerate(args, 1):
        if arg.startswith("-") and not _NEGATIVE.match(arg):
            option, equals, value = arg.partition("=")
            yield option, value if equals else next(iter(args[number:]), "")


def _content(file: str) -> Any:
    try:
        return yaml.safe_load(Path(file).read_text() if _is_file(file) else file)
    except (OSError, ValueError, yaml.YAMLError):  # its parser reports it
        return None


def _parsed(text: Any) -> Any:
    """Return the list or mapping that the text of an argument is; else the text."""
    content = _content(text) if isinstance(text, str) and text[:1] in ("[", "{") else None
    return text if content is None else content


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, _short(f"{name}.{key}" if name else str(key)))
    if name:
        yield name, value


def _secrets(value: Any, name: str) -> Iterator[str]:
    """Yield the possible secrets in a value, also in a text that is a mapping or list, as arguments are."""
    below, _, last = name.rpartition(".")
    if isinstance(value, Mapping):
        if _OPTIONS.search(name):
            yield from secrets_of_options(value)
        for key, inner in value.items():
            yield from _secrets(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, name)
    elif value is not None and not isinstance(value, bool):
        text, parsed = str(value), _parsed(value)
        yield from secrets_of(text)
        if parsed is not value:
            yield from _secrets(parsed, name)
        elif _OPTIONS.search(last):
            yield from secrets_of_options(text)
        elif _OPTIONS.search(below) or is_secret_name(last):
            yield from secrets_of_options(text, last)


def _short(name: str) -> str:
    """Return the name of a field without the levels of a configuration that it may omit."""
    first, *others = [part for part in name.split(".") if part != "init_args"] or [name]
    return ".".join(others) if first in SUBCOMMANDS and others else ".".join([first, *others])
