"""Functions of the user over columns: the columns that they read, their calls, and the facts that identify them."""

from __future__ import annotations

import builtins
import dis
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.columns import ColumnValues, listed

_Kind = TypeVar("_Kind")
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class UnfitAnswerError(Exception):
    """Error for a value that a function must not return: what it is, and a hint."""


@dataclass(frozen=True, slots=True)
class FunctionOption:
    """Option that takes a function whose parameters are named like columns."""

    name: str
    """Name of the option in messages."""
    option: str
    """Full name of the option, the field ``option`` of errors."""
    example: str
    """Example of a function."""
    instead: str
    """Alternative to a function, for hints."""
    returned: str
    """The values that the function must return, for hints."""

    @property
    def unknown_column_hint(self) -> str:
        """Hint for a parameter that is no column, like that of ``lambda sample: ...``."""
        return f"the parameters of the function must be named like columns, as in {self.example}"

    def columns(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Return the columns that a function reads: the names of its parameters.

        Raises:
            ConfigError: It has no parameters, or a variable number.
        """
        names = _parameters(function)
        if not names:
            raise ConfigError(
                f"the parameters of {self.name}={function_name(function)} must be named like the columns that it "
                f"reads, as in {self.example}",
                option=self.option,
            )
        plain = _plain(function)[0]
        if plain is not None and _returns_nothing(plain.__code__):
            raise ConfigError(
                f"{self.name}={function_name(function)} returns None for every sample",
                hint=f"is a return missing? It must return {self.returned}",
                option=self.option,
            )
        return names

    def called(
        self,
        function: Callable[..., Any],
        columns: Mapping[str, ColumnValues],
        numbers: NDArray[np.int64],
        as_kind: Callable[[Any], _Kind],
    ) -> Iterator[_Kind]:
        """Yield what a function returns for each sample.

        Args:
            function: Called with the values by name.
            columns: Columns by name, at least those that the function reads.
            numbers: Numbers of the samples in the stream.
            as_kind: Converts the returned value.

        Raises:
            ConfigError: The function raised an error, or returned something else.
        """
        names = self.columns(function)
        rows = zip(*(listed(columns[name]) for name in names), strict=True)
        for place, row in enumerate(rows):
            values = dict(zip(names, row, strict=True))
            try:
                result = as_kind(function(**values))
            except UnfitAnswerError as error:
                problem, hint = error.args
                raise ConfigError(
                    f"{self.name}={function_name(function)} {problem} for sample {numbers[place]}",
                    hint=hint,
                    option=self.option,
                    sample=numbers[place],
                ) from None
            except Exception as error:
                raise ConfigError(
                    f"{self.name}={function_name(function)} failed on sample {numbers[place]}: "
                    f"{type(error).__name__}: {error}",
                    option=self.option,
                    sample=numbers[place],
                ) from error
            yield result

    def facts(self, function: Callable[..., Any], version: str | None = None) -> list[Any]:
        """Return what the result of a function depends on, as far as this can be detected.

        That is its code, its defaults, its closure, and the values and functions that it names of its module and of the
        user's other modules; and the same of these functions.

        Args:
            function: The function; with a version, any callable.
            version: Name given by the user for what cannot be compared, such as a tokenizer.

        Raises:
            ConfigError: It is no Python function, or depends on values that cannot be compared, and has no version.
        """
        if version is not None:
            plain, bound = _plain(function)
            return ["version", version, bound, [] if plain is None else self._facts(plain, is_checked=False)]
        if isinstance(function, MethodType) or _plain(function)[0] is not function:
            raise ConfigError(
                f"{self.name} must be a plain Python function, so that its result can be cached, but is a "
                f"{type(function).__name__}",
                hint=f"wrap it in a def or a lambda, or {self.instead}",
                option=self.option,
            )
        return self._facts(function, is_checked=True)

    def _facts(self, function: Any, *, is_checked: bool) -> list[Any]:
        functions: list[Any] = [function]
        facts = []
        for part in functions:  # the list grows meanwhile
            is_own = _package_of(part) == _package_of(function) or not _is_installed(part.__module__)
            if is_checked and is_own and (imported := _imports_of_own(part.__code__)):
                raise ConfigError(
                    f"{self.name}={function_name(function)} imports {imported}, which may change without notice (in "
                    f"{part.__qualname__})",
                    hint=f"import it at the top of the module, or {self.instead}",
                    option=self.option,
                )
            named = {}
            for name, value in _values_of(part):
                called = [of for of in (value, getattr(value, "__wrapped__", None)) if isinstance(of, FunctionType)]
                if called and ("." in name or name in _names_of(part.__code__)):
                    functions += [of for of in called if of not in functions]
                    named[name] = [f"function {functions.index(of)}" for of in called]
                elif _is_constant(value):
                    named[name] = _constant(value)
                elif is_checked and is_own and _may_change(value):
                    raise ConfigError(
                        f"{self.name}={function_name(function)} encloses a {type(value).__name__}, which may change "
                        f"without notice ({name!r} of {part.__qualname__})",
                        hint=f"use numbers or text, or a tuple or frozenset of them, or {self.instead}",
                        option=self.option,
                    )
            facts.append([*_facts_of_code(part.__code__), list(named.items())])
        return facts


WHERE = FunctionOption(
    "where",
    "selection.where",
    "lambda score, lang: score >= 0.8 and lang == 'en'",
    "evaluate it and pass selection.indices",
    "True for a sample to read, else False",
)
LENGTHS = FunctionOption(
    "lengths",
    "lengths",
    "lambda text: len(text) // 4",
    "pass its version as lengths_version=, like a digest of the tokenizer's file, or write the lengths as a column "
    "of whole numbers and name it",
    "the length of the sample",
)


def function_name(function: object) -> str:
    """Return the name of a function for messages."""
    if isinstance(function, partial):
        return f"partial of {function_name(function.func)}"
    return str(getattr(function, "__qualname__", type(function).__name__))


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters; none if they are variable or cannot be passed by name."""
    if isinstance(function, FunctionType):
        code: CodeType = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return () if code.co_flags & 0x0C or code.co_posonlyargcount else names  # *args, **kwargs
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return ()
    if any(item.kind not in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) for item in parameters):
        return ()
    bound = function.keywords if isinstance(function, partial) else {}
    return tuple(item.name for item in parameters if item.name not in bound)


