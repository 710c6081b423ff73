"""Reading and writing checkpoint directories: A7, A8, A21, A22."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headfold.convert.checkpoint import Checkpoint, CheckpointWriter, load_config, read_record, resolve_model
from headfold.convert.errors import CheckpointError, HeadfoldError, RefusedError
from headfold.convert.files import copy_bytes
from headfold.convert.header import DTYPE_BITS

CONFIG = {"model_type": "llama", "zebra": 1, "hidden_size": 8, "unknown": {"b": 1.5, "a": None}}


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 4, generator=generator).to(torch.bfloat16),
        "b.weight": torch.randn(8, 4, generator=generator),
        "c.bias": torch.randn(5, generator=generator).half(),
        "d.count": torch.tensor(3),
        "e.empty": torch.zeros(0, 4),
    }


def write_single(path: Path, **changes) -> Path:
    path.mkdir()
    save_file({**tensors(), **changes}, path / "model.safetensors", metadata={"format": "pt", "note": "kept"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def write_sharded(path: Path, num_shards: int = 3) -> Path:
    path.mkdir()
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        save_file({f"layer.{number}.{name}": tensor for name, tensor in tensors().items()}, path / file)
        weight_map.update({f"layer.{number}.{name}": file for name in tensors()})
    total = num_shards * sum(tensor.numel() * tensor.element_size() for tensor in tensors().values())
    index = {"metadata": {"total_size": total, "kept": True}, "weight_map": dict(reversed(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def raw_file(header, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def copy_of(source: Path, output: Path, **kwargs) -> None:
    checkpoint = Checkpoint.open(source)
    with CheckpointWriter(checkpoint, output, **kwargs) as writer:
        writer.finish(checkpoint.config, {"method": "none"})


@pytest.fixture(autouse=True)
def _no_attention_check(monkeypatch):
    """These checkpoints are no models; what the writer writes is judged here."""
    monkeypatch.setattr("headfold.convert.check.describe", lambda checkpoint: [])


def test_reading_whole_tensors_and_rows(tmp_path):
    checkpoint = Checkpoint.open(write_single(tmp_path / "a"))
    for name, tensor in tensors().items():
        assert torch.equal(checkpoint.read(name), tensor) and checkpoint.read(name).dtype == tensor.dtype
    assert torch.equal(checkpoint.read("b.weight", (2, 5)), tensors()["b.weight"][2:5])
    assert checkpoint.shards() == ["model.safetensors"]


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_a_copy_keeps_names_order_shards_dtypes_bytes_and_metadata(tmp_path, write):
    source = write(tmp_path / "in")
    (source / "tokenizer.json").write_bytes(b'{"x": 1}\n')
    (source / "modeling_own.py").write_bytes(b"raise SystemExit('ran')\n")
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_bytes(b"kept")
    copy_of(source, tmp_path / "out")
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "out")
    assert list(before.tensors) == list(after.tensors)
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name))
        assert before.tensors[name].file == after.tensors[name].file
    for file in ("tokenizer.json", "modeling_own.py", "sub/notes.txt"):
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()
    assert list(after.config.items()) == list(CONFIG.items())
    for shard in after.shards():
        assert after.metadata[shard] == {**before.metadata[shard], "format": "pt"}
        assert load_file(tmp_path / "out" / shard).keys() == load_file(source / shard).keys()
    if after.index is not None:
        assert list(after.index["weight_map"].items()) == list(before.index["weight_map"].items())
        assert after.index["metadata"] == before.index["metadata"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a7_new_shapes_give_a_new_index_and_total_size(tmp_path):
    source = write_sharded(tmp_path / "in")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["metadata"]["total_parameters"] = 1000
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(source)
    new = torch.full((2, 4), 7.0)
    shapes = {"layer.1.a.weight": (2, 4), "layer.2.c.bias": None}
    with CheckpointWriter(checkpoint, tmp_path / "out", shapes=shapes) as writer:
        writer.copy_unwritten(expected=["layer.1.a.weight"])
        writer.write("layer.1.a.weight", new[:1])
        writer.write("layer.1.a.weight", new[1:], first_row=1)
        writer.finish(checkpoint.config, {})
    after = Checkpoint.open(tmp_path / "out")
    assert torch.equal(after.read("layer.1.a.weight"), new.to(torch.bfloat16))
    assert "layer.2.c.bias" not in after.tensors and "layer.2.c.bias" not in after.index["weight_map"]
    assert after.index["metadata"]["total_size"] == after.total_bytes() == checkpoint.total_bytes() - 4 * 4 * 2 - 10
    assert after.index["metadata"]["total_parameters"] == 1000 - 16 - 5
    assert after.index["metadata"]["kept"] is True
    for name, entry in after.tensors.items():
        if name != "layer.1.a.weight":
            assert torch.equal(after.read(name), checkpoint.read(name))
        assert entry.start % (DTYPE_BITS[entry.dtype] // 8) == 0


def test_smaller_tensors_leave_all_others_aligned(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    header = {
        "a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    data = torch.arange(4).to(torch.bfloat16).view(torch.uint8).numpy().tobytes() + struct.pack("<2f", 1.5, 2.5)
    (source / "model.safetensors").write_bytes(raw_file(header, data))
    (source / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = Checkpoint.open(source)
    with CheckpointWriter(checkpoint, tmp_path / "out", shapes={"a": (3,)}) as writer:
        writer.write("a", torch.tensor([5.0, 6.0, 7.0]))
        writer.finish(checkpoint.config, {})
    after = Checkpoint.open(tmp_path / "out")
    assert after.tensors["b"].start % 4 == 0
    assert after.read("a").tolist() == [5, 6, 7] and after.read("b").tolist() == [1.5, 2.5]


def test_bin_files_come_out_as_safetensors(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    shared = torch.randn(4, 4)
    parts = [{"x": shared, "tied": shared, "column": torch.randn(4, 3).T}, {"y": torch.ones(2).bfloat16()}]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        torch.save(part, source / f"pytorch_model-0000{number}-of-00002.bin")
        weight_map.update(dict.fromkeys(part, f"pytorch_model-0000{number}-of-00002.bin"))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text(json.dumps(CONFIG))
    copy_of(source, tmp_path / "out")
    after = Checkpoint.open(tmp_path / "out")
    assert after.shards() == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(after.read(name), tensor)
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_bin_files_run_nothing(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"x": torch.ones(1), "evil": Evil()}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"not a file of weights alone \(.*mkdir") as caught:
        Checkpoint.open(source)
    assert "weights_only" not in str(caught.value)  # torch's message begins with how to load it all the same
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: [torch.ones(1)], "other things than named tensors"),
        (lambda: {"x": [torch.ones(1)]}, r"other things than named tensors \('x'\)"),
        (lambda: {1: torch.ones(1), "1": torch.zeros(1)}, r"other things than named tensors \(1\)"),
        (lambda: {"": torch.ones(1)}, r"other things than named tensors \(''\)"),
        (lambda: {"a\n\x1b[2J": torch.ones(1)}, r"other things than named tensors \('a\\n"),
        (lambda: {"__metadata__": torch.ones(1)}, r"other things than named tensors \('__metadata__'\)"),
        (lambda: {"x": torch.eye(3).to_sparse()}, "x is no plain tensor"),
        (lambda: {"x": torch.eye(3).to_sparse_csr()}, "x is no plain tensor"),
        (lambda: {"x": torch.empty(3, device="meta")}, "x is no plain tensor"),
        (lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "x is no plain tensor"),
        (lambda: {"x": torch.ones(1).expand(1, 10**13)}, "x is no plain tensor"),
        (lambda: {"x": torch.ones(3, dtype=torch.complex128)}, r"stored as torch\.complex128"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a22_bin_files_of_other_things_than_plain_tensors(tmp_path, state, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("metadata", [None, {}, "absent"])
def test_a8_metadata_may_be_missing_or_empty(tmp_path, metadata):
    source = tmp_path / "in"
    source.mkdir()
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    if metadata != "absent":
        header["__metadata__"] = metadata
    (source / "model.safetensors").write_bytes(raw_file(header, b"\0" * 4))
    (source / "config.json").write_text(json.dumps(CONFIG))
    copy_of(source, tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").metadata == {"model.safetensors": {"format": "pt"}}
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [0.0]


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"\0" * 7, "7 bytes are no safetensors file"),
        (b"garbage that is long enough to be read", "no safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "a header of 1,099,511,627,776 bytes"),
        (struct.pack("<Q", 1000) + b"{}", "truncated"),
        (raw_file(b"not json"), "not JSON"),
        (raw_file(b"[1]"), "not a JSON object"),
        (raw_file(b"[" * 100_000), "not JSON"),
        (raw_file(b"\xff\xfe"), "not JSON"),
        (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "not JSON"),
        (raw_file(b'{"a": 1, "a": 2}'), "'a' stands there twice"),
        (raw_file({"a": 1}), "dtype, shape or data_offsets is missing"),
        (raw_file({"a": {**ENTRY, "dtype": "F31"}}, b"\0" * 8), "dtype 'F31' is not known"),
        (raw_file({"a": {**ENTRY, "shape": [-1]}}, b"\0" * 8), "not a list of sizes"),
        (raw_file({"a": {**ENTRY, "shape": [True, 2]}}, b"\0" * 8), "not a list of sizes"),
        (raw_file({"a": {**ENTRY, "shape": [2**62] * 60}}, b"\0" * 8), "its offsets hold 8 bytes, which F32 of shape"),
        (raw_file({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"\0" * 8), "not two numbers in order"),
        (raw_file({"a": {**ENTRY, "data_offsets": [0, 8, 9]}}, b"\0" * 8), "not two numbers in order"),
        (raw_file({"a": {**ENTRY, "data_offsets": [0, 4]}}, b"\0" * 4), "its offsets hold 4 bytes, which F32 of shape"),
        (raw_file({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12), "overlap: b begins at byte 4"),
        (
            raw_file({"a": ENTRY, "b": {**ENTRY, "data_offsets": [9, 17]}}, b"\0" * 17),
            "leave a gap: b begins at byte 9",
        ),
        (raw_file({"a": {**ENTRY, "data_offsets": [1, 9]}}, b"\0" * 9), "leave a gap: a begins at byte 1"),
        (raw_file({"a": ENTRY}, b"\0" * 7), "truncated"),
        (raw_file({"a": ENTRY}, b"\0" * 9), "too long"),
        (raw_file({"a": ENTRY, "__metadata__": {"x": 1}}, b"\0" * 8), "not a table of strings"),
        (raw_file(b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}"), "nested more than 100 levels deep"),
        (raw_file({"": ENTRY}, b"\0" * 8), "not a usable name"),
        (raw_file({"a\nb\x1b[2J": ENTRY}, b"\0" * 8), "not a usable name"),
        (raw_file({"x" * 1_000_000: ENTRY}, b"\0" * 8), "not a usable name"),
    ],
)
def test_a22_damaged_safetensors_end_in_one_line(tmp_path, data, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "\n" not in str(caught.value) and "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": 7}', "no model_type"),
        ('{"a":' * 50_000, "not JSON"),
        *((f'{{"model_type": "llama", "a": {"[" * n}{"]" * n}}}', "deep") for n in (101, 450, 900)),
    ],
)
def test_a22_damaged_configs_end_in_one_line(tmp_path, config, message):
    source = write_single(tmp_path / "in")
    (source / "config.json").unlink()
    if config is not None:
        (source / "config.json").write_text(config)
    for read in (Checkpoint.open, load_config):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(source)
        assert "\n" not in str(caught.value)


def test_a22_directories_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="it holds no weights at all"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"found model\.gguf, which cannot be used"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="a file, not a checkpoint directory"):
        Checkpoint.open(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "name",
    ["nobody/has-this-model", "nothing", "./nothing", "a/b/c", "bad name", "x" * 5000, "a\0b", "~nobody-here/model"],
)
def test_a22_names_that_are_nowhere(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600 + len(name)
    with pytest.raises(CheckpointError):
        Checkpoint.open(name)


def test_a7_index_and_shards_are_compared_both_ways(tmp_path):
    source = write_sharded(tmp_path / "in", num_shards=4)
    index_file = source / "model.safetensors.index.json"
    good = json.loads(index_file.read_text())

    def problem(index) -> str:
        index_file.write_text(json.dumps(index))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(source)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def moved(name, file):
        return {**good, "weight_map": {**good["weight_map"], name: file}}

    name = "layer.0.a.weight"
    fewer = {key: file for key, file in good["weight_map"].items() if key != name}
    assert f"holds {name}, which" in problem({**good, "weight_map": fewer})
    assert "places ghost in" in problem(moved("ghost", good["weight_map"][name]))
    assert "which is no file of this directory" in problem(moved(name, "../model.safetensors"))
    assert "which is no file of this directory" in problem(moved(name, "/etc/passwd"))
    assert "which is no file of this directory" in problem(moved(name, 3))
    for file in ("a/../model-00001-of-00004.safetensors", "..", ".safetensors/", "C:\\x.safetensors", "config.json"):
        assert "which is no file of this directory" in problem(moved(name, file))
    assert len(problem(moved("x" * 1_000_000, good["weight_map"][name]))) < 1000
    assert "no weight_map" in problem({})
    without_shard = {k: f for k, f in good["weight_map"].items() if not f.startswith("model-00004")}
    assert "model-00004-of-00004.safetensors is not part of the model" in problem({**good, "weight_map": without_shard})
    index_file.write_text(json.dumps(good))
    save_file({"x": torch.ones(1)}, source / "model.safetensors")
    assert "both model.safetensors and model.safetensors.index.json" in problem(good)
    (source / "model.safetensors").unlink()
    for number in (2, 3):
        (source / f"model-0000{number}-of-00004.safetensors").unlink()
    assert "names 4 files of which 2 are missing, model-00002-of-00004.safetensors first" in problem(good)


def test_a7_a_wrong_total_size_is_a_warning(tmp_path):
    source = write_sharded(tmp_path / "in")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] = 5
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ["total_size is 5" in warning for warning in Checkpoint.open(source).warnings] == [True]
    copy_of(source, tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").warnings == []


def test_the_record_is_read_from_the_directory_alone(tmp_path, monkeypatch):
    source = write_single(tmp_path / "in")
    assert read_record(source) == {}
    (source / "headfold.json").write_text('{"method": "mean"}')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(source)
    assert read_record("in") == read_record(tmp_path / "link") == {"method": "mean"}
    for damaged in (b"[]", b"{", b"\xff", b'{"a":' * 400 + b"1" + b"}" * 400):
        (source / "headfold.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"headfold\.json"):
            read_record(source)
    (tmp_path / "secret").write_text("{}")
    (source / "headfold.json").unlink()
    (source / "headfold.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_record(source)


def test_a7_one_tensor_in_two_shards(tmp_path):
    source = write_sharded(tmp_path / "in", num_shards=2)
    shutil.copy(source / "model-00001-of-00002.safetensors", source / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"is stored in model-00001.* and in model-00002"):
        Checkpoint.open(source)


def test_a7_links_to_the_blobs_of_a_hub_cache_are_followed_and_no_others(tmp_path):
    files = write_single(tmp_path / "files")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(files.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    copy_of(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())

    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        source = write_single(tmp_path / f"linked_{name}")
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(files / "model.safetensors")
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            copy_of(source, tmp_path / "not_written")
    source = write_single(tmp_path / "linked_directory")
    (source / "sub").symlink_to(files)
    with pytest.raises(CheckpointError, match="a linked directory"):
        copy_of(source, tmp_path / "not_written")
    source = write_single(tmp_path / "dangling")
    (source / "config.json").unlink()
    (source / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError):
        Checkpoint.open(source)
    assert not (tmp_path / "not_written").exists()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "README.md", "tokenizer.json", "model.safetensors.index.json"]
)
def test_a22_a_pipe_or_a_device_in_place_of_a_file_does_not_hang(tmp_path, name):
    """Nor does it come to light only when everything else has been copied."""
    source = write_single(tmp_path / "in")
    if name.endswith("index.json"):
        (source / "model.safetensors").unlink()
    for make, message in ((os.mkfifo, "not a regular file"), (lambda path: path.symlink_to("/dev/zero"), "outside")):
        (source / name).unlink(missing_ok=True)
        make(source / name)
        with pytest.raises(CheckpointError, match=message):
            CheckpointWriter(Checkpoint.open(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "README.md", "headfold.json"])
def test_what_lies_beside_the_weights_is_looked_at_for_whoever_loads_the_model(tmp_path, name):
    """transformers follows links, and would wait for a pipe."""
    source = write_single(tmp_path / "in")
    (tmp_path / "secret").write_text("{}")
    for make, message in ((os.mkfifo, "not a regular file"), (lambda path: path.symlink_to("../secret"), "outside")):
        make(source / name)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(source)
        (source / name).unlink()
    (source / "notes").write_text("{}")
    (source / name).symlink_to("notes")
    Checkpoint.open(source)


def test_a22_names_of_files_do_not_reach_the_terminal_as_they_are(tmp_path):
    source = write_single(tmp_path / "in")
    for name in ("model-\x1b[2J\n.safetensors", os.fsdecode(b"\xff\n.txt")):
        (source / name).symlink_to("/etc/passwd")
        with pytest.raises(CheckpointError) as caught:
            CheckpointWriter(Checkpoint.open(source), tmp_path / "out")
        assert str(caught.value).isprintable()
        (source / name).unlink()


@pytest.mark.skipif(os.name == "nt", reason="names of files are bytes only elsewhere")
def test_a_file_whose_name_is_no_utf_8_is_copied(tmp_path):
    source = write_single(tmp_path / "in")
    name = os.fsdecode(b"caf\xe9.txt")
    (source / name).write_bytes(b"kept")
    copy_of(source, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == b"kept"


@pytest.mark.parametrize("reader", ["scandir", "exists"])
def test_a22_a_directory_that_may_not_be_read(tmp_path, monkeypatch, reader):
    source = write_single(tmp_path / "in")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(*((os, "scandir") if reader == "scandir" else (Path, "exists")), refuse)
    with pytest.raises(CheckpointError, match=r"cannot read it \(Permission denied\)"):
        Checkpoint.open(source)


def test_a_directory_inside_that_may_not_be_read_is_not_left_out(tmp_path, monkeypatch):
    source = write_single(tmp_path / "in")
    (source / "sub").mkdir()
    checkpoint, scandir = Checkpoint.open(source), os.scandir

    def refuse(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointError, match=r"sub: cannot read it \(Permission denied\)"):
        CheckpointWriter(checkpoint, tmp_path / "out")


def test_an_adapter_is_refused(tmp_path):
    source = write_single(tmp_path / "in")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="merge it into the model first"):
        Checkpoint.open(source)


def test_other_copies_of_the_weights_are_left_out(tmp_path):
    source = write_single(tmp_path / "in")
    for name in ("pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "m.gguf", "tf_model.h5"):
        (source / name).write_bytes(b"old")
    for name in ("pytorch_model.bin.index.json", "consolidated.safetensors.index.json", "flax_model.msgpack"):
        (source / name).write_bytes(b"old")
    kept = ["consolidated_scores.md", "pytorch_model_notes.txt", "tf_model.py"]  # called alike, but no weights
    for name in kept:
        (source / name).write_bytes(b"kept")
    (tmp_path / "elsewhere").mkdir()
    (source / ".cache").symlink_to(tmp_path / "elsewhere")  # hidden, so it is no part of the checkpoint
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    (source / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    copy_of(source, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".gitattributes",
        "README.md",
        "config.json",
        *kept[:1],
        "headfold.json",
        "model.safetensors",
        *kept[1:],
    ]


# ----------------------------------------------------------------------------------------- A21: outputs and accidents


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a21_output_equal_to_inside_or_around_the_input_is_refused(tmp_path):
    source = write_single(tmp_path / "in")
    before = files_of(tmp_path)
    (tmp_path / "link").symlink_to(source)
    for output, message in [
        (source, "the output is the input itself"),
        (tmp_path / "link", "the output is the input itself"),
        (tmp_path / "x" / ".." / "in", "the output is the input itself"),
        (source / "out", "the output is inside the input"),
        (tmp_path / "link" / "a" / "b", "the output is inside the input"),
        (tmp_path, "is inside the output"),
        (tmp_path.parent, "is inside the output"),
    ]:
        with pytest.raises(RefusedError, match=message):
            copy_of(source, output, force=True)
    assert files_of(tmp_path) == before


def test_a21_what_exists_is_replaced_only_with_force_and_only_if_it_is_a_checkpoint(tmp_path):
    source, output = write_single(tmp_path / "in"), tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("old")
    (output / "old_file").write_text("old")
    with pytest.raises(RefusedError, match="exists already"):
        copy_of(source, output)
    copy_of(source, output, force=True)
    assert not (output / "old_file").exists() and (output / "model.safetensors").is_file()

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("data")
    (tmp_path / "file").write_text("data")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for taken in ("home", "file", "link"):
        with pytest.raises(RefusedError):
            copy_of(source, tmp_path / taken, force=True)
    assert (tmp_path / "home" / "precious").read_text() == "data"


def test_a21_with_force_the_old_output_stands_until_the_new_one_is_complete(tmp_path):
    source, output = write_single(tmp_path / "in"), tmp_path / "out"
    copy_of(source, output)
    before = files_of(output)
    checkpoint = Checkpoint.open(source)
    with pytest.raises(RuntimeError, match="half-way"):  # noqa: SIM117
        with CheckpointWriter(checkpoint, output, force=True) as writer:
            writer.copy_unwritten(expected=["a.weight"])
            assert files_of(output) == before
            raise RuntimeError("half-way")
    assert files_of(output) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_a21_with_force_old_and_new_are_swapped_in_one_step(tmp_path, monkeypatch):
    source, output = write_single(tmp_path / "in"), tmp_path / "out"
    copy_of(source, output)
    (output / "old_file").write_text("old")
    monkeypatch.setattr(Path, "rename", lambda *names: pytest.fail(f"renamed: {names}"))
    copy_of(source, output, force=True)
    assert not (output / "old_file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a21_where_no_swap_is_possible_two_renames_do_and_an_error_between_them_is_undone(tmp_path, monkeypatch):
    source, output = write_single(tmp_path / "in"), tmp_path / "out"
    copy_of(source, output)
    (output / "old_file").write_text("old")
    before = files_of(output)
    monkeypatch.setattr("headfold.convert.checkpoint.exchange", lambda first, second: False)
    rename = Path.rename

    def interrupted(path, target):
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy_of(source, output, force=True)
    assert files_of(output) == before
    copy_of(source, output, force=True)
    assert not (output / "old_file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a21_what_a_kill_between_two_renames_left_is_put_in_order_by_the_next_run(tmp_path):
    source, output, left = write_single(tmp_path / "in"), tmp_path / "out", tmp_path / "out.replaced-0123abcd"
    copy_of(source, output)
    before = files_of(output)
    output.rename(left)
    with pytest.raises(RefusedError, match="exists already"):
        copy_of(source, output)
    assert files_of(output) == before and not left.exists()
    left.mkdir()
    (tmp_path / "out.replaced-by-me").mkdir()
    copy_of(source, output, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out.replaced-by-me"]


def test_a21_an_unsound_result_is_not_published(tmp_path, monkeypatch):
    source = write_single(tmp_path / "in")

    def find_fault(checkpoint):
        raise CheckpointError("unsound")

    monkeypatch.setattr("headfold.convert.check.describe", find_fault)
    with pytest.raises(CheckpointError, match="unsound"):
        copy_of(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a21_a_full_disk_is_refused_before_and_survived_during(tmp_path, monkeypatch):
    source = write_single(tmp_path / "in", big=torch.zeros(300_000))
    before = files_of(source)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(RefusedError, match=r"0\.00 GB are needed, 0\.00 GB are free"):
            copy_of(source, tmp_path / "out")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limit[1]))
    try:
        with pytest.raises(HeadfoldError, match="no room left") as caught:
            copy_of(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"] and files_of(source) == before


def test_a21_a_source_that_shrinks_while_it_is_read(tmp_path):
    source = write_single(tmp_path / "in", big=torch.zeros(300_000))
    checkpoint = Checkpoint.open(source)
    with (source / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(HeadfoldError, match="the source file ended early"):  # noqa: SIM117
        with CheckpointWriter(checkpoint, tmp_path / "out") as writer:
            writer.finish(checkpoint.config, {})
    with pytest.raises(HeadfoldError, match="the file ended early"):
        checkpoint.read("big")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a21_a_source_that_is_written_to_while_it_is_copied(tmp_path, replaced):
    source = write_single(tmp_path / "in")
    checkpoint = Checkpoint.open(source)
    with pytest.raises(HeadfoldError, match=r"model\.safetensors: was written to while it was copied") as caught:  # noqa: SIM117
        with CheckpointWriter(checkpoint, tmp_path / "out") as writer:
            data = (source / "model.safetensors").read_bytes()
            if replaced:
                (source / "model.safetensors").unlink()
            (source / "model.safetensors").write_bytes(data[:-1] + b"x")
            writer.finish(checkpoint.config, {})
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a21_read_only_input_is_no_obstacle(tmp_path):
    source = write_single(tmp_path / "in")
    for path in (*source.iterdir(), source):
        path.chmod(0o500 if path.is_dir() else 0o400)
    copy_of(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("writable")


KILLED = """
    import sys, time
    from headfold.convert import check
    from headfold.convert.checkpoint import Checkpoint, CheckpointWriter
    check.describe = lambda checkpoint: []
    source, output = sys.argv[1:]
    checkpoint = Checkpoint.open(source)
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy_unwritten(expected=["a.weight"])
        print("writing", flush=True)
        time.sleep(60)
