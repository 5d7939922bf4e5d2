"""Bytes to samples and back.

    index          index.json: read, written, and kept in a parsed form
    shard_table    what an index says of a shard, and a table of a million of them
    shard          the door to a shard of any format: whole files, single samples, raw forms
    mds            the MDS shard file; mds_samples is one sample of it, or many as a table
    split          json, csv, tsv and xsv shards, of a data and a meta file
    npy, megatron  files of other libraries; npy_header is how one begins, row_files are those of rows of equal bytes
    plain_rows     many samples at once: what readers must be able to do for that
    columns        whole columns of a shard; array_lengths, how long its arrays are, mostly by offsets alone
    encodings      the values of one column, by name, and those that users register; values and images are its
                   families
    pictures       image files made pixels, quickly, where a dataset asks for them
    compression    whole files, smaller
    hashing        whole files, told apart
    other_formats  the door to data of other libraries, each in a file of its own; in_order looks at many files at once
    webdataset     tar files of samples; tar_members walks through their headers, in tar_windows of their bytes,
                   member_values decodes what they hold, published_counts knows what others have counted
    arrow_rows     rows of Arrow record batches; arrow_types tells what each type becomes, arrow_values and
                   arrow_arrays read it
    parquet        row groups of Parquet files; parquet_footers says where their columns lie and what room they take,
                   parquet_rows unpacks them
    litdata        directories that litData optimised; litdata_chunks and litdata_rows find the items of a chunk,
                   litdata_samples makes samples of them, litdata_leaves the values in these

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
