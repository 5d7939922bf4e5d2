"""Count the tokens of every document before a run that packs them, and show the distribution of lengths.

    lightning-streaming lengths s3://corpus/web --column tokens
    lightning-streaming lengths data/train --column raw --dtype uint16
    lightning-streaming lengths data/train --lengths num_tokens --json
    lightning-streaming lengths --config run.yaml

--column names the column of tokens: one-dimensional arrays ('ndarray', 'ndarray:uint16', 'ndarray:uint16:2048'), whose
elements are counted; or bytes, with --dtype as the type of a token. If tokens are stored in another way, or a run
computes them, --lengths names a column of integers with the lengths. A run may also use a Python function for lengths,
which works with --config only.

Tokens are not decoded. If only their column varies in size ('ndarray:DTYPE' or bytes), and shards are not compressed,
the offsets at the start of each shard determine the lengths: from a remote dataset, only these are read, four bytes per
document, and no shard is downloaded. Otherwise, shards are downloaded as in a run.

The lengths, four bytes per document, are stored on this node next to the dataset's cached index. Any run with the same
request for the same data uses them: pass --local if the run has local=. After an interruption, run the command again to
continue. After an append, only new shards are counted. On several nodes, run it on each.

--config counts all documents that a run packs (packing: or token_budget: in its data), for each stream of each of its
stages, also with a Python function; and plans the packs of the run's first epoch. The plan stays in this node's runtime
directory until the node restarts or another run computes the order or the packs of an epoch there.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection.document_lengths import StreamLengths, document_lengths
from lightning_streaming.tools import commands
from lightning_streaming.tools.console import FINE, print_json, print_line, print_table, progress
from lightning_streaming.tools.stored.stored_dataset import find_dataset

_AT_ONCE = 1 << 20
"""Lengths that are counted together."""
_WIDEST_BAR = 30
_CLASSES = 33
"""Bins of the histogram: the number of bits of a length, from 0."""
_HALF = 1 << 16


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("dataset", metavar="DATASET", nargs="?", help="directory or URL of a dataset, as the run's remote=")
    words = "count what the run of this configuration needs; of several, later ones override earlier ones"
    add("--config", metavar="C", action="append", default=[], help=words)
    add("--column", metavar="NAME", help="column of the tokens: one-dimensional arrays, or bytes with --dtype")
    add("--dtype", metavar="DTYPE", help="type of the tokens in a column of bytes, like uint16")
    add("--lengths", metavar="NAME", help="column of integers with the length of each document")
    add("--local", metavar="DIR", help="the run's local=: its cache directory, if it is not the default one")
    commands.add_format(parser)
    commands.add_json(parser)
    commands.add_storage_options(parser)


def run(args: Namespace) -> int:
    """Count the lengths, and print a summary."""
    commands.check_config_or_dataset(
        args, "column", "dtype", "lengths", "local", "format", "block_length", "storage_options"
    )
    if args.config:
        return commands.of_run("runs.stages.lengths_run")(args.config, as_json=args.json)
    if (args.column is None) == (args.lengths is None):
        raise ConfigError(
            "give the column with the length of a document: either --column TOKENS or --lengths NUM_TOKENS",
            option="--column",
        )
    if args.dtype is not None and args.column is None:
        raise ConfigError(
            "--dtype is the type of tokens in a column of bytes", hint="name that with --column", option="--dtype"
        )
    request = LengthsRequest(column=args.column, dtype=args.dtype, lengths=args.lengths)
    dataset = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    cache = dataset.cache(args.local)
    index, began = cache.read_index(), time.monotonic()
    if not index.num_samples:
        raise ConfigError(f"{dataset.shown} has no documents", path=dataset.shown)
    with progress(index.num_samples, "count", "documents") as advance:
        lengths = document_lengths(request, index, cache, watched=lambda *_: nullcontext(advance))
    report = {
        "dataset": dataset.shown,
        "asked": {name: value for name in ("column", "dtype", "lengths") if (value := getattr(args, name)) is not None},
        **_summary(lengths),
        "digest": lengths.digest,
        "kept_at": None if lengths.cached_at is None else str(lengths.cached_at),
        "was_kept": not advance.done,
        "seconds": time.monotonic() - began,
    }
    (print_json if args.json else _print_report)(report)
    return FINE


def _summary(lengths: StreamLengths) -> dict[str, Any]:
    """Return the numbers of at least one length, and the documents and tokens by length: 0, 1, 2 to 3, 4 to 7, etc."""
    values = lengths.values
    documents, tokens, longest = np.zeros(_CLASSES, np.int64), np.zeros(_CLASSES), 0
    for some in _chunks(values):
        bits = np.frexp(some.astype(np.float64))[1]
        documents += np.bincount(bits, minlength=_CLASSES)
        tokens += np.bincount(bits, some, minlength=_CLASSES)
        longest = max(longest, int(some.max()))
    filled = np.flatnonzero(documents)
    return {
        "documents": len(lengths),
        "tokens": lengths.num_tokens,
        "mean": lengths.num_tokens / len(lengths),
        "median": _median(values),
        "longest": longest,
        "histogram": [
            {
                "from": 1 << bits >> 1,
                "to": (1 << bits) - 1,
                "documents": int(documents[bits]),
                "tokens": int(tokens[bits]),
            }
            for bits in range(int(filled[0]), int(filled[-1]) + 1)
        ],
    }


def _median(values: NDArray[np.uint32]) -> float:
    """Return the median, counted by upper and lower bits rather than sorted, which would take a copy."""
    stops = np.cumsum(sum(np.bincount(some >> 16, minlength=_HALF) for some in _chunks(values)))
    middle = {(len(values) - 1) // 2, len(values) // 2}
    total = 0
    for rank in middle:
        upper = int(np.searchsorted(stops, rank, side="right"))
        alike = (some[some >> 16 == upper] & (_HALF - 1) for some in _chunks(values))
        lower = np.cumsum(sum(np.bincount(some, minlength=_HALF) for some in alike))
        before = int(stops[upper - 1]) if upper else 0
        total += upper * _HALF + int(np.searchsorted(lower, rank - before, side="right"))
    return total / len(middle)


def _chunks(values: NDArray[np.uint32]) -> Iterator[NDArray[np.uint32]]:
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
    most = max(size["documents"] for size in report["histogram"])
    rows = [
        (
            f"{size['from']:,}" if size["from"] == size["to"] else f"{size['from']:,} to {size['to']:,}",
            f"{size['documents']:,}",
            f"{size['tokens'] / max(1, report['tokens']):.1%}",
            "#" * -(-_WIDEST_BAR * size["documents"] // most),
        )
        for size in report["histogram"]
    ]
    heads = ("length", "documents", "of all tokens", "")
    print_table("by length", heads, rows, right=heads[:3])
    print_line(
        f"kept at {report['kept_at'] or 'nowhere: the cache directory is not writable; give another with --local'}"
    )
