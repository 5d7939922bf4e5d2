"""Options that are written once: a frozen dataclass checks and explains them, and whoever takes them borrows both.

``@takes_options_of(Config)`` gives ``__init__(self, config)`` the keywords of ``Config``, for people, type checkers and
command lines alike, and ``@called_with_options_of(Config)`` a function; ``@explains_options_of(Config)`` adds what its
docstring says of each to that of a class or function.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from lightning_streaming.errors import ConfigError

_Options = ParamSpec("_Options")
_Config = TypeVar("_Config")
_Object = TypeVar("_Object")
_Result = TypeVar("_Result")
_Documented = TypeVar("_Documented")

_ARGUMENT = re.compile(r"^    (\w+):", re.MULTILINE)
_SECTION = re.compile(r"^\w+:$", re.MULTILINE)


def takes_options_of(
    config: Callable[_Options, _Config],
) -> Callable[[Callable[[_Object, _Config], None]], Callable[Concatenate[_Object, _Options], None]]:
    """Let an ``__init__`` that takes a config take the config's own keywords instead."""
    return lambda init: _with_options_of(config, init)


def called_with_options_of(
    config: Callable[_Options, _Config],
) -> Callable[[Callable[[_Config], _Result]], Callable[_Options, _Result]]:
    """Let a function that takes a config be called with what makes one."""
    return lambda function: _with_options_of(config, function)


def _with_options_of(config: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose last argument is made of all keywords, and of what comes by place after the others."""

    def with_options(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__qualname__}() {error}") from None
        return function(*args[: len(own)], config(*args[len(own) :], **kwargs))

    functools.update_wrapper(with_options, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    del with_options.__wrapped__  # type: ignore[attr-defined]  # whose signature is another
    kinds = get_type_hints(config)  # as types: whoever reads them does not know where they are from
    own = [*inspect.signature(function).parameters.values()][:-1]
    options = [one.replace(annotation=kinds[one.name]) for one in inspect.signature(config).parameters.values()]
    signature = inspect.Signature([*own, *options])
    taken = {one.name: one.annotation for one in options}
    with_options.__annotations__ = {**taken, "return": function.__annotations__["return"]}
    setattr(with_options, "__signature__", signature)  # noqa: B010 mypy knows no such attribute
    return with_options


def explains_options_of(config: type) -> Callable[[_Documented], _Documented]:
    """Let the docstring of a class, or a function, explain the options it takes, in its own words or the config's."""

    def decorate(cls: _Documented) -> _Documented:
        if cls.__doc__ is not None:  # python -OO drops them all
            said = explanations_of(config) | _arguments_in(cls.__doc__)
            signatures = (inspect.signature(kind).parameters for kind in (cls, config))  # type: ignore[arg-type]
            said = {name: said[name] for name in dict.fromkeys([*chain(*signatures), *said]) if name in said}
            summary, *sections = re.split(r"^(?=\w+:$)", inspect.cleandoc(cls.__doc__), flags=re.MULTILINE)
            others = [one for one in sections if not one.startswith("Args:")]
            cls.__doc__ = "\n\n".join(map(str.rstrip, [summary, "\n".join(["Args:", *said.values()]), *others]))
        return cls

    return decorate


def has_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; False if Python cannot read its signature."""
    signature = _signature_of(function)
    return signature is not None and name in signature.parameters


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name, or takes any keyword."""
    signature = _signature_of(function)
    kinds = () if signature is None else [one.kind for one in signature.parameters.values()]
    return has_keyword(function, name) or inspect.Parameter.VAR_KEYWORD in kinds


def check_accepts(function: Callable[..., Any], name: str, form: str, *args: Any, **kwargs: Any) -> None:
    """Raise if a function cannot be called with these arguments; pass one whose signature Python cannot read.

    Args:
        function: A user's own.
        name: What the message calls it.
        form: What the message says of the arguments, such as ``(sample)``.
        *args: Arguments of the call; their values do not matter.
        **kwargs: As well.

    Raises:
        ConfigError: It accepts other arguments.
    """
    signature = _signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} must accept {form}; its signature is {signature}: {error}", option=name) from None


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin such as dict
        return None


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
