"""Evaluate which samples of a dataset a run reads, before the run, which then starts at once.

    lightning-streaming select s3://corpus/web --where "score >= 0.8 and lang == 'en'"
    lightning-streaming select s3://corpus/web --fraction 0%:98% --group-by doc_id
    lightning-streaming select data/train --indices keep.npy --where "length(text) > 100" --out both.npy
    lightning-streaming select s3://corpus/web --not logs/bad --out keep.npy
    lightning-streaming select --config run.yaml

--where is a condition in SQL over columns of numbers, text, bytes or json; it needs lightning-streaming[select].
--fraction selects a part by hash: parts that do not overlap, like 0%:98% and 98%:100%, have no sample in common, and
stay the same when data is appended. A sample is selected if it meets all conditions.

The result, one bit per sample, is stored on this node next to the dataset's cached index. Any run with the same
request for the same data uses it: pass --local if the run has local=. Shards are downloaded only if a condition reads a
column. After an interruption, run it again to continue. On several nodes, run it on each; or write --out to a location
that all can read, and pass that to the runs as selection.indices.

--not leaves out the samples that a run with bad_samples.action: replace has logged as bad in its bad_samples.log. The
remaining ones are written to --out only, which the next run takes as selection.indices.

--config computes everything that a run would compute before it starts, for each stream of each of its stages: its
selections, the indexes of ids for joined datasets (join: with key:), and the lengths of packed documents. They are
stored in the same way. Ids of a stream's samples that a joined dataset lacks are counted, and the exit code is 1.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.dataset.bad_log import BadSample, read_bad_samples
from lightning_streaming.dataset.stream import Stream, StreamDefaults, cache_config_of, selection_of
from lightning_streaming.errors import ConfigError
from lightning_streaming.files import appears_whole
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.selection.bitmap import Selection
from lightning_streaming.selection.evaluate import select_samples
from lightning_streaming.tools.commands import (
    add_format,
    add_json,
    add_set,
    add_storage_options,
    check_set_is_of_a_run,
    of_run,
)
from lightning_streaming.tools.console import FINE, counted, print_json, print_line, print_table, progress
from lightning_streaming.tools.stored.stored_dataset import find_dataset
from lightning_streaming.units import format_bytes

_KINDS = ("split", "format", "block_length")
_SELECTION = ("where", "fraction", "group_by", "seed", "indices")
_AT_ONCE = 1 << 20
"""Truth values that are written together."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("dataset", metavar="DATASET", nargs="?", help="directory or URL of a dataset, as the run's remote=")
    words = "compute what the run of this configuration needs; of several, a later one overrides an earlier one"
    add("--config", metavar="C", action="append", default=[], help=words)
    add("--where", metavar="SQL", help="condition over columns, for example \"score >= 0.8 and lang == 'en'\"")
    add("--fraction", metavar="PART", help="part by hash, like 0%%:98%%")
    words = "keep samples with the same value of this column, like doc_id, in one part"
    add("--group-by", metavar="COLUMN", help=words)
    add("--seed", metavar="N", type=int, help="key of the hash that draws parts; 0 by default")
    add("--indices", metavar="FILE.npy", help="numbers of the samples to take, or a truth value for each")
    add("--split", metavar="DIR", help="subdirectory of the dataset, as the run's split=")
    words = "leave out the bad samples of a log: the bad_samples.log of a run, or a file there"
    add("--not", dest="bad_logs", metavar="LOG", action="append", default=[], help=words)
    add("--stream", metavar="NAME", help="with --not: the run's stream that reads this dataset, if it has several")
    add("--local", metavar="DIR", help="the run's local=: its cache directory, if it is not the default one")
    words = "also write a truth value for each sample, for selection.indices of a stream"
    add("--out", metavar="KEEP.npy", type=Path, help=words)
    add_set(parser, "with --config: ")
    add_format(parser)
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Evaluate the selection, and say what it leaves; or all that a run needs."""
    if bool(args.config) == bool(args.dataset):
        raise ConfigError(
            "say what to select from: either DATASET, a directory or URL, or --config run.yaml", option="DATASET"
        )
    if args.config:
        _check_alone(args)
        return of_run("runs.stages.select_run")(args.config, dict(args.set), as_json=args.json)
    check_set_is_of_a_run(args)
    report = _select_of_dataset(args)
    (print_json if args.json else _print_report)(report)
    return FINE


def _select_of_dataset(args: Namespace) -> dict[str, Any]:
    """Evaluate the selection, and write it where it is to be written; what there is to say about it."""
    place = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    selection_options = {name: value for name in _SELECTION if (value := getattr(args, name)) is not None}
    settings = {name: value for name in _KINDS if (value := getattr(args, name)) is not None}
    settings |= {"selection": selection_options} if selection_options else {}
    stream = Stream(remote=place.location, local=args.local, storage={"options": place.options}, **settings)
    request = selection_of(stream, StreamDefaults())
    _check(args, is_all=request.is_all)
    bad = _bad_samples(args.bad_logs, args.stream) if args.bad_logs else []
    cache = ShardCache(cache_config_of(stream, place.shown, StreamDefaults()))
    index = cache.read_index()
    began = time.monotonic()
    selection, was_kept = _select(request, index, cache)
    if bad:
        selection = selection.without(_numbers_of(bad, index, place.shown))
        settings["selection"] = {"indices": str(args.out)}
    seconds = time.monotonic() - began
    if not len(selection):
        raise ConfigError(
            f"of the {counted(index.num_samples, 'sample')} of {place.shown}, {_in_words(args, request)} selects none",
            hint="a run would refuse that, so mend the condition",
            path=place.shown,
        )
    if args.out is not None:
        _write_truth_values(selection, args.out)
    return {
        "dataset": place.shown,
        **_counts(selection, index),
        "bad_samples": len({(one.key.shard, one.key.sample_index) for one in bad}),
        "kept_at": None if selection.kept_at is None else str(selection.kept_at),
        "was_kept": was_kept,
        "out": None if args.out is None else str(args.out),
        "seconds": seconds,
        "stream": {"remote": place.shown, **({} if args.local is None else {"local": args.local}), **settings},
    }


def _select(request: SelectionConfig, index: DatasetIndex, cache: ShardCache) -> tuple[Selection, bool]:
    """The selection, evaluated under a progress bar; and whether it had been kept."""
    if request.is_all:
        return Selection.whole(index.num_samples), False
    looked_at = 0
    with progress(index.num_samples, "select", "samples") as advance:

        def tell(samples: int) -> None:
            nonlocal looked_at
            advance(samples)
            looked_at += samples

        return select_samples(request, index, cache, progress=tell), not looked_at


def _counts(selection: Selection, index: DatasetIndex) -> dict[str, int]:
    unused = selection.per_shard(index.samples_per_shard()) == 0
    return {
        "samples": index.num_samples,
        "selected": len(selection),
        "shards": len(index.shards),
        "shards_never_fetched": int(unused.sum()),
        "bytes_never_fetched": int(index.shards.data_bytes()[unused].sum()),
    }


def _check(args: Namespace, *, is_all: bool) -> None:
    """Refuse what asks for nothing, before anything is fetched."""
    if bool(args.bad_logs) > (args.out is not None):
        raise ConfigError(
            "--not writes what is left to a file for selection.indices",
            hint="name it with --out KEEP.npy",
            option="--out",
        )
    if args.stream is not None and not args.bad_logs:
        raise ConfigError(
            f"--stream {args.stream} says whose bad samples to leave out",
            hint="give their log with --not",
            option="--stream",
        )
    if is_all and not args.bad_logs:
        raise ConfigError(
            "every sample would be selected",
            hint="say which with --where, --fraction 0%:98%, --indices or --not",
            option="--where",
        )
    lone = [f"--{name.replace('_', '-')}" for name in ("group_by", "seed") if getattr(args, name) is not None]
    if lone and args.fraction is None:
        raise ConfigError(
            f"{' and '.join(lone)} needs a part to draw", hint="give one like --fraction 0%:98%", option=lone[0]
        )
    if args.out is not None and args.out.suffix != ".npy":
        raise ConfigError(
            f"--out must name a .npy file, which selection.indices of a stream takes, but is {args.out}",
            option="--out",
            path=str(args.out),
        )
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out cannot be written: {args.out.absolute().parent} is not a directory",
            option="--out",
            path=str(args.out),
        )


def _check_alone(args: Namespace) -> None:
    words = (*_SELECTION, *_KINDS, "stream", "local", "out", "storage_options")
    given = [f"--{word.replace('_', '-')}" for word in words if getattr(args, word)]
    given += ["--not"] if args.bad_logs else []
    if given:
        raise ConfigError(
            "--config says itself what is read, and from where",
            hint=f"leave {' and '.join(given)} out",
            option=given[0],
        )


def _in_words(args: Namespace, request: SelectionConfig) -> str:
    return ", ".join([*([] if request.is_all else [request.in_words()]), *(f"--not {log}" for log in args.bad_logs)])


def _bad_samples(logs: Sequence[str], stream: str | None) -> list[BadSample]:
    """What the logs tell of one stream."""
    found = [one for log in logs for one in read_bad_samples(log)]
    names = sorted({one.key.stream for one in found})
    if not names:
        raise ConfigError(
            f"{', '.join(logs)}: no sample was found bad, so there is nothing to leave out",
            option="--not",
            path=", ".join(logs),
        )
    if stream is None and len(names) > 1:
        raise ConfigError(
            f"{', '.join(logs)}: there are bad samples of {names}",
            hint="say with --stream which is meant",
            option="--stream",
            path=", ".join(logs),
        )
    if stream is not None and stream not in names:
        raise ConfigError(
            f"{', '.join(logs)}: no sample of stream {stream!r} was found bad, only of {names}",
            option="--stream",
            stream=stream,
            path=", ".join(logs),
        )
    return [one for one in found if one.key.stream == (stream or names[0])]


def _numbers_of(bad: Sequence[BadSample], index: DatasetIndex, shown: str) -> NDArray[np.int64]:
    """The numbers of bad samples in their dataset."""
    sizes = index.samples_per_shard()
    shards, indexes = np.array([(one.key.shard, one.key.sample_index) for one in bad], np.int64).T
    are_there = (shards >= 0) & (shards < len(sizes))
    are_there[are_there] = (indexes[are_there] >= 0) & (indexes[are_there] < sizes[shards[are_there]])
    if not are_there.all():
        key = bad[int(are_there.argmin())].key
        raise ConfigError(
            f"{shown} has no sample {key.sample_index} of shard {key.shard}, which the log calls bad",
            hint="it is of another dataset",
            option="--not",
            path=shown,
            sample=key.sample_index,
        )
    numbers: NDArray[np.int64] = (np.cumsum(sizes) - sizes)[shards] + indexes
    return numbers


def _write_truth_values(selection: Selection, path: Path) -> None:
    """Write a .npy file, piece by piece: it takes a byte for each sample."""
    header = {"descr": "|b1", "fortran_order": False, "shape": (selection.num_stored,)}
    with appears_whole(path) as partial, partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, selection.num_stored, _AT_ONCE):
            numbers = np.arange(first, min(first + _AT_ONCE, selection.num_stored))
            file.write(selection.has(numbers).tobytes())


def _print_report(report: Mapping[str, Any]) -> None:
    share = report["selected"] / report["samples"]
    facts: Sequence[tuple[str, str]] = [
        ("samples selected", f"{report['selected']:,} of {report['samples']:,} ({share:.1%})"),
        ("shards never fetched", _never_fetched(report)),
        *([("bad samples left out", f"{report['bad_samples']:,}")] if report["bad_samples"] else []),
        *([("written to", report["out"])] if report["out"] else []),
        ("took", "nothing: it was kept already" if report["was_kept"] else f"{report['seconds']:.1f} s"),
    ]
    print_table(report["dataset"], (), facts)
    if not report["bad_samples"]:
        nowhere = "nowhere: the cache directory is not writable; give another with --local"
        print_line(f"kept at {report['kept_at'] or nowhere}")
    print_line("\nto read these, in the settings of the data or of one of its streams:\n")
    for name, value in report["stream"].items():
        print_line(f"  {name}: {json.dumps(value, ensure_ascii=False)}")


def _never_fetched(report: Mapping[str, Any]) -> str:
    told = f"{report['shards_never_fetched']:,} of {report['shards']:,}"
    return f"{told} ({format_bytes(report['bytes_never_fetched'])})" if report["shards_never_fetched"] else told
