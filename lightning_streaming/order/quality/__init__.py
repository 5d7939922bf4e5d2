"""What an order is worth and what it costs: numbers from sample ids and shard sizes alone; nothing is downloaded.

shards    which shard a sample lies in
mixing    how well an order mixes, where a uniform permutation of the same samples scores 1
cost      which shards a node uses when: at once, at the start, in bursts
cache     how often a node downloads when its cache is smaller than what it uses
"""
