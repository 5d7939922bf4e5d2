"""What one process is asked to measure, as plain values that go through a pipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.reading.works import WORKS, Work


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset and the way it is read."""

    work: str
    root: str
    """Where the datasets of all systems are."""
    samples: int
    size: int
    batch_size: int = 32
    num_workers: int = 0
    persistent: bool = False
    seconds: float = 0.5
    """Least time of a turn that may be of any length."""

    @property
    def kind(self) -> Work:
        """What is read."""
        return WORKS[self.work]

    def folder(self, system: str) -> Path:
        """Where a system has its copy; works whose samples are stored alike do not share one."""
        return Path(self.root) / f"{self.work}-{self.samples}-{self.size}" / system

    def plain(self) -> dict[str, Any]:
        """To send."""
        return asdict(self)

    def worker_options(self) -> dict[str, Any]:
        """As a DataLoader wants them; persistent workers are refused where there are none."""
        kept = {"persistent_workers": True} if self.persistent and self.num_workers else {}
        return {"num_workers": self.num_workers, **kept}
