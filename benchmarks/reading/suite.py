"""The measurements, in the order in which they are shown, and what is wanted of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.reading.case import Case
from benchmarks.reading.works import WORKS

PEERS = ("reference", "litdata")
TOKENS = ("ours", "reference", "litdata", "litdata_tokens", "plain")
ROWS = ("ours", *PEERS, "plain")
OTHERS = ("ours", *PEERS)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One thing that is measured of several systems; a line of a table for each batch size."""

    name: str
    """By which it is asked for; several share one."""
    probe: str
    work: str
    systems: tuple[str, ...]
    wanted: str
    what: str = ""
    """In words, where the work alone does not say it."""
    has_workers: bool = False
    persistent: bool = False
    all_batch_sizes: bool = False
    """Or only the first."""
    from_the_first_epoch: bool = False
    """Whether the first turn counts, which elsewhere warms up."""


def _epochs(work: str, wanted: str, systems: tuple[str, ...], has_workers: bool, name: str = "") -> Measurement:
    return Measurement(
        name=name or work,
        probe="epochs",
        work=work,
        systems=systems,
        wanted=wanted,
        has_workers=has_workers,
        all_batch_sizes=True,
    )


_WITH_WORKERS = "1.5 × the best peer"
SUITE = (
    _epochs("tokens", "5 × litdata, 50 × MosaicML Streaming, 40 % of copying", (*TOKENS, "copying"), False),
    _epochs("tokens", _WITH_WORKERS, TOKENS, True),
    _epochs("free-tokens", "–", ("ours", "reference", "plain", "copying"), False, "tokens"),
    _epochs("records", "20 × the best peer, 2 M/s or 30 % of copying", (*ROWS, "copying"), False),
    _epochs("records", _WITH_WORKERS, ROWS, True),
    _epochs("blobs", "2 × the best peer, 60 % of copying", (*ROWS, "copying"), False),
    _epochs("blobs", _WITH_WORKERS, ROWS, True),
    _epochs("text", "3 × MosaicML Streaming, 1 × litdata", OTHERS, False),
    _epochs("text", "3 × MosaicML Streaming, 1 × litdata", OTHERS, True),
    _epochs("jpeg", "1 × the best peer", OTHERS, False),
    _epochs("transform", "1 × the best peer", OTHERS, True),
    *(
        Measurement(
            name="access",
            probe="access",
            work=work,
            systems=OTHERS,
            wanted="10 × MosaicML Streaming, 1 × litdata",
            what="`dataset[i]`",
        )
        for work in ("tokens", "records", "text")
    ),
    *(
        Measurement(
            name="first",
            probe="first",
            work="tokens",
            systems=ROWS,
            wanted="1 × the best peer",
            what="first batch, from making dataset and loader",
            has_workers=has_workers,
        )
        for has_workers in (False, True)
    ),
    *(
        Measurement(
            name="resume",
            probe="resume",
            work="tokens",
            systems=OTHERS,
            wanted="0.91 × at 0 %",
            what="first batch, resumed at 90 % of an epoch",
            has_workers=has_workers,
        )
        for has_workers in (False, True)
    ),
    *(
        Measurement(
            name="gap",
            probe="gap",
            work="tokens",
            systems=ROWS,
            wanted="1 × the best peer",
            what="last batch of an epoch to first of the next" + (", persistent workers" if persistent else ""),
            has_workers=True,
            persistent=persistent,
        )
        for persistent in (True, False)
    ),
    Measurement(
        name="memory",
        probe="memory",
        work="tokens",
        systems=ROWS,
        wanted="flat within 2 %, at most the best peer's",
        what="memory of a worker",
        has_workers=True,
        persistent=True,
        from_the_first_epoch=True,
    ),
)
NAMES = list(dict.fromkeys(one.name for one in SUITE))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the measurements are made with."""

    root: str
    samples: Mapping[str, int]
    """Of works that are not to have their usual number."""
    size: Mapping[str, int]
    batch_sizes: tuple[int, ...]
    workers: int
    seconds: float


def cases(measurement: Measurement, sizes: Sizes) -> Iterator[Case]:
    """A case for each batch size."""
    work = WORKS[measurement.work]
    case = Case(
        work=measurement.work,
        root=sizes.root,
        samples=sizes.samples.get(measurement.work, work.samples),
        size=sizes.size.get(measurement.work, work.size),
        num_workers=sizes.workers if measurement.has_workers else 0,
        persistent=measurement.persistent,
        seconds=sizes.seconds,
    )
    batch_sizes = sizes.batch_sizes if measurement.all_batch_sizes else sizes.batch_sizes[:1]
    return (replace(case, batch_size=batch_size) for batch_size in batch_sizes)


def chosen(names: Iterable[str]) -> list[Measurement]:
    """The measurements with these names."""
    wanted = set(names)
    return [one for one in SUITE if one.name in wanted]
