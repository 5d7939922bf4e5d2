"""Samples of litData and their bytes: a tree of lists, tuples and dicts, with consecutive leaves.

    uint32 size of each leaf, in the tree's order, little-endian
    bytes of each leaf, in the same order, as its *serializer* wrote them

The index names the serializer of each leaf, and describes the tree. The keys of a sample that is a dict are its
columns; any other sample is one column, ``sample``.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError, EncodingError, FormatError, IndexFormatError, ShardCorruptError
from lightning_streaming.formats.litdata.leaves import (
    Decode,
    is_unsafe_leaf,
    leaf_decoder,
    leaf_encoding,
    may_be_plain,
    plain_layout,
)
from lightning_streaming.formats.shard_format import PlainRows, plain_rows
from lightning_streaming.formats.values import brief

ONLY_COLUMN = "sample"
"""The column of samples that are not dicts."""

# --- the tree ---

_DICTS: dict[str, type[dict[Any, Any]]] = {"builtins.dict": dict, "collections.OrderedDict": OrderedDict}
_LISTS: dict[str, Callable[[Iterator[Any]], Any]] = {"builtins.list": list, "builtins.tuple": tuple}
_PROTOCOL = 1

Build = Callable[[Iterator[Any]], Any]
"""Consumes the leaves that it needs, and returns the value built of them."""


@dataclass(frozen=True, slots=True)
class SampleTree:
    """The tree of leaves of a sample."""

    columns: tuple[tuple[str, int, Build], ...]
    """Name, number of leaves, and builder of the value; in the order of the leaves."""
    flat: bool
    """Whether each column is one leaf."""

    @property
    def is_leaf(self) -> bool:
        """Whether a sample is one leaf, without a dict around it."""
        return self.flat and [name for name, _, _ in self.columns] == [ONLY_COLUMN]

    def encodings(self, serializers: Sequence[str]) -> dict[str, str]:
        """Return the MDS encoding that would hold each column, in the order of the leaves.

        Raises:
            IndexFormatError: A serializer has an invalid dtype number.
        """
        encodings, leaves = dict[str, str](), map(leaf_encoding, serializers)
        for name, count, build in self.columns:
            of_column = list(islice(leaves, count))
            encodings[name] = of_column[0] if build is next else "pkl" if "pkl" in of_column else "json"
        return encodings


@lru_cache(maxsize=256)
def parse_tree(spec: str, leaves: int) -> SampleTree:
    """Parse the tree that an index describes.

    Args:
        spec: Its ``data_spec``: JSON of a version and the root; each node has a type, a context and its children.
        leaves: Number of serializers in the index.

    Raises:
        IndexFormatError: It is not such a text, or the tree has another number of leaves.
        ConfigError: It has types that are not supported.
    """
    try:
        columns = _columns(*json.loads(spec))
    except RecursionError:
        raise IndexFormatError("data_spec is nested too deeply") from None
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise IndexFormatError(f"data_spec must be litData's description of a sample, but is not ({error!r})") from None
    count = sum(count for _, count, _ in columns)
    if count != leaves:
        raise IndexFormatError(f"data_format must name {count} serializers by its data_spec, but names {leaves}")
    return SampleTree(columns, flat=all(build is next for _, _, build in columns))


def _columns(version: Any, root: Any) -> tuple[tuple[str, int, Build], ...]:
    if version != _PROTOCOL:
        raise ConfigError(f"data_spec must have version {_PROTOCOL}, but has {brief(version)}")
    if root["type"] not in _DICTS:
        return ((ONLY_COLUMN, *_node(root)),)
    keys = _keys(root)
    invalid = [key for key in keys if not isinstance(key, str)]
    if invalid:
        raise ConfigError(f"each key of a sample must be a text, to name a column, but one is {brief(invalid[0])}")
    return tuple((key, *_node(child)) for key, child in zip(keys, root["children_spec"], strict=True))


def _node(node: Any) -> tuple[int, Build]:
    """Return the number of leaves of a node, and its builder."""
    kind = node["type"]
    if kind is None:
        return 1, next
    if kind not in _DICTS and kind not in _LISTS:
        raise ConfigError(
            f"samples may hold dicts, lists and tuples, but data_spec has {brief(kind)}",
            hint="write it with these",
        )
    children = [_node(child) for child in node["children_spec"]]
    count, builds = sum(count for count, _ in children), [build for _, build in children]
    if kind in _LISTS:
        sequence = _LISTS[kind]
        return count, lambda leaves: sequence(build(leaves) for build in builds)
    mapping, keys = _DICTS[kind], _keys(node)
    if len(keys) != len(builds):
        raise ValueError(f"{len(keys)} keys of {len(builds)} values")
    return count, lambda leaves: mapping((key, build(leaves)) for key, build in zip(keys, builds, strict=True))


def _keys(node: Any) -> list[Any]:
    keys = json.loads(node["context"])
    if not isinstance(keys, list) or any(isinstance(key, (list, dict)) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError(f"not keys of a dict: {brief(keys)}")
    return keys


# --- bytes of samples ---


@dataclass(frozen=True, slots=True)
class LitDataDecoder:
    """Decodes the bytes of samples to their requested columns."""

    sizes: struct.Struct
    """Sizes of all leaves."""
    leaves: tuple[tuple[str, Decode | None], ...]
    """The column of each leaf, and its decoder; None if it is not requested."""
    builds: tuple[tuple[str, Build], ...] | None
    """The requested columns; None if each is one leaf."""

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Decode the sample at these positions.

        Raises:
            ShardCorruptError: The sizes in the bytes do not add up to their length.
            EncodingError: A leaf is not one of its serializer.
        """
        stop = len(data) if stop is None else stop
        place = start + self.sizes.size
        if place > stop:
            raise ShardCorruptError(f"expected at least {self.sizes.size} bytes, but found {stop - start}")
        sizes = self.sizes.unpack_from(data, start)
        if place + sum(sizes) != stop:
            expected = self.sizes.size + sum(sizes)
            raise ShardCorruptError(f"expected {expected} bytes by the sizes of its leaves, but found {stop - start}")
        sample, name = dict[str, Any](), ""
        try:
            if self.builds is not None:
                return self._built(data, place, sizes)
            for (name, decode), size in zip(self.leaves, sizes):  # noqa: B905  # as many, and this is the hot path
                end = place + size
                if decode is not None:
                    sample[name] = decode(data[place:end])
                place = end
        except EncodingError as error:
            raise error.with_context(f"column {name!r}" if name else "") from error
        return sample

    def _built(self, data: memoryview, place: int, sizes: Sequence[int]) -> dict[str, Any]:
        """Decode columns of several leaves."""
        values = list[Any]()
        for (name, decode), size in zip(self.leaves, sizes, strict=True):
            end = place + size
            if decode is not None:
                try:
                    values.append(decode(data[place:end]))
                except EncodingError as error:
                    raise error.with_context(f"column {name!r}") from error
            place = end
        leaves = iter(values)
        return {name: build(leaves) for name, build in self.builds or ()}


