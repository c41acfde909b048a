"""The pool of KV pages: which are free. What a page holds is the tree's and the tables' business."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Free list over pages 1 .. num_pages-1; page 0 is the reserved zero page that pads short tiles.

    Pages come back most recently freed first, so that a small working set stays small.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs two pages of one token at least, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = bytearray(b"\x00" + b"\x01" * (num_pages - 1))

    @property
    def capacity(self) -> int:
        """Pages that can hold tokens."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Take `count` pages. The caller has made room: too few free pages is a ValueError."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked, {len(self._free)} free")
        if count <= 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Give pages back. Giving page 0, or a page that is free already, is a ValueError."""
        for page in pages:
            if page <= 0 or self._is_free[page]:
                raise ValueError(f"page {page} is not in use")
            self._is_free[page] = 1
            self._free.append(page)

    def free_set(self) -> set[int]:
        """The free pages, for integrity checks."""
        return set(self._free)
