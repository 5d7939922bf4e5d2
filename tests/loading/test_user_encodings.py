"""Encodings of the user's own, in the worker processes of a loader."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lightning_streaming import MDSWriter
from lightning_streaming.errors import IndexFormatError
from lightning_streaming.formats import encodings
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from tests.helpers import make_dataset, make_loader


class Backwards:
    """A text, backwards."""

    size = None

    def encode(self, value: str) -> bytes:
        return value[::-1].encode()

    def decode(self, data: bytes) -> str:
        return data.decode()[::-1]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset whose writer registered an encoding, which is forgotten when the test is over."""
    monkeypatch.setattr(encodings, "_REGISTERED", {})
    register_encoding("backwards", Backwards)
    with MDSWriter(out=str(tmp_path / "a"), columns={"id": "int", "text": "backwards"}) as writer:
        for index in range(12):
            writer.write({"id": index, "text": f"text {index}"})
    assert b"3 txet" in (tmp_path / "a" / "shard.00000.mds").read_bytes()
    return tmp_path / "a"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_was_registered_reaches_the_workers(root: Path, method: str) -> None:
    loader = make_loader(root, workers=2, loader={"multiprocessing_context": method})
    found = {key: text for batch in loader for key, text in zip(batch["id"].tolist(), batch["text"], strict=True)}
    assert found == {index: f"text {index}" for index in range(12)}


def test_it_travels_with_the_dataset(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(make_dataset(root))
    monkeypatch.setattr(encodings, "_REGISTERED", {})
    assert pickle.loads(sent)[3] == {"id": 3, "text": "text 3"}
    assert registered_encodings() == {"backwards": Backwards}


def test_without_it_the_column_cannot_be_read(root: Path) -> None:
    index = root / "index.json"
    index.write_text(index.read_text().replace("backwards", "sideways"))
    with pytest.raises(IndexFormatError, match="but got 'sideways'; if it is your own, call register_encoding first"):
        make_dataset(root)[0]
    assert make_dataset(root, columns=["id"])[3] == {"id": 3}