def sample_decoder(
    spec: str,
    serializers: Sequence[str],
    columns: Sequence[str] | None,
    *,
    allow_unsafe_types: bool = False,
    as_files: frozenset[str] = frozenset(),
) -> LitDataDecoder:
    """Return the decoder of samples. Columns that are not requested do not have to be readable.

    Args:
        spec: The ``data_spec`` of an index.
        serializers: Its ``data_format``.
        columns: The requested columns; None for all.
        allow_unsafe_types: Whether leaves may be unpickled, which runs code of their author.
        as_files: Columns whose image files are returned as bytes.

    Raises:
        IndexFormatError: The index describes invalid samples.
        ConfigError: A requested leaf has a serializer that is not supported, or that can run code and that was not
            allowed.
        MissingDependencyError: A requested leaf needs a package that is not installed.
    """
    wanted = None if columns is None else frozenset(columns)
    return _compiled(spec, tuple(serializers), wanted, allow_unsafe_types, as_files)


@lru_cache(maxsize=256)
def _compiled(
    spec: str,
    serializers: tuple[str, ...],
    columns: frozenset[str] | None,
    allow_unsafe_types: bool,
    as_files: frozenset[str],
) -> LitDataDecoder:
    tree = parse_tree(spec, len(serializers))
    leaves, builds, names = list[tuple[str, Decode | None]](), list[tuple[str, Build]](), iter(serializers)
    for column, count, build in tree.columns:
        wanted = columns is None or column in columns
        if wanted:
            builds.append((column, build))
        for serializer in (next(names) for _ in range(count)):
            if not wanted:
                leaves.append((column, None))
                continue
            try:
                decode = leaf_decoder(serializer, allow_unsafe_types=allow_unsafe_types, as_file=column in as_files)
            except (FormatError, ConfigError) as error:
                raise error.with_context(f"column {column!r}") from None
            leaves.append((column, decode))
    return LitDataDecoder(struct.Struct(f"<{len(serializers)}I"), tuple(leaves), None if tree.flat else tuple(builds))


