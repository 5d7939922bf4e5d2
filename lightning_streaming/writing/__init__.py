"""Samples to shards, and shards to the place where a dataset lies.

    writer_options  what they are asked for, each option once
    writers         the writers, one a format; what all do: take samples, store shards in the background, publish last
    shard_builder   gathers encoded samples in memory that is used again; where one shard ends and the next begins
    shard_encoders  settings of shards, encodings of columns; encoded samples to the files of a shard, in any format
    destination     a directory, a bucket, or both: every file name, what is removed, one writer at a time
    journal         what a writer that may be killed writes down, and where the next one begins
    merging         many datasets as one, without moving a shard
    parts           a dataset in parts, each written by one call, anywhere; its plan, and what workers say
    parallel        many parts at a time, by processes of this machine or tasks of a Ray cluster

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
