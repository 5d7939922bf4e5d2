"""Values of single samples, brought together from all ranks: each sample once, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.sample_key import Pass, SampleKeys


class _Part(NamedTuple):
    """What one rank has to give."""

    of_pass: Pass
    rows: NDArray[np.int64]
    values: Tensor


def gather_in_order(values: Tensor | Sequence[Tensor], keys: SampleKeys | Sequence[SampleKeys]) -> Tensor:
    """Bring the values of an evaluation together, for a metric that does not depend on how many ranks there were.

    Each sample that was read counts once: what ranks read again to have equally many batches is left out, and so are
    the copies of replicated ranks. The values come in the order of the data (stream, shard, index), whatever the order
    of reading. So a metric of the result is, bit for bit, that of a single process, as long as the value of each sample
    is: a model in ``eval`` mode that treats the samples of a batch one by one.

    To be called on all ranks if ``torch.distributed`` is initialised, whatever its backend; else it gathers nothing.

    Args:
        values: One value for each sample, of shape (samples, ...); or the same batch by batch.
        keys: The samples' keys, batch by batch if the values are.

    Returns:
        The values of all ranks, of shape (samples, ...), the same on each; on the device of the values given.

    Raises:
        ConfigError: There is not one value for each key, or they are not those of one pass; on all ranks alike.
    """
    tensors = [values] if isinstance(values, Tensor) else list(values)
    listed = [keys] if isinstance(keys, SampleKeys) else list(keys)
    try:
        mine: _Part | str = _part(tensors, listed)
    except ConfigError as error:  # which the other ranks, waiting for this one, must learn
        mine = str(error)
    parts = _from_all_ranks(mine)
    if len({part.of_pass for part in parts}) != 1:
        raise ConfigError("ranks brought values of different epochs or datasets; gather those of one pass on all ranks")
    rows = np.concatenate([part.rows for part in parts])
    # Replicated ranks read the same positions.
    _, kept = np.unique(rows[:, 0], return_index=True)
    in_order = kept[np.lexsort(rows[kept].T[[0, 3, 2, 1]])]
    gathered = torch.cat([part.values for part in parts])
    return gathered[torch.from_numpy(in_order)].to(tensors[0].device)


def _part(values: list[Tensor], listed: list[SampleKeys]) -> _Part:
    if not values:
        raise ConfigError("there are no values to gather; collect one value for each sample of every batch")
    shapes, counts = [tuple(one.shape) for one in values], [len(keys) for keys in listed]
    if [shape[:1] for shape in shapes] != [(count,) for count in counts]:
        raise ConfigError(
            f"values must have one row for each key, but got shapes {_shortened(shapes)} for {_shortened(counts)} "
            'keys; a loss, for example, needs reduction="none"'
        )
    keys = SampleKeys.joined(listed)
    valid = keys.valid
    rows = keys.rows[valid.numpy()]
    if len(np.unique(rows[:, 0])) < len(rows):
        raise ConfigError("several values belong to one sample; begin new lists at the start of every evaluation")
    return _Part(keys.of_pass, rows, torch.cat([one.detach().cpu() for one in values])[valid])


def _from_all_ranks(mine: _Part | str) -> list[_Part]:
    found = [mine]
    if dist.is_available() and dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, mine)
    wrong = next((one for one in found if isinstance(one, str)), None)
    if wrong is not None:
        raise ConfigError(wrong)
    return [one for one in found if isinstance(one, _Part)]


def _shortened(items: Sequence[object]) -> str:
    return f"{list(items[:4])}"[:-1] + (", ...]" if len(items) > 4 else "]")
