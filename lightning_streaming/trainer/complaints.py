"""What the command line says of a field that is wrong: its whole name, what it must be, and what was meant maybe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_streaming.trainer.class_paths import wrong_class
from lightning_streaming.trainer.stages import misshapen
from lightning_streaming.trainer.written import Written, files_in, without_lines, written_in

_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN = re.compile(r"(?:Option|Key) '([^']+)' is not (?:accepted|expected)|does not accept option '([^']+)'")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: --([\w.]+)")
_WANTED = re.compile(r"Expected an? (?:<class '(?:[\w]+\.)*(\w+)'>|(\S.*?))(?:\. Got value: (.*))?$", re.MULTILINE)
_GIVEN = re.compile(r"Given value: (.*)$", re.MULTILINE)
_LITERAL = re.compile(r"typing\.Literal\[(.*)\]")
_NO_MODEL = re.compile(r"arguments are required: (?:\w+\.)?model$")
_NAMES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "Sequence": "a list"}
_NAMES |= {"Mapping": "a mapping", "list": "a list", "dict": "a mapping"}


def words_of_parsing(message: str, args: Sequence[str], options: Iterable[str], error: BaseException | None) -> str:
    """What is wrong with arguments, or with a file that they name.

    Args:
        message: What jsonargparse says; what it says of one field is worded by :func:`in_words`.
        args: The arguments.
        options: Dotted names that the command line knows by itself.
        error: What the message was made of.
    """
    written = written_in(args)
    while error is not None and not isinstance(error, yaml.YAMLError):
        error = error.__cause__ or error.__context__
    if error is not None:
        return f"{' or '.join(files_in(args)) or 'an argument'} is no YAML: {without_lines(error)}"
    if message.startswith("Unexpected config"):
        return f"{' or '.join(files_in(args))} is not a configuration, which has model:, data: and trainer:"
    if _NO_MODEL.search(message):
        return "there is no model; name one in a file for --config, or by --model=my_project.MyModel"
    return wrong_class(written) or misshapen(written) or in_words(message, written, options)


def in_words(message: str, written: Sequence[Written], options: Iterable[str]) -> str:
    """Say what a message of jsonargparse means, if it is about one field; else say it as it is, less its noise.

    Args:
        message: Names classes and keys level by level, but no keys of mappings, and repeats whole parts of the
            configuration, secrets too.
        written: What the user wrote; says in which stream a field is wrong.
        options: Dotted names that the command line knows by itself.
    """
    unrecognized = _UNRECOGNIZED.search(message)
    if unrecognized:
        return _no_such_field(unrecognized[1], list(options))
    keys = _KEY.findall(message)
    unknown = _UNKNOWN.search(message)
    if unknown:
        field = _full_name([*keys, *(unknown[1] or unknown[2]).split(".")], written)
        classes = _CLASS.findall(message)
        return _no_such_field(field, _siblings(field, classes[-1]) if classes else list(options))
    wanted = [kind or other for kind, other, _ in _WANTED.findall(message)]
    given = [got for _, _, got in _WANTED.findall(message) if got] or _GIVEN.findall(message)
    wanted = [one for one in wanted if one != "NoneType"]
    if keys and wanted and "Expected a path" not in message and "dot import path" not in message:
        value = next((one for one in given if not one.startswith(_WHOLE_PARTS)), None)
        return _wrong_value(_full_name(keys, written, value), wanted, value)
    if len(keys) > 1:
        return f"{_full_name(keys, written)}: {less_noise(message).splitlines()[-1].strip(' -')}"
    return less_noise(message)


_WHOLE_PARTS = ("Namespace(", "NestedArg(", "{", "[")
_NOISE = (
    "Does not validate against any of the Union subtypes",
    "Subtypes: ",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "Given value",
)
"""How jsonargparse's lines begin that repeat whole parts of the configuration, secrets too, or name its own types."""
_GIVEN_MAPPING = re.compile(r"\. Got value: (Namespace\(|NestedArg\(|\{|\[).*")


def less_noise(message: str) -> str:
    """A message of jsonargparse without what repeats the configuration."""
    lines = [line for line in message.splitlines() if not line.strip().startswith(_NOISE)]
    return _GIVEN_MAPPING.sub("", "\n".join(lines))


def _full_name(keys: Sequence[str], written: Sequence[Written], value: str | None = None) -> str:
    """The field with these keys, and those of mappings between them, as it is written."""
    between = r"(?:\.[^.]+)??\."
    wanted = re.compile(between.join(re.escape(key) for key in keys if key not in ("init_args",)))
    named = [one for one in written if wanted.fullmatch(one.name)]
    fitting = [one for one in named if value is None or str(one.value) == value]
    return (fitting or named)[-1].name if named else ".".join(keys)


def _no_such_field(field: str, known: Sequence[str]) -> str:
    """Say so, and which of those known was meant: one of the same level if there are any."""
    parent, dot, name = field.rpartition(".")
    level = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    if level:
        close = [f"{parent}{dot}{one}" for one in get_close_matches(name, level, 1)]
    else:
        close = get_close_matches(field, known, 1)
    return f"there is no field {field}" + (f"; did you mean {close[0]}?" if close else "")


def _siblings(field: str, class_path: str) -> list[str]:
    """The fields of a class, named like one that it does not have."""
    parent = field.rpartition(".")[0]
    module, _, name = class_path.rpartition(".")
    made: Any = getattr(import_module(module), name)
    parameters = {name for one in inspect.getmro(made) for name in _parameters(one)}
    return [f"{parent}.{name}" for name in sorted(parameters - {"self", "args", "kwargs"})]


def _parameters(made: Any) -> Iterable[str]:
    return inspect.signature(made.__init__).parameters


def _wrong_value(field: str, wanted: Iterable[str], value: str | None) -> str:
    kinds = dict.fromkeys(_NAMES.get(one, _LITERAL.sub(r"one of \1", one)) for one in wanted)
    got = "" if value is None or "storage_options" in field else f", but got {value!r}"
    return f"{field} must be {' or '.join(kinds)}{got}"
