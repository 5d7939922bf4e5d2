"""A first run for a dataset: the task that its columns allow, and its configuration and module."""
