"""One command for a GPU: are the decode kernels right on it, and how fast are they?

    python -m headfold.scripts.gpu_check --output docs/results

It checks results on the device, measures the bandwidth of a copy, then decode over a grid of shapes against it and
against torch's SDPA, FlexAttention and, where they are installed, FlashInfer and FlashAttention, refits the split cost
model, and writes gpu_check.json and gpu_check.md, anew after every part: a part that fails is reported and costs no
other. It stops measuring after --minutes, says what it left out, and is ended by a watchdog if something hangs.
Kernels are compiled beforehand, and results checked, in as many processes as there are cores. Caches are read cold:
before every run other memory has gone through L2. Kernels run under CUDA graphs, as in a decode loop.

Without a GPU it goes through all of it at toy sizes in Triton's interpreter, to show that it works; the times mean
nothing.

Shape letters: B sequences, S slots, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from headfold.kernels import DecodeLoop, KVCache, PagedKVCache, gqa_decode, kv_append, register_attention
from headfold.kernels.dtypes import is_quantised
from headfold.kernels.quantise import quantise, token_scale
from headfold.kernels.reference import decode_in_dtype


@dataclass(frozen=True)
class Sizes:
    """What is run: the real thing on a GPU, toys elsewhere."""

    device: torch.device
    head_dim: int
    heads: list[tuple[int, int]]  # (H, G)
    contexts: list[int]
    batch_sizes: list[int]
    cache_dtypes: list[str]
    page_sizes: list[int | None]
    num_runs: int
    pool_bytes: int  # of the buffer that caches are cut from, at most; larger caches are left out
    copy_bytes: int
    prompt: int  # tokens of the decode loop's prompt

    @property
    def is_toy(self) -> bool:
        return self.device.type != "cuda"

    @property
    def quantised(self) -> list[str]:
        """The quantised dtypes that the device can do."""
        dtypes = ["float8_e5m2", "int8", "int4"]
        if self.is_toy or torch.cuda.get_device_capability() >= (8, 9):
            dtypes.append("float8_e4m3fn")
        return dtypes


def sizes() -> Sizes:
    """The sizes for the device at hand."""
    if not torch.cuda.is_available():
        return Sizes(
            torch.device("cpu"), 64, [(4, 4), (4, 1)], [70, 200], [2], ["float16", "int8"], [None, 16], 2, 1 << 20,
            1 << 20, 40,
        )  # fmt: skip
    free, _ = torch.cuda.mem_get_info()
    return Sizes(
        device=torch.device("cuda"),
        head_dim=128,
        heads=[(32, 8), (32, 4), (32, 1), (32, 32)],
        contexts=[32768, 131072, 4096],
        batch_sizes=[8, 1, 32],
        cache_dtypes=["bfloat16", "float8_e4m3fn", "int8"]
        if torch.cuda.get_device_capability() >= (8, 9)
        else ["bfloat16", "float8_e5m2", "int8"],
        page_sizes=[64, None, 16],
        num_runs=15,
        pool_bytes=int(0.7 * free),
        copy_bytes=4 << 30,
        prompt=4096,
    )


class Clock:
    """Times a call on the device: under a CUDA graph, with a cold L2 cache, the median of several runs."""

    def __init__(self, run: Sizes) -> None:
        self.run = run
        self._flush = torch.zeros(64 << 20 if not run.is_toy else 1, dtype=torch.int32, device=run.device)

    def seconds(self, call: Callable[[], Any], *, graph: bool = True) -> float:
        """Of one call. `graph=False` for calls that a graph cannot hold."""
        if self.run.is_toy:
            times = []
            for _ in range(self.run.num_runs):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return statistics.median(times)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, loads modules
                call()
        torch.cuda.current_stream().wait_stream(stream)
        replay = call
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                call()
            replay = captured.replay
        times = []
        for _ in range(self.run.num_runs):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Read, not written: lines of L2 that are to be written back would take bandwidth while the clock runs.
            self._flush.sum()
            before.record()
            replay()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1000)
        return statistics.median(times)


def copy_bandwidth(run: Sizes, clock: Clock) -> float:
    """Bytes per second, read and written together, of a copy far larger than L2: what memory gives in practice."""
    source = torch.zeros(run.copy_bytes // 4, dtype=torch.float32, device=run.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds(lambda: target.copy_(source), graph=False)


# ---------------------------------------------------------------------------------------------------- correctness


Spec = tuple[torch.dtype, str, int, int, "int | None", dict[str, Any]]


def result_specs(run: Sizes) -> list[Spec]:
    """What results are checked: dtype, cache dtype, head_dim, group size, page size, options."""
    options: list[tuple[int, int | None, dict[str, Any]]] = [
        (4, 16, {"window": 60}),
        (1, None, {}),
        (8, 64, {"softcap": 5.0, "num_splits": 7}),
        (20, 16, {"sinks": True}),
    ]
    if run.is_toy:
        dtypes = (torch.bfloat16, torch.float16)
        return [(dtype, cache, 64, *options[0]) for dtype in dtypes for cache in (str(dtype)[6:], *run.quantised)]
    specs = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for cache_dtype in (str(dtype)[6:], *run.quantised):
            # All of both for bfloat16, where models live; elsewhere each head_dim and each option once.
            for i, head_dim in enumerate((128, 64, 80, 256)):
                for j, option in enumerate(options):
                    if i == j or (dtype == torch.bfloat16 and (i == 0 or j == 0)):
                        specs.append((dtype, cache_dtype, head_dim, *option))
    return specs


def check_result(spec: Spec) -> dict[str, Any]:
    """The error against float64, beside that of plain torch in the same dtype."""
    dtype, cache_dtype, head_dim, group_size, page_size, options = spec
    run = sizes()
    torch.manual_seed(0)
    lengths = [0, 5, 130, 700] if not run.is_toy else [0, 5, 70]
    call, reference = random_call(run, lengths, group_size * 2, 2, head_dim, dtype, cache_dtype, page_size, options)
    found, again = call()[0], call()[0]
    exact, plain = (reference(x).double() for x in (torch.float64, dtype))
    error, plain_error = ((x.double().cpu() - exact).abs().max().item() for x in (found, plain))
    factor = 4 if is_quantised(cache_dtype) else 2
    floor = torch.finfo(dtype).eps / 2 * exact.abs().max().item()
    return {
        "check": f"{dtype} over {cache_dtype}, D {head_dim}, group {group_size}, page {page_size}, {options}",
        "passed": error <= factor * plain_error + floor and torch.equal(found, again),
        "error": error,
        "plain_error": plain_error,
    }


def prepare(point: Point) -> None:
    """Compiles, into Triton's cache on disk, the kernels that a shape of the grid may need."""
    run = sizes()
    small = replace(point, context=64, batch_size=1)
    arguments, options = Pool(run, 64 << 20, small.cache_dtype).arguments(small)
    for num_splits in (1, 2, 128):  # each is a build of its own
        gqa_decode(*arguments, num_splits=num_splits, **options)


