"""Count the tokens of every document before a run that packs them, and show the distribution of lengths.

    lightning-streaming lengths s3://corpus/web --column tokens
    lightning-streaming lengths data/train --column raw --dtype uint16
    lightning-streaming lengths data/train --lengths num_tokens --json
    lightning-streaming lengths --config run.yaml

--column names the tokens: a column of one-dimensional arrays ('ndarray', 'ndarray:uint16', 'ndarray:uint16:2048'),
whose elements are counted; or of bytes, with --dtype as the type of a token. --lengths names a column of whole numbers
with the length, if tokens are stored in another way, or computed while a run reads. A run may also have a Python
function there, which this tool does not accept.

No tokens are decoded. If they are the only column of varying size ('ndarray:DTYPE' or bytes) and the shards are not
compressed, the offsets at the start of each shard give the lengths: from a remote dataset only these are read, four
bytes per document, and no shard is downloaded. Otherwise shards are downloaded as in a run.

The lengths, four bytes per document, are stored on this node next to the dataset's cached index. Any run with the same
request for the same data uses them: pass --local if the run has local=. After an interruption, run it again to
continue. Of appended data only the new shards are counted. On several nodes, run it on each.

--config counts all documents that a run packs (packing: or token_budget: in its data), for each stream of each of its
stages, also with a Python function; and plans the packs of the first epoch for the run. The plan is in this node's
runtime directory, until the node restarts or another run computes the order or the packs of an epoch there.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.dataset.stream import Stream, StreamDefaults, cache_config_of
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection.counting import document_lengths
from lightning_streaming.selection.document_lengths import StreamLengths
from lightning_streaming.tools.commands import add_format, add_json, add_storage_options, of_run
from lightning_streaming.tools.console import FINE, print_json, print_line, print_table, progress
from lightning_streaming.tools.stored.stored_dataset import find_dataset
from lightning_streaming.waits import Tell

_AT_ONCE = 1 << 20
"""Lengths that are looked at together."""
_WIDEST_BAR = 30
_CLASSES = 33
"""Of the histogram: as many bits as a length may have, and none."""
_HALF = 1 << 16


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("dataset", metavar="DATASET", nargs="?", help="directory or URL of a dataset, as the run's remote=")
    words = "count what the run of this configuration needs; of several, a later one overrides an earlier one"
    add("--config", metavar="C", action="append", default=[], help=words)
    add("--column", metavar="NAME", help="column of the tokens: one-dimensional arrays, or bytes with --dtype")
    add("--dtype", metavar="DTYPE", help="type of the tokens in a column of bytes, like uint16")
    add("--lengths", metavar="NAME", help="column of whole numbers with the length of each document")
    add("--local", metavar="DIR", help="the run's local=: its cache directory, if it is not the default one")
    add_format(parser)
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Count, and say what there is."""
    if bool(args.config) == bool(args.dataset):
        raise ConfigError(
            "say what to count: either DATASET, a directory or URL, or --config run.yaml", option="DATASET"
        )
    if args.config:
        _check_alone(args)
        return of_run("runs.stages.lengths_run")(args.config, as_json=args.json)
    asked = _request(args)
    place = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    how = {"format": args.format, "block_length": args.block_length}
    stream = Stream(remote=place.location, local=args.local, storage={"options": place.options}, **how)
    cache = ShardCache(cache_config_of(stream, place.shown, StreamDefaults()))
    index, began = cache.read_index(), time.monotonic()
    if not index.num_samples:
        raise ConfigError(f"{place.shown} has no documents", path=place.shown)
    lengths, was_kept = _count(asked, index, cache)
    report = {
        "dataset": place.shown,
        "asked": {name: value for name in ("column", "dtype", "lengths") if (value := getattr(args, name)) is not None},
        **_summary(lengths),
        "digest": lengths.digest,
        "kept_at": None if lengths.kept_at is None else str(lengths.kept_at),
        "was_kept": was_kept,
        "seconds": time.monotonic() - began,
    }
    (print_json if args.json else _print_report)(report)
    return FINE


def _check_alone(args: Namespace) -> None:
    """Refuse what a configuration says itself."""
    words = ("column", "dtype", "lengths", "local", "format", "block_length")
    given = [f"--{name.replace('_', '-')}" for name in words if getattr(args, name) is not None]
    if args.storage_options:
        given.append("--storage-options")
    if given:
        raise ConfigError(
            "--config says itself what is counted, and from where", hint=f"leave {given[0]} out", option=given[0]
        )


