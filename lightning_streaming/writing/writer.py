"""The writers, one a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from lightning_streaming.replaced_names import tells_unknown_arguments
from lightning_streaming.writing.columns import infer_columns, infer_text_columns
from lightning_streaming.writing.core import ShardWriter
from lightning_streaming.writing.mds_recipe import make_mds_recipe
from lightning_streaming.writing.recipe import ShardRecipe
from lightning_streaming.writing.settings import ShardSettings
from lightning_streaming.writing.split_recipe import make_split_recipe
from lightning_streaming.writing.start import Mode

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


class WriterArguments(TypedDict, total=False):
    """What every writer takes; :class:`MDSWriter` tells the meaning and the defaults."""

    columns: Mapping[str, str] | None
    out: Required[str | Path | tuple[str, str]]
    keep_local: bool
    compression: str | None
    hashes: Sequence[str] | None
    size_limit: int | float | str | None
    progress_bar: bool
    max_workers: int | None
    retry: int
    exist_ok: bool
    mode: Mode
    storage_options: Mapping[str, Any] | None
    strict: bool


class MDSWriter(ShardWriter):
    """Writes MDS shards, which take every encoding, byte for byte as MosaicML Streaming does.

        with MDSWriter(columns={"tokens": "ndarray:uint16"}, out="s3://corpus/train", compression="zstd") as writer:
            for tokens in documents:
                writer.write({"tokens": tokens})

    A ``with`` block that ends in an exception publishes no index.
    """

    format: ClassVar[str] = "mds"

    def _make_recipe(self, columns: Mapping[str, str], settings: ShardSettings) -> ShardRecipe:
        return make_mds_recipe(columns, settings)

    def _infer(self, sample: Mapping[str, Any]) -> dict[str, str]:
        return infer_columns(sample)


@tells_unknown_arguments
class _SplitWriter(ShardWriter):
    """Writes shards of rows that people can read; columns are ``str``, ``int`` or ``float``."""

    def __init__(self, *, newline: str = "\n", **arguments: Unpack[WriterArguments]) -> None:
        """Begin as :class:`MDSWriter` does.

        Args:
            newline: What every row ends in.
            arguments: As for :class:`MDSWriter`.

        Raises:
            ConfigError: As for :class:`MDSWriter`, or ``newline`` cannot work.
        """
        self._newline = newline
        super().__init__(**arguments)

    def _make_recipe(self, columns: Mapping[str, str], settings: ShardSettings) -> ShardRecipe:
        return make_split_recipe(self.format, columns, settings, newline=self._newline)

    def _infer(self, sample: Mapping[str, Any]) -> dict[str, str]:
        return infer_text_columns(sample)


class JSONWriter(_SplitWriter):
    """Writes JSONL shards: a JSON object a row. Columns are ``str``, ``int`` or ``float``."""

    format: ClassVar[str] = "json"


class CSVWriter(_SplitWriter):
    """Writes shards of fields with commas between them, not quoted: no text may hold a comma or a newline."""

    format: ClassVar[str] = "csv"


class TSVWriter(_SplitWriter):
    """Writes shards of fields with tabs between them: no text may hold a tab or a newline."""

    format: ClassVar[str] = "tsv"


@tells_unknown_arguments
class XSVWriter(_SplitWriter):
    """Writes shards of fields with a separator of your choice between them: no text may hold it, or a newline."""

    format: ClassVar[str] = "xsv"

    def __init__(self, *, separator: str, newline: str = "\n", **arguments: Unpack[WriterArguments]) -> None:
        """Begin as :class:`MDSWriter` does.

        Args:
            separator: What is between two fields.
            newline: What every row ends in.
            arguments: As for :class:`MDSWriter`.

        Raises:
            ConfigError: As for :class:`MDSWriter`, or ``separator`` or ``newline`` cannot work.
        """
        self._separator = separator
        super().__init__(newline=newline, **arguments)

    def _make_recipe(self, columns: Mapping[str, str], settings: ShardSettings) -> ShardRecipe:
        return make_split_recipe(self.format, columns, settings, newline=self._newline, separator=self._separator)
