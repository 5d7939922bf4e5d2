"""Writes samples into MDS shards, and the index that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.index import INDEX_BASENAME, ShardInfo, dump_index
from lightning_streaming.formats.mds import check_shard_bytes, shard_bytes
from lightning_streaming.writing.columns import infer_columns
from lightning_streaming.writing.destination import Destination
from lightning_streaming.writing.settings import parse_settings
from lightning_streaming.writing.shards import ShardRecipe, make_recipe, make_shard

DEFAULT_SIZE_LIMIT = 2**26


class MDSWriter:
    """Cuts samples into MDS shards, byte for byte as MosaicML Streaming does.

    The index appears last, when :meth:`finish` is called or the ``with`` block ends well. A block that ends in an
    exception leaves no index, and removes the shards that it wrote locally; those already uploaded stay, named by none.

        with MDSWriter(columns={"tokens": "ndarray:uint16"}, out="s3://corpus/train", compression="zstd") as writer:
            for tokens in documents:
                writer.write({"tokens": tokens})
    """

    def __init__(
        self,
        *,
        columns: Mapping[str, str] | None = None,
        out: str | Path | tuple[str, str],
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | float | str | None = DEFAULT_SIZE_LIMIT,
        exist_ok: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the settings and make the local directory ready.

        Args:
            columns: Column name to encoding, for example ``{"id": "int", "image": "ndarray:uint8:32,32,3"}``. What
                samples hold beside these is left out. None tells them from the first sample
                (:func:`~lightning_streaming.writing.columns.infer_columns`), and all others must have the same.
            out: A directory; or a URL that fsspec serves; or (directory, URL or second directory) for both.
            keep_local: Whether the directory of such a pair keeps its files after their upload.
            compression: Algorithm, for example ``"zstd"`` or ``"zstd:19"``; None for raw shards.
            hashes: Names of the hashes to record of each file, sorted.
            size_limit: Most raw bytes of a shard, as a number or like ``"64mb"``; a sample that is larger gets a shard
                of its own. None or 0 for one shard of any size below 4 GiB.
            exist_ok: Whether a dataset that lies in the local directory is removed first, and one under the URL written
                over. Only what its index names is removed; a directory that holds anything else is refused.
            storage_options: Arguments for the filesystem of the URL.

        Raises:
            ConfigError: A setting cannot work, or the directory is not empty.
            UnsupportedError: This version does not serve the compression or an encoding.
            MissingDependencyError: A package that a setting needs is not installed.
        """
        self._settings = parse_settings(compression, hashes, size_limit)
        self._columns_inferred = columns is None
        self._recipe = None if columns is None else make_recipe(columns, self._settings)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._shards: list[ShardInfo] = []
        self._closed = False
        self._destination = Destination(out, keep_local=keep_local, exist_ok=exist_ok, storage_options=storage_options)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. If this raises, the sample was not added, and others can still be.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
            ConfigError: The shard would have 4 GiB or more, the writer is finished, or no encoding can be told.
            StorageError: The upload of a shard failed.
        """
        if self._closed:
            raise ConfigError("this writer is finished; make another one to write more")
        recipe = self._recipe or make_recipe(infer_columns(sample), self._settings)
        names = recipe.layout.names
        if self._columns_inferred and sample.keys() != set(names):
            raise EncodingError(f"the first sample had columns {list(names)}, but this one has {list(sample)}")
        data = recipe.layout.encode(sample)
        self._recipe = recipe
        size_limit = self._settings.size_limit
        if size_limit is not None and self._shard_bytes_with(data, recipe) > size_limit:
            self._flush(recipe)
        check_shard_bytes(self._shard_bytes_with(data, recipe))
        self._pending.append(data)
        self._pending_bytes += len(data)

    def finish(self) -> None:
        """Write the last shard, and then the index. Done once; a second call does nothing.

        Raises:
            StorageError: An upload failed; it may be called again.
        """
        if self._closed:
            return
        if self._pending and self._recipe is not None:
            self._flush(self._recipe)
        self._destination.put(INDEX_BASENAME, dump_index(self._shards))
        self._destination.close()
        self._closed = True

    def __enter__(self) -> MDSWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            if not self._closed:
                self._closed = True
                self._destination.abandon()

    def _shard_bytes_with(self, data: bytes, recipe: ShardRecipe) -> int:
        """Size of the raw file if ``data`` were its last sample."""
        return shard_bytes(len(self._pending) + 1, self._pending_bytes + len(data), len(recipe.config))

    def _flush(self, recipe: ShardRecipe) -> None:
        """Store what is pending; nothing pending is a shard too, before a very first sample larger than the limit."""
        info, stored = make_shard(len(self._shards), self._pending, recipe)
        self._destination.put((info.zip_data or info.raw_data).basename, stored)
        self._shards.append(info)
        self._pending = []
        self._pending_bytes = 0
