"""Opens fsspec filesystems so that forks, retries and deadlines stay in our hands.

Nothing else may hold on to a filesystem beyond one transfer: a forked child must open its own.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import math
import os
import threading
from collections.abc import Coroutine, Mapping
from types import MethodType
from typing import Any, TypeVar

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.storage.hub import check_hub_options, over_http
from lightning_streaming.storage.redirects import guarded
from lightning_streaming.storage.retries import StallClock, run_watched, watched
from lightning_streaming.storage.secrets import expand, expand_known, option_of
from lightning_streaming.storage.urls import (
    AZURE_SCHEMES,
    HTTP_SCHEMES,
    HUB_SCHEMES,
    OCI_SCHEMES,
    mask_url,
    scheme_of,
    user_of,
)

_Result = TypeVar("_Result")

# (process, thread, what and how) -> filesystem. A forked child inherits its parent's and must never let go of them:
# when one is collected, it closes its connections, which takes them out of the epoll set that parent and child share,
# and the parent waits in vain for answers. fsspec's own cache lets go of them, so it is not used.
_opened: dict[tuple[int, int, str], Any] = {}

_S3_SCHEMES = ("s3", "s3a")
_GCS_SCHEMES = ("gs", "gcs")
_EXTRAS = {
    **dict.fromkeys(AZURE_SCHEMES, ("adlfs", "azure")),
    **dict.fromkeys(HUB_SCHEMES, ("huggingface_hub", "hub")),
    **dict.fromkeys(OCI_SCHEMES, ("ocifs", "oci")),
}
"""Of a scheme whose package does not come with this one: that package, and our extra that installs it."""
_KNOWN = "s3://, gs://, az://, abfs://, abfss://, oci://, hf://, https://, http://, and those of other fsspec packages"
_CONNECT_SECONDS = 10
_OPEN_SECONDS = 60
_NO_LIMIT_SECONDS = 86_400
_S3_CONNECTIONS = 100


def prepare(url: str) -> None:
    """Import the package that serves a URL.

    Call it before threads or forks: a child that is forked while another thread imports hangs on the import lock.

    Raises:
        ConfigError: No filesystem serves this scheme.
        MissingDependencyError: The package that does is not installed.
    """
    _filesystem_class(url)
    if scheme_of(url) in HUB_SCHEMES:
        _filesystem_class("https://")


def open_to_read(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Like :func:`open_filesystem`, but for reading an object's bytes: those of the hub come over HTTP."""
    if scheme_of(url) in HUB_SCHEMES:
        _filesystem_class(url)  # says what to install
        url, options = over_http(url, options)
    return open_filesystem(url, options)


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Open the filesystem of a URL, and say where in it the object is.

    Args:
        url: URL or local path of one object.
        options: Arguments of the filesystem, as fsspec documents them; for example ``key``, ``secret``, ``token``,
            ``endpoint_url``, ``anon``, ``profile`` and ``requester_pays`` of s3fs, or ``token``, ``project`` and
            ``requester_pays`` of gcsfs. ``${NAME}`` in a text stands for an environment variable. The hub takes
            ``token`` and ``endpoint`` alone.

    Returns:
        An fsspec filesystem for this process, and the object's path in it.

    Raises:
        ConfigError: No filesystem serves this scheme, an environment variable that the options take is not set, or the
            URL of a bucket holds credentials, or no namespace where it must.
        MissingDependencyError: The package that does is not installed.
    """
    cls = _filesystem_class(url)
    if scheme_of(url) in (*_S3_SCHEMES, *_GCS_SCHEMES) and user_of(url):
        raise ConfigError(
            f"{mask_url(url)} was given with a user or password before its bucket, which this store does not take",
            hint=f"put them into {option_of(options)}, for example as key and secret",
            path=mask_url(url),
        )
    if scheme_of(url) in OCI_SCHEMES and "@" not in url.partition("://")[2].partition("/")[0]:
        # Its filesystem finds the namespace of an account, and then lists under other names than were asked for.
        raise ConfigError(
            f"{mask_url(url)} names no namespace", hint="write oci://BUCKET@NAMESPACE/path", path=mask_url(url)
        )
    arguments = {**cls._get_kwargs_from_urls(url), **_with_our_settings(url, expand(options), option_of(options))}
    key = (os.getpid(), 0 if cls.async_impl else threading.get_ident(), _token(cls, arguments))
    filesystem = _opened.get(key)
    if filesystem is None:
        make = functools.partial(cls, **arguments, skip_instance_cache=True)
        # One that blocks may connect at once, and stall.
        filesystem = make() if cls.async_impl else run_watched(make, StallClock(), math.inf, _OPEN_SECONDS)
        _leave_retries_to_us(filesystem, url, options)
        if scheme_of(url) in OCI_SCHEMES:
            filesystem.pipe_file = MethodType(_store_bytes_in_oci, filesystem)
            filesystem.put_file = MethodType(_store_file_in_oci, filesystem)
        filesystem = _opened.setdefault(key, filesystem)  # unless another thread was faster
    return filesystem, cls._strip_protocol(url)


def abandon(filesystem: Any) -> None:
    """Open no more objects with a filesystem, because a transfer that could not be stopped still uses it."""
    for key in [key for key, one in _opened.items() if one is filesystem]:
        # Not let go of, as above.
        process, thread, _ = key
        _opened[process, thread, f"abandoned {id(filesystem)}"] = _opened.pop(key)


def kind_of(filesystem: Any, url: str) -> str | None:
    """``"http"``, ``"s3"``, ``"gcs"``, ``"azure"``, ``"other"`` if it is asynchronous too, None for one that blocks."""
    if not filesystem.async_impl:
        return None
    kinds = {"http": (*HTTP_SCHEMES, *HUB_SCHEMES), "s3": _S3_SCHEMES, "gcs": _GCS_SCHEMES, "azure": AZURE_SCHEMES}
    kind = next((kind for kind, schemes in kinds.items() if scheme_of(url) in schemes), "other")
    # Whoever asked gcsfs for its gRPC variant has buckets that may not answer over HTTP.
    return "other" if kind == "gcs" and type(filesystem).__module__ != "gcsfs.core" else kind


def run_on_loop(filesystem: Any, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on the event loop of an asynchronous filesystem; cancelled if the caller is interrupted."""
    future = asyncio.run_coroutine_threadsafe(work, filesystem.loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def call(filesystem: Any, method: str, *args: object, timeout: float, **options: object) -> Any:
    """Call a method of a filesystem under a deadline.

    Args:
        filesystem: An fsspec filesystem.
        method: For example ``"put_file"``.
        args: What to pass to it.
        options: The same by name.
        timeout: Seconds, after which the transfer is cancelled with a TimeoutError. A filesystem that is not
            asynchronous, like sftp, cannot be cancelled: it is left alone with its transfer.
    """
    if filesystem.async_impl:
        work = getattr(filesystem, f"_{method}")(*args, **options)
        return run_on_loop(filesystem, watched(work, StallClock(), math.inf, timeout))
    try:
        return run_watched(lambda: getattr(filesystem, method)(*args, **options), StallClock(), math.inf, timeout)
    except TimeoutError:
        abandon(filesystem)
        raise


def endpoint_of(url: str, options: Mapping[str, Any]) -> str | None:
    """The endpoint that storage options or variables choose for a URL; None for the store's own."""
    options = expand_known(options)
    chosen = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    if chosen is None and scheme_of(url) in ("s3", "s3a"):
        chosen = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme_of(url) in HUB_SCHEMES:
        chosen = options.get("endpoint") or os.environ.get("HF_ENDPOINT")
    return chosen


def account_of(url: str, options: Mapping[str, Any]) -> list[str]:
    """The account, region and host that storage options or variables choose, each where it is chosen.

    A container is another one in another account of Azure, and a bucket in another region of OCI.
    """
    options = expand_known(options)
    found = [options.get("account_name")]
    if scheme_of(url) in AZURE_SCHEMES:
        connection = options.get("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
        said = dict(part.split("=", 1) for part in connection.split(";") if "=" in part)
        found = [
            said.get("AccountName") or found[0] or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"),
            said.get("BlobEndpoint") or options.get("account_host"),
        ]
    if scheme_of(url) in OCI_SCHEMES:
        config = options.get("config")
        found += [options.get("region") or (config.get("region") if isinstance(config, Mapping) else None)]
    return [str(one) for one in found if one]


def _filesystem_class(url: str) -> Any:
    scheme = scheme_of(url)
    if "::" in scheme:
        raise ConfigError(
            f"chained URLs are not supported, but got {mask_url(url)}",
            hint="name the store alone, its files are kept in this package's own cache",
            path=mask_url(url),
        )
    if scheme in _GCS_SCHEMES:
        # Read when gcsfs is imported. Otherwise gcsfs asks over gRPC what kind of bucket this is, and gRPC hangs in
        # forked children.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    _mend_fsspec_after_fork()
    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise ConfigError(
            f"no filesystem serves {scheme}://, as in {mask_url(url)}", hint=f"known are {_KNOWN}", path=mask_url(url)
        ) from None
    except ImportError as error:
        if scheme in _EXTRAS:
            package, extra = _EXTRAS[scheme]
            raise MissingDependencyError(
                f"{mask_url(url)} needs the {package} package",
                hint=f"run: pip install 'lightning-streaming[{extra}]'",
                path=mask_url(url),
            ) from error
        cause = error.__cause__
        package = ((cause.name if isinstance(cause, ImportError) else None) or scheme).partition(".")[0]
        raise MissingDependencyError(
            f"{mask_url(url)} needs a package that is not installed ({error})",
            hint=f"run: pip install {package}",
            path=mask_url(url),
        ) from error


def _token(cls: Any, arguments: Mapping[str, Any]) -> str:
    from fsspec.utils import tokenize

    token: str = tokenize(cls, arguments)
    return token


@functools.cache
def _mend_fsspec_after_fork() -> None:
    """Give forked children a new fsspec lock, once per process and its descendants.

    A lock that another thread holds at the moment of a fork stays held in the child for ever.
    """
    import fsspec.asyn

    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


def _with_our_settings(url: str, options: Mapping[str, Any], option: str) -> dict[str, Any]:
    """The options, with defaults that leave retries and deadlines to us; whatever the user set wins."""
    scheme = scheme_of(url)
    if scheme in HUB_SCHEMES:
        check_hub_options(options, option)
    if scheme in (*_S3_SCHEMES, *_GCS_SCHEMES, *AZURE_SCHEMES):
        # A listing that is kept hides what other processes write later.
        options = {"use_listings_cache": False, **options}
    if scheme in _S3_SCHEMES:
        return {**options, "config_kwargs": {**_s3_config(url, options), **(options.get("config_kwargs") or {})}}
    if scheme in OCI_SCHEMES:
        # What its own default keeps, "bytes", it asks for twice when it is read in order.
        return {"default_cache_type": "readahead", **options}
    if scheme in HTTP_SCHEMES:
        # A compressed answer would be unpacked on the way, and then its size is not the size in the index.
        headers = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        return guarded({"timeout": None, **options, "headers": headers}, option)
    return dict(options)


def _leave_retries_to_us(filesystem: Any, url: str, options: Mapping[str, Any]) -> None:
    if scheme_of(url) in _S3_SCHEMES:
        filesystem.retries = 1
    # gcsfs has no such setting, but keeps the request that it repeats up to six times, within others that it repeats.
    once = getattr(getattr(type(filesystem), "_request", None), "__wrapped__", None)
    if scheme_of(url) in _GCS_SCHEMES and once is not None:
        filesystem._request = MethodType(once, filesystem)
    if scheme_of(url) in AZURE_SCHEMES:
        # The policy is shared by all clients that this one makes, and is no option of adlfs.
        filesystem.service_client._config.retry_policy.total_retries = 0
    if scheme_of(url) in OCI_SCHEMES and "retry_strategy" not in (options.get("config_kwargs") or {}):
        never = importlib.import_module("oci.retry").NoneRetryStrategy()
        filesystem.config_kwargs["retry_strategy"] = filesystem.oci_client.retry_strategy = never


def _store_bytes_in_oci(filesystem: Any, path: str, value: Any) -> None:
    """Store an object in one request: ocifs, when a part of an upload fails, makes an object of the other parts."""
    bucket, namespace, name = filesystem.split_path(path)
    filesystem.oci_client.put_object(namespace, bucket, name, value)


def _store_file_in_oci(filesystem: Any, file: str, path: str) -> None:
    with open(file, "rb") as opened:  # noqa: PTH123 - as other filesystems take it
        _store_bytes_in_oci(filesystem, path, opened)


def _s3_config(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _NO_LIMIT_SECONDS,  # download_timeout is the limit, and may be longer than theirs
        "max_pool_connections": _S3_CONNECTIONS,
    }
    known = importlib.import_module("botocore.config").Config.OPTION_DEFAULTS
    if endpoint_of(url, options) and "response_checksum_validation" in known:
        # Some stores answer a range with the checksum of the whole object, which would fail every ranged read.
        config["response_checksum_validation"] = "when_required"
    return config
