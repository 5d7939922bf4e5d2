"""Bytes to samples and back.

    index          index.json: which shards a dataset has; index_fields reads its JSON
    shard          the door to a shard of any format
    mds            one MDS shard file; mds_sample is one sample in it
    encodings      the values of one column; scalars and ndarray are its families
    compression    whole files, smaller
    hashing        whole files, told apart

The bytes are those of MosaicML Streaming 0.13, index version 2.
"""
