"""Which page of a paged KV cache belongs to whom. Bookkeeping on the host: no tensor is touched here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .errors import KernelError


class PagePool:
    """Hands out page ids 0..num_pages - 1, counts who holds each, and remembers what is in full pages.

    A page that was published (`publish`) can be found again by the tokens from the start of the sequence to its end,
    also
    after its last holder has let it go: it stays until its place is needed, the longest unused first. Content is
    compared token by token, not by hash, so that a hit is never wrong.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise KernelError(f"num_pages and page_size must be at least 1, found {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        # A published page is a node: its parent's node (0 for none) and its own tokens identify it.
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._node_of: dict[int, int] = {}
        self._num_nodes = 0
        self._unused: OrderedDict[int, None] = OrderedDict()  # published, held by nobody, longest unused first

    @property
    def num_available(self) -> int:
        """Pages that `take` can still give: free ones, and published ones that nobody holds."""
        return len(self._free) + len(self._unused)

    def take(self) -> int:
        """A page with one holder. Raises KernelError if all are held."""
        if self._free:
            page = self._free.pop()
        elif self._unused:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            del self._node_of[page]
        else:
            raise KernelError(
                f"all {self.num_pages} pages of {self.page_size} tokens are in use: free a sequence, or make the cache "
                "with more pages"
            )
        self._num_holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder."""
        self._num_holders[page] += 1
        self._unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each page of a sequence, in its order."""
        # Last first: a page is of no use without those before it, and should give way before them.
        for page in reversed(pages):
            assert self._num_holders[page] > 0, f"page {page} is held by nobody"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                if page in self._key_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def must_copy(self, page: int) -> bool:
        """Whether writing into the page would change what others see: it is shared, or can be found by its tokens."""
        return self._num_holders[page] > 1 or page in self._key_of

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Lets the full pages of a sequence be found by its tokens."""
        parent = 0
        for i, page in enumerate(pages[: len(tokens) // self.page_size]):
            key = (parent, tuple(tokens[i * self.page_size : (i + 1) * self.page_size]))
            if key not in self._page_of and page not in self._key_of:
                self._num_nodes += 1
                self._page_of[key] = page
                self._key_of[page] = key
                self._node_of[page] = self._num_nodes
            if key not in self._page_of:
                return
            parent = self._node_of[self._page_of[key]]

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The published pages that hold the longest possible start of `tokens`. The caller must `hold` them."""
        parent, pages = 0, []
        for i in range(len(tokens) // self.page_size):
            page = self._page_of.get((parent, tuple(tokens[i * self.page_size : (i + 1) * self.page_size])))
            if page is None:
                break
            pages.append(page)
            parent = self._node_of[page]
        return pages
