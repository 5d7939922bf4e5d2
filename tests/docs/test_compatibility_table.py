"""Every row of the table "What may change between save and load" of docs/resume.md is tried out.

Each row has changes here, which are made between the save and the load of a run in the middle of an epoch; what then
happens must be what the row says: exact continuation, or the error that it names. A row without a change fails.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from tests.helpers import read_together, worlds
from tests.schedules import Phase, schedule

RESUME = Path(__file__).parents[2] / "docs" / "resume.md"
SAMPLES = {"a": 30, "b": 18}
WRITING: dict[str, Any] = {"size_limit": 200}
BEFORE = 2
"""Global batches that are read before the save."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a run of loaders is made of."""

    data: Path
    nodes: int = 1
    ranks: int = 2
    batch_size: int = 2
    names: Sequence[str] = ("a", "b")
    places: Sequence[str] = tuple(SAMPLES)
    """Which of the data each stream is."""
    cache: Path | None = None
    stream: Mapping[str, Any] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)

    def loaders(self) -> list[StreamingDataLoader]:
        """The loader of each rank."""
        places = zip(self.names, self.places, strict=True)
        streams = {
            name: Stream(
                remote=str(self.data / place),
                local=None if self.cache is None else str(self.cache / place),
                **self.stream,
            )
            for name, place in places
        }
        order = {"shuffle": True, "shuffle_block_size": 16, "num_canonical_nodes": 2, **self.order}
        return [
            StreamingDataLoader(StreamingDataset(streams=streams, world=world, **order), self.batch_size, **self.loader)
            for world in worlds(self.nodes, self.ranks)
        ]

    def read(self, state: Mapping[str, Any] | None = None) -> tuple[list[int], list[Mapping[str, Any]]]:
        """The samples of the rest of an epoch in their order, and the state after each step."""
        loaders = self.loaders()
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        steps = list(read_together(loaders))
        for loader in loaders:
            loader.close()
        return [sample for ids, _ in steps for sample in ids], [after for _, after in steps]


def write(root: Path, samples: Mapping[str, int] = SAMPLES, **writing: Any) -> Path:
    for number, (name, count) in enumerate(samples.items()):
        with MDSWriter(out=root / name, columns={"id": "int"}, **{**WRITING, **writing}) as writer:
            for index in range(count):
                writer.write({"id": 1000 * number + index})
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, list[int], Mapping[str, Any]]:
    """A setup, what it reads in an epoch, and its state after some steps."""
    setup = Setup(data=write(tmp_path_factory.mktemp("data")))
    read, states = setup.read()
    return setup, read, states[BEFORE - 1]


Change = Callable[[Setup, Path], Setup]
"""Makes another setup of one; may write data to a directory."""


def to(**settings: Any) -> Change:
    return lambda setup, _: replace(setup, **settings)


def ordered(**settings: Any) -> Change:
    return lambda setup, _: replace(setup, order={**setup.order, **settings})


def loaded(**settings: Any) -> Change:
    return lambda setup, _: replace(setup, loader=settings)


def rewritten(samples: Mapping[str, int] = SAMPLES, **writing: Any) -> Change:
    return lambda setup, root: replace(setup, data=write(root / "other", samples, **writing))


def weighted(**weight: Any) -> Change:
    return lambda setup, _: replace(setup, stream=weight)


def moved(setup: Setup, root: Path) -> Setup:
    return replace(setup, data=Path(shutil.copytree(setup.data, root / "moved")))


def appended(setup: Setup, root: Path) -> Setup:
    """The same shards with one more behind them, which holds samples of its own."""
    changed = moved(setup, root)
    for path in changed.data.glob("*/index.json"):
        more = write(root / "more", {path.parent.name: 5}) / path.parent.name
        index, added = (json.loads(one.read_text()) for one in (path, more / "index.json"))
        for shard in added["shards"]:
            name = shard["raw_data"]["basename"]
            (path.parent / f"more.{name}").write_bytes((more / name).read_bytes())
            shard["raw_data"]["basename"] = f"more.{name}"
        path.write_text(json.dumps({**index, "shards": index["shards"] + added["shards"]}))
    return changed


