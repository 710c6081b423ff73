"""The page pool against a model of it that remembers everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headfold.kernels import KernelError
from headfold.kernels.paging import PagePool


def test_take_release_and_run_out():
    pool = PagePool(3, 4)
    pages = [pool.take() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2] and pool.num_available == 0
    with pytest.raises(KernelError, match="all 3 pages of 4 tokens are in use"):
        pool.take()
    pool.hold(pages[0])
    pool.release(pages)
    assert pool.num_available == 2 and pool.must_copy(pages[1]) is False
    pool.release([pages[0]])
    assert pool.num_available == 3
    with pytest.raises(KernelError, match="at least 1, found 0 and 4"):
        PagePool(0, 4)


def test_a_prefix_outlives_its_request_until_its_place_is_needed():
    pool = PagePool(4, 2)
    tokens = [5, 6, 7, 8, 9]
    pages = [pool.take() for _ in range(3)]
    pool.publish(tokens, pages)
    assert pool.must_copy(pages[0]) and not pool.must_copy(pages[2])
    pool.release(pages)
    assert pool.num_available == 4
    assert pool.find(tokens) == pages[:2]
    assert pool.find([5, 6, 7, 0]) == pages[:1]
    assert pool.find([0, 6, 7, 8]) == []
    # Free pages are taken first, then the end of the prefix before its beginning.
    taken = [pool.take() for _ in range(3)]
    assert pages[1] in taken and pages[0] not in taken
    assert pool.find(tokens) == pages[:1]


def test_the_same_tokens_after_another_start_are_another_page():
    pool = PagePool(8, 2)
    first, second = ([pool.take(), pool.take()] for _ in range(2))
    pool.publish([1, 2, 9, 9], first)
    pool.publish([3, 4, 9, 9], second)
    assert pool.find([1, 2, 9, 9]) == first and pool.find([3, 4, 9, 9]) == second
    # Published again from other pages: the first stays.
    third = [pool.take(), pool.take()]
    pool.publish([1, 2, 9, 9], third)
    assert pool.find([1, 2, 9, 9]) == first and not pool.must_copy(third[0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=25))
def test_any_sequence_of_requests(requests):
    """Sequences come, begin with what is found, publish and go. No page has two contents, and none is lost."""
    pool = PagePool(8, 2)
    running: dict[int, tuple[list[int], list[int]]] = {}
    content: dict[int, tuple[int, ...]] = {}  # of a page: all tokens from the start of its sequence to its end
    for slot, tokens in requests:
        if slot in running:
            old_tokens, old_pages = running.pop(slot)
            pool.publish(old_tokens, old_pages)
            pool.release(old_pages)
        pages = pool.find(tokens)
        for i, page in enumerate(pages):
            assert content[page] == tuple(tokens[: 2 * (i + 1)])
            pool.hold(page)
        try:
            while len(pages) * 2 < len(tokens):
                page = pool.take()
                assert not any(page in others for _, others in running.values())
                pages.append(page)
                content[page] = tuple(tokens[: 2 * len(pages)])
        except KernelError:
            assert pool.num_available == 0
            pool.release(pages)
            continue
        running[slot] = (tokens, pages)
        held = {page for _, pages in running.values() for page in pages}
        assert pool.num_available == 8 - len(held)
