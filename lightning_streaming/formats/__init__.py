"""Bytes to samples and back.

    index          index.json: read and written; the cache keeps a parsed form of it
    shard_table    the entry of a shard in an index, and a table of a million of them
    shard          shards of any format: whole files, single samples, raw forms
    mds            the MDS shard file and its samples
    split          json, csv, tsv and xsv shards, each with a data and a meta file
    columns        whole columns of a shard, lengths of arrays
    encodings      the values of one column, by name, and those that users register; values has the built-in ones
    images         encodings of images, and image files decoded to pixels
    algorithms     hashes and compression of whole files

    shard_format   the interfaces of readers and of formats of other libraries, and what these formats share
    arrow          Parquet files; rows, types and values of Arrow record batches
    webdataset     tar files of samples, and their values; tar_members has the members of any tar file
    npy            files of rows of equal size, and .npy files; megatron has tokens of Megatron-LM
    litdata        directories that litData optimised: chunks, samples, leaves

The bytes are those of MosaicML Streaming 0.13, index version 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_streaming.exports import lazy_exports

if TYPE_CHECKING:
    from lightning_streaming.formats.encodings import register_encoding as register_encoding
    from lightning_streaming.formats.encodings import registered_encodings as registered_encodings
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
