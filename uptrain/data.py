"""Text -> token ids -> one flat file of tokens that is read as packed rows of any length.

The file holds every document, end to end, with an end-of-text token between documents. Row i of length T is the tokens
i*T .. i*T + T: consecutive rows share one token, so that every token but the first is predicted exactly once and
what is left of one row is carried into the next. The order of the rows follows from the seed and the step alone.

Shapes in one letter code: B rows, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headfold.convert.checkpoint import io_errors, sync_directory
from headfold.convert.errors import RefusedError
from headfold.convert.texts import DocumentStream, read_documents, text_fingerprint

IGNORED = -100
"""The label of a position that does not count."""

FORMAT_VERSION = 1
PIECE_CHARACTERS = 1 << 19
OVERLAP_CHARACTERS = 1 << 12

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
)


@dataclass(frozen=True)
class Batch:
    """Rows ready for a model: input_ids, labels (B, T), and position_ids (B, T) if documents are isolated."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None

    def to(self, device: torch.device) -> Batch:
        positions = self.position_ids
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            None if positions is None else positions.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class PackedFile:
    """What is known about a file of tokens: the content of the .json file beside it."""

    sha256: str
    """Of the tokens: the fingerprint to which a resumed run is held."""
    num_tokens: int
    num_documents: int
    num_skipped: int
    """Empty, blank, null or missing texts."""
    dtype: str
    first_token: int
    """The token with which every document begins."""
    last_token: int | None
    """The token with which it ends, or None where the beginning of the next document ends it."""


class PackedRows:
    """The rows of a packed file. Reads only what is asked for."""

    def __init__(self, path: Path, sequence_length: int, *, isolate_documents: bool) -> None:
        self.file = PackedFile(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
        self.sequence_length = sequence_length
        self.isolate_documents = isolate_documents
        self._tokens = np.memmap(path, dtype=self.file.dtype, mode="r", shape=(self.file.num_tokens,))

    def __len__(self) -> int:
        return -(-(self.file.num_tokens - 1) // self.sequence_length)

    def batch(self, rows: Sequence[int | None]) -> Batch:
        """The rows of these numbers. None is a row that counts for nothing: it evens out the work between processes.

        The last row of the file may end early; what it lacks is padded and ignored.
        """
        length = self.sequence_length
        tokens = np.full((len(rows), length + 1), self.file.first_token, dtype=np.int64)
        labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
        for place, row in enumerate(rows):
            if row is not None:
                stored = self._tokens[row * length : row * length + length + 1]
                tokens[place, : len(stored)] = stored
                labels[place, : len(stored) - 1] = stored[1:]
        inputs = tokens[:, :-1].copy()
        positions = None
        if self.isolate_documents:
            positions = torch.from_numpy(document_positions(inputs, self.file.first_token))
            if self.file.last_token is not None:  # nothing in a finished document tells of the next one
                labels[labels == self.file.first_token] = IGNORED
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), positions)


def document_positions(tokens: np.ndarray, first_token: int) -> np.ndarray:
    """Each token's position (B, T) in its document; a row that begins inside a document counts from its own start.

    A position that does not follow on the one before it is also how transformers recognises a packed document, which
    it then isolates in its attention masks (masking_utils.find_packed_sequence_indices).
    """
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    starts = np.where(tokens == first_token, places, 0)
    return places - np.maximum.accumulate(starts, axis=1)


