"""A node's directory of shards: each file is fetched once, checked, and then shared by all processes."""

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.shard_cache import ShardCache

__all__ = ["CacheConfig", "ShardCache"]
