from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_streaming.errors import ConfigError, IndexFormatError, ObjectNotFoundError, StorageError
from lightning_streaming.writing.destination import Destination, parse_out
from lightning_streaming.writing.directories import prepare_directory
from lightning_streaming.writing.place import Directory
from lightning_streaming.writing.writer import MDSWriter


@pytest.fixture
def bucket() -> Iterator[str]:
    """A URL in fsspec's own memory."""
    fsspec.filesystem("memory").touch("/bucket/beside")
    yield "memory://bucket/data"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_dataset(out: Any, **settings: Any) -> None:
    with MDSWriter(columns={"id": "int"}, out=out, size_limit=300, **settings) as writer:
        for number in range(40):
            writer.write({"id": number})


@pytest.mark.parametrize(
    ("out", "directory", "remote"),
    [
        ("data", Path("data"), None),
        (Path("data"), Path("data"), None),
        ("file:///data", Path("/data"), None),
        ("~/data", Path.home() / "data", None),
        ("s3://bucket/data", None, "s3://bucket/data"),
        (("data", "s3://bucket/data"), Path("data"), "s3://bucket/data"),
        (["data", "/mnt/data"], Path("data"), "/mnt/data"),
    ],
)
def test_out_says_a_directory_and_a_remote(out: Any, directory: Path | None, remote: str | None) -> None:
    assert parse_out(out) == (directory, remote)


@pytest.mark.parametrize(
    "out",
    ["", (), ("data",), ("data", "s3://a", "s3://b"), ("s3://a", "data"), ("data", ""), ("data", "./data"), None, 3],
)
def test_any_other_out_is_refused(out: Any) -> None:
    with pytest.raises(ConfigError, match="out must be a directory, a URL, or a pair"):
        parse_out(out)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_out(("s3://user:secret@bucket", "data"))
    assert "secret" not in str(caught.value)


def test_files_go_to_a_directory(tmp_path: Path) -> None:
    destination = Destination(tmp_path / "new" / "out")
    destination.put("a.mds", b"a")
    destination.close()
    assert (tmp_path / "new" / "out" / "a.mds").read_bytes() == b"a"


