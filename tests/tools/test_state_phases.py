"""``state`` on positions of runs with phases: no count is wrong, and what is moved over borders can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataLoader
from lightning_streaming.errors import StateMismatchError
from tests.helpers import ids
from tests.phased_data import (
    PHASES,
    counted_by_stream,
    ids_of_epoch,
    phased_dataset,
    phased_train,
    write_config,
    write_streams,
)
from tests.tools.running import edit_state, run

BORDERS = (52, 84, 120)


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_streams(tmp_path)


def saved_after(data: Path, train: dict[str, Any], batches: int, batch_size: int = 4) -> Path:
    """The state of a loader that has handed out so many batches, in as many epochs as that takes."""
    loader = StreamingDataLoader(phased_dataset(train, batch_size))
    left = batches
    while left:
        for _ in loader:
            left -= 1
            if not left:
                break
    path = data / f"after {batches}.json"
    path.write_text(json.dumps(loader.state_dict()))
    return path


def shown(path: Path, *args: object) -> dict[str, Any]:
    done = run("state", "show", path, *args, "--json")
    assert (done.code, done.err) == (0, "")
    (place,) = done.json["loaders"].values()
    return {"place": place, **{one["name"]: one for one in place["streams"]}}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("batches", [0, 1, 5, 13, 14, 20, 21, 22, 29, 30, 35, 60])
def test_counts_are_right_or_not_told(data: Path, batches: int) -> None:
    train = phased_train(data)
    path = saved_after(data, train, batches)
    epoch, read = divmod(4 * batches, 120)
    before, now = counted_by_stream(ids_of_epoch(train)), counted_by_stream(ids_of_epoch(train, epoch)[:read])
    begun = 3 if epoch else sum(border < read for border in (0, *BORDERS[:2]))
    end = BORDERS[begun - 1] if begun else 0
    by_end = counted_by_stream(ids_of_epoch(train)[:end])
    told, counted = shown(path), shown(path, "--config", write_config(data / "run.yaml", train)) if begun else {}
    assert {one["name"] for one in told["place"]["streams"]} == by_end.keys()
    for name, drawn in by_end.items():
        assert told[name]["drawn"] == drawn
        assert told[name]["before"] == epoch * before[name]
        assert told[name]["this_epoch"] == (now[name] if read in (0, end) else None)
        assert counted[name] == {**told[name], "this_epoch": now[name]}


def test_of_composed_batches_nothing_is_told_that_is_not_known(data: Path) -> None:
    train = phased_train(data, batching_method="per_stream", phases=[PHASES[0], {**PHASES[2], "max_repeats": {}}])
    path = saved_after(data, train, 25)
    told = shown(path)
    assert told["place"]["epoch"] == 0
    assert all(one["this_epoch"] is None for one in told["place"]["streams"])
    ids_read = [one for batch in ids(StreamingDataLoader(phased_dataset(train, 4))) for one in batch][:100]
    counted = shown(path, "--config", write_config(data / "run.yaml", train))
    read = counted_by_stream(ids_read)
    assert {one["name"]: one["this_epoch"] for one in counted["place"]["streams"]} == {
        name: read[name] for name in read
    }
    later = shown(saved_after(data, train, 40))
    assert later["place"]["epoch"] == 1
    assert all(one["before"] is None for one in later["place"]["streams"])


def test_streams_that_are_gone_do_not_make_others_counts_wrong(data: Path) -> None:
    whole = phased_train(
        data, phases=[{**PHASES[0], "mix": {"web": 1, "code": 1}}, {"name": "late", "mix": {"math": 1}}]
    )
    path = saved_after(data, whole, 14)
    state = json.loads(path.read_text())
    less = {**whole, "streams": {name: one for name, one in whole["streams"].items() if name == "math"}}
    loader = StreamingDataLoader(phased_dataset(less, 4))
    loader.load_state_dict(state)
    for _ in zip(range(2), loader, strict=False):
        pass
    gone = data / "gone.json"
    gone.write_text(json.dumps(loader.state_dict()))
    assert shown(gone)["math"]["this_epoch"] is None  # it is the only one that is told, and not the only one read
    counted = shown(gone, "--config", write_config(data / "run.yaml", less))
    assert counted["math"]["this_epoch"] == 12


def test_phases_are_shown(data: Path) -> None:
    out = run("state", "show", saved_after(data, phased_train(data), 18)).out
    table = [line.split() for line in out.partition("phases begun")[2].splitlines() if line.strip()]
    assert table[3][:4] == ["broad", "0", "52", "read"]
    assert table[4][:5] == ["ramp", "52", "84", "under", "way"]
    assert "drawn: from an epoch's beginning to the end of ramp" in " ".join(out.split())
    assert "--config run.yaml`" in out.partition("read of each stream, use `lightning-streaming state show ")[2]
    fresh = run("state", "show", saved_after(data, phased_train(data), 0)).out
    assert "no phase had begun, so nothing was read of any stream" in fresh
    assert "no fingerprint" not in fresh


def test_data_alone_does_not_count_phases(data: Path) -> None:
    refused = run("state", "show", saved_after(data, phased_train(data), 18), "--data", f"web={data / 'web'}")
    assert refused.code == 2
    assert "give" in refused.err


@pytest.mark.rotate(6)
@pytest.mark.parametrize("sample", [4, 48, 52, 56, 84, 100, 116])
@pytest.mark.parametrize("saved", [1, 18, 28])
def test_a_place_moved_over_borders_is_where_a_run_goes_on(data: Path, saved: int, sample: int) -> None:
    train = phased_train(data)
    path = saved_after(data, train, saved)
    edit_state("set", path, "--epoch", 0, "--sample", sample)
    loader = StreamingDataLoader(phased_dataset(train, 4))
    loader.load_state_dict(json.loads(path.read_text()))
    assert [one for batch in ids(loader) for one in batch] == ids_of_epoch(train)[sample:]


def test_a_moved_place_still_belongs_to_the_phases_that_were_read(data: Path) -> None:
    path = saved_after(data, phased_train(data), 18)
    edit_state("set", path, "--epoch", 0, "--sample", 100)
    other = [PHASES[0], {**PHASES[1], "steps": 2}, PHASES[2]]
    dataset = phased_dataset(phased_train(data, phases=other), 4)
    dataset.load_state_dict(json.loads(path.read_text()))
    with pytest.raises(StateMismatchError, match=r"schedule\.ramp\.steps"):
        next(iter(StreamingDataLoader(dataset)))


def test_earlier_epochs_that_are_counted_whole_are_named(data: Path) -> None:
    train = {"streams": {"code": {"remote": str(data / "code")}}, "num_canonical_nodes": 4}
    saved = saved_after(data, train, 12)
    words = "epochs before this one are counted whole, with what drop_last and limit_train_batches left out"
    for args in ([], ["--data", f"code={data / 'code'}"]):
        shown = run("state", "show", saved, *args).out
        assert f"{words}; `lightning-streaming state show " in shown
        assert " --config run.yaml` counts without it\n" in shown
    config = write_config(data / "run.yaml", train, {"batch_size": 4})
    assert words not in run("state", "show", saved, "--config", config).out
