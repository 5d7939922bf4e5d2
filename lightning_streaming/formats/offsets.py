"""The table of offsets that an MDS file, or the meta file of a split shard, begins with.

    bytes        content
    4            uint32 n, the number of samples
    4 (n + 1)    uint32 offsets in the data file: where each sample starts, and where the last one ends

All integers are little-endian.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ShardCorruptError

_COUNT = struct.Struct("<I")


def table_bytes(num_samples: int) -> int:
    """Bytes of the table of so many samples."""
    return 4 + 4 * (num_samples + 1)


def read_offsets(start: memoryview, num_samples: int, shown: str) -> NDArray[np.int64]:
    """Read the table.

    Args:
        start: The file that begins with it; of the bytes after it nothing is read.
        num_samples: How many samples the index says there are.
        shown: What to call the file in an error.

    Returns:
        Array of shape (num_samples + 1,).

    Raises:
        ShardCorruptError: The file is too short, or says another number of samples.
    """
    stop = table_bytes(num_samples)
    if stop > len(start):
        raise ShardCorruptError(f"{shown} must have {stop} bytes for its offsets alone, but has {len(start)}")
    (found,) = _COUNT.unpack_from(start)
    if found != num_samples:
        raise ShardCorruptError(f"{shown} must have {num_samples} samples by its index, but says it has {found}")
    return np.frombuffer(start, "<u4", num_samples + 1, 4).astype(np.int64)


def check_lengths(
    offsets: NDArray[np.int64], smallest_bytes: int, shown: str, largest_bytes: int | None = None
) -> int | None:
    """Refuse offsets that go back, or leave a sample fewer or more bytes than it can have.

    Args:
        offsets: What :func:`read_offsets` gives.
        smallest_bytes: The fewest bytes of a sample.
        shown: What to call the file in an error.
        largest_bytes: The most bytes of a sample; None if these vary.

    Returns:
        The bytes of each sample if all have as many; else None, also where there is none.

    Raises:
        ShardCorruptError: Names the worst sample.
    """
    lengths = np.diff(offsets)
    if not len(lengths):
        return None
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < smallest_bytes:
        worst, expected = int(lengths.argmin()), f"at least {smallest_bytes}"
    elif largest_bytes is not None and longest > largest_bytes:
        worst, expected = int(lengths.argmax()), f"no more than {largest_bytes}"
    else:
        return shortest if shortest == longest else None
    raise ShardCorruptError(f"{shown}, sample {worst}: expected {expected} bytes, but the offsets say {lengths[worst]}")
