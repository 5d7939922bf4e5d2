"""See ``functional``."""
