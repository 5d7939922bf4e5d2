"""What the command line says when something is wrong: with what the user wrote, or with a run that failed.

Three questions in this order: which field of a configuration is wrong (``words_of_parsing``, ``named_error``), what is
told of a failed run and what keeps its traceback (``failure_of``), and what was written at all (``written_in``).
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import site
import sysconfig
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, TracebackType, UnionType
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
from lightning_streaming.replaced_names import argument_hint
from lightning_streaming.storage.secrets import is_secret_name, secrets_of, secrets_of_options
from lightning_streaming.trainer import SUBCOMMANDS
from lightning_streaming.trainer.config import config_of
from lightning_streaming.trainer.datamodule import STAGES, StreamingDataModule

_Classes = Mapping[str, str]
"""By field, the class path that is written for it."""

_BASES: Mapping[str, type] = {"model": LightningModule, "data": LightningDataModule}
_DEFAULTS: Mapping[str, type] = {"data": StreamingDataModule, "trainer": Trainer}
_ABOUT_CLASSES = ("class_path", "init_args", "dict_kwargs")
_STREAM = '{remote: "s3://corpus/code"}'
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
}
_NOISE = (
    "Subtypes: ",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "Given value",
)
"""How jsonargparse's lines begin that repeat whole parts of the configuration, secrets too, or name its own types."""
_TYPES = ("Does not validate", "Problem with given class_path", "Expected a <class 'collections.abc.Mapping'>")
"""How jsonargparse's lines begin that name its own types."""
_NULLS = (None, "null", "Null", "NULL", "~")
_OF_STAGE = re.compile(rf"data\.({'|'.join(STAGES)})\.")
_VALUE = re.compile(r"\. Got value: (Namespace\(|NestedArg\(|\{|\[).*")
"""A value in a message that may hold a part of the configuration, secrets too."""


def words_of_parsing(
    message: str, args: Sequence[str], options: Mapping[str, Any] = {}, error: BaseException | None = None
) -> str:
    """What is wrong with arguments, or with a file that they name, which jsonargparse has refused.

    Which field it is, is found out from what was written and from the signatures of the classes that take it:
    jsonargparse tells it in words alone, without the keys of mappings, and repeats whole parts of the configuration.

    Args:
        message: What jsonargparse says; told, without what may be secret in it, if no field is wrong by itself.
        args: The arguments.
        options: Types by dotted name of what the command line knows by itself; if any, there must be a model.
        error: What the message was made of.

    Raises:
        Exception: What a module of the user's raised while it was imported; with the traceback of that module alone.
    """
    while error is not None and not isinstance(error, yaml.YAMLError):
        error = error.__cause__ or error.__context__
    if error is not None:
        return f"{' or '.join(_files_in(args)) or 'an argument'} is no YAML: {without_lines(error)}"
    written = written_in(args)
    fault = next(_faults_of_args(args, _classes_in(written), options), None)
    if fault is not None:
        return fault
    if re.search(r"are required: [\w., ]*\bmodel\b", message):
        return "there is no model; name one in a file for --config, or by --model=my_project.MyModel"
    lines = [_VALUE.sub("", line) for line in message.splitlines() if not line.strip().startswith(_NOISE)]
    keys = [place for place, line in enumerate(lines) if line.strip().startswith("Parser key")]
    if keys:  # one line for each level of the configuration, and then what is wrong
        field = ".".join(lines[place].split('"')[1] for place in keys)
        reasons = [line.strip(" -") for line in lines[keys[-1] + 1 :] if not line.strip(" -").startswith(_TYPES)]
        return in_files(f"{field}: {'; '.join(reasons)}", args)
    return in_files("\n".join(lines), args)


