"""Texts to tokens to rows, and the order of the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from headfold.convert.errors import RefusedError
from headfold.uptrain import data
from headfold.uptrain.data import IGNORED, PackedRows, document_positions, pack, rows_of_step, slice_of_rank

from .conftest import END_OF_TEXT, make_documents, make_tokenizer, write_jsonl


def pack_texts(folder: Path, tokenizer, *texts, length: int = 8, isolate: bool = True, **options) -> PackedRows:
    source = write_jsonl(folder / f"texts-{len(list(folder.iterdir()))}.jsonl", list(texts))
    options = {"name": "x", "sequence_length": length, "vocab_size": 320, **options}
    path = pack([str(source)], folder / "packed", tokenizer, **options)
    return PackedRows(path, length, isolate_documents=isolate)


def stream_of(rows: PackedRows) -> list[int]:
    """The token stream that the rows give back: inputs of all rows, and the last label."""
    batch = rows.batch(range(len(rows)))
    counted = batch.labels != IGNORED
    return [*batch.input_ids[counted].tolist(), batch.labels[counted][-1].item()]


def test_rows_hold_every_token_and_predict_each_once(tmp_path: Path, tokenizer):
    texts = make_documents(5)
    rows = pack_texts(tmp_path, tokenizer, *texts)
    expected = [0]
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        expected += [*ids, 0]
    assert stream_of(rows) == expected
    batch = rows.batch(range(len(rows)))
    assert batch.labels[batch.labels != IGNORED].tolist() == expected[1:]
    assert rows.file.num_tokens == len(expected) and rows.file.num_documents == 5


def test_a_tokenizer_with_a_beginning_token_gets_it_and_the_end_token(tmp_path: Path):
    tokenizer = make_tokenizer(begin_of_text=True)
    rows = pack_texts(tmp_path, tokenizer, "the king", "the road", length=4, isolate=False)
    first, second = tokenizer(["the king", "the road"], add_special_tokens=False)["input_ids"]
    assert stream_of(rows) == [1, *first, 0, 1, *second, 0]
    # isolated, the end of a document does not have to tell that another one begins
    isolated = PackedRows(next((tmp_path / "packed").glob("*.bin")), 4, isolate_documents=True)
    assert 1 in rows.batch(range(len(rows))).labels
    assert 1 not in isolated.batch(range(len(isolated))).labels


def test_special_tokens_of_the_template_are_not_doubled(tmp_path: Path):
    tokenizer = make_tokenizer(begin_of_text=True)
    assert data.document_tokens(tokenizer) == (1, 0)
    assert data.document_tokens(make_tokenizer()) == (0, None)


def test_b7_a_corpus_shorter_than_a_row_is_an_error_that_says_so(tmp_path: Path, tokenizer):
    with pytest.raises(RefusedError, match=r"tokens in all, less than one row of 65"):
        pack_texts(tmp_path, tokenizer, "The king saw the river.", length=64)


def test_b7_what_is_left_of_a_document_and_of_a_corpus_is_carried(tmp_path: Path, tokenizer):
    """40 documents that never end at the end of a row, and a tail: no token is lost, the tail is padded and ignored."""
    rows = pack_texts(tmp_path, tokenizer, *make_documents(40), length=50)
    assert (rows.file.num_tokens - 1) % 50 != 0
    assert len(stream_of(rows)) == rows.file.num_tokens
    last = rows.batch([len(rows) - 1])
    assert (last.labels != IGNORED).sum() == (rows.file.num_tokens - 1) % 50


def test_b9_empty_blank_null_and_missing_texts_are_skipped_and_counted(tmp_path: Path, tokenizer):
    path = tmp_path / "mixed.jsonl"
    records = [{"text": "The king saw the river."}, {"text": ""}, {"text": " \n\t"}, {"text": None}, {"title": "x"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, records[0]]), encoding="utf-8")
    packed = pack([str(path)], tmp_path / "p", tokenizer, name="x", sequence_length=4, vocab_size=320)
    file = PackedRows(packed, 4, isolate_documents=False).file
    assert (file.num_documents, file.num_skipped) == (2, 4)


def test_sources_are_taken_in_turn_until_the_budget_is_filled(tmp_path: Path, tokenizer):
    first = write_jsonl(tmp_path / "a.jsonl", ["king " * 10] * 50)
    second = write_jsonl(tmp_path / "b.jsonl", ["road " * 10] * 50)
    packed = pack(
        [str(first), str(second)], tmp_path, tokenizer, name="x", sequence_length=8, vocab_size=320, max_rows=20
    )
    rows = PackedRows(packed, 8, isolate_documents=False)
    text = tokenizer.decode(stream_of(rows))
    assert rows.file.num_tokens == 161 and len(rows) == 20
    assert abs(text.count("king") - text.count("road")) <= 10


def test_the_file_is_built_once_and_again_when_its_text_changes(tmp_path: Path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(5))

    def build() -> Path:
        return pack([str(source)], tmp_path / "p", tokenizer, name="x", sequence_length=8, vocab_size=320)

    first = build()
    stamp = first.stat().st_mtime_ns
    assert build() == first and first.stat().st_mtime_ns == stamp
    write_jsonl(source, make_documents(6))
    assert build() != first


def test_a_file_without_its_mark_is_built_anew(tmp_path: Path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(5))
    options = {"name": "x", "sequence_length": 8, "vocab_size": 320}
    path = pack([str(source)], tmp_path / "p", tokenizer, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    path.with_suffix(".json").unlink()
    assert pack([str(source)], tmp_path / "p", tokenizer, **options).read_bytes() == whole


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(5))
    with pytest.raises(RefusedError, match="embeddings for 100 tokens"):
        pack([str(source)], tmp_path, tokenizer, name="x", sequence_length=8, vocab_size=100)
    assert not list(tmp_path.glob("*.bin"))


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path):
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(RefusedError, match="end-of-text"):
        data.document_tokens(bare)


def test_positions_restart_with_every_document():
    tokens = np.array([[5, 6, 0, 7, 0, 0, 8, 9], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert document_positions(tokens, first_token=0).tolist() == [[0, 1, 0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]


# ------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize(("batch_rows", "num_rows"), [(4, 10), (7, 7), (3, 100), (8, 3)])
def test_every_epoch_visits_every_row_once_in_its_own_order(batch_rows: int, num_rows: int):
    num_steps = -(-3 * num_rows // batch_rows)
    drawn = [
        row for step in range(num_steps) for row in rows_of_step(step, batch_rows=batch_rows, num_rows=num_rows, seed=7)
    ]
    epochs = [drawn[start : start + num_rows] for start in range(0, 3 * num_rows, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if num_rows > 5:
        assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_never_changes_between_versions():
    """Saved runs rely on it: these numbers may not change."""
    assert rows_of_step(3, batch_rows=4, num_rows=1000, seed=11) == [47, 316, 73, 469]


def test_rows_of_a_step_do_not_depend_on_the_steps_before():
    direct = rows_of_step(1000, batch_rows=4, num_rows=37, seed=0)
    for step in range(1000):
        rows_of_step(step, batch_rows=4, num_rows=37, seed=0)
    assert rows_of_step(1000, batch_rows=4, num_rows=37, seed=0) == direct
    assert rows_of_step(1000, batch_rows=4, num_rows=37, seed=1) != direct


@given(num_rows=st.integers(1, 40), num_ranks=st.integers(1, 9))
def test_b4_slices_are_of_one_length_and_hold_each_row_once(num_rows: int, num_ranks: int):
    parts = [slice_of_rank(range(num_rows), rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(part) for part in parts}) == 1
    assert [row for part in parts for row in part if row is not None] == list(range(num_rows))


def test_a_row_that_fills_up_counts_for_nothing(tmp_path: Path, tokenizer):
    batch = pack_texts(tmp_path, tokenizer, *make_documents(3)).batch([None, 0])
    assert (batch.labels[0] == IGNORED).all() and (batch.labels[1] != IGNORED).all()


# ----------------------------------------------------------------------------------------------------- long documents


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """No words: a leading space is added and merges may cross what others take for words, as in Llama 2."""
    vocabulary = ["<unk>", END_OF_TEXT, "▁", *"abcdefgh", "ab", "cd", "abcd", "▁a", "aa", "aaaa", "b▁", "b▁a"]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("▁", "a"), ("a", "a"), ("aa", "aa"), ("b", "▁"), ("b", "▁a")]
    model = models.BPE({token: index for index, token in enumerate(vocabulary)}, merges, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, unk_token="<unk>")


TOKENIZERS = {"words": make_tokenizer(), "no words": sentencepiece_like()}


def in_pieces(tokenizer, text: str, piece: int, overlap: int) -> list[int]:
    pieces: Iterator[list[int]] = data.tokenize_in_pieces(tokenizer, text, piece=piece, overlap=overlap)
    return [token for ids in pieces for token in ids]


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    text=st.lists(
        st.sampled_from(["ab", "cd", "a", "aaaa", " ", "  ", "\n", "the king", " river", "é", "日本", "🐎", "'s", "12"])
    ).map("".join),
    piece=st.integers(40, 120),
    overlap=st.integers(8, 20),
)
def test_b10_pieces_give_the_tokens_of_the_whole(kind: str, text: str, piece: int, overlap: int):
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert in_pieces(tokenizer, text, piece, overlap) == whole


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("unit", ["a", " ", "aab", "abcd ", "🐎"])
def test_b10_repetition_does_not_mislead_the_seams(kind: str, unit: str):
    """A run whose tokens depend on where it is begun: windows that do not agree must not be joined."""
    tokenizer = TOKENIZERS[kind]
    for length in (997, 1000, 1003):
        text = "b" + unit * length
        assert in_pieces(tokenizer, text, 64, 16) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_b10_seams_are_checked_not_hoped_for(monkeypatch: pytest.MonkeyPatch):
    """With a cut that trusts the windows blindly, the test above would fail: the check does the work."""
    monkeypatch.setattr(data, "_agreed_cut", lambda left, right, low, high: (low + high) // 2)
    tokenizer, text = TOKENIZERS["no words"], "b" + "a" * 1000
    assert in_pieces(tokenizer, text, 65, 16) != tokenizer(text, add_special_tokens=False)["input_ids"]


def test_b10_a_tokenizer_without_places_gets_the_text_as_a_whole():
    class Slow:
        is_fast = False

        def __call__(self, text: str, **_) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

    assert in_pieces(Slow(), "abc" * 1000, 64, 16) == list(b"abc" * 1000)


PEAKS = """
import resource, sys
from pathlib import Path
from transformers import AutoTokenizer
from headfold.uptrain.data import pack

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for source in sys.argv[2:]:
    pack([source], Path(source).with_suffix(""), tokenizer, name="x", sequence_length=64, vocab_size=320)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_b10_a_document_of_20_mb_is_tokenized_in_bounded_memory(tmp_path: Path, tokenizer):
    """After 1 MB, 20 MB raise the peak of the process by little more than the text itself; no token is lost."""
    line = "The king saw the river, and the river was old.\n"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    per_line = len(tokenizer(line * 50, add_special_tokens=False)["input_ids"]) // 50
    sources = [tmp_path / "1.txt", tmp_path / "20.txt"]
    for source in sources:
        source.write_text(line * (int(source.stem) * 10**6 // len(line)), encoding="utf-8")
    command = [sys.executable, "-c", PEAKS, str(tmp_path / "tokenizer"), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 100 * 2**20
    rows = PackedRows(next((tmp_path / "20").glob("*.bin")), 64, isolate_documents=False)
    assert rows.file.num_tokens == per_line * (20 * 10**6 // len(line)) + 2


def test_batches_are_tensors_of_token_ids(tmp_path: Path, tokenizer):
    batch = pack_texts(tmp_path, tokenizer, *make_documents(3)).batch([0, 1])
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (2, 8)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
