"""The only room that knows Lightning; and what its command line is, told without importing lightning."""

from __future__ import annotations

SUBCOMMANDS = {
    "fit": "train; with --ckpt_path last, go on after any stop",
    "validate": "validate a checkpoint on the data of `val`",
    "test": "test a checkpoint on the data of `test`",
    "predict": "predict with a checkpoint on the data of `predict`",
}
"""What Lightning's command line can be asked to do, in one line each."""

DESCRIPTION = """\
Train, validate, test or predict with PyTorch Lightning on streamed data.

A YAML file names the model, the data and the trainer:

    model:
      class_path: my_project.MyModel      # any LightningModule; found from the current directory
    data:                                 # class_path: my_project.MyData, for your own StreamingDataModule
      init_args:
        batch_size: 32
        train:
          streams:
            code: {remote: "s3://corpus/code", proportion: 0.7}
            docs: {remote: "s3://corpus/docs", proportion: 0.3}
    trainer:
      max_steps: 10000

Any field may be given or changed on the command line:

    lightning-streaming fit --config run.yaml
    lightning-streaming fit --config run.yaml --data.batch_size 64 --data.train.streams.code.proportion 0.5
    lightning-streaming fit --config run.yaml --ckpt_path checkpoints/last.ckpt    # goes on mid-epoch, exactly there

What fields there are, and what they mean:

    lightning-streaming fit --data.help               the data module; --data.help=my_project.MyData for your own
    lightning-streaming fit --data.train.help         the data of a stage: train, val, test or predict
    lightning-streaming fit --data.train.streams.help one stream of several; also schedule, join and all groups
    lightning-streaming fit --model.help=my_project.MyModel
    lightning-streaming fit --help                    everything else
    lightning-streaming fit --config run.yaml --print_config    what a run would use, defaults included
"""
