"""Opens fsspec filesystems so that forks, retries and deadlines stay in our hands.

Nothing else may hold on to a filesystem beyond one transfer: a forked child must open its own.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.storage.urls import endpoint_of, mask_url, scheme_of

# (process, thread, what and how) -> filesystem. A forked child inherits its parent's and must never let go of them:
# when one is collected, it closes its connections, which takes them out of the epoll set that parent and child share,
# and the parent waits in vain for answers. fsspec's own cache lets go of them, so it is not used.
_opened: dict[tuple[int, int, str], Any] = {}

_S3_SCHEMES = ("s3", "s3a")
_GCS_SCHEMES = ("gs", "gcs")
_HTTP_SCHEMES = ("http", "https")


def prepare(url: str) -> None:
    """Import the package that serves a URL.

    Call it before threads or forks: a child that is forked while another thread imports hangs on the import lock.

    Raises:
        ConfigError: No filesystem serves this scheme.
        MissingDependencyError: The package that does is not installed.
    """
    _filesystem_class(url)


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Open the filesystem of a URL, and say where in it the object is.

    Args:
        url: URL or local path of one object.
        options: Arguments of the filesystem, as fsspec documents them.

    Returns:
        An fsspec filesystem for this process, and the object's path in it.

    Raises:
        ConfigError: No filesystem serves this scheme.
        MissingDependencyError: The package that does is not installed.
    """
    cls = _filesystem_class(url)
    arguments = {**cls._get_kwargs_from_urls(url), **_with_our_settings(url, options)}
    key = (os.getpid(), 0 if cls.async_impl else threading.get_ident(), _token(cls, arguments))
    filesystem = _opened.get(key)
    if filesystem is None:
        filesystem = cls(**arguments, skip_instance_cache=True)
        if scheme_of(url) in _S3_SCHEMES:
            filesystem.retries = 1
        filesystem = _opened.setdefault(key, filesystem)  # unless another thread was faster
    return filesystem, cls._strip_protocol(url)


def call(filesystem: Any, method: str, *args: object, timeout: float | None) -> Any:
    """Call a method of a filesystem under a deadline.

    Args:
        filesystem: An fsspec filesystem.
        method: For example ``"get_file"``.
        args: What to pass to it.
        timeout: Seconds, after which the transfer is cancelled with a TimeoutError; None for no limit. A
            filesystem that is not asynchronous, like sftp, cannot be cancelled and has the limits of its own only.
    """
    if not filesystem.async_impl:
        return getattr(filesystem, method)(*args)
    from fsspec.asyn import sync

    return sync(filesystem.loop, getattr(filesystem, f"_{method}"), *args, timeout=timeout)


def _filesystem_class(url: str) -> Any:
    scheme = scheme_of(url)
    if "::" in scheme:
        raise ConfigError(
            f"chained URLs are not supported, but got {mask_url(url)}; "
            "name the store alone, its files are kept in this package's own cache"
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
            f"no filesystem serves {scheme}://, as in {mask_url(url)}; use s3://, gs://, https://, ..."
        ) from None
    except ImportError as error:
        cause = error.__cause__
        package = ((cause.name if isinstance(cause, ImportError) else None) or scheme).partition(".")[0]
        raise MissingDependencyError(
            f"{mask_url(url)} needs a package that is not installed ({error}); run: pip install {package}"
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


def _with_our_settings(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with defaults that leave retries and deadlines to us; whatever the user set wins."""
    scheme = scheme_of(url)
    if scheme in _S3_SCHEMES:
        return {**options, "config_kwargs": {**_s3_config(url, options), **(options.get("config_kwargs") or {})}}
    if scheme in _HTTP_SCHEMES:
        # A compressed answer would be unpacked on the way, and then its size is not the size in the index.
        headers = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        return {"timeout": None, **options, "headers": headers}
    return dict(options)


def _s3_config(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"retries": {"mode": "standard", "total_max_attempts": 1}}
    known = importlib.import_module("botocore.config").Config.OPTION_DEFAULTS
    if endpoint_of(url, options) and "response_checksum_validation" in known:
        # Some stores answer a range with the checksum of the whole object, which would fail every ranged read.
        config["response_checksum_validation"] = "when_required"
    return config
