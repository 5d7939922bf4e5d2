"""The MDS format of MosaicML Streaming: shard files and samples."""
