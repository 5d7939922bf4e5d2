"""A function that a peer imports, and that nothing measured here calls."""


def to_tensor(image: object) -> None:
    """Refuse."""
    raise NotImplementedError(f"torchvision is not installed; cannot convert {type(image).__name__}")
