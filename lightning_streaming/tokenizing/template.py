"""Chat templates: messages to text by the Jinja template of a model, and which characters the assistant wrote.

A template is data of others: it is rendered in Jinja's sandbox, and reads no file and no clock, so that the same
messages are the same tokens on any day.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.escaping import in_one_line, short_repr
from lightning_streaming.tokenizing.messages import ASSISTANT, Message, is_trained_on

Spans = list[tuple[int, int]]
"""Begin and end of parts of a text, in characters."""

_NONCE = secrets.token_hex(8)
_OPEN, _CLOSE = f"\ufdd0{_NONCE}\ufdd1", f"\ufdd2{_NONCE}\ufdd3"
"""Marks around what the assistant wrote, while a text is rendered: unknown to data, and different in each process."""
_MARK = re.compile(f"{_OPEN}|{_CLOSE}")
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_JINJA = (3, 1, 6)
"""The first release whose sandbox has no known escape."""
_LARGEST_INDENT = 64
_LARGEST_TEXT = 1 << 26
"""Characters that a template may write for a conversation."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_template(folder: Path | None, path: str | None, *, has_tools: bool) -> tuple[str, dict[str, str]]:
    """Return the source of a chat template, and the special tokens that it may name.

    Args:
        folder: The folder of the tokenizer, with ``tokenizer_config.json`` and perhaps ``chat_template.jinja``; None
            for a tokenizer without files.
        path: File of another template; None for that of the folder.
        has_tools: Whether conversations have tools; some models have another template for these.

    Raises:
        ConfigError: There is no template, or a file cannot be read.
    """
    config = {} if folder is None else _read_config(folder / _CONFIG)
    special = {name: _text_of(config[name]) for name in _SPECIAL if config.get(name) is not None}
    if path is None and folder is not None and (folder / _TEMPLATE).is_file():
        path = str(folder / _TEMPLATE)
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8"), special
        except (OSError, ValueError) as error:  # no UTF-8, or a path with a null character
            raise ConfigError(
                f"the chat template {path!r} cannot be read: {error}", option="tokenize.template", path=path
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {str(item.get("name")): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("tool_use") if has_tools and "tool_use" in named else named.get("default")
    if not isinstance(template, str):
        subject = "the tokenizer" if folder is None else str(folder.resolve())  # of ".", a bare dot says nothing
        raise ConfigError(
            f"{subject} has no chat template: neither {_TEMPLATE}, nor chat_template in {_CONFIG}",
            hint="name the folder of a chat model's tokenizer, or a template's file by template= (convert: --template)",
            option="tokenize.template",
            path=None if folder is None else str(folder),
        )
    return template, special


class ChatTemplate:
    """A chat template, compiled.

    Args:
        source: The template.
        variables: Further variables, such as special tokens.

    Raises:
        ConfigError: It is no template.
        MissingDependencyError: Jinja is not installed.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._variables = dict(variables)
        self._template, self.has_generation = _compiled(source)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
        """Return the text of messages, with marks.

        Args:
            messages: The messages.
            tools: JSON schemas of tools; None for none.
            prompt: Whether the beginning of a reply of the assistant follows.

        Raises:
            EncodingError: The template raises an error for these messages.
        """
        known = {**self._variables, "messages": messages, "tools": tools, "documents": None}
        known["add_generation_prompt"] = prompt
        try:
            parts, size = list[str](), 0
            for part in self._template.generate(known):
                size += len(part)
                parts.append(part)
                if size > _LARGEST_TEXT:
                    break
        except Exception as error:  # a template may fail like any code
            raise EncodingError(
                f"the chat template cannot render these messages: {in_one_line(f'{type(error).__name__}: {error}')}"
            ) from error
        if size > _LARGEST_TEXT:
            raise EncodingError(f"the chat template writes more than {_LARGEST_TEXT:,} characters for these messages")
        return "".join(parts)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Return the text of a conversation."""
        return _MARK.sub("", self.render(messages, tools))

    def trained(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, Spans]:
        """Return the text of a conversation, and the parts to train on: turns of the assistant.

        They are what the template's ``{% generation %}`` blocks contain. Without such blocks, a turn is what it adds to
        the text of the messages before it and of the beginning of a reply, up to the token that ends it.

        Raises:
            EncodingError: The template cannot render the messages, or its parts do not show where a turn begins.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        text = self.render(messages, tools)
        if self.has_generation:
            text, spans = _without_marks(text)
        else:
            spans = [self._span(text, messages, number, tools) for number in turns]
        are_trained = [is_trained_on(messages[number]) for number in turns]
        if all(are_trained):
            return text, spans
        if len(spans) != len(turns):
            raise EncodingError(
                f"the chat template has {len(spans)} generation blocks for {len(turns)} messages of the assistant, so "
                "it does not show those of weight 0",
                hint="remove weight",
            )
        return text, [span for span, is_trained in zip(spans, are_trained, strict=True) if is_trained]

    def _span(
        self, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any] | None
    ) -> tuple[int, int]:
        before = self.render(messages[:number], tools, prompt=True)
        after = text if number + 1 == len(messages) else self.render(messages[: number + 1], tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise EncodingError(
                f"the chat template writes messages up to {number} in another way when more follow, so it does not "
                "show where the turn of the assistant begins and ends",
                hint="put {% generation %} and {% endgeneration %} around what the assistant writes, in a copy of the "
                "template, and name its file by template= (convert: --template)",
            )
        turn, end = after[len(before) :], self._variables.get("eos_token")
        if end and turn.rstrip().endswith(end):
            turn = turn.rstrip()
        return len(before), len(before) + len(turn)


def _without_marks(text: str) -> tuple[str, Spans]:
    parts, spans, begin, at = list[str](), Spans(), None, 0
    last = 0
    for mark in _MARK.finditer(text):
        parts.append(text[last : mark.start()])
        at, last = at + mark.start() - last, mark.end()
        if (mark[0] == _OPEN) != (begin is None):
            raise EncodingError("the chat template has a generation block within another")
        if begin is None:
            begin = at
        else:
            spans.append((begin, at))
            begin = None
    if begin is not None:
        raise EncodingError("the chat template leaves a generation block before its end")
    return "".join([*parts, text[last:]]), spans


def _compiled(source: str) -> tuple[Any, bool]:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise _needs_jinja("it is not installed") from None
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < _JINJA:
        raise _needs_jinja(f"{version('jinja2')}, which is installed, has a sandbox that templates escape from")
    lines = list[int]()

    class Generation(Extension):
        """The block around what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012  as Jinja declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            lines.append(line)
            marks = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_OPEN, _CLOSE))
            return [next(marks), nodes.Scope(body).set_lineno(line), next(marks)]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    del environment.filters["random"], environment.globals["lipsum"]  # random text
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source), bool(lines)
    except Exception as error:  # compiling may fail like any code: nested too deep, or for Python
        place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        words = error.message if isinstance(error, jinja2.TemplateSyntaxError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the chat template has an error{place}: {in_one_line(str(words))}", option="tokenize.template"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes that Jinja's own filter adds for HTML.

    Functions, like those of ``default`` and ``cls``, would be called outside of the sandbox.
    """
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _LARGEST_INDENT):
        raise EncodingError(f"tojson's indent must be a number up to {_LARGEST_INDENT}, but is {short_repr(indent)}")
    if separators is not None and [type(text) for text in separators] != [str, str]:
        raise EncodingError(f"tojson's separators must be two texts, but are {short_repr(separators)}")
    return json.dumps(
        value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )


def _needs_jinja(words: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"chat templates need the jinja2 package from {'.'.join(map(str, _JINJA))}: {words}",
        hint="run: pip install 'lightning-streaming[tokenizers]'",
    )


def _raise(message: str) -> None:
    raise EncodingError(message)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", option="tokenize.tokenizer", path=str(path)) from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} must have a JSON object", option="tokenize.tokenizer", path=str(path))
    return config


def _text_of(token: Any) -> str:
    """Return a special token, which may be described by an object."""
    return str(token["content"] if isinstance(token, Mapping) and "content" in token else token)
