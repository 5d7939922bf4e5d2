"""``lightning-streaming <tool>``: datasets made, looked at, checked and moved from the command line.

    commands        the table of tools; runs one, tells its errors; arguments that several have, and the configuration
                    that some read
    console         exit codes, progress, JSON, errors; tables and values for people
    stored_dataset  where a dataset is, how its files get from there, checked; what its index adds up to
    held_shards     shards of data of another format, opened by way of the cache

    init            writes a first run: init_look finds out what a dataset holds and what to train on it, init_yaml
                    writes the configuration, init_modules the module
    inspect         shows what a dataset holds, and its first samples; inspect_run what a configured run reads
    view            shows a dataset or a run as pages in the browser: view_server lets in whom it may, view_pages makes
                    pages, view_search finds the sample that was typed; view_run is the door for runs
    viewed          what is looked at, dataset by dataset; viewed_run, the run that reads them
    sample_reader   samples one by one, by ranges, and nothing large unasked; own_caches keeps what that takes
    shown_values    values as people look at them; column_statistics, columns; png, pixels as a file
    pages           templates and style of all pages; charts, SVG for them
    verify          checks a dataset, and repairs it
    copy            copies a dataset, checked
    merge           joins datasets; writing.merge does the work
    convert         makes datasets: sources reads other formats, conversion writes them in parts, tokens packs text
    select          evaluates a selection of samples ahead of a run; select_run, all that a run needs
    lengths         counts the tokens of every document ahead of a run that packs them; lengths_run, all that a
                    run needs, and plans its packs
    state           shows and moves the position that a checkpoint holds: checkpoints reads and writes such files,
                    state_moves works out other positions, state_counts what was read before one
    trace           tells which samples a step reads, by trace_run; traced_run knows the run's order and steps,
                    strategy_ranks which ranks read the same samples by the trainer's strategy
    plan            tells what a run will read and fetch: plan_run works it out, of what plan_reads counts in each of
                    plan_epochs, and plan_fetches has nodes fetch (plan_node, and plan_cache under a limit), with
                    plan_memory; plan_report tells it, plan_tables and plan_page show it, plan_conditions fails where it
                    should
    tune            recommends settings, by tune_run: tune_measure reads the run's data, tune_advice judges the numbers
    cache           shows and clears caches

Only the tool that is asked for is imported.
"""
