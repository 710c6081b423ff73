"""Text as windows of tokens: what is scored, on what context, each token once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headfold.convert.errors import RefusedError
from headfold.convert.texts import read_documents, text_fingerprint

from .loading import quiet
from .schema import TextRecord
from .settings import EvalSettings

DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class Document:
    """A text as tokens, without any special token in front. `source` is the index of the text that it is from."""

    source: int
    token_ids: list[int]


@dataclass(frozen=True)
class Corpus:
    """What is scored. `prefix` is the token before each document, None where the tokenizer has neither BOS nor EOS."""

    documents: list[Document]
    texts: list[TextRecord]
    prefix: int | None
    prefix_token: str | None
    sha256: str


@dataclass(frozen=True)
class Window:
    """One forward pass: input ids, and the targets that its last len(targets) positions predict."""

    document: int
    input_ids: list[int]
    targets: list[int]


def read_corpus(settings: EvalSettings, tokenizer: Any) -> Corpus:
    """Reads and tokenises settings.text. BOS is kept out here and put in by `windows`, once, by one rule.

    Raises RefusedError for text that cannot be read.
    """
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    documents, texts, digest = [], [], hashlib.sha256()
    for index, source in enumerate(settings.text):
        stream = read_documents(source, text_field=settings.text_field, split=settings.text_split)
        num_documents = num_tokens = num_words = num_bytes = 0
        for text in stream:
            ids = encode(tokenizer, text)
            limit = settings.max_text_tokens
            over_limit = limit is not None and num_tokens + len(ids) > limit
            if limit is not None and over_limit:
                text = text[: len(text) * (limit - num_tokens) // len(ids)].rpartition(" ")[0]
                ids = encode(tokenizer, text)
            if prefix is not None and ids[:1] == [prefix]:  # the text spells it out: once is enough
                ids = ids[1:]
            if ids:
                documents.append(Document(index, ids))
                num_documents += 1
                num_tokens += len(ids)
                num_words += len(text.split())
                num_bytes += len(text.encode())
                digest.update(hashlib.sha256(text.encode()).digest())
            if over_limit:
                break
        texts.append(
            TextRecord(
                name=Path(source).name,
                sha256=text_fingerprint(source, split=settings.text_split),
                num_documents=num_documents,
                num_skipped=stream.num_skipped,
                num_tokens=num_tokens,
                num_words=num_words,
                num_bytes=num_bytes,
            )
        )
    if not documents:
        raise RefusedError(f"{', '.join(settings.text)}: no tokens to score.")
    name = None if prefix is None else str(tokenizer.convert_ids_to_tokens(prefix))
    return Corpus(documents, texts, prefix, name, digest.hexdigest())


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens, however long the text is."""
    with quiet():
        return tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]


def windows(corpus: Corpus, *, window: int, stride: int, bos: str) -> Iterator[Window]:
    """Cuts documents into windows of at most `window` input tokens, so that each token is a target exactly once.

    The first window of a document scores all its tokens, each later one the next `stride`; the last one reaches back
    for a full window of context. With stride = window and bos = "document" this is lm-eval's loglikelihood_rolling
    with context_len 1 (get_rolling_token_windows). bos = "window" puts the prefix before every window instead.
    Without a prefix token the first token of a document is context only.
    """
    for index, document in enumerate(corpus.documents):
        tokens, prefix = document.token_ids, corpus.prefix
        if prefix is None:
            prefix, tokens = tokens[0], tokens[1:]
        done = min(window, len(tokens))
        if done:
            yield Window(index, [prefix, *tokens[: done - 1]], tokens[:done])
        while done < len(tokens):
            end = min(done + stride, len(tokens))
            if bos == "window" and corpus.prefix is not None:
                context = [prefix, *tokens[end - window : end - 1]]
            else:
                context = tokens[end - window - 1 : end - 1]
            yield Window(index, context, tokens[done:end])
            done = end


@dataclass(frozen=True)
class ScoringPlan:
    """Everything that decides which tokens are scored on what context; the same for all models of a report."""

    corpus: Corpus
    windows: list[Window]
    window: int
    stride: int
    bos: Literal["document", "window", "none"]


def plan_scoring(
    settings: EvalSettings, tokenizers: Sequence[tuple[str, Any]], max_positions: int | None
) -> ScoringPlan:
    """Reads the text and cuts it into windows. tokenizers: (name for messages, tokenizer) of each model.

    Raises RefusedError where the tokenizers differ on this very text, since perplexities per token could not be
    compared; where the window is longer than max_positions, the least of the models' position limits; or where the
    stride is longer than the window, which would leave tokens out.
    """
    window = settings.window or min(DEFAULT_WINDOW, max_positions or DEFAULT_WINDOW)
    stride = settings.stride or window
    if max_positions is not None and window > max_positions:
        raise RefusedError(
            f"window: {window} tokens are more than the model's max_position_embeddings of {max_positions}."
        )
    if stride > window:
        raise RefusedError(f"stride: {stride} tokens are more than the window of {window}; tokens would be left out.")
    (first, tokenizer), *others = tokenizers
    corpus = read_corpus(settings, tokenizer)
    for name, other in others:
        _refuse_unlike(first, corpus, name, read_corpus(settings, other))
    return ScoringPlan(
        corpus,
        list(windows(corpus, window=window, stride=stride, bos=settings.bos)),
        window,
        stride,
        "none" if corpus.prefix is None else settings.bos,
    )


def _refuse_unlike(first: str, corpus: Corpus, second: str, other: Corpus) -> None:
    if corpus.prefix_token != other.prefix_token or corpus.prefix != other.prefix:
        raise RefusedError(
            f"{first} begins documents with {corpus.prefix_token} ({corpus.prefix}), {second} with "
            f"{other.prefix_token} ({other.prefix}): give both the same tokenizer."
        )
    if corpus.documents != other.documents:
        counts = [sum(len(document.token_ids) for document in each.documents) for each in (corpus, other)]
        raise RefusedError(
            f"{first} and {second} tokenise the text differently ({counts[0]} and {counts[1]} tokens): perplexities "
            "per token cannot be compared. Give both the same tokenizer."
        )