def _work(job: tuple[Callable[[Any], Any], Any]) -> Any:
    torch.set_num_threads(1)
    function, argument = job
    try:
        return function(argument)
    except Exception as error:
        return {"check": f"{function.__name__} {argument}", "passed": False, "error": describe(error)}


def in_processes(run: Sizes, jobs: list[tuple[Callable[[Any], Any], Any]], seconds: float) -> Iterator[Any]:
    """Results of the jobs, in the order in which they end; those that take longer than `seconds` in all are left."""
    if run.is_toy:
        yield from map(_work, jobs)
        return
    deadline = time.monotonic() + seconds
    # Each has a context of its own on the device, of about half a gigabyte.
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1, len(jobs))) as workers:
        results = workers.imap_unordered(_work, jobs)
        for i in range(len(jobs)):
            try:
                yield results.next(max(deadline - time.monotonic(), 0.01))
            except multiprocessing.TimeoutError:
                text = f"{len(jobs) - i} of {len(jobs)} builds and checks did not end within {seconds:.0f} s"
                yield {"check": text, "passed": False}
                return


def check_results(run: Sizes, seconds: float) -> Iterator[dict[str, Any]]:
    """Results on random values, then what must hold exactly; and on the way the builds that the grid needs."""
    kinds = {(p.num_heads, p.num_kv_heads, p.cache_dtype, p.page_size): p for p in points(run)}
    builds = [(prepare, point) for point in kinds.values()] if not run.is_toy else []
    jobs: list[tuple[Callable[[Any], Any], Any]] = [*builds, *((check_result, spec) for spec in result_specs(run))]
    yield from (result for result in in_processes(run, jobs, seconds) if result is not None)
    for check in (check_append, check_large_cache, check_graph_replay):
        try:
            yield check(run)
        except Exception as error:
            yield {"check": check.__name__, "passed": False, "error": describe(error)}
        release(run)


