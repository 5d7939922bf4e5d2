"""Datasets converted from other files: sources of rows, parts written by several processes, and packed text."""
