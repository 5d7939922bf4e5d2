"""``lightning-streaming <tool>``: create, inspect, check and move datasets from the command line.

Each tool is a module of its name with its arguments and its entry point; only the requested one is imported.
``commands`` is the table of tools, with shared arguments and the configuration of runs; ``console`` has exit codes,
progress, JSON, errors, tables and formatted values. Larger parts, and parts that several tools share, are in the
packages below. Packages of one level do not import each other:

    viewing      view: the pages of datasets and runs, and the server with its access check
    planning     plan: what a run reads, what nodes download, what their caches hold; as a report and as a page
    tuning       tune: measures a run's data, and evaluates the numbers
    starting     init: inspects a dataset, and writes configuration and module
    converting   convert: sources of rows, written in parts; packed text

    runs         a configured run: its description (describe), its steps (training_run), its checkpoints and how they
                 are moved (checkpoints), and what trace (trace_run, spikes), inspect, select and lengths show of one

    stored       a stored dataset: its files downloaded and checked, and its shards opened (stored_dataset), in numbers
                 (summary), and single samples by byte ranges, as a command line names them (sample_reader)
    report       charts as SVG, image and audio files, and the templates of all pages

Modules that import torch, which takes seconds, are imported on demand.
"""