def describe(error: BaseException) -> str:
    """An error in a line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def release(run: Sizes) -> None:
    """Gives cached memory back, so that the next part can have it in other pieces."""
    if not run.is_toy:
        with contextlib.suppress(RuntimeError):  # after an error that the device does not recover from
            torch.cuda.empty_cache()


def random_call(
    run: Sizes,
    lengths: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: str,
    page_size: int | None,
    options: dict[str, Any],
) -> tuple[Callable[[], Any], Callable[[torch.dtype], torch.Tensor]]:
    """A call of `gqa_decode` on random values, and the same by the reference in any dtype. Unused slots hold NaN.

    Values are made, and the reference computed, on the host: it knows every dtype, and owes the device nothing.
    """
    page = page_size or 1
    pages_each = -(-(max(lengths) + 1) // page)
    size = (len(lengths), pages_each * page, num_kv_heads, head_dim)
    q = torch.randn(len(lengths), num_heads, head_dim).to(dtype)
    k, v = (torch.randn(size) for _ in range(2))
    arguments: dict[str, Any] = {name: value for name, value in options.items() if name != "sinks"}
    if "sinks" in options:
        arguments["sinks"] = torch.randn(num_heads)
    if is_quantised(cache_dtype):
        scales = [token_scale(x, cache_dtype) for x in (k, v)]
        k, v = (quantise(x, scale[..., None], cache_dtype) for x, scale in zip((k, v), scales, strict=True))
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
    else:
        k, v = k.to(dtype), v.to(dtype)
        for b, length in enumerate(lengths):
            k[b, length:], v[b, length:] = torch.nan, torch.nan
    if page_size is not None:
        order = torch.randperm(len(lengths) * pages_each)

        def paged(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x.unflatten(1, (pages_each, page)).flatten(0, 1))
            out[order] = x.unflatten(1, (pages_each, page)).flatten(0, 1)
            return out

        k, v = paged(k), paged(v)
        for name in ("k_scale", "v_scale"):
            if name in arguments:
                arguments[name] = paged(arguments[name])
        arguments["block_table"] = order.view(len(lengths), pages_each).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)

    def reference(in_dtype: torch.dtype) -> torch.Tensor:
        return decode_in_dtype(in_dtype, q, k, v, seq_lens, **arguments)[0]

    there = [x.to(run.device) for x in (q, k, v, seq_lens)]
    options_there: dict[str, Any] = {
        n: x.to(run.device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()
    }
    return lambda: gqa_decode(*there, return_lse=True, **options_there), reference


def check_append(run: Sizes) -> dict[str, Any]:
    """The append kernel quantises as torch does, FP8 included."""
    worst = 0.0
    for cache_dtype in run.quantised:
        key = torch.randn(4, 3, 2, 64, device=run.device).to(torch.bfloat16)
        scale = token_scale(key, cache_dtype)
        expected = quantise(key, scale[..., None], cache_dtype)
        cache = torch.zeros(4, 8, *expected.shape[2:], dtype=expected.dtype, device=run.device)
        found_scale = torch.zeros(4, 8, 2, device=run.device)
        positions = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=run.device)
        kv_append(cache, cache.clone(), key, key, positions, k_scale=found_scale, v_scale=found_scale.clone())
        for b in range(4):
            found = cache[b, b : b + 3]
            worst = max(worst, (found.view(torch.uint8) != expected[b].view(torch.uint8)).float().mean().item())
    # A division may round the other way on another device; more than a few bytes in a thousand would be another rule.
    return {"check": "appended values are those that torch quantises", "passed": worst < 5e-3, "differing_share": worst}


def check_large_cache(run: Sizes) -> dict[str, Any]:
    """Pages whose offsets exceed 2^31 elements."""
    num_kv_heads, page_size, head_dim = 8, 16, 128
    page_elements = num_kv_heads * page_size * head_dim
    num_pages = 2**31 // page_elements + 64 if not run.is_toy else 64
    caches = [
        torch.zeros(num_pages, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=run.device)
        for _ in range(2)
    ]
    used = torch.arange(num_pages - 32, num_pages, device=run.device)
    for cache in caches:
        cache[used] = torch.randn(32, page_size, num_kv_heads, head_dim, device=run.device).to(torch.float16)
    table = used[torch.randperm(32, device=run.device)].view(2, 16).to(torch.int32)
    q = torch.randn(2, 32, head_dim, device=run.device).to(torch.float16)
    seq_lens = torch.tensor([256, 201] if not run.is_toy else [40, 21], dtype=torch.int32, device=run.device)
    k_cache, v_cache = caches
    found = gqa_decode(q, k_cache, v_cache, seq_lens, block_table=table)
    expected, _ = decode_in_dtype(torch.float32, q, k_cache, v_cache, seq_lens, block_table=table)
    assert isinstance(found, torch.Tensor)
    error = (found.float() - expected).abs().max().item()
    return {
        "check": f"pages at the end of a cache of {caches[0].numel() / 2**31:.3g} x 2^31 elements",
        "passed": error < 5e-3,
        "error": error,
    }


def check_graph_replay(run: Sizes) -> dict[str, Any]:
    """A decode loop, which on a GPU replays one CUDA graph over growing lengths, gives the tokens of generate."""
    model = small_model(run)
    ids = torch.randint(2, 97, (2, run.prompt // 16 + 9), device=run.device)
    num_new = 24 if not run.is_toy else 3
    expected = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False
    )[:, ids.shape[1] :]
    agreed = True
    for kind in (KVCache, PagedKVCache):
        cache = kind(
            model.config, num_sequences=2, max_tokens=ids.shape[1] + num_new, dtype=model.dtype, device=run.device
        )
        loop = DecodeLoop(model, cache)
        tokens = [loop.prefill(ids).clone()] + [loop.step().clone() for _ in range(num_new - 1)]
        agreed &= torch.equal(torch.cat(tokens, dim=1), expected)
    way = "step by step" if run.is_toy else "under a CUDA graph"
    return {"check": f"a decode loop {way} gives generate's tokens", "passed": agreed}


def small_model(run: Sizes) -> Any:
    """A random Llama in float32, for checks of a whole step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register_attention()
    width, layers = (256, 4) if not run.is_toy else (64, 1)
    config = LlamaConfig(
        vocab_size=97, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="headfold").to(run.device).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.1)
    return model


