"""The command line: what it can be told, and what is refused."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.reading.suite import NAMES, SUITE, Measurement, Sizes, cases
from benchmarks.reading.works import WORKS
from lightning_streaming.tools.commands import positive


def parser(description: str) -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.reading",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--peers", help="Python of an environment with mosaicml-streaming, litdata or both")
    made.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"measure only these: {_coverage()}"
    )
    made.add_argument("--rounds", type=positive, default=5, help="turns of each system (5)")
    made.add_argument("--epochs", type=positive, default=10, help="over which memory is looked at (10)")
    made.add_argument(
        "--seconds", type=positive_number, default=0.5, help="least time of a turn; whole epochs are read (0.5)"
    )
    made.add_argument("--batch-sizes", type=positive, nargs="+", default=[32, 256], help="32 256")
    made.add_argument("--workers", type=positive, default=2, help="where there are workers (2)")
    counts = " ".join(f"{name}={work.samples}" for name, work in WORKS.items())
    _add_sized(made, "--samples", f"samples in a dataset, at least a batch ({counts})")
    usual = " ".join(f"{name}={work.size}" for name, work in WORKS.items())
    _add_sized(
        made,
        "--size",
        "of a sample: tokens, floats of a record, bytes of a blob, characters of a text, pixels of a JPEG's side "
        f"({usual})",
    )
    made.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where data is put; 1 GB for each system (%(default)s)",
    )
    made.add_argument(
        "--json", type=Path, default=Path("build/bench_reading.json"), help="what was measured (%(default)s)"
    )
    made.add_argument("--plots", type=Path, default=Path("build"), help="directory for reading_*.png (%(default)s)")
    made.add_argument(
        "--profile", choices=WORKS, help="show where ours spends an epoch's time, and measure nothing else"
    )
    return made


def sized(text: str) -> tuple[str, int]:
    """What ``work=number`` says."""
    name, _, number = text.partition("=")
    if name not in WORKS or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not like tokens=1000; there are {', '.join(WORKS)}")
    return name, int(number)


def positive_number(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, but got {text!r}")
    return number


def check_samples(measurements: Iterable[Measurement], sizes: Sizes) -> None:
    """See to it that each dataset that is read fills a batch.

    Raises:
        ValueError: One does not.
    """
    for measurement in measurements:
        for case in cases(measurement, sizes):
            if case.samples < case.batch_size:
                raise ValueError(
                    f"{case.work} has {case.samples} samples, fewer than one batch of {case.batch_size}; "
                    f"ask for more with --samples {case.work}=N, or for smaller --batch-sizes"
                )


def _add_sized(made: argparse.ArgumentParser, name: str, words: str) -> None:
    made.add_argument(name, type=sized, nargs="+", default=[], metavar="WORK=N", help=words)


def _coverage() -> str:
    """Each name, and what it covers where it is not just the work of that name."""
    return ", ".join(f"{name}{_covered(name)}" for name in NAMES).replace("%", "%%")


def _covered(name: str) -> str:
    its = [one for one in SUITE if one.name == name]
    whats = dict.fromkeys(one.what.removesuffix(", persistent workers") for one in its if one.what)
    works = dict.fromkeys(one.work for one in its if one.work != name)
    if whats:
        return f" ({'; '.join(whats)}, of {', '.join(works)})"
    return f" (and {', '.join(works)})" if works else ""
