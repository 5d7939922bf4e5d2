"""What pages are made with: the request, the answer, and the frame that all pages share. Nothing here knows HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.storage.secrets import redact
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.drawing.pages import fill
from lightning_streaming.tools.viewing.viewed import Viewed, ViewedStream

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a browser is given."""

    data: bytes
    content_type: str = "text/html"
    status: int = 200
    location: str | None = None
    """Where to look instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a browser asks for."""

    root: str
    """What all addresses begin with."""
    path: str
    """After that."""
    query: Mapping[str, str]

    def number(self, name: str, default: int = 0) -> int:
        """A whole number that is asked with; the default where it is none."""
        found = self.optional(name)
        return default if found is None else found

    def optional(self, name: str) -> int | None:
        """A whole number that is asked with; None where it is none."""
        text = self.query.get(name, "")
        return int(text) if _NUMBER.fullmatch(text) else None

    @property
    def is_asked(self) -> bool:
        """Whether to read what takes much."""
        return self.query.get("asked") == "1"

    def to(self, path: str) -> Answer:
        """An answer that leads to another page."""
        return Answer(data=b"", status=303, location=self.root + path)


class Frame:
    """Makes pages of what is viewed, all in one frame.

    Args:
        viewed: What is looked at.
    """

    def __init__(self, viewed: Viewed) -> None:
        self.viewed = viewed

    def show(self, request: Request, template: str, title: str, *, status: int = 200, **values: Any) -> Answer:
        """A page with its frame."""
        frame = {
            "root": request.root,
            "tool": "view",
            "title": f"{printable_name(title)} — {printable_name(self.viewed.shown)}",
            "heading": printable_name(title),
            "viewed": self.viewed,
            "stream": None,
            "here": "",
            "asked_for": request.query.get("key", ""),
        }
        return Answer(data=fill(template, {**frame, **values}).encode("utf-8", "replace"), status=status)

    def missing(self, request: Request) -> Answer:
        """What to show where there is no such page."""
        words, title = "Nothing has this address.", "There is no such page"
        return self.show(request, "view_problem.html", title, words=words, status=404)

    def failed(self, request: Request, error: Exception, status: int = 200, **values: Any) -> Answer:
        """What to show where an error is all there is to tell; the page itself is as it should be."""
        told: dict[str, Any] = {"title": "This could not be shown", "words": in_words(error), **values}
        return self.show(request, "view_problem.html", status=status, **told)

    def stream(self, place: int) -> ViewedStream:
        """The stream of this number.

        Raises:
            SampleIndexError: There is none.
        """
        if place >= len(self.viewed.streams):
            raise SampleIndexError(
                f"there is no stream {place}", hint=f"there are {len(self.viewed.streams)}, from 0 on"
            )
        return self.viewed.streams[place]


def in_words(error: Exception) -> str:
    """What an error says, without secrets of stores."""
    return redact(str(error), {})
