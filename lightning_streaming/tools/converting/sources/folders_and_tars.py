"""Sources in which a file is a row, or a column of one: folders of images or texts, and WebDataset's tar files."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.formats.images.encodings import IMAGE_SUFFIXES
from lightning_streaming.tools.converting.sources import row_source
from lightning_streaming.tools.converting.sources.csv_and_json import parse_json
from lightning_streaming.tools.converting.sources.row_encoding import check_image_file, image_encoding
from lightning_streaming.tools.converting.sources.row_source import (
    Found,
    Piece,
    RowSource,
    Schema,
    files_under,
    find_files,
)

_ENDINGS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}
"""The encoding that an ending stands for."""


@dataclass(frozen=True, slots=True)
class ImageFolder(RowSource):
    """Every image below the folder of a class, at any depth, with the number and the name of its class.

    Classes are numbered from 0 in the order of their names. Where all images lie in the folder itself there are no
    classes, and each comes with its path. Files are stored as they are. None may be empty, and JPEG and PNG files must
    be whole, whatever the encoding of the column.
    """

    root: str
    classes: tuple[str, ...]
    """Names of the classes by number; all folders in the root, also those without images. None where all lie there."""
    called: ClassVar[str] = ""

    @classmethod
    def open(cls, location: str) -> ImageFolder:
        """Find the images of a folder.

        Raises:
            ConfigError: It has none, or only some are in classes.
        """
        root = Path(location)
        found = [path for path in files_under(root) if row_source.has_suffix(path, IMAGE_SUFFIXES)]
        if not found:
            endings = ", ".join(IMAGE_SUFFIXES)
            raise ConfigError(
                f"{location} must be a folder of images, but has no file that ends in {endings}",
                option="SOURCE",
                path=location,
            )
        homeless = [path for path in found if path.parent == root]
        if len(homeless) == len(found):
            return cls(tuple(map(str, found)), location, ())
        if homeless:
            raise ConfigError(
                f"{len(homeless)} of {len(found)} images lie in {location} itself, like {homeless[0].name}, and the "
                "others in folders, which name their classes",
                hint="put those into folders too, or all into one folder, to have no classes",
                option="SOURCE",
                path=location,
            )
        classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        return cls(tuple(map(str, found)), location, tuple(classes))

    def schema(self) -> Schema:
        """``image``, ``label`` and ``class``, or without classes ``image`` and ``path``.

        The image is bytes unless the endings of all say the same.
        """
        kinds = {_ENDINGS.get(Path(path).suffix.lower(), "bytes") for path in self.paths}
        image = Found(kinds.pop() if len(kinds) == 1 else "bytes", "images")
        columns = {"image": image, "path": Found("str", "paths")}
        if self.classes:
            columns = {"image": image, "label": Found("int", "numbers of classes"), "class": Found("str", "classes")}
        return Schema(columns, "the names of the files")

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """One row.

        Raises:
            EncodingError: The file is empty, or not the whole file that its name promises.
        """
        path = Path(piece.path)
        name = path.relative_to(self.root).parts[0]  # of the class, or without classes of the file
        data = path.read_bytes()
        if not data or path.suffix.lower() in _ENDINGS:
            try:
                check_image_file(data)
            except EncodingError as error:
                raise error.with_context(str(path), path=str(path)) from error
        told = {"label": self.classes.index(name), "class": name} if self.classes else {"path": name}
        yield 0, {"image": data, **told}


TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
"""What tells such a folder from others; every file in it is read, whatever it is called."""


@dataclass(frozen=True, slots=True)
class TextFolder(RowSource):
    """The text of every file, in UTF-8, and its path below the folder."""

    root: str
    called: ClassVar[str] = ""

    @classmethod
    def open(cls, location: str) -> TextFolder:
        """Find the files of a folder, at any depth, or those that a pattern matches.

        Raises:
            ConfigError: There are none.
        """
        if not Path(location).is_dir():
            paths = find_files(location, TEXT_SUFFIXES)
            return cls(paths, os.path.commonpath([Path(path).parent for path in paths]))
        found = files_under(Path(location))
        if not found:
            raise ConfigError(
                f"{location} must be a text file or a folder of them, but has no file",
                option="SOURCE",
                path=location,
            )
        return cls(tuple(map(str, found)), location)

    def schema(self) -> Schema:
        """``text`` and ``path``."""
        return Schema({"text": Found("str", "text"), "path": Found("str", "text")}, "the kind of source")

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """One row; line breaks stay as they are, and a byte order mark at the beginning does not."""
        path = Path(piece.path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is not text in UTF-8: {error}", path=str(path)) from error
        yield 0, {"text": text, "path": path.relative_to(self.root).as_posix()}


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_KEY = "__key__"
"""The column of the samples' names, as WebDataset calls it."""

_TAR_MAGIC = slice(257, 262)
"""Where a tar file that is not compressed says what it is."""


@dataclass(frozen=True, slots=True)
class WebDataset(RowSource):
    """The samples of tar files in the order of their names. A column is what follows the first dot of a member's name.

    Its last ending says what it holds: ``.txt`` text, ``.json`` JSON, ``.cls`` an integer, ``.npy`` an array,
    ``.jpg`` and ``.png`` images, which stay as they are; anything else is bytes. Pickles stay bytes too.
    """

    called: ClassVar[str] = "sample"

    @classmethod
    def open(cls, location: str) -> WebDataset:
        """Find the files of a location."""
        return cls(find_files(location, TAR_SUFFIXES))

    def schema(self) -> Schema:
        """The members of the first sample, by their endings; images by their first bytes."""
        told_by, sample = self.first_row()
        return Schema({name: _found(name, value) for name, value in sample.items()}, told_by)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Numbers count the samples of the file from 1."""
        for number, (key, members) in enumerate(_samples(piece.path), 1):
            where = f"{self.place(piece, number)}, {key}"
            try:
                sample = {name: _decode(name, data, where) for name, data in members.items()}
            except FormatError as error:
                raise error.with_context(path=piece.path) from error.__cause__
            yield number, {_KEY: key, **sample}


def _samples(path: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The key and the members of each sample."""
    key, members = "", dict[str, bytes]()
    for name, data in _members(path):
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not ending or not stem:
            raise FormatError(
                f"{path}: {name} must be named NAME.ENDING, to say which sample and column it is", path=path
            )
        if folder + slash + stem != key:
            if members:
                yield key, members
            key, members = folder + slash + stem, {}
        column = ending.lower()
        if column in members:
            raise FormatError(f"{path}: the sample {key} has .{column} twice", path=path)
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
        raise FormatError(f"{path} cannot be read as a tar file: {error}", path=path) from error


def _check_end(path: str, offset: int) -> None:
    """Refuse a tar file that was cut off between two files, which tarfile takes for its end.

    What is compressed tells by itself that it was cut.
    """
    with Path(path).open("rb") as file:
        is_plain = file.read(_TAR_MAGIC.stop)[_TAR_MAGIC] == b"ustar"
        file.seek(offset)
        if is_plain and file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise FormatError(f"{path} was cut off: it has no mark of its end after byte {offset}", path=path)


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
    if f".{ending}" in _ENDINGS:
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
            raise FormatError(f"{where}: {error.args[0]}", hint=error.hint) from error


def _found(name: str, value: Any) -> Found:
    if name == _KEY:
        return Found("str", "text")
    decoder = _DECODERS.get(name.rpartition(".")[2])
    return Found(decoder[1] if decoder else image_encoding(value), name)
