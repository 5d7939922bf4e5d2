"""Keeps what a user sends to an HTTP server from every other server that it redirects to.

aiohttp follows redirects itself. It takes away ``Authorization``, and sends all other headers, the session's login and
its cookies along. Custom headers hold keys (``X-Api-Key``, ``Private-Token``), so only the origin that was asked first,
its scheme, host and port, gets any of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from http.cookies import Morsel
from types import SimpleNamespace
from typing import Any

from lightning_streaming.errors import ConfigError

_HARMLESS = ("accept", "accept-encoding", "content-length", "content-type", "range")
"""Headers that another origin gets, too: what they say is ours, and it could not answer without."""


def guarded(options: Mapping[str, Any], option: str = "storage_options") -> dict[str, Any]:
    """Return options of fsspec's HTTP filesystem with which a redirect to another origin takes no secret along.

    Logins and cookies become headers, as aiohttp would send those of a session to every origin.

    Args:
        options: ``headers``, ``cookies``, ``client_kwargs`` and others.
        option: Name of the option that they are from, as errors call it.
    """
    client = dict(options.get("client_kwargs") or {})
    found = {**options, "client_kwargs": client}
    _as_headers(client, option)
    _as_headers(found, option)
    client["trace_configs"] = [*(client.get("trace_configs") or ()), _guard()]
    return found


def _as_headers(options: dict[str, Any], option: str) -> None:
    """Replace ``auth`` and ``cookies`` of a session or request by the headers that they stand for.

    Raises:
        ConfigError: ``auth`` or ``cookies`` is of another type.
    """
    headers = dict(options.get("headers") or {})
    there = {str(name).lower(): name for name in headers}
    if (login := options.pop("auth", None)) is not None and "authorization" not in there:
        if not callable(getattr(login, "encode", None)) or isinstance(login, str):
            raise ConfigError(
                f"{option}: auth must be an aiohttp.BasicAuth, but is of type {type(login).__name__}",
                hint="pass aiohttp.BasicAuth(user, password)",
                option=option,
            )
        headers["Authorization"] = login.encode()
    if cookies := _cookie_text(options.pop("cookies", None), option):
        name = there.get("cookie", "Cookie")
        headers[name] = "; ".join(filter(None, (headers.get(name), cookies)))
    if headers:
        options["headers"] = headers


def _cookie_text(cookies: Any, option: str) -> str:
    """Return cookies, in any form that aiohttp takes, as a ``Cookie`` header has them."""
    try:
        pairs = [tuple(one) for one in (cookies.items() if isinstance(cookies, Mapping) else cookies or ())]
        return "; ".join(f"{name}={value.coded_value if isinstance(value, Morsel) else value}" for name, value in pairs)
    except (TypeError, ValueError):  # which are not shown: they are secrets
        raise ConfigError(
            f"{option}: cookies must map names to values, or be a list of pairs of them, but are of type "
            f"{type(cookies).__name__}",
            hint="pass cookies like {'session': '...'}",
            option=option,
        ) from None


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
