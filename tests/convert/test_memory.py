"""Memory of a conversion, as the operating system counts it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headfold.convert.header import TensorSpec, encode_header

MIB = 1 << 20
HIDDEN, HEADS = 1024, 16

CONVERT = """
import sys
from headfold.convert import convert_checkpoint
convert_checkpoint(sys.argv[1], sys.argv[2], num_key_value_heads=4)
"""


def write_wide_checkpoint(path: Path) -> int:
    """Two shards of 96 MiB each: K and V of 2 MiB beside an embedding and an output layer of 64 MiB."""
    path.mkdir()
    module = "model.layers.{}.self_attn"
    weight_map = {}
    for number, wide in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        shapes = {f"{module.format(number)}.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {wide: (32 * HIDDEN, HIDDEN), f"model.layers.{number}.mlp.up_proj.weight": (12 * HIDDEN, HIDDEN)}
        specs = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
        file = f"model-{number + 1:05}-of-00002.safetensors"
        header, _ = encode_header(specs, {"format": "pt"})
        with (path / file).open("wb") as handle:
            handle.write(header)
            for spec in specs:
                for _ in range(spec.nbytes // MIB):
                    handle.write(b"\x01\x3c" * (MIB // 2))
        weight_map.update(dict.fromkeys(shapes, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "vocab_size": 32 * HIDDEN,
    }
    (path / "config.json").write_text(json.dumps(config))
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def peak_bytes(*command: str) -> int:
    process = subprocess.Popen([sys.executable, "-c", *command])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs os.wait4 for the peak resident size of a child")
def test_memory_stays_near_the_largest_key_value_tensor(tmp_path):
    size = write_wide_checkpoint(tmp_path / "in")
    assert size > 180 * MIB
    torch_alone = peak_bytes("import torch")
    converting = peak_bytes(CONVERT, str(tmp_path / "in"), str(tmp_path / "out"))
    # 2 MiB for K or V, 48 MiB for our own modules, pydantic and buffers; one wide tensor alone would be 64 MiB
    assert converting - torch_alone < 50 * MIB
    assert (tmp_path / "out" / "model-00002-of-00002.safetensors").stat().st_size < size // 2


COPY = """
import sys
import headfold.convert.conversion, headfold.scripts.main
from headfold.convert.check import verify_checkpoint
from headfold.convert.checkpoint import CheckpointWriter
from headfold.convert.families.remap import remap
checkpoint = remap(verify_checkpoint(sys.argv[1]))
with CheckpointWriter(checkpoint, sys.argv[2]) as writer:
    writer.copy_unwritten()
    writer.finish(checkpoint.config, {})
heavy = {"torch", "transformers", "triton", "numpy"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_copying_starts_before_torch_is_imported(tmp_path):
    write_wide_checkpoint(tmp_path / "in")
    subprocess.run([sys.executable, "-c", COPY, tmp_path / "in", tmp_path / "out"], check=True)
