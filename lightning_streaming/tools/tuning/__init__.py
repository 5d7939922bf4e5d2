"""The parts of ``lightning-streaming tune``.

    run            the configured run: its data module, loaders of it with other settings, how many ranks it has
    cores          processors that this process may use
    sizes          bytes of the shards: to fetch, and to keep on a node
    link           fetches some shards in a process of its own, and times them
    excerpt        the data that is measured: away from the run's caches, and what was fetched of it
    speeds         how fast a loader hands out batches, for each number of workers
    failure        what is said where the run's transform or collate function fails meanwhile
    working_set    what an epoch has open at once, and what it fetches under a limit
    advice         numbers in, recommendations out; limits asks it for cache_limit
    report         all of it in order
    show           tables, YAML, JSON

Only ``report`` knows the order in which they work.
"""
