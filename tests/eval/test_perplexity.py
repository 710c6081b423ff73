"""Which tokens are scored, on what context, and the numbers that come of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headfold.convert.errors import HeadfoldError, RefusedError
from headfold.eval.corpus import Corpus, Document, Window, plan_scoring, read_corpus, windows
from headfold.eval.perplexity import compare, sampling_units, score, summary
from headfold.eval.settings import EvalSettings

from .conftest import POSITIONS, make_model, make_tokenizer, sentence


def corpus_of(*documents: list[int], prefix: int | None = 0) -> Corpus:
    return Corpus([Document(0, ids) for ids in documents], [], prefix, "<s>", "")


def plan_of(path: Path, tokenizer: Any = None, max_positions: int = POSITIONS, **given: Any):
    tokenizer = tokenizer or make_tokenizer()
    return plan_scoring(EvalSettings(text=[str(path)], **given), [("model", tokenizer)], max_positions)


def reference_log_likelihood(model: Any, tokens: list[int], window: int, stride: int) -> float:
    """Token by token in float64, each on the context that the rule allows: no batches, no padding."""
    total = 0.0
    tokens = [0, *tokens]
    double = make_model(model.config.num_key_value_heads).double()
    double.load_state_dict(model.state_dict())
    end = min(window, len(tokens) - 1)
    for position in range(1, len(tokens)):
        if position > end:
            end = min(end + stride, len(tokens) - 1)
        start = max(0, end - window)
        with torch.no_grad():
            logits = double(torch.tensor([tokens[start:position]])).logits[0, -1]
        total += logits.log_softmax(-1)[tokens[position]].item()
    return total


@given(
    length=st.integers(1, 70),
    window=st.integers(2, 24),
    stride=st.integers(1, 24),
    bos=st.sampled_from(["document", "window"]),
)
@settings(max_examples=150, deadline=None)
def test_each_token_is_scored_once_on_enough_context(length: int, window: int, stride: int, bos: str) -> None:
    stride = min(stride, window)
    tokens = list(range(100, 100 + length))
    cut = list(windows(corpus_of(tokens), window=window, stride=stride, bos=bos))
    assert [token for each in cut for token in each.targets] == tokens
    for number, each in enumerate(cut):
        assert 1 <= len(each.targets) <= len(each.input_ids) <= window
        stream = [*each.input_ids, each.targets[-1]]
        assert stream[-len(each.targets) :] == each.targets
        body = stream[1:] if number == 0 or bos == "window" else stream
        assert body == list(range(body[0], body[0] + len(body)))
        assert (stream[0] == 0) == (number == 0 or bos == "window")
        if number:
            assert len(each.targets) <= stride and len(each.input_ids) == window


@given(length=st.integers(1, 90), window=st.integers(2, 20), context=st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_windows_are_those_of_lm_eval(length: int, window: int, context: int) -> None:
    """lm-eval's rolling windows, for every context length: the stride is window - context_len + 1."""
    utils = pytest.importorskip("lm_eval.utils")
    context = min(context, window)
    tokens = list(range(100, 100 + length))
    theirs = list(utils.get_rolling_token_windows(tokens, prefix_token=0, max_seq_len=window, context_len=context))
    ours = list(windows(corpus_of(tokens), window=window, stride=window - context + 1, bos="document"))
    assert [(each.input_ids, each.targets) for each in ours] == theirs


