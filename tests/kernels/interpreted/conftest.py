"""Cases for the Triton kernels, and the measure that their errors are held to.

In the interpreter bfloat16 is multiplied in float32 (DOT_DTYPE), because its own product of bfloat16 multiplies bit
patterns: the compiled bfloat16 path is the same code with another dtype, and is not covered by these tests. Programs
run one after another: nothing is shown about races.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter

from headfold.kernels import gqa_decode
from headfold.kernels.dtypes import is_quantised
from headfold.kernels.quantise import channel_scale, quantise, token_scale
from headfold.kernels.reference import decode_in_dtype

assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1"


@pytest.fixture(autouse=True)
def _no_copies_back(monkeypatch):
    """The interpreter copies every argument's storage onto itself after a launch: gigabytes for a large cache."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)


@dataclass
class Case:
    """Arguments of `gqa_decode`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = gqa_decode(self.q, self.k, self.v, self.lengths, return_lse=True, **(self.options | more))
        assert isinstance(out, tuple)
        return out

    def check(self, *, largest_logit: float = 0.0, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, held to the error of plain torch in the same dtype, both against float64."""
        out, lse = self.run(**more)
        arguments = (self.q, self.k, self.v, self.lengths)
        exact, exact_lse = decode_in_dtype(torch.float64, *arguments, **(self.options | more))
        plain, plain_lse = decode_in_dtype(self.q.dtype, *arguments, **(self.options | more))
        factor = 4 if self.k.element_size() == 1 else 2
        error, plain_error = ((x.double() - exact).abs().max().item() for x in (out, plain))
        # Rounding the result to its dtype costs half a unit, whoever computes it; so does rounding a large logit, which
        # is a float32, but of a query that its scale per channel has gone into, as float16.
        is_rounded = self.k.element_size() == 1 and self.q.dtype != torch.float32
        logit_eps = torch.finfo(torch.float16 if is_rounded else torch.float32).eps
        floor = (torch.finfo(self.q.dtype).eps + logit_eps * largest_logit) / 2 * exact.abs().max().item()
        assert error <= factor * plain_error + floor, f"error {error:.3g}, plain torch {plain_error:.3g}"
        finite = exact_lse.isfinite()
        assert torch.equal(lse.isfinite(), finite)
        if finite.any():
            error, plain_error = ((x.double() - exact_lse)[finite].abs().max() for x in (lse, plain_lse))
            scale = exact_lse[finite].abs().max().clamp(min=1)
            assert error <= factor * plain_error + 1e-6 * scale, f"LSE: {error:.3g}, plain torch {plain_error:.3g}"
        return out, lse


def make_case(
    lengths: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    cache_dtype: str | None = None,
    key_scales: str = "token",
    page_size: int | None = None,
    poison: bool = True,
    seed: int = 0,
    key_scale_of_channel: torch.Tensor | None = None,
    **options: Any,
) -> Case:
    """Random values; pages in random order; unused slots hold NaN and 1e4, unused table entries -1 and huge numbers."""
    generator = torch.Generator().manual_seed(seed)
    batch_size = len(lengths)
    page = page_size or 1
    pages_each = -(-(max(lengths) + 3) // page)
    num_slots = pages_each * page

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = random(batch_size, num_heads, head_dim).to(dtype)
    k, v = (random(batch_size, num_slots, num_kv_heads, head_dim) for _ in range(2))
    if key_scale_of_channel is not None:
        k = k * key_scale_of_channel
    used = torch.arange(num_slots) < torch.tensor(lengths)[:, None]
    cache_dtype = cache_dtype or str(dtype).removeprefix("torch.")
    scales: dict[str, torch.Tensor] = {}
    if is_quantised(cache_dtype):
        k_scale = channel_scale(k[used], cache_dtype) if key_scales == "channel" else token_scale(k, cache_dtype)
        v_scale = token_scale(v, cache_dtype)
        k = quantise(k, k_scale if key_scales == "channel" else k_scale[..., None], cache_dtype)
        v = quantise(v, v_scale[..., None], cache_dtype)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    else:
        k, v = k.to(dtype), v.to(dtype)
    if poison:
        for x in (k, v, *scales.values()):
            if x.dim() > 2 and x.dtype.is_floating_point and x.element_size() > 1:
                x[~used] = torch.where(torch.rand(x[~used].shape, generator=generator) < 0.5, torch.nan, 1e4).to(
                    x.dtype
                )
            elif x.dim() > 2:
                x.view(torch.uint8)[~used] = 255 if x.dtype == torch.float8_e4m3fn else 0x7F

    table = None
    if page_size is not None:
        order = torch.randperm(batch_size * pages_each + 2, generator=generator)[: batch_size * pages_each]

        def paged(x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(batch_size * pages_each + 2, page, *x.shape[2:], dtype=x.dtype)
            if x.dtype.is_floating_point and x.element_size() > 1 and poison:
                out.fill_(torch.nan)
            out[order] = x.unflatten(1, (pages_each, page)).flatten(0, 1)
            return out

        k, v = paged(k), paged(v)
        scales = {name: paged(x) if x.dim() > 2 else x for name, x in scales.items()}
        table = order.view(batch_size, pages_each).to(torch.int32)
        for b, length in enumerate(lengths):
            first_unused = -(-length // page)
            table[b, first_unused::2] = -1
            table[b, first_unused + 1 :: 2] = 2**31 - 1
    all_options = {"block_table": table, **scales, **options}
    return Case(q, k, v, torch.tensor(lengths, dtype=torch.int32), all_options)


@pytest.fixture
def case():
    return make_case
