"""``lightning-streaming <tool>``: datasets made, looked at, checked and moved from the command line.

    commands       the table of tools; finds one, runs it, tells its errors
    options        arguments that several tools have
    console        progress, exit codes, JSON, errors; tables draws what people read
    inspect        shows a dataset: summary adds up its index, peek reads samples, render writes values out
    verify         checks a dataset: examine looks at one shard, repair mends one, verify_report tells
    copy           copies a dataset: carry takes one file, claim tells whose the destination is
    merge          joins datasets; writing.merge does the work
    convert        makes datasets: sources reads other formats, packing cuts tokens into blocks, conversion writes
                   them in parts, changed_parts begins again those whose input changed,
                   conversion_plan says with what it was begun, given tells the command again
    state          shows and moves the place in the data that a checkpoint holds; states has its parts
    trace          tells which samples a step reads; traces has its parts
    tune           measures how fast a run's data is read here, and recommends settings; tuning has its parts
    run_files      reads the configuration of a run, for both of these
    cache          shows and clears caches: cache_directories finds them, cache_survey adds up, cache_report tells
    unnamed        files that no index names, told by verify and copy
    stored_dataset where a dataset is, for all of them; raw_files reads parts of it

Only the tool that is asked for is imported.
"""
