"""Data on the Hugging Face hub and on Azure gives the samples, orders and resumes that it gives from this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter
from lightning_streaming.errors import AccessDeniedError, UnsupportedError
from lightning_streaming.storage import Location
from lightning_streaming.writing import write_parallel
from tests.formats.tar_data import text_samples, write_samples
from tests.helpers import assert_resumes_at_every_step, ids, make_loader, read_epochs, write_dataset
from tests.servers import HubDataset
from tests.servers.hub import TOKEN

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

Place = tuple[str, dict[str, Any]]
Publish = Callable[[Path], Place]


@pytest.fixture(params=["hub", "azure"])
def publish(request: pytest.FixtureRequest) -> Publish:
    """Puts a directory on a store; gives the URL and the options that reach it."""
    if request.param == "hub":
        hub: HubDataset = request.getfixturevalue("hub")
        return partial(_on_hub, hub, "main")
    azure = request.getfixturevalue("azure")
    return lambda root: _uploaded(root, f"{azure.make_bucket()}/deep", azure.options)


def _on_hub(hub: HubDataset, revision: str, root: Path) -> Place:
    for path in root.rglob("*"):
        if path.is_file():
            hub.put(f"deep/{path.relative_to(root).as_posix()}", path.read_bytes(), revision)
    return f"{hub.url if revision == 'main' else hub.at(revision)}/deep", hub.options


def _uploaded(root: Path, url: str, options: dict[str, Any]) -> Place:
    for path in root.rglob("*"):
        if path.is_file():
            (Location(url, options) / path.relative_to(root).as_posix()).upload(path)
    return url, options


def test_mds_is_read_cold_and_resumed_exactly(publish: Publish, tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    url, options = publish(root)
    caches = iter(range(100))

    def make() -> Any:
        return make_loader(url, storage={"options": options}, local=str(tmp_path / f"cache{next(caches)}"))

    assert read_epochs(make(), 2) == read_epochs(make_loader(root), 2)
    assert_resumes_at_every_step(make, epochs=1)


def test_workers_read_cold(publish: Publish, tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    url, options = publish(root)
    loader = make_loader(url, storage={"options": options}, local=str(tmp_path / "cache"), workers=2)
    assert ids(loader) == ids(make_loader(root, workers=2))


def write_npy(root: Path) -> dict[str, Any]:
    for number, rows in enumerate([9, 30, 17]):
        np.save(root / f"{number}.npy", np.arange(rows * 40, dtype=np.int32).reshape(rows, 40) + 1000 * number)
    return {"format": "npy"}


def write_tar(root: Path) -> dict[str, Any]:
    for number in range(2):
        write_samples(root / f"{number}.tar", text_samples(9, first=9 * number))
    return {"format": "webdataset"}


@pytest.mark.parametrize("write", [write_npy, write_tar])
def test_other_formats_are_read(publish: Publish, tmp_path: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    root = tmp_path / "data"
    root.mkdir()
    how = {**write(root), "local": str(tmp_path / "of this machine"), "loader": {"collate_fn": list}}
    url, options = publish(root)
    near = [repr(batch) for batch in make_loader(root, **how)]
    far = make_loader(url, **{**how, "storage": {"options": options}, "local": str(tmp_path / "far")})
    assert [repr(batch) for batch in far] == near


def test_revisions_share_no_cache(hub: HubDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "caches"))
    found = []
    for number, revision in enumerate(("main", "v2", "refs/convert/parquet")):
        data = write_dataset(tmp_path / str(number), first_id=100 * number)
        url, options = _on_hub(hub, revision, data)
        found.append(sorted(chain.from_iterable(ids(make_loader(url, storage={"options": options})))))
    assert found == [list(range(100 * number, 100 * number + 29)) for number in range(3)]


def test_private_data_is_read_with_a_token_by_workers(private_hub: HubDataset, tmp_path: Path) -> None:
    url, options = _on_hub(private_hub, "main", write_dataset(tmp_path / "data"))
    settings: dict[str, Any] = {"local": str(tmp_path / "cache"), "workers": 2}
    with pytest.raises(AccessDeniedError, match="give a token"):
        list(make_loader(url, storage={"options": options}, **settings))
    loader = make_loader(url, storage={"options": {**options, "token": TOKEN}}, **settings)
    assert sorted(chain.from_iterable(ids(loader))) == list(range(29))


def test_a_dataset_is_written_to_azure(azure: Any, tmp_path: Path) -> None:
    url, options = f"{azure.make_bucket()}/deep/data", azure.options
    with MDSWriter(out=url, columns={"id": "int"}, size_limit=230, storage_options=options) as written:
        for number in range(29):
            written.write({"id": number})
    local = write_dataset(tmp_path / "data")
    there = Location(url, options)
    assert there.walk() == sorted(path.name for path in local.iterdir())
    assert all((there / path.name).read() == path.read_bytes() for path in local.iterdir())
    loader = make_loader(url, storage={"options": options}, local=str(tmp_path / "cache"))
    assert ids(loader) == ids(make_loader(local))


def test_writers_refuse_the_hub_before_they_begin(hub: HubDataset) -> None:
    place: dict[str, Any] = {"out": f"{hub.url}/train", "columns": {"id": "int"}, "storage_options": hub.options}
    with pytest.raises(UnsupportedError, match="hf upload user/"):
        MDSWriter(**place)
    with pytest.raises(UnsupportedError, match="hf upload user/"):
        write_parallel([1, 2], lambda number: iter([{"id": number}]), **place)
    assert hub.log() == []
