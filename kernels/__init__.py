"""Attention over a KV cache: the reference, the Triton kernels, the caches.

Importing this package imports nothing else and has no side effect: the names below are resolved when they are first
asked for. That matters because the Hugging Face package `kernels` has the name of our folder: with the repository
root on sys.path, transformers would find ours, and must not be slowed down or broken by it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .append import kv_append
    from .attention import gqa_decode, register_attention
    from .cache import KVCache, PagedKVCache
    from .errors import KernelError
    from .loop import DecodeLoop
    from .memory import kv_cache_bytes
    from .reference import gqa_decode_reference

_MODULE_OF_NAME = {
    "DecodeLoop": "loop",
    "KVCache": "cache",
    "KernelError": "errors",
    "PagedKVCache": "cache",
    "gqa_decode": "attention",
    "gqa_decode_reference": "reference",
    "kv_append": "append",
    "kv_cache_bytes": "memory",
    "register_attention": "attention",
}

__all__ = [
    "DecodeLoop",
    "KVCache",
    "KernelError",
    "PagedKVCache",
    "gqa_decode",
    "gqa_decode_reference",
    "kv_append",
    "kv_cache_bytes",
    "register_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
