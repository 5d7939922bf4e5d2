"""A folder of text files, each one document; or one such file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.tools.sources.files import files_under, find_files, whole_files
from lightning_streaming.tools.sources.source import Found, Piece, Schema
from lightning_streaming.tools.sources.values import converter

SUFFIXES = (".txt", ".text", ".md", ".rst")
"""What tells such a folder from others; every file in it is read, whatever it is called."""


@dataclass(frozen=True, slots=True)
class TextFolder:
    """The text of every file, in UTF-8, and its path below the folder."""

    root: str
    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"

    @classmethod
    def open(cls, location: str) -> TextFolder:
        """Find the files of a folder, at any depth, or those that a pattern matches.

        Raises:
            ConfigError: There are none.
        """
        if not Path(location).is_dir():
            paths = find_files(location, SUFFIXES)
            return cls(os.path.commonpath([Path(path).parent for path in paths]), paths)
        found = files_under(Path(location))
        if not found:
            raise ConfigError(f"{location} must be a text file or a folder of them, but has no file")
        return cls(location, tuple(map(str, found)))

    def pieces(self, most: int) -> Sequence[Piece]:  # noqa: ARG002
        """Whole files."""
        return whole_files(self.paths)

    def schema(self) -> Schema:
        """``text`` and ``path``."""
        return Schema({"text": Found("str", "text"), "path": Found("str", "text")}, "the kind of source")

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """One row; line breaks stay as they are, and a byte order mark at the beginning does not."""
        path = Path(piece.path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is not text in UTF-8: {error}") from error
        yield 0, {"text": text, "path": path.relative_to(self.root).as_posix()}

    def place(self, piece: Piece, number: int) -> str:  # noqa: ARG002
        """The file."""
        return piece.path

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Values are text."""
        return converter(encoding)