# ---------------------------------------------------------------------------------------------------- speed

OUT_OF_TIME = "out of time"


@dataclass
class Point:
    """One shape: our time and the peers', in microseconds."""

    num_heads: int
    num_kv_heads: int
    context: int
    batch_size: int
    cache_dtype: str
    page_size: int | None
    bytes_read: int
    microseconds: float = math.nan
    share_of_copy_bandwidth: float | None = None  # None: the copy was not measured
    peers: dict[str, float] = field(default_factory=dict)


class Pool:
    """One buffer from which every cache of a dtype is cut, filled once with random values."""

    def __init__(self, run: Sizes, num_bytes: int, cache_dtype: str) -> None:
        self.run = run
        while True:
            try:
                self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=run.device)
                break
            except torch.OutOfMemoryError:
                num_bytes //= 2  # another process has some; larger caches are then left out
        self.fill(cache_dtype)

    def fill(self, cache_dtype: str) -> None:
        """Normal values in 16 bits; any int8; of float8_e4m3fn what is below 2, which leaves out NaN."""
        if is_quantised(cache_dtype):
            self._bytes.random_(0, 256)
            if cache_dtype.startswith("float8"):
                self._bytes.bitwise_and_(0xBF)
        else:
            self._bytes.view(getattr(torch, cache_dtype)).normal_()

    def fits(self, point: Point) -> bool:
        """Whether the buffer is large enough for a shape's K and V."""
        return point.bytes_read + (64 << 10) <= self._bytes.numel()

    def arguments(self, point: Point) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """q, k, v, seq_lens and the options of `gqa_decode`."""
        run, dtype = self.run, getattr(torch, point.cache_dtype)
        rows, slots = point.batch_size, point.context
        options: dict[str, Any] = {}
        if point.page_size is not None:
            slots = point.page_size
            rows = point.batch_size * -(-point.context // slots)
            order = torch.randperm(rows, device=run.device).to(torch.int32)
            options["block_table"] = order.view(point.batch_size, -1)
        shape = (rows, slots, point.num_kv_heads, run.head_dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        step = -(-num_bytes // 256) * 256
        k, v = (self._bytes[i * step : i * step + num_bytes].view(dtype).view(shape) for i in range(2))
        if is_quantised(point.cache_dtype):
            scales = torch.full((2, rows, point.num_kv_heads, slots), 0.01, device=run.device)
            options |= {"k_scale": scales[0].transpose(1, 2), "v_scale": scales[1].transpose(1, 2)}
        q_dtype = torch.bfloat16 if is_quantised(point.cache_dtype) else dtype
        q = torch.randn(point.batch_size, point.num_heads, run.head_dim, device=run.device).to(q_dtype)
        seq_lens = torch.full((point.batch_size,), point.context, dtype=torch.int32, device=run.device)
        return (q, k, v, seq_lens), options


def points(run: Sizes) -> Iterator[Point]:
    """The grid, the most telling first."""
    for cache_dtype in run.cache_dtypes:
        for page_size in run.page_sizes:
            for context in run.contexts:
                for batch_size in run.batch_sizes:
                    for num_heads, num_kv_heads in run.heads:
                        per_token = 2 * num_kv_heads * (run.head_dim * getattr(torch, cache_dtype).itemsize)
                        if is_quantised(cache_dtype):
                            per_token += 2 * num_kv_heads * 4
                        size = batch_size * (-(-context // (page_size or 1)) * (page_size or 1)) * per_token
                        yield Point(num_heads, num_kv_heads, context, batch_size, cache_dtype, page_size, size)


def peers(run: Sizes, point: Point, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Makers of calls of other libraries that compute the same, by name, where they are installed."""
    q, k, v, seq_lens = arguments
    makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {}
    if is_quantised(point.cache_dtype):
        return makers
    scale = run.head_dim**-0.5
    table = options.get("block_table")
    if table is None:
        k_bgsd, v_bgsd = k.transpose(1, 2), v.transpose(1, 2)
        packed = q.view(point.batch_size, point.num_kv_heads, -1, run.head_dim)
        attend = torch.nn.functional.scaled_dot_product_attention
        makers["torch SDPA, enable_gqa"] = lambda: (
            lambda: attend(q[:, :, None], k_bgsd, v_bgsd, scale=scale, enable_gqa=True)
        )
        makers["torch SDPA, packed"] = lambda: lambda: attend(packed, k_bgsd, v_bgsd, scale=scale)
        # Each shape is a compilation of some ten seconds.
        if not run.is_toy and (point.context, point.batch_size) == (32768, 8) and point.num_kv_heads in (4, 8):

            def flex() -> Callable[[], torch.Tensor]:
                from torch.nn.attention.flex_attention import flex_attention

                call = torch.compile(flex_attention, dynamic=False)
                return lambda: call(q[:, :, None], k_bgsd, v_bgsd, scale=scale, enable_gqa=True)

            makers["FlexAttention"] = flex
    if run.is_toy:
        return makers
    if importlib.util.find_spec("flash_attn_interface"):

        def flash_3() -> Callable[[], torch.Tensor]:
            from flash_attn_interface import flash_attn_with_kvcache

            paging = {} if table is None else {"page_table": table}
            return lambda: flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=seq_lens, causal=True, **paging)

        makers["FlashAttention 3"] = flash_3
    if importlib.util.find_spec("flash_attn") and table is None:  # its pages have 256 tokens

        def flash_2() -> Callable[[], torch.Tensor]:
            from flash_attn import flash_attn_with_kvcache

            return lambda: flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=seq_lens, causal=True)

        makers["FlashAttention 2"] = flash_2
    if importlib.util.find_spec("flashinfer") and table is not None:

        def flashinfer() -> Callable[[], torch.Tensor]:
            import flashinfer

            workspace = torch.empty(256 << 20, dtype=torch.uint8, device=run.device)
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            starts = torch.arange(point.batch_size + 1, dtype=torch.int32, device=run.device) * table.shape[1]
            last = torch.full_like(seq_lens, (point.context - 1) % k.shape[1] + 1)
            shape = (point.num_heads, point.num_kv_heads, run.head_dim, k.shape[1])
            wrapper.plan(starts, table.flatten(), last, *shape, q_data_type=q.dtype, kv_data_type=k.dtype)
            return lambda: wrapper.run(q, (k, v))

        makers["FlashInfer"] = flashinfer
    return makers


def peer_versions() -> dict[str, str]:
    """Of the other libraries that are installed."""
    found = {}
    for name in ("flash_attn_3", "flash_attn", "flashinfer-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def measure(
    run: Sizes,
    clock: Clock,
    bandwidth: float | None,
    deadline: float,
    measured: list[dict[str, Any]],
    left_out: list[str],
) -> None:
    """The grid within the time, added to `measured`; and to `left_out` what was not measured, with the reason."""
    pool = None
    filled_with = ""
    num_failed = 0
    for point in points(run):
        name = (
            f"{point.num_heads}/{point.num_kv_heads}, context {point.context}, batch {point.batch_size}, "
            f"{point.cache_dtype}, page {point.page_size}"
        )
        if time.monotonic() > deadline:
            left_out.append(f"{name}: {OUT_OF_TIME}")
            continue
        if pool is None:
            pool = Pool(run, run.pool_bytes, point.cache_dtype)
        elif filled_with != point.cache_dtype:
            pool.fill(point.cache_dtype)
        filled_with = point.cache_dtype
        if not pool.fits(point):
            left_out.append(f"{name}: the cache does not fit")
            continue
        try:
            arguments, options = pool.arguments(point)
            call = functools.partial(gqa_decode, *arguments, **options)
            seconds = clock.seconds(call)
        except Exception as error:
            left_out.append(f"{name}: {describe(error)}")
            num_failed += not isinstance(error, torch.OutOfMemoryError)
            release(run)
            continue
        point.microseconds = seconds * 1e6
        point.share_of_copy_bandwidth = point.bytes_read / seconds / bandwidth if bandwidth else None
        ours = call()
        assert isinstance(ours, torch.Tensor)  # no log-sum-exp was asked for
        for peer, make in peers(run, point, arguments, options).items():
            if time.monotonic() > deadline:
                left_out.append(f"{name}: {peer}: {OUT_OF_TIME}")
                continue
            try:
                peer_call = make()
                theirs = peer_call().reshape(ours.shape)
                difference = (theirs.float() - ours.float()).abs().max() / ours.float().abs().max()
                if not difference < 0.05:
                    left_out.append(f"{name}: {peer}: another result, by {difference.item():.2g} of the largest value")
                    continue
                point.peers[peer] = clock.seconds(peer_call) * 1e6
            except Exception as error:  # a peer that cannot is no reason to stop
                left_out.append(f"{name}: {peer}: {describe(error)}")
                release(run)
        measured.append(vars(point))
    if num_failed:
        raise RuntimeError(f"{num_failed} shapes failed, see what was left out")


def refit_split_costs(run: Sizes, clock: Clock, deadline: float) -> dict[str, Any]:
    """Times over numbers of splits, fitted to  tile x (waves x (tiles + overhead) + merge x splits) + constant.

    `regret` is the time with splits chosen by the kernel over the best of the tried numbers, worst and median.
    """
    from headfold.kernels import decode

    rows, times, regrets = [], [], []
    shapes = [(b, g, s) for b in (1, 4, 16) for g in (1, 8) for s in (2048, 16384, 65536)]
    if run.is_toy:
        shapes = [(1, 1, 600), (2, 1, 900)]
    largest = max(b * g * s for b, g, s in shapes) * 2 * run.head_dim * 2
    pool = Pool(run, largest + (1 << 20), run.cache_dtypes[0])
    for batch_size, num_kv_heads, context in shapes:
        if time.monotonic() > deadline:
            break
        point = Point(num_kv_heads * 4, num_kv_heads, context, batch_size, run.cache_dtypes[0], 64, 0)
        arguments, options = pool.arguments(point)
        device_class, num_sms = decode._device(run.device)
        tile = decode.tile_for(device_class, run.head_dim, 4, arguments[0].dtype, point.cache_dtype)
        at_once = num_sms * tile.programs_per_sm
        num_tiles = -(-context // tile.block_n)
        tried = []
        for num_splits in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
            if num_splits > num_tiles:
                break
            seconds = clock.seconds(lambda: gqa_decode(*arguments, num_splits=num_splits, **options))  # noqa: B023
            tiles = -(-num_tiles // num_splits)
            waves = -(-(batch_size * num_kv_heads * -(-num_tiles // tiles)) // at_once)
            rows.append([waves * tiles, waves, num_splits, 1.0])
            times.append(seconds)
            tried.append(seconds)
        regrets.append(clock.seconds(lambda: gqa_decode(*arguments, **options)) / min(tried))  # noqa: B023
    if len(rows) < 8:
        return {"measured": len(rows)}
    # Relative errors count, or the longest runs alone would decide.
    weights = 1 / torch.tensor(times, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) * weights[:, None]
    per_tile, per_wave, per_split, constant = torch.linalg.lstsq(matrix, torch.ones(len(rows), 1).double()).solution[
        :, 0
    ]
    return {
        "measured": len(rows),
        "microseconds_per_tile": per_tile.item() * 1e6,
        "program_overhead_tiles": (per_wave / per_tile).item(),
        "merge_overhead_tiles": (per_split / per_tile).item(),
        "constant_microseconds": constant.item() * 1e6,
        "in_use": {
            "program_overhead_tiles": decode.PROGRAM_OVERHEAD.value,
            "merge_overhead_tiles": decode.MERGE_OVERHEAD.value,
        },
        "regret": {"worst": max(regrets), "median": statistics.median(regrets)},
    }


def first_token_times(run: Sizes, clock: Clock) -> dict[str, float]:
    """Seconds to the first token of a prompt, computed whole, and with all but its last page found in the cache."""
    from headfold.scripts.bench_cpu_decode import first_token_seconds

    prompt = torch.randint(2, 97, (1, run.prompt), device=run.device)
    return first_token_seconds(small_model(run), prompt, lambda call: clock.seconds(call, graph=False))


# ---------------------------------------------------------------------------------------------------- output


GOAL_CONTEXT, GOAL_SHARE = 32768, 0.9


def as_markdown(result: dict[str, Any]) -> str:
    """The page that people read, of whatever there is."""
    failed = [check for check in result["checks"] if not check["passed"]]
    bandwidth = result.get("copy_bytes_per_second")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"# Decode kernels on {result['device']}", ""]
    if result["is_toy"]:
        lines += ["Toy sizes in Triton's interpreter: the times mean nothing.", ""]
    lines += [
        f"{versions}. {len(result['checks'])} checks of results, {len(failed)} failed. "
        + (f"A copy moves {bandwidth / 1e12:.3f} TB/s, read and written together." if bandwidth else ""),
        "",
        *against_the_goal(result["points"]),
        "Times of peers are relative to ours: above 1, ours is faster.",
        "",
        "| H/G | context | batch | cache | page | us | share of copy bandwidth | peers (their time / ours) |",
        "|---|---:|---:|---|---|---:|---:|---|",
    ]
    for p in result["points"]:
        share = p["share_of_copy_bandwidth"]
        cells = [
            f"{p['num_heads']}/{p['num_kv_heads']}",
            p["context"],
            p["batch_size"],
            p["cache_dtype"],
            p["page_size"] or "contiguous",
            f"{p['microseconds']:.1f}",
            "" if share is None else f"{share:.3f}" if share >= 0.001 else f"{share:.1g}",
            "; ".join(f"{name} {us / p['microseconds']:.2f}" for name, us in p["peers"].items()),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", split_costs_in_words(result.get("split_costs") or {}), ""]
    first = result.get("first_token")
    if first:
        whole, found = (1000 * first[name] for name in ("whole_prompt_seconds", "prefix_found_seconds"))
        text = (
            f"First token of a prompt of {first['prompt_tokens']} tokens: {whole:.1f} ms computed whole, {found:.1f} ms"
        )
        lines += [f"{text} with all but its last page found in the cache.", ""]
    lines += [f"- {part} failed: {error}" for part, error in result["failed_parts"].items()]
    for check in failed:
        found = ", ".join(f"{name} {value}" for name, value in check.items() if name not in ("check", "passed"))
        lines.append(f"- failed check: {check['check']}" + (f" ({found})" if found else ""))
    late = sum(line.endswith(OUT_OF_TIME) for line in result["left_out"])
    lines += [f"- left out: {late} shapes or peers for lack of time, named in the JSON"] if late else []
    lines += [f"- left out: {line}" for line in result["left_out"] if not line.endswith(OUT_OF_TIME)]
    return "\n".join(lines) + "\n"


def against_the_goal(points: list[dict[str, Any]]) -> list[str]:
    """What the goal is, and how many of the shapes that it speaks of reach it; nothing if there are none."""
    long = [p for p in points if p["context"] >= GOAL_CONTEXT]
    shares = [p["share_of_copy_bandwidth"] for p in long if p["share_of_copy_bandwidth"] is not None]
    if not shares:
        return []
    compared = [p for p in long if p["peers"]]
    ahead = sum(p["microseconds"] < min(p["peers"].values()) for p in compared)
    reached = sum(share >= GOAL_SHARE for share in shares)
    return [
        f"The goal at contexts of {GOAL_CONTEXT} and more is {GOAL_SHARE} of the copy's bandwidth, and ahead of every "
        f"peer: {reached} of {len(shares)} such shapes reach that share (from {min(shares):.3f} to {max(shares):.3f}), "
        f"{ahead} of {len(compared)} that have peers are ahead of all of them.",
        "",
    ]


def split_costs_in_words(costs: dict[str, Any]) -> str:
    """The refitted split cost model beside the one in use."""
    if "regret" not in costs:
        return f"The split cost model was not refitted: {costs.get('measured', 0)} times were measured."
    regret = costs["regret"]
    names = {"program_overhead_tiles": "a program costs {} beside its own", "merge_overhead_tiles": "one more split {}"}
    parts = [f"{text.format(f'{costs[name]:.3g}')} (in use: {costs['in_use'][name]:g})" for name, text in names.items()]
    return (
        f"The split cost model, refitted over {costs['measured']} times, in tiles of "
        f"{costs['microseconds_per_tile']:.3g} us: {', '.join(parts)}. The number of splits that the kernel chooses "
        f"takes {regret['median']:.3g} of the best tried number's time in the median, {regret['worst']:.3g} at worst."
    )


class Report:
    """The result so far, and its files, written anew whenever there is more."""

    def __init__(self, directory: Path, **fields: Any) -> None:
        self.directory = directory
        self.start = time.monotonic()
        self.result: dict[str, Any] = {**fields, "checks": [], "points": [], "left_out": [], "failed_parts": {}}
        self._lock = threading.Lock()
        self.directory.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        with self._lock:
            self.result["seconds"] = time.monotonic() - self.start
            for name, text in (
                ("gpu_check.json", json.dumps(self.result, indent=1, default=str) + "\n"),
                ("gpu_check.md", as_markdown(self.result)),
            ):
                aside = self.directory / (name + ".partial")
                aside.write_text(text, encoding="utf-8")
                aside.replace(self.directory / name)

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Does a part of the check, tells how long it took, and survives it."""
        start = time.monotonic()
        value = None
        try:
            value = work()
        except Exception as error:
            traceback.print_exc()
            self.result["failed_parts"][name] = describe(error)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        self.save()
        return value

    def stop(self) -> None:
        """The watchdog's: something hangs, and what there is must not be lost with it."""
        self.result["failed_parts"]["everything after"] = "stopped by the watchdog"
        self.save()
        os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for gpu_check.json and gpu_check.md")
    parser.add_argument("--minutes", type=float, default=8.0, help="what it may take (default 8)")
    arguments = parser.parse_args()
    import triton

    run = sizes()
    report = Report(
        arguments.output,
        device=torch.cuda.get_device_name() if not run.is_toy else "CPU (interpreter)",
        is_toy=run.is_toy,
        versions={"torch": torch.__version__, "triton": triton.__version__} | peer_versions(),
    )
    result = report.result
    seconds = 60 * arguments.minutes
    watchdog = threading.Timer(0.97 * seconds, report.stop)
    watchdog.daemon = True
    watchdog.start()

    report.part("checks of results", lambda: result["checks"].extend(check_results(run, 0.4 * seconds)))
    clock = Clock(run)
    bandwidth = result["copy_bytes_per_second"] = report.part("copy", lambda: copy_bandwidth(run, clock))
    release(run)
    result["split_costs"] = report.part(
        "split costs", lambda: refit_split_costs(run, clock, report.start + 0.55 * seconds)
    )
    result["first_token"] = report.part("first token", lambda: first_token_times(run, clock))
    release(run)
    deadline = report.start + 0.9 * seconds
    report.part("grid", lambda: measure(run, clock, bandwidth, deadline, result["points"], result["left_out"]))
    watchdog.cancel()

    failed = [check["check"] for check in result["checks"] if not check["passed"]]
    print(
        f"{len(result['points'])} shapes in {result['seconds']:.0f} s, {len(failed)} of {len(result['checks'])} checks "
        f"failed {failed[:3]}, parts that failed: {list(result['failed_parts'])}"
    )
    return 1 if failed or result["failed_parts"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