def test_files_of_a_url_leave_nothing_here(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    destination = Destination(bucket)
    destination.put("a.mds", b"a")
    destination.close()
    assert names(tmp_path) == []
    assert fsspec.filesystem("memory").cat("/bucket/data/a.mds") == b"a"


@pytest.mark.parametrize("keep_local", [True, False])
def test_files_of_a_pair_are_kept_on_request(keep_local: bool, bucket: str, tmp_path: Path) -> None:
    destination = Destination((str(tmp_path / "out"), bucket), keep_local=keep_local)
    destination.put("a.mds", b"a")
    destination.close()
    assert fsspec.filesystem("memory").cat("/bucket/data/a.mds") == b"a"
    assert (tmp_path / "out").exists() == keep_local
    assert (tmp_path / "out" / "a.mds").exists() == keep_local


def test_the_second_place_of_a_pair_may_be_a_directory(tmp_path: Path) -> None:
    destination = Destination((str(tmp_path / "a"), str(tmp_path / "b" / "c")))
    destination.put("a.mds", b"a")
    destination.close()
    assert names(tmp_path) == ["b"]
    assert names(tmp_path / "b" / "c") == ["a.mds"]


def test_a_url_has_no_directory_to_keep(bucket: str) -> None:
    with pytest.raises(ConfigError, match="keep_local=True needs a directory"):
        Destination(bucket, keep_local=True)


def test_only_what_was_put_is_removed(tmp_path: Path) -> None:
    destination = Destination(tmp_path / "out")
    destination.put("a.mds", b"a")
    (tmp_path / "out" / "mine.txt").touch()
    destination.undo()
    assert names(tmp_path / "out") == ["mine.txt"]


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    for name in ("found", "made"):
        destination = Destination(tmp_path / name)
        destination.put("a.mds", b"a")
        destination.undo()
    assert names(tmp_path) == ["found"]
    assert names(tmp_path / "found") == []


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"must be empty, but holds mine.txt"):
        prepare_directory(tmp_path, exist_ok=False)
    with pytest.raises(ConfigError, match="must be a directory, but is a file"):
        prepare_directory(tmp_path / "mine.txt", exist_ok=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_dataset_may_be_replaced(compression: str | None, tmp_path: Path) -> None:
    write_dataset(tmp_path / "out", compression=compression)
    assert len(names(tmp_path / "out")) > 2
    with pytest.raises(ConfigError, match="exist_ok=True replaces a dataset"):
        prepare_directory(tmp_path / "out", exist_ok=False)
    prepare_directory(tmp_path / "out", exist_ok=True)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize(
    "foreign", ["mine.txt", "shard.00099.mds", "shard.00000.mds.1-2.part", "part0/shard.00000.mds"]
)
def test_nothing_is_replaced_where_something_else_lies(foreign: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "out")
    (tmp_path / "out" / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / foreign).touch()
    before = names(tmp_path / "out")
    with pytest.raises(ConfigError, match="which no index names as part of a dataset"):
        prepare_directory(tmp_path / "out", exist_ok=True)
    assert names(tmp_path / "out") == before


def test_a_folder_is_not_replaced_even_if_an_index_names_it(tmp_path: Path) -> None:
    write_dataset(tmp_path / "out")
    (tmp_path / "out" / "shard.00000.mds").unlink()
    (tmp_path / "out" / "shard.00000.mds").mkdir()
    with pytest.raises(ConfigError, match=r"holds shard\.00000\.mds, which no index names"):
        prepare_directory(tmp_path / "out", exist_ok=True)
    assert (tmp_path / "out" / "index.json").exists()


def test_nothing_is_replaced_by_the_word_of_a_damaged_index(tmp_path: Path) -> None:
    write_dataset(tmp_path / "out")
    (tmp_path / "out" / "index.json").write_bytes(b"{}")
    before = names(tmp_path / "out")
    with pytest.raises(IndexFormatError, match=r"index\.json"):
        prepare_directory(tmp_path / "out", exist_ok=True)
    assert names(tmp_path / "out") == before


@pytest.mark.parametrize("with_directory", [False, True], ids=["URL", "pair"])
def test_a_dataset_under_a_url_is_not_written_over_unless_told(
    bucket: str, with_directory: bool, tmp_path: Path
) -> None:
    def out(place: str) -> Any:
        return (str(tmp_path / place), bucket) if with_directory else bucket

    write_dataset(out("first"))
    with pytest.raises(ConfigError, match="holds a dataset"):
        Destination(out("second")).start_anew(exist_ok=False)
    write_dataset(out("third"), exist_ok=True)


@pytest.mark.parametrize("kind", ["URL", "directory"])
def test_a_remote_dataset_that_is_replaced_is_no_dataset_meanwhile(kind: str, bucket: str, tmp_path: Path) -> None:
    remote = bucket if kind == "URL" else str(tmp_path / "remote")
    out = (str(tmp_path / "out"), remote)
    write_dataset(out)
    writer = MDSWriter(columns={"id": "int"}, out=out, size_limit=300, exist_ok=True)
    assert Destination(out).published() is None
    writer.write({"id": 0})
    writer.finish()
    found = Destination(out).published()
    assert found is not None
    assert found[0].num_samples == 1


def test_the_directory_of_a_pair_is_not_used_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").touch()
    write_dataset((str(tmp_path / "mine"), str(tmp_path / "remote")))
    assert names(tmp_path / "mine") == ["mine.txt"]
    with pytest.raises(ConfigError, match=r"must be empty, but holds mine\.txt"):
        write_dataset((str(tmp_path / "mine"), str(tmp_path / "other")), keep_local=True)


@pytest.mark.parametrize("mode", ["create", "resume", "append"])
def test_a_file_is_no_directory(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (str(tmp_path / "file"), (str(tmp_path / "here"), str(tmp_path / "file"))):
        with pytest.raises(ConfigError, match="must be a directory, but is a file"):
            MDSWriter(columns={"id": "int"}, out=out, mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["create", "resume", "append"])
def test_what_the_system_refuses_is_a_storage_error_with_the_path(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (str(tmp_path / "file" / "sub"), (str(tmp_path / "here"), str(tmp_path / "file" / "sub"))):
        with pytest.raises(StorageError, match=r"could not .*file/sub"):
            MDSWriter(columns={"id": "int"}, out=out, mode=mode)  # type: ignore[arg-type]


def test_a_directory_names_what_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    directory = Directory(tmp_path)
    for refused in (
        lambda: directory.remove("folder"),
        lambda: directory.make_folder("file/x"),
        lambda: directory.put("file/x", b""),
        lambda: directory.get("folder"),
    ):
        with pytest.raises(StorageError, match=str(tmp_path)) as caught:
            refused()
        assert not isinstance(caught.value, ObjectNotFoundError)
