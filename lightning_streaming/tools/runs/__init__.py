"""A configured run: its order and steps, its checkpoints, and what tools tell of them."""
