"""The public names and the options of the package, from docstrings and signatures.

An ``{api}`` block names what is documented where it stands, a name a line, with the members that are shown of it:
``Name`` none, ``Name: a b`` these, ``Name: *`` all. An ``{options}`` block names a class whose arguments are listed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx

import lightning_streaming
from lightning_streaming.signatures import explanations_of

_MOST_ARGUMENTS = 5
_SECTION = re.compile(r"[A-Z]\w+:")
_ARGUMENT = re.compile(r"    (\w+):(?= )")
PACKAGE = "lightning_streaming"
_BLOCK = re.compile(r"^```\{(api|options)\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MENTION = re.compile(r"\bdocs/([\w/-]+)\.md\b")
_MARKED = re.compile(r"(``.+?``|:\w+:`[^`]+`)")
"""Code and references: the only marks of reStructuredText that docstrings here have."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _prepare, priority=400)  # before napoleon, which is at 500
    app.connect("autodoc-process-docstring", _restore, priority=600)
    app.connect("autodoc-process-signature", _shorten)
    app.connect("doctree-read", _draw_dashes)
    return {"parallel_read_safe": True}


def _read(_: Sphinx, __: str, source: list[str]) -> None:
    source[0] = _BLOCK.sub(lambda block: "\n".join(_made(block[1], block[2].splitlines())), source[0])


def _made(kind: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        name, _, members = line.partition(": ")
        yield "```{eval-rst}"
        yield from documented(name, members) if kind == "api" else arguments(name)
        yield from ("```", "")


def _prepare(app: Sphinx, __: str, ___: str, item: Any, ____: Any, lines: list[str]) -> None:
    lines[:] = list(with_programs([readied(line) for line in lines]))
    if callable(item) and _has_many_arguments(item):
        lines[:] = with_defaults(lines, inspect.signature(item))
    app.env.temp_data["prepared"] = list(lines)


def _restore(app: Sphinx, what: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Undo a change of napoleon to attributes: it takes words before a colon for their type."""
    prepared = list(app.env.temp_data.pop("prepared") or ())
    if what in ("attribute", "property") and not any(map(_SECTION.fullmatch, prepared)):
        lines[:] = prepared


def with_programs(lines: list[str]) -> Iterator[str]:
    """Yield a docstring with indented blocks before its sections as programs."""
    is_before = True
    for above, line in zip(["words", *lines], lines, strict=False):
        is_before &= not _SECTION.fullmatch(line)
        if is_before and line.startswith("    ") and not above:
            yield from (".. code-block:: python", "")
        yield line


def _shorten(*event: Any) -> tuple[str, str | None] | None:
    _, _, _, item, _, signature, returns = event
    return ("(...)", returns) if signature and callable(item) and _has_many_arguments(item) else None


def _draw_dashes(_: Sphinx, page: nodes.document) -> None:
    """Replace the two dashes between an argument and its meaning, which Sphinx leaves to its smart quotes."""
    for text in list(page.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def _has_many_arguments(function: Any) -> bool:
    """Return whether a signature is too long to read as a whole; its defaults are then next to the arguments."""
    try:
        return len(inspect.signature(function).parameters) > _MOST_ARGUMENTS
    except (TypeError, ValueError):  # of some builtins
        return False


def with_defaults(lines: list[str], signature: inspect.Signature) -> list[str]:
    """Return a docstring with the default of each argument at the end of its explanation."""
    rows: list[str] = []
    default = ""
    for line in [*lines, ""]:
        named = _ARGUMENT.match(line)
        if default and not line.startswith("     "):  # the previous argument ends here
            rows[-1] += f" Default: ``{default}``."
            default = ""
        argument = signature.parameters.get(named[1]) if named else None
        if argument is not None and argument.default is not argument.empty:
            default = shown(argument.default)
        rows.append(line)
    return rows[:-1]


def readied(line: str) -> str:
    """Return a line of a docstring as reStructuredText: asterisks and underscores escaped, pages linked."""
    parts = _MARKED.split(line)
    parts[::2] = [_MENTION.sub(r":doc:`/\1`", re.sub(r"[*|]|_(?!\w)", r"\\\g<0>", part)) for part in parts[::2]]
    return "".join(parts)


def documented(name: str, members: str) -> Iterator[str]:
    """Yield the reStructuredText that documents a public name, and members of it.

    Args:
        name: The name within the package, as in ``Stream`` or ``writing.merge``.
        members: Names of its members; ``*`` for all.
    """
    home, _, own = f"{PACKAGE}.{name}".rpartition(".")
    public = getattr(import_module(home), own)
    if not inspect.isclass(public):
        yield f".. autofunction:: {home}.{own}"
        return
    yield f".. autoclass:: {home}.{own}"
    if issubclass(public, BaseException):
        yield "   :show-inheritance:"
    if members == "*":
        yield from ("   :members:", f"   :inherited-members: {', '.join(sorted(_foreign_bases(public)))}")
    elif members:
        yield f"   :members: {', '.join(members.split())}"


def _foreign_bases(kind: type) -> set[str]:
    """Return the base classes from other packages, which document their members."""
    return {base.__name__ for base in kind.__mro__ if not base.__module__.startswith(PACKAGE)}


def arguments(name: str) -> Iterator[str]:
    """Yield the arguments of a class as a list of definitions: name, type, default, meaning."""
    kind = getattr(lightning_streaming, name)
    meanings = {option: _meaning(text) for option, text in explanations_of(kind).items()}
    hints = {**get_type_hints(kind), **inspect.get_annotations(kind.__init__)}
    for argument in inspect.signature(kind).parameters.values():
        default = "" if argument.default is argument.empty else f" = {shown(argument.default)}"
        named = f"**{argument.name}** : ``{spelt(hints[argument.name])}{default}``"
        yield from (named, f"   {meanings[argument.name]}", "")


def _meaning(text: str) -> str:
    """Return what a docstring says of an argument, as a single line."""
    return readied(" ".join(text.partition(":")[2].split()))


def spelt(kind: Any) -> str:
    """Return a type as it is written in Python, without the modules that it comes from."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b[a-zA-Z_][\w.]*\.(?=\w)", "", text)


def shown(default: Any) -> str:
    """Return a default as it is written in Python; ``{}`` for that of a factory."""
    if default.__class__.__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "{}"
    return repr(default)


def escaped(text: str) -> str:
    """Return a text with the marks of reStructuredText escaped."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)
