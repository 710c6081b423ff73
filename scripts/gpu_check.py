"""One command for a GPU: are the decode kernels right on it, and how fast are they?

    python -m headfold.scripts.gpu_check --output docs/results

It checks results on the device, measures the bandwidth of a copy, then decode over a grid of shapes against it and
against torch's SDPA, FlexAttention and, where they are installed, FlashInfer and FlashAttention, refits the split cost
model, and writes gpu_check.json and gpu_check.md. It stops measuring after --minutes and says what it left out. The
caches are read
cold: the L2 cache is overwritten before every run. Kernels run under CUDA graphs, as in a decode loop.

Without a GPU it goes through all of it at toy sizes in Triton's interpreter, to show that it works; the times mean
nothing.

Shape letters: B sequences, S slots, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    pool_bytes: int  # of the buffer that caches are cut from; larger caches are left out
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
        self._flush = torch.empty(256 << 20 if not run.is_toy else 1, dtype=torch.uint8, device=run.device)

    def seconds(self, call: Callable[[], Any], *, graph: bool = True) -> float:
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
            self._flush.zero_()
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


def check_results(run: Sizes) -> list[dict[str, Any]]:
    """Errors against float64, beside those of plain torch in the same dtype; and what must hold exactly."""
    checks: list[dict[str, Any]] = []

    def record(name: str, passed: bool, **details: Any) -> None:
        checks.append({"check": name, "passed": bool(passed), **details})

    torch.manual_seed(0)
    lengths = [0, 5, 130, 700] if not run.is_toy else [0, 5, 70]
    head_dims = (64, 80, 128, 256) if not run.is_toy else (64,)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for cache_dtype in (str(dtype)[6:], *run.quantised):
            for head_dim in head_dims:
                for group_size, page_size, options in (
                    (1, None, {}),
                    (4, 16, {"window": 60}),
                    (8, 64, {"softcap": 5.0, "num_splits": 7}),
                    (20, 16, {"sinks": True}),
                ):
                    if run.is_toy and (group_size != 4 or dtype == torch.float32):
                        continue
                    call, reference = random_call(
                        run, lengths, group_size * 2, 2, head_dim, dtype, cache_dtype, page_size, options
                    )
                    found = call()[0].double()
                    exact = reference(torch.float64).double()
                    plain = reference(dtype).double()
                    factor = 4 if is_quantised(cache_dtype) else 2
                    error, plain_error = ((x - exact).abs().max().item() for x in (found, plain))
                    floor = torch.finfo(dtype).eps / 2 * exact.abs().max().item()
                    name = f"{dtype} over {cache_dtype}, D {head_dim}, group {group_size}, page {page_size}, {options}"
                    limit = factor * plain_error + floor
                    record(name, error <= limit, error=error, plain_error=plain_error)

    call, _ = random_call(run, lengths, 8, 2, 64, torch.float16, "int8", 16, {})
    record("two runs agree to the last bit", torch.equal(call()[0], call()[0]))
    checks += [check_append(run), check_large_cache(run), check_graph_replay(run)]
    return checks


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
    """A call of `gqa_decode` on random values, and the same by the reference in any dtype. Unused slots hold NaN."""
    page = page_size or 1
    pages_each = -(-(max(lengths) + 1) // page)
    size = (len(lengths), pages_each * page, num_kv_heads, head_dim)
    q = torch.randn(len(lengths), num_heads, head_dim, device=run.device).to(dtype)
    k, v = (torch.randn(size, device=run.device) for _ in range(2))
    arguments: dict[str, Any] = {name: value for name, value in options.items() if name != "sinks"}
    if "sinks" in options:
        arguments["sinks"] = torch.randn(num_heads, device=run.device)
    if is_quantised(cache_dtype):
        scales = [token_scale(x, cache_dtype) for x in (k, v)]
        k, v = (quantise(x, scale[..., None], cache_dtype) for x, scale in zip((k, v), scales, strict=True))
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
    else:
        k, v = k.to(dtype), v.to(dtype)
        for b, length in enumerate(lengths):
            k[b, length:], v[b, length:] = torch.nan, torch.nan
    if page_size is not None:
        order = torch.randperm(len(lengths) * pages_each, device=run.device)

        def paged(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x.unflatten(1, (pages_each, page)).flatten(0, 1))
            out[order] = x.unflatten(1, (pages_each, page)).flatten(0, 1)
            return out

        k, v = paged(k), paged(v)
        for name in ("k_scale", "v_scale"):
            if name in arguments:
                arguments[name] = paged(arguments[name])
        arguments["block_table"] = order.view(len(lengths), pages_each).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=run.device)

    def reference(in_dtype: torch.dtype) -> torch.Tensor:
        return decode_in_dtype(in_dtype, q, k, v, seq_lens, **arguments)[0]

    return lambda: gqa_decode(q, k, v, seq_lens, return_lse=True, **arguments), reference


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
        "check": "a cache beyond 2^31 elements",
        "passed": error < 5e-3,
        "error": error,
        "elements": caches[0].numel(),
    }


def check_graph_replay(run: Sizes) -> dict[str, Any]:
    """A decode loop, which replays one CUDA graph over growing lengths, gives the tokens of generate."""
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
    return {"check": "a decode loop under a CUDA graph gives generate's tokens", "passed": agreed}


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
    share_of_copy_bandwidth: float = math.nan
    peers: dict[str, float] = field(default_factory=dict)


class Pool:
    """One buffer from which every cache is cut, filled once with bytes that are sound numbers in every dtype."""

    def __init__(self, run: Sizes) -> None:
        self.run = run
        self._bytes = torch.randint(0, 0x3C, (run.pool_bytes,), dtype=torch.uint8, device=run.device)

    def fits(self, point: Point) -> bool:
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
    """Calls of other libraries that compute the same, by name. Each is left out where it cannot."""
    q, k, v, seq_lens = arguments
    found: dict[str, Any] = {}
    if is_quantised(point.cache_dtype):
        return found
    scale = run.head_dim**-0.5
    table = options.get("block_table")
    if table is None:
        k_bgsd, v_bgsd = k.transpose(1, 2), v.transpose(1, 2)
        packed = q.view(point.batch_size, point.num_kv_heads, -1, run.head_dim)
        attend = torch.nn.functional.scaled_dot_product_attention
        found["torch SDPA, enable_gqa"] = lambda: attend(q[:, :, None], k_bgsd, v_bgsd, scale=scale, enable_gqa=True)
        found["torch SDPA, packed"] = lambda: attend(packed, k_bgsd, v_bgsd, scale=scale)
        if not run.is_toy and (point.context, point.batch_size) in ((32768, 8), (131072, 1)):  # compiles for each shape
            from torch.nn.attention.flex_attention import flex_attention

            flex = torch.compile(flex_attention, dynamic=False)
            found["FlexAttention"] = lambda: flex(q[:, :, None], k_bgsd, v_bgsd, scale=scale, enable_gqa=True)
    if run.is_toy:
        return found
    if importlib.util.find_spec("flash_attn_interface"):
        from flash_attn_interface import flash_attn_with_kvcache as flash_3

        paging = {} if table is None else {"page_table": table}
        found["FlashAttention 3"] = lambda: flash_3(q[:, None], k, v, cache_seqlens=seq_lens, causal=True, **paging)
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_with_kvcache as flash_2

        if table is None or point.page_size == 256:
            found["FlashAttention 2"] = lambda: flash_2(q[:, None], k, v, cache_seqlens=seq_lens, causal=True)
    if importlib.util.find_spec("flashinfer") and table is not None:
        import flashinfer

        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=run.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        starts = torch.arange(point.batch_size + 1, dtype=torch.int32, device=run.device) * table.shape[1]
        last = torch.full_like(seq_lens, (point.context - 1) % k.shape[1] + 1)
        sizes = (point.num_heads, point.num_kv_heads, run.head_dim, k.shape[1])
        wrapper.plan(starts, table.flatten(), last, *sizes, q_data_type=q.dtype, kv_data_type=k.dtype)
        found["FlashInfer"] = lambda: wrapper.run(q, (k, v))
    return found


def measure(run: Sizes, clock: Clock, bandwidth: float, deadline: float) -> tuple[list[Point], list[str]]:
    """The grid within the time; and what was left out, with the reason."""
    pool = Pool(run)
    measured, left_out = [], []
    for point in points(run):
        name = (
            f"{point.num_heads}/{point.num_kv_heads}, context {point.context}, batch {point.batch_size}, "
            f"{point.cache_dtype}, page {point.page_size}"
        )
        if not pool.fits(point):
            left_out.append(f"{name}: the cache does not fit")
            continue
        if time.monotonic() > deadline:
            left_out.append(f"{name}: out of time")
            continue
        arguments, options = pool.arguments(point)
        seconds = clock.seconds(lambda: gqa_decode(*arguments, **options))  # noqa: B023
        point.microseconds = seconds * 1e6
        point.share_of_copy_bandwidth = point.bytes_read / seconds / bandwidth
        for peer, call in peers(run, point, arguments, options).items():
            try:
                point.peers[peer] = clock.seconds(call) * 1e6
            except Exception as error:  # a peer that cannot is no reason to stop
                left_out.append(f"{name}: {peer}: {type(error).__name__}: {str(error)[:120]}")
        measured.append(point)
    return measured, left_out


def refit_split_costs(run: Sizes, clock: Clock, deadline: float) -> dict[str, Any]:
    """Times over numbers of splits, fitted to  tile x (waves x (tiles + overhead) + merge x splits) + constant.

    `regret` is the time with splits chosen by the kernel over the best of the tried numbers, worst and median.
    """
    from headfold.kernels import decode

    pool = Pool(run)
    rows, times, regrets = [], [], []
    shapes = [(b, g, s) for b in (1, 4, 16) for g in (1, 8) for s in (2048, 16384, 65536)]
    for batch_size, num_kv_heads, context in shapes if not run.is_toy else [(1, 1, 200), (2, 1, 300)]:
        if time.monotonic() > deadline:
            break
        point = Point(num_kv_heads * 4, num_kv_heads, context, batch_size, run.cache_dtypes[0], 64, 0)
        arguments, options = pool.arguments(point)
        tile = decode.tile_for("sm_90", run.head_dim, 4, arguments[0].dtype, point.cache_dtype)
        device_class, num_sms = decode._device(run.device)
        at_once = (
            num_sms
            * decode.tile_for(device_class, run.head_dim, 4, arguments[0].dtype, point.cache_dtype).programs_per_sm
        )
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
    model = small_model(run)
    prompt = torch.randint(2, 97, (1, run.prompt), device=run.device)
    cache = PagedKVCache(
        model.config, num_sequences=1, max_tokens=run.prompt + 16, dtype=model.dtype, device=run.device
    )
    loop = DecodeLoop(model, cache)

    def first_token() -> None:
        loop.prefill(prompt)
        cache.free(0)

    def hit() -> None:
        cache.attach(0, prompt[0].tolist())
        first_token()

    seconds = {"whole_prompt_seconds": clock.seconds(first_token, graph=False)}
    loop.prefill(prompt)
    cache.publish(0, prompt[0].tolist())
    cache.free(0)
    seconds["prefix_found_seconds"] = clock.seconds(hit, graph=False)
    return {"prompt_tokens": run.prompt, **seconds}


# ---------------------------------------------------------------------------------------------------- output


def as_markdown(result: dict[str, Any]) -> str:
    """The table that people read."""
    failed = [check for check in result["checks"] if not check["passed"]]
    lines = [
        f"# Decode kernels on {result['device']}",
        "",
        "Toy sizes in Triton's interpreter: the times mean nothing.\n" if result["is_toy"] else "",
        f"{len(result['checks'])} checks of results, {len(failed)} failed. "
        f"A copy moves {result['copy_bytes_per_second'] / 1e12:.3f} TB/s, read and written together.",
        "",
        "| H/G | context | batch | cache | page | us | share of copy bandwidth | peers (their time / ours) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in result["points"]:
        cells = [
            f"{p['num_heads']}/{p['num_kv_heads']}",
            p["context"],
            p["batch_size"],
            p["cache_dtype"],
            p["page_size"] or "contiguous",
            f"{p['microseconds']:.1f}",
            f"{p['share_of_copy_bandwidth']:.3f}",
            ", ".join(f"{name} {us / p['microseconds']:.2f}" for name, us in p["peers"].items()),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", f"Split cost model: `{json.dumps(result['split_costs'])}`", ""]
    lines += [f"First token: `{json.dumps(result['first_token'])}`", ""]
    lines += [f"- failed: {check}" for check in failed]
    lines += [f"- left out: {line}" for line in result["left_out"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for gpu_check.json and gpu_check.md")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop measuring (default 8)")
    arguments = parser.parse_args()
    start = time.monotonic()
    deadline = start + 60 * arguments.minutes * 0.9

    import triton

    run = sizes()
    clock = Clock(run)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if not run.is_toy else "CPU (interpreter)",
        "is_toy": run.is_toy,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
    result["checks"] = check_results(run)
    print(f"{len(result['checks'])} checks after {time.monotonic() - start:.0f} s", flush=True)
    result["copy_bytes_per_second"] = bandwidth = copy_bandwidth(run, clock)
    result["first_token"] = first_token_times(run, clock)
    result["split_costs"] = refit_split_costs(run, clock, start + 0.3 * (deadline - start))
    measured, left_out = measure(run, clock, bandwidth, deadline)
    result |= {"points": [vars(point) for point in measured], "left_out": left_out}
    result["seconds"] = time.monotonic() - start

    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.output / "gpu_check.md").write_text(as_markdown(result), encoding="utf-8")
    failed = [check["check"] for check in result["checks"] if not check["passed"]]
    print(f"{len(measured)} shapes in {result['seconds']:.0f} s, {len(failed)} checks failed {failed[:3]}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