def wrong_argument(args: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Return the words of an error about the first field that an argument, not a file, gives a wrong value; or None.

    A field of a group has a type, but a group may also be a mapping of anything, so jsonargparse accepts it.
    """
    typed = [f"{option}={value}" for option, value in _options_in(args) if option not in _CONFIG]
    return next(_faults_of_args(typed, _classes_in(written_in(args)), options), None)


def null_argument(args: Sequence[str]) -> str | None:
    """Return the words of an error about the first field of a stage that an argument sets to null; None without one.

    jsonargparse passes such a field on as text: "None" would become a directory or a column.
    """
    fields = (field for name, value in _given(args) if name for field in _flat(_parsed(value), name))
    return next((_no_null(name) for name, value in fields if _OF_STAGE.match(name) and value in _NULLS), None)


def in_files(words: str, args: Sequence[str]) -> str:
    """Words of an error, and before them the files it must be in, where the arguments say nothing else of a run."""
    is_on_line = any(name.partition(".")[0] in ("model", *_DEFAULTS) for name, _ in _given(args))
    files = [] if is_on_line else _files_in(args)
    return f"{', '.join(files)}: {words}" if files else words


def _faults_of_args(args: Sequence[str], classes: _Classes, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with each argument, and with each file, which is named."""
    for option, value in _options_in(args):
        if option not in _CONFIG:
            content = _parsed(value)
            for key in reversed(_short(option.removeprefix("--")).split(".")):
                content = {key: content}
            yield from _faults_of_run(content, classes, options)
            continue
        content, is_file = _content(value), Path(value).is_file()
        if isinstance(content, Mapping | None):
            faults = _faults_of_run(content or {}, classes, options)
            yield from (f"{value}: {fault}" if is_file else fault for fault in faults)
        elif is_file:
            yield f"{value} is not a configuration, which has model:, data: and trainer:"
        else:
            yield f"there is no file {value} for {option}"


def _no_null(name: str) -> str:
    return f"{name} cannot be null on the command line; leave it out, or give a file where it is null"


def _classes_in(written: Iterable[tuple[str, Any]]) -> _Classes:
    return {name.removesuffix(".class_path"): value for name, value in written if _is_class_path(value)}


def _is_class_path(value: object) -> bool:
    return isinstance(value, str) and "." in value


def _faults_of_run(content: Mapping[str, Any], classes: _Classes, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a configuration, or with the part of it that one argument gives."""
    known = {option.partition(".")[0] for option in options}
    for key, value in content.items():
        if key in SUBCOMMANDS and isinstance(value, Mapping):
            yield from _faults_of_run(value, classes, options)
        elif key in ("model", *_DEFAULTS):
            yield from _faults(key, value, _BASES.get(key, Trainer), classes)
        elif key in options:
            yield from _faults(key, value, options[key], classes)
        elif known and key.removesuffix("+") not in known:
            yield _no_such_field(key, known)


def _faults(name: str, value: Any, kind: Any, classes: _Classes) -> Iterator[str]:
    """What is wrong with the value of a field, and with the fields below it.

    Args:
        name: The field, dotted.
        value: What is written there.
        kind: Its type, as annotated.
        classes: What is written elsewhere of the classes of fields.
    """
    kinds = _alternatives(kind)
    path = value.get("class_path", classes.get(name)) if isinstance(value, Mapping) else value
    if _is_class_path(path) and (isinstance(value, Mapping) or name in _BASES) and not Path(path).is_file():
        wrong = _wrong_path(path, _BASES.get(name, object))
        if wrong:
            yield f"{name}.class_path: {wrong}"
            return
    if isinstance(value, Mapping):
        below = _fields_below(name, value, kinds, path)
        if below is None:
            if kinds and all(map(_is_list, kinds)):
                yield f"{name} must be a list, but is a mapping"
            return
        inner = value.get("init_args")
        for key, one in {**value, **(inner if isinstance(inner, Mapping) else {})}.items():
            field = f"{name}.{key}"
            if str(key) in below:
                yield from _faults(field, one, below[str(key)], classes)
            elif key not in _ABOUT_CLASSES and not str(key).endswith("+"):
                said = next((words for one in kinds if (words := argument_hint(one, str(key)))), None)
                no_such_field = _no_such_field(field, below, str(value.get("class_path", "")))
                yield f"there is no field {field}: {said}" if said else no_such_field
    elif isinstance(value, list) and any(_is_list(one) for one in kinds):
        element = next(get_args(one)[0] for one in kinds if _is_list(one))
        for one in value:
            yield from _faults(name, one, element, classes)
    elif not (isinstance(value, str | None) and _may_be_path(kinds, value)) and not _takes(kind, value):
        yield _wrong_value(name, kinds, value)


def _alternatives(kind: Any) -> list[Any]:
    """The types of which a value may be, None left out."""
    inner = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [one for one in inner if one is not NoneType]


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, Sequence) and bool(get_args(kind))


def _may_be_path(kinds: Iterable[Any], value: str | None) -> bool:
    """Whether a text, or nothing, may stand for an object of some class, or for a file that holds the field."""
    if value is not None and Path(value).is_file():
        return True
    return any(inspect.isclass(one) and not is_dataclass(one) and one not in _WORDS for one in kinds)


def _fields_below(name: str, value: Mapping[str, Any], kinds: Sequence[Any], path: Any) -> Mapping[str, Any] | None:
    """The fields that a mapping may have there, by name, and their types; None if that cannot be told."""
    made: Any = _DEFAULTS.get(name)
    if _is_class_path(path):
        module, _, class_name = path.rpartition(".")
        made = getattr(import_module(module), class_name)
    made = made or next((one for one in kinds if is_dataclass(one)), None)
    if inspect.isclass(made):
        with suppress(ArgumentError, ValueError):  # it has defaults that it would not take
            return _fields_of(made)
    of_values = [get_args(one)[1] for one in kinds if get_origin(one) in (dict, Mapping)]
    return dict.fromkeys(map(str, value), of_values[0]) if of_values else None


def _fields_of(made: type) -> Mapping[str, Any]:
    """What a configuration may give to a class, and the types; Any where nothing is annotated."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(made, fail_untyped=False)
    hints: dict[str, Any] = {}
    for one in reversed(inspect.getmro(made)):
        with suppress(NameError):  # annotated with what is imported for types only
            # Of a dataclass the fields: its __init__ names types of its bases, which its module need not know.
            is_own = "__dataclass_fields__" in vars(one)
            hints |= get_type_hints(one if is_own else one.__init__)  # type: ignore[misc]  # that of this very class
    names = {name.partition(".")[0] for name in parser.get_defaults().keys()}  # noqa: SIM118 no dict
    return {name: hints.get(name, Any) for name in names}


def _takes(kind: Any, value: Any) -> bool:
    """Whether jsonargparse takes a value for a type."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
    except ValueError:  # a type that it has no use for
        return True
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, ValueError):
        return False
    return True


def _no_such_field(field: str, known: Collection[str], class_path: str = "") -> str:
    """Say so, and which of those known beside it was meant; or the class, if it is one that was asked for."""
    parent, dot, name = field.rpartition(".")
    close = get_close_matches(name, known, 1)
    if close:
        return f"there is no field {field}; did you mean {parent}{dot}{close[0]}?"
    return f"there is no field {field}" + (f": {class_path} takes none of that name" if class_path else "")


def _wrong_value(name: str, kinds: Sequence[Any], value: Any) -> str:
    """Say what the value must be."""
    is_mapping = any(is_dataclass(one) or get_origin(one) is Mapping for one in kinds)
    is_list = any(map(_is_list, kinds))
    if (is_mapping and not is_list) or name in ("model", *_DEFAULTS):
        known = [one.example for one in kinds if inspect.isclass(one) and issubclass(one, OptionGroup)]
        of_names = {
            "data": "{train: ...}",
            "streams": f"{{code: {_STREAM}}}",
            "schedule": f"{{broad: {MixturePhase.example}}}",
        }
        of_name = of_names.get(name.rpartition(".")[2], "")
        example = next(iter(known), of_name or (_STREAM if any(map(is_dataclass, kinds)) else ""))
        example = f", like {example}" if example else ""
        found = "a list" if isinstance(value, list) else "text" if isinstance(value, str) else "a number"
        return f"{name} must be a mapping{example}, but is {'empty' if value is None else found}"
    literals = [repr(one) for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    words = [_words_of(kind) for kind in kinds if get_origin(kind) is not Literal]
    words += [f"one of {', '.join(literals)}"] if literals else []
    got = "" if _OPTIONS.search(name) else f", but got {str(value)!r}"
    return f"{name} must be {' or '.join(dict.fromkeys(words))}{got}"


def _words_of(kind: Any) -> str:
    made = get_origin(kind) or kind
    return _WORDS.get(made) or f"of type {getattr(made, '__name__', made)}"


def _parsed(text: Any) -> Any:
    """The list or mapping that an argument's text is; else the text."""
    if not isinstance(text, str) or text[:1] not in ("[", "{"):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # it would show the text, which may hold secrets
        return text


def _wrong_path(path: str, base: type) -> str | None:
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            return f"there is no module {error.name}, in the current directory or installed, as {path} needs it"
        return f"{module_name} imports {error.name}, which is not installed"
    except SyntaxError as error:
        return f"{module_name} cannot be imported: {error.filename}, line {error.lineno}: {error.msg}"
    except Exception as error:  # noqa: BLE001 - whatever a module of the user raises
        failed = error
    else:
        return _not_in(module, path, name, base)
    raise failed.with_traceback(_beyond_import(failed.__traceback__)) from failed.__cause__


def _not_in(module: Any, path: str, name: str, base: type) -> str | None:
    found = getattr(module, name, None)
    if inspect.isclass(found):
        if issubclass(found, base):
            return None
        return f"{path} is no {base.__name__}; its bases are {', '.join(one.__name__ for one in found.__bases__)}"
    if found is not None:
        return None  # a function that makes one, maybe
    known = [other for other, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base)]
    close = get_close_matches(name, known, 1, cutoff=0.5)
    return f"the module {module.__name__} has no {name}" + (f"; did you mean {close[0]}?" if close else "")


def _beyond_import(found: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that only import."""
    while found is not None and (
        "importlib" in found.tb_frame.f_code.co_filename or found.tb_frame.f_globals["__name__"] == __name__
    ):
        found = found.tb_next
    return found


def named_error(data: Any, error: ConfigError) -> str:
    """The words of an error, and before them the stage or stream that it is about, if it is found again there.

    Args:
        data: The data module's part of a configuration, as it was parsed.
        error: What came of making it.
    """
    refused = (f"{name}: {words}" for name, words in _refused_parts(_plain(data)) if words)
    return next(refused, str(error))


def _refused_parts(data: Any) -> Iterator[tuple[str, str]]:
    arguments = data.get("init_args") if isinstance(data, Mapping) else None
    for stage in STAGES:
        config = _without_classes(arguments.get(stage)) if isinstance(arguments, Mapping) else None
        if not isinstance(config, Mapping):
            continue
        streams = config.get("streams") or {}
        others = f" (the streams are {', '.join(streams)})" if len(streams) > 1 else ""
        for name, stream in streams.items():
            words = _refusal(partial(Stream, **stream))
            yield f"data.{stage}.streams.{name}", words and f"{words}{others}"
        yield f"data.{stage}", _refusal(partial(config_of, config))


def _without_classes(value: Any) -> Any:
    """Return a part of a stage with the fields of its groups alone, which are parsed as objects of classes."""
    if isinstance(value, list):
        return [_without_classes(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    fields = value["init_args"] if value.keys() == {"class_path", "init_args"} else value
    return {name: _without_classes(field) for name, field in fields.items()}


def _refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except (ConfigError, TypeError) as error:
        return str(error)
    return ""


def _plain(value: Any) -> Any:
    """Namespaces as mappings."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return _plain(vars(value)) if hasattr(value, "__dict__") and not callable(value) else value


_TRACEBACK = "Traceback (most recent call last):"
_OURS = re.compile(rf"^{re.escape(errors.__name__)}\.(\w+): ", re.MULTILINE)
_FRAME = re.compile(r'^ +File "([^"]+)", line (\d+), in (\S+)(?:\n +(?!File ")(.*))?', re.MULTILINE)
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_LOADS_CHECKPOINTS = ("checkpoint_connector.py", "torch_io.py")
_PARSES_CHECKPOINT = "_parse_ckpt_path"
_LONGEST = 600
_GO_ON_ALL_THE_SAME = (
    'To fit, on_mismatch="warn" is said by --trainer.callbacks+=lightning_streaming.StreamingStateCallback '
    "--trainer.callbacks.on_mismatch=warn"
)


def _folder(module: ModuleType) -> str:
    return str(Path(module.__file__ or "").parent)


_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages())
_LIBRARIES = (*map(_folder, (lightning, torch, jsonargparse)), str(Path(__file__).parents[1]))


class CliFailure(NamedTuple):
    """A failure that needs no traceback."""

    words: str
    """What went wrong, and the way out."""
    is_of_data: bool = False
    """Whether the data is damaged; else something could not be done as asked."""


def failure_of(error: BaseException, checkpoint: str | None = None) -> CliFailure | None:
    """Tell a failure in words, and where in the user's own code; None for one that is not ours, or that nobody foresaw.

    Args:
        error: What ended the run.
        checkpoint: The checkpoint that it was to go on from, if any.
    """
    if isinstance(error, StreamingError):
        return _of_ours(type(error), str(error), _line_of_user(error))
    if isinstance(error, ProcessRaisedException):  # a rank that was spawned: its traceback, as text
        *_, last = [None, *_OURS.finditer(str(error))]
        return last and _of_ours(getattr(errors, last[1]), str(error), _line_of_user(error))
    if _has_foreign_frames(error) or _TRACEBACK in str(error):
        return None
    if _is_of_checkpoint(error):
        return CliFailure(_words_of_checkpoint(error, checkpoint))
    if isinstance(error, MisconfigurationException | OSError):
        return CliFailure(_whole_words(error))
    return None


def _of_ours(kind: type[StreamingError], text: str, line_of_user: str) -> CliFailure:
    """One of our errors, also as it comes out of a worker: with its traceback as text."""
    if _TRACEBACK in text:
        *_, last = [None, *_OURS.finditer(text)]
        text = text[last.end() :] if last else text
    if issubclass(kind, StateMismatchError):
        text = f"{text.strip()}\n{_GO_ON_ALL_THE_SAME}"
    if line_of_user:
        first, *others = text.strip().splitlines()
        text = "\n".join([first, line_of_user, *others, "--debug shows the whole traceback"])
    return CliFailure(text.strip(), issubclass(kind, FormatError | IntegrityError))


def _line_of_user(error: BaseException) -> str:
    """Where an error came out of code of the user's own: the line of it that was reached last; empty if none was."""
    for link in (error, *_causes_of(error)):
        frames = [] if link is error else [tuple(frame) for frame in traceback.extract_tb(link.__traceback__)]
        # A worker's traceback is told as text.
        told = [match.groups() for match in _FRAME.finditer(str(link).rpartition(_CAUSED)[0])]
        for file, line, name, code in reversed(frames or told):
            path = Path(file)
            if path.is_absolute() and not _is_library(file):  # compiled code names files of its makers
                shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
                return f"in {name} of {shown}, line {line}" + (f": {code}" if code else "")
    return ""


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _is_library(file: str) -> bool:
    return file.startswith(("<", _STANDARD, *_INSTALLED, *_LIBRARIES))


def _has_foreign_frames(error: BaseException) -> bool:
    """Whether an error came through code that belongs neither to Lightning and what it stands on, nor to us."""
    installed = [file for file in _files(error) if not file.startswith(_LIBRARIES) and not _is_of(file, "fsspec")]
    return any(file.startswith(_INSTALLED) or not _is_library(file) for file in installed)


def _is_of(file: str, package: str) -> bool:
    return package in Path(file).parts


def _is_of_checkpoint(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    loads = any(Path(frame.filename).name in _LOADS_CHECKPOINTS and "load" in frame.name for frame in frames)
    return loads or any(
        frame.name == _PARSES_CHECKPOINT or (frame.name.startswith("restore") and _is_of(frame.filename, "connectors"))
        for frame in frames
    )


def _words_of_checkpoint(error: BaseException, checkpoint: str | None) -> str:
    shown = "the checkpoint" if checkpoint is None else f"the checkpoint {checkpoint}"
    words = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, FileNotFoundError):
        return f"there is no {shown.removeprefix('the ')}; correct --ckpt_path ({words})"
    if "loading state_dict" in words:
        return f"{shown} is of another model or optimizer: {words}"
    if isinstance(error, OSError):
        return f"{shown} cannot be read: {words}"
    return f"{shown} does not fit, or is damaged, or no checkpoint at all ({type(error).__name__}: {words})"


def _whole_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" where {os.fsdecode(error.filename)} belongs" if error.filename else ""
        return f"the disk is full{place}; make room, or choose another trainer.default_root_dir"
    return " ".join(str(error).split()) or type(error).__name__


_CONFIG = ("--config", "-c")
_NEGATIVE = re.compile(r"-[\d.]")
"""How a number begins that looks like an option, and is the value of the one before."""
_OPTIONS = re.compile(r"(?:^|\.)storage(?:\.|$)|storage.?opt", re.IGNORECASE)
"""The fields of storage options, also misspelt ones."""


def written_in(args: Sequence[str]) -> list[tuple[str, Any]]:
    """The fields that arguments, and the files that they name, give a value; dotted, without ``init_args``."""
    return [field for name, value in _given(args) for field in _flat(value, name)]


def secrets_in(args: Sequence[str]) -> set[str]:
    """All that may be secret in arguments, and in the files that they name, wherever it was written.

    Whatever stands below storage options, under a name like that of a secret, or in a URL.
    """
    return {text for name, value in _given(args) for text in _secrets(value, name)}


def _files_in(args: Sequence[str]) -> list[str]:
    """The configuration files that arguments name."""
    return [value for option, value in _options_in(args) if option in _CONFIG and Path(value).is_file()]


def without_lines(error: yaml.YAMLError) -> str:
    """What is wrong with a text that is no YAML, and where; not the lines themselves, which may hold secrets."""
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or 'no YAML'}{place}"


