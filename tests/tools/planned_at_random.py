"""Runs at random, planned and then really read: ``python -m tests.tools.planned_at_random --cases 50 --seed 7``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.servers import http_server
from tests.tools.really import Really, read_run, write_config, write_stream
from tests.tools.running import run

FIRST_ID = {"web": 0, "code": 100_000, "math": 200_000}
SIZES = {"web": 420, "code": 210, "math": 35}
SHARD_BYTES, STORED_BYTES = 40_000, 4_000 * sum(SIZES.values())


class RandomRun(NamedTuple):
    """What to plan and read."""

    train: dict[str, Any]
    trainer: dict[str, Any]
    data: dict[str, Any]


def write_streams(root: Path) -> None:
    """The streams, in a directory each."""
    for name, samples in SIZES.items():
        write_stream(root / name, samples, FIRST_ID[name], size_limit=SHARD_BYTES)


def random_run(rng: Random, url: str) -> RandomRun:
    """A run over some of the streams."""
    names = rng.sample(list(SIZES), rng.randint(1, 3))
    streams: dict[str, dict[str, Any]] = {name: {"remote": f"{url}/{name}"} for name in names}
    nodes, devices = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    batch_size, workers = rng.randint(1, 9), rng.choice([0, 1, 2])
    train: dict[str, Any] = {
        "streams": streams,
        "shuffle_seed": rng.randint(0, 99),
        "num_canonical_nodes": 2 * rng.randint(1, 2),
        "shuffle_block_size": rng.choice([40, 100, 400]),
        "shuffle_algo": rng.choice(["py1e", "py1s", "blockwise", "py2s", "naive"]),
    }
    if rng.random() < 0.5:
        train["epoch_size"] = rng.randint(60, 700)
    if rng.random() < 0.3:
        for stream in streams.values():
            stream["proportion"] = rng.randint(1, 4)
    elif rng.random() < 0.3 and len(names) > 1:
        train["schedule"] = {
            "first": {"end": "50%", "mix": dict.fromkeys(names[:2], 0.5)},
            "last": {"mix": {name: [rng.randint(1, 3), rng.randint(0, 3)] for name in names}},
        }
        train.setdefault("epoch_size", 400)
    if rng.random() < 0.3:
        train["skip"] = [f"{(begin := rng.randint(0, 40))}-{begin + rng.randint(0, 60)}"]
    if rng.random() < 0.2:
        train["predownload"] = rng.randint(1, 60)
    if rng.random() < 0.3 and nodes * devices > 1:
        train["replication"] = rng.choice([one for one in (2, 4) if nodes * devices % one == 0])
    if rng.random() < 0.4:
        train["cache_limit"] = 150_000 + int(STORED_BYTES * rng.uniform(0.4, 1.1))
    trainer = {"num_nodes": nodes, "devices": devices, "max_epochs": rng.randint(1, 3)}
    trainer |= {"accumulate_grad_batches": rng.randint(1, 3)} if rng.random() < 0.3 else {}
    trainer |= {"limit_train_batches": rng.randint(12, 40)} if rng.random() < 0.3 else {}
    return RandomRun(
        train, trainer, {"batch_size": batch_size, "num_workers": workers, "drop_last": rng.random() < 0.3}
    )


def differences(plan: Mapping[str, Any], really: Really, told: RandomRun) -> Iterator[str]:
    """What a plan says of samples and steps that is not so."""
    for one in plan["streams"]:
        first = FIRST_ID[one["stream"]]
        reads = {sample: times for sample, times in really.reads.items() if first <= sample < first + 100_000}
        if one["samples"] != sum(reads.values()):
            yield f"{one['stream']}: {one['samples']} samples are planned, and {sum(reads.values())} were read"
        if one["repeats"] != max(reads.values(), default=0):
            yield f"{one['stream']}: {one['repeats']} repeats are planned, and {max(reads.values(), default=0)} were"
    accumulate = told.trainer.get("accumulate_grad_batches", 1)
    steps = sum(-(-batches // accumulate) for batches in really.batches)
    if plan["run"]["steps"] != steps:
        yield f"{plan['run']['steps']} steps are planned, and {steps} were made"


class Found(NamedTuple):
    """What is said of a run."""

    refused: str = ""
    """Why it was not planned."""
    different: Sequence[str] = ()
    """What is not as planned."""
    limit: int | None = None
    refetched: float = 1
    """How often each byte was planned to be fetched."""
    fetched: float = 1
    """Bytes that were fetched, by those planned."""
    peak: float = 1
    """The same of the most that the cache of a node held."""

    @property
    def is_as_planned(self) -> bool:
        """Whether all is as it was said."""
        near = 0 if self.limit is None else 0.02
        return not self.different and not self.refused and abs(self.fetched - 1) <= near and abs(self.peak - 1) <= 0.02

    def __str__(self) -> str:
        caches = f"fetched × {self.fetched:.3f}, peak × {self.peak:.3f}, refetched {self.refetched:.2f}"
        return self.refused or "; ".join([*self.different, caches])


def check(told: RandomRun, url: str, scratch: Path) -> Found:
    """Plan a run and read it: what differs."""
    config = write_config(scratch / "run.yaml", told.train, told.trainer, **told.data)
    done = run("plan", "--config", config, "--json")
    if done.code:
        return Found(refused=done.err.strip())
    really, cache = read_run(config, url, scratch / "caches"), done.json["caches"][0]
    return Found(
        different=list(differences(done.json, really, told)),
        limit=cache["limit"],
        refetched=cache["refetched"],
        fetched=really.bytes / cache["bytes"],
        peak=really.peak / cache["peak"],
    )


@contextmanager
def served() -> Iterator[str]:
    """The streams on a server, and plans with caches of their own."""
    with TemporaryDirectory() as name:
        root = Path(name)
        write_streams(root)
        os.environ["LIGHTNING_STREAMING_CACHE"] = str(root / "plans")
        with http_server(root) as url:
            yield url


def main() -> None:
    """Check many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    words = "of cache_limit in each run, as parts of all that is stored; without it some runs have one, of 0.4 to 1.1"
    parser.add_argument("--limits", type=float, nargs=2, metavar=("LOW", "HIGH"), help=words)
    args = parser.parse_args()
    with served() as url:
        for seed in range(args.seed, args.seed + args.cases):
            told = random_run(Random(seed), url)
            if args.limits:
                low, high = args.limits
                told.train["cache_limit"] = 100_000 + int(STORED_BYTES * Random(seed).uniform(low, high))
            with TemporaryDirectory() as scratch:
                found = check(told, url, Path(scratch))
            sys.stdout.write(f"{seed}: {found}\n" + ("" if found.is_as_planned else f"    {told}\n"))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
