"""A custom sequence step: read every n-th sample of the shuffled order, stop in mid-epoch, and resume.

    python examples/every_nth.py

Takes 5 seconds on two cores; prints how many samples were read before and after the resume. In a configuration, the
step is named by its class:

    data:
      train:
        remote: s3://corpus/web
        sequence: [{class_path: examples.every_nth.EveryNth, init_args: {n: 2}}]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.sequence import PartContext, SampleSequence, SequenceStep


@dataclass(frozen=True)
class EveryNth(SequenceStep):
    """Keep every n-th sample of the shuffled order: each epoch reads another random part of the data."""

    n: int = 2

    def over(self, parent: SampleSequence, context: PartContext) -> SampleSequence:
        """Return every n-th entry of ``parent``."""
        return _EveryNth(parent, self.n)


class _EveryNth(SampleSequence):
    def __init__(self, parent: SampleSequence, n: int) -> None:
        self._parent, self._n = parent, n

    def __len__(self) -> int:
        return len(self._parent) // self._n

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._parent.ids(self._n * entries)


def main() -> None:
    """Read an epoch with the step, in two parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/every_nth"), help="default: %(default)s")
    parser.add_argument("--n", type=int, default=3, help="read one of n samples (default: %(default)s)")
    options = parser.parse_args()
    if not (options.out / "index.json").exists():
        with MDSWriter(out=options.out, columns={"id": "int"}, size_limit=4096) as writer:
            for number in range(1200):
                writer.write({"id": number})

    def loader() -> StreamingDataLoader:
        dataset = StreamingDataset(local=str(options.out), shuffle=True, sequence=[EveryNth(options.n)])
        return StreamingDataLoader(dataset, batch_size=16)

    first = loader()
    batches = iter(first)
    before = [number for _ in range(10) for number in next(batches)["id"].tolist()]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    after = [number for batch in resumed for number in batch["id"].tolist()]
    assert len({*before, *after}) == len(before) + len(after) == 1200 // options.n
    print(f"{len(before)} samples before the resume, {len(after)} after: one of {options.n} of 1200, none twice")


if __name__ == "__main__":
    main()