def compressed(setup: Setup, root: Path) -> Setup:
    """The very same shards, compressed where they lie."""
    changed = moved(setup, root)
    for path in changed.data.glob("*/index.json"):
        index = json.loads(path.read_text())
        for shard in index["shards"]:
            raw = path.parent / shard["raw_data"]["basename"]
            packed = Path(f"{raw}.gz")
            packed.write_bytes(gzip.compress(raw.read_bytes()))
            raw.unlink()
            shard["compression"] = "gz"
            shard["zip_data"] = {"basename": packed.name, "bytes": packed.stat().st_size, "hashes": {}}
        path.write_text(json.dumps(index))
    return replace(changed, cache=root / "unpacked")


def cached(setup: Setup, root: Path) -> Setup:
    return replace(setup, cache=root / "cache")


def replaced(setup: Setup, tmp_path: Path) -> Setup:
    """Samples that turn out to be bad are replaced from here on."""
    return replace(
        setup, order={**setup.order, "bad_samples": {"action": "replace", "max": 3, "log": tmp_path / "bad"}}
    )


EXACT: dict[str, dict[str, Change]] = {
    "appended shards": {"appended": appended},
    "number of ranks on the same number of nodes": {"1": to(ranks=1), "3": to(ranks=3), "4": to(ranks=4)},
    "number of nodes": {"2 of 1": to(nodes=2, ranks=1), "3 of 1": to(nodes=3, ranks=1), "2 of 2": to(nodes=2)},
    "batch size, accumulation": {"1": to(batch_size=1), "5": to(batch_size=5), "11": to(batch_size=11)},
    "number of workers, `persistent_workers`, start method of workers, prefetching": {
        "workers": loaded(num_workers=2, prefetch_factor=3),
        "persistent": loaded(num_workers=1, persistent_workers=True),
        "spawn": loaded(num_workers=1, multiprocessing_context="spawn"),
        "predownload": ordered(predownload=1),
    },
    "`bad_samples`": {"replaced": replaced},
    "location of the data (`remote`, `local`), storage options, retries": {
        "remote": moved,
        "local": cached,
        "options": weighted(storage={"options": {"auto_mkdir": False}}, download_retry=7, download_timeout=5.0),
    },
    "compression of the shards": {"compressed afterwards": compressed},
    "`shuffle_seed`, `num_canonical_nodes`": {
        "seed": ordered(shuffle_seed=3),
        "canonical nodes": ordered(num_canonical_nodes=4),
    },
}
"""Changes after which the epoch goes on as if nothing had happened."""

REFUSED: dict[str, dict[str, Change]] = {
    "number, sizes or samples of existing shards": {
        "shards": rewritten(size_limit=150),
        "samples": rewritten({"a": 26, "b": 13}),
    },
    "without phases: weights, `epoch_size`, names and order of streams": {
        "weights": weighted(proportion=1.0),
        "epoch size": ordered(epoch_size=40),
        "names": to(names=("a", "c")),
        "order of names": to(names=("b", "a")),
    },
    "`shuffle`, its algorithm or block size, sampling, batching method": {
        "shuffle": ordered(shuffle=False),
        "algorithm": ordered(shuffle_algo="py1br"),
        "block size": ordered(shuffle_block_size=32),
        "sampling method": ordered(sampling_method="fixed"),
        "granularity": ordered(sampling_granularity=2),
        "batching method": ordered(batching_method="stratified"),
    },
}
"""Changes that are refused with a StateMismatchError."""

PHASES_AHEAD = "[phases](mixtures.md#what-may-change-at-a-resume) that have not started"
PHASES_BEGUN = "phases that have started, and the data of streams that they read"
ELSEWHERE = {
    PHASES_AHEAD,
    PHASES_BEGUN,
    "`limit_train_batches`, `max_steps`, `max_epochs`, validation settings",
    "`skip`",
    "names of train loaders",
}
"""Rows that tests below are about."""


def table() -> dict[str, str]:
    """The rows: what changes, and what happens."""
    section = RESUME.read_text().partition("## What may change between save and load\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", section.partition("\n|---")[2], re.MULTILINE))


def changes_of(rows: Mapping[str, Mapping[str, Change]]) -> list[Any]:
    return [
        pytest.param(row, change, id=f"{row}: {name}") for row, named in rows.items() for name, change in named.items()
    ]


def test_every_row_is_tried_out() -> None:
    assert set(table()) == {*EXACT, *REFUSED, *ELSEWHERE}