def _plain(function: Any) -> tuple[Any, list[Any]]:
    """Return the Python function that a callable calls, None if there is none, and what a partial binds to it."""
    bound: list[Any] = []
    while isinstance(function, partial):
        values = [*enumerate(function.args), *sorted(function.keywords.items())]
        bound += [[name, _constant(value)] for name, value in values if _is_constant(value)]
        function = function.func
    if not isinstance(function, FunctionType | MethodType) and not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004  it is not called
    function = getattr(function, "__func__", function)
    is_plain = isinstance(getattr(function, "__code__", None), CodeType) and hasattr(function, "__globals__")
    return (function if is_plain else None), bound


def _may_change(value: object) -> bool:
    """Return whether the result may change with a value that has no facts: an object, its method, a user's class."""
    if isinstance(value, type):
        return not _is_installed(value.__module__)
    of = getattr(value, "__self__", None)  # of a builtin function: its module, or the object that it is bound to
    if of is not None and not isinstance(of, ModuleType | type):
        return True
    return isinstance(value, (FunctionType, MethodType)) or not hasattr(value, "__name__")


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]


def _values_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of everything that a function reads apart from its arguments."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield f"{name}, enclosed", cell.cell_contents
        yield from _of_module(name, cell.cell_contents, code)
    yield from ((f"default {place}", value) for place, value in enumerate(function.__defaults__ or ()))
    yield from ((f"default of {name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    known = {**vars(builtins), **function.__globals__}
    for name in _names_of(code):
        if name in known:
            yield name, known[name]
            yield from _of_module(name, known[name], code)


def _of_module(name: str, value: object, code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads of a module: the version of an installed module, each value of another one."""
    for chain in _attributes_of(code, name) if isinstance(value, ModuleType) else ():
        path, read = name, value
        for attribute in chain:
            if not isinstance(read, ModuleType) or _is_installed(read.__name__):
                break
            path, read = f"{path}.{attribute}", getattr(read, attribute, None)
        if isinstance(read, ModuleType):
            yield f"{path}.__version__", str(getattr(read, "__version__", None))
        else:
            yield path, read


def _attributes_of(code: CodeType, name: str) -> list[tuple[str, ...]]:
    """Return the chains of attributes that are looked up of a name, each once."""
    chains = list[tuple[str, ...]]()
    chain: tuple[str, ...] | None = None
    for step in dis.get_instructions(code):
        if chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, str(step.argval))
            continue
        chains += [chain] if chain else []
        is_named = step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") and step.argval == name
        chain = () if is_named else None
    inner = [more for part in code.co_consts if isinstance(part, CodeType) for more in _attributes_of(part, name)]
    return list(dict.fromkeys([*chains, *inner]))


def _imports_of_own(code: CodeType) -> str | None:
    """Return the name of a module of the user that a function imports when it runs, if any."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME" and not _is_installed(step.argval):
            return str(step.argval)
    inner = (_imports_of_own(part) for part in code.co_consts if isinstance(part, CodeType))
    return next((name for name in inner if name), None)


@lru_cache(maxsize=256)
def _is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python or an installed package, rather than to the user."""
    top = str(module).partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # __main__ has none
        return False
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any({"site-packages", "dist-packages"} & {*Path(place).parts} for place in places)


def _names_of(code: CodeType) -> list[str]:
    """Return the names that a function looks up in its module, in the order of its code, each once."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names_of(part)]
    return list(dict.fromkeys([*own, *inner]))


def _returns_nothing(code: CodeType) -> bool:
    """Return whether a function returns None on every path."""
    values = []
    for before, step in pairwise(dis.get_instructions(code)):
        if step.opname == "RETURN_CONST":
            values.append(step.argval)
        elif step.opname == "RETURN_VALUE":  # a jump target, as in `a or None`, returns values of other paths too
            is_none = before.opname == "LOAD_CONST" and before.argval is None and not step.is_jump_target
            values.append(None if is_none else step)
    return bool(values) and all(value is None for value in values)


def _is_constant(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, (*_PLAIN, np.generic, re.Pattern))


def _facts_of_code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), list(map(_constant, code.co_consts))]


def _constant(value: object) -> Any:
    if isinstance(value, CodeType):
        return _facts_of_code(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return ["frozenset", *sorted(json.dumps(_constant(item)) for item in value)]
    if isinstance(value, tuple):
        return ["tuple", *map(_constant, value)]
    if isinstance(value, re.Pattern):  # repr() truncates patterns
        return ["pattern", repr(value.pattern), value.flags]
    return repr(value)
