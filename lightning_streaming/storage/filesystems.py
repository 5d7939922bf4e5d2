"""fsspec filesystems, opened so that forks, retries, deadlines and secrets stay under this package's control.

No caller may keep a filesystem beyond one transfer: a forked child must open its own.

The hub's own filesystem lists files and reports sizes. It reads block by block in one stream, and repeats what fails,
so files of ``hf://`` URLs are read as from any HTTP server: several ranges at once, with our attempts and deadlines.

aiohttp follows redirects. It removes ``Authorization``, but sends all other headers, the session's login and cookies
along. Custom headers hold keys (``X-Api-Key``, ``Private-Token``), so only the origin of the first request, its scheme,
host and port, gets any of them.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import math
import os
import re
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from http.cookies import Morsel
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote

from lightning_streaming.errors import ConfigError, MissingDependencyError, UnsupportedError
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

# (process, thread, class and arguments) -> filesystem. A forked child inherits its parent's and must never release
# them: when one is collected, it closes its connections, which removes them from the epoll set that parent and child
# share, and the parent waits in vain for answers. fsspec's own cache releases them, so it is not used.
_opened: dict[tuple[int, int, str], Any] = {}

_S3_SCHEMES = ("s3", "s3a")
_GCS_SCHEMES = ("gs", "gcs")
_EXTRAS = {
    **dict.fromkeys(AZURE_SCHEMES, ("adlfs", "azure")),
    **dict.fromkeys(HUB_SCHEMES, ("huggingface_hub", "hub")),
    **dict.fromkeys(OCI_SCHEMES, ("ocifs", "oci")),
}
"""Schemes whose package is optional, to that package and our extra that installs it."""
_KNOWN = "s3://, gs://, az://, abfs://, abfss://, oci://, hf://, https://, http://, and those of other fsspec packages"
_CONNECT_SECONDS = 10
_OPEN_SECONDS = 60
_NO_LIMIT_SECONDS = 86_400
_S3_CONNECTIONS = 100
_HUB_OPTIONS = ("token", "endpoint")
_HUB_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
_HUB_REPOSITORY = re.compile(
    r"[^:/]+://(?:(?P<kind>datasets|spaces|models)/)?(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[^/]+))?(?:/(?P<path>.*))?"
)
_HUB_FORM = "hf://datasets/USER/NAME/path or hf://datasets/USER/NAME@REVISION/path"
_HEADERS_FOR_ALL = ("accept", "accept-encoding", "content-length", "content-type", "range")
"""Headers that another origin gets, too: they hold no secrets, and it could not answer without them."""


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
    """Open a filesystem as :func:`open_filesystem` does, to read an object's bytes: those of the hub over HTTP."""
    if scheme_of(url) in HUB_SCHEMES:
        _filesystem_class(url)  # raises an error that names the package to install
        url, options = _over_http(url, options)
    return open_filesystem(url, options)


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Open the filesystem of a URL.

    Args:
        url: URL or local path of one object.
        options: Arguments of the filesystem, as fsspec documents them; for example ``key``, ``secret``, ``token``,
            ``endpoint_url``, ``anon``, ``profile`` and ``requester_pays`` of s3fs, or ``token``, ``project`` and
            ``requester_pays`` of gcsfs. ``${NAME}`` in a text stands for an environment variable. The hub takes only
            ``token`` and ``endpoint``.

    Returns:
        An fsspec filesystem for this process, and the object's path in it.

    Raises:
        ConfigError: No filesystem serves this scheme, an environment variable in the options is not set, or the URL of
            a bucket holds credentials, or no namespace where it must.
        MissingDependencyError: The package that serves the scheme is not installed.
    """
    cls = _filesystem_class(url)
    if scheme_of(url) in (*_S3_SCHEMES, *_GCS_SCHEMES) and user_of(url):
        raise ConfigError(
            f"{mask_url(url)} has a user or password before its bucket, which this store does not take",
            hint=f"put them into {option_of(options)}, for example as key and secret",
            path=mask_url(url),
        )
    if scheme_of(url) in OCI_SCHEMES and "@" not in url.partition("://")[2].partition("/")[0]:
        # Its filesystem detects the namespace of an account, and then lists other names than the requested ones.
        raise ConfigError(
            f"{mask_url(url)} names no namespace", hint="write oci://BUCKET@NAMESPACE/path", path=mask_url(url)
        )
    arguments = {**cls._get_kwargs_from_urls(url), **_with_our_settings(url, expand(options), option_of(options))}
    token = importlib.import_module("fsspec.utils").tokenize(cls, arguments)
    key = (os.getpid(), 0 if cls.async_impl else threading.get_ident(), token)
    filesystem = _opened.get(key)
    if filesystem is None:
        create = functools.partial(cls, **arguments, skip_instance_cache=True)
        # One that blocks may connect at once, and stall.
        filesystem = create() if cls.async_impl else run_watched(create, StallClock(), math.inf, _OPEN_SECONDS)
        _disable_retries(filesystem, url, options)
        if scheme_of(url) in OCI_SCHEMES:
            filesystem.pipe_file = MethodType(_store_bytes_in_oci, filesystem)
            filesystem.put_file = MethodType(_store_file_in_oci, filesystem)
        filesystem = _opened.setdefault(key, filesystem)  # unless another thread was faster
    return filesystem, cls._strip_protocol(url)


def abandon(filesystem: Any) -> None:
    """Open no more objects with a filesystem, because a transfer that could not be stopped still uses it."""
    for key in [key for key, opened in _opened.items() if opened is filesystem]:
        # Renamed and never released, see _opened.
        process, thread, _ = key
        _opened[process, thread, f"abandoned {id(filesystem)}"] = _opened.pop(key)


def kind_of(filesystem: Any, url: str) -> str | None:
    """Return "http", "s3", "gcs", "azure", "other" for others that are asynchronous, or None for one that blocks."""
    if not filesystem.async_impl:
        return None
    kinds = {"http": (*HTTP_SCHEMES, *HUB_SCHEMES), "s3": _S3_SCHEMES, "gcs": _GCS_SCHEMES, "azure": AZURE_SCHEMES}
    kind = next((kind for kind, schemes in kinds.items() if scheme_of(url) in schemes), "other")
    # The gRPC variant of gcsfs is chosen by users whose buckets may not answer over HTTP.
    return "other" if kind == "gcs" and type(filesystem).__module__ != "gcsfs.core" else kind


def run_on_loop(filesystem: Any, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on the event loop of an asynchronous filesystem; cancel it if the caller is interrupted."""
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
        args: Positional arguments of the method.
        options: Keyword arguments of the method.
        timeout: Seconds, after which the transfer is cancelled with a TimeoutError. A filesystem that is not
            asynchronous, like sftp, cannot be cancelled: it is abandoned with its transfer.
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
    """Return the endpoint that storage options or variables set for a URL; None for the store's default."""
    options = expand_known(options)
    chosen = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    if chosen is None and scheme_of(url) in _S3_SCHEMES:
        chosen = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme_of(url) in HUB_SCHEMES:
        chosen = options.get("endpoint") or os.environ.get("HF_ENDPOINT")
    return chosen


