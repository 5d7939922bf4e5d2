"""Repositories of the Hugging Face hub: how a file of an ``hf://`` URL is asked for over HTTP.

The hub's own filesystem lists, and tells sizes. It reads block by block in one stream, and repeats what fails, so files
are read as they are from any HTTP server: ranges of them at once, with attempts and deadlines of ours.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.storage.secrets import expand, option_of
from lightning_streaming.storage.urls import HUB_SCHEMES, mask_url, scheme_of

_OPTIONS = ("token", "endpoint")
_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
_REPOSITORY = re.compile(
    r"[^:/]+://(?:(?P<kind>datasets|spaces|models)/)?(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[^/]+))?(?:/(?P<path>.*))?"
)
_FORM = "hf://datasets/USER/NAME/path or hf://datasets/USER/NAME@REVISION/path"


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
    """Where in the repository."""


def parse_hub_url(url: str) -> HubFile:
    """What an ``hf://`` URL names.

    Raises:
        ConfigError: It names no repository.
        UnsupportedError: It names a bucket of the hub.
    """
    found = _REPOSITORY.fullmatch(url)
    first = found["name"].partition("/")[0] if found is not None and found["kind"] is None else ""
    if first == "buckets":
        raise UnsupportedError(
            f"{mask_url(url)} names a bucket of the hub, but only repositories are read: {_FORM}", path=mask_url(url)
        )
    if found is None or first in _KINDS:
        raise ConfigError(f"{mask_url(url)} names no repository of the hub", hint=f"write {_FORM}", path=mask_url(url))
    revision = found["revision"]
    kind = _KINDS[found["kind"] or "models"]
    return HubFile(kind, found["name"], None if revision is None else unquote(revision), found["path"] or "")


def refuse_to_write(url: str) -> None:
    """Refuse a place on the hub, where each file that is written would be a commit.

    Raises:
        UnsupportedError: The URL is one.
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


def check_hub_options(options: Mapping[str, Any], option: str) -> None:
    """Refuse storage options that the hub does not know, which its filesystem would ignore.

    Raises:
        ConfigError: There are such options.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"{option} of hf:// are {' and '.join(_OPTIONS)}, but got {', '.join(unknown)}",
            hint="data that needs no token takes token: false",
            option=option,
        )


def over_http(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The HTTP URL of a file on the hub, and the storage options that reach it.

    Args:
        url: An ``hf://`` URL.
        options: ``token``, by default the one of ``HF_TOKEN`` or of ``hf auth login``, False for none; ``endpoint``, by
            default that of ``HF_ENDPOINT``, else the hub's own.

    Raises:
        ConfigError: The URL names no repository, or the options are others.
    """
    check_hub_options(options, option_of(options))
    given = expand(options)
    file = parse_hub_url(url)
    where = importlib.import_module("huggingface_hub").hf_hub_url(
        file.repository,
        file.path,
        repo_type=file.kind,
        revision=file.revision,
        endpoint=given.get("endpoint"),
    )
    # Quoted already, and so is where the hub sends us on for a large file, with a signature of these very characters.
    as_written = {"encoded": True, "client_kwargs": {"requote_redirect_url": False}}
    headers = importlib.import_module("huggingface_hub.utils").build_hf_headers(token=given.get("token"))
    return where, {"headers": headers, **as_written}
