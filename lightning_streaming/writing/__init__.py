"""Samples to shards to a place for them.

    writer         the writers, one a format
    core           what they all do: take samples, store shards in the background, publish the index last
    start          where a writer begins: with nothing, or behind what is there
    journal        what a writer that may be killed has to say to the one that goes on
    cutter         where one shard ends and the next begins
    shard_buffer   the samples of a shard, in memory that is used again
    recipe         one shard: from encoded samples to its files; mds_recipe and split_recipe do it
    settings       how shards are cut, compressed and hashed
    columns        encodings, told from a sample
    background     work in threads, bounded and in order
    destination    a directory, a bucket, or both
    place          one of them
    directories    what may lie in a directory, and what of it is removed
    names          every file name
    sole_writer    one writer at a time in a directory
    system_errors  what the system refuses, in our words
    forks          writers in processes that are not theirs
    strict         values that would come back as others
    progress       how far storing has come
    merge          many datasets as one, without moving a shard
    locations      where a part lies, seen from the dataset it belongs to
    parallel       many parts at a time, from many inputs
    parts          one part by one call, anywhere
    part_plan      what a part is made of
    part_directory what a writer that was killed left of a part
    engines        what runs parts: local processes, Ray

Sharding, names and bytes are those of MosaicML Streaming 0.13.
"""