def test_perplexity_agrees_with_lm_eval(text: Path) -> None:
    """The rolling rule gives lm-eval's own loglikelihood_rolling to 1e-4 relative, document by document."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    model, tokenizer = make_model(2), make_tokenizer()
    plan = plan_of(text)
    ours = score([model], ["m"], plan.windows, batch_tokens=256)[0]
    document = np.array([window.document for window in plan.windows])
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    documents = [each for each in documents if each]
    theirs = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1).loglikelihood_rolling(
        [
            Instance(request_type="loglikelihood_rolling", doc={}, arguments=(each,), idx=index)
            for index, each in enumerate(documents)
        ],
        disable_tqdm=True,
    )
    assert max(len(ids) for ids in (make_tokenizer()(each)["input_ids"] for each in documents)) > 2 * POSITIONS
    np.testing.assert_allclose([ours[document == i].sum() for i in range(len(documents))], theirs, rtol=1e-4)


@pytest.mark.parametrize("stride", [16, 5])
def test_log_likelihood_is_that_of_each_token_alone(stride: int) -> None:
    model = make_model(1)
    tokens = torch.randint(2, 320, (53,), generator=torch.Generator().manual_seed(0)).tolist()
    cut = list(windows(corpus_of(tokens), window=16, stride=stride, bos="document"))
    ours = score([model], ["m"], cut, batch_tokens=64)[0].sum()
    assert ours == pytest.approx(reference_log_likelihood(model, tokens, 16, stride), rel=1e-5)


def test_all_units_of_a_uniform_model() -> None:
    """A model that gives each of V tokens the same probability has perplexity V per token, whatever the text."""
    model = make_model(2)
    torch.nn.init.zeros_(model.lm_head.weight)
    tokens = list(range(2, 52))
    cut = list(windows(corpus_of(tokens), window=32, stride=32, bos="document"))
    total = score([model], ["m"], cut, batch_tokens=64)[0].sum()
    result = summary("before", total, num_tokens=50, num_words=20, num_bytes=100)
    assert result.per_token == pytest.approx(320)
    assert result.per_word == pytest.approx(320**2.5)
    assert result.per_byte == pytest.approx(320**0.5)
    assert result.bits_per_byte == pytest.approx(math.log2(320) / 2)
    assert result.nats_per_token == pytest.approx(math.log(320))


def test_words_without_spaces_have_no_perplexity_rather_than_an_infinite_one() -> None:
    assert summary("before", -9000.0, num_tokens=1000, num_words=1, num_bytes=3000).per_word is None


# ---------------------------------------------------------------------------------------------------------------- C1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_c1_bos_is_there_once_whatever_the_tokenizer_does_by_itself(tmp_path: Path, adds_bos: bool) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat")
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    assert (tokenizer("the cat sat")["input_ids"][0] == 0) == adds_bos  # the trap is set
    plan = plan_of(path, tokenizer)
    assert plan.windows[0].input_ids.count(0) == 1 and plan.windows[0].input_ids[0] == 0
    assert 0 not in plan.windows[0].targets
    assert (plan.bos, plan.corpus.prefix_token) == ("document", "<s>")


def test_c1_a_text_that_spells_out_bos_does_not_get_two(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("<s>the cat sat")
    assert plan_of(path).windows[0].input_ids.count(0) == 1


def test_c1_eos_stands_in_and_without_either_the_first_token_is_context(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on a mat")
    assert plan_of(path, make_tokenizer(bos_token=None)).windows[0].input_ids[0] == 1
    tokenizer = make_tokenizer(bos_token=None, eos_token=None)
    plan = plan_of(path, tokenizer)
    ids = tokenizer("the cat sat on a mat")["input_ids"]
    assert plan.bos == "none"
    assert plan.windows == [Window(0, ids[:-1], ids[1:])]


def test_c1_both_sides_get_the_same_prefix(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat")
    tokenizers = [("first", make_tokenizer()), ("second", make_tokenizer(bos_token=None))]
    with pytest.raises(RefusedError, match=r"first begins documents with <s> \(0\), second with </s> \(1\)"):
        plan_scoring(EvalSettings(text=[str(path)]), tokenizers, POSITIONS)


# ---------------------------------------------------------------------------------------------------------------- C3


def test_c3_different_tokenizers_are_refused_on_the_text_itself(text: Path) -> None:
    tokenizers = [("first", make_tokenizer()), ("second", make_tokenizer(num_merges=40))]
    with pytest.raises(RefusedError, match=r"first and second tokenise the text differently \(\d+ and \d+ tokens\)"):
        plan_scoring(EvalSettings(text=[str(text)]), tokenizers, POSITIONS)


def test_c3_windows_and_strides_that_cannot_be_are_refused(text: Path) -> None:
    with pytest.raises(RefusedError, match=r"window: 65 tokens are more than .* 64"):
        plan_of(text, window=65)
    with pytest.raises(RefusedError, match="stride: 33 tokens are more than the window of 32"):
        plan_of(text, window=32, stride=33)


def test_c3_the_hash_is_of_what_was_scored(text: Path) -> None:
    whole, again, part = plan_of(text), plan_of(text), plan_of(text, max_text_tokens=300)
    assert whole.corpus.sha256 == again.corpus.sha256 != part.corpus.sha256
    assert whole.corpus.texts[0].sha256 == part.corpus.texts[0].sha256  # of the file


def test_text_is_cut_at_a_word_and_counted_as_cut(text: Path) -> None:
    corpus = read_corpus(EvalSettings(text=[str(text)], max_text_tokens=300), make_tokenizer())
    record = corpus.texts[0]
    assert 280 < record.num_tokens <= 300
    assert sum(len(document.token_ids) for document in corpus.documents) == record.num_tokens
    decoded = [make_tokenizer().decode(document.token_ids) for document in corpus.documents]
    assert sum(len(each.split()) for each in decoded) == record.num_words
    assert sum(len(each.encode()) for each in decoded) == record.num_bytes


def test_empty_documents_are_skipped_and_counted(text: Path) -> None:
    record = plan_of(text).corpus.texts[0]
    assert (record.num_documents, record.num_skipped) == (40, 2)


# -------------------------------------------------------------------------------------------------------- C4, C6, C7


def test_c4_a_document_scores_the_same_in_any_company() -> None:
    """Documents of 5 and 500 tokens, together and alone, in windows of all lengths."""
    model = make_model(2)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(2, 320, (length,), generator=generator).tolist() for length in (5, 500, 17, 63, 64, 65)]
    cut = list(windows(corpus_of(*documents), window=POSITIONS, stride=POSITIONS, bos="document"))
    together = score([model], ["m"], cut, batch_tokens=4096)[0]
    alone = np.array([score([model], ["m"], [each], batch_tokens=1)[0, 0] for each in cut])
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_c6_text_past_the_models_positions_is_windowed(tmp_path: Path) -> None:
    """One document of many times max_position_embeddings: no window is longer, and every token counts."""
    path = tmp_path / "long.txt"
    path.write_text(sentence(0, 600))
    plan = plan_of(path)
    num_tokens = len(make_tokenizer()(path.read_text())["input_ids"])
    assert num_tokens > 5 * POSITIONS and plan.window == POSITIONS
    assert max(len(each.input_ids) for each in plan.windows) == POSITIONS
    assert sum(len(each.targets) for each in plan.windows) == num_tokens
    assert np.isfinite(score([make_model(4)], ["m"], plan.windows, batch_tokens=512)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_c7_nan_is_a_failed_result(value: float) -> None:
    model = make_model(2)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = value
    cut = list(windows(corpus_of([5, 6, 7, 8]), window=8, stride=8, bos="document"))
    with pytest.raises(HeadfoldError, match="broken/dir: log-likelihood of document 1 is nan") as caught:
        score([model], ["broken/dir"], cut, batch_tokens=8)
    assert caught.value.exit_code == 1


def test_c7_a_token_of_probability_zero_is_a_failed_result() -> None:
    model = make_model(2)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(320))
    with torch.no_grad():
        model.lm_head.bias[7] = -math.inf
    cut = list(windows(corpus_of([5, 6, 7, 8]), window=8, stride=8, bos="document"))
    with pytest.raises(HeadfoldError, match="is -inf"):
        score([model], ["m"], cut, batch_tokens=8)


# ---------------------------------------------------------------------------------------------------------- comparison


def compared(plan: Any, log_likelihoods: np.ndarray, converted: int | None = 1):
    roles = ["before", "converted", "after"][: len(log_likelihoods)]
    return compare(plan, roles, log_likelihoods, converted=converted, bootstrap_samples=500, seed=0)


def test_changes_and_recovered_share(text: Path) -> None:
    """Converting adds 0.5 nats to each token, uptraining takes 0.4 of them away: 80 % is won back."""
    plan = plan_of(text)
    sizes = np.array([len(each.targets) for each in plan.windows])
    noise = np.random.default_rng(0).normal(3, 0.5, len(sizes))
    losses = np.stack([noise, noise + 0.5, noise + 0.1]) * sizes
    section, recovered = compared(plan, -losses)
    assert (section.unit, section.num_units) == ("document", 40)
    assert section.num_tokens == sizes.sum()
    assert section.after / section.before == pytest.approx(math.exp(0.1))
    assert [change.log_ratio for change in section.changes] == pytest.approx([0.5, 0.1])
    # Every token of every document changed alike, so nothing is uncertain.
    assert section.changes[1].log_ratio_standard_error == pytest.approx(0, abs=1e-9)
    assert section.changes[1].ratio.low == pytest.approx(math.exp(0.1)) == section.changes[1].ratio.high
    assert recovered is not None and recovered.value == pytest.approx(0.8)


def test_interval_of_the_ratio_is_that_of_paired_differences(text: Path) -> None:
    """What makes a document hard for both models cancels: the interval is far narrower than the spread of the text."""
    plan = plan_of(text)
    sizes = np.array([len(each.targets) for each in plan.windows])
    generator = np.random.default_rng(0)
    hard = generator.normal(3, 1.0, len(sizes))
    losses = np.stack([hard, hard + generator.normal(0.2, 0.02, len(sizes))]) * sizes
    section, recovered = compared(plan, -losses, converted=1)
    ratio = section.changes[0].ratio
    assert recovered is None  # nothing was uptrained
    assert ratio.low is not None and ratio.high is not None
    assert ratio.low < math.exp(0.2) < ratio.high and ratio.high - ratio.low < 0.03
    error = section.changes[0].log_ratio_standard_error
    assert error == pytest.approx((math.log(ratio.high) - math.log(ratio.low)) / 2 / 1.96, rel=0.25)


def test_a_conversion_that_cost_nothing_has_no_recovered_share(text: Path) -> None:
    plan = plan_of(text)
    sizes = np.array([len(each.targets) for each in plan.windows])
    assert compared(plan, -np.stack([3.0 * sizes, 2.9 * sizes, 2.8 * sizes]))[1] is None


def test_few_documents_are_resampled_by_window(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(sentence(0, 400))
    unit, units = sampling_units(plan_of(path))
    assert unit == "window" and len(set(units)) == len(units) > 3


def test_each_of_several_texts_has_its_own_perplexity(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(sentence(0, 100))
    second.write_text(sentence(1, 30))
    plan = plan_scoring(EvalSettings(text=[str(first), str(second)]), [("m", make_tokenizer())], POSITIONS)
    source = np.array([plan.corpus.documents[each.document].source for each in plan.windows])
    sizes = np.array([len(each.targets) for each in plan.windows])
    losses = np.where(source == 0, 2.0, 4.0) * sizes
    section, _ = compared(plan, -np.stack([losses, losses]))
    assert [each.name for each in section.by_text] == ["a.txt", "b.txt"]
    assert [each.per_token["before"] for each in section.by_text] == pytest.approx([math.exp(2), math.exp(4)])