def account_of(url: str, options: Mapping[str, Any]) -> list[str]:
    """Return those of account, region and host that storage options or variables set.

    Equal names of containers in two accounts of Azure, or of buckets in two regions of OCI, are different ones.
    """
    options = expand_known(options)
    parts = [options.get("account_name")]
    if scheme_of(url) in AZURE_SCHEMES:
        connection = options.get("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
        fields = dict(part.split("=", 1) for part in connection.split(";") if "=" in part)
        parts = [
            fields.get("AccountName") or parts[0] or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"),
            fields.get("BlobEndpoint") or options.get("account_host"),
        ]
    if scheme_of(url) in OCI_SCHEMES:
        config = options.get("config")
        parts += [options.get("region") or (config.get("region") if isinstance(config, Mapping) else None)]
    return [str(part) for part in parts if part]


def _filesystem_class(url: str) -> Any:
    scheme = scheme_of(url)
    if "::" in scheme:
        raise ConfigError(
            f"chained URLs are not supported, but got {mask_url(url)}",
            hint="remove the prefixes before the store's scheme; files are cached by this package",
            path=mask_url(url),
        )
    if scheme in _GCS_SCHEMES:
        # Read when gcsfs is imported. Otherwise gcsfs requests the kind of the bucket over gRPC, which hangs in forked
        # children.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    _reset_lock_after_fork()
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


@functools.cache
def _reset_lock_after_fork() -> None:
    """Give forked children a new fsspec lock, once per process and its descendants.

    A lock that another thread holds at the moment of a fork stays held in the child for ever.
    """
    import fsspec.asyn

    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


def _with_our_settings(url: str, options: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the options with defaults that leave retries and deadlines to us; the user's settings take precedence."""
    scheme = scheme_of(url)
    if scheme in HUB_SCHEMES:
        _check_hub_options(options, option)
    if scheme in (*_S3_SCHEMES, *_GCS_SCHEMES, *AZURE_SCHEMES):
        # A cached listing hides what other processes write later.
        options = {"use_listings_cache": False, **options}
    if scheme in _S3_SCHEMES:
        return {**options, "config_kwargs": {**_s3_config(url, options), **(options.get("config_kwargs") or {})}}
    if scheme in OCI_SCHEMES:
        # Its default, "bytes", requests the same bytes twice when an object is read in order.
        return {"default_cache_type": "readahead", **options}
    if scheme in HTTP_SCHEMES:
        # aiohttp decompresses a compressed response, whose size is then not the size in the index.
        headers = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        return guard_redirects({"timeout": None, **options, "headers": headers}, option)
    return dict(options)


def _disable_retries(filesystem: Any, url: str, options: Mapping[str, Any]) -> None:
    if scheme_of(url) in _S3_SCHEMES:
        filesystem.retries = 1
    # gcsfs has no such setting, but wraps its request function in one that repeats it up to six times.
    once = getattr(getattr(type(filesystem), "_request", None), "__wrapped__", None)
    if scheme_of(url) in _GCS_SCHEMES and once is not None:
        filesystem._request = MethodType(once, filesystem)
    if scheme_of(url) in AZURE_SCHEMES:
        # The policy is shared by all clients that this one creates, and is no option of adlfs.
        filesystem.service_client._config.retry_policy.total_retries = 0
    if scheme_of(url) in OCI_SCHEMES and "retry_strategy" not in (options.get("config_kwargs") or {}):
        never = importlib.import_module("oci.retry").NoneRetryStrategy()
        filesystem.config_kwargs["retry_strategy"] = filesystem.oci_client.retry_strategy = never


def _store_bytes_in_oci(filesystem: Any, path: str, value: Any) -> None:
    """Store an object in one request: when a part of an upload fails, ocifs creates an object of the other parts."""
    bucket, namespace, name = filesystem.split_path(path)
    filesystem.oci_client.put_object(namespace, bucket, name, value)


def _store_file_in_oci(filesystem: Any, file: str, path: str) -> None:
    with open(file, "rb") as opened:  # noqa: PTH123 - a text, as other filesystems take it
        _store_bytes_in_oci(filesystem, path, opened)


def _s3_config(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _NO_LIMIT_SECONDS,  # download_timeout is the limit, and may be longer than botocore's
        "max_pool_connections": _S3_CONNECTIONS,
    }
    known = importlib.import_module("botocore.config").Config.OPTION_DEFAULTS
    if endpoint_of(url, options) and "response_checksum_validation" in known:
        # Some stores send the checksum of the whole object with a range, which would fail every ranged read.
        config["response_checksum_validation"] = "when_required"
    return config


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file or directory of a repository."""

    kind: str
    """``"dataset"``, ``"model"`` or ``"space"``."""
    repository: str
    """``"USER/NAME"``."""
    revision: str | None
    """Branch, tag or commit; None for the main branch."""
    path: str
    """Path in the repository."""


def parse_hub_url(url: str) -> HubFile:
    """Return the file or directory that an ``hf://`` URL names.

    Raises:
        ConfigError: It names no repository.
        UnsupportedError: It names a bucket of the hub.
    """
    match = _HUB_REPOSITORY.fullmatch(url)
    first = match["name"].partition("/")[0] if match is not None and match["kind"] is None else ""
    if first == "buckets":
        raise UnsupportedError(
            f"{mask_url(url)} names a bucket of the hub, but only repositories are read: {_HUB_FORM}",
            path=mask_url(url),
        )
    if match is None or first in _HUB_KINDS:
        raise ConfigError(
            f"{mask_url(url)} names no repository of the hub", hint=f"write {_HUB_FORM}", path=mask_url(url)
        )
    revision = match["revision"]
    kind = _HUB_KINDS[match["kind"] or "models"]
    return HubFile(kind, match["name"], None if revision is None else unquote(revision), match["path"] or "")


def check_writable(url: str) -> None:
    """Check that a store can be written to. On the hub each file that is written would be a commit.

    Raises:
        UnsupportedError: It is the hub.
    """
    if scheme_of(url) in HUB_SCHEMES:
        file = parse_hub_url(url)
        raise UnsupportedError(
            f"{mask_url(url)} can be read, not written, because each shard would be a commit",
            hint="write to a directory, "
            f"then run: hf upload {file.repository} DIRECTORY {file.path or '.'} --repo-type {file.kind}",
            option="out",
            path=mask_url(url),
        )


def _check_hub_options(options: Mapping[str, Any], option: str) -> None:
    """Check that the hub knows all storage options: its filesystem would ignore others."""
    unknown = sorted(set(options) - set(_HUB_OPTIONS))
    if unknown:
        raise ConfigError(
            f"{option} of hf:// are {' and '.join(_HUB_OPTIONS)}, but got {', '.join(unknown)}",
            hint="data that needs no token takes token: false",
            option=option,
        )


def _over_http(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the HTTP URL of a file on the hub, and the storage options that reach it.

    Args:
        url: An ``hf://`` URL.
        options: ``token``, by default the one of ``HF_TOKEN`` or of ``hf auth login``, False for none; ``endpoint``, by
            default that of ``HF_ENDPOINT``, else the hub's.

    Raises:
        ConfigError: The URL names no repository, or there are other options.
    """
    _check_hub_options(options, option_of(options))
    expanded = expand(options)
    file = parse_hub_url(url)
    http_url = importlib.import_module("huggingface_hub").hf_hub_url(
        file.repository,
        file.path,
        repo_type=file.kind,
        revision=file.revision,
        endpoint=expanded.get("endpoint"),
    )
    # Quoted already, as is the URL to which the hub redirects for a large file, whose signature covers the very text.
    as_written = {"encoded": True, "client_kwargs": {"requote_redirect_url": False}}
    headers = importlib.import_module("huggingface_hub.utils").build_hf_headers(token=expanded.get("token"))
    return http_url, {"headers": headers, **as_written}


def guard_redirects(options: Mapping[str, Any], option: str = "storage_options") -> dict[str, Any]:
    """Return options of fsspec's HTTP filesystem with which a redirect to another origin takes no secret along.

    Logins and cookies become headers, as aiohttp would send those of a session to every origin.

    Args:
        options: ``headers``, ``cookies``, ``client_kwargs`` and others.
        option: Name of the option that they are from, for errors.
    """
    client = dict(options.get("client_kwargs") or {})
    guarded = {**options, "client_kwargs": client}
    _convert_to_headers(client, option)
    _convert_to_headers(guarded, option)
    client["trace_configs"] = [*(client.get("trace_configs") or ()), _redirect_guard()]
    return guarded


def _convert_to_headers(options: dict[str, Any], option: str) -> None:
    """Replace ``auth`` and ``cookies`` of a session or request by the headers that they stand for.

    Raises:
        ConfigError: ``auth`` or ``cookies`` is of another type.
    """
    headers = dict(options.get("headers") or {})
    names = {str(name).lower(): name for name in headers}
    if (login := options.pop("auth", None)) is not None and "authorization" not in names:
        if not callable(getattr(login, "encode", None)) or isinstance(login, str):
            raise ConfigError(
                f"{option}: auth must be an aiohttp.BasicAuth, but is of type {type(login).__name__}",
                hint="pass aiohttp.BasicAuth(user, password)",
                option=option,
            )
        headers["Authorization"] = login.encode()
    if cookies := _cookie_text(options.pop("cookies", None), option):
        name = names.get("cookie", "Cookie")
        headers[name] = "; ".join(filter(None, (headers.get(name), cookies)))
    if headers:
        options["headers"] = headers


def _cookie_text(cookies: Any, option: str) -> str:
    """Return the ``Cookie`` header of cookies in any form that aiohttp takes."""
    try:
        pairs = [tuple(pair) for pair in (cookies.items() if isinstance(cookies, Mapping) else cookies or ())]
        return "; ".join(f"{name}={value.coded_value if isinstance(value, Morsel) else value}" for name, value in pairs)
    except (TypeError, ValueError):  # the cookies are not shown: they are secrets
        raise ConfigError(
            f"{option}: cookies must map names to values, or be a list of pairs of them, but are of type "
            f"{type(cookies).__name__}",
            hint="pass cookies like {'session': '...'}",
            option=option,
        ) from None


@functools.cache
def _redirect_guard() -> Any:
    """Return the hook of aiohttp that is called before each redirect; one for all sessions of a process."""

    def origin(url: Any) -> tuple[str, str | None, int | None]:
        return url.scheme, url.host, url.port

    async def remember_origin(session: Any, request: Any, params: Any) -> None:  # noqa: ARG001
        request.origin = origin(params.url)

    async def remove_secrets(session: Any, request: Any, params: Any) -> None:  # noqa: ARG001
        # params.headers are those of the next request.
        target = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
        try:
            is_first_origin = origin(params.url.join(type(params.url)(target))) == request.origin
        except ValueError:
            is_first_origin = False
        if not is_first_origin:
            for name in [name for name in params.headers if name.lower() not in _HEADERS_FOR_ALL]:
                del params.headers[name]

    guard = importlib.import_module("aiohttp").TraceConfig(trace_config_ctx_factory=SimpleNamespace)
    guard.on_request_start.append(remember_origin)
    guard.on_request_redirect.append(remove_secrets)
    return guard
