"""A command line that passes the data's batch size to the model, so that it is set once.

    python examples/linked_batch_size.py fit --config configs/linked_batch_size.yaml
    python examples/linked_batch_size.py fit --config configs/linked_batch_size.yaml --data.batch_size 64

Links are set in code, not in YAML. Run `python examples/write_dataset.py` first. An epoch takes 10 seconds on two
cores; the output is that of `lightning-streaming fit`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.cli import LightningArgumentParser

from lightning_streaming.trainer.cli import StreamingCLI


class LinkedCLI(StreamingCLI):
    """``lightning-streaming`` with a link; the model needs an argument ``batch_size``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add links, or further arguments."""
        parser.link_arguments("data.init_args.batch_size", "model.init_args.batch_size")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # the model of the configuration, from any directory
    LinkedCLI()
