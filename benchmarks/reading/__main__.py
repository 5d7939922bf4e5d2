"""How fast local data is read, beside what the machine can do and beside other libraries.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.reading
    python -m benchmarks.reading --peers ~/peers/bin/python
    python -m benchmarks.reading --only tokens records --batch-sizes 8 64 --size tokens=513 --samples records=1000000
    python -m benchmarks.reading --profile tokens

Every system stores the same samples with its own writer, and reads them shuffled with default settings, from files that
are in memory after the first round. It does so in one process that lives as long as the run, in forks that each measure
one thing. Systems take turns, in another order each round; shown are the medians of the rounds, and, for each other
system, how many times better ours is: the median of the rounds' ratios.

"plain" is a map-style Dataset over one numpy memmap of the same rows, with torch's DataLoader. "copying" is what the
machine can do: the rows gathered by ``numpy.take`` from an array in memory into a new one for each batch, and blobs
copied one by one. A rate is of whole epochs, the starts of their workers included.

Prints Markdown tables, and writes under build/ the JSON of every turn and plots (with the ``plot`` extra); those that
the documents show are drawn with --plots docs/img.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reading.crew import Crew
from benchmarks.reading.hot_spots import show_hot_spots
from benchmarks.reading.machine import machine
from benchmarks.reading.options import check_samples, parser
from benchmarks.reading.report import Run, save, tables
from benchmarks.reading.rounds import Result, measure
from benchmarks.reading.suite import SUITE, Measurement, Sizes, cases, chosen
from benchmarks.reading.systems import SYSTEMS


def say(line: str) -> None:
    """Tell how it goes on, apart from what is printed at the end."""
    print(line, file=sys.stderr, flush=True)


def run(measurements: Sequence[Measurement], sizes: Sizes, options: argparse.Namespace, logs: Path) -> Run:
    """Measure, and tell how it goes on."""
    pythons = {name: sys.executable for name, known in SYSTEMS.items() if not known.is_peer}
    if options.peers:
        pythons |= {name: options.peers for name, known in SYSTEMS.items() if known.is_peer}
    todo = [(one, case) for one in measurements for case in cases(one, sizes)]
    results: list[Result] = []
    started = time.perf_counter()
    with Crew(pythons, logs) as crew:
        for number, (one, case) in enumerate(todo, start=1):
            systems = [system for system in one.systems if system in pythons]
            rounds = options.epochs if one.from_the_first_epoch else options.rounds
            results.append(measure(crew, one, case, systems, rounds))
            say(f"[{number}/{len(todo)}, {time.perf_counter() - started:.0f} s] {progress(results[-1])}")
    command = shlex.join(["python", "-m", "benchmarks.reading", *sys.argv[1:]])
    return Run(command, machine(), crew.versions, results)


def progress(one: Result) -> str:
    """A result in a line."""
    case, unit = one.case, {"rate": "samples/s", "seconds": "s", "rss": "MiB"}[one.value]
    medians = ", ".join(f"{SYSTEMS[system].title} {one.median(system):,.4g} {unit}" for system in one.turns)
    failed = "".join(f"; {SYSTEMS[system].title} failed: {reason}" for system, reason in one.failed.items())
    return (
        f"{one.measurement.name} ({case.work}), {case.num_workers} workers, batch {case.batch_size}: {medians}{failed}"
    )


def sizes_in(root: str, options: argparse.Namespace) -> Sizes:
    """How large things are, as the command line says."""
    return Sizes(
        root=root,
        samples=dict(options.samples),
        size=dict(options.size),
        batch_sizes=tuple(options.batch_sizes),
        workers=options.workers,
        seconds=options.seconds,
    )


def main() -> None:
    """Measure, or profile."""
    made = parser(__doc__ or "")
    options = made.parse_args()
    if options.peers and shutil.which(options.peers) is None:
        made.error(f"--peers: there is no {options.peers}")
    measurements = chosen(options.only)
    if importlib.util.find_spec("PIL") is None and "jpeg" in options.only:
        measurements = [one for one in measurements if one.work != "jpeg"]
        say("jpeg is left out: it needs Pillow, pip install 'lightning-streaming[images]'")
    try:
        check_samples(measurements, sizes_in("", options))
    except ValueError as error:
        made.error(str(error))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-reading-") as scratch:
        sizes = sizes_in(scratch, options)
        if options.profile:
            show_hot_spots(next(cases(next(one for one in SUITE if one.work == options.profile), sizes)))
            return
        found = run(measurements, sizes, options, Path(scratch))
    save(found, options.json)
    print(tables(found.results))
    say(f"wrote {options.json}")
    if importlib.util.find_spec("matplotlib"):
        from benchmarks.reading.plot import draw

        say(f"drew {', '.join(map(str, draw(found.results, options.plots)))}")
    else:
        say("drew nothing: that needs matplotlib, pip install 'lightning-streaming[plot]'")


if __name__ == "__main__":
    main()
