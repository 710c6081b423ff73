"""Documents from every kind of source; B9: what is empty is skipped and counted."""

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from headfold.convert.errors import CheckpointError, HeadfoldError, RefusedError
from headfold.convert.texts import load_tokenizer, read_documents, text_fingerprint


def write_jsonl(path, records):
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_b9_empty_blank_null_and_missing_texts_are_skipped_and_counted(tmp_path, name):
    records = [{"text": "one"}, {"text": ""}, {"text": " \n"}, {"text": None}, {"other": "x"}, {"text": "two\n"}]
    stream = read_documents(write_jsonl(tmp_path / name, records))
    assert list(stream) == ["one", "two\n"]
    assert (stream.num_documents, stream.num_skipped) == (2, 4)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("﻿first\r\nsecond é\n\nthird".encode())
    assert list(read_documents(tmp_path / "a.txt")) == ["first\r\nsecond é\n\nthird"]


def test_json_list_and_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.json").write_text(json.dumps(["one", {"text": "two"}, None]))
    assert list(read_documents(tmp_path / "a.json")) == ["one", "two"]
    table = pyarrow.table({"body": ["x", None, "", "y"], "text": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    stream = read_documents(tmp_path / "a.parquet", text_field="body")
    assert list(stream) == ["x", "y"] and stream.num_skipped == 2
    with pytest.raises(RefusedError, match=r"holds int where text is expected"):
        list(read_documents(tmp_path / "a.parquet"))
    with pytest.raises(RefusedError, match=r"no column 'nothing'.*'body', 'text'"):
        list(read_documents(tmp_path / "a.parquet", text_field="nothing"))


def test_directory_in_path_order_without_hidden_and_foreign_files(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("z")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\x89")
    assert list(read_documents(tmp_path)) == ["z", "b"]


def test_data_set_saved_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["one", "", "two"]})})
    data.save_to_disk(tmp_path / "saved")
    assert list(read_documents(tmp_path / "saved")) == ["one", "two"]
    with pytest.raises(RefusedError, match="no split 'test'; it has 'train'"):
        read_documents(tmp_path / "saved", split="test")


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nnot json\n')
    stream = read_documents(path)
    assert next(stream) == "one"
    with pytest.raises(RefusedError, match=r"line 2: not JSON"):
        next(stream)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt", b" \n ", "no text in it"),
        ("a.jsonl", b"", "no text in it"),
        ("a.jsonl", b'{"body": "x"}', "fields are 'body'"),
        ("a.jsonl", b"[1, 2]", "must be an object or a string"),
        ("a.jsonl", b"[" * 100_000, "not usable JSON|not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.txt.gz", gzip.compress(b"words " * 1000)[:-20], "cannot be read"),
        ("a.txt.gz", b"garbage", "cannot be read"),
        ("a.parquet", b"garbage", "not a readable parquet file"),
        ("a.bin", b"x", "not a kind of text"),
    ],
)
def test_b9_bad_sources_end_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RefusedError, match=message) as caught:
        list(read_documents(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nothing", "nothing.txt", "/nothing/at/all"])
def test_missing_paths_are_not_looked_up_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("headfold.convert.texts._hub_dataset", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(RefusedError, match="no such file"):
        read_documents(name)


def test_unknown_data_set_offline_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RefusedError, match="neither a file or directory") as caught:
        read_documents("someone/nothing-like-this")
    assert "\n" not in str(caught.value)


def test_empty_directory(tmp_path):
    with pytest.raises(RefusedError, match="no text files"):
        read_documents(tmp_path)


def test_fingerprint_follows_the_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"hello")
    assert text_fingerprint(path) == hashlib.sha256(b"hello").hexdigest()
    before = text_fingerprint(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"x")
    assert text_fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gguf_file": "../model.gguf"}, "gguf_file names another thing"),
        ({"gguf_file": "/etc/model.gguf"}, "gguf_file names another thing"),
        (
            {"fast_tokenizer_files": ["tokenizer.json", "../tokenizer.5.0.0.json"]},
            "fast_tokenizer_files names another thing",
        ),
        ({"gguf_file": ["x"]}, "no tokenizer that can be loaded"),
        ({"tokenizer_class": "GPT2Tokenizer", "vocab": "/a/v.json", "merges": "/a/m.txt"}, "vocab names another thing"),
        ({"tokenizer_class": "GPT2Tokenizer", "init_inputs": ["/a/v.json"]}, "init_inputs names another thing"),
        ({"tokenizer_class": "Nothing"}, "no tokenizer that can be loaded"),
        ([], "not a JSON object"),
    ],
)
def test_a_tokenizer_that_is_none_or_elsewhere_ends_in_one_line(tmp_path, config, message):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(HeadfoldError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_tokenizers_of_several_versions_in_the_directory_are_no_obstacle(tmp_path):
    shipped = Path(__file__).parents[2] / "recipes" / "quickstart"
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(shipped / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"], "gguf_file": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "tokenizer.4.0.0.json")
    assert load_tokenizer(tmp_path)("a text").input_ids == load_tokenizer(shipped)("a text").input_ids


def test_a_tokenizer_in_a_relative_or_linked_directory(tmp_path, monkeypatch):
    shipped = Path(__file__).parents[2] / "recipes" / "quickstart"
    shutil.copytree(shipped, tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    for path in ("model", "link", "model/../model"):
        assert load_tokenizer(Path(path))("a text").input_ids


def test_a_tokenizer_that_is_a_link_out_of_the_directory_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "in" / "model.gguf").symlink_to("../model.gguf")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "in" / "tokenizer_config.json").write_text('{"gguf_file": "model.gguf"}')
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        load_tokenizer(tmp_path / "in")