def _given(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and value of each argument; those of a file have no name."""
    for option, value in _options_in(args):
        yield ("", _content(value)) if option in _CONFIG else (_short(option.removeprefix("--")), value)


def _options_in(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, arg in enumerate(args):
        if arg.startswith("-") and not _NEGATIVE.match(arg):
            option, equals, value = arg.partition("=")
            yield option, value if equals else next(iter(args[place + 1 :]), "")


def _content(file: str) -> Any:
    path = Path(file)
    try:
        return yaml.safe_load(path.read_text() if path.is_file() else file)
    except (OSError, ValueError, yaml.YAMLError):  # whoever parses it says so
        return None


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, _short(f"{name}.{key}" if name else str(key)))
    if name:
        yield name, value


def _secrets(value: Any, name: str) -> Iterator[str]:
    """What may be secret in a value, and in one that is written as text, as arguments are."""
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
        is_secret = _OPTIONS.search(below) or is_secret_name(last)
        text = str(value)
        yield from secrets_of(text)
        inner = _content(text) if isinstance(value, str) and text[:1] in "{[" else None
        if inner is not None:
            yield from _secrets(inner, name)
        elif _OPTIONS.search(last):
            yield from secrets_of_options(text)
        elif is_secret:
            yield from secrets_of_options(text, last)


def _short(name: str) -> str:
    """Without the levels of a configuration that a field's name may leave out."""
    first, *others = [part for part in name.split(".") if part != "init_args"] or [name]
    return ".".join(others) if first in SUBCOMMANDS and others else ".".join([first, *others])
