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
    lightning-streaming fit --config run.yaml --ckpt_path checkpoints/last.ckpt    # resumes at the saved sample

List the fields, with explanations:

    lightning-streaming fit --data.help               the data module; --data.help=my_project.MyData for your own
    lightning-streaming fit --data.train.help         the data of a stage: train, val, test or predict
    lightning-streaming fit --data.train.streams.help one of several streams; likewise schedule, join and all groups
    lightning-streaming fit --model.help=my_project.MyModel
    lightning-streaming fit --help                    common options; --help_advanced lists all
    lightning-streaming fit --config run.yaml --print_config    the configuration of a run, including defaults
"""

COMMON_OPTIONS = """\
run:
  -c, --config FILE             YAML file with model, data and trainer; later files and options override it
  --print_config                print the configuration, with defaults and a comment on each field, and exit
  --ckpt_path FILE              checkpoint to load; fit resumes from it, mid-epoch; "last" is the newest one, if any
  --seed_everything INT         seed of weights and augmentation; data.train.shuffle_seed seeds the order of samples
  --debug                       show full tracebacks of errors

data (for other stages, replace train by val, test or predict):
  --data.batch_size INT         samples per batch on each rank
  --data.num_workers INT        worker processes of each rank
  --data.train.remote URL       location of the dataset: a directory, or a URL like s3://bucket/data
  --data.train.local DIR        cache directory for its shards
  --data.train.cache_limit SIZE maximum size of the cache, like 100gb
  --data.train.epoch_size N     samples per epoch, like 10m
  --data.train.shuffle BOOL     whether to shuffle
  --data.train.streams.NAME.remote URL, --data.train.streams.NAME.proportion SHARE
                                one of several datasets, and its share of the samples

model:
  --model CLASS                 your LightningModule, like my_project.MyModel
  --model.ARGUMENT VALUE        an argument of the class

trainer:
  --trainer.max_steps N, --trainer.max_epochs N, --trainer.max_time DD:HH:MM:SS
                                when to stop
  --trainer.devices N, --trainer.num_nodes N, --trainer.accelerator NAME
                                devices per node, nodes, and kind of device: auto, cpu, gpu
  --trainer.strategy NAME       auto, ddp, fsdp and others
  --trainer.precision NAME      32-true, bf16-mixed and others
  --trainer.val_check_interval N
                                steps (or a share of an epoch, like 0.25) between validations
  --trainer.accumulate_grad_batches N
                                batches per optimizer step
  --trainer.callbacks+ CLASS    add a callback, like ModelCheckpoint
  --trainer.default_root_dir DIR
                                directory of logs and checkpoints
  --trainer.fast_dev_run BOOL   run a single batch, to try a configuration

more help:
  --help_advanced               all options, also those of Trainer, optimizer and scheduler
  --data.help                   fields of the data module; --data.help=my_project.MyData for your own
  --data.train.help             fields of the data of a stage
  --data.train.streams.help     fields of a stream; in the same way schedule, join, selection, packing,
                                packing.tokenize, token_budget, bad_samples, decode, storage and debug
  --model.help=my_project.MyModel
                                arguments of a model
"""
"""Help of a subcommand; the parser's own lists hundreds of options."""
