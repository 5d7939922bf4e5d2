"""Reading some of the columns only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, Stream, StreamingConfig, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.writing.merge import merge
from tests.helpers import make_dataset, make_loader, raises

COLUMNS = {"id": "int", "image": "ndarray:uint8:4", "note": "json", "text": "str"}


def write(root: Path, columns: dict[str, str] = COLUMNS, *, first_id: int = 0, **values: Any) -> Path:
    """Twelve samples in shards of a few; ``values`` stand in for the usual ones."""
    usual = {"image": np.zeros(4, np.uint8), "note": {"a": 1}, "text": "é", "extra": 1.5}
    with MDSWriter(out=str(root), columns=columns, size_limit=450) as writer:
        for index in range(12):
            writer.write({**usual, "id": first_id + index, **values})
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_have_the_wanted_columns_in_the_usual_order(tmp_path: Path, workers: int) -> None:
    root = write(tmp_path / "a")
    everything = [batch["id"].tolist() for batch in make_loader(root, workers=workers)]
    loader = make_loader(root, workers=workers, columns=["text", "id"])
    batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == everything
    assert {tuple(batch) for batch in batches} == {("id", "text")}
    assert make_dataset(root, columns=["note"])[3] == {"note": {"a": 1}}


def test_the_rest_is_not_decoded(tmp_path: Path) -> None:
    root = write(tmp_path / "a", text=b"\xff", note=b"{")  # neither text nor JSON
    assert make_dataset(root, columns=["id"])[11] == {"id": 11}
    for name in ("text", "note"):
        with pytest.raises(EncodingError, match=f"column '{name}'"):
            make_dataset(root, columns=["id", name])[11]


def test_unsafe_columns_need_no_permission_where_they_are_not_read(tmp_path: Path) -> None:
    root = write(tmp_path / "a", {"id": "int", "extra": "pkl"})
    assert make_dataset(root, columns=["id"])[0] == {"id": 0}
    assert make_dataset(root, allow_unsafe_types=True)[0] == {"id": 0, "extra": 1.5}
    for columns in (None, ["extra"]):
        with pytest.raises(ConfigError, match="allow_unsafe_types"):
            make_dataset(root, columns=columns)[0]


def test_shards_may_differ_beside_the_wanted_columns(tmp_path: Path) -> None:
    streams = {
        "old": Stream(remote=str(write(tmp_path / "old", {"id": "int", "text": "str"}))),
        "new": Stream(remote=str(write(tmp_path / "new", {"extra": "float64", "id": "int"}, first_id=100))),
    }
    found = {sample["id"] for sample in StreamingDataset(streams=streams, batch_size=4, columns=["id"])}
    assert found == {*range(12), *range(100, 112)}
    for columns in (["extra"], ["id", "extra"]):
        dataset = StreamingDataset(streams=streams, batch_size=4, columns=columns)
        with pytest.raises(
            ConfigError, match=r"stream 'old': shard\.00000\.mds has no column 'extra'; it has 'id', 'text'"
        ):
            len(dataset)  # before the first sample, though only some shards lack it


def test_an_unknown_column_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    dataset = make_dataset(root, local=str(tmp_path / "cache"), columns=["label"])
    with raises(ConfigError, "no column 'label'", "'id', 'image', 'note', 'text'"):
        next(iter(dataset))
    assert not list((tmp_path / "cache").glob("shard*"))


def test_a_saved_position_does_not_depend_on_the_columns(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    before = make_loader(root)
    batches = iter(before)
    seen = [next(batches)["id"].tolist()]
    after = make_loader(root, columns=["id"])
    after.load_state_dict(before.state_dict())
    assert seen + [batch["id"].tolist() for batch in after] == [batch["id"].tolist() for batch in make_loader(root)]


def test_the_config_of_a_stage_takes_columns(tmp_path: Path) -> None:
    arguments = StreamingConfig(remote=str(write(tmp_path / "a")), columns=["id"]).dataset_arguments(
        shuffle_by_default=False
    )
    loader = StreamingDataLoader(StreamingDataset(**arguments), batch_size=12)
    assert [{name: values.tolist() for name, values in batch.items()} for batch in loader] == [{"id": list(range(12))}]


@pytest.mark.parametrize("stream", ["alone", "second"])
def test_an_unsafe_column_of_the_last_shard_is_refused_when_the_index_is_read(stream: str, tmp_path: Path) -> None:
    write(tmp_path / "all" / "a", {"id": "int"})
    write(tmp_path / "all" / "b", {"id": "int", "extra": "pkl"})
    merge([str(tmp_path / "all" / "a"), str(tmp_path / "all" / "b")], str(tmp_path / "all"))
    streams = {"x": Stream(remote=str(tmp_path / "all"))}
    if stream == "second":
        streams = {"first": Stream(remote=str(tmp_path / "all" / "a")), **streams}
    with pytest.raises(ConfigError, match=r"stream 'x': .* encoding pkl.*allow_unsafe_types=True"):
        make_dataset(streams=streams).size  # noqa: B018  # it reads the index
    assert make_dataset(streams=streams, columns=["id"]).size
    assert make_dataset(streams=streams, allow_unsafe_types=True).size
