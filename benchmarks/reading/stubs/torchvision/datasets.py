"""A base class that a peer derives from."""


class VisionDataset:
    """Nothing."""
