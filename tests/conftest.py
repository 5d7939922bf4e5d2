"""What every test runs with: servers of its own, and no credentials, proxies or directories of whoever runs it."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import torch.distributed as dist

from tests.fast import pytest_ignore_collect, pytest_itemcollected  # noqa: F401 hooks
from tests.leftovers import forget_accelerate, restore_loader_classes
from tests.servers import (
    AzureContainer,
    AzureStore,
    GcsBucket,
    GcsStore,
    HttpStore,
    HubDataset,
    S3Bucket,
    S3Store,
    azure_server,
    azurite,
    end_servers,
    fault_proxy,
    fresh_store,
    gcs_launch,
    hub_dataset,
    python_launch,
    shared_server,
)
from tests.signals import pytest_sessionstart  # noqa: F401 hook
from tests.tiers import deselect_nightly, load_profile, pytest_addoption  # noqa: F401 a hook

# Set when this file is imported, which is before any library that reads them.
_SET = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "HF_TOKEN_PATH": os.devnull,
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_UNSET = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "FSSPEC_S3_ENDPOINT_URL",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "LIGHTNING_STREAMING_CACHE",
    "LIGHTNING_STREAMING_RUNTIME",
    "STORAGE_EMULATOR_HOST",
    "http_proxy",
    "https_proxy",
)
os.environ.update(_SET)
for _name in _UNSET:
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def process_as_found() -> Iterator[None]:
    """Take away what a test's trainers leave in this process: its rank in the environment, a group of ranks, ..."""
    found = dict(os.environ)
    yield
    forget_accelerate()
    restore_loader_classes()
    if dist.is_initialized():
        dist.destroy_process_group()
    if found != os.environ:
        os.environ.clear()
        os.environ.update(found)


@pytest.fixture(scope="session", autouse=True)
def _lightnings_docstrings_parsed_once() -> Iterator[None]:
    """Lightning's command line reads the source of its Trainer anew for each subcommand: a quarter of its time."""
    parse = docstring_parser.parse_from_object
    parse_once = cache(parse)

    def parse_from_object(obj: Any, **how: Any) -> docstring_parser.Docstring:
        return (parse_once if obj.__module__.startswith("lightning") else parse)(obj, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docstring_parser, "parse_from_object", parse_from_object)
        yield


_RUN = "LIGHTNING_STREAMING_TEST_RUN"
"""Names the directory that all processes of a run share."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep caches and locks of this run in a directory that goes away with it; settle how many examples are tried."""
    load_profile(config)
    directory = Path(tempfile.mkdtemp(prefix="lightning-streaming-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    if not hasattr(config, "workerinput"):  # the one that outlives the workers of this run, which have its environment
        os.environ[_RUN] = str(directory)
        config.add_cleanup(lambda: end_servers(directory))
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    os.environ["LIGHTNING_STREAMING_RUNTIME"] = str(directory / "runtime")


def pytest_collection() -> None:
    """Look for no garbage while tests are collected: next to nothing of what is imported goes away again."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only ``make test-all`` runs."""
    deselect_nightly(config, items)


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search for garbage, also in processes that are forked."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _run() -> Path:
    return Path(os.environ[_RUN])


@pytest.fixture(scope="session")
def s3(_run: Path) -> Iterator[S3Store]:
    """An S3 server; each test makes a bucket of its own."""
    with shared_server(_run, "s3", lambda: python_launch("s3")) as url:
        yield S3Store(url=url)


@pytest.fixture(scope="session")
def _http_server(_run: Path) -> Iterator[tuple[str, Path]]:
    root = _run / "http"
    root.mkdir(exist_ok=True)
    with shared_server(_run, "http", lambda: python_launch("http", str(root))) as url:
        yield url, root


@pytest.fixture
def http_store(_http_server: tuple[str, Path]) -> HttpStore:
    """An empty directory served over HTTP, with a log and faults of its own."""
    return fresh_store(*_http_server)


@pytest.fixture(scope="session")
def gcs(_run: Path) -> Iterator[GcsStore]:
    """A server of Google Cloud Storage; each test makes a bucket of its own."""
    with shared_server(_run, "gcs", gcs_launch) as url:
        yield GcsStore(url=url)


@pytest.fixture(scope="session")
def _s3_proxy(_run: Path, s3: S3Store) -> Iterator[str]:
    with shared_server(_run, "s3_proxy", lambda: python_launch("proxy", s3.url)) as url:
        yield url


@pytest.fixture(scope="session")
def _gcs_proxy(_run: Path, gcs: GcsStore) -> Iterator[str]:
    with shared_server(_run, "gcs_proxy", lambda: python_launch("proxy", gcs.url)) as url:
        yield url


@pytest.fixture
def s3_bucket(s3: S3Store, _s3_proxy: str) -> S3Bucket:
    """An empty bucket of S3, with a log and faults of its own."""
    return s3.bucket_behind(_s3_proxy)


@pytest.fixture
def gcs_bucket(gcs: GcsStore, _gcs_proxy: str) -> GcsBucket:
    """An empty bucket of Google Cloud Storage, with a log and faults of its own."""
    return gcs.bucket_behind(_gcs_proxy)


@pytest.fixture(scope="session")
def azure() -> Iterator[AzureStore]:
    """Azurite; each test makes a container of its own. It comes from npm, which no extra of ours installs."""
    if azurite() is None:
        pytest.skip("Azurite is not installed: npm install --global azurite, or AZURITE=/path/to/azurite-blob")
    with azure_server() as store:
        yield store


@pytest.fixture(scope="session")
def _azure_proxy(azure: AzureStore) -> Iterator[str]:
    with fault_proxy(azure.url) as url:
        yield url


@pytest.fixture
def azure_container(azure: AzureStore, _azure_proxy: str) -> AzureContainer:
    """An empty container of Azure, with a log and faults of its own."""
    return azure.bucket_behind(_azure_proxy)


@pytest.fixture(scope="session")
def _hub_server(_run: Path) -> Iterator[tuple[str, Path]]:
    root = _run / "hub"
    root.mkdir(exist_ok=True)
    with shared_server(_run, "hub", lambda: python_launch("hub", str(root))) as url:
        yield url, root


@pytest.fixture
def hub(_hub_server: tuple[str, Path]) -> HubDataset:
    """An empty dataset that everyone may read, on a stand-in for the hub, with a log and faults of its own."""
    return hub_dataset(*_hub_server, "public")


@pytest.fixture
def private_hub(_hub_server: tuple[str, Path]) -> HubDataset:
    """An empty dataset that takes a token."""
    return hub_dataset(*_hub_server, "private")