def in_steps(samples: Sequence[int], step: int) -> list[list[int]]:
    """The samples of each global batch, whoever of its ranks reads them."""
    return [sorted(samples[start : start + step]) for start in range(0, len(samples), step)]


@pytest.mark.rotate(5)
@pytest.mark.parametrize(("row", "change"), changes_of(EXACT))
def test_change_goes_on_exactly(
    row: str, change: Change, saved: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    assert table()[row].startswith(("yes", "the saved ones are used"))
    setup, read, state = saved
    changed = change(setup, tmp_path)
    assert changed != setup
    rest, _ = changed.read(state)
    left = read[BEFORE * setup.ranks * setup.batch_size :]
    step = changed.nodes * changed.ranks * changed.batch_size
    assert in_steps(rest[: len(left)], step) == in_steps(left, step)
    assert len(rest) - len(left) < changed.nodes * changed.ranks  # read again, so that ranks have equally many
    assert set(rest[len(left) :]) <= set(left)


@pytest.mark.parametrize(("row", "change"), changes_of(REFUSED))
def test_change_is_refused(
    row: str, change: Change, saved: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    assert table()[row].startswith("no: `StateMismatchError`")
    setup, _, state = saved
    with pytest.raises(StateMismatchError, match="the saved position belongs to other data or another order"):
        change(setup, tmp_path).read(state)


def test_data_that_is_written_anew_with_compression_is_other_data(
    saved: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    assert "writing the dataset again with another compression changes them" in table()["compression of the shards"]
    with pytest.raises(StateMismatchError, match="digest"):
        rewritten(compression="zstd")(saved[0], tmp_path).read(saved[2])


def test_nodes_that_do_not_fit_the_canonical_ones_are_refused_by_orig(
    saved: tuple[Setup, list[int], Mapping[str, Any]],
) -> None:
    only = 'with `partition_algo="orig"` only to divisors and multiples of [`num_canonical_nodes`]'
    assert only in table()["number of nodes"]
    setup = replace(saved[0], order={"partition_algo": "orig"})
    read, states = setup.read()
    for nodes in (2, 4):
        rest, _ = replace(setup, nodes=nodes, ranks=1).read(states[0])
        assert rest == read[4:]
    with pytest.raises(ConfigError, match="must be a multiple or a divisor of the 3 nodes"):
        replace(setup, nodes=3, ranks=1).read(states[0])


def test_skip_leaves_out_what_lies_ahead(saved: tuple[Setup, list[int], Mapping[str, Any]]) -> None:
    assert table()["`skip`"].startswith("yes, for batches that are not read yet: added ranges are skipped")
    setup, read, state = saved
    skipping = replace(setup, order={"skip": ["1", "4-5"]})
    assert skipping.read(state)[0] == read[8:16] + read[24:]
    _, states = skipping.read(state)
    assert setup.read(states[0])[0] == read[12:]


FIRST, SECOND = Phase(name="first", end=6, mix={"a": 1}), Phase(name="second", end=24, mix={"b": 1})
THIRD = Phase(name="third", mix={"a": 1, "b": 1})


def phased(*phases: Phase, epoch_size: int = 48, **settings: Any) -> Change:
    order = {"schedule": schedule(phases), "epoch_size": epoch_size}
    return lambda setup, _: replace(setup, order=order, **settings)


@pytest.fixture(scope="module")
def saved_in_second(saved: tuple[Setup, list[int], Mapping[str, Any]]) -> tuple[Setup, list[int], Mapping[str, Any]]:
    """Like ``saved``, of phases; 8 samples are read."""
    setup = phased(FIRST, SECOND, THIRD)(saved[0], Path())
    read, states = setup.read()
    return setup, read, states[BEFORE - 1]


@pytest.mark.parametrize(
    "change",
    [
        phased(FIRST, SECOND, replace(THIRD, mix={"a": [1, 0], "b": [0, 1]}, steps=3)),
        phased(FIRST, SECOND, replace(THIRD, name="other", end=36), Phase(name="more", mix={"b": 1})),
        phased(FIRST, SECOND, epoch_size=24),
        phased(FIRST, SECOND, THIRD, epoch_size=96),
        phased(FIRST, SECOND, replace(THIRD, mix={"new": 1}), names=("a", "b", "new"), places=("a", "b", "a")),
        phased(FIRST, SECOND, THIRD, names=("b", "a"), places=("b", "a"), ranks=1, batch_size=3),
    ],
)
def test_phases_ahead_may_change(
    change: Change, saved_in_second: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    assert table()[PHASES_AHEAD].startswith("yes: weights, boundaries, number of phases, end of the epoch, new streams")
    setup, read, state = saved_in_second
    changed = change(setup, tmp_path)
    rest, _ = changed.read(state)
    assert rest[:16] == read[8:24]
    names = {place: name for name, place in zip(changed.names, changed.places, strict=True)}
    if names == {"a": "a", "b": "b"} and changed.ranks * changed.batch_size == 4:
        assert rest == changed.read()[0][8:]


def test_a_stream_that_only_finished_phases_read_may_go(
    saved_in_second: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    assert table()[PHASES_AHEAD].endswith("streams that only finished phases read can be removed")
    setup, read, state = saved_in_second
    gone = phased(FIRST, SECOND, replace(THIRD, mix={"b": 1}), names=("b",), places=("b",))(setup, tmp_path)
    assert gone.read(state)[0][:16] == read[8:24]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (phased(replace(FIRST, name="other"), SECOND, THIRD), "schedule.first"),
        (phased(FIRST, replace(SECOND, end=26), THIRD), "schedule.second.end"),
        (phased(replace(FIRST, mix={"a": 1, "b": 1}), SECOND, THIRD), "schedule.first.mix"),
        (lambda setup, root: phased(FIRST, SECOND, THIRD)(rewritten({"a": 30, "b": 17})(setup, root), root), "b"),
        (ordered(schedule=None), "schedule"),
    ],
)
def test_phases_that_have_begun_stay(
    change: Change, named: str, saved_in_second: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path
) -> None:
    assert table()[PHASES_BEGUN] == "no: `StateMismatchError`"
    setup, _, state = saved_in_second
    with pytest.raises(StateMismatchError, match=named):
        change(setup, tmp_path).read(state)


class Recorder(LightningModule):
    """Remembers the samples of each optimizer step, and takes the loaders it is given."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loaders = loaders
        self.seen: list[int] = []
        self.validated = 0

    def train_dataloader(self) -> Any:
        return self.loaders

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(2))  # type: ignore[arg-type]  # is indexed, and has a length

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batches = [batch] if "id" in batch else list(batch.values())
        self.seen += [sample for one in batches for sample in one["id"].tolist()]
        loss: torch.Tensor = self.layer(batches[0]["id"].float().unsqueeze(1)).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(setup: Setup, name: str = "", ckpt_path: Path | None = None, **settings: Any) -> tuple[Recorder, Trainer]:
    (loader,) = replace(setup, ranks=1).loaders()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    more: dict[str, Any] = {"num_sanity_val_steps": 0, "enable_checkpointing": False, **quiet, **settings}
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[StreamingStateCallback()], **more)
    model = Recorder({name: loader} if name else loader)
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


@pytest.fixture
def checkpoint(saved: tuple[Setup, list[int], Mapping[str, Any]], tmp_path: Path) -> Path:
    """Of a run that stands after 6 steps of 2 samples, with loaders named by ``name``."""
    _, trainer = train(saved[0], "text", max_steps=6)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 9}, 3),
        ({"max_epochs": 1}, 18),
        ({"max_epochs": 1, "limit_train_batches": 8}, 2),
        ({"max_epochs": 1, "val_check_interval": 4, "limit_val_batches": 1}, 18),
        ({"max_epochs": 1, "accumulate_grad_batches": 4}, 18),
    ],
)
def test_settings_of_the_trainer_may_change(
    settings: dict[str, Any], steps: int, saved: tuple[Setup, list[int], Mapping[str, Any]], checkpoint: Path
) -> None:
    assert table()["`limit_train_batches`, `max_steps`, `max_epochs`, validation settings"] == "yes"
    resumed, _ = train(saved[0], "text", checkpoint, **settings)
    assert resumed.seen == saved[1][12 : 12 + 2 * steps]
    assert resumed.validated >= ("val_check_interval" in settings)


def test_other_names_of_train_loaders_are_refused(
    saved: tuple[Setup, list[int], Mapping[str, Any]], checkpoint: Path
) -> None:
    assert table()["names of train loaders"] == "no: `StateError`"
    with pytest.raises(StateError, match="give them the names they had"):
        train(saved[0], "images", checkpoint, max_steps=9)
