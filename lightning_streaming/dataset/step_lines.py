"""The lines of a log of steps: the samples and values of each batch, and which batches are in the weights."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.dataset.line_log import whole_lines
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.signatures import public

_HEAD = re.compile(rb'\{"run": (\d+), "batch": (\d+), "step": (\d+), "loader": ("(?:[^"\\]|\\.)*"), ')
_RANK = re.compile(r"rank(\d+)")


@public("logs")
@dataclass(frozen=True, kw_only=True, slots=True)
class PartKey(SampleKey):
    """Key of a later part of a document that was split; the first part has a plain :class:`SampleKey`."""

    first_token: int
    """Position in the document of the first token of the part."""


class LoggedBatch(NamedTuple):
    """A batch of one loader on one rank."""

    run: int
    """Number of the run, among those that share the log."""
    batch: int
    """Batches that the trainer had trained before, over all epochs."""
    step: int
    """The trainer's ``global_step`` as it began."""
    loader: str
    rank: int
    text: bytes
    """The line, which is parsed for its samples only."""
    where: str
    """Its place, for errors."""

    def sample_keys(self) -> tuple[SampleKey, ...]:
        """Return the keys of its samples.

        Raises:
            FormatError: The line is damaged.
        """
        try:
            values = json.loads(self.text)
            common = {"epoch": values["epoch"], "shuffle_seed": values["shuffle_seed"]}
            return tuple(_key(common, *sample) for sample in values["samples"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _not_a_line(self.text, self.where) from error


class _StepTaken(NamedTuple):
    """An optimizer step that took all batches before the ``batch``-th."""

    run: int
    batch: int


class _LoggedValues(NamedTuple):
    """Values of a batch, by name."""

    run: int
    batch: int
    values: Mapping[str, float]


class StepLines(NamedTuple):
    """What a log has of the batches that are in the weights at its end."""

    batches: Sequence[LoggedBatch]
    values: Mapping[tuple[int, int, int], Mapping[str, float]]
    """Values by run, rank and batch, then by name."""
    ends: Mapping[int, Set[int]]
    """Batches before the end of each optimizer step, by run."""

    def value(self, batch: LoggedBatch, name: str) -> float | None:
        """Return a value of a batch; None if it has none."""
        return self.values.get((batch.run, batch.rank, batch.batch), {}).get(name)


def latest_run(directory: Path) -> int:
    """Return the largest number of a run in a log; 0 where there is none."""
    # Files are added to in turn, so it is in a last line.
    last_lines = [line for path in _files(directory) for line in deque(whole_lines(path), maxlen=1)]
    return max((_parsed(*line, rank=0).run for line in last_lines), default=0)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("rank*.jsonl"))


def read_step_lines(dirpath: str | os.PathLike[str], loader: str = "train") -> StepLines:
    """Return the batches that the final weights of a run were trained on, as :func:`read_step_log` counts them.

    Args:
        dirpath: Directory of the log, with the files of all ranks.
        loader: Name of the train loader.

    Raises:
        ConfigError: There is no log, or none of that loader.
        FormatError: A complete line is not one of a step log.
    """
    runs: dict[int, list[LoggedBatch]] = {}
    taken: dict[int, set[int]] = {}
    values: dict[tuple[int, int, int], Mapping[str, float]] = {}
    for path in _files(Path(dirpath)):
        rank = int(match[1]) if (match := _RANK.fullmatch(path.stem)) else 0
        for text, where in whole_lines(path):
            line = _parsed(text, where, rank)
            if isinstance(line, _StepTaken):
                taken.setdefault(line.run, set()).add(line.batch)
            elif isinstance(line, _LoggedValues):
                values[line.run, rank, line.batch] = line.values
            else:
                runs.setdefault(line.run, []).append(line)
    kept: list[LoggedBatch] = []
    for _, lines in sorted(runs.items()):
        begins = min(line.batch for line in lines)
        kept = [line for line in kept if line.batch < begins] + lines  # in the checkpoint that this run resumed from
    last = max(runs, default=0)
    kept = [line for line in kept if line.run != last or line.batch < max(taken.get(last, (0,)))]
    if not any(line.loader == loader for line in kept):
        names = ", ".join(sorted({line.loader for line in kept})) or "none"
        raise ConfigError(
            f"{os.fspath(dirpath)} has no log of steps of the train loader {loader!r}",
            hint=f"loaders in it: {names}. It is written by lightning_streaming.StepLog, a callback of the trainer",
            option="loader",
            path=os.fspath(dirpath),
        )
    return StepLines([line for line in kept if line.loader == loader], values, taken)


def read_step_log(dirpath: str | os.PathLike[str], loader: str = "train") -> list[SampleKey]:
    """Return the samples that the final weights of a run were trained on, from its :class:`StepLog`.

    Where a run resumed from a checkpoint, the batches that an earlier run had read after that checkpoint are not in the
    weights, and are dropped. So are batches at the end that no optimizer step used. Two runs have trained on the same
    samples in the same order if these lists are equal, with any number of ranks and any batch size. A sample that was
    read twice in an epoch is listed twice, unless the second time only filled the last batch of the epoch. A document
    that was split is listed once for each part: all but the first are a :class:`PartKey`.

    Args:
        dirpath: Directory of the log, with the files of all ranks.
        loader: Name of the train loader; "train" if there is only one.

    Returns:
        A key for each sample, by epoch and position. Ranks that read the same samples count as one.

    Raises:
        ConfigError: There is no log, or none of that loader.
        FormatError: A complete line is not one of a step log.
    """
    batches = read_step_lines(dirpath, loader).batches
    read = {(line.run, line.batch, key) for line in batches for key in line.sample_keys()}
    return sorted((key for *_, key in read), key=_place)


def _place(key: SampleKey) -> tuple[Any, ...]:
    first_token = key.first_token if isinstance(key, PartKey) else 0
    return key.epoch, key.position, key.stream, key.shard, key.sample_index, first_token


def _key(common: Mapping[str, Any], position: int, stream: str, shard: int, index: int, first_token: int) -> SampleKey:
    values = {"position": position, "stream": stream, "shard": shard, "sample_index": index, **common}
    return PartKey.from_dict({**values, "first_token": first_token}) if first_token else SampleKey.from_dict(values)


def _parsed(text: bytes, where: str, rank: int) -> LoggedBatch | _StepTaken | _LoggedValues:
    try:
        if match := _HEAD.match(text):
            run, batch, step, loader = match.groups()
            return LoggedBatch(int(run), int(batch), int(step), json.loads(loader), rank, text, where)
        line: Mapping[str, Any] = json.loads(text)
        if "taken" in line:
            return _StepTaken(int(line["run"]), int(line["taken"]))
        values = {str(name): float(value) for name, value in line["values"]}
        return _LoggedValues(int(line["run"]), int(line["batch"]), values)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _not_a_line(text, where) from error


def _not_a_line(text: bytes, where: str) -> FormatError:
    return FormatError(f"{where} is not one of a log of steps, but {text[:200]!r}", path=where.rpartition(", line ")[0])
