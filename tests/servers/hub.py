"""What the Hugging Face hub answers of its protocol: as much as reading files, listing and sizes take.

It stands in for the hub, whose servers cannot be had. What it says was written after the requests that huggingface_hub
makes and the answers it takes. Like the hub it tells no stranger that a repository is private, and sends large files
from another host, which refuses the hub's credentials.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from tests.servers.messages import Answer, Request, Source, of_file, plain

TOKEN = "hf_aTokenThatMayRead"
"""What may read repositories whose names begin with "private"."""
LARGE = 1000
"""Bytes from which on a file comes from the other host."""
_PAGE = 50
_COMMIT = hashlib.sha1(b"the one commit").hexdigest()


def hub_under(root: Path) -> Source:
    """Serves datasets: ``root/USER/NAME/REVISION/...``, the revision quoted."""

    async def answer(request: Request) -> Answer:
        target, _, query = request.target.partition("?")
        parts = [unquote(part) for part in target.strip("/").split("/")]
        if parts[0] == "elsewhere":
            return _elsewhere(root, parts[1:], request)
        is_api = parts[0] == "api"
        if parts[is_api] != "datasets" or len(parts) < is_api + 3:
            return _refusal(404, "RepoNotFound", "Repository not found")
        user, name, *rest = parts[is_api + 1 :]
        refused = _refused(root / user / name, request.headers)
        if refused is not None:
            return refused
        repository = root / user / name
        return _of_api(repository, rest, query, request) if is_api else _resolve(repository, rest[1:], request)

    return answer


def _refused(repository: Path, headers: Mapping[str, str]) -> Answer | None:
    """What whoever sent these headers is told instead of what a repository holds; None if they may read it."""
    given = headers.get("authorization")
    if given not in (None, f"Bearer {TOKEN}"):
        return _refusal(401, None, "Invalid credentials in Authorization header")
    if repository.is_dir() and (given or not repository.name.startswith("private")):
        return None
    if given:
        return _refusal(404, "RepoNotFound", "Repository not found")
    return _refusal(401, "RepoNotFound", "Invalid username or password.")


def _of_api(repository: Path, rest: list[str], query: str, request: Request) -> Answer:
    what, revision = (*rest, "", "")[:2]
    root = _revision(repository, revision or "main")
    if root is None:
        return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    if what in ("", "revision"):
        told = {"id": "/".join(repository.parts[-2:]), "sha": _COMMIT, "private": False, "siblings": [], "tags": []}
        return _json(told)
    if what == "paths-info":
        asked = parse_qs(request.body.decode())["paths"]
        return _json([_entry(root, root / path) for path in asked if (root / path).exists()])
    return _tree(root, "/".join(rest[2:]), query, request)


def _tree(root: Path, path: str, query: str, request: Request) -> Answer:
    """A page of a listing, with the link to the next."""
    directory = root / path
    if not directory.is_dir():
        return _refusal(404, "EntryNotFound", f"{path} does not exist")
    options = parse_qs(query)
    is_recursive = options.get("recursive", ["false"])[0].lower() == "true"
    found = sorted(directory.rglob("*") if is_recursive else directory.iterdir())
    start = int(options.get("cursor", ["0"])[0])
    page = [_entry(root, one) for one in found[start : start + _PAGE]]
    if start + _PAGE >= len(found):
        return _json(page)
    base = request.target.partition("?")[0]
    kept = "&".join(part for part in query.split("&") if not part.startswith("cursor="))
    after = f"http://{request.headers['host']}{base}?{kept}&cursor={start + _PAGE}"
    return _json(page, {"Link": f'<{after}>; rel="next"'})


def _entry(root: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
    data = path.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def _resolve(repository: Path, rest: list[str], request: Request) -> Answer:
    revision, path = rest[0], "/".join(rest[1:])
    root = _revision(repository, revision)
    if root is None:
        return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    file = root / path
    if not file.is_file():
        return _refusal(404, "EntryNotFound", "Entry not found")
    if file.stat().st_size >= LARGE:
        port = request.headers["host"].rpartition(":")[2]
        where = quote(file.relative_to(repository.parents[1]).as_posix())
        signed = f"http://localhost:{port}/elsewhere/{where}?Signature=a%2Fb"
        linked = f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"'
        return plain(302, b"", {"Location": signed, "X-Repo-Commit": _COMMIT, "X-Linked-Etag": linked})
    etag = f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"'
    return _with_headers(of_file(file, request), {"X-Repo-Commit": _COMMIT, "ETag": etag})


def _elsewhere(root: Path, parts: list[str], request: Request) -> Answer:
    """The other host, which goes by signatures."""
    if "authorization" in request.headers or not request.target.endswith("?Signature=a%2Fb"):
        return plain(400, b"only one way to sign is allowed")
    return of_file(root.joinpath(*parts), request)


def _revision(repository: Path, revision: str) -> Path | None:
    path = repository / quote(revision, safe="")
    return path if path.is_dir() else None


def _refusal(status: int, code: str | None, message: str) -> Answer:
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return _with_headers(_json({"error": message}, status=status), headers)


def _json(value: object, headers: Mapping[str, str] | None = None, status: int = 200) -> Answer:
    return plain(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


def _with_headers(answer: Answer, headers: Mapping[str, str]) -> Answer:
    return dataclasses.replace(answer, headers={**answer.headers, **headers})
