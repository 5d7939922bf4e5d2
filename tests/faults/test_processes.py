"""Processes that begin to download after their parent did, in the midst of faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.epochs import PER_SHARD, assert_right, assert_whole_epoch, data_of, loader_over
from tests.servers import FaultyStore

STORES = pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)


@pytest.mark.rotate(2)
@STORES
def test_workers_read_though_their_parent_used_the_network_before(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("shard", "reset_body", times=1, each=True)
    loader = loader_over(store, tmp_path / "first", 2)
    assert loader.dataset[5]["data"] == data_of(5)  # fetched here
    assert_whole_epoch(loader)
    again = loader_over(store, tmp_path / "second", 2)  # a cold cache: all is fetched there
    assert_whole_epoch(again)
    alone = loader_over(store, tmp_path / "third", 0)  # and the parent still can
    assert_right(list(alone), list(range(6 * PER_SHARD)))
    alone.close()


@pytest.mark.rotate(1)
@pytest.mark.parametrize(("method", "empty_store"), [("forkserver", "s3"), ("spawn", "http")], indirect=["empty_store"])
def test_workers_that_are_no_copies_of_their_parent_read_under_all_faults(
    store: FaultyStore, tmp_path: Path, method: str
) -> None:
    for shard, fault in enumerate(("reset_body", "truncate", "corrupt", "stall", "status")):
        store.fail(f"shard.{shard:05}", fault, times=1)
    store.fail("index", "truncate", times=1)
    loader = loader_over(store, tmp_path, 1, method=method, download_timeout=1)
    assert loader.dataset[20]["data"] == data_of(20)  # fetched here
    assert_whole_epoch(loader)
    assert {entry.fault for entry in store.log()} >= {"reset_body", "truncate", "corrupt", "stall", "status"}


PROGRAM = """
import sys
from pathlib import Path
from tests.faults.epochs import assert_whole_epoch, loader_over
from tests.servers import FaultyStore
url, server, cache = sys.argv[1:]
store = FaultyStore(url=url, options={"token": "anon", "endpoint_url": server}, server=server, prefix="")
loader = loader_over(store, Path(cache), 2)
loader.dataset[0]
assert_whole_epoch(loader)
import gcsfs
assert gcsfs.GCSFileSystem is gcsfs.core.GCSFileSystem
"""


@pytest.mark.nightly
@pytest.mark.parametrize("empty_store", ["gcs"], indirect=True)
def test_gcs_is_read_without_grpc_where_nobody_asked_for_it(store: FaultyStore, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GCSFS")}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, store.url, store.server, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
