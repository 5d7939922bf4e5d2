"""Bytes to samples and back.

    index          index.json: which shards a dataset has; index_fields reads its JSON
    shard          the door to a shard of any format
    mds            one MDS shard file; mds_sample writes one sample of it, mds_decoder reads one
    split          json, csv, tsv and xsv shards, of a data and a meta file; split_rows is one sample, split_reader
                   reads
    mapping        a raw file, memory-mapped
    columns        which columns are read
    encodings      the values of one column, by name; scalars, ndarray, images and pickles are its families,
                   user_encodings holds what users register; parts is several payloads in one; image_files opens
                   images, and pillow is the package that does
    compression    whole files, smaller; codecs is the work behind each family
    hashing        whole files, told apart

The bytes are those of MosaicML Streaming 0.13, index version 2.
"""
