"""Evaluate a run's selections and joins in advance, so that it starts immediately.

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
column. After an interruption, run the command again to continue. On several nodes, run it on each; or write --out to a
location that all can read, and pass it to the runs as selection.indices.

--not leaves out the samples that a run with bad_samples.action: replace has logged as bad in its bad_samples.log. The
remaining samples are written to --out only: pass that file to the next run as selection.indices.

--config computes everything that a run would compute before it starts, for each stream of each of its stages: its
selections, the indexes of ids for joined datasets (join: with key:), and the lengths of documents. They are
stored in the same way. If a joined dataset lacks ids of a stream's samples, they are counted, and the exit code is 1.
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
from lightning_streaming.selection.bitmap import Selection
from lightning_streaming.selection.evaluate import select_samples
from lightning_streaming.tools import commands
from lightning_streaming.tools.console import FINE, counted, print_json, print_line, print_table, progress
from lightning_streaming.tools.stored.stored_dataset import find_dataset
from lightning_streaming.units import format_bytes

_KINDS = ("split", "format", "block_length")
_SELECTION = ("where", "fraction", "group_by", "seed", "indices")
_AT_ONCE = 1 << 20
"""Truth values that are written at once."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("dataset", metavar="DATASET", nargs="?", help="directory or URL of a dataset, as the run's remote=")
    words = "compute what the run of this configuration needs; of several, later ones override earlier ones"
    add("--config", metavar="C", action="append", default=[], help=words)
    add("--where", metavar="SQL", help="condition over columns, for example \"score >= 0.8 and lang == 'en'\"")
    add("--fraction", metavar="PART", help="part by hash, like 0%%:98%%")
    words = "keep samples with the same value of this column, like doc_id, in one part"
    add("--group-by", metavar="COLUMN", help=words)
    add("--seed", metavar="N", type=int, help="seed of the hash that draws parts; 0 by default")
    add("--indices", metavar="FILE.npy", help="numbers of the samples to read, or a boolean for each sample")
    add("--split", metavar="DIR", help="subdirectory of the dataset, as the run's split=")
    words = "leave out the bad samples of a log: the bad_samples.log of a run, or a file in it"
    add("--not", dest="bad_logs", metavar="LOG", action="append", default=[], help=words)
    add("--stream", metavar="NAME", help="with --not: the run's stream that reads this dataset, if it has several")
    add("--local", metavar="DIR", help="the run's local=: its cache directory, if it is not the default one")
    words = "also write a boolean for each sample, for selection.indices of a stream"
    add("--out", metavar="KEEP.npy", type=Path, help=words)
    commands.add_set(parser, "with --config: ")
    commands.add_format(parser)
    commands.add_json(parser)
    commands.add_storage_options(parser)


def run(args: Namespace) -> int:
    """Evaluate the selection, and print what it leaves; or compute all that a run needs."""
    commands.check_config_or_dataset(
        args, *_SELECTION, *_KINDS, "bad_logs", "stream", "local", "out", "storage_options"
    )
    if args.config:
        return commands.of_run("runs.stages.select_run")(args.config, dict(args.set), as_json=args.json)
    report = _select_of_dataset(args)
    (print_json if args.json else _print_report)(report)
    return FINE


def _select_of_dataset(args: Namespace) -> dict[str, Any]:
    """Evaluate the selection, write it to ``--out``, and return the report."""
    dataset = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    selection_options = {name: value for name in _SELECTION if (value := getattr(args, name)) is not None}
    settings = {name: value for name in _KINDS if (value := getattr(args, name)) is not None}
    settings |= {"selection": selection_options} if selection_options else {}
    stream = Stream(remote=dataset.location, local=args.local, storage={"options": dataset.options}, **settings)
    request = selection_of(stream, StreamDefaults())
    _check(args, is_all=request.is_all)
    bad = _bad_samples(args.bad_logs, args.stream) if args.bad_logs else []
    cache = ShardCache(cache_config_of(stream, dataset.shown, StreamDefaults()))
    index, began = cache.read_index(), time.monotonic()
    selection, is_cached = Selection.whole(index.num_samples), False
    if not request.is_all:
        with progress(index.num_samples, "select", "samples") as advance:
            selection = select_samples(request, index, cache, progress=advance)
        is_cached = not advance.done
    if bad:
        selection = selection.without(_numbers_of(bad, index, dataset.shown))
        settings["selection"] = {"indices": str(args.out)}
    seconds = time.monotonic() - began
    if not len(selection):
        conditions = [*([] if request.is_all else [request.in_words()]), *(f"--not {log}" for log in args.bad_logs)]
        raise ConfigError(
            f"of the {counted(index.num_samples, 'sample')} of {dataset.shown}, {', '.join(conditions)} selects none",
            hint="a run would raise the same error, so change the condition",
            path=dataset.shown,
        )
    if args.out is not None:
        _write_truth_values(selection, args.out)
    unused = selection.per_shard(index.samples_per_shard()) == 0
    return {
        "dataset": dataset.shown,
        "samples": index.num_samples,
        "selected": len(selection),
        "shards": len(index.shards),
        "shards_never_fetched": int(unused.sum()),
        "bytes_never_fetched": int(index.shards.data_bytes()[unused].sum()),
        "bad_samples": len({(sample.key.shard, sample.key.sample_index) for sample in bad}),
        "kept_at": None if selection.cached_at is None else str(selection.cached_at),
        "was_kept": is_cached,
        "out": None if args.out is None else str(args.out),
        "seconds": seconds,
        "stream": {"remote": dataset.shown, **({} if args.local is None else {"local": args.local}), **settings},
    }


