"""Groups of options: small frozen dataclasses, which a user may also write as a mapping of their fields."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

import numpy as np

from lightning_streaming.errors import ConfigError

_Group = TypeVar("_Group", bound="OptionGroup")


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of the groups of options. Subclasses are frozen keyword-only dataclasses that check themselves."""

    __slots__ = ()

    option: ClassVar[str]
    """Name of the option that takes the group."""
    example: ClassVar[str]
    """The group as a mapping, for messages."""

    def over(self: _Group, defaults: _Group | None) -> _Group:
        """Return this group, with fields that are None taken from ``defaults``."""
        if defaults is None:
            return self
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(defaults, **{name: value for name, value in own.items() if value is not None})

    def described(self) -> dict[str, Any]:
        """Return the fields by name, without secrets."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init}


def as_plain(value: Any) -> Any:
    """Return values of NumPy and of enumerations, mappings and iterators as plain ones of Python; others unchanged."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        with suppress(OverflowError):
            return float(value)
    if isinstance(value, Mapping):
        return {as_plain(name): as_plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | array):
        return value.tolist()
    if isinstance(value, list | range | Iterator):
        return [as_plain(item) for item in value]
    return tuple(as_plain(item) for item in value) if type(value) is tuple else value


def store_plain(options: object, leave: Container[str] = ()) -> None:
    """Store the values of options as plain ones; see :func:`as_plain`.

    Args:
        options: A dataclass, frozen or not.
        leave: Fields that stay as they were passed.
    """
    for item in fields(options):  # type: ignore[arg-type]  # it is a dataclass
        if item.name not in leave:
            object.__setattr__(options, item.name, as_plain(getattr(options, item.name)))


def as_group(kind: type[_Group], value: _Group | Mapping[str, Any] | None) -> _Group | None:
    """Return a group that may be a mapping of its fields; None for None.

    Raises:
        ConfigError: It is something else, or a field is missing, unknown or wrong.
    """
    if value is None or isinstance(value, kind):
        return value
    option = kind.option
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"{option} must be a {kind.__name__}, or a mapping of its fields like {kind.example}, but is a "
            f"{type(value).__name__}",
            option=option,
        )
    return kind(**value)


def group_of(options: object, kind: type[_Group]) -> _Group:
    """Return a group among other options, with all defaults if it was not passed."""
    return as_group(kind, getattr(options, kind.option)) or kind()


def store_group(options: object, kind: type[OptionGroup]) -> None:
    """Store a group among other options as an object, however it was passed.

    Args:
        options: A dataclass, frozen or not.
        kind: Class of the group, which has the name of its option.

    Raises:
        ConfigError: As :func:`as_group`.
    """
    object.__setattr__(options, kind.option, as_group(kind, getattr(options, kind.option)))


@contextmanager
def fields_of(group: str | None) -> Iterator[None]:
    """Make errors of checks that know no groups name the field with its group; None changes nothing."""
    try:
        yield
    except ConfigError as error:
        if group is not None and error.option is not None and not error.option.startswith(f"{group}."):
            if str(error.args[0]).startswith(error.option):
                error.args = (f"{group}.{error.args[0]}",)
            error.option = f"{group}.{error.option}"
        raise


def named_groups(
    kind: type[_Group], groups: Mapping[str, _Group | Mapping[str, Any]] | None
) -> Mapping[str, _Group] | None:
    """Return groups by name, each of which may be a mapping of its fields; None for None.

    Raises:
        ConfigError: They are no groups by name, or a field is missing, unknown or wrong; names it with the group.
    """
    option = kind.option
    if groups is None:
        return None
    if not isinstance(groups, Mapping):
        raise ConfigError(
            f"{option} must map names to fields of {kind.__name__}, like {{a: {kind.example}}}, but is a "
            f"{type(groups).__name__}",
            option=option,
        )
    return {as_plain(name): _named(kind, name, group) for name, group in groups.items()}


def _named(kind: type[_Group], name: object, group: Any) -> _Group:
    option = kind.option
    if not isinstance(name, str) or not name:
        raise ConfigError(f"names in {option} must be texts, but one is {name!r}", option=option)
    try:
        named: _Group | None = as_group(kind, {} if group is None else group)
    except ConfigError as error:
        field = (error.option or option).removeprefix(option).removeprefix(".")
        text = str(error.args[0])
        if text.startswith(f"{option}."):
            error.args = (f"{option}.{name}.{text.removeprefix(f'{option}.')}",)
        error = error.with_context(f"{option}.{name}")
        error.option = f"{option}.{name}.{field}".rstrip(".")
        raise error from None
    assert named is not None, "it is a mapping or an object"
    return named
