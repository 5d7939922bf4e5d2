"""Memory of processes, as the kernel counts it (Linux)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

KINDS = {"Rss": "rss", "Pss": "pss"}
"""All that is mapped and in memory, or with what is shared divided among those who share it."""


def resident_mebibytes(processes: Sequence[int | None]) -> dict[str, float]:
    """Resident memory and proportional share, in the mean over processes, in MiB.

    And their private memory ("uss"), which is what would be free again if one of them ended.
    """
    each = [_of_process(process) for process in processes if process is not None]
    if not each:
        raise RuntimeError("no workers to look at")
    return {kind: float(np.mean([one[kind] for one in each])) for kind in each[0]}


def _of_process(process: int) -> dict[str, float]:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    fields = {name: int(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines)}
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return {name: fields[field] for field, name in KINDS.items()} | {"uss": own}
