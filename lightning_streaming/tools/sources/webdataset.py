"""A WebDataset: tar files whose neighbouring members with one name, up to its first dot, are one sample."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from lightning_streaming.errors import EncodingError, FormatError
from lightning_streaming.tools.sources.files import find_files, whole_files
from lightning_streaming.tools.sources.image_folder import ENDINGS
from lightning_streaming.tools.sources.source import Found, Piece, Schema
from lightning_streaming.tools.sources.strict_json import parse_json
from lightning_streaming.tools.sources.values import check_image_file, converter, image_encoding

SUFFIXES = (".tar", ".tar.gz", ".tgz")
KEY = "__key__"
"""The column of the samples' names, as WebDataset calls it."""

_TAR_MAGIC = slice(257, 262)
"""Where a tar file that is not compressed says what it is."""


@dataclass(frozen=True, slots=True)
class WebDataset:
    """The samples of tar files in the order of their names. A column is what follows the first dot of a member's name.

    Its last ending says what it holds: ``.txt`` text, ``.json`` JSON, ``.cls`` an integer, ``.npy`` an array,
    ``.jpg`` and ``.png`` images, which stay as they are; anything else is bytes. Pickles stay bytes too.
    """

    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"

    @classmethod
    def open(cls, location: str) -> WebDataset:
        """Find the files of a location."""
        return cls(find_files(location, SUFFIXES))

    def pieces(self, most: int) -> Sequence[Piece]:  # noqa: ARG002
        """Whole files."""
        return whole_files(self.paths)

    def schema(self) -> Schema:
        """The members of the first sample, by their endings; images by their first bytes."""
        for path in self.paths:
            for number, sample in self.rows(Piece(path, 0), ()):
                columns = {name: _found(name, value) for name, value in sample.items()}
                return Schema(columns, self.place(Piece(path, 0), number))
        raise FormatError(f"there is no sample in {self.paths[0]}" + " and the files after it" * (len(self.paths) > 1))

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Numbers count the samples of the file from 1."""
        for number, (key, members) in enumerate(_samples(piece.path), 1):
            where = f"{self.place(piece, number)}, {key}"
            yield number, {KEY: key, **{name: _decode(name, data, where) for name, data in members.items()}}

    def place(self, piece: Piece, number: int) -> str:
        """The sample of the file, counted from 1."""
        return f"{piece.path}, sample {number}"

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Values are what the endings say."""
        return converter(encoding)


def _samples(path: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The key and the members of each sample."""
    key, members = "", dict[str, bytes]()
    for name, data in _members(path):
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not ending or not stem:
            raise FormatError(f"{path}: {name} must be named NAME.ENDING, to say which sample and column it is")
        if folder + slash + stem != key:
            if members:
                yield key, members
            key, members = folder + slash + stem, {}
        column = ending.lower()
        if column in members:
            raise FormatError(f"{path}: the sample {key} has .{column} twice")
        members[column] = data
    if members:
        yield key, members


def _members(path: str) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file, but for those of WebDataset itself, like ``__meta__``."""
    try:
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                if member.isfile() and not PurePosixPath(member.name).name.startswith("__"):
                    file = tar.extractfile(member)
                    assert file is not None, "it is a file"
                    yield member.name, file.read()
            _check_end(path, tar.offset)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FormatError(f"{path} cannot be read as a tar file: {error}") from error


def _check_end(path: str, offset: int) -> None:
    """Refuse a tar file that was cut off between two files, which tarfile takes for its end.

    What is compressed tells by itself that it was cut.
    """
    with Path(path).open("rb") as file:
        is_plain = file.read(_TAR_MAGIC.stop)[_TAR_MAGIC] == b"ustar"
        file.seek(offset)
        if is_plain and file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise FormatError(f"{path} was cut off: it has no mark of its end after byte {offset}")


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig")


def _integer(data: bytes) -> int:
    text = data.decode("ascii").strip()
    if "_" in text:  # which Python reads over
        raise ValueError(f"{text[:60]!r} is not an integer")
    return int(text)


def _array(data: bytes) -> Any:
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except EOFError as error:
        raise ValueError(str(error)) from error


_DECODERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    **dict.fromkeys(("txt", "text", "transcript", "caption"), (_text, "str")),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), (_integer, "int")),
    "json": (parse_json, "json"),
    "npy": (_array, "ndarray"),
}
"""What an ending means: how to decode, and the encoding that follows."""


def _decode(name: str, data: bytes, where: str) -> Any:
    ending = name.rpartition(".")[2]
    if f".{ending}" in ENDINGS:
        _check_image(data, f"{where}.{name}")
    decoder = _DECODERS.get(ending)
    try:
        return decoder[0](data) if decoder else data
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}.{name} cannot be decoded: {error}") from error


def _check_image(data: bytes, where: str) -> None:
    # An image of another kind under such a name stays bytes: members cannot be renamed.
    if not data or image_encoding(data) != "bytes":
        try:
            check_image_file(data)
        except EncodingError as error:
            raise FormatError(f"{where}: {error}") from error


def _found(name: str, value: Any) -> Found:
    if name == KEY:
        return Found("str", "text")
    decoder = _DECODERS.get(name.rpartition(".")[2])
    return Found(decoder[1] if decoder else image_encoding(value), name)
