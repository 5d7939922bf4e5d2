"""Samples to shards, and shards to the place where a dataset lies.

    writer_options  what they are asked for, each option once
    writers         the writers, one a format; what all do: take samples, store shards in the background, publish last
    shard_builder   gathers encoded samples in memory that is used again; where one shard ends and the next begins
    shard_encoders  settings of shards, encodings of columns; encoded samples to the files of a shard, in any format
    destination     a directory, a bucket, or both: every file name, what is removed, one writer at a time
    journal         what a writer that may be killed writes down, and where the next one begins
    merge           many datasets as one, without moving a shard
    parts           a dataset in parts, each written by one call, anywhere; its plan, and what workers say
    parallel        many parts at a time, by processes of this machine or tasks of a Ray cluster

Sharding, names and bytes are those of MosaicML Streaming 0.13.
"""
