"""The command line, with the model told the batch size of the data: it is written in one place, and cannot disagree.

    python -m examples.linked_batch_size fit --config configs/linked_batch_size.yaml
    python -m examples.linked_batch_size fit --config configs/linked_batch_size.yaml --data.batch_size 64

A link is part of a command line's code, not of its YAML, so it takes these few lines.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser

from lightning_streaming.trainer.cli import StreamingCLI


class LinkedCLI(StreamingCLI):
    """``lightning-streaming`` with a link; a model must have an argument ``batch_size``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add links, or arguments of your own."""
        parser.link_arguments("data.init_args.batch_size", "model.init_args.batch_size")


if __name__ == "__main__":
    LinkedCLI()
