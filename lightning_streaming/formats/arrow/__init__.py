"""Arrow and Parquet: the types, arrays and rows of record batches, and row groups of files."""
