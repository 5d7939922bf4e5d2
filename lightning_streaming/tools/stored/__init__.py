"""A stored dataset without a run: its files, single samples, and its numbers."""
