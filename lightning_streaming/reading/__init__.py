"""Batches of a pass: planned, prefetched, read by workers, and handed out by the loader."""
