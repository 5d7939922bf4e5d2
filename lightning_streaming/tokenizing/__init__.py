"""Text to tokens: tokenizers of files, with nothing of datasets."""
