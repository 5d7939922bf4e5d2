"""Azure's blobs, on Azurite, the emulator of their makers. Without Azurite what needs it is skipped."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
)
from lightning_streaming.storage import Location, StorageOptions, retries
from lightning_streaming.storage.secrets import redact
from tests.helpers import assert_error
from tests.servers import AzureContainer, AzureStore

# What Azure's client leaves behind of an answer that it gave up.
_LEFT_OPEN = pytest.mark.filterwarnings("ignore:Unclosed response:ResourceWarning")
_LARGE_BODY = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
DATA = bytes(range(256)) * 40
KEY = "c2VjcmV0LWtleS1vZi1hbi1hY2NvdW50"


def at(container: AzureContainer, name: str, attempts: int = 2, timeout: float = 5) -> Location:
    return Location(f"{container.url}/{name}", container.options, attempts=attempts, timeout=timeout)


@_LARGE_BODY
def test_ranges_of_a_large_blob_are_fetched_at_once(azure_container: AzureContainer, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20
    azure_container.put("x", data)
    at(azure_container, "x").download(tmp_path / "x", size=len(data))
    assert (tmp_path / "x").read_bytes() == data
    log = azure_container.log()
    assert [entry.method for entry in log] == ["GET"] * 3
    assert max(entry.begun for entry in log) < min(entry.ended or 0 for entry in log)


@_LARGE_BODY
def test_a_blob_of_unknown_size_is_read_to_its_end(azure_container: AzureContainer, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 37  # its client asks for 32 MiB, then for 4 at a time
    azure_container.put("x", data)
    at(azure_container, "x", timeout=30).download(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == data


def test_an_empty_blob_is_read(azure_container: AzureContainer, tmp_path: Path) -> None:
    at(azure_container, "x").put(b"")
    assert at(azure_container, "x").read() == b""
    at(azure_container, "x").download(tmp_path / "x", size=0)
    assert (tmp_path / "x").read_bytes() == b""


@_LEFT_OPEN
@pytest.mark.parametrize("fault", ["status", "reset", "reset_body", "truncate", "stall", "hang", "corrupt"])
def test_what_passes_is_tried_again(azure_container: AzureContainer, tmp_path: Path, fault: str) -> None:
    azure_container.put("x", DATA)
    azure_container.fail("x", fault, times=1)

    def check(path: Path) -> None:
        if path.read_bytes() != DATA:
            raise IntegrityError("damaged")

    at(azure_container, "x", timeout=0.5).download(tmp_path / "x", size=len(DATA), check=check)
    assert (tmp_path / "x").read_bytes() == DATA
    gc.collect()


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_each_attempt_is_one_request(
    azure_container: AzureContainer, status: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_MAX_POSTPONED", 0)  # so that all count
    azure_container.put("x", DATA)
    azure_container.fail("x", "status", status=status, method=method)
    one = at(azure_container, "x")
    asks: dict[str, Callable[[], object]] = {"GET": one.read, "HEAD": one.stat, "PUT": lambda: one.put(b"1")}
    with pytest.raises(StorageError, match="2 attempts") as caught:
        asks[method]()
    assert isinstance(caught.value, DownloadError) == (method == "GET")
    assert len(azure_container.log()) == 2


def test_a_wrong_key_is_told_and_not_shown(azure_container: AzureContainer) -> None:
    azure_container.put("x", DATA)
    right = azure_container.options["connection_string"]
    options = {"connection_string": right.replace("AccountKey=Eby8", "AccountKey=AAAA")}
    one = Location(f"{azure_container.url}/x", options, attempts=3)
    asked: list[Callable[[], object]] = [one.read, one.stat, one.sizes, one.walk]
    asked += [lambda: one.put(b"1"), lambda: one.read_range(1, 2)]
    for ask in asked:
        with assert_error(AccessDeniedError, hint="give account_name with account_key, sas_token or") as caught:
            ask()
        assert "AAAA" not in f"{caught.value} {caught.value.__cause__}"
        assert "\n" not in str(caught.value)


def test_a_container_that_is_not_there_is_told_from_a_blob(azure: AzureStore) -> None:
    missing = Location(f"{azure.make_bucket()}/x", azure.options, attempts=3)
    with assert_error(ObjectNotFoundError, hint="check the path"):
        missing.read()
    none = Location("az://no-such-container/x", azure.options, attempts=3)
    for ask in (none.read, lambda: none.put(b"1")):
        with assert_error(ObjectNotFoundError, hint="check its name"):
            ask()


@pytest.mark.parametrize("scheme", ["az", "abfs", "abfss"])
def test_a_container_is_reached_by_every_scheme(azure: AzureStore, scheme: str) -> None:
    url = azure.make_bucket().replace("az://", f"{scheme}://")
    Location(f"{url}/a/x", azure.options).put(DATA)
    assert Location(f"{url}/a/x", azure.options).read() == DATA
    assert {name: file.size for name, file in Location(url, azure.options).walk_files().items()} == {"a/x": len(DATA)}


def test_the_account_may_be_in_the_url(azure: AzureStore) -> None:
    url = azure.make_bucket().replace("az://", "abfs://") + f"@{azure.ACCOUNT}.dfs.core.windows.net"
    Location(f"{url}/a/x", azure.options).put(DATA)
    assert {name: file.size for name, file in Location(f"{url}/a", azure.options).walk_files().items()} == {
        "x": len(DATA)
    }
    assert Location(f"{url}/a/x", azure.options).read_range(1, 5) == DATA[1:5]


def test_credentials_come_from_the_environment(azure: AzureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    url = azure.make_bucket()
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.options["connection_string"])
    Location(f"{url}/x").put(DATA)
    assert Location(f"{url}/x").read() == DATA
    monkeypatch.setenv("MY_CONNECTION", azure.options["connection_string"])
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    assert Location(f"{url}/x", {"connection_string": "${MY_CONNECTION}"}).read() == DATA


def _reads(url: str, options: dict[str, Any]) -> None:
    gc.collect()
    assert Location(url, options, attempts=1, timeout=10).read() == DATA


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_parent_and_child_read_side_by_side(azure: AzureStore, way: str) -> None:
    url = f"{azure.make_bucket()}/x"
    Location(url, azure.options).put(DATA)
    for _ in range(2):
        context: Any = multiprocessing.get_context(way)
        child = context.Process(target=_reads, args=(url, azure.options))
        child.start()
        child.join(timeout=60)
        assert child.exitcode == 0
        _reads(url, azure.options)


def test_without_an_account_the_options_are_asked_for() -> None:
    with assert_error(ConfigError, path="az://container/x", hint="check the URL and storage_options") as caught:
        Location("az://container/x", {"anon": True}, attempts=3).read()
    assert "connection_string or account_name" in str(caught.value)


def test_what_is_secret_is_masked_and_what_is_not_stays() -> None:
    connection = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={KEY};EndpointSuffix=core.windows.net"
    options = {"connection_string": connection, "account_name": "mine", "account_host": "here.example"}
    secret = {"account_key": KEY, "sas_token": "sv=2024&sig=hushhushhush", "client_secret": "hushhush"}
    shown = repr(StorageOptions({**options, **secret}))
    assert KEY not in shown
    assert "hush" not in shown
    assert "'account_name': 'mine', 'account_host': 'here.example'" in shown
    text = f"AccountName mine at core.windows.net refused {KEY}, hushhushhush and hushhush"
    assert redact(text, {**options, **secret}) == "AccountName mine at core.windows.net refused ***, *** and ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AZURE_STORAGE_ACCOUNT_KEY", KEY),
        ("AZURE_STORAGE_SAS_TOKEN", f"sv=1&sig={KEY}"),
        ("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=a;AccountKey={KEY}"),
        ("HF_TOKEN", KEY),
    ],
)
def test_what_clients_take_from_the_environment_is_masked(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"refused {KEY}", {}) == "refused ***"


def test_another_account_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "az://container/x"
    mine = Location(url, {"account_name": "mine", "account_key": KEY}).key
    assert mine != Location(url, {"account_name": "theirs", "account_key": KEY}).key
    assert mine == Location(url, {"connection_string": f"AccountName=mine;AccountKey={KEY}"}).key
    assert KEY not in mine
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert mine == Location(url).key
