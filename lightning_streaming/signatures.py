"""Options that are written once: a frozen dataclass checks and explains them, and whoever takes them borrows both.

``@takes_options_of(Config)`` gives ``__init__(self, config)`` the keywords of ``Config``, for people, type checkers and
command lines alike; ``@explains_options_of(Config)`` adds what its docstring says of each to that of a class.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, get_type_hints

_Options = ParamSpec("_Options")
_Config = TypeVar("_Config")
_Object = TypeVar("_Object")
_Class = TypeVar("_Class", bound=type)

_ARGUMENT = re.compile(r"^    (\w+):", re.MULTILINE)
_SECTION = re.compile(r"^\w+:$", re.MULTILINE)


def takes_options_of(
    config: Callable[_Options, _Config],
) -> Callable[[Callable[[_Object, _Config], None]], Callable[Concatenate[_Object, _Options], None]]:
    """Let an ``__init__`` that takes a config take the config's own keywords instead."""

    def decorate(init: Callable[[_Object, _Config], None]) -> Callable[Concatenate[_Object, _Options], None]:
        def with_options(self: _Object, /, *args: _Options.args, **kwargs: _Options.kwargs) -> None:
            init(self, config(*args, **kwargs))

        functools.update_wrapper(with_options, init, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        del with_options.__wrapped__  # type: ignore[attr-defined]  # whose signature is another
        kinds = get_type_hints(config)  # as types: whoever reads them does not know where they are from
        options = inspect.signature(config).parameters.values()
        typed = [one.replace(annotation=kinds[one.name]) for one in options]
        with_options.__annotations__ = {**kinds, "return": None}
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        setattr(with_options, "__signature__", inspect.Signature([own, *typed]))  # noqa: B010 mypy knows no such attribute
        return with_options

    return decorate


def explains_options_of(config: type) -> Callable[[_Class], _Class]:
    """Let the docstring of a class explain the options that it takes, in its own words, the config's or its bases'."""

    def decorate(cls: _Class) -> _Class:
        if cls.__doc__ is not None:  # python -OO drops them all
            said = explanations_of(config) | _arguments_in(cls.__doc__)
            summary, *sections = re.split(r"^(?=\w+:$)", inspect.cleandoc(cls.__doc__), flags=re.MULTILINE)
            others = [one for one in sections if not one.startswith("Args:")]
            cls.__doc__ = "\n\n".join(map(str.rstrip, [summary, "\n".join(["Args:", *said.values()]), *others]))
        return cls

    return decorate


def explanations_of(config: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each argument, by name; a class's own words come first.

    Each is whole lines, with the name, indented by four.
    """
    said: dict[str, str] = {}
    for one in reversed(config.__mro__):
        said |= _arguments_in(one.__doc__ or "")
    return said


def _arguments_in(docstring: str) -> dict[str, str]:
    section = re.split(r"^Args:$", inspect.cleandoc(docstring), maxsplit=1, flags=re.MULTILINE)[1:]
    text = _SECTION.split(section[0])[0] if section else ""
    starts = [*_ARGUMENT.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    return {match[1]: text[match.start() : end].rstrip() for match, end in zip(starts, ends, strict=False)}
