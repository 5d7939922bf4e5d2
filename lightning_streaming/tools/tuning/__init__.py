"""Settings recommended for a run, from measurements of its data on this machine."""
