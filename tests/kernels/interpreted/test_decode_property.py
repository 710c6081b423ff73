"""Any call that the contract allows, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@st.composite
def calls(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 17]))
    lengths = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=3))
    options = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([16, 64, 72, 80, 128])),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        "cache_dtype": draw(st.sampled_from([None, "float8_e4m3fn", "float8_e5m2", "int8", "int4"])),
        "key_scales": draw(st.sampled_from(["token", "channel"])),
        "page_size": draw(st.sampled_from([None, 1, 16, 24, 64, 128])),
        "seed": draw(st.integers(0, 1000)),
        "window": draw(st.one_of(st.none(), st.integers(1, 210))),
        "softcap": draw(st.one_of(st.none(), st.floats(1.0, 60.0))),
        "softmax_scale": draw(st.one_of(st.none(), st.floats(0.01, 1.0))),
        "num_splits": draw(st.one_of(st.none(), st.integers(1, 9))),
    }
    if sum(lengths) == 0:
        options["key_scales"] = "token"  # no key to take a scale from
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-3, 3, num_heads)
    if draw(st.booleans()):
        starts = [draw(st.integers(0, length)) for length in lengths]
        options["seq_starts"] = torch.tensor(starts, dtype=torch.int32)
    return lengths, options


def _check(case, call):
    lengths, options = call
    # Of a few thousand products of standard normal rows, none is larger.
    largest_logit = 5 * (options["softmax_scale"] or 0) * options["head_dim"] ** 0.5
    largest_logit = min(largest_logit, options["softcap"] or largest_logit)
    case(lengths, **options).check(largest_logit=largest_logit)


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=40, derandomize=True, **COMMON)
@given(call=calls())
def test_any_call(case, call):
    _check(case, call)


@pytest.mark.slow
@settings(max_examples=600, **COMMON)
@given(call=calls())
def test_any_call_widely(case, call):
    _check(case, call)
