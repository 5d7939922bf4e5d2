"""Batches of a pass: planned, prefetched, read by workers, and yielded by the loader."""
