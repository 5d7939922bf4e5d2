"""Keeps what a user sends to an HTTP server from every other server that it redirects to.

aiohttp follows redirects itself. It takes away ``Authorization``, and sends all other headers, the session's login and
its cookies along. Custom headers hold keys (``X-Api-Key``, ``Private-Token``), so only the origin that was asked first,
its scheme, host and port, gets any of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_HARMLESS = ("accept", "accept-encoding", "content-length", "content-type", "range")
"""Headers that another origin gets, too: what they say is ours, and it could not answer without."""


def guarded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of fsspec's HTTP filesystem with which a redirect to another origin takes no secret along.

    Logins and cookies become headers, as aiohttp would send those of a session to every origin.

    Args:
        options: ``headers``, ``cookies``, ``client_kwargs`` and others.
    """
    client = dict(options.get("client_kwargs") or {})
    found = {**options, "client_kwargs": client}
    _as_headers(client)
    _as_headers(found)
    client["trace_configs"] = [*(client.get("trace_configs") or ()), _guard()]
    return found


def _as_headers(options: dict[str, Any]) -> None:
    """Replace ``auth`` and ``cookies`` of a session or request by the headers that they stand for."""
    headers = dict(options.get("headers") or {})
    there = {str(name).lower() for name in headers}
    if options.get("auth") is not None and "authorization" not in there:
        headers["Authorization"] = options.pop("auth").encode()
    if isinstance(options.get("cookies"), Mapping) and "cookie" not in there:
        headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in options.pop("cookies").items())
    if headers:
        options["headers"] = headers


@functools.cache
def _guard() -> Any:
    """Return the hook of aiohttp that is called before each redirect; one for all sessions of a process."""
    import aiohttp

    guard = aiohttp.TraceConfig(trace_config_ctx_factory=SimpleNamespace)
    guard.on_request_start.append(_begin)
    guard.on_request_redirect.append(_leave_secrets)
    return guard


def _origin(url: Any) -> tuple[str, str | None, int | None]:
    return url.scheme, url.host, url.port


async def _begin(session: Any, request: Any, params: Any) -> None:  # noqa: ARG001
    request.origin = _origin(params.url)


async def _leave_secrets(session: Any, request: Any, params: Any) -> None:  # noqa: ARG001
    """Take the headers away that are for the first origin alone; ``params.headers`` are those of the next request."""
    where = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
    try:
        is_there = _origin(params.url.join(type(params.url)(where))) == request.origin
    except ValueError:
        is_there = False
    if not is_there:
        for name in [name for name in params.headers if name.lower() not in _HARMLESS]:
            del params.headers[name]
