"""Converting against copying: `headfold convert --method mean` beside `cp -r`, each with `sync`, on synthetic weights.

    python scripts/bench_convert.py --layers 32 --rounds 3 --directory /big/disk

makes a Llama-2-7B-shaped bfloat16 checkpoint (13.5 GB in three shards; fewer --layers scale it down), runs the two in
turn, and prints one JSON object: wall and CPU seconds of every round, the ratio of the wall seconds pair by pair, and
the peak resident size, as the operating system counted them. Needs about three times the checkpoint's size on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from headfold.convert.header import TensorSpec, encode_header

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS = 4096, 11008, 32000, 32
NUM_SHARDS = 3


def tensor_specs(num_layers: int) -> list[TensorSpec]:
    """The tensors of Llama 2 7B with this number of layers, in the order of its checkpoint."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        shapes.update({f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"})
        shapes.update({f"{layer}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")})
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)  # type: ignore[assignment]
        shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)  # type: ignore[assignment]
    shapes["model.norm.weight"] = (HIDDEN,)  # type: ignore[assignment]
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]


def write_checkpoint(path: Path, num_layers: int) -> int:
    """Writes the synthetic checkpoint, random numbers throughout; returns the bytes of its tensors."""
    import torch

    path.mkdir()
    block = memoryview(torch.randn(1 << 24).to(torch.bfloat16).view(torch.uint8).numpy().data)
    specs = tensor_specs(num_layers)
    total = sum(spec.nbytes for spec in specs)
    weight_map = {}
    shards: list[list[TensorSpec]] = [[] for _ in range(NUM_SHARDS)]
    written = 0
    for spec in specs:
        shards[min(NUM_SHARDS - 1, written * NUM_SHARDS // total)].append(spec)
        written += spec.nbytes
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        header, _ = encode_header(shard, {"format": "pt"})
        with (path / file).open("wb") as handle:
            handle.write(header)
            for spec in shard:
                for start in range(0, spec.nbytes, len(block)):
                    handle.write(block[: min(len(block), spec.nbytes - start)])
                weight_map[spec.name] = file
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return total


@dataclass(frozen=True)
class Run:
    """Wall seconds of a command and the `sync` after it; CPU seconds and peak resident bytes of the command alone."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def run(command: list[str]) -> Run:
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {process.returncode}")
    os.sync()
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="32: the full 13.5 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: the temporary directory")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        source, copy, converted = (Path(folder) / name for name in ("source", "copy", "converted"))
        total = write_checkpoint(source, arguments.layers)
        os.sync()
        convert = [sys.executable, "-m", "headfold.scripts", "convert", str(source), str(converted), "--method", "mean"]
        convert += ["--kv-heads", str(arguments.kv_heads)]
        torch_alone = run([sys.executable, "-c", "import torch"]).peak_bytes
        copies, conversions = [], []
        for _ in range(arguments.rounds):
            copies.append(run(["cp", "-r", str(source), str(copy)]))
            shutil.rmtree(copy)
            os.sync()
            conversions.append(run(convert))
            shutil.rmtree(converted)
            os.sync()
    largest = HIDDEN * HIDDEN * 2
    peak = max(conversion.peak_bytes for conversion in conversions)
    mean_seconds = statistics.fmean(conversion.seconds for conversion in conversions)
    ratios = [conversion.seconds / copied.seconds for copied, conversion in zip(copies, conversions, strict=True)]
    result = {
        "layers": arguments.layers,
        "checkpoint_bytes": total,
        "cp_and_sync_seconds": [round(copied.seconds, 2) for copied in copies],
        "convert_and_sync_seconds": [round(conversion.seconds, 2) for conversion in conversions],
        "convert_over_cp": round(statistics.median(ratios), 3),
        "cp_cpu_seconds": [round(copied.cpu_seconds, 2) for copied in copies],
        "convert_cpu_seconds": [round(conversion.cpu_seconds, 2) for conversion in conversions],
        "peak_resident_bytes": peak,
        "python_with_torch_resident_bytes": torch_alone,
        "peak_above_python_with_torch_bytes": peak - torch_alone,
        "largest_key_value_tensor_bytes": largest,
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "gigabytes_per_second": round(total / 1e9 / mean_seconds, 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
