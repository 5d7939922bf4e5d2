"""A stable argsort for floats of known range, about twice as fast as numpy's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def argsort_within(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """``np.argsort(values, kind="stable")`` for values in ``[0, len(values))``.

    Sorts integers that hold the value in fixed point above and the index below, which numpy does much faster than
    sorting indices. The few values that fixed point cannot tell apart are then ordered exactly. For example with 2**23
    values there are 15 binary places, and about one value in 2**15 is not told apart from the next.

    Args:
        values: One dimension; none below 0, all below their own count.

    Returns:
        The indices of the values in rising order; of equal values the first comes first.
    """
    num_values = len(values)
    index_bits = num_values.bit_length()
    keys = (values * 2.0 ** (63 - 2 * index_bits)).astype(np.int64)
    keys <<= index_bits
    keys |= np.arange(num_values)
    keys.sort()
    order = keys & ((1 << index_bits) - 1)
    keys >>= index_bits

    alike = np.zeros(num_values, np.bool_)
    np.equal(keys[1:], keys[:-1], out=alike[1:])
    alike[:-1] |= alike[1:]
    # Values that are alike lie side by side, and groups of them in rising order: sorting all of them at once moves none
    # out of its group.
    unsure = order[alike]
    order[alike] = unsure[np.lexsort((unsure, values[unsure]))]
    return order
