"""What release 0.1 left behind: checkpoints, a cache directory, and the runs that made them; see make.py."""
