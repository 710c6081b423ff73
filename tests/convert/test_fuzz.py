"""Damaged checkpoints in process: no traceback, no hang, nothing run, read or written elsewhere, one line each."""

import io
import json
import os
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from headfold.convert import convert_checkpoint
from headfold.convert.check import check_checkpoint, verify_checkpoint
from headfold.convert.errors import HeadfoldError
from headfold.convert.header import TensorSpec, encode_header

HOSTILE_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["..", "/etc/passwd", "../config.json", "a\0b", "x" * 300, "model.safetensors", "\ud800", "a\nb", "\x1b[2J"]
    ),
    st.lists(st.integers(-2, 2**65), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)

# One edit of a file's bytes: where, how many bytes go, what comes instead.
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=12)), min_size=1, max_size=3)


def small_checkpoint() -> dict[str, bytes]:
    """The files of a two-shard Llama of 1 layer, 4 heads of 2 and hidden size 8, all zero."""
    module = "model.layers.0.self_attn"
    shapes = {f"{module}.{name}_proj.weight": (8, 8) for name in "qkvo"}
    shards = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": (5, 8), "lm_head.weight": (5, 8)},
        "model-00002-of-00002.safetensors": shapes,
    }
    files = {}
    weight_map = {}
    for file, tensors in shards.items():
        specs = [TensorSpec(name, "F32", shape) for name, shape in tensors.items()]
        header, _ = encode_header(specs, {"format": "pt"})
        files[file] = header + b"\0" * sum(spec.nbytes for spec in specs)
        weight_map.update(dict.fromkeys(tensors, file))
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 5,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 2,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "per_layer_config": {"0": {"num_key_value_heads": 4}},
    }
    files["config.json"] = json.dumps(config).encode()
    files["headfold.json"] = json.dumps({"method": "mean", "num_key_value_heads": {"before": 4, "after": 4}}).encode()
    files["README.md"] = b"---\nlicense: mit\n---\n<!-- headfold: begin -->\nold\n<!-- headfold: end -->\n# Model\n"
    return files


def pickled(files: dict[str, bytes], **options: bool) -> dict[str, bytes]:
    """The same checkpoint in one .bin file."""
    state = {name: tensor for file, data in files.items() if file in SHARDS for name, tensor in load(data).items()}
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    kept = {name: data for name, data in files.items() if name in ("config.json", "README.md", "headfold.json")}
    return {**kept, "pytorch_model.bin": buffer.getvalue()}


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = small_checkpoint()
PICKLED = [pickled(FILES), pickled(FILES, _use_new_zipfile_serialization=False)]

ELSEWHERE: list[str] = []
"""What has been run, or opened outside the directories that a conversion may use, while something was watched."""
WATCHED: list[Path] = []


def _watch(event: str, arguments: tuple) -> None:
    """An audit hook of Python: it sees every file that is opened and every process and connection that is started."""
    if not WATCHED:
        return
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect"):
        ELSEWHERE.append(f"{event} {arguments}")
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = Path(os.path.abspath(os.fsdecode(arguments[0])))
        inside = path.parts[len(WATCHED[0].parts)] if path.is_relative_to(WATCHED[0]) and path != WATCHED[0] else "in"
        if not inside.startswith(("in", "out")) or path == Path("/etc/passwd"):
            ELSEWHERE.append(str(path))


sys.addaudithook(_watch)


@st.composite
def edited_bytes(draw) -> dict[str, bytes]:
    files = dict(draw(st.sampled_from([FILES, FILES, *PICKLED])))
    name = draw(st.sampled_from(sorted(files)))
    data = files[name]
    for place, removed, inserted in draw(EDITS):
        start = int(place * len(data))
        data = data[:start] + inserted + data[start + removed :]
    return {**files, name: data}


@st.composite
def edited_json(draw) -> dict[str, bytes]:
    """A hostile value somewhere inside a header, the index or the config, with the file around it intact."""
    files = dict(FILES)
    name = draw(st.sampled_from(sorted(files.keys() - {"README.md"})))
    is_shard = name.endswith(".safetensors")
    size = struct.unpack("<Q", files[name][:8])[0] if is_shard else 0
    value = json.loads(files[name][8 : 8 + size] if is_shard else files[name])
    inner = value
    while True:
        key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or draw(st.booleans()):
            break
        inner = inner[key]
    if isinstance(inner, dict) and draw(st.booleans()):
        del inner[key]
    else:
        value_or_name = draw(HOSTILE_VALUES)
        if isinstance(inner, dict) and isinstance(value_or_name, str) and draw(st.booleans()):
            inner[value_or_name] = inner.pop(key)
        else:
            inner[key] = value_or_name
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    files[name] = struct.pack("<Q", len(data)) + data + files[name][8 + size :] if is_shard else data
    return files


def survives(directory: Path, files: dict[str, bytes]) -> None:
    source, output = directory / "in", directory / "out"
    source.mkdir(exist_ok=True)
    for path in source.iterdir():
        path.unlink()
    for name, data in files.items():
        (source / name).write_bytes(data)
    before = {path: path.read_bytes() for path in output.glob("*")}
    WATCHED.append(directory)
    try:
        for finding in check_checkpoint(source):
            assert finding.message.isprintable(), finding.message
        convert_checkpoint(source, output, num_key_value_heads=2, force=True)
        verify_checkpoint(output)
    except HeadfoldError as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 3000
        assert {path: path.read_bytes() for path in output.glob("*")} == before
    finally:
        WATCHED.clear()
    assert not ELSEWHERE
    assert {path.name for path in directory.iterdir()} <= {"in", "out", "config.json"}
    assert {path.name: path.read_bytes() for path in source.iterdir()} == files


def fuzz(directory: Path, examples: int) -> None:
    for strategy in (edited_bytes(), edited_json()):

        @settings(
            max_examples=examples // 2,
            deadline=5000,
            database=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(strategy)
        def run(files: dict[str, bytes]) -> None:
            survives(directory, files)

        run()


@pytest.fixture(autouse=True)
def _a_file_beside_the_checkpoint(tmp_path):
    """What a path with `..` would lead to."""
    (tmp_path / "config.json").write_text("{}")
    ELSEWHERE.clear()


@pytest.mark.parametrize("files", [FILES, *PICKLED])
def test_the_checkpoint_that_is_damaged_is_sound(tmp_path, files):
    survives(tmp_path, files)
    assert (tmp_path / "out" / "headfold.json").is_file()
    assert b"license: mit" in (tmp_path / "out" / "README.md").read_bytes()


def test_what_is_opened_elsewhere_is_seen(tmp_path):
    WATCHED.append(tmp_path)
    try:
        (tmp_path / "config.json").read_bytes()
        open("/etc/passwd", "rb").close()
        os.system("true")
    finally:
        WATCHED.clear()
    assert [str(tmp_path / "config.json"), "/etc/passwd"] == ELSEWHERE[:2] and len(ELSEWHERE) == 3
    ELSEWHERE.clear()


def test_a22_damaged_checkpoints_end_in_one_line(tmp_path):
    fuzz(tmp_path, 500)


@pytest.mark.slow
def test_a22_many_damaged_checkpoints_end_in_one_line(tmp_path):
    fuzz(tmp_path, 10_000)
