"""Write samples to shards, and merge datasets.

    writers       the writers, one per format: take samples, store shards in the background, publish the index last
    shards        options and settings of shards, encoders, the memory in which samples are gathered, files of a shard
    destination   a directory, a bucket, or both: all file names, removal of files, the lock of a writer
    journal       records of stored shards, and the shard after which a writer continues
    merging       many datasets as one, without moving a shard
    parts         a dataset in parts, each written by one call, anywhere; its plan, and the events of workers
    parallel      many parts concurrently, by processes of this machine or tasks of a Ray cluster

Sharding, names and bytes are those of MosaicML Streaming 0.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_streaming.exports import lazy_exports

if TYPE_CHECKING:
    from lightning_streaming.writing.merging import merge as merge
    from lightning_streaming.writing.merging import merge_recursive as merge_recursive
    from lightning_streaming.writing.parallel import write_parallel as write_parallel
    from lightning_streaming.writing.parts import PartJob as PartJob
    from lightning_streaming.writing.parts import plan_parts as plan_parts
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
