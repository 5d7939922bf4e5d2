"""A folder of images in a folder per class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.tools.sources.files import files_under, has_suffix, whole_files
from lightning_streaming.tools.sources.source import Found, Piece, Schema
from lightning_streaming.tools.sources.values import check_image_file, converter

ENDINGS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}
"""The encoding that an ending stands for."""
SUFFIXES = (*ENDINGS, ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Every image below the folder of a class, at any depth, with the number and the name of its class.

    Classes are numbered from 0 in the order of their names. Files are stored as they are. None may be empty, and JPEG
    and PNG files must be whole, whatever the encoding of the column.
    """

    root: str
    paths: tuple[str, ...]
    classes: tuple[str, ...]
    """Names of the classes by number; all folders in the root, also those without images."""
    widest: ClassVar[str] = "json"

    @classmethod
    def open(cls, location: str) -> ImageFolder:
        """Find the images of a folder.

        Raises:
            ConfigError: It has none, or one that is in no class.
        """
        root = Path(location)
        found = [path for path in files_under(root) if has_suffix(path, SUFFIXES)]
        if not found:
            endings = ", ".join(SUFFIXES)
            raise ConfigError(f"{location} must be a folder of images, but has no file that ends in {endings}")
        homeless = [path for path in found if path.parent == root]
        if homeless:
            raise ConfigError(f"{homeless[0]} is in no class; each image must be in a folder named after its class")
        classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        return cls(location, tuple(map(str, found)), tuple(classes))

    def pieces(self, most: int) -> Sequence[Piece]:  # noqa: ARG002
        """Whole files."""
        return whole_files(self.paths)

    def schema(self) -> Schema:
        """``image``, ``label`` and ``class``; the image is bytes unless the endings of all say the same."""
        kinds = {ENDINGS.get(Path(path).suffix.lower(), "bytes") for path in self.paths}
        image = Found(kinds.pop() if len(kinds) == 1 else "bytes", "images")
        columns = {"image": image, "label": Found("int", "numbers of classes"), "class": Found("str", "classes")}
        return Schema(columns, "the names of the files")

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """One row.

        Raises:
            EncodingError: The file is empty, or not the whole file that its name promises.
        """
        path = Path(piece.path)
        name = path.relative_to(self.root).parts[0]
        data = path.read_bytes()
        if not data or path.suffix.lower() in ENDINGS:
            try:
                check_image_file(data)
            except EncodingError as error:
                raise EncodingError(f"{path}: {error}") from error
        yield 0, {"image": data, "label": self.classes.index(name), "class": name}

    def place(self, piece: Piece, number: int) -> str:  # noqa: ARG002
        """The file."""
        return piece.path

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Values are files, integers and text."""
        return converter(encoding)
