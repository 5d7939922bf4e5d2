"""What was measured and is recommended: as tables, as YAML to paste, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_streaming.loading.measures import WaitTimes
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.tables import print_table
from lightning_streaming.tools.tuning.advice import Advice, rate
from lightning_streaming.tools.tuning.report import Report
from lightning_streaming.tools.tuning.run import TunedRun
from lightning_streaming.tools.tuning.speeds import Speed
from lightning_streaming.units import format_bytes

_MIB = 2**20
_OF_LOADER = "num_workers"
_HEADS = ("workers", "samples/s", "MB/s", "batches/s", "first batch")
_LEAST_SHOWN = 0.005


def print_report(run: TunedRun, report: Report, consumer: float) -> None:
    """Print what was measured, what to set and why, and YAML at the end."""
    if report.link is not None:
        link = report.link
        print(
            f"fetched {counted(len(link.shards), 'shard')} ({format_bytes(link.stored_bytes)}) to measure: "
            f"{format_bytes(link.bytes_per_second)}/s, {link.each:.3g} s each; the first {link.alone:.3g} s\n"
        )
    reasons = [one for one in WaitTimes._fields if any(_shares(speed)[one] >= _LEAST_SHOWN for speed in report.speeds)]
    heads = [*_HEADS, *reasons, "rest", *(["a step waits"] if consumer else [])]
    rows = [_row(speed, reasons, consumer)[: len(heads)] for speed in report.speeds]
    print_table(
        f"reading {run.data} in batches of {report.batch_size}, and what is waited for", heads, rows, right=heads
    )
    worth_setting = _worth_setting(run, report)
    settings = [
        [name, _yaml(written_in(run, name)), _yaml(advice.value), advice.why] for name, advice in worth_setting.items()
    ]
    print_table("recommended", ["setting", "now", "better", "why"], settings)
    for name, advice in report.advice.items():
        if name not in worth_setting:
            print(f"{name} may stay at its default: {advice.why}\n")
    left_out = [name for name in ("predownload", "cache_limit") if name not in report.advice]
    if left_out:
        print(f"nothing to recommend for {' and '.join(left_out)}, as the data is read in place\n")
    print(fragment(run, report), end="")


def fragment(run: TunedRun, report: Report) -> str:
    """The recommended settings, as a configuration that goes after the run's own; defaults that stay are left out."""
    lines = ["data:", "  init_args:"]
    of_data = [name for name in _worth_setting(run, report) if name != _OF_LOADER]
    lines.append(f"    {_OF_LOADER}: {_yaml(report.advice[_OF_LOADER].value)}")
    if not report.advice[_OF_LOADER].value and run.written["prefetch_factor"] is not None:
        lines.append("    prefetch_factor: null")  # which torch takes with workers only
    if of_data:
        lines.append(f"    {run.data}:")
        lines += [f"      {name}: {_yaml(report.advice[name].value)}" for name in of_data]
    return "\n".join(lines) + "\n"


def as_json(run: TunedRun, report: Report, consumer: float) -> dict[str, Any]:
    """The same for programs. Times in seconds."""
    link = report.link
    return {
        "data": run.data,
        "batch_size": report.batch_size,
        "ranks_per_node": run.world.ranks_per_node,
        "link": link
        and {
            "shards": len(link.shards),
            "bytes": link.stored_bytes,
            "bytes_per_second": link.bytes_per_second,
            "seconds_per_shard": link.each,
            "seconds_of_first_shard": link.alone,
        },
        "measured": [
            {
                "num_workers": speed.workers,
                "samples_per_second": speed.samples_per_second,
                "bytes_per_second": speed.sample_bytes / speed.seconds,
                "batches_per_second": 1 / speed.batch_seconds,
                "first_batch": speed.first_batch,
                "wait": _shares(speed),
                "step_waits": _step_waits(speed, consumer) if consumer else None,
            }
            for speed in report.speeds
        ],
        "recommended": {
            name: {"now": written_in(run, name), "better": advice.value, "why": advice.why}
            for name, advice in report.advice.items()
        },
    }


def written_in(run: TunedRun, name: str) -> Any:
    """What the configuration has for a setting."""
    return run.written[name] if name in run.written else getattr(run.config, name)


def _worth_setting(run: TunedRun, report: Report) -> dict[str, Advice]:
    """What is recommended, but for what is at its default and should stay there."""
    return {
        name: advice
        for name, advice in report.advice.items()
        if advice.value is not None or written_in(run, name) is not None
    }


def _row(speed: Speed, reasons: Sequence[str], consumer: float) -> list[str]:
    parts = [round(100 * _shares(speed)[reason]) for reason in reasons]
    return [
        str(speed.workers),
        rate(speed.samples_per_second),
        rate(speed.sample_bytes / speed.seconds / _MIB),
        rate(1 / speed.batch_seconds),
        f"{rate(1000 * speed.first_batch)} ms",
        *(f"{part}%" for part in parts),
        f"{max(0, 100 - sum(parts))}%",
        f"{_step_waits(speed, consumer):.0%}" if consumer else "",
    ]


def _shares(speed: Speed) -> Mapping[str, float]:
    """Parts of the time that passed, by what was waited for."""
    return {one: getattr(speed.wait, one) / speed.seconds for one in WaitTimes._fields}


def _step_waits(speed: Speed, consumer: float) -> float:
    return 1 - consumer / speed.step_seconds(consumer)


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)
