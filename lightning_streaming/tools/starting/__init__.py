"""A first run of a dataset: what it holds and what to train on it (look), written as configuration and module."""
