"""The position in a run: what is saved, what it belongs to, and the run that continues from it."""
