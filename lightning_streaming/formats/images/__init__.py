"""Images: their encodings, and image files decoded to pixels."""
