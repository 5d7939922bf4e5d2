"""What Oracle's object storage answers of its protocol: as much as reading, storing and listing take.

It stands in for the cloud, which cannot be had, and was written after the requests that Oracle's client makes. Whether
they are signed well it does not look.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote

from tests.servers.messages import Answer, Request, Source, of_file, plain


def oci_under(root: Path) -> Source:
    """Serves objects: ``root/NAMESPACE/BUCKET/...``."""

    async def answer(request: Request) -> Answer:
        target, _, query = request.target.partition("?")
        _, namespace, _, bucket, *rest = [unquote(part) for part in target.strip("/").split("/")]
        place = root / namespace / bucket
        if not place.is_dir():
            return _refusal(404, "BucketNotFound", f"Either the bucket named '{bucket}' does not exist or ...")
        if not rest:
            return plain(200, b"", {"ETag": "bucket"})
        name = "/".join(rest[1:])
        return _of_object(place / name, request) if name else _listed(place, query)

    return answer


def _json(value: object) -> Answer:
    return plain(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _of_object(path: Path, request: Request) -> Answer:
    if request.method == "PUT":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(request.body)
        return plain(200, b"", _headers(path))
    if not path.is_file():
        return _refusal(404, "ObjectNotFound", f"The object '{path.name}' was not found")
    if request.method == "DELETE":
        path.unlink()
        return plain(204)
    answer = of_file(path, request)
    return dataclasses.replace(answer, headers={**answer.headers, **_headers(path)})


def _listed(place: Path, query: str) -> Answer:
    asked = {name: values[0] for name, values in parse_qs(query).items()}
    prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter")
    objects, prefixes = [], set()
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        name = path.relative_to(place).as_posix()
        if not name.startswith(prefix):
            continue
        if delimiter and delimiter in name[len(prefix) :]:
            prefixes.add(prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter)
        else:
            time = "2024-01-01T00:00:00.000Z"
            objects.append({"name": name, "size": path.stat().st_size, "timeCreated": time, "timeModified": time})
    return _json({"objects": objects, "prefixes": sorted(prefixes)})


def _headers(path: Path) -> Mapping[str, str]:
    return {
        "ETag": hashlib.sha256(path.read_bytes()).hexdigest(),
        "Content-Type": "application/octet-stream",
        "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
        "Version-Id": "1",
        "Storage-Tier": "Standard",
    }


def _refusal(status: int, code: str, message: str) -> Answer:
    body = json.dumps({"code": code, "message": message}).encode()
    return plain(status, body, {"Content-Type": "application/json", "opc-request-id": "1"})
