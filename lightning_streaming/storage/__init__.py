"""URL to file and back, through fsspec: one policy for retries, deadlines, errors and secrets over all stores."""

from lightning_streaming.storage.filesystems import prepare
from lightning_streaming.storage.location import Location
from lightning_streaming.storage.secrets import StorageOptions
from lightning_streaming.storage.urls import is_url, join_url, local_path, mask_url

__all__ = [
    "Location",
    "StorageOptions",
    "is_url",
    "join_url",
    "local_path",
    "mask_url",
    "prepare",
]
