"""``lightning-streaming <tool>``: datasets made, looked at, checked and moved from the command line.

A tool is the module of its name, which says what it can be told and begins its work; only the one that is asked for is
imported. ``commands`` is the table of them, with arguments that several have and the configuration that some read;
``console`` has exit codes, progress, JSON, errors, tables and values for people. Tools stand above the rooms here, in
which lies what is too much for one file, or what several need. Rooms of one floor know nothing of each other:

    viewing      view: what is looked at, pages made of it, the server that lets in whom it may
    planning     plan: what is read, what nodes fetch for it, what their caches keep; as a report and as a page
    tuning       tune: measures a run's data, and judges the numbers
    starting     init: looks at a dataset, and writes configuration and module
    converting   convert: sources of rows, written in parts; texts packed

    runs         a configured run: its order and steps (traced_run), its checkpoints and how they are moved, and what
                 trace, inspect, select and lengths tell of one

    stored       a dataset where it lies: its files fetched and checked (stored_dataset), in numbers (summary), its
                 shards opened (held_shards), samples one by one, by ranges (sample_reader), and what is typed to
                 name one (named_sample)
    drawing      charts as SVG, pixels as PNG, templates and style of all pages

What a tool does for a run imports torch, which takes seconds: it stands in a module ``*_run``, imported when asked for.
"""
