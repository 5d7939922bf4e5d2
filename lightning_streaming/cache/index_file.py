"""Reads an index file, or the parsed form that was kept of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lightning_streaming.cache.index_forms import IndexForms
from lightning_streaming.formats.index import DatasetIndex, parse_index, read_index
from lightning_streaming.formats.index_form import Identity

LARGE_INDEX_BYTES = 2**20
"""An index from this size on has a parsed form beside it; a smaller one is parsed whenever it is needed."""
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class KnownIndex:
    """Which index was read, and how other processes get at the very same."""

    digest: str
    """SHA-256 of its text."""
    text: bytes | None
    """The text itself where it is small; else there is a parsed form."""

    @property
    def is_large(self) -> bool:
        """Whether it is looked for in a parsed form."""
        return self.text is None


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index that was read from a file."""

    index: DatasetIndex
    known: KnownIndex
    is_new: bool = False
    """Whether a parsed form was made just now, so that there may be older ones."""


def load_index(path: Path, shown: str, forms: IndexForms, scratch: Path | None, likely: str | None) -> FoundIndex:
    """Read an index from a file, or from its parsed form if that is there.

    Args:
        path: The file.
        shown: What to call it in errors.
        forms: Where parsed forms are.
        scratch: Where a parsed form may be written that is missing; None to keep none.
        likely: The digest that the file had when it was last read; None if that is not known.

    Raises:
        IndexFormatError: It cannot be used.
        FileNotFoundError: There is no such file.
    """
    with path.open("rb") as file:
        identity = Identity.of(file.fileno())
        if identity.size < LARGE_INDEX_BYTES:
            text = file.read()
            return FoundIndex(parse_index(text, shown), KnownIndex(hashlib.sha256(text).hexdigest(), text))
        form = forms.find(identity, likely)
        if form is not None:
            return FoundIndex(form.index, KnownIndex(form.digest, None))
        digest = _sha256(file)
        form = forms.open(digest)
        if form is not None:
            forms.note(digest, identity)
            return FoundIndex(form.index, KnownIndex(digest, None))
        file.seek(0)
        index = read_index(file.read, shown)
        is_steady = Identity.of(file.fileno()) == identity  # nobody wrote to it meanwhile
    if scratch is not None and is_steady:
        form = forms.store(index, digest, identity, scratch)
    known = KnownIndex(digest, None)
    return FoundIndex(index, known) if form is None else FoundIndex(form.index, known, is_new=True)


def _sha256(file: BinaryIO) -> str:
    hasher = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        hasher.update(block)
    return hasher.hexdigest()
