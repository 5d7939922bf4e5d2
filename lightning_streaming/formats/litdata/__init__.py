"""Directories that litData optimised: chunks and the samples in them."""
