"""What every command can be told, from its parser: a ``{tools}`` block becomes a heading for each, training first.

The text is Markdown, with a block of reStructuredText for the options, which so have anchors and are found by search.
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
    """Has parsers, and parses nothing."""

    def parse_arguments(self, *_: object) -> None:
        """See :class:`lightning.pytorch.cli.LightningCLI`."""
        raise _Made(self._subcommand_parsers)


class _Made(Exception):  # noqa: N818  # it is no error
    pass


def training() -> Iterator[str]:
    """The lines of what Lightning's command line does, but for the fields of a configuration."""
    try:
        _Parsers([])
    except _Made as made:
        (parsers,) = made.args
    for name, words in SUBCOMMANDS.items():
        yield from (f"## {name}", "", "```text", f"{PROGRAM} {name} [OPTION ...] [--FIELD VALUE ...]", "```", "")
        yield f"{words[:1].upper()}{words[1:]}. Every field: [Configuration](configuration.md)."
        yield ""
        if name == next(iter(SUBCOMMANDS)):
            yield from description(DESCRIPTION.partition("\n\n")[2])
        yield from options(_without_fields(parsers[name], name))


def _without_fields(parser: ArgumentParser, name: str) -> Any:
    """What there is to tell of a parser beside the fields of a configuration, of which there are hundreds."""
    known = [one for one in parser._actions if one.option_strings and not _FIELD.match(one.option_strings[0])]
    told = SimpleNamespace(title="options", _group_actions=list(map(_in_a_sentence, known)))
    return SimpleNamespace(prog=f"{PROGRAM} {name}", _action_groups=[told])


def _in_a_sentence(action: Action) -> Action:
    """An option whose help is one sentence, without the markup of Lightning's docstrings."""
    short = copy(action)
    words = re.sub(r"^Defaults to \S+\. ", "", (action.help or "").replace("``", "`"))
    short.help = " ".join(re.split(r"\.\s|\n\n", words)[0].replace("%", "%%").rstrip(".").split())
    return short


def tool(name: str) -> Iterator[str]:
    """The lines of a tool."""
    yield from described(name, parser_of(name), "##")


def described(name: str, parser: CommandParser, heading: str) -> Iterator[str]:
    """The lines of a parser, and of those of its actions."""
    typed = [spelt(one) for one in parser._actions if not one.option_strings]
    yield from (f"{heading} {name}", "", "```text", " ".join([parser.prog, "[OPTION ...]", *typed]), "```", "")
    yield from description(parser.description or "")
    yield from description(parser.examples)
    actions = [one for one in parser._actions if isinstance(one, _SubParsersAction)]
    if not actions:
        yield from options(parser)
        yield from description(parser.epilog or "")
    for action in actions:
        for word, below in action.choices.items():
            yield from described(f"{name} {word}", below, f"{heading}#")


def description(text: str) -> Iterator[str]:
    """A docstring as Markdown: what is indented by four is shown as it stands."""
    for paragraph in text.rstrip().split("\n\n"):
        if not paragraph:
            continue
        if paragraph.startswith("    "):
            language = "console" if PROGRAM in paragraph else "text"
            told = [line.removeprefix("    ") for line in paragraph.splitlines()]
            yield from (f"```{language}", *(f"$ {line}" if language == "console" else line for line in told), "```", "")
        else:
            yield from ("```{eval-rst}", marked(paragraph), "```", "")


def options(parser: ArgumentParser) -> Iterator[str]:
    """The arguments of a parser, group by group, as reStructuredText."""
    yield from ("```{eval-rst}", f".. program:: {parser.prog}", "")
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help != SUPPRESS and "--help" not in one.option_strings]
        if shown:
            yield from (f".. rubric:: {str(group.title).capitalize()}", "")
        for one in shown:
            yield from (f".. option:: {spelt(one)}", "", f"   {marked(_help(one))}", "")
    yield from ("```", "")


def spelt(action: Action) -> str:
    """How an argument is typed."""
    if not action.option_strings:
        word = str(action.metavar or action.dest)
        return {"?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}.get(str(action.nargs), word)
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    takes = "" if action.nargs == 0 else f" {value or action.dest.upper()}"
    return ", ".join(f"{name}{takes}" for name in action.option_strings)


def _help(action: Action) -> str:
    told = (action.help or "") % {"default": action.default, "prog": PROGRAM}
    return f"{told[:1].upper()}{told[1:]}{'' if told.endswith(('.', ')')) else '.'}"


def marked(text: str) -> str:
    """Words of a help text as reStructuredText, options in it as code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"``{part.strip('`')}``" if part.startswith("`") else _SYNTAX.sub(r"``\1``", escaped(part)) for part in parts
    )
