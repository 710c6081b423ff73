"""How many bytes the kernels ask for: each byte of K, V and their scales once, and little beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

CACHE_DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"]


class ByteCounter:
    """Counts the bytes that masked loads ask for, by the tensor that they lie in."""

    def __init__(self, monkeypatch, tensors: dict[str, torch.Tensor]) -> None:
        self.bytes = dict.fromkeys(tensors, 0)
        spans = {name: (x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for name, x in tensors.items()}
        builder = type(interpreter.interpreter_builder)
        load = builder.create_masked_load

        def counting(this, ptrs, mask, *rest):
            width = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
            addresses = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data]
            for name, (start, end) in spans.items():
                self.bytes[name] += width * int(((addresses >= start) & (addresses < end)).sum())
            return load(this, ptrs, mask, *rest)

        monkeypatch.setattr(builder, "create_masked_load", counting)


@pytest.mark.parametrize(
    ("cache_dtype", "page_size"),
    [*((name, None) for name in CACHE_DTYPES), ("float16", 16), ("int8", 16), ("int4", 64)],
)
def test_every_byte_once(case, monkeypatch, cache_dtype, page_size):
    num_kv_heads, length = 1, 1003
    dtype = getattr(torch, cache_dtype) if cache_dtype in ("float32", "bfloat16") else torch.float16
    c = case(
        [length], num_heads=8, num_kv_heads=num_kv_heads, dtype=dtype, cache_dtype=cache_dtype, page_size=page_size
    )
    tensors = {"k": c.k, "v": c.v, "table": c.options["block_table"]}
    tensors |= {name: c.options[name] for name in ("k_scale", "v_scale") if name in c.options}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    counter = ByteCounter(monkeypatch, tensors)
    c.run()

    row_bytes = c.k.shape[-1] * c.k.element_size()
    ideal = dict.fromkeys(("k", "v"), num_kv_heads * length * row_bytes)
    ideal |= {name: num_kv_heads * length * 4 for name in counter.bytes if name.endswith("scale")}
    for name, least in ideal.items():
        assert least <= counter.bytes[name] <= 1.03 * least, name
    # Page ids are asked for once per key and head where a tile has several pages; those of a page are one address.
    assert counter.bytes.get("table", 0) <= num_kv_heads * 4 * (length + 128 * 8)


def test_a_window_reads_its_own_keys(case, monkeypatch):
    c = case([2000], num_heads=4, num_kv_heads=1, page_size=64, window=1000)
    counter = ByteCounter(monkeypatch, {"k": c.k, "v": c.v})
    c.run()
    assert counter.bytes["k"] == counter.bytes["v"] == 1000 * 64 * 2


def test_the_count_would_notice_a_second_reading(case, monkeypatch):
    """17 query heads per KV head are two blocks of rows, and read the cache twice."""
    c = case([40], num_heads=17, num_kv_heads=1)
    counter = ByteCounter(monkeypatch, {"k": c.k, "v": c.v})
    c.run()
    assert counter.bytes["k"] == 2 * 40 * 64 * 2
