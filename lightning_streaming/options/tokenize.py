"""Options of text and conversations that are tokenized as they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, NoReturn

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import OptionGroup, store_plain
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.tokenizing.documents import DocumentTokenizer, TokenizerFields

_OF_CHAT = ("tools", "template", "variables")
_OF_TEXT = ("bos", "eos")
_LARGEST = 2**63 - 1
"""Samples have tokens of int64."""


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeConfig(OptionGroup, TokenizerFields):
    """Tokenizing of texts or conversations as they are read.

    Samples have ``tokens``, an int64 array, instead of the columns that are named here. Conversations have a
    ``loss_mask`` too: 1 for tokens that the assistant writes, 0 for others. Lengths are counted once per node, and
    again if the tokenizer or the template changes.

    Args:
        tokenizer: Path of a JSON file of the ``tokenizers`` package, or of a folder that has ``tokenizer.json``; or
            "bytes", the bytes of UTF-8.
        text: Column of texts. Default: "text", without ``chat``.
        chat: Column of conversations: lists of messages with ``role`` and ``content``, or ``from`` and ``value``.
        tools: Column of the tools of a conversation, a list of JSON schemas. None: no tools.
        template: Path of a chat template. None: that of the tokenizer's folder.
        variables: Further variables of the chat template, like ``{"enable_thinking": false}``.
        bos: Token before each text that does not begin with it: its number, or its name like "<s>". None: no token.
        eos: Token after each text that does not end with it. None: no token.

    Raises:
        ConfigError: A field has a value that cannot work, or fields contradict each other.
    """

    option: ClassVar[str] = "tokenize"
    example: ClassVar[str] = "{tokenizer: tokenizer.json, text: text}"

    def __post_init__(self) -> None:
        store_plain(self)
        for name in ("tokenizer", "text", "chat", "tools", "template"):
            value = getattr(self, name)
            if (value is not None or name == "tokenizer") and (not isinstance(value, str) or not value):
                self._refuse(name, f"must be a text, but is {short_repr(value)}")
        for name in _OF_TEXT:
            value = getattr(self, name)
            if value is not None and not _may_be_token(value):
                words = f"must be the name of a token, or its number up to {_LARGEST}"
                self._refuse(name, f"{words}, but is {short_repr(value)}")
        if self.variables is not None and not _is_json_object(self.variables):
            self._refuse("variables", f"must map names to values of JSON, but is {short_repr(self.variables)}")
        if self.text is not None and self.chat is not None:
            self._refuse("chat", f"is {self.chat!r}, but text is {self.text!r}; name one of them")
        if self.text is None and self.chat is None:
            object.__setattr__(self, "text", "text")
        for name in _OF_CHAT if self.chat is None else _OF_TEXT:
            if getattr(self, name) is not None:
                other, kind = ("chat", "conversations") if self.chat is None else ("text", "texts")
                self._refuse(name, f"is for {kind}, but {other} is not given")

    def documents(self) -> DocumentTokenizer:
        """Return the tokenizer of rows, which has read no file yet."""
        return DocumentTokenizer(**{item.name: getattr(self, item.name) for item in fields(self)})

    def _refuse(self, name: str, words: str) -> NoReturn:
        raise ConfigError(f"tokenize.{name} {words}", option=f"tokenize.{name}")


def _may_be_token(value: object) -> bool:
    if isinstance(value, str):
        return not value.isdecimal() or (len(value) <= len(str(_LARGEST)) and int(value) <= _LARGEST)
    return type(value) is int and 0 <= value <= _LARGEST


def _is_json_object(value: object) -> bool:
    try:
        return isinstance(value, Mapping) and bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
