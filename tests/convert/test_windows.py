"""Calibration windows: as many tokens as asked for, spread over the text, every document in its place."""

import pytest

from headfold.convert.errors import RefusedError
from headfold.convert.windows import calibration_windows


class Words:
    """A tokenizer whose tokens are the numbers that a text is made of."""

    eos_token_id = 0
    bos_token_id = 1

    def __init__(self, adds_bos: bool = False):
        self.adds_bos = adds_bos
        self.num_characters = 0

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True):
        self.num_characters += len(text)
        ids = [int(word) if word.isdigit() else 7 for word in text.split()]
        self.input_ids = [1, *ids] if add_special_tokens and self.adds_bos else ids
        return self


def numbers(first: int, count: int) -> str:
    return " ".join(str(number) for number in range(first, first + count))


def test_short_text_is_cut_into_windows_with_documents_joined():
    windows = calibration_windows([numbers(10, 6), numbers(20, 4)], Words(), num_tokens=100, length=4)
    assert windows.tolist() == [[10, 11, 12, 13], [14, 15, 0, 20], [21, 22, 23, 0]]


def test_fewer_windows_than_there_are_are_spread():
    windows = calibration_windows([numbers(10, 16)], Words(), num_tokens=8, length=4)
    assert windows.tolist() == [[10, 11, 12, 13], [18, 19, 20, 21]]


def test_long_text_is_sampled_evenly_and_only_the_windows_are_tokenised():
    tokenizer = Words()
    text = numbers(100_000, 600)
    windows = calibration_windows([text], tokenizer, num_tokens=40, length=10)
    assert windows.shape == (4, 10)
    assert [abs(row[0] - 100_000 - 150 * number) <= 1 for number, row in enumerate(windows.tolist())] == [True] * 4
    for row in windows.tolist():
        assert row == list(range(row[0], row[0] + 10))
    assert tokenizer.num_characters < len(text) / 10


def test_windows_cross_documents():
    documents = [numbers(100_000 + 10 * number, 3) for number in range(600)]
    for row in calibration_windows(documents, Words(), num_tokens=30, length=10).tolist():
        first = next(i for i, token in enumerate(row) if token == 0)
        assert [i for i, token in enumerate(row) if token == 0] == list(range(first, 10, 4))


def test_the_text_is_not_read_beyond_what_the_windows_can_use():
    def documents():
        for _ in range(1000):
            yield numbers(100_000, 1000)
        raise AssertionError("read to the end")

    assert calibration_windows(documents(), Words(), num_tokens=40, length=10).shape == (4, 10)


def test_every_window_starts_as_the_tokenizer_starts_a_text():
    windows = calibration_windows([numbers(10, 6)], Words(adds_bos=True), num_tokens=100, length=3)
    assert windows.tolist() == [[1, 10, 11], [1, 12, 13], [1, 14, 15]]


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(RefusedError, match="do not fill one window of 64 tokens"):
        calibration_windows([numbers(10, 6)], Words(), num_tokens=100, length=64)
