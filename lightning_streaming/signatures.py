"""Signatures and docstrings: what a function accepts, and docstrings of options that are written once.

``@explains_options_of(Config)`` adds what the docstring of ``Config`` says of each option to that of a class
or function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

from lightning_streaming.errors import ConfigError

_Documented = TypeVar("_Documented")

_ARGUMENT = re.compile(r"^    (\w+):", re.MULTILINE)
_SECTION = re.compile(r"^\w+:$", re.MULTILINE)


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
