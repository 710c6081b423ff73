"""The one formula for cache memory, against sums done by hand. That caches hold as much: test_cache.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headfold.kernels import KernelError, kv_cache_bytes

LLAMA_2_7B = {"num_layers": 32, "num_key_value_heads": 32, "head_dim": 128, "num_tokens": 4096}


def test_known_models():
    assert kv_cache_bytes(**LLAMA_2_7B) == 2 * 2**30  # 512 KB per token
    assert kv_cache_bytes(**(LLAMA_2_7B | {"num_key_value_heads": 8})) == 2**29
    assert kv_cache_bytes(**LLAMA_2_7B, num_sequences=3) == 3 * 2 * 2**30


@pytest.mark.parametrize(("cache_dtype", "bits"), [("float32", 32), ("fp16", 16), ("fp8", 8), ("int8", 8), ("int4", 4)])
def test_dtypes_and_scales(cache_dtype, bits):
    one = {"num_layers": 1, "num_key_value_heads": 2, "head_dim": 64, "num_tokens": 10}
    values = 10 * 2 * 2 * 64 * bits // 8
    scales = 10 * 2 * 2 * 4 if bits <= 8 else 0
    assert kv_cache_bytes(**one, cache_dtype=cache_dtype) == values + scales
    if bits <= 8:  # half of the scales go, and one per KV head and channel comes
        per_channel = kv_cache_bytes(**one, cache_dtype=cache_dtype, key_scales="channel")
        assert per_channel == values + scales // 2 + 2 * 64 * 4


def test_windows_pages_and_head_dims():
    one = {"num_layers": 2, "num_key_value_heads": 1, "head_dim": 8, "num_tokens": 100, "cache_dtype": "float32"}
    assert kv_cache_bytes(**one) == 2 * 100 * 64
    assert kv_cache_bytes(**one, sliding_windows=[None, 30]) == (100 + 30) * 64
    assert kv_cache_bytes(**one, sliding_windows=[300, 30]) == (100 + 30) * 64
    assert kv_cache_bytes(**one, page_size=16) == 2 * 112 * 64
    assert kv_cache_bytes(**one, value_head_dim=4) == 2 * 100 * 48
    assert kv_cache_bytes(**(one | {"num_tokens": 0})) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 0}, "head_dim must be at least 1, found 0"),
        ({"num_tokens": -1}, "num_tokens must be at least 0, found -1"),
        ({"cache_dtype": "int5"}, "'int5' is not known"),
        ({"cache_dtype": "int4", "head_dim": 7}, "even, found 7"),
        ({"key_scales": "row"}, "found 'row'"),
        ({"sliding_windows": [None]}, r"one entry per layer \(32\), found 1"),
        ({"sliding_windows": [0] * 32}, "at least 1 token, found 0"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(KernelError, match=message):
        kv_cache_bytes(**(LLAMA_2_7B | change))


def test_needs_nothing_heavy():
    """A plan is made from a config alone: no torch, no transformers, no Triton."""
    code = (
        "import sys; from headfold.kernels import kv_cache_bytes\n"
        "kv_cache_bytes(num_layers=1, num_key_value_heads=1, head_dim=8, num_tokens=1)\n"
        "assert not {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
