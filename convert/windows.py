"""Calibration text as windows of token ids.

Shapes in one letter code: W windows, T tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headfold.convert.errors import RefusedError
from headfold.convert.families import attention_config
from headfold.convert.texts import load_tokenizer, read_documents

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint

_NUM_TOKENS = 65536
_LENGTH = 512

_CHARACTERS_PER_TOKEN = 8
"""More than text of any common language has, so that a window's characters hold its tokens."""

_READ_AHEAD = 16
"""How many times the text of the windows is read at most, to spread them over it."""


def read_windows(
    checkpoint: Checkpoint, source: str, *, num_tokens: int | None = None, trust_remote_code: bool = False
) -> Tensor:
    """Windows (W, T) of a text or data set, by the checkpoint's own tokenizer: T = 512, or the model's context if less.

    num_tokens: 65,536 by default. Raises RefusedError if there is no tokenizer, or less than one window of text.
    """
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=trust_remote_code)
    context = attention_config(checkpoint.config).text.get("max_position_embeddings")
    length = min(_LENGTH, context) if isinstance(context, int) else _LENGTH
    return calibration_windows(read_documents(source), tokenizer, num_tokens=num_tokens or _NUM_TOKENS, length=length)


def calibration_windows(documents: Iterable[str], tokenizer: Any, *, num_tokens: int, length: int) -> Tensor:
    """Windows (W, T) of token ids, T = length, for num_tokens (rounded up) or as many as there are.

    The windows are spread evenly over the text, of which at most 16 times what they need is read, and only their own
    text is tokenised. Documents are joined by the end-of-text token; every window starts with the beginning-of-text
    token where the tokenizer puts one of its own accord. Raises RefusedError if the text does not fill one window.
    """
    num_windows = math.ceil(num_tokens / length)
    segment = length * _CHARACTERS_PER_TOKEN
    text = _Text(documents, num_windows * segment * _READ_AHEAD, tokenizer)
    prefix = _prefix(tokenizer)
    length -= len(prefix)
    if text.num_characters >= num_windows * segment:
        starts = [number * text.num_characters // num_windows for number in range(num_windows)]
        windows = [text.tokens(start, start + segment)[:length] for start in starts]
    else:
        ids = text.tokens(0, text.num_characters)
        windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    windows = [window for window in windows if len(window) == length]
    num_windows = min(num_windows, len(windows))
    windows = [windows[number * len(windows) // num_windows] for number in range(num_windows)]
    if not windows:
        raise RefusedError(
            f"the calibration text is too short: {text.num_characters:,} characters do not fill one window of "
            f"{length + len(prefix)} tokens"
        )
    return torch.tensor([prefix + window for window in windows])


class _Text:
    """The first characters of documents, as one text that is tokenised where it is needed."""

    def __init__(self, documents: Iterable[str], num_characters: int, tokenizer: Any):
        self._documents = list(_first_characters(documents, num_characters))
        self._ends = list(accumulate(map(len, self._documents)))
        self._tokenizer = tokenizer
        self.num_characters = self._ends[-1] if self._ends else 0

    def tokens(self, start: int, stop: int) -> list[int]:
        """The token ids of characters start..stop-1, without the word that `start` falls into."""
        eos = self._tokenizer.eos_token_id
        ids: list[int] = []
        for number in range(bisect_right(self._ends, start), len(self._documents)):
            document = self._documents[number]
            first = self._ends[number] - len(document)
            if first >= stop:
                break
            piece = document[max(0, start - first) : stop - first]
            if first < start and not document[start - first - 1].isspace():
                piece = piece[len(piece.split(maxsplit=1)[0]) :] if piece.strip() and not piece[0].isspace() else piece
            ids += self._tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
            if self._ends[number] <= stop and eos is not None:
                ids.append(eos)
        return ids


def _first_characters(documents: Iterable[str], num_characters: int) -> Iterator[str]:
    for text in documents:
        yield text[:num_characters]
        num_characters -= len(text)
        if num_characters <= 0:
            return


def _prefix(tokenizer: Any) -> list[int]:
    first = tokenizer("a").input_ids[:1]
    return first if first and first[0] == tokenizer.bos_token_id else []
