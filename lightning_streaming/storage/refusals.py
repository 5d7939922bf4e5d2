"""What a store says instead of giving an object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_XML = re.compile(r"<Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_LONGEST = 200


class RefusedError(Exception):
    """A store's answer that is not the object."""

    def __init__(self, status: int, headers: Mapping[str, str], words: str) -> None:
        super().__init__(f"status {status}, {words}".rstrip(", "))
        self.status = status
        self.headers = headers


def words_of(text: str, reason: str) -> str:
    """The words of a store's refusal that are for people.

    Whole answers are not shown: they may be pages of HTML, or repeat the credentials that were sent.

    Args:
        text: The answer's body: XML as S3 writes it, JSON as Google does, plain text, or anything else.
        reason: What to say if there is nothing of use in it.
    """
    if xml := _XML.search(text):
        return _cut(f"{xml[1]}: {xml[2]}", reason)
    try:
        error = json.loads(text)["error"]
        return _cut(str(error["message"]), reason)
    except (ValueError, LookupError, TypeError):
        plain = " ".join(text.split())
    return reason if not plain or plain.startswith(("<", "{", "[")) else _cut(plain, reason)


def _cut(words: str, reason: str) -> str:
    """The first words. None is cut in two: half of a secret would not be known for one."""
    if len(words) <= _LONGEST:
        return words
    return words[: _LONGEST + 1].rpartition(" ")[0] or reason
