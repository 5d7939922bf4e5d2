"""WebDataset: tar files, their members and the values that these hold."""