def rows_of_step(step: int, *, batch_rows: int, num_rows: int, seed: int) -> list[int]:
    """The rows of a global step, a function of (seed, step) alone. Every epoch visits every row once, in its own order.

    Built on the raw output of PCG64 and a stable sort, which numpy keeps the same in every version.
    """
    drawn = range(step * batch_rows, (step + 1) * batch_rows)
    return [int(_epoch_order(num_rows, seed, index // num_rows)[index % num_rows]) for index in drawn]


@lru_cache(maxsize=2)  # a step may touch two epochs
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(generator.random_raw(num_rows), kind="stable")


def slice_of_rank(rows: Sequence[int], rank: int, num_ranks: int) -> list[int | None]:
    """The part of a global batch that one rank computes. All parts are of one length; None fills up the last ones."""
    length = -(-len(rows) // num_ranks)
    part: list[int | None] = list(rows[rank * length : (rank + 1) * length])
    return part + [None] * (length - len(part))


# ---------------------------------------------------------------------------------------------------------- packing


def pack(
    sources: Sequence[str],
    folder: Path,
    tokenizer: Any,
    *,
    name: str,
    text_field: str = "text",
    split: str = "train",
    sequence_length: int,
    vocab_size: int,
    max_rows: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Tokenize `sources` into folder/<name>-<key>.bin, or find it there from an earlier run. Returns its path.

    The key stands for the texts' content, the tokenizer and `max_rows`. `progress` gets the number of tokens written.
    Raises RefusedError for texts that cannot be read, that hold less than one row, or that the model has no
    embeddings for.
    """
    first_token, last_token = document_tokens(tokenizer)
    max_tokens = None if max_rows is None else max_rows * sequence_length + 1
    key = hashlib.sha256(
        json.dumps(
            {
                "version": FORMAT_VERSION,
                "texts": [text_fingerprint(source, split=split) for source in sources],
                "field": text_field,
                "tokenizer": tokenizer_fingerprint(tokenizer),
                "tokens": [first_token, last_token, max_tokens],
            }
        ).encode()
    ).hexdigest()
    path = folder / f"{name}-{key[:16]}.bin"
    if not path.with_suffix(".json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        streams = [read_documents(source, text_field=text_field, split=split) for source in sources]
        with io_errors(path, "write"), _parallel_tokenizers():
            _write_packed(path, streams, tokenizer, first_token, last_token, vocab_size, max_tokens, progress)
    num_tokens = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["num_tokens"]
    if num_tokens <= sequence_length:
        raise RefusedError(
            f"{', '.join(sources)}: {num_tokens} tokens in all, less than one row of {sequence_length + 1} "
            "(sequence_length and the token that follows); give more text or a smaller sequence_length"
        )
    return path


def _write_packed(
    path: Path,
    streams: list[DocumentStream],
    tokenizer: Any,
    first_token: int,
    last_token: int | None,
    vocab_size: int,
    max_tokens: int | None,
    progress: Callable[[int], None] | None,
) -> None:
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    digest = hashlib.sha256()
    num_tokens = 0
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for ids in _token_stream(streams, tokenizer, first_token, last_token):
            if max_tokens is not None:
                ids = ids[: max_tokens - num_tokens]
            if ids and max(ids) >= vocab_size:
                raise RefusedError(
                    f"the tokenizer gives token {max(ids)}, but the model has embeddings for {vocab_size} tokens only"
                )
            data = np.asarray(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            num_tokens += len(ids)
            if progress is not None:
                progress(num_tokens)
            if num_tokens == max_tokens:
                break
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    written = PackedFile(
        sha256=digest.hexdigest(),
        num_tokens=num_tokens,
        num_documents=sum(stream.num_documents for stream in streams),
        num_skipped=sum(stream.num_skipped for stream in streams),
        dtype=dtype.name,
        first_token=first_token,
        last_token=last_token,
    )
    # The .json file says that the .bin file is complete, so it comes last.
    partial.write_text(json.dumps(asdict(written), indent=2) + "\n", encoding="utf-8")
    partial.replace(path.with_suffix(".json"))
    sync_directory(path.parent)


@contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    """Tokenize on all cores. Elsewhere the command turns that off, because it does not go with forks."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def document_tokens(tokenizer: Any) -> tuple[int, int | None]:
    """The token that begins every document, and the one that ends it (None where the next one's beginning does).

    A tokenizer that puts a beginning-of-text token before a text gives `<s> text </s>`. One that does not gives
    `<eos> text`, as GPT-2's lineage was trained: the end-of-text token separates, and every document has one before it.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise RefusedError(f"{tokenizer.name_or_path}: its tokenizer has no end-of-text token (eos_token)")
    begin = tokenizer.bos_token_id
    if begin is not None and begin != end and tokenizer("a", verbose=False)["input_ids"][0] == begin:
        return begin, end
    return end, None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 (hex) of the tokenizer's files."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        file = Path(tokenizer.name_or_path) / name
        if file.is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _token_stream(
    streams: list[DocumentStream], tokenizer: Any, first_token: int, last_token: int | None
) -> Iterator[list[int]]:
    """The tokens of all documents, one document of each source in turn."""
    end = [] if last_token is None else [last_token]
    for batch in _batches(_in_turn(streams)):
        if len(batch) > 1 or len(batch[0]) <= PIECE_CHARACTERS:
            encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                yield [first_token, *ids, *end]
        else:
            yield [first_token]
            yield from tokenize_in_pieces(tokenizer, batch[0])
            yield end
    if last_token is None:
        yield [first_token]


def _in_turn(streams: Sequence[Iterator[str]]) -> Iterator[str]:
    active = list(streams)
    while active:
        for stream in list(active):
            try:
                yield next(stream)
            except StopIteration:
                active.remove(stream)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents for the tokenizer: of bounded size, and a very long document by itself."""
    batch: list[str] = []
    size = 0
    for document in documents:
        if batch and size + len(document) > PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


@dataclass
class _Window:
    """The tokens of text[start:end], with their places in the whole text."""

    end: int
    ids: list[int]
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Any, text: str, start: int, end: int) -> _Window:
        encoded = tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        starts, ends = [start + first for first, _ in offsets], [start + last for _, last in offsets]
        return cls(min(end, len(text)), encoded["input_ids"], starts, ends)

    def between(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Id, start and end of the tokens that lie within low .. high."""
        first, last = bisect_left(self.starts, low), bisect_left(self.starts, high)
        while last > first and self.ends[last - 1] > high:
            last -= 1
        return list(zip(self.ids[first:last], self.starts[first:last], self.ends[first:last], strict=True))


def tokenize_in_pieces(
    tokenizer: Any, text: str, *, piece: int = PIECE_CHARACTERS, overlap: int = OVERLAP_CHARACTERS
) -> Iterator[list[int]]:
    """The token ids of one long text, piece by piece, in memory that does not grow with the text.

    Neighbouring windows of the text overlap, and a cut is made only inside a stretch of half the overlap in which both
    windows, whose edges are far from it, give the same tokens at the same places. Where they do not agree the window
    grows until they do. A tokenizer that does not tell the places of its tokens gets the text as a whole.
    """
    if not tokenizer.is_fast:
        yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return
    start = cut = 0
    window = _Window.of(tokenizer, text, start, piece)
    while window.end < len(text):
        next_start = window.end - overlap
        following = _Window.of(tokenizer, text, next_start, next_start + piece)
        next_cut = _agreed_cut(window, following, next_start + overlap // 4, window.end - overlap // 4)
        if next_cut is None:
            window = _Window.of(tokenizer, text, start, window.end + piece)
            continue
        yield window.ids[bisect_left(window.starts, cut) : bisect_left(window.starts, next_cut)]
        window, start, cut = following, next_start, next_cut
    yield window.ids[bisect_left(window.starts, cut) :]


def _agreed_cut(left: _Window, right: _Window, low: int, high: int) -> int | None:
    """A place between low and high where a token begins in both windows, if they agree on all tokens in between."""
    tokens = left.between(low, high)
    if tokens != right.between(low, high):
        return None
    for (_, _, end), (_, start, _) in list(pairwise(tokens))[len(tokens) // 2 :]:
        if end <= start:  # bytes of one character share its place: no cut between them
            return start
    return None