def _request(args: Namespace) -> LengthsRequest:
    if (args.column is None) == (args.lengths is None):
        raise ConfigError(
            "say what tells the length of a document: either --column TOKENS or --lengths NUM_TOKENS", option="--column"
        )
    if args.dtype is not None and args.column is None:
        raise ConfigError(
            "--dtype says what tokens are in a column of bytes", hint="name that with --column", option="--dtype"
        )
    return LengthsRequest(column=args.column, dtype=args.dtype, lengths=args.lengths)


def _count(asked: LengthsRequest, index: DatasetIndex, cache: ShardCache) -> tuple[StreamLengths, bool]:
    """The lengths, counted under a progress bar; and whether they had been kept."""
    looked_at = 0

    @contextmanager
    def watched(*_: object) -> Iterator[Tell]:
        with progress(index.num_samples, "count", "documents") as advance:

            def tell(samples: int) -> None:
                nonlocal looked_at
                advance(samples)
                looked_at += samples

            yield tell

    return document_lengths(asked, index, cache, watched=watched), not looked_at


# --- what there is to say of lengths ---


def _summary(lengths: StreamLengths) -> dict[str, Any]:
    """Facts of at least one length."""
    values = lengths.values
    return {
        "documents": len(lengths),
        "tokens": lengths.num_tokens,
        "mean": lengths.num_tokens / len(lengths),
        "median": _median(values),
        "longest": max(int(some.max()) for some in _pieces(values)),
        "histogram": _histogram(values),
    }


def _median(values: NDArray[np.uint32]) -> float:
    """The middle one; between two of them the mean. Counted rather than sorted, which would take a copy."""
    stops = np.cumsum(sum(np.bincount(some >> 16, minlength=_HALF) for some in _pieces(values)))
    middle = {(len(values) - 1) // 2, len(values) // 2}
    return sum(_nth(values, rank, stops) for rank in middle) / len(middle)


def _nth(values: NDArray[np.uint32], rank: int, stops: NDArray[np.int64]) -> int:
    """The n-th smallest one.

    Args:
        values: All of them.
        rank: Which one, from 0.
        stops: How many have these upper 16 bits, or smaller ones.
    """
    upper = int(np.searchsorted(stops, rank, side="right"))
    alike = (some[some >> 16 == upper] & (_HALF - 1) for some in _pieces(values))
    lower = np.cumsum(sum(np.bincount(some, minlength=_HALF) for some in alike))
    before = int(stops[upper - 1]) if upper else 0
    return upper * _HALF + int(np.searchsorted(lower, rank - before, side="right"))


def _histogram(values: NDArray[np.uint32]) -> list[dict[str, int]]:
    """Documents and their tokens by length: none, 1, 2 to 3, 4 to 7, and so on."""
    documents, tokens = np.zeros(_CLASSES, np.int64), np.zeros(_CLASSES)
    for some in _pieces(values):
        bits = np.frexp(some.astype(np.float64))[1]
        documents += np.bincount(bits, minlength=_CLASSES)
        tokens += np.bincount(bits, some, minlength=_CLASSES)
    filled = np.flatnonzero(documents)
    return [
        {
            "from": 1 << bits >> 1,
            "to": (1 << bits) - 1,
            "documents": int(documents[bits]),
            "tokens": int(tokens[bits]),
        }
        for bits in range(int(filled[0]), int(filled[-1]) + 1)
    ]


def _pieces(values: NDArray[np.uint32]) -> Iterator[NDArray[np.uint32]]:
    return (values[first : first + _AT_ONCE] for first in range(0, len(values), _AT_ONCE))


def _print_report(report: Mapping[str, Any]) -> None:
    facts: Sequence[tuple[str, str]] = [
        ("documents", f"{report['documents']:,}"),
        ("tokens", f"{report['tokens']:,}"),
        ("mean length", f"{report['mean']:,.1f}"),
        ("median", f"{report['median']:,.1f}".removesuffix(".0")),
        ("longest", f"{report['longest']:,}"),
        ("took", "nothing: it was kept already" if report["was_kept"] else f"{report['seconds']:.1f} s"),
    ]
    print_table(report["dataset"], (), facts)
    most = max(one["documents"] for one in report["histogram"])
    rows = [
        (
            f"{one['from']:,}" if one["from"] == one["to"] else f"{one['from']:,} to {one['to']:,}",
            f"{one['documents']:,}",
            f"{one['tokens'] / max(1, report['tokens']):.1%}",
            "#" * -(-_WIDEST_BAR * one["documents"] // most),
        )
        for one in report["histogram"]
    ]
    heads = ("length", "documents", "of all tokens", "")
    print_table("by length", heads, rows, right=heads[:3])
    print_line(
        f"kept at {report['kept_at'] or 'nowhere: the cache directory is not writable; give another with --local'}"
    )