def _check(args: Namespace, *, is_all: bool) -> None:
    """Refuse arguments without effect, before anything is fetched."""
    out, why, hint, option = args.out, "", None, "--out"
    of_fraction = [f"--{name.replace('_', '-')}" for name in ("group_by", "seed") if getattr(args, name) is not None]
    if args.bad_logs and out is None:
        why, hint = "--not writes the remaining samples to a file", "name it with --out KEEP.npy"
    elif args.stream is not None and not args.bad_logs:
        why, hint, option = "--stream names the stream of bad samples", "give their log with --not", "--stream"
    elif is_all and not args.bad_logs:
        why, hint = "every sample would be selected", "select some with --where, --fraction 0%:98%, --indices or --not"
        option = "--where"
    elif of_fraction and args.fraction is None:
        why, hint = f"{' and '.join(of_fraction)} needs a part to draw", "give one like --fraction 0%:98%"
        option = of_fraction[0]
    elif out is not None and out.suffix != ".npy":
        why = f"--out must name a .npy file, which selection.indices of a stream takes, but is {out}"
    elif out is not None and not out.absolute().parent.is_dir():
        why = f"--out cannot be written: {out.absolute().parent} is not a directory"
    if why:
        raise ConfigError(why, hint=hint, option=option, path=str(out) if hint is None else None)


def _bad_samples(logs: Sequence[str], stream: str | None) -> list[BadSample]:
    """Return the bad samples of one stream in some logs."""
    samples, paths = [sample for log in logs for sample in read_bad_samples(log)], ", ".join(logs)
    names = sorted({sample.key.stream for sample in samples})
    if not names:
        raise ConfigError(f"{paths}: there are no bad samples to leave out", option="--not", path=paths)
    if stream is None and len(names) > 1:
        raise ConfigError(
            f"{paths}: there are bad samples of {names}", hint="choose one with --stream", option="--stream", path=paths
        )
    if stream is not None and stream not in names:
        raise ConfigError(
            f"{paths}: there are no bad samples of stream {stream!r}, only of {names}",
            option="--stream",
            stream=stream,
            path=paths,
        )
    return [sample for sample in samples if sample.key.stream == (stream or names[0])]


def _numbers_of(bad: Sequence[BadSample], index: DatasetIndex, shown: str) -> NDArray[np.int64]:
    """Return the numbers of bad samples in their dataset."""
    sizes = index.samples_per_shard()
    shards, indexes = np.array([(sample.key.shard, sample.key.sample_index) for sample in bad], np.int64).T
    exist = (shards >= 0) & (shards < len(sizes))
    exist[exist] = (indexes[exist] >= 0) & (indexes[exist] < sizes[shards[exist]])
    if not exist.all():
        key = bad[int(exist.argmin())].key
        raise ConfigError(
            f"{shown} has no sample {key.sample_index} of shard {key.shard}, which is in the log",
            hint="the log is of another dataset",
            option="--not",
            path=shown,
            sample=key.sample_index,
        )
    numbers: NDArray[np.int64] = (np.cumsum(sizes) - sizes)[shards] + indexes
    return numbers


def _write_truth_values(selection: Selection, path: Path) -> None:
    """Write a .npy file in chunks: it takes a byte for each sample."""
    header = {"descr": "|b1", "fortran_order": False, "shape": (selection.num_stored,)}
    with appears_whole(path) as partial, partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, selection.num_stored, _AT_ONCE):
            numbers = np.arange(first, min(first + _AT_ONCE, selection.num_stored))
            file.write(selection.has(numbers).tobytes())


def _print_report(report: Mapping[str, Any]) -> None:
    share = report["selected"] / report["samples"]
    unused = f"{report['shards_never_fetched']:,} of {report['shards']:,}"
    unused += f" ({format_bytes(report['bytes_never_fetched'])})" if report["shards_never_fetched"] else ""
    facts: Sequence[tuple[str, str]] = [
        ("samples selected", f"{report['selected']:,} of {report['samples']:,} ({share:.1%})"),
        ("shards never fetched", unused),
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
