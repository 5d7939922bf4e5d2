"""Samples to shards to a place for them.

    writer         takes samples, cuts them into shards, publishes the index last
    shards         one shard: from encoded samples to its file
    settings       how shards are cut, compressed and hashed
    columns        encodings, told from a sample
    destination    a directory, a bucket, or both

Sharding, names and bytes are those of MosaicML Streaming 0.13.
"""
