"""Reference of the command line: a ``{tools}`` block becomes a heading for each command, training first.

The text is Markdown, with a block of reStructuredText for the options, which gives them anchors for links and search.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from copy import copy
from itertools import chain
from types import SimpleNamespace
from typing import Any

from sphinx.application import Sphinx

from docs._ext.python_reference import escaped
from lightning_streaming.tools.commands import COMMANDS, CommandParser, parser_of
from lightning_streaming.tools.console import PROGRAM
from lightning_streaming.trainer import DESCRIPTION, SUBCOMMANDS
from lightning_streaming.trainer.cli import StreamingCLI

_FIELD = re.compile(r"--(?:trainer|model|optimizer|lr_scheduler|data(?!\.\w+(?:\.\w+)?\.help$))")
_BLOCK = "```{tools}\n```"
_SYNTAX = re.compile(r"(?<![\w`-])(--[a-z][a-z-]*[a-z])")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}


def _read(_: Sphinx, __: str, source: list[str]) -> None:
    if _BLOCK in source[0]:
        lines = chain(training(), chain.from_iterable(map(tool, COMMANDS)))
        source[0] = source[0].replace(_BLOCK, "\n".join(lines))


class _Parsers(StreamingCLI):
    """Command line that creates its parsers and parses nothing."""

    def parse_arguments(self, *_: object) -> None:
        """See :class:`lightning.pytorch.cli.LightningCLI`."""
        raise _Created(self._subcommand_parsers)


class _Created(Exception):  # noqa: N818  # it is no error
    pass


def training() -> Iterator[str]:
    """Yield the lines about Lightning's command line, without the fields of a configuration."""
    try:
        _Parsers([])
    except _Created as created:
        (parsers,) = created.args
    for name, words in SUBCOMMANDS.items():
        yield from (f"## {name}", "", "```text", f"{PROGRAM} {name} [OPTION ...] [--FIELD VALUE ...]", "```", "")
        yield f"{words[:1].upper()}{words[1:]}. Every field: [Configuration](configuration.md)."
        yield ""
        if name == next(iter(SUBCOMMANDS)):
            yield from description(DESCRIPTION.partition("\n\n")[2])
        yield from options(_without_fields(parsers[name], name))


def _without_fields(parser: ArgumentParser, name: str) -> Any:
    """Return a parser without the fields of a configuration, of which there are hundreds."""
    named = [action for action in parser._actions if action.option_strings]
    known = [action for action in named if not _FIELD.match(action.option_strings[0])]
    group = SimpleNamespace(title="options", _group_actions=list(map(_in_a_sentence, known)))
    return SimpleNamespace(prog=f"{PROGRAM} {name}", _action_groups=[group])


def _in_a_sentence(action: Action) -> Action:
    """Return an option with the first sentence of its help, without the markup of Lightning's docstrings."""
    short = copy(action)
    words = re.sub(r"^Defaults to \S+\. ", "", (action.help or "").replace("``", "`"))
    short.help = " ".join(re.split(r"\.\s|\n\n", words)[0].replace("%", "%%").rstrip(".").split())
    return short


def tool(name: str) -> Iterator[str]:
    """Yield the lines of a tool."""
    yield from described(name, parser_of(name), "##")


def described(name: str, parser: CommandParser, heading: str) -> Iterator[str]:
    """Yield the lines of a parser and of its actions."""
    typed = [spelt(action) for action in parser._actions if not action.option_strings]
    yield from (f"{heading} {name}", "", "```text", " ".join([parser.prog, "[OPTION ...]", *typed]), "```", "")
    yield from description(parser.description or "")
    yield from description(parser.examples)
    actions = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    if not actions:
        yield from options(parser)
        yield from description(parser.epilog or "")
    for action in actions:
        for word, below in action.choices.items():
            yield from described(f"{name} {word}", below, f"{heading}#")


def description(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown; a paragraph indented by four becomes a block of code."""
    for paragraph in text.rstrip().split("\n\n"):
        if not paragraph:
            continue
        if paragraph.startswith("    "):
            language = "console" if PROGRAM in paragraph else "text"
            rows = [line.removeprefix("    ") for line in paragraph.splitlines()]
            yield from (f"```{language}", *(f"$ {line}" if language == "console" else line for line in rows), "```", "")
        else:
            yield from ("```{eval-rst}", marked(paragraph), "```", "")


def options(parser: ArgumentParser) -> Iterator[str]:
    """Yield the arguments of a parser, group by group, as reStructuredText."""
    yield from ("```{eval-rst}", f".. program:: {parser.prog}", "")
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != SUPPRESS]
        shown = [action for action in actions if "--help" not in action.option_strings]
        if shown:
            yield from (f".. rubric:: {str(group.title).capitalize()}", "")
        for action in shown:
            yield from (f".. option:: {spelt(action)}", "", f"   {marked(_help(action))}", "")
    yield from ("```", "")


def spelt(action: Action) -> str:
    """Return the syntax of an argument."""
    if not action.option_strings:
        word = str(action.metavar or action.dest)
        return {"?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}.get(str(action.nargs), word)
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    takes = "" if action.nargs == 0 else f" {value or action.dest.upper()}"
    return ", ".join(f"{name}{takes}" for name in action.option_strings)


def _help(action: Action) -> str:
    words = (action.help or "") % {"default": action.default, "prog": PROGRAM}
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith(('.', ')')) else '.'}"


def marked(text: str) -> str:
    """Return a help text as reStructuredText, with options as code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"``{part.strip('`')}``" if part.startswith("`") else _SYNTAX.sub(r"``\1``", escaped(part)) for part in parts
    )
