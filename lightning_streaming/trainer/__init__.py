"""The only package that uses Lightning; describes its command line without importing lightning."""

from __future__ import annotations

SUBCOMMANDS = {
    "fit": "train; with --ckpt_path last, resume after any stop",
    "validate": "validate a checkpoint on the data of `val`",
    "test": "test a checkpoint on the data of `test`",
    "predict": "predict with a checkpoint on the data of `predict`",
}
"""Subcommands of Lightning's command line, with one line of help for each."""

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

Set or override any field on the command line:

    lightning-streaming fit --config run.yaml
    lightning-streaming fit --config run.yaml --data.batch_size 64 --data.train.streams.code.proportion 0.5
    lightning-streaming fit --config run.yaml --ckpt_path checkpoints/last.ckpt    # resumes mid-epoch, exactly there

List the fields, with explanations:

    lightning-streaming fit --data.help               the data module; --data.help=my_project.MyData for your own
    lightning-streaming fit --data.train.help         the data of a stage: train, val, test or predict
    lightning-streaming fit --data.train.streams.help one stream of several; also schedule, join and all groups
    lightning-streaming fit --model.help=my_project.MyModel
    lightning-streaming fit --help                    everything else
    lightning-streaming fit --config run.yaml --print_config    the configuration of a run, including defaults
"""
