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
from lightning_streaming.formats.images import IMAGE_SUFFIXES
from lightning_streaming.tools.converting.sources.csv_and_json import parse_json
from lightning_streaming.tools.converting.sources.row_encoding import check_image_file, image_encoding
from lightning_streaming.tools.converting.sources.row_source import (
    Piece,
    RowSource,
    Schema,
    SourceColumn,
    files_under,
    find_files,
    has_suffix,
)

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
"""Suffixes by which such a folder is detected; all files of it are read, with any suffix."""
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_IMAGE_ENCODINGS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}
"""Encoding by suffix."""
_KEY = "__key__"
"""Name of the column of the samples' names, as in WebDataset."""
_TAR_MAGIC = slice(257, 262)
"""Position of the magic number of an uncompressed tar file."""


@dataclass(frozen=True, slots=True)
class ImageFolder(RowSource):
    """Every image below the folder of a class, at any depth, with the number and the name of its class.

    Classes are numbered from 0 in the order of their names. If all images are in the folder itself there are no
    classes, and each has its path. Files are stored unchanged. None may be empty, and JPEG and PNG files must be
    complete, with any encoding of the column.
    """

    root: str
    classes: tuple[str, ...]
    """Names of the classes by number: all folders in the root, also those without images. Empty without classes."""
    unit: ClassVar[str] = ""

    @classmethod
    def open(cls, location: str) -> ImageFolder:
        """Find the images of a folder.

        Raises:
            ConfigError: It has none, or only some are in classes.
        """
        root = Path(location)
        images = [path for path in files_under(root) if has_suffix(path, IMAGE_SUFFIXES)]
        without_class, hint = [path for path in images if path.parent == root], None
        if not images:
            why = f"{location} must be a folder of images, but has no file that ends in {', '.join(IMAGE_SUFFIXES)}"
        elif 0 < len(without_class) < len(images):
            why = (
                f"{len(without_class)} of {len(images)} images lie in {location} itself, like "
                f"{without_class[0].name}, and the others in folders, which name their classes"
            )
            hint = "put those into folders too, or all into one folder, to have no classes"
        else:
            folders = () if without_class else (path for path in root.iterdir() if path.is_dir())
            classes = sorted(path.name for path in folders if not path.name.startswith("."))
            return cls(tuple(map(str, images)), location, tuple(classes))
        raise ConfigError(why, hint=hint, option="SOURCE", path=location)

    def schema(self) -> Schema:
        """Return ``image``, ``label`` and ``class``, or without classes ``image`` and ``path``.

        The image is bytes unless all files have the same encoding by suffix.
        """
        encodings = {_IMAGE_ENCODINGS.get(Path(path).suffix.lower(), "bytes") for path in self.paths}
        image = {"image": SourceColumn(encodings.pop() if len(encodings) == 1 else "bytes", "images")}
        classes = {"label": SourceColumn("int", "numbers of classes"), "class": SourceColumn("str", "classes")}
        others = classes if self.classes else {"path": SourceColumn("str", "paths")}
        return Schema(image | others, "the names of the files")

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Yield one row.

        Raises:
            EncodingError: The file is empty, or not a complete file of its suffix.
        """
        path = Path(piece.path)
        name = path.relative_to(self.root).parts[0]  # of the class, or without classes of the file
        data = path.read_bytes()
        if not data or path.suffix.lower() in _IMAGE_ENCODINGS:
            try:
                check_image_file(data)
            except EncodingError as error:
                raise error.with_context(str(path), path=str(path)) from error
        others = {"label": self.classes.index(name), "class": name} if self.classes else {"path": name}
        yield 0, {"image": data, **others}


@dataclass(frozen=True, slots=True)
class TextFolder(RowSource):
    """The text of every file, in UTF-8, and its path below the folder."""

    root: str
    unit: ClassVar[str] = ""

    @classmethod
    def open(cls, location: str) -> TextFolder:
        """Find the files of a folder, at any depth, or those that match a pattern.

        Raises:
            ConfigError: There are none.
        """
        if not Path(location).is_dir():
            paths = find_files(location, TEXT_SUFFIXES)
            return cls(paths, os.path.commonpath([Path(path).parent for path in paths]))
        files = files_under(Path(location))
        if not files:
            raise ConfigError(
                f"{location} must be a text file or a folder of them, but has no file", option="SOURCE", path=location
            )
        return cls(tuple(map(str, files)), location)

    def schema(self) -> Schema:
        """Return ``text`` and ``path``."""
        columns = {name: SourceColumn("str", "text") for name in ("text", "path")}
        return Schema(columns, "the kind of source")

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Yield one row, with its line breaks and without a byte order mark."""
        path = Path(piece.path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is not text in UTF-8: {error}", path=str(path)) from error
        yield 0, {"text": text, "path": path.relative_to(self.root).as_posix()}


@dataclass(frozen=True, slots=True)
class WebDataset(RowSource):
    """The samples of tar files in the order of their names. Names of columns follow the first dot of members' names.

    The last suffix determines the type: ``.txt`` text, ``.json`` JSON, ``.cls`` an integer, ``.npy`` an array,
    ``.jpg`` and ``.png`` images, which are stored unchanged; other members are bytes, also pickles.
    """

    unit: ClassVar[str] = "sample"

    @classmethod
    def open(cls, location: str) -> WebDataset:
        """Find the files of a location."""
        return cls(find_files(location, TAR_SUFFIXES))

    def schema(self) -> Schema:
        """Return the members of the first sample, by their suffixes; images by their first bytes."""
        origin, sample = self.first_row()
        columns = {_KEY: SourceColumn("str", "text")}
        for name, value in sample.items():
            if name != _KEY:
                decoder = _DECODERS.get(name.rpartition(".")[2])
                columns[name] = SourceColumn(decoder[1] if decoder else image_encoding(value), name)
        return Schema(columns, origin)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Yield samples, numbered within the file from 1."""
        for number, (key, members) in enumerate(_samples(piece.path), 1):
            where = f"{self.place(piece, number)}, {key}"
            try:
                sample = {name: _decode(name, data, f"{where}.{name}") for name, data in members.items()}
            except FormatError as error:
                raise error.with_context(path=piece.path) from error.__cause__
            yield number, {_KEY: key, **sample}


def _samples(path: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key and the members of each sample."""
    key, members = "", dict[str, bytes]()
    for name, data in _members(path):
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not ending or not stem:
            raise FormatError(f"{path}: {name} must be named NAME.ENDING, for its sample and column", path=path)
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
    """Yield the name and content of each file, except those of WebDataset itself, like ``__meta__``."""
    try:
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                if member.isfile() and not PurePosixPath(member.name).name.startswith("__"):
                    file = tar.extractfile(member)
                    assert file is not None, "it is a file"
                    yield member.name, file.read()
            offset = tar.offset
        # tarfile takes a file that was truncated between two members for complete; compressed data has an end itself.
        with Path(path).open("rb") as stream:
            is_plain = stream.read(_TAR_MAGIC.stop)[_TAR_MAGIC] == b"ustar"
            stream.seek(offset)
            if is_plain and stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise FormatError(f"{path} was cut off: it has no end marker after byte {offset}", path=path)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FormatError(f"{path} cannot be read as a tar file: {error}", path=path) from error


def _integer(data: bytes) -> int:
    text = data.decode("ascii").strip()
    if "_" in text:  # which Python ignores
        raise ValueError(f"{text[:60]!r} is not an integer")
    return int(text)


def _array(data: bytes) -> Any:
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except EOFError as error:
        raise ValueError(str(error)) from error


_DECODERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    **dict.fromkeys(("txt", "text", "transcript", "caption"), (lambda data: data.decode("utf-8-sig"), "str")),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), (_integer, "int")),
    "json": (parse_json, "json"),
    "npy": (_array, "ndarray"),
}
"""Decoder and encoding by suffix."""


def _decode(name: str, data: bytes, where: str) -> Any:
    ending = name.rpartition(".")[2]
    # An image of another type under such a name stays bytes: members cannot be renamed.
    if f".{ending}" in _IMAGE_ENCODINGS and (not data or image_encoding(data) != "bytes"):
        try:
            check_image_file(data)
        except EncodingError as error:
            raise FormatError(f"{where}: {error.args[0]}", hint=error.hint) from error
    decoder = _DECODERS.get(ending)
    try:
        return decoder[0](data) if decoder else data
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} cannot be decoded: {error}") from error
