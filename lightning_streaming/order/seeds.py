"""The seed that release 0.2 of MosaicML Streaming made of the one it was given."""

from __future__ import annotations

import numpy as np


def stretched_seed(shuffle_seed: int) -> int:
    """The seed that the 0.2 line shuffled with, and that its saved states carry.

    With it ``shuffle_algo="py2s"`` gives that line's order. Later releases shuffle with the seed itself.

    >>> stretched_seed(9176)
    929017944557228080
    """
    return int(np.random.default_rng(shuffle_seed).integers(2**60))