def unsafe_leaves(spec: str, serializers: Sequence[str]) -> list[str]:
    """Return the columns that have a leaf which can run code of its author when it is read.

    Args:
        spec: The ``data_spec`` of an index.
        serializers: Its ``data_format``.

    Raises:
        IndexFormatError: The index describes invalid samples.
        ConfigError: They have types that are not supported.
    """
    names = iter(serializers)
    leaves = [(name, list(islice(names, count))) for name, count, _ in parse_tree(spec, len(serializers)).columns]
    return [name for name, of_column in leaves if any(map(is_unsafe_leaf, of_column))]


# --- tables of samples ---


@dataclass(frozen=True, slots=True)
class PlainLeaves:
    """Leaves of only numbers and arrays, each a column: their samples may be :class:`PlainRows`."""

    columns: tuple[tuple[str, str, bool], ...]
    """Name, serializer, and whether the column is requested."""

    def rows_like(self, sample: memoryview) -> PlainRows | None:
        """Return the layout of samples like this one; None if this one cannot be read."""
        start = 4 * len(self.columns)
        if len(sample) < start:
            return None
        sizes = struct.unpack_from(f"<{len(self.columns)}I", sample)
        fields, heads = list[tuple[str, int, np.dtype[Any]]](), [(0, bytes(sample[:start]))]
        for (name, serializer, is_wanted), size in zip(self.columns, sizes, strict=True):
            layout = plain_layout(serializer, sample[start : start + size])
            if layout is None or layout.head + layout.dtype.itemsize != size:
                return None
            if layout.head:
                heads.append((start, bytes(sample[start : start + layout.head])))
            if is_wanted:
                fields.append((name, start + layout.head, layout.dtype))
            start += size
        return plain_rows(start, tuple(fields), tuple(heads)) if start == len(sample) and fields else None


def plain_leaves(spec: str, serializers: Sequence[str], columns: Sequence[str] | None) -> PlainLeaves | None:
    """Return what samples may share; None if a leaf is neither a number nor an array, or a column has several.

    Args:
        spec: The ``data_spec`` of an index.
        serializers: Its ``data_format``.
        columns: The requested columns; None for all.

    Raises:
        IndexFormatError: The index describes invalid samples.
    """
    tree = parse_tree(spec, len(serializers))
    if not tree.flat or not all(map(may_be_plain, serializers)):
        return None
    names = (name for name, _, _ in tree.columns)
    return PlainLeaves(
        tuple(
            (name, serializer, columns is None or name in columns)
            for name, serializer in zip(names, serializers, strict=True)
        )
    )


def plain_blocks(serializer: str, length: int) -> PlainRows | None:
    """Return the layout of blocks of a row of values; None if numpy has no such values.

    Args:
        serializer: A serializer of rows of values.
        length: Values of each block.
    """
    if not may_be_plain(serializer):
        return None
    dtype = np.dtype((leaf_encoding(serializer).partition(":")[2], (length,)))
    return plain_rows(dtype.itemsize, ((ONLY_COLUMN, 0, dtype),))
