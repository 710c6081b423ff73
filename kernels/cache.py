"""KV caches."""

from .memory import kv_cache_bytes

__all__ = ["kv_cache_bytes"]
