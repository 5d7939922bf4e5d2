"""Tells the content of a source from any other, so that work goes on only with what it was begun with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_streaming.tools.console import progress
from lightning_streaming.tools.options import usable_cpus
from lightning_streaming.tools.sources.source import Piece, Source

_BLOCK_BYTES = 2**20
_WHERE = ("paths", "root")
"""Fields of sources that say where files are."""

_Span = tuple[str, int, int | None]
"""A file, and the bytes of it, that are digested as one."""


def digest_of(value: object) -> str:
    """A short text that differs where the repr of a value does."""
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:16]


def traits(source: Source) -> dict[str, Any]:
    """What decides on the rows of a source beside its files, by name: its kind, its separator, its classes."""
    known: Any = source
    others = {one.name: getattr(known, one.name) for one in fields(known) if one.name not in _WHERE}
    return {"kind": type(source).__name__, **others}


def digest_groups(source: Source, groups: Sequence[Sequence[Piece]]) -> list[str]:
    """A digest of each group of pieces: of every byte in them, and of names of files where rows tell them.

    The whole source is read for it, by threads; digesting is many times as fast as converting.
    """
    root = getattr(source, "root", None)
    spans = {piece: _span(piece) for group in groups for piece in group}
    digests = _digest_spans(set(spans.values()))

    def tell(piece: Piece) -> tuple[object, ...]:
        where = () if piece.of_lines else (piece.start, piece.stop)
        name = () if root is None else (os.path.relpath(piece.path, root),)
        return digests[spans[piece]], *where, *name

    return [digest_of([tell(piece) for piece in group]) for group in groups]


def _digest_spans(spans: Iterable[_Span]) -> dict[_Span, str]:
    order = sorted(spans, key=repr)
    with (
        ThreadPoolExecutor(usable_cpus()) as pool,
        progress(len(order), "look at the source", "files") as advance,
    ):
        found = {}
        for span, digest in zip(order, pool.map(_digest_span, order), strict=True):
            found[span] = digest
            advance(1)
        return found


def _span(piece: Piece) -> _Span:
    """The bytes of a piece; the whole file, where it is not counted in bytes."""
    if not piece.of_lines:
        return piece.path, 0, None
    with Path(piece.path).open("rb") as file:
        start = _first_line(file, piece.start)
        return piece.path, start, None if piece.stop is None else max(start, _first_line(file, piece.stop))


def _first_line(file: Any, position: int) -> int:
    """Where the first line begins that begins at a position or after it."""
    if position:
        file.seek(position - 1)
        file.readline()
        return int(file.tell())
    return 0


def _digest_span(span: _Span) -> str:
    path, start, stop = span
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        file.seek(start)
        left = None if stop is None else stop - start
        while block := file.read(_BLOCK_BYTES if left is None else min(_BLOCK_BYTES, left)):
            digest.update(block)
            left = None if left is None else left - len(block)
    return digest.hexdigest()