"""


def test_a21_killed_while_writing_leaves_nothing_under_the_name_and_the_next_run_tidies_up(tmp_path):
    source = write_single(tmp_path / "in")
    before = files_of(source)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), source, tmp_path / "out"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    partial = [path for path in tmp_path.iterdir() if ".partial-" in path.name]
    assert len(partial) == 1
    copy_of(source, tmp_path / "out2")  # another output: the running one is left alone
    assert partial[0].exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists() and files_of(source) == before
    copy_of(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out2"]


def test_a_running_conversion_to_the_same_output_is_left_alone(tmp_path):
    source = write_single(tmp_path / "in")
    checkpoint = Checkpoint.open(source)
    with CheckpointWriter(checkpoint, tmp_path / "out") as first:
        copy_of(source, tmp_path / "out")
        assert first.partial.exists()
        with pytest.raises(RefusedError, match="exists already"):
            first.finish(checkpoint.config, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("missing", [["copy_file_range"], ["copy_file_range", "sendfile"]])
def test_copying_falls_back_where_the_kernel_cannot(tmp_path, monkeypatch, missing):
    source = write_single(tmp_path / "in", big=torch.arange(3_000_000))
    for name in missing:
        monkeypatch.delattr(os, name)
    copy_of(source, tmp_path / "out")
    assert torch.equal(Checkpoint.open(tmp_path / "out").read("big"), torch.arange(3_000_000))


def test_progress_counts_every_byte_once(tmp_path, monkeypatch):
    monkeypatch.setattr("headfold.convert.checkpoint._COPY_PIECE_BYTES", 100)
    source = write_single(tmp_path / "in", big=torch.arange(1000))
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def progress(done: int, total: int) -> None:
        assert lock.acquire(blocking=False), "called by two threads at once"
        time.sleep(0.0001)
        seen.append((done, total))
        lock.release()

    copy_of(source, tmp_path / "out", progress=progress)
    total = Checkpoint.open(source).total_bytes()
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert torch.equal(Checkpoint.open(tmp_path / "out").read("big"), torch.arange(1000))


@pytest.mark.parametrize("failing", [None, "headfold-copy", "MainThread"])
def test_the_thread_that_finishes_copies_what_the_others_have_not_begun(tmp_path, monkeypatch, failing):
    monkeypatch.setattr("headfold.convert.checkpoint._COPY_PIECE_BYTES", 1000)
    monkeypatch.setattr("headfold.convert.checkpoint._NUM_COPY_THREADS", 1)
    source = write_single(tmp_path / "in", big=torch.arange(1000))
    begun, helped = threading.Event(), threading.Event()
    starts: dict[str, list[int]] = {"MainThread": [], "headfold-copy": []}

    def copy(*args: object) -> None:
        name = threading.current_thread().name.partition("_")[0]
        starts[name].append(args[1])
        if name == "MainThread":
            helped.set()
        else:  # alone with its first piece until the other has come
            begun.set()
            assert helped.wait(60)
        if name == failing:
            raise OSError(5, "Input/output error")
        copy_bytes(*args)

    monkeypatch.setattr("headfold.convert.checkpoint.copy_bytes", copy)
    checkpoint = Checkpoint.open(source)
    with nullcontext() if failing is None else pytest.raises(HeadfoldError, match="Input/output error"):  # noqa: SIM117
        with CheckpointWriter(checkpoint, tmp_path / "out") as writer:
            writer.copy_unwritten()
            assert begun.wait(60)
            writer.finish(checkpoint.config, {})
    assert starts["MainThread"][0] > max(starts["headfold-copy"]), "from the end"
    if failing is None:
        assert torch.equal(Checkpoint.open(tmp_path / "out").read("big"), torch.arange(1000))
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
