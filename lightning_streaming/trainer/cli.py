"""``lightning-streaming fit --config run.yaml``: Lightning's command line with a streaming data module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_streaming.trainer.datamodule import StreamingDataModule

_DESCRIPTION = """\
Train, validate, test or predict with PyTorch Lightning on streamed data.

A YAML file names the model, the data and the trainer; any field may be given or changed on the command line:

    lightning-streaming fit --config run.yaml --data.init_args.batch_size 64
    lightning-streaming fit --config run.yaml --ckpt_path last       # go on where the last checkpoint was saved

See every field of the data with `lightning-streaming fit --data.help`, and of one run with `--print_config`.
"""


class StreamingCLI(LightningCLI):
    """LightningCLI for :class:`StreamingDataModule` and its subclasses, any model, and configurations saved with a run."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        super().__init__(
            datamodule_class=StreamingDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # A run that is resumed into the same directory has its configuration there already.
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"description": _DESCRIPTION},
            args=None if args is None else list(args),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let a configuration leave ``data.class_path`` out."""
        parser.set_defaults({"data": {"class_path": "lightning_streaming.StreamingDataModule"}})


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments after the program's name. None: those of this process.
    """
    # A console script does not look for modules where it is called; a configuration names the user's own by class_path.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    StreamingCLI(args)


if __name__ == "__main__":
    main()
